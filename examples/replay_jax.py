"""Replay the stochastic rounding of Transformer Engine (JAX) from the key of its stream ``sr_rng``.

Needs jax.  Run:  python examples/replay_jax.py

In a run of your own the key is what the module's ``make_rng("sr_rng")`` returned in that step, and x is the gradient
that was quantized.
"""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw import rng


def main() -> int:
    key = jax.random.key(7)
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(ml_dtypes.bfloat16)

    state = rng.jax_state(key)
    seed, offset = rng.jax_seed_offset(state)
    print(f"four uint32 of the key: {', '.join(f'0x{word:08X}' for word in state[0])}")
    print(f"seed 0x{seed:016X}, offset 0x{offset:016X}")

    # the CUDA kernels: rowwise without the transform, columnwise with it, both from this state
    launch = rng.jax_launch((seed, offset), x.shape)
    rowwise = nv.quantize(x, rounding="stochastic", rbits=launch.row)
    columnwise = nv.quantize(x, axis=0, rht=nv.RHT(), rounding="stochastic", rbits=launch.column)
    print(f"rowwise: kernel {launch.row.kernel}, first codes {rowwise.codes[0, :8]}")
    print(f"columnwise: kernel {launch.column.kernel}, first codes {columnwise.codes[0, :8]}")

    # no Philox here: the pure-JAX quantizer (no GPU, or NVTE_JAX_CUSTOM_CALLS=false) draws uniforms from a key
    uniforms = rng.jax_uniforms(state, x.shape)
    pure = nv.quantize(x, rounding="stochastic", rbits=uniforms, arithmetic="te-jax")
    print(f"pure JAX: {np.count_nonzero((pure.codes & 7) == 3)} of {x.size} codes are 1.5: its grid has none")

    # rowwise and columnwise words coincide in part
    row = launch.row.words(x.shape, -1).reshape(-1, 4)
    column = launch.column.words(x.shape, 0).reshape(-1, 4)
    shared = {frozenset(w) for w in row.tolist()} & {frozenset(w) for w in column.tolist()}
    print(f"blocks whose words serve both directions: {len(shared)} of {len(row)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Cases that planted faults called for: random words, and sums in which the transform's order of addition shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends.base import Case

Array = np.ndarray[Any, Any]
F = np.float32


def cases() -> Iterator[Case]:
    """All of them; each suite has them."""
    yield from _stochastic()
    yield from _uniforms()
    yield _cancellation()


def _raw(seed: int, count: int) -> Array:
    """Uniform 32-bit words; PCG64's raw stream is part of NumPy's promise."""
    return np.random.PCG64(seed).random_raw(count) >> np.uint64(32)


def _normal(seed: int, shape: tuple[int, int]) -> Array:
    """bfloat16 values of twelve uniform words less their mean, exact until one rounding."""
    words = _raw(seed, 12 * shape[0] * shape[1]).reshape(12, *shape)
    return ((words.sum(0).astype(np.float64) - 6 * 2.0**32) * 2.0**-32).astype(F).astype(ml_dtypes.bfloat16)


def _stochastic() -> Iterator[Case]:
    """Both directions of normal data, with the words of each kernel that makes both in one launch."""
    x = _normal(2024, (128, 128))
    for kernel, block in (("tuned-1d", (1, 16)), ("2d", (16, 16)), ("vector-blockwise", (1, 16))):
        rng = nv.Philox(0x123456789ABCDEF, 4096, kernel, both=True)
        yield Case(
            f"stochastic/normal.bf16.{block[0]}x{block[1]}.both.{kernel}",
            "stochastic",
            x,
            block=block,
            directions="both",
            rounding="stochastic",
            data={"rng": rng, "rng_t": rng},
            hunts="random words: their mapping to elements, their offset, and the rounding itself",
        )


def _uniforms() -> Iterator[Case]:
    """Normal data with one float32 uniform an element, for rules that take those."""
    x = _normal(2025, (64, 128))
    uniforms = ((_raw(2026, x.size) >> np.uint64(8)).astype(F) * F(2.0**-24)).reshape(x.shape)
    yield Case(
        "stochastic/uniforms.bf16.1x16.row",
        "stochastic",
        x,
        rounding="stochastic",
        fields={"stochastic": "ideal"},
        data={"rng": uniforms},
        hunts="a grid without 1.5; comparisons of the uniform that are off by one",
    )


def _cancellation() -> Case:
    """Vectors of large values that cancel and leave the small ones to the order of the sum."""
    small = _normal(2027, (64, 64)).astype(F) * F(2.0**-18)
    large = np.repeat(_normal(2028, (8, 64)).astype(F), 8, axis=0)
    x = (large * np.where(np.arange(64) % 2, F(-1), F(1))[:, None]).astype(ml_dtypes.bfloat16)
    x[np.arange(64) % 16 >= 12] = small[np.arange(64) % 16 >= 12].astype(ml_dtypes.bfloat16)
    return Case(
        "hadamard/cancellation.bf16.1x16.col.rht",
        "hadamard",
        x,
        directions="col",
        rht_t=nv.RHT(sign_mask=0),
        hunts="the order and the width of the transform's sum",
    )

"""Matrices that bite, and the comparison by bits, shared by the tests of the core."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nvfp4ref import scalar
from nvfp4ref.arithmetic import Arithmetic

Array = NDArray[Any]
bfloat16 = np.dtype(ml_dtypes.bfloat16)

#: every bfloat16 and float16 number, and every float32 that is one of the former
BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(bfloat16)
FLOAT16 = np.arange(2**16, dtype=np.uint16).view(np.float16)
WIDENED = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)

NAN, INF = float("nan"), float("inf")
FLT_MAX = float(np.finfo(np.float32).max)
#: what a tensor amax may be besides the truth
AMAXES = (0.0, -0.0, INF, -INF, NAN, -3.0, 1e-40, 1.4e-45, 1.1754944e-38, 7.9e-36, 1e-3, 2.0, 2688.0, 1e30, FLT_MAX)


def bits(x: Any) -> Array:
    """The bit patterns of floats, so that −0, +0 and NaNs compare as what they are."""
    array: Array = np.asarray(x)
    return array if array.dtype.kind in "ui" else array.view(f"u{array.dtype.itemsize}")


def same_bits(found: Any, expected: Any) -> None:
    """Equal in shape, dtype and every bit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(bits(found), bits(expected), strict=True)


def around(values: Any, steps: int = 2) -> Array:
    """float32 values and their neighbours up to ``steps`` ulps away, of both signs."""
    values = np.asarray(values, np.float32)
    near = [values]
    for direction in (-np.inf, np.inf):
        at = values
        for _ in range(steps):
            at = np.nextafter(at, np.float32(direction))
            near.append(at)
    both = np.concatenate([a.reshape(-1) for a in near])
    return np.concatenate([both, -both])


def random(rows: int, columns: int, seed: int = 0) -> Array:
    """bfloat16-exact normal numbers: float32 normals hide most faults, their ties being rare."""
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return x.astype(bfloat16).astype(np.float32)


def ties() -> Array:
    """(126, 32): for each positive E4M3 value d, elements at every midpoint·d and one ulp to its sides.

    The first element is 6·d, so that a tensor amax of 2688 (S = 1) gives the block scale d.
    """
    d = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    near = around([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], 1)[:30].reshape(2, 15)
    first = np.full((2, 1), 6, np.float32)
    pattern = np.concatenate([first, near], axis=1).reshape(-1)
    x: Array = d[:, None] * pattern[None, :]
    return x


def scale_midpoints() -> Array:
    """(n, 16): block amaxes that put the block scale on an E4M3 midpoint or one ulp beside it, for A = 2688."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    mids = (codes[1:] + codes[:-1]) / 2
    amaxes = around(np.concatenate([mids, [456.0, 464.0, 512.0]]) * np.float32(6), 1)
    rest = np.random.default_rng(5).uniform(-1, 1, (amaxes.size, 16)).astype(bfloat16).astype(np.float32)
    x = rest * np.abs(amaxes)[:, None]
    x[np.arange(amaxes.size), np.arange(amaxes.size) % 16] = amaxes
    return x


def decades(rows: int, columns: int, seed: int = 1, low: int = -30, high: int = 10) -> Array:
    """Magnitudes over many powers of two, a different one each block, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    exponents = np.repeat(rng.integers(low, high, (rows, columns // 16)), 16, axis=1)
    x = np.ldexp(random(rows, columns, seed), exponents).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = 0.0
    x[rng.random(x.shape) < 0.05] = -0.0
    x[rng.random((rows, columns // 16)).repeat(16, axis=1) < 0.05] = 0.0
    return x


def every_class(rows: int, columns: int, seed: int = 2) -> Array:
    """float32 bit patterns of every class, NaN and Inf included, a class in a few blocks only."""
    rng = np.random.default_rng(seed)
    x = random(rows, columns, seed)
    special = np.array(
        [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF,
         0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80000000, 0x00000000, 0x00400000], np.uint32,
    ).view(np.float32)  # fmt: skip
    blocks = x.reshape(rows, columns // 16, 16)
    chosen = rng.random(blocks.shape[:2]) < 0.6
    count = int(chosen.sum())
    places = rng.integers(0, 16, (count, 2))
    touched = blocks[chosen]
    for k in range(2):
        touched[np.arange(count), places[:, k]] = rng.choice(special, count)
    blocks[chosen] = touched
    anything = rng.random(blocks.shape[:2]) < 0.1
    blocks[anything] = rng.integers(0, 2**32, (int(anything.sum()), 16), dtype=np.uint32).view(np.float32)
    return x


def slow(
    x: Array, ar: Arithmetic, block: tuple[int, int] = (1, 16), amax: Any = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and scale bytes of a matrix by the slow twin."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        rows = [[float(v) for v in row] for row in np.asarray(x).astype(np.float32)]
    if amax is not None:
        amax = [float(a) for a in np.asarray(amax, np.float32)] if np.ndim(amax) else float(np.float32(amax))
    codes, scales = scalar.quantize(rows, ar, block=block, given_amax=amax, dtype=np.asarray(x).dtype.name)
    return np.array(codes, np.uint8), np.array(scales, np.uint8)

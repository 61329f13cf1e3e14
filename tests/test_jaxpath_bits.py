"""float32 in integers: every operation of nvfp4hw.jaxpath.bits against NumPy's, pattern by pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv
from nvfp4ref import fp32

jax = pytest.importorskip("jax")

from nvfp4hw.jaxpath import bits  # noqa: E402

U32 = np.dtype(np.uint32)
#: exponents and significands where rounding, overflow, underflow and the special values are decided
EDGES = np.array(
    [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x00FFFFFF, 0x01000000, 0x33800000, 0x3EAAAAAB, 0x3F7FFFFF, 0x3F800000]
    + [0x3F800001, 0x40000000, 0x40C00000, 0x45280000, 0x4B7FFFFF, 0x7E800000, 0x7F7FFFFE, 0x7F7FFFFF, 0x7F800000]
    + [0x7F800001, 0x7FC00000, 0x7FFFFFFF],
    U32,
)


def operands(count: int = 1 << 18) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of any patterns, of patterns a few binades apart, of short significands; and every pair of edges."""
    random = np.random.default_rng(7)
    any_, near = random.integers(0, 2**32, (2, count), U32), random.integers(0, 2**32, (2, count), U32)
    near = near & U32.type(0x807FFFFF) | random.integers(100, 140, (2, count), U32) << U32.type(23)
    tiny = random.integers(0, 2**32, (2, count), U32) & U32.type(0x83FFFFFF)
    short = random.integers(0, 2**16, (2, count), U32) << U32.type(16)
    edges = np.concatenate([EDGES, EDGES | U32.type(1 << 31)])
    pairs = np.stack([grid.reshape(-1) for grid in np.meshgrid(edges, edges)])
    first, second = np.concatenate([any_, near, tiny, short, pairs], axis=1)
    return first, second


def canonical(x: np.ndarray) -> np.ndarray:
    found = x.view(U32).copy()
    found[np.isnan(x)] = 0x7FFFFFFF
    return found


@pytest.mark.parametrize(
    "ours, numpys",
    [(bits.mul, np.multiply), (bits.div, np.divide), (bits.add, np.add), (bits.sub, np.subtract)],
    ids=["mul", "div", "add", "sub"],
)
def test_operations_round_as_ieee_says(ours: Callable[..., Any], numpys: Callable[..., Any]) -> None:
    a, b = operands()
    with np.errstate(all="ignore"):
        expected = canonical(numpys(a.view(np.float32), b.view(np.float32)))
    np.testing.assert_array_equal(np.asarray(jax.jit(ours)(a, b)), expected)


def test_comparison_and_minimum() -> None:
    a, b = operands()
    x, y = a.view(np.float32), b.view(np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.asarray(bits.less(a, b)), x < y)
        expected = np.fmin(canonical(x).view(np.float32), fp32.FLT_MAX)  # NumPy's keeps a signalling NaN
    np.testing.assert_array_equal(np.asarray(bits.minimum(a, bits.FLT_MAX)), expected.view(U32))


@pytest.mark.parametrize("error", [-55, -1, 1, 55])
def test_a_quotient_off_by_many_units_is_set_right(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's division is approximate; here the estimate is moved on purpose, further than any device's."""
    random = np.random.default_rng(8)
    n = random.integers(1 << 23, 1 << 24, 1 << 16, U32)
    m = n + (random.random(n.size) * n).astype(U32)
    n[:2], m[:2] = (1 << 24) - 1, ((1 << 24) - 1, (1 << 25) - 3)
    estimate = bits.estimate
    monkeypatch.setattr(bits, "estimate", lambda m, n: estimate(m, n) + U32.type(error % 2**32))
    quotient, remainder = (np.asarray(a).astype(np.uint64) for a in bits.divide(*map(jax.numpy.asarray, (m, n))))
    wide = m.astype(np.uint64) << np.uint64(25)
    np.testing.assert_array_equal(quotient, wide // n)
    np.testing.assert_array_equal(remainder, wide % n)


def test_conversions_of_all_halves() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    half, bfloat = patterns.view(np.float16), patterns.view(fp32.bfloat16)
    found = np.asarray(bits.of_float(jax.numpy.asarray(half)))
    nan = np.isnan(half)
    np.testing.assert_array_equal(found[~nan], half[~nan].astype(np.float32).view(U32))
    assert np.asarray(bits.is_nan(found))[nan].all()
    np.testing.assert_array_equal(
        np.asarray(bits.of_float(jax.numpy.asarray(bfloat))), patterns.astype(U32) << U32.type(16)
    )


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_narrowing_of_every_upper_half(low: int) -> None:
    a = np.arange(65536, dtype=U32) << U32.type(16) | U32.type(low)
    x = a.view(np.float32)
    np.testing.assert_array_equal(np.asarray(bits.to_bfloat16(a)), fp32.to_bfloat16(x))
    np.testing.assert_array_equal(np.asarray(bits.to_float16(a)), fp32.to_float16(x))
    np.testing.assert_array_equal(np.asarray(bits.to_e4m3(a)), nv.e4m3.encode(x))


def test_e4m3_values() -> None:
    code = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(bits.of_e4m3(code)), nv.e4m3.decode(code).view(U32))


def test_once_runs_once_whatever_it_reads() -> None:
    for first in (0, 7, 0xFFFFFFFF):  # the last one makes the loop go round twice, with the same result
        a = np.array([first, 5], U32)
        found = jax.jit(lambda a: bits.once(lambda a: (a ^ U32.type(3), a.sum()), a))(a)
        np.testing.assert_array_equal(np.asarray(found[0]), a ^ 3)
        assert int(found[1]) == int(a.sum(dtype=U32))

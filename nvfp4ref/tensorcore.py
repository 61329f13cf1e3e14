"""One K=64 word of the block-scaled FP4 MMA: D = C + sum of four groups of 16 products, under several models.

Rules MMA-SPECIAL, MMA-GROUP, MMA-WINDOW, MMA-ROUND.  Everything is integers: E2M1 values in halves, E4M3
significands in eighths, so that a group is an integer times 2^(e_a + e_b − 8), exact in int64, with e_a and
e_b the exponents of its two scales (subnormal: −6).

The model ``blackwell`` is the published reading of tcgen05 and mma.sync ``kind::mxf4nvf4`` that all four
published B200 words and the later patches of other emulators agree with; the others are there because they are
not all refuted (docs/evidence.md), and for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import e2m1, e4m3, fp32
from .fp32 import F32, F64, NAN, U8, AnyArray

I64 = NDArray[np.int64]

K = 64  # products of one word
GROUP = 16  # products under one pair of scales
DEAD = -139  # exponent of what does not count: below every float32 and every product

HALVES = (e2m1.VALUES * 2).astype(np.int64)  # E2M1 values as integers, in units of one half
_MAGNITUDE = np.arange(128)
SIGNIFICAND = np.where(_MAGNITUDE < 8, _MAGNITUDE, 8 + _MAGNITUDE % 8).astype(np.int64)  # in eighths
EXPONENT = np.maximum(_MAGNITUDE // 8, 1).astype(np.int64) - 7
ELEMENT_EXPONENT = np.frexp(np.abs(e2m1.VALUES))[1].astype(np.int64) - 1  # of non-zero codes


class Word(NamedTuple):
    """n words taken apart; every array has n rows."""

    products: I64  # (n, 4, 16): a·b in quarters
    scale: I64  # (n, 4): product of the scales' significands, in 64ths
    exponent: I64  # (n, 4): sum of the scales' exponents
    element_exponent: I64  # (n, 4, 16): e(a) + e(b), DEAD for a zero product
    c: F32  # (n,)

    @property
    def groups(self) -> I64:
        """(n, 4): group sums in units of 2^(exponent − 8)."""
        groups: I64 = self.products.sum(axis=2) * self.scale
        return groups

    @property
    def c_exponent(self) -> I64:
        """(n,): floor(log2 |C|); DEAD for zero."""
        exponent = np.frexp(self.c.astype(np.float64))[1].astype(np.int64) - 1
        return np.where(self.c == 0, DEAD, exponent)


def take_apart(a: U8, b: U8, c: F32, sa: U8, sb: U8) -> Word:
    """Codes (n, 64), scale bytes (n, 4) and C (n,) as integers; the scales' sign bits are ignored."""
    products = (HALVES[a] * HALVES[b]).reshape(-1, 4, GROUP)
    ma, mb = sa & np.uint8(0x7F), sb & np.uint8(0x7F)
    exponents = (ELEMENT_EXPONENT[a] + ELEMENT_EXPONENT[b]).reshape(products.shape)
    return Word(
        products,
        SIGNIFICAND[ma] * SIGNIFICAND[mb],
        EXPONENT[ma] + EXPONENT[mb],
        np.where(products == 0, DEAD, exponents),
        c,
    )


def shift_toward_zero(x: I64, left: AnyArray) -> I64:
    """x·2^left cut toward zero, for |x|·2^left below 2^62."""
    magnitude = np.abs(x)
    right = np.minimum(np.maximum(-left, 0), 63)
    shifted: I64 = np.sign(x) * ((magnitude >> right) << np.maximum(left, 0))
    return shifted


def round_toward_zero(total: I64, exponent: AnyArray) -> F32:
    """total·2^exponent cut to float32; |total| below 2^53.  Zero is +0."""
    return np.ldexp(fp32.cut_to_24_bits(total.astype(np.float64)), exponent).astype(np.float32)


def _c_in_window(word: Word, floor: I64) -> I64:
    """C in units of 2^floor, cut toward zero."""
    fraction, exponent = np.frexp(word.c.astype(np.float64))
    return shift_toward_zero(np.ldexp(fraction, 24).astype(np.int64), np.where(word.c == 0, 0, exponent - 24 - floor))


def _live(word: Word, zero_groups: bool) -> AnyArray:
    """(n, 4): groups whose scale exponents count for the window."""
    alive: AnyArray = word.scale != 0
    if not zero_groups:
        alive &= (word.products != 0).any(axis=2)
    return alive


def _align(word: Word, zero_groups: bool = False) -> F32:
    """Groups and C cut at 2^(max exponent − 35), added exactly, cut to float32 (MMA-WINDOW, MMA-ROUND)."""
    scale_exponent = np.where(_live(word, zero_groups), word.exponent, DEAD).max(axis=1)
    floor = np.maximum(scale_exponent, word.c_exponent) - 35
    groups = shift_toward_zero(word.groups, word.exponent - 8 - floor[:, None])
    return round_toward_zero(groups.sum(axis=1) + _c_in_window(word, floor), floor)


def _window39(word: Word, width: int) -> F32:
    """A window by the largest product exponent less 39, not below the scales' less 35; ``width`` products merged."""
    product_exponent = np.where(word.element_exponent == DEAD, DEAD, word.element_exponent + word.exponent[:, :, None])
    product_exponent = np.where(word.scale[:, :, None] == 0, DEAD, product_exponent).max(axis=(1, 2))
    c_exponent = word.c_exponent
    largest = np.maximum(product_exponent, c_exponent)
    scale_exponent = np.where(_live(word, False), word.exponent, DEAD).max(axis=1)
    c_leads = (word.c != 0) & (c_exponent >= product_exponent)
    floor = np.where(c_leads, c_exponent - 35, np.maximum(largest - 39, scale_exponent - 35))

    left = word.exponent[:, :, None] - 8 - floor[:, None, None]
    merged = word.products.reshape(-1, 4, GROUP // width, width).sum(axis=3) * word.scale[:, :, None]
    total = shift_toward_zero(merged, left).sum(axis=(1, 2))
    whole = shift_toward_zero(word.groups, left[:, :, 0]).sum(axis=1)
    return round_toward_zero(np.where(c_leads, whole, total) + _c_in_window(word, floor), floor)


def exact_sum(word: Word) -> F64:
    """Sum of the 64 products as float64, exact: a multiple of 2^-20 below 2^29."""
    total: F64 = np.ldexp(word.groups.astype(np.float64), word.exponent - 8).sum(axis=1)
    return total


def _group64(word: Word) -> F32:
    """The 64-product sum rounded to nearest float32, then added to C toward zero."""
    return fp32.add_toward_zero(word.c, exact_sum(word).astype(np.float32).astype(np.float64))


def _exact(word: Word) -> F32:
    """C plus the exact sum, rounded once to nearest even."""
    return fp32.add_nearest(word.c, exact_sum(word))


def _fp32(word: Word) -> F32:
    """Products, exact in float32, added one after another in float32, nearest even."""
    n = len(word.c)
    products = np.ldexp((word.products * word.scale[:, :, None]).astype(np.float32), word.exponent[:, :, None] - 8)
    total = word.c
    for column in products.reshape(n, K).T:
        total = total + column
    return total


#: name -> D of finite words; NaN and Inf are the same for all (rule MMA-SPECIAL)
MODELS: dict[str, Callable[[Word], F32]] = {
    "blackwell": _align,
    "blackwell-snapshot": lambda word: _align(word, zero_groups=True),
    "window39-k4": lambda word: _window39(word, 4),
    "window39-k16": lambda word: _window39(word, 16),
    "group64": _group64,
    "exact": _exact,
    "fp32": _fp32,
}


def require_model(model: str) -> None:
    """ValueError when ``model`` is none of MODELS."""
    if model not in MODELS:
        raise ValueError(f"unknown tensor core model {model!r}; the models are {', '.join(MODELS)}")


def mma_words(
    a: ArrayLike, b: ArrayLike, c: ArrayLike, sa: ArrayLike, sb: ArrayLike, *, model: str = "blackwell"
) -> F32:
    """D of n words: C plus 64 products in four groups of 16, each group times its two block scales.

    Args:
        a, b: (n, 64) uint8, E2M1 codes 0..15.
        c: (n,) float32.
        sa, sb: (n, 4) uint8, E4M3 scale bytes, whose sign bit is ignored.
        model: one of MODELS.
    Returns:
        (n,) float32.  A scale byte of 0x7F or 0xFF, or a NaN in C, gives 0x7FFFFFFF; Inf in C stays.
    Raises:
        TypeError, ValueError: wrong dtype or shape, codes above 15, unknown model.
    """
    require_model(model)
    codes_a, codes_b, bytes_a, bytes_b = (np.asarray(v) for v in (a, b, sa, sb))
    accumulator = np.asarray(c)
    n = len(codes_a) if codes_a.ndim else 0
    for name, array, dtype, shape in (
        ("a", codes_a, np.uint8, (n, K)),
        ("b", codes_b, np.uint8, (n, K)),
        ("sa", bytes_a, np.uint8, (n, 4)),
        ("sb", bytes_b, np.uint8, (n, 4)),
        ("c", accumulator, np.float32, (n,)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{name} is {np.dtype(dtype).name} of shape {shape}, n words of 64; got {array.dtype} {array.shape}"
            )
    if n and max(codes_a.max(), codes_b.max()) > 15:
        raise ValueError(f"E2M1 codes are 0..15; got {max(codes_a.max(), codes_b.max())}")

    nan = np.isnan(accumulator)
    for scales in (bytes_a, bytes_b):
        nan |= ((scales & 0x7F) == e4m3.NAN_BYTE).any(axis=1)
    infinite = np.isinf(accumulator)
    finite = np.where(nan | infinite, np.float32(0), accumulator)
    with np.errstate(all="ignore"):
        out = MODELS[model](take_apart(codes_a, codes_b, finite, bytes_a, bytes_b))
    return np.where(nan, NAN, np.where(infinite, accumulator, out)).astype(np.float32)

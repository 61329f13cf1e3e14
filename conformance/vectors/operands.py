"""Constructed operands: every edge of every operation, small, and whole 16-bit spaces where those are wanted.

A function of this file gives the operands of one operation, rows as in ``operations.py``.  Blocks are those that the
suite (``conformance/cases.py``) found by search, cut out of its tensors with the tensor's amax beside each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from conformance import cases
from conformance.vectors.fields import Array, bits
from conformance.vectors.operations import MIDPOINTS, Operands
from conformance.vectors.random import Random
from nvfp4hw.backends.base import Case
from nvfp4ref import blocks, e2m1, e4m3, scaling
from nvfp4ref.arithmetic import arithmetic
from nvfp4ref.fp32 import bfloat16, widen

F = np.float32
INF, NAN = F(np.inf), F(np.nan)
FLT_MAX, FLT_MIN = np.finfo(F).max, F(2.0**-126)


def f32(*patterns: int) -> Array:
    """float32 from bit patterns."""
    return np.array(patterns, np.uint32).view(F)


#: Tensor amaxes: exact quotients, thirds and sevenths, plain values, and the ends of the range.
AMAXES = np.concatenate(
    [
        np.array([2688, 896, 384, 21, 1, 0.02, 300, 2.078125, 2.03125, 1536, 7.9e-36, 1e-30, 1e30], F),
        f32(0x40490FDB, 0x3EAAAAAB, 0x4B35A7C9, 0x05280000, 0x05280001, 0x7F7FFFFF, 0x00800000, 0x00400001, 1),
    ]
)
#: What an amax may be besides a number: zeros, Inf, NaN, and negative.
STRANGE = f32(0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x80000001, 0xC0400000, 0xFF7FFFFF)


def product(*axes: Array) -> Operands:
    """Every combination, the last axis fastest."""
    return tuple(grid.reshape(-1) for grid in np.meshgrid(*axes, indexing="ij"))


def distinct(operands: Operands) -> Operands:
    """Rows that occur twice left out, the order kept."""
    rows = np.concatenate([bits(one).reshape(len(one), -1).astype(np.uint64) for one in operands], axis=1)
    _, first = np.unique(rows, axis=0, return_index=True)
    return tuple(one[np.sort(first)] for one in operands)


# ---- bare conversions --------------------------------------------------------------------------------------


def _sweep(size: str, kind: str) -> Array:
    """The edges of a codec; in full also all upper halves of float32 with six lower ones."""
    midpoints, values = (MIDPOINTS, e2m1.VALUES[:8]) if kind == "e2m1" else (cases.E4M3_MIDPOINTS, cases.E4M3_VALUES)
    edges = cases.codec_boundaries(midpoints, values)
    if size == "small":
        return edges
    upper = np.arange(65536, dtype=np.uint32)[:, None] << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return distinct((np.concatenate([edges, (upper | lower).view(F).reshape(-1)]),))[0]


def codec(kind: str, part: str) -> Callable[[str], Operands]:
    """Operands of ``e2m1`` or ``e4m3`` of one part: "range", "above", "zero", "nan"."""

    def make(size: str) -> Operands:
        x = _sweep(size, kind)
        magnitude = np.abs(x)
        largest, smallest = (F(6), F(0.25)) if kind == "e2m1" else (F(448), F(2.0**-10))
        chosen = {
            "range": magnitude <= largest,
            "above": magnitude > largest,
            "zero": magnitude <= smallest,
            "nan": np.isnan(x),
        }[part]
        if part == "nan":
            return (np.concatenate([x[chosen], _payloads()]),)
        return (x[chosen],)

    return make


def _payloads() -> Array:
    """NaNs of both signs with each single bit of the payload, quiet and signalling."""
    single = np.uint32(1) << np.arange(22, dtype=np.uint32)
    quiet = np.concatenate([single | np.uint32(0x7FC00000), single | np.uint32(0x7F800000)])
    return np.concatenate([quiet, quiet | np.uint32(0x80000000)]).view(F)


def powers(size: str) -> Operands:
    """Powers of two and what lies beside them, subnormal ones too."""
    values = np.ldexp(F(1), np.arange(-149, 128)).astype(F)
    return (cases.codec_boundaries(values, values),)


def all_bytes(size: str) -> Operands:
    """Every byte."""
    return (np.arange(256, dtype=np.uint8),)


def all_codes(size: str) -> Operands:
    """Every E2M1 code."""
    return (np.arange(16, dtype=np.uint8),)


def code_pairs(size: str) -> Operands:
    """Every pair of codes at a moving place among codes that differ from them."""
    first, second = product(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    rows = (first[:, None] + np.arange(16, dtype=np.uint8) * np.uint8(5)) % np.uint8(16)
    place = np.arange(256) % 15
    rows[np.arange(256), place], rows[np.arange(256), place + 1] = first, second
    return (rows,)


def halves(dtype: Any) -> Callable[[str], Operands]:
    """Patterns of a 16-bit type: all of them, or every exponent with some mantissas."""

    def make(size: str) -> Operands:
        patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
        mantissa = patterns & np.uint16(0x7F if dtype is ml_dtypes.bfloat16 else 0x3FF)
        few = np.isin(mantissa, np.array([0, 1, 2, 0x3F, 0x40, 0x41, 0x7F, 0x1FF, 0x200, 0x3FF]))
        return ((patterns if size == "full" else patterns[few]).view(dtype),)

    return make


def two_floats(size: str) -> Operands:
    """Pairs of numbers, subnormal results among them, and random ones."""
    ends = np.concatenate([AMAXES, -AMAXES[:4], f32(0x3E2AAAAB, 0x39C30C31, 0x00200000, 0x3F7FFFFF, 0x3F800001)])
    a, b = product(ends, ends)
    random = Random(1, 0)
    n = 512 if size == "small" else 32768
    return np.concatenate([a, random.moderate(n)]), np.concatenate([b, random.moderate(n)])


def with_nan(size: str) -> Operands:
    """Pairs that have or make a NaN, in either place, of either sign, with Inf and zero beside."""
    special = np.concatenate([f32(0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF), [INF, -INF]])
    numbers = np.concatenate([f32(0, 0x80000000, 1), np.array([1, -2.5, 6], F), [FLT_MAX]])
    both = np.concatenate([special, numbers]).astype(F)
    a, b = product(both, both)
    with np.errstate(all="ignore"):
        made = np.isnan(a * b) | np.isnan(a / b)
    return a[made], b[made]


def one_nan(size: str) -> Operands:
    """Pairs with one NaN, and pairs of numbers of which the smaller is clear."""
    a, b = with_nan(size)
    one = np.isnan(a) != np.isnan(b)
    x, y = two_floats("small")
    clear = x != y
    return np.concatenate([a[one], x[clear]]), np.concatenate([b[one], y[clear]])


# ---- scales ------------------------------------------------------------------------------------------------


def amaxes(size: str) -> Operands:
    """Tensor amaxes: the listed ones, every bfloat16 mantissa, random ones; in full every positive bfloat16."""
    mantissas = (np.arange(0x4000, 0x4100, dtype=np.uint32) << np.uint32(16)).view(F)
    random = np.abs(Random(2, 0).moderate(256 if size == "small" else 16384))
    found = [AMAXES, mantissas, random]
    if size == "full":
        found.append((np.arange(1, 0x7F80, dtype=np.uint32) << np.uint32(16)).view(F))
    return distinct((np.concatenate(found),))


def strange_amaxes(size: str) -> Operands:
    """Zeros, Inf, NaN, negative ones, the largest and smallest, and where S meets its limit."""
    limit = F(2688) / FLT_MAX
    around = (limit.view(np.int32) + np.arange(-3, 4, dtype=np.int32)).view(F)
    return (np.concatenate([STRANGE, AMAXES, around, -around]),)


def _scale(amax: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(scaling.global_scale(np.asarray(amax, F), arithmetic("te")).encode, F)


def block_amaxes(size: str) -> Operands:
    """(a, S): pairs on which other orders of the operations give another byte, and E4M3's own ties and values."""
    pairs = cases.order_pairs()
    a = np.concatenate(list(pairs.values()))
    scale = np.repeat(_scale(np.array([16 * mantissa for mantissa in pairs], F)), [len(v) for v in pairs.values()])
    points = np.concatenate([cases.E4M3_MIDPOINTS, cases.E4M3_VALUES[1:], [F(2.0**-10), F(480), F(1e5)]]).astype(F)
    tensors = _scale(AMAXES[:9] if size == "small" else AMAXES[:13])
    point, of = product(points, tensors)
    with np.errstate(all="ignore"):
        exact = point / (of * cases.SIXTH)
    moved = [(exact.view(np.int32) + step).view(F) for step in ((0,) if size == "small" else (-2, -1, 0, 1, 2))]
    more = np.concatenate([a, *moved])
    return distinct((more, np.concatenate([scale, *[of] * len(moved)]).astype(F)))


def strange_block_amaxes(size: str) -> Operands:
    """(a, S) with zeros, Inf, NaN and numbers that overflow or vanish."""
    scales = np.concatenate([_scale(STRANGE), _scale(AMAXES), [FLT_MAX, F(1), INF]]).astype(F)
    return distinct(product(np.concatenate([STRANGE, AMAXES]), scales))


def bytes_and_scales(size: str) -> Operands:
    """Every scale byte, negative ones and NaN too, under several S."""
    scales = _scale(np.concatenate([AMAXES, [F(-3)]]))
    return product(np.arange(256, dtype=np.uint8), scales if size == "full" else scales[[0, 1, 4, 13, 14, 18, 21, 22]])


def elements(size: str) -> Operands:
    """(x, e): products that are E2M1 midpoints, and a step beside, for multipliers of real blocks."""
    multipliers = []
    for amax in AMAXES[:9]:
        d = cases.E4M3_VALUES[1 :: 1 if size == "full" else 9]
        multipliers.append(F(1) / (d * (F(1) / _scale(amax))))
    points = np.concatenate([MIDPOINTS, -MIDPOINTS])
    e, point = product(np.concatenate(multipliers), points)
    x = point / e
    moved = np.concatenate([(x.view(np.int32) + step).view(F) for step in (-1, 0, 1)])
    special = product(f32(0, 0x80000000, 0x7F800000, 0xFFC00000, 1, 0x80000001), np.concatenate([e[::97], [FLT_MAX]]))
    return distinct((np.concatenate([moved, special[0]]), np.concatenate([np.tile(e, 3), special[1]]).astype(F)))


# ---- blocks ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def quick() -> dict[str, Case]:
    """The quick suite's quantizations by id."""
    return {case.id: case for case in cases.cases("quick") if case.kind == "quantize"}


def of_suite(*names: str, few: int = 192) -> Callable[[str], Operands]:
    """(x, A): the blocks of the suite's tensors whose id starts with a name, each with its tensor's amax.

    The small set takes the first ``few`` distinct blocks of each tensor.
    """

    def make(size: str) -> Operands:
        found = [
            case
            for case in quick().values()
            if case.id.startswith(names) and case.id.endswith(".1x16.row") and case.amax is None
        ]
        x, amax = [], []
        for case in found:
            rows = widen(case.x).reshape(-1, 16)
            largest = np.full(len(rows), blocks.tensor_amax(case.x), F)
            rows, largest = distinct((rows, largest))
            keep = slice(None) if size == "full" else slice(0, few)
            x.append(rows[keep])
            amax.append(largest[keep])
        return distinct((np.concatenate(x), np.concatenate(amax)))

    return make


def supplied(size: str) -> Operands:
    """(x, A): blocks of one tensor under amaxes that are not its own."""
    rows = widen(quick()["normal/s1.f32.1x16.row"].x).reshape(-1, 16)[: 8 if size == "small" else 64]
    given = np.concatenate([AMAXES, STRANGE, np.array([0.5, 1.25, 8.5], F)]).astype(F)
    return np.tile(rows, (len(given), 1)), np.repeat(given, len(rows))


def special_blocks(size: str) -> Operands:
    """(x, A): blocks with NaN, Inf and −0, under the amax that ignores NaN, under NaN, and under Inf."""
    x, amax = of_suite("special/nan-inf.f32", "special/nan-block.bf16", "zero/sparse.f32")("small")
    strange, negative = ~np.isfinite(x).all(axis=1), (bits(x) == 0x80000000).any(axis=1)
    keep = np.concatenate([np.flatnonzero(strange), np.flatnonzero(negative & ~strange)[:24]])
    x, amax, n = x[keep], amax[keep], len(keep)
    return np.tile(x, (4, 1)), np.concatenate([amax, np.full(n, NAN), np.full(n, INF), np.full(n, F(3))]).astype(F)


def peers(size: str) -> Operands:
    """(x, A) on which the packages' quantizers differ from Transformer Engine's and from each other."""
    wide = ("e2m1-tie/amax-896.f32", "e2m1-tie/amax-pi.f32", "e4m3-tie/amax-896.bf16", "e4m3-tie/amax-third.f32")
    more = ("scale-order/", "zero/vanishing.bf16", "zero/blocks.f32", "threshold/ulps.bf16")
    parts = [of_suite(*wide, *more, few=128)(size), supplied(size), special_blocks(size)]
    return distinct(tuple(np.concatenate(column) for column in zip(*parts, strict=True)))


def four_or_six(size: str) -> Operands:
    """(x, A) for 4over6: blocks that 4 suits, blocks of equal errors, mixed ones, zeros, NaN and Inf."""
    random, n = Random(12, 0), 96 if size == "small" else 4096
    grid = np.array([1, 0.75, 0.5, 0.375, 0.25, 0.125, 0, 0.7], F)
    x = random.signed(random.choice(grid, 16 * n)).reshape(n, 16)
    x *= np.ldexp(F(1), random.integers(n, -6, 3))[:, None] * (F(1) + random.uniforms(n) / F(8))[:, None]
    even = quick()["four-over-six/even-errors.bf16.1x16.row.4over6-MAE-448"].x
    rows = widen(even).reshape(-1, 16)
    parts = [
        (x.astype(F), np.full(n, np.abs(x).max(), F)),
        (rows, np.full(len(rows), np.abs(rows).max(), F)),
        tuple(one[:96] if size == "small" else one for one in of_suite("mixed/decades8.f32")(size)),
        tuple(one[:24] for one in special_blocks("small")),
        of_suite("zero/vanishing.bf16")("small"),
    ]
    return distinct(tuple(np.concatenate(column) for column in zip(*parts, strict=True)))


def one_level(size: str) -> Operands:
    """(x,) for quantizers without a global scale: ties where S is 1, zeros, NaN and Inf, tiny blocks."""
    names = ("e2m1-tie/amax-2688", "e4m3-tie/amax-2688", "zero/vanishing.bf16", "zero/blocks.f32", "threshold/")
    x = np.concatenate([of_suite(*names)(size)[0], special_blocks("small")[0]])
    tiny = x[:64] * np.ldexp(F(1), np.arange(-2, -66, -1))[:, None]
    return distinct((np.concatenate([x, tiny]).astype(F),))


def only_x(make: Callable[[str], Operands]) -> Callable[[str], Operands]:
    """The blocks without their amax."""
    return lambda size: distinct(make(size)[:1])


def under_scale(make: Callable[[str], Operands]) -> Callable[[str], Operands]:
    """(x, S): the same with the global scale in place of the amax."""

    def of_scale(size: str) -> Operands:
        x, amax = make(size)
        return x, _scale(amax)

    return of_scale


# ---- transform, dequantization, random bits ----------------------------------------------------------------


def vectors(size: str) -> Operands:
    """(x, mask): unit vectors, sums that cancel or are cut off, random ones, under several masks."""
    masks = np.array([0xD7E8, 0, 0xFFFF, 0x0001, 0x8000, 0xA5C3], np.uint16)
    unit = np.zeros((16, 16), np.uint16)
    np.fill_diagonal(unit, 0x4080)
    x, mask = (
        np.concatenate([np.tile(unit, (len(masks), 1)), _cut_off(), _random_vectors(size)]),
        np.concatenate([np.repeat(masks, 16), np.full(len(_cut_off()), 0xD7E8, np.uint16), _random_masks(size)]),
    )
    return x.view(bfloat16), mask


def _cut_off() -> Array:
    """One large product and one or two small ones on both sides of what the sum still holds."""
    rows = []
    for exponent in range(0x4080, 0x4080 - 36 * 0x80, -0x80):
        for middle in (0, 0x3C80, 0x3D40, 0x3C00):
            row = np.zeros(16, np.uint16)
            row[[0, 1, 2]] = 0x4080, middle, exponent
            rows += [row, row ^ np.uint16(0x8000) * (np.arange(16) == 2).astype(np.uint16)]
    return np.array(rows, np.uint16)


def _random_vectors(size: str) -> Array:
    random, n = Random(3, 0), 192 if size == "small" else 8192
    exponent = random.integers(16 * n, 95, 140).astype(np.uint16) << np.uint16(7)
    x = ((random.words(16 * n).astype(np.uint16) & np.uint16(0x807F)) | exponent).reshape(n, 16)
    near = random.integers(n, 120, 128).astype(np.uint16)[:, None] << np.uint16(7)
    even = np.arange(n) % 2 == 0
    x[even] = (x[even] & np.uint16(0x807F)) | near[even]
    return x


def _random_masks(size: str) -> Array:
    n = len(_random_vectors(size))
    return np.where(np.arange(n) % 3 == 0, Random(3, 1).words(n), np.uint32(0xD7E8)).astype(np.uint16)


def special_vectors(size: str) -> Operands:
    """(x, mask) with NaN of any payload, Inf of one and of both signs, and sums that overflow."""
    patterns = np.array([0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F], np.uint16)
    rows = []
    for first in patterns:
        for second in (*patterns, np.uint16(0x3F80)):
            for at in (1, 3):
                row = np.full(16, 0x3F80, np.uint16)
                row[0], row[at] = first, second
                rows.append(row)
    rows += [np.full(16, 0x7F7F, np.uint16), np.full(16, 0x0001, np.uint16)]
    x = np.array(rows, np.uint16)
    return x.view(bfloat16), np.full(len(x), 0xD7E8, np.uint16)


_EVERY_CODE = np.arange(16, dtype=np.uint8).reshape(8, 2)
_PACKED = (_EVERY_CODE[:, 0] | _EVERY_CODE[:, 1] << np.uint8(4)).astype(np.uint8)


def stored_blocks(size: str) -> Operands:
    """(byte, packed, A): every finite scale byte with every code, under several amaxes."""
    few = np.concatenate([AMAXES[:9], f32(0x7F7FFFFF, 0x00800000, 1)])
    byte, amax = product(np.arange(256, dtype=np.uint8), few if size == "small" else AMAXES)
    finite = byte & np.uint8(0x7F) != 0x7F
    if size == "small":
        finite &= (byte % 5 == 0) | (np.arange(len(byte)) % len(few) < 2)
    byte, amax = byte[finite], amax[finite]
    return byte, np.tile(_PACKED, (len(byte), 1)), amax


def special_stored_blocks(size: str) -> Operands:
    """(byte, packed, A) with NaN bytes, and amaxes that are zero, Inf, NaN, negative, or overflow."""
    chosen = np.array([0x00, 0x01, 0x38, 0x70, 0x7E, 0x7F, 0xFF, 0xFE, 0x80], np.uint8)
    byte, amax = product(chosen, np.concatenate([STRANGE, f32(0x7F7F0000, 0x7F7FFFFF, 0x3F800000)]))
    return byte, np.tile(_PACKED, (len(byte), 1)), amax


def _on_grid(table: Array, steps: int) -> Array:
    """Fractions of every interval of a grid, and its ends, of both signs."""
    low, high = table[:-1], table[1:]
    part = np.arange(steps, dtype=np.float64) / steps
    inside = (low[:, None] + (high - low)[:, None].astype(np.float64) * part).astype(F).reshape(-1)
    return np.concatenate([inside, table[-1:], -inside])


def carries(kind: str) -> Callable[[str], Operands]:
    """(y[4], word): fractions of every step, and random words that just carry and just do not."""

    def make(size: str) -> Operands:
        table = e2m1.VALUES[:8] if kind == "e2m1" else e4m3.VALUES[:127]
        y = _on_grid(table, 16 if kind == "e2m1" else 2)
        random = Random(4, len(table))
        fields = (np.uint32(0x10000) * np.arange(17, dtype=np.uint32) // np.uint32(16)).astype(np.int64)
        edges = np.unique(np.concatenate([fields, fields - 1, fields + 1]).clip(0, 0xFFFF)).astype(np.uint32)
        spread = [edges | edges << np.uint32(16), _straight(edges), random.words(64 if size == "small" else 2048)]
        words = np.concatenate(spread)
        turns = 4 if size == "small" else 16
        chosen = random.words(4 * turns * len(words)) % np.uint32(len(y))
        special = f32(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0, 0x80000000, 0x80000001, 0x40E00000)
        last = np.stack([np.roll(special, shift) for shift in range(4)], axis=1)
        rows = np.concatenate([y[chosen].reshape(-1, 4), last, last])
        more = np.concatenate([np.zeros(8, np.uint32), np.full(8, 0xFFFFFFFF, np.uint32)])
        return distinct((rows, np.concatenate([np.tile(words, turns), more])))

    return make


def _straight(edges: Array) -> Array:
    """Words whose elements 0 and 2 see these 16 bits."""
    low, high = edges & np.uint32(0xFF), edges >> np.uint32(8)
    return low | low << np.uint32(8) | high << np.uint32(16) | high << np.uint32(24)


def uniforms(size: str) -> Operands:
    """(y[4], u[4]): fractions of every step with the uniform at, below and above."""
    y = np.abs(_on_grid(e2m1.VALUES[:8], 16))
    random = Random(5, 0)
    n = 256 if size == "small" else 16384
    at = (random.words(4 * n) % np.uint32(16)).astype(F) / F(16)
    at = np.where(random.words(4 * n) % np.uint32(4) == 0, random.uniforms(4 * n), at)
    beside = random.moved(np.maximum(at, F(2.0**-20)))
    u = np.where(random.words(4 * n) % np.uint32(2) == 0, at, np.clip(beside, F(0), F(1) - F(2.0**-24))).astype(F)
    return random.signed(random.choice(y, 4 * n)).reshape(n, 4), u.reshape(n, 4)


def philox_calls(size: str) -> Operands:
    """(counter, key): the published known answers, single bits, and random ones."""
    digits_of_pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    known = np.array([[0] * 6, [0xFFFFFFFF] * 6, digits_of_pi])
    single = np.zeros((192, 6), np.uint64)
    single[np.arange(192), np.arange(192) // 32] = 1 << (np.arange(192) % 32)
    random = Random(6, 0)
    more = random.words(6 * (128 if size == "small" else 2048)).reshape(-1, 6)
    rows = np.concatenate([known.astype(np.uint32), single.astype(np.uint32), more])
    return rows[:, :4].copy(), rows[:, 4:].copy()


def philox_numbers(size: str) -> Operands:
    """(seed, offset, sequence, number): offsets that carry, seeds of one half, threads and word numbers."""
    seeds = np.array([0, 1, 0x123456789ABCDEF0, 2**64 - 1, 2**32], np.uint64)
    offsets = np.array([0, 1, 7, 1024, 2**32 - 1, 2**64 - 1, 2**64 - 4], np.uint64)
    sequences = np.array([0, 1, 5, 127, 2**32, 2**40 + 3], np.uint64)
    seed, offset, sequence = product(seeds, offsets, sequences)
    number = (np.arange(len(seed), dtype=np.uint32) * np.uint32(7)) % np.uint32(19)
    return seed, offset, sequence, number


# ---- matrix multiplication ---------------------------------------------------------------------------------


def _words(n: int) -> list[Array]:
    return [np.zeros((n, 64), np.uint8), np.zeros((n, 64), np.uint8), *(np.full((n, 4), 0x38, np.uint8),) * 2]


def words(part: str) -> Callable[[str], Operands]:
    """(a, b, scales, scales, c) of an MMA rule: "special", "group", "window" or "round"."""

    def make(size: str) -> Operands:
        rows = {"special": _special_words, "group": _group_words, "window": _window_words, "round": _round_words}[part]
        made = rows(size)
        return tuple(np.ascontiguousarray(one) for one in made)

    return make


def _special_words(size: str) -> Operands:
    """NaN and negative scales in each group of either operand; NaN and Inf in C."""
    a, b, sa, sb = _words(64)
    a[:], b[:] = 2, 10
    a[::3], sa, sb = 0, sa.copy(), sb.copy()
    c = np.resize(np.array([0, 1, INF, -INF, NAN, -0.0, 3, -64], F), 64)
    values = np.array([0x7F, 0xFF, 0xB8, 0x80], np.uint8)
    for row in range(8, 64):
        (sa if row % 2 else sb)[row, row // 2 % 4] = values[row // 8 % 4]
    return a, b, sa, sb, c


def _random_word(size: str, key: int, n: int, scales: tuple[int, int]) -> list[Array]:
    random = Random(7, key)
    n = n if size == "small" else 16 * n
    low, high = scales
    made = [random.codes(n, 64), random.codes(n, 64)]
    made += [random.integers(4 * n, low, high).astype(np.uint8).reshape(n, 4) for _ in range(2)]
    return made


def _group_words(size: str) -> Operands:
    """Groups of random products whose sums a running float32 sum would round."""
    a, b, sa, sb = _random_word(size, 0, 128, (0x08, 0x7F))
    return a, b, sa, sb, Random(7, 1).floats(len(a), 100, 140)


def _window_words(size: str) -> Operands:
    """One group far below the largest exponent, moved through the window's edge: under C, another group, and both."""
    n = 40
    a, b, _, _ = _words(2 * n)
    a[:, 0], b[:, 0] = 1, 9
    sa, sb = np.full((2 * n, 4), 1, np.uint8), np.full((2 * n, 4), 1, np.uint8)
    c = np.resize(np.ldexp(F(1), np.arange(-4, n - 4)).astype(F), 2 * n)
    a[n:, 16], b[n:, 16] = 7, 7
    sa[n:, 1] = sb[n:, 1] = 0x70
    c[n:] = 0
    sa[n:, 0] = np.arange(1, n + 1)
    rows = [(a, b, sa, sb, c), _between(), _far_apart(size)]
    return tuple(np.concatenate(column) for column in zip(*rows, strict=True))


def _between() -> Operands:
    """C between the exponents of the largest scales and of their products; a group at the edge of either window."""
    exponent, small, cancelling = product(np.arange(15, 22), np.arange(4), np.arange(2))
    n = len(exponent)
    a, b, sa, sb = _words(n)
    sa, sb = np.full((n, 4), 1, np.uint8), np.full((n, 4), 1, np.uint8)
    sa[:, 0] = sb[:, 0] = 0x78  # 256·256
    a[:, 0] = b[:, 0] = 7
    a[:, 16], b[:, 16] = np.array([1, 2, 4, 6], np.uint8)[small], 9
    a[:, 17], b[:, 17] = np.where(cancelling, 1, 0), 2
    return a, b, sa, sb, np.ldexp(F(1), exponent).astype(F)


def _far_apart(size: str) -> Operands:
    """Random words whose last group has a subnormal scale, half of them with two groups of zeros."""
    a, b, sa, sb = _random_word(size, 2, 256, (0x01, 0x7F))
    a[::2, 16:48] = 0
    sa[:, 3] %= 8
    sb[:, 3] %= 8
    return a, b, sa, sb, Random(7, 3).floats(len(a), 100, 152)


def _round_words(size: str) -> Operands:
    """Sums that end in ones below float32's last bit, of both signs, and sums that are zero."""
    n = 64
    a, b, sa, sb = _words(n)
    b[:] = 2
    a[:, 0] = np.arange(n) % 16
    a[:, 17] = np.arange(n) // 16 * 3 % 16
    c = np.where(np.arange(n) % 2, F(2.0**24), F(-(2.0**24))) + np.arange(n, dtype=F) * F(2)
    c[::8] = 0
    a[::8], c[16::16] = 0, F(-0.0)
    return a, b, sa, sb, c.astype(F)


def alphas(size: str) -> Operands:
    """(alpha, A_a, A_b): combinations of factors and amaxes, products that overflow and vanish among them."""
    a = np.concatenate([AMAXES, [INF, NAN, F(0)]]).astype(F)
    random = Random(8, 0)
    alpha, first, second = product(np.array([1, 0.5, -3], F), a, a[::3])
    n = 128 if size == "small" else 4096
    more = [np.abs(random.moderate(n)) for _ in range(3)]
    return tuple(np.concatenate(pair) for pair in zip((alpha, first, second), more, strict=True))


def recipe_scales(size: str) -> Operands:
    """(a, A) of the recipe's tiles: pairs where the order shows, and strange amaxes."""
    pairs = cases.order_pairs()
    a = np.concatenate(list(pairs.values()))
    whole = np.repeat(np.array([16 * mantissa for mantissa in pairs], F), [len(v) for v in pairs.values()])
    x, amax = product(AMAXES, np.concatenate([STRANGE, AMAXES]))
    return distinct((np.concatenate([a, x]), np.concatenate([whole, amax]).astype(F)))


def cast_elements(size: str) -> Operands:
    """(x, s, S): elements at ties under float32 scales that E4M3 rounds; zero, huge and negative scales."""
    scale = np.array([1, 3, 1293.4736, 2688 / 300], F)
    tile = np.concatenate([cases.E4M3_VALUES[[0, 1, 7, 8, 60, 126]], np.array([0.3, 1.03, 37.1, 401, 500], F)])
    s, of, point = product(tile, np.concatenate([scale, np.array([0, -2], F)]), np.concatenate([MIDPOINTS, -MIDPOINTS]))
    d = e4m3.VALUES[e4m3.encode(s)]
    with np.errstate(all="ignore"):
        e = np.fmin(F(1) / (d * (F(1) / np.where(of > 0, of, F(1)))), FLT_MAX)
        x = np.where(np.isfinite(point / e), point / e, F(1)).astype(F)
    return distinct((x, s, of))


def long_blocks(width: int) -> Callable[[str], Operands]:
    """(x[width],): rows of the suite's tensors, zeros and special values among them, laid end to end."""

    def make(size: str) -> Operands:
        names = ("normal/s1.bf16", "mixed/decades8.f32", "zero/sparse.f32", "special/nan-inf.f32", "e2m1-tie/amax-384")
        x = of_suite(*names)("small")[0]
        rows = len(x) // (width // 16)
        x = x[: rows * (width // 16)].reshape(rows, width)
        powers = np.ldexp(F(1), np.arange(-149, 128, 9)).astype(F)
        tops = np.zeros((3 * len(powers), width), F)
        tops[:, 0] = np.concatenate([powers, powers * F(1.5), powers * F(1.75)])
        tops[:, 1] = tops[:, 0] * F(0.5)
        zero = np.zeros((1, width), F)
        every = np.concatenate([x[:: 1 if size == "full" else 1 + rows // 64], tops, zero, -zero])
        return (every[: None if width < 128 else 96],) if size == "small" else (every,)

    return make

"""E2M1 element codes: values, nearest and stochastic rounding, packing.

Rules E2M1-VALUES, E2M1-RNE, E2M1-SATURATE, E2M1-NAN, E2M1-ZERO, E2M1-PACK, SR-SM100, SR-FALLBACK, SR-JAX, SR-IDEAL.

A code is sign (bit 3) and magnitude index (bits 2..0).  A rounding rule is seven decision points: the
magnitude index is the number of points that the magnitude has reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from .arithmetic import Arithmetic
from .arrays import as_float32
from .fp32 import F32, U8, U32, AnyArray, reverse_halves, through

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES: F32 = np.array(MAGNITUDES + tuple(-m for m in MAGNITUDES), np.float32)  # code 8 is -0.0
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _points(thresholds: tuple[float, ...], inclusive: tuple[bool, ...]) -> tuple[np.float32, ...]:
    """Decision points as the smallest float32 that reaches the next code."""
    up = np.float32(np.inf)
    return tuple(
        np.float32(t) if reached else np.nextafter(np.float32(t), up)
        for t, reached in zip(thresholds, inclusive, strict=True)
    )


#: rounding rule -> seven smallest magnitudes that get index 1..7
ROUNDING = {
    # a tie goes to the even index: up from 1, 3, 5, down from 0, 2, 4, 6
    "nearest-even": _points(MIDPOINTS, (False, True, False, True, False, True, False)),
    "ties-away": _points(MIDPOINTS, (True,) * 7),
    "ties-to-zero": _points(MIDPOINTS, (False,) * 7),
    "truncate": _points(MAGNITUDES[1:], (True,) * 7),
}
NAN_CODE = 7  # cvt.rn.satfinite: NaN becomes +6


def encode_magnitude(magnitude: F32, rounding: str = "nearest-even") -> U8:
    """Magnitude index 0..7 of non-negative float32; above 6 saturates; NaN gives 0 (the caller decides)."""
    points = ROUNDING[rounding]
    index = np.asarray(np.greater_equal(magnitude, points[0])).view(np.uint8)
    reached = np.empty_like(index, np.bool_)
    for point in points[1:]:
        np.greater_equal(magnitude, point, out=reached)
        np.add(index, reached.view(np.uint8), out=index)
    return index


def encode(x: ArrayLike, rounding: str = "nearest-even", *, nan_code: int = NAN_CODE) -> U8:
    """E2M1 codes 0..15 of float32 values, as ``cvt.rn.satfinite.e2m1x2.f32`` gives them.

    Nearest, ties to the even code; |x| > 6 and Inf saturate to 6 with their sign; a negative that rounds
    to zero and -0 give 8; NaN gives ``nan_code`` (7, whatever its sign).

    Args:
        x: float32 array of any shape (other dtypes must be exactly representable in float32).
        rounding: "nearest-even" or one of the deviations "ties-away", "ties-to-zero", "truncate".
    Returns:
        uint8 array of x's shape.
    Raises:
        TypeError: x is not floating point.  ValueError: a float64 is not a float32 value, unknown rounding.
    """
    if rounding not in ROUNDING:
        raise ValueError(f"rounding {rounding!r} is not one of {', '.join(map(repr, ROUNDING))}")
    values = as_float32(x)
    index = encode_magnitude(np.abs(values), rounding)
    index |= np.signbit(values).view(np.uint8) * np.uint8(8)
    index[np.isnan(values)] = nan_code
    return index


# -- stochastic rounding --------------------------------------------------------------------------------
# A rule takes magnitudes of tiles (16, …) and the random numbers of their blocks: words (4, …), of which
# word g serves elements 4g..4g+3, or one uniform float an element (16, …).  It returns magnitude indices.

_SIX = np.float32(6).view(np.int32)
STEP = 1 << 16


def grid_position(magnitude: F32) -> AnyArray:
    """Place of a magnitude on the code grid in units of 2^-16 of a grid step, cut off: int32, 6 and above is 7·2^16.

    The step is 0.5 below 2, 1 below 4 and 2 below 6, so the place is the least of three straight lines.
    """
    limited = np.minimum(magnitude.view(np.int32), _SIX).view(np.float32)  # NaN and Inf are above 6 here
    t = (limited * np.float32(2.0**17)).astype(np.int32)
    position: AnyArray = np.minimum(t, np.minimum((t >> 1) + 2 * STEP, (t >> 2) + 4 * STEP))
    return position


def sm100_fields(words: U32) -> tuple[U32, U32, U32, U32]:
    """The 16 random bits of elements 0, 1, 2, 3 of each word (rule SR-SM100).

    Bytes 0 and 2 serve elements 0 and 1, bytes 1 and 3 elements 2 and 3; of each pair the second element
    sees the bits reversed.
    """
    low, high, byte = np.uint32(0xFFFF), np.uint32(16), np.uint32(8)
    pairs = (words & np.uint32(0x00FF00FF)) | ((words >> byte) & np.uint32(0x00FF00FF)) << byte
    # pairs now holds byte 0 | byte 1 << 8 | byte 2 << 16 | byte 3 << 24 with 0 and 2, 1 and 3 still apart
    first = (pairs & np.uint32(0xFF)) | ((pairs >> byte) & np.uint32(0xFF00))
    second = ((pairs >> byte) & np.uint32(0xFF)) | ((pairs >> high) & np.uint32(0xFF00))
    mirrored = reverse_halves(first | second << high)
    return first, mirrored & low, second, mirrored >> high


def _round_sm100(magnitude: F32, words: AnyArray) -> U8:
    """cvt.rs.satfinite.e2m1x4.f32: 16 random bits added to the discarded fraction; away from zero on a carry."""
    return _round_carry(magnitude, sm100_fields(words))


def _round_carry(magnitude: F32, fields: Sequence[U32]) -> U8:
    """16-bit ``fields`` of elements 0, 1, 2, 3 of each word added to the fractions; the carry is the rounding."""
    position = grid_position(magnitude)
    groups = position.reshape(4, 4, *position.shape[1:])
    for element, field in enumerate(fields):
        groups[:, element] += field.view(np.int32)
    return (position >> 16).astype(np.uint8)


def _round_reversed(magnitude: F32, words: AnyArray) -> U8:
    """The fault of handing the operands over in the other order: elements 0..3 see the bits of 3..0."""
    return _round_carry(magnitude, sm100_fields(words)[::-1])


def _round_straight(magnitude: F32, words: AnyArray) -> U8:
    """The fault of giving both elements of a pair their bits in the same order."""
    first, _, second, _ = sm100_fields(words)
    return _round_carry(magnitude, (first, first, second, second))


def _round_without_1_5(magnitude: F32, words: AnyArray) -> U8:
    """The fault of a grid that has no 1.5: values between 1 and 2 go to one of the two."""
    one, two = np.float32(1), np.float32(2)
    index = _round_sm100(magnitude, words)
    # between 1 and 2 the place on the halved grid is that of magnitude/2 between 0.5 and 1
    halved = _round_sm100(np.where(magnitude > one, magnitude * np.float32(0.5), magnitude), words)
    return np.where((magnitude > one) & (magnitude < two), halved * np.uint8(2), index)


def _round_fallback(magnitude: F32, words: AnyArray) -> U8:
    """Transformer Engine's software rule (sm_120 and older): t = fl(|x| + byte/256·step(|x|)), cut to the grid.

    Element i takes byte i.  byte/256·step is exact, so fma and this sum round alike.
    """
    step = np.where(magnitude < 2, np.float32(0.5), np.where(magnitude < 4, np.float32(1), np.float32(2)))
    jitter = step.reshape(4, 4, *step.shape[1:])
    for element in range(4):
        byte = (words >> np.uint32(8 * element)) & np.uint32(0xFF)
        jitter[:, element] *= byte.astype(np.float32) * np.float32(1 / 256)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return (grid_position(magnitude + step) >> 16).astype(np.uint8)


def _round_jax(magnitude: F32, uniform: AnyArray) -> U8:
    """Transformer Engine's pure-JAX rule: up where fraction >= uniform, on a grid without 1.5."""
    floor = np.array([0, 1, 2, 2, 4, 5, 6, 7], np.uint8)[encode_magnitude(magnitude, "truncate")]
    low = VALUES[floor]
    ceil = np.array([1, 2, 4, 4, 5, 6, 7, 7], np.uint8)[floor]
    with np.errstate(all="ignore"):
        up = ((magnitude - low) / (VALUES[ceil] - low) >= uniform) & (magnitude != low)  # on the grid: 0/0 there
    return np.where(up, ceil, floor)


def _round_ideal(magnitude: F32, uniform: AnyArray) -> U8:
    """Exactly the fraction as probability: up where uniform < fraction."""
    floor = encode_magnitude(magnitude, "truncate")
    low, high = VALUES[floor].astype(np.float64), VALUES[np.minimum(floor + 1, 7)].astype(np.float64)
    with np.errstate(all="ignore"):
        up = uniform * (high - low) < magnitude - low
    return floor + (up & (floor < 7))


#: rule -> (function, random numbers a block: 4 words or 16 uniforms)
STOCHASTIC: dict[str, tuple[Callable[[F32, AnyArray], U8], int]] = {
    "sm100": (_round_sm100, 4),
    "te-fallback": (_round_fallback, 4),
    "te-jax": (_round_jax, 16),
    "ideal": (_round_ideal, 16),
    "sm100-operands-reversed": (_round_reversed, 4),
    "sm100-no-bit-reversal": (_round_straight, 4),
    "sm100-without-1.5": (_round_without_1_5, 4),
}


def round_elements(y: F32, ar: Arithmetic, random: AnyArray | None = None) -> U8:
    """E2M1 codes of scaled elements by the arithmetic's element fields (rules E2M1-*, SR-*).

    ``random``: None for nearest; else the random numbers of the tiles y (16, …), see above.
    """
    y = through(y, ar.element_via)
    magnitude = np.abs(y)
    if random is None:
        index = encode_magnitude(magnitude, ar.element_rounding)
    else:
        index = STOCHASTIC[ar.stochastic][0](magnitude, random)
    negative = np.signbit(y)
    if ar.negative_zero == "drop":
        negative &= index != 0
    elif ar.negative_zero == "drop-exact":
        negative &= magnitude != 0
    codes = index
    codes |= negative.view(np.uint8) * np.uint8(8)
    if not ar.saturate:
        codes[magnitude >= 7] = 8  # the tie at 7 goes to the even 8
        codes[np.isinf(magnitude)] = ar.nan_code
    nan = np.isnan(magnitude)
    if nan.any():
        codes[nan] = ar.nan_code
    return codes


def rounded_values(codes: U8, y: F32, ar: Arithmetic) -> F32:
    """Values of the codes of y; without saturation also the 8 and the NaN that no code can hold."""
    values = VALUES[codes]
    if ar.saturate:
        return values
    values = np.where(np.abs(y) >= 7, np.copysign(np.float32(8), y), values)
    return np.where(np.isfinite(y), values, np.float32(np.nan))


def encode_stochastic(x: ArrayLike, rbits: ArrayLike, rule: str = "sm100") -> U8:
    """Stochastically rounded codes, (n, 4) uint8.

    Args:
        x: (n, 4) float32, four consecutive elements a row.
        rbits: (n,) uint32, one word for four elements ("sm100", "te-fallback"); (n, 4) float32 uniforms in
            [0, 1) for "te-jax" and "ideal".
        rule: "sm100": cvt.rs.satfinite.e2m1x4.f32 of sm_100a and sm_103a; "te-fallback": Transformer
            Engine's software rule; "te-jax": its pure-JAX rule, which never gives 1.5; "ideal": exact
            probabilities.
    Returns:
        uint8 (n, 4): magnitudes above 6 and Inf saturate, the sign of zero is kept, NaN gives 7 (te-jax: 8).
    Raises:
        TypeError, ValueError: wrong dtype or shape, unknown rule.
    """
    if rule not in STOCHASTIC:
        raise ValueError(f"rule {rule!r} is not one of {', '.join(map(repr, STOCHASTIC))}")
    values = as_float32(x)
    if values.ndim != 2 or values.shape[1] != 4:
        raise ValueError(f"x has four elements a row, shape (n, 4); got {values.shape}")
    random = checked_random(rbits, rule, (len(values), 1))
    ar = Arithmetic(stochastic=rule, nan_code=8 if rule == "te-jax" else NAN_CODE)  # type: ignore[arg-type]
    tiles = np.zeros((16, len(values)), np.float32)  # a block of which only the first word's elements count
    tiles[:4] = values.T
    numbers = np.zeros((STOCHASTIC[rule][1], len(values)), random.dtype)
    numbers[: random.shape[1]] = random.T
    return round_elements(tiles, ar, numbers)[:4].T.copy()


def checked_random(rbits: ArrayLike, rule: str, groups: tuple[int, int]) -> AnyArray:
    """Random numbers as an array for (rows, groups of four elements): words (rows, groups), uniforms (rows, 4·groups).

    Raises TypeError or ValueError that says what the rule takes.
    """
    random = np.asarray(rbits)
    rows, count = groups
    if STOCHASTIC[rule][1] == 4:
        if random.dtype != np.uint32:
            raise TypeError(
                f"rbits for the rule {rule!r} are uint32 words, one for 4 elements; got dtype {random.dtype}"
            )
        wanted: tuple[int, ...] = (rows, count)
    else:
        if random.dtype != np.float32:
            raise TypeError(
                f"rbits for the rule {rule!r} are float32 uniforms in [0, 1), one an element; got dtype {random.dtype}"
            )
        wanted = (rows, 4 * count)
        if random.size and not (random.min() >= 0 and random.max() < 1):
            raise ValueError(f"uniforms for the rule {rule!r} lie in [0, 1); got {random.min()}..{random.max()}")
    if random.shape != wanted and random.shape != wanted[: 2 - (wanted[1] == 1)]:
        raise ValueError(f"rbits for the rule {rule!r} have shape {wanted} here; got {random.shape}")
    return random.reshape(wanted)


def decode(codes: ArrayLike) -> F32:
    """float32 values of E2M1 codes 0..15; ValueError for other codes."""
    codes = np.asarray(codes)
    if codes.dtype.kind not in "ui":
        raise TypeError(f"E2M1 codes are integers 0..15; got dtype {codes.dtype}")
    if codes.size and (codes.min() < 0 or codes.max() > 15):
        raise ValueError(f"E2M1 codes are 0..15; got {codes.min()}..{codes.max()}")
    values: F32 = VALUES[codes]
    return values


def pack(codes: ArrayLike) -> U8:
    """Two codes a byte along the last axis: element 2i in the low nibble, 2i+1 in the high one (E2M1-PACK)."""
    codes = np.asarray(codes)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"packing needs an even number of codes in the last axis; got shape {codes.shape}")
    if codes.dtype != np.uint8:
        raise TypeError(f"codes to pack are uint8 0..15; got dtype {codes.dtype}")
    if codes.size and codes.max() > 15:
        raise ValueError(f"E2M1 codes are 0..15; got {codes.max()}")
    packed: U8 = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack(packed: ArrayLike) -> U8:
    """The codes of packed bytes: the inverse of :func:`pack`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed codes are uint8; got dtype {packed.dtype}")
    if packed.ndim == 0:
        raise ValueError("packed codes have at least one axis; got a scalar")
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & np.uint8(15)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes

"""Every operation that a vector or a line of the pipe can ask for, and the oracle's answer.

An operation maps operands to results row by row: no row depends on another.  *Settings* change its answer in one
named way, so that a fault can be planted and recognised: fields of ``nvfp4ref.Arithmetic``, the transform's
(``rht.…``), and a few names that one operation alone knows.  No settings: what the specification says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance.model import ARITHMETIC
from conformance.vectors.fields import Array, Field, bits, fields
from conformance.vectors.random import Random
from nvfp4ref import (
    blocks,
    e2m1,
    e4m3,
    e8m0,
    four_over_six,
    fp8,
    hadamard,
    layout,
    mxfp4,
    partial_cast,
    philox,
    rcp,
    scaling,
    tensorcore,
)
from nvfp4ref.fp32 import NAN, bfloat16, canonical_nan, to_bfloat16, widen
from nvfp4ref.quantize import Job, quantize_tiles
from nvfp4ref.scaling import GlobalScale

F = np.float32
ONE = F(1)
Settings = Mapping[str, Any]
Answer = Callable[..., tuple[Array, ...]]
Operands = tuple[Array, ...]


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: as on the pipe.
        what: one clause for the documentation.
        operands, results: in the order of a line.
        settings: the names of what changes the answer, and so which faults it can have.
        random: operands of n random rows.
    """

    name: str
    what: str
    operands: tuple[Field, ...]
    results: tuple[Field, ...]
    settings: frozenset[str]
    random: Callable[[Random, int], Operands]
    _answer: Answer

    def answer(self, operands: Operands, settings: Settings | None = None) -> tuple[Array, ...]:
        """The results of n rows.

        Raises ValueError when the operands are no such rows, or the settings cannot be had together.
        """
        for field, array in zip(self.operands, operands, strict=True):
            field.check(array)
        with np.errstate(all="ignore"):
            results = self._answer(settings or {}, *operands)
        return tuple(field.check(array) for field, array in zip(self.results, results, strict=True))

    def faulty(self, operands: Operands, settings: Settings) -> tuple[Array, ...] | None:
        """The results under settings; None when this operation does not know them, or they do not go together."""
        if not set(settings) <= self.settings:
            return None
        try:
            return self.answer(operands, settings)
        except (ValueError, TypeError):
            return None


OPERATIONS: dict[str, Operation] = {}


def operation(
    signature: str,
    what: str,
    random: Callable[[Random, int], Operands],
    settings: frozenset[str] | tuple[str, ...] = (),
    name: str | None = None,
) -> Callable[[Answer], Answer]:
    """Register a function as the operation of its name: "x:f32 -> code:e2m1"."""

    def register(answer: Answer) -> Answer:
        operands, _, results = signature.partition("->")
        label = name or answer.__name__.strip("_").replace("_", "-")
        OPERATIONS[label] = Operation(
            label, what, fields(operands), fields(results), frozenset(settings), random, answer
        )
        return answer

    return register


def _arithmetic(settings: Settings, base: str | nv.Arithmetic = "te", **always: Any) -> nv.Arithmetic:
    """A preset with the settings that are fields of Arithmetic; the setting ``preset`` replaces it."""
    changed = {key: value for key, value in settings.items() if key in ARITHMETIC}
    return nv.arithmetic(settings.get("preset", base), **always, **changed)


# ---- float32 -----------------------------------------------------------------------------------------------


def _nan(settings: Settings, x: Array) -> Array:
    """The kernels' NaN, or the one of the setting ``nan``."""
    value = np.uint32(settings["nan"]).view(F) if "nan" in settings else NAN
    return np.where(np.isnan(x), value, x).astype(F)


def _two_floats(random: Random, n: int) -> Operands:
    return random.mixed(n, random.patterns, random.moderate), random.mixed(n, random.patterns, random.moderate)


@operation("a:f32 b:f32 -> product:f32", "fl(a·b)", _two_floats, ("flush_subnormals", "nan"))
def _multiply(settings: Settings, a: Array, b: Array) -> Operands:
    return (_nan(settings, scaling.operations(_arithmetic(settings)).mul(a, b)),)


@operation("a:f32 b:f32 -> quotient:f32", "fl(a/b)", _two_floats, ("flush_subnormals", "nan", "by-reciprocal"))
def _divide(settings: Settings, a: Array, b: Array) -> Operands:
    o = scaling.operations(_arithmetic(settings))
    return (_nan(settings, o.mul(a, o.div(ONE, b)) if "by-reciprocal" in settings else o.div(a, b)),)


@operation(
    "a:f32 b:f32 -> quotient:f32",
    "a times the reciprocal of b by a GPU's table",
    _two_floats,
    ("division",),
    "divide-approximate",
)
def _divide_approximate(settings: Settings, a: Array, b: Array) -> Operands:
    exact = settings.get("division") == "ieee"
    return (_nan({}, a / b if exact else rcp.divide(a, b)),)


@operation("a:f32 b:f32 -> smaller:f32", "fmin(a, b): the other one when one is NaN", _two_floats, ("block_scale_nan",))
def _minimum(settings: Settings, a: Array, b: Array) -> Operands:
    smaller = np.where(a < b, a, b)
    if "block_scale_nan" in settings:  # a NaN goes through
        return (np.where(np.isnan(a) | np.isnan(b), NAN, smaller),)
    return (canonical_nan(np.where(np.isnan(a), b, np.where(np.isnan(b), a, smaller))),)


def _widened(dtype: Any) -> Answer:
    def answer(settings: Settings, x: Array) -> Operands:
        wide = widen(x)
        if "flush_subnormals" in settings:
            smallest = np.float32(ml_dtypes.finfo(dtype).smallest_normal)
            wide = np.where(np.abs(wide) < smallest, np.copysign(F(0), wide), wide)
        return (wide,)

    return answer


for _label, _dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
    operation(
        f"x:{_label} -> wide:f32",
        f"{_label} as float32, exact; a NaN keeps its payload",
        lambda random, n, dtype=_dtype: (random.words(n).astype(np.uint16).view(dtype),),  # type: ignore[misc]
        ("flush_subnormals",),
        f"widen-{_label}",
    )(_widened(_dtype))


# ---- E2M1 --------------------------------------------------------------------------------------------------

ELEMENT = ("element_rounding", "element_via", "saturate", "negative_zero", "nan_code")
MIDPOINTS = np.array(e2m1.MIDPOINTS, F)


def _near_e2m1(random: Random, n: int) -> Operands:
    magnitudes = np.concatenate([MIDPOINTS, e2m1.VALUES[1:8]])
    return (random.mixed(n, lambda k: random.near(magnitudes, k), lambda k: random.floats(k, 120, 132)),)


@operation("x:f32 -> code:e2m1", "the nearest E2M1 code", _near_e2m1, ELEMENT)
def _e2m1(settings: Settings, x: Array) -> Operands:
    return (e2m1.round_elements(x.copy(), _arithmetic(settings)),)


@operation(
    "code:e2m1 -> value:f32",
    "the value of an E2M1 code",
    lambda random, n: (random.codes(n),),
    ("positive-zero",),
    "e2m1-decode",
)
def _e2m1_decode(settings: Settings, code: Array) -> Operands:
    value = e2m1.decode(code)
    return (value + F(0) if "positive-zero" in settings else value,)


def _packed(codes: Array, packing: str = "low-nibble-first") -> Array:
    """Codes (n, 16) as packed bytes (n, 8)."""
    out = np.empty((len(codes), codes.shape[1] // 2), np.uint8)
    tiles = np.ascontiguousarray(codes.reshape(len(codes), -1, 16).transpose(2, 0, 1))
    layout.pack_tiles(tiles, packing, out)
    return out


@operation(
    "codes:e2m1*16 -> packed:u8*8",
    "two codes a byte, the even element in the low nibble",
    lambda random, n: (random.codes(n, 16),),
    ("packing",),
    "e2m1-pack",
)
def _e2m1_pack(settings: Settings, codes: Array) -> Operands:
    return (_packed(codes, settings.get("packing", "low-nibble-first")),)


# ---- E4M3, UE8M0 -------------------------------------------------------------------------------------------

BYTE = ("scale_rounding", "scale_overflow", "scale_nan_byte", "scale_invalid_byte", "scale_floor")


def _near_e4m3(random: Random, n: int) -> Operands:
    values = e4m3.VALUES[1:127]
    magnitudes = np.concatenate([values, (values[:-1] + values[1:]) / F(2)])
    return (random.mixed(n, lambda k: random.near(magnitudes, k), lambda k: random.floats(k, 114, 138)),)


@operation("x:f32 -> byte:e4m3", "the nearest E4M3 byte", _near_e4m3, BYTE)
def _e4m3(settings: Settings, x: Array) -> Operands:
    scale = GlobalScale(np.ones_like(x), np.ones_like(x))
    return (np.asarray(scaling.round_scale(x, x, scale, _arithmetic(settings)), np.uint8),)


@operation(
    "byte:e4m3 -> value:f32",
    "the value of an E4M3 byte",
    lambda random, n: (random.bytes(n),),
    ("no-nan",),
    "e4m3-decode",
)
def _e4m3_decode(settings: Settings, byte: Array) -> Operands:
    value = e4m3.decode(byte)
    return (np.where(np.isnan(value), F(480), value) if "no-nan" in settings else value,)


_POWERS = np.ldexp(np.ones(1, F), np.arange(-149, 128)).astype(F)


def _power(rounding: str, overflow: str) -> Answer:
    def answer(settings: Settings, x: Array) -> Operands:
        byte = e8m0.encode(x, settings.get("rounding", rounding), overflow=settings.get("overflow", overflow))
        return (np.where(np.isnan(x), np.uint8(settings["nan-byte"]), byte) if "nan-byte" in settings else byte,)

    return answer


for _rounding in ("floor", "ceil"):
    for _overflow in ("saturate", "nan"):
        operation(
            "x:f32 -> byte:e8m0",
            f"UE8M0, rounded {'down' if _rounding == 'floor' else 'up'} to a power of two"
            + (", overflow to NaN" if _overflow == "nan" else ""),
            lambda random, n: (random.mixed(n, lambda k: random.near(_POWERS, k), random.patterns),),
            ("rounding", "overflow", "nan-byte"),
            f"e8m0-{_rounding}" + ("-nan" if _overflow == "nan" else ""),
        )(_power(_rounding, _overflow))


@operation(
    "byte:e8m0 -> value:f32",
    "the value of a UE8M0 byte",
    lambda random, n: (random.bytes(n),),
    ("flush_subnormals",),
    "e8m0-decode",
)
def _e8m0_decode(settings: Settings, byte: Array) -> Operands:
    value = e8m0.decode(byte)
    return (scaling.flushed(value) if "flush_subnormals" in settings else value,)


# ---- scales ------------------------------------------------------------------------------------------------

STEP = ("flush_subnormals", "division")
GLOBAL = ("global_scale", "global_guard", "global_type", "e4m3_max", "headroom", *STEP)
BLOCK_SCALE = ("block_scale", "sixth_type", "block_scale_max", "block_scale_nan", "headroom", *STEP)
ENCODE = ("encode_scale", "encode_max", "encode_nan", "encode_ulp", "reciprocal_of_zero", *STEP)


def _pair(scale: Array) -> GlobalScale:
    return GlobalScale(scale, np.divide(ONE, scale))


@operation(
    "amax:f32 -> encode:f32 decode:f32",
    "the global scale S of an amax, and D = fl(1/S)",
    lambda random, n: (random.mixed(n, lambda k: np.abs(random.moderate(k)), random.patterns),),
    GLOBAL,
)
def _global_scale(settings: Settings, amax: Array) -> Operands:
    scale = scaling.global_scale(amax, _arithmetic(settings).for_input("float32"))
    return canonical_nan(scale.encode.copy()), canonical_nan(scale.decode.copy())


def _amax_and_scale(random: Random, n: int) -> Operands:
    scale = np.abs(random.floats(n, 117, 147))
    wanted = np.concatenate([e4m3.VALUES[1:127], (e4m3.VALUES[1:126] + e4m3.VALUES[2:127]) / F(2)])
    with np.errstate(all="ignore"):
        return random.moved(random.choice(wanted, n) * F(6) / scale), scale


@operation(
    "amax:f32 scale:f32 -> unrounded:f32 byte:e4m3",
    "the block scale of a block amax under S, before and after E4M3",
    _amax_and_scale,
    BLOCK_SCALE + BYTE,
)
def _block_scale(settings: Settings, amax: Array, scale: Array) -> Operands:
    ar, pair = _arithmetic(settings).for_input("float32"), _pair(scale)
    if ar.block_scale in scaling.PRESCALED:
        raise ValueError("the prescaled forms need the elements")
    s = scaling.block_scale(amax, pair, ar)
    byte = scaling.round_scale(s, amax, pair, ar)
    return canonical_nan(np.array(s, F)), np.asarray(byte, np.uint8)


@operation(
    "byte:e4m3 scale:f32 -> multiplier:f32",
    "the encode scale e of a block, from its scale byte and S",
    lambda random, n: (random.bytes(n) & np.uint8(0x7F), np.abs(random.mixed(n, random.moderate, random.patterns))),
    ENCODE,
)
def _encode_scale(settings: Settings, byte: Array, scale: Array) -> Operands:
    ar = _arithmetic(settings)
    if ar.encode_scale in (*scaling.DIVISORS, "two-multiplications", "unrounded-block-scale"):
        raise ValueError("this form has no multiplier, or takes more than the byte")
    return (canonical_nan(np.array(scaling.encode_scale(byte, e4m3.VALUES[byte], _pair(scale), ar), F)),)


def _element_and_scale(random: Random, n: int) -> Operands:
    e = np.abs(random.floats(n, 117, 147))
    points = np.concatenate([MIDPOINTS, e2m1.VALUES[1:8]])
    with np.errstate(all="ignore"):
        return random.moved(random.signed(random.choice(points, n)) / e), e


@operation(
    "x:f32 multiplier:f32 -> scaled:f32 code:e2m1",
    "y = fl(x·e) and its code",
    _element_and_scale,
    (*ELEMENT, "fused"),
)
def _element(settings: Settings, x: Array, e: Array) -> Operands:
    ar = _arithmetic({key: value for key, value in settings.items() if key != "fused"})
    y = x * e
    code = e2m1.round_elements(y.copy(), ar)
    if "fused" in settings:  # the exact product meets the grid, which ties of fl(x·e) show
        exact = np.abs(x.astype(np.float64) * e)
        grid = np.searchsorted(MIDPOINTS.astype(np.float64), exact, "left").astype(np.uint8)
        tie = np.isin(exact, MIDPOINTS)
        code = np.where(tie | ~np.isfinite(exact), code, grid | (code & np.uint8(8)))
    return canonical_nan(y.copy()), code


# ---- whole blocks ------------------------------------------------------------------------------------------

#: What a block shows besides amaxes, which are given; what it has not are tiles, transforms and random bits.
QUANTIZE = frozenset(ARITHMETIC) - {"row_scaled", "amax_group", "tile_scales", "rht_sum", "stochastic"} | {"preset"}


def _random_block(random: Random, n: int) -> Array:
    """Elements of some binades below the block's largest; half of the rows are bfloat16, one in eight has specials."""
    x = random.floats(16 * n, 121, 127).reshape(n, 16) * np.ldexp(ONE, random.integers(n, -12, 13))[:, None]
    half = random.words(n) % np.uint32(2) == 0
    x = np.where(half[:, None], (to_bfloat16(x).astype(np.uint32) << np.uint32(16)).view(F), x)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x00800000], np.uint32)
    place = (random.words(n) % np.uint32(128))[:, None] == np.arange(16)
    return np.where(place, random.choice(special.view(F), n)[:, None], x).astype(F)


def _largest(x: Array) -> Array:
    """max(abs(.)) of each row, NaN ignored."""
    return np.abs(np.where(np.isnan(x), F(0), x)).max(axis=1)


def _block_and_amax(random: Random, n: int) -> Operands:
    x = _random_block(random, n)
    return x, (_largest(x) * np.ldexp(ONE, random.integers(n, 0, 12))).astype(F)


def _block_and_scale(random: Random, n: int) -> Operands:
    x, amax = _block_and_amax(random, n)
    return x, scaling.global_scale(amax, nv.arithmetic("te")).encode.astype(F)


@operation(
    "x:f32*16 -> amax:f32",
    "the amax of a block",
    lambda random, n: (_random_block(random, n),),
    ("amax_nan", "block_amax"),
)
def _block_amax(settings: Settings, x: Array) -> Operands:
    ar = _arithmetic(settings)
    magnitude = np.abs(x) if ar.block_amax == "abs" else np.maximum(x, F(0))
    nan = {"ignore": "ignore", "propagate": "propagate", "xla-cpu": "tree"}[ar.amax_nan]
    return (canonical_nan(blocks.block_amax(magnitude.T[:, :, None], (1, 16), nan)[:, 0].copy()),)


@operation("x:f32*16 scale:f32 -> byte:e4m3 packed:u8*8", "a block under a given S", _block_and_scale, QUANTIZE)
def _block(settings: Settings, x: Array, scale: Array) -> Operands:
    ar = _arithmetic(settings).for_input("float32")
    if ar.four_over_six:
        raise ValueError("4over6 needs the amax")
    nan = "ignore" if ar.amax_nan == "ignore" else "propagate"
    pair = _pair(scale[:, None])
    job = Job(x.T[:, :, None], np.zeros((len(x), 1), F), pair, (1, 16), ar, nan)
    codes, byte = quantize_tiles(job)
    return byte[:, 0].copy(), _packed(codes[:, :, 0].T, ar.packing)


def _quantized(settings: Settings, preset: str | nv.Arithmetic, x: Array, amax: Array) -> nv.NVFP4Tensor:
    """Each row as a tensor of one block with an amax of its own."""
    ar = _arithmetic(settings, preset)
    # XLA's way with NaN begins at 4096 elements, which no block has
    ar = nv.arithmetic(ar, row_scaled=True, amax_nan="propagate" if ar.amax_nan == "xla-cpu" else ar.amax_nan)
    return nv.quantize(x, amax=amax, arithmetic=ar)


def _quantize(preset: str) -> Answer:
    def answer(settings: Settings, x: Array, amax: Array) -> Operands:
        q = _quantized(settings, preset, x, amax)
        return q.scales[:, 0].copy(), q.packed

    return answer


def _one_level(preset: str) -> Answer:
    def answer(settings: Settings, x: Array) -> Operands:
        ar = _arithmetic(settings, preset)
        alone = ar.global_scale == "none"
        q = nv.quantize(x, amax=ONE, arithmetic=ar) if alone else _quantized({}, ar, x, _largest(x))
        return q.scales[:, 0].copy(), q.packed

    return answer


for _preset, _values in nv.PRESETS.items():
    if _values.global_scale == "none":
        operation(
            "x:f32*16 -> byte:e4m3 packed:u8*8",
            f"a block, arithmetic {_preset}, which has no global scale, float32 input",
            lambda random, n: (_random_block(random, n),),
            QUANTIZE,
            f"quantize.{_preset}",
        )(_one_level(_preset))
    elif not _values.four_over_six:
        operation(
            "x:f32*16 amax:f32 -> byte:e4m3 packed:u8*8",
            "a block of a tensor with this amax"
            + ("" if _preset == "te" else f", arithmetic {_preset}, float32 input"),
            _block_and_amax,
            QUANTIZE,
            "quantize" if _preset == "te" else f"quantize.{_preset}",
        )(_quantize(_preset))


def _four_over_six(preset: str, **always: Any) -> Answer:
    def answer(settings: Settings, x: Array, amax: Array) -> Operands:
        ar = _arithmetic({**always, **settings}, preset)
        q = _quantized({}, ar, x, amax)
        err4, err6 = q.steps.err4, q.steps.err6
        byte, packed = q.scales[:, 0].copy(), q.packed.copy()
        if err4 is None or err6 is None:
            return byte, packed, np.zeros(len(x), F), np.zeros(len(x), F)
        if "tie-to-4" in settings:
            tied = err4[:, 0] == err6[:, 0]
            byte[tied], packed[tied] = _mapped_to_4(x[tied], amax[tied], ar)
        return byte, packed, err4[:, 0].copy(), err6[:, 0].copy()

    return answer


def _mapped_to_4(x: Array, amax: Array, ar: nv.Arithmetic) -> tuple[Array, Array]:
    """Bytes and packed codes of blocks that are all mapped to 4."""
    pair, a = scaling.global_scale(amax[:, None], ar), _largest(x)[:, None]
    base = np.asarray(a / F(6) * pair.encode, F)
    four = four_over_six.candidate(x.T[:, :, None], a, base, 1.5, pair, ar)
    return four.scale[:, 0], _packed(four.codes[:, :, 0].T)


for _mode in ("MAE", "MSE"):
    for _maximum in (256, 448):
        for _fast in (False, True):
            operation(
                "x:f32*16 amax:f32 -> byte:e4m3 packed:u8*8 error4:f32 error6:f32",
                f"a block by 4over6, {_mode}, E = {_maximum}" + (", fast error" if _fast else ""),
                _block_and_amax,
                QUANTIZE | {"tie-to-4"},
                f"four-over-six.{_mode}-{_maximum}" + ("-fast" if _fast else ""),
            )(_four_over_six("te", four_over_six=_mode, e4m3_max=_maximum, four_over_six_fast_error=_fast))
operation(
    "x:f32*16 amax:f32 -> byte:e4m3 packed:u8*8 error4:f32 error6:f32",
    "a block by 4over6, arithmetic fouroversix, float32 input",
    _block_and_amax,
    QUANTIZE,
    "quantize.fouroversix",
)(_four_over_six("fouroversix"))


# ---- the Hadamard transform --------------------------------------------------------------------------------


def _vector(random: Random, n: int) -> Operands:
    x = to_bfloat16(_random_block(random, n)).view(bfloat16)
    mask = np.where(random.words(n) % np.uint32(4) == 0, random.words(n), np.uint32(hadamard.TE_SIGN_MASK))
    return x, mask.astype(np.uint16)


def _transformed(settings: Settings, x: Array, mask: Array, round_to: str) -> Array:
    """The transform of each row under its own mask: the signs go onto the input, exactly."""
    if settings.get("rht") == "missing":
        return x if round_to == "bfloat16" else widen(x)
    signs = np.where(mask[:, None] >> np.arange(16, dtype=np.uint16) & np.uint16(1), np.uint16(0x8000), np.uint16(0))
    if settings.get("rht.sign_mask") == 0:
        signs[:] = 0
    rht = nv.RHT(sign_mask=0, round_to=round_to, normalised=settings.get("rht.normalised", True))
    on_input = settings.get("rht.signs_on", "input") == "input"
    given = (bits(x) ^ signs).view(bfloat16) if on_input else x
    y = hadamard.transform(given, rht, -1, settings.get("rht_sum", "tensor-core"))
    if not on_input:
        flips = signs.astype(bits(y).dtype) << np.array(8 * (y.itemsize - 2), bits(y).dtype)
        y = np.where(np.isnan(y), bits(y), bits(y) ^ flips).view(y.dtype)
    return y


_RHT = ("rht", "rht.sign_mask", "rht.normalised", "rht.signs_on", "rht_sum")


@operation("x:bf16*16 mask:u16 -> y:bf16*16", "the random Hadamard transform of 16 elements", _vector, _RHT)
def _rht16(settings: Settings, x: Array, mask: Array) -> Operands:
    return (_transformed(settings, x, mask, "bfloat16"),)


@operation("x:bf16*16 mask:u16 -> sums:f32*16", "its accumulators before they are rounded", _vector, _RHT, "rht16-sums")
def _rht16_sums(settings: Settings, x: Array, mask: Array) -> Operands:
    return (_transformed(settings, x, mask, "float32"),)


# ---- dequantization ----------------------------------------------------------------------------------------


def _stored_block(random: Random, n: int) -> Operands:
    amax = random.mixed(n, lambda k: np.abs(random.moderate(k)), lambda k: np.abs(random.patterns(k)))
    return random.bytes(n), random.bytes(n, 8), amax


def _dequantize(dtype: Any, maximum: int) -> Answer:
    def answer(settings: Settings, byte: Array, packed: Array, amax: Array) -> Operands:
        changed = {key: value for key, value in settings.items() if key not in _DECODING}
        ar = _arithmetic(changed, e4m3_max=maximum) if "e4m3_max" not in changed else _arithmetic(changed)
        given = amax.reshape(-1) if len(amax) > 1 else amax.reshape(())
        q = nv.NVFP4Tensor.from_arrays(packed, byte[:, None], given, arithmetic=ar)
        if "factor" not in settings:
            return (nv.dequantize(q, dtype),)
        decode = scaling.global_scale(amax, ar).decode
        factor = (
            e4m3.VALUES[byte] * decode
            if settings["factor"] == "d·D"
            else e4m3.VALUES[byte] * (amax * (ONE / F(6 * maximum)))
        )
        wide = canonical_nan(np.asarray(e2m1.VALUES[q.codes] * factor[:, None], F))
        return (wide if dtype == F else wide.astype(dtype),)

    return answer


_DECODING = ("factor",)
for _label, _dtype, _maximum in (
    ("f32", F, 448),
    ("bf16", ml_dtypes.bfloat16, 448),
    ("f16", np.float16, 448),
    ("f32", F, 256),
):
    operation(
        f"byte:e4m3 packed:u8*8 amax:f32 -> x:{_label}*16",
        "the values of a block" + (f", as {_label}" if _label != "f32" else ", E = 256" if _maximum == 256 else ""),
        _stored_block,
        ("packing", "e4m3_max", *_DECODING),
        "dequantize" + ("" if _label == "f32" else f"-{_label}") + ("-256" if _maximum == 256 else ""),
    )(_dequantize(_dtype, _maximum))


# ---- stochastic rounding -----------------------------------------------------------------------------------


def _four_and_word(random: Random, n: int) -> Operands:
    y = random.mixed(4 * n, lambda k: random.floats(k, 121, 129), lambda k: random.near(e2m1.VALUES[1:8], k))
    return y.reshape(n, 4), random.words(n)


def _four_scales_and_word(random: Random, n: int) -> Operands:
    y = random.mixed(4 * n, lambda k: random.floats(k, 114, 136), lambda k: random.near(e4m3.VALUES[1:127], k))
    return y.reshape(n, 4), random.words(n)


def _four_and_uniforms(random: Random, n: int) -> Operands:
    return _four_and_word(random, n)[0], random.uniforms(4 * n).reshape(n, 4)


def _stochastic(rule: str, words: bool) -> Answer:
    def answer(settings: Settings, y: Array, numbers: Array) -> Operands:
        if settings.get("words") == "nearest":
            return (e2m1.encode(y),)
        chosen = settings.get("stochastic", rule)
        if (e2m1.STOCHASTIC[chosen][1] == 4) != words:
            raise ValueError(f"the rule {chosen} takes other random numbers")
        return (e2m1.encode_stochastic(y, numbers, chosen),)

    return answer


for _rule, _what in (("sm100", "16 random bits an element"), ("te-fallback", "8 random bits an element")):
    operation(
        "y:f32*4 word:u32 -> codes:e2m1*4",
        f"stochastic rounding, rule {_rule}: {_what}",
        _four_and_word,
        ("stochastic", "words"),
        f"stochastic.{_rule}",
    )(_stochastic(_rule, words=True))
for _rule in ("te-jax", "ideal"):
    operation(
        "y:f32*4 uniforms:f32*4 -> codes:e2m1*4",
        f"stochastic rounding, rule {_rule}: a uniform in [0, 1) an element",
        _four_and_uniforms,
        ("stochastic", "words"),
        f"stochastic.{_rule}",
    )(_stochastic(_rule, words=False))


@operation(
    "x:f32*4 word:u32 -> bytes:e4m3*4",
    "stochastic rounding to E4M3",
    _four_scales_and_word,
    ("words",),
    "stochastic.e4m3",
)
def _stochastic_e4m3(settings: Settings, x: Array, word: Array) -> Operands:
    return (e4m3.encode(x) if settings.get("words") == "nearest" else e4m3.encode_stochastic(x, word),)


# ---- random words ------------------------------------------------------------------------------------------


def _counters(random: Random, n: int) -> Operands:
    keys = random.words(2 * (n // 64 + 1)).reshape(-1, 2)
    return random.words(4 * n).reshape(n, 4), np.repeat(keys, 64, axis=0)[:n]


@operation("counter:u32*4 key:u32*2 -> words:u32*4", "one call of Philox4x32", _counters, ("rounds",))
def _philox(settings: Settings, counter: Array, key: Array) -> Operands:
    out = np.empty((len(counter), 4), np.uint32)
    for one, rows in _groups(key):
        out[rows] = philox.philox4x32(counter[rows], one, settings.get("rounds", 10))
    return (out,)


def _groups(keys: Array) -> list[tuple[Array, Array]]:
    """Distinct rows of an (n, k) array, and which rows hold each."""
    values, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    starts = np.searchsorted(group.reshape(-1)[order], np.arange(len(values) + 1))
    return [(value, order[starts[i] : starts[i + 1]]) for i, value in enumerate(values)]


def _states(random: Random, n: int) -> Operands:
    seed, offset = (np.repeat(random.words64(n // 64 + 1), 64)[:n] for _ in range(2))
    offset = np.where(random.words(n // 64 + 1).repeat(64)[:n] % np.uint32(4) == 0, ~(offset >> np.uint64(60)), offset)
    return seed, offset, (random.words(n) & np.uint32(0xFFFFF)).astype(np.uint64), random.words(n) % np.uint32(64)


@operation(
    "seed:u64 offset:u64 sequence:u64 number:u32 -> word:u32",
    "word number n of a thread of a kernel",
    _states,
    ("rounds", "words", "offset"),
    "philox-word",
)
def _philox_word(settings: Settings, seed: Array, offset: Array, sequence: Array, number: Array) -> Operands:
    out = np.empty(len(seed), np.uint32)
    call = (number // np.uint32(4)).astype(np.uint64)
    shift = settings["words"][1] if "words" in settings else 0
    if "offset" in settings:  # read as a count of words, as cuRAND has it
        offset = offset // np.uint64(4)
    for (one_seed, one_offset), rows in _groups(np.stack([seed, offset], axis=1)):
        at = (int(one_offset) + shift) % 2**64
        words = philox.calls(int(one_seed), at, sequence[rows], call[rows], settings.get("rounds", 10))
        out[rows] = words[np.arange(len(rows)), number[rows] % np.uint32(4)]
    return (out,)


# ---- matrix multiplication ---------------------------------------------------------------------------------


def _word(random: Random, n: int) -> Operands:
    """Words whose groups lie some binades apart, so that the window cuts something in many of them."""
    a, b = (random.codes(n, 64) for _ in range(2))
    live = random.words(16 * n).reshape(n, 4, 4)[:, :, :1] % np.uint32(3) != 0
    a = np.where(np.repeat(live, 16, axis=2).reshape(n, 64), a, np.uint8(0))
    scales = [random.bytes(n, 4) & np.uint8(0x7F) for _ in range(2)]
    scales = [np.where(one == 0x7F, np.uint8(0x7E), one) for one in scales]
    c = random.mixed(n, lambda k: random.floats(k, 100, 150), lambda k: np.zeros(k, F))
    return a, b, *scales, c


@operation(
    "a:e2m1*64 b:e2m1*64 scales_a:e4m3*4 scales_b:e4m3*4 c:f32 -> d:f32",
    "one K = 64 word of the block-scaled FP4 MMA",
    _word,
    ("model", "signed-scales"),
)
def _mma(settings: Settings, a: Array, b: Array, scales_a: Array, scales_b: Array, c: Array) -> Operands:
    if "signed-scales" in settings:  # the sign bits of the scales count
        negative = np.repeat((scales_a ^ scales_b) >> np.uint8(7), 16, axis=1)
        a = a ^ negative * np.uint8(8)
    return (tensorcore.mma_words(a, b, c, scales_a, scales_b, model=settings.get("model", "blackwell")),)


def _three_floats(random: Random, n: int) -> Operands:
    return tuple(np.abs(random.mixed(n, random.moderate, random.patterns)) for _ in range(3))


@operation(
    "alpha:f32 amax_a:f32 amax_b:f32 -> factor:f32",
    "the factor of a matmul's accumulator, from two amaxes",
    _three_floats,
    ("alpha_form",),
    "gemm-alpha",
)
def _alpha(settings: Settings, alpha: Array, amax_a: Array, amax_b: Array) -> Operands:
    if settings.get("alpha_form") == "jax":
        return (canonical_nan(np.asarray(alpha * ((amax_a / F(2688)) * (amax_b / F(2688))), F)),)
    given: Any = alpha
    return (partial_cast.alpha(amax_a, amax_b, given),)


# ---- the recipe kernels ------------------------------------------------------------------------------------


@operation(
    "amax:f32 -> scale:f32",
    "the global scale of the recipe kernels",
    lambda random, n: (random.mixed(n, random.moderate, random.patterns),),
    ("global_guard",),
)
def _recipe_global_scale(settings: Settings, amax: Array) -> Operands:
    if "global_guard" in settings:
        return (scaling.global_scale(amax, _arithmetic(settings)).encode.copy(),)
    return (partial_cast.global_scale(amax),)


@operation(
    "amax:f32 tensor_amax:f32 -> unrounded:f32 byte:e4m3",
    "the tile scale of the recipe kernels",
    lambda random, n: (np.abs(random.moderate(n)), np.abs(random.mixed(n, random.moderate, random.patterns))),
    BLOCK_SCALE + BYTE,
)
def _recipe_block_scale(settings: Settings, amax: Array, tensor_amax: Array) -> Operands:
    if not settings:
        s = partial_cast.block_scale(amax, tensor_amax)
        return s, e4m3.encode(s)
    return OPERATIONS["block-scale"].answer((amax, partial_cast.global_scale(tensor_amax)), settings)


@operation(
    "x:f32 tile_scale:f32 scale:f32 -> code:e2m1",
    "an element cast with the float32 scale of its tile and S",
    lambda random, n: (random.moderate(n), np.abs(random.floats(n, 116, 136)), np.abs(random.moderate(n))),
    ("unrounded",),
    "partial-cast",
)
def _partial_cast(settings: Settings, x: Array, tile_scale: Array, scale: Array) -> Operands:
    if "unrounded" in settings:  # the scale before its E4M3 rounding
        return (e2m1.encode(x * np.fmin(ONE / (tile_scale * (ONE / scale)), np.finfo(F).max)),)
    n = len(x)
    matrix = np.zeros((16, 16 * n), F)  # a tile an element, which is its first
    matrix[0, ::16] = x
    packed = partial_cast.partial_cast(matrix, tile_scale[None], scale[None], (16, 16 * n))
    return (e2m1.unpack(packed)[0, ::16].copy(),)


# ---- formats for comparison --------------------------------------------------------------------------------


def _long_block(width: int) -> Callable[[Random, int], Operands]:
    return lambda random, n: (_random_block(random, n * (width // 16)).reshape(n, width),)


for _rounding in ("floor", "ceil"):

    def _mx(settings: Settings, x: Array, rounding: str = _rounding) -> Operands:
        q = mxfp4.quantize(x, scale=settings.get("rounding", rounding))
        return q.scales[:, 0].copy(), q.packed

    operation(
        "x:f32*32 -> byte:e8m0 packed:u8*16",
        f"an MXFP4 block, its scale rounded {'down' if _rounding == 'floor' else 'up'}",
        _long_block(32),
        ("rounding",),
        f"mxfp4-{_rounding}",
    )(_mx)


@operation("x:f32*128 -> scale:f32 codes:e4m3*128", "an FP8 tile of 1x128", _long_block(128), ("by-reciprocal",), "fp8")
def _fp8(settings: Settings, x: Array) -> Operands:
    q = fp8.quantize(x)
    if "by-reciprocal" in settings:  # amax/448 stored, and its reciprocal multiplied with
        scale = _largest(x) / F(448)
        return np.where(scale > 0, scale, ONE), e4m3.encode(x * (ONE / scale)[:, None])
    return q.scales[:, 0].copy(), q.codes

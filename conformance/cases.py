"""The questions the suite asks: deterministic inputs, each built to expose a named fault.

Every input is made of raw PCG64 words and exact integer or single IEEE operations, so that its bits are the
same on every platform and NumPy version; ``tests/case-hashes.txt`` pins them.  Inputs that sit on a rounding
boundary are found by search, because random ones almost never do: float32 normal data agrees between
quantizers that differ everywhere else.

A *tensor* here is a named array of one dtype; a *case* is a tensor and the way it is to be quantized.  Ids
are ``family/tensor.dtype.block.directions``, with what is special about the call behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance import cases_extra
from nvfp4hw.backends.base import Case

Array = np.ndarray[Any, Any]
F = np.float32

SUITES = ("quick", "full", "exhaustive")

#: Midpoints between neighbouring E2M1 magnitudes: where the element rounding is decided.
E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F)
#: The 127 magnitudes of E4M3 and the 126 midpoints between neighbours: where the block scale is decided.
E4M3_VALUES = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127], F
)
E4M3_MIDPOINTS = ((E4M3_VALUES[:-1].astype(np.float64) + E4M3_VALUES[1:]) / 2).astype(F)
SIXTH = F(1) / F(6)
FLT_MIN, FLT_MAX = F(2.0**-126), np.finfo(F).max

_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": F}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """A named input and the fault it hunts; ``quick`` says that the quick suite has it."""

    family: str
    name: str
    x: Array
    hunts: str
    quick: bool = True
    both: bool = False  # quick asks for both directions and 16x16 tiles too

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}.{_NAMES[self.x.dtype]}"


# ---- exact construction ------------------------------------------------------------------------------------


def _words(seed: int, count: int) -> Array:
    """Uniform uint32 words; PCG64's raw stream is part of NumPy's promise."""
    raw = np.random.PCG64(seed).random_raw((count + 1) // 2)
    return (
        np.stack([raw & np.uint64(0xFFFFFFFF), raw >> np.uint64(32)], 1).reshape(-1)[:count].astype(np.uint32)
    )


def _normal(seed: int, shape: tuple[int, ...]) -> Array:
    """Twelve uniform words less their mean: variance 1, tails to ±6, exact until one rounding to float32."""
    count = int(np.prod(shape))
    total = _words(seed, 12 * count).reshape(12, count).astype(np.int64).sum(0) - 6 * 2**32
    return (total.astype(np.float64) * 2.0**-32).astype(F).reshape(shape)


def _uniform_bits(seed: int, shape: tuple[int, ...], exponents: tuple[int, int]) -> Array:
    """float32 with random sign and mantissa, and biased exponents uniform in a closed range."""
    low, high = exponents
    words = _words(seed, 2 * int(np.prod(shape))).reshape(2, -1)
    exponent = (low + words[0] % np.uint32(high - low + 1)).astype(np.uint32)
    bits = (words[1] & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)
    return bits.view(F).reshape(shape)


def _cast(x: Array, dtype: str) -> Array:
    """float32 to one of the three dtypes, nearest even; bfloat16 by integer arithmetic on the bits."""
    if dtype == "f32":
        return np.ascontiguousarray(x, F)
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(x).astype(np.float16)
    bits = np.ascontiguousarray(x, F).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    quiet = bits >> np.uint32(16) | np.uint32(0x40)
    nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
    return np.where(nan, quiet, rounded).astype(np.uint16).view(ml_dtypes.bfloat16)


def _step(x: Array, ulps: Array | int) -> Array:
    """float32 moved by a number of ulps away from zero (negative: toward zero)."""
    return (np.ascontiguousarray(x, F).view(np.int32) + np.asarray(ulps, np.int32)).astype(np.int32).view(F)


def _float32(bits: int) -> Any:
    return np.uint32(bits).view(F)


def _round_e4m3(x: Array) -> Array:
    """E4M3 code of non-negative float32, nearest even, saturating: by search among the midpoints."""
    below, above = np.searchsorted(E4M3_MIDPOINTS, x, "left"), np.searchsorted(E4M3_MIDPOINTS, x, "right")
    return np.where((below != above) & (below % 2 == 1), above, below).astype(np.uint8)


def _fill(blocks: Array, columns: int = 64) -> Array:
    """Blocks of 16, zero blocks added, as a matrix whose rows are a multiple of 16."""
    per_row = columns // 16
    rows = -(-len(blocks) // (16 * per_row)) * 16
    out = np.zeros((rows * per_row, 16), blocks.dtype)
    out[: len(blocks)] = blocks
    return out.reshape(rows, columns)


# ---- families ----------------------------------------------------------------------------------------------


def _normals() -> Iterator[Tensor]:
    hunts = "order and rounding of the scale operations: bfloat16 lands on midpoints that float32 misses"
    shape = (128, 128)
    for number, (label, scale) in enumerate((("1", 1.0), ("0.02", 0.02), ("300", 300.0))):
        x = _normal(100 + number, shape) * F(scale)
        for dtype in _DTYPES:
            yield Tensor("normal", f"s{label}", _cast(x, dtype), hunts, both=label == "1")
    for seed in range(8):
        x = _normal(110 + seed, (256, 512)) * abs(_uniform_bits(200 + seed, (1,), (120, 134)))
        for dtype in ("bf16", "f16", "f32"):
            yield Tensor("normal", f"seed{seed}", _cast(x, dtype), hunts, quick=False)


def _mixed() -> Iterator[Tensor]:
    hunts = "subnormal and zero block scales beside large ones"
    wide = _uniform_bits(301, (128, 128), (114, 140))
    for dtype in ("bf16", "f32"):
        yield Tensor("mixed", "decades8", _cast(wide, dtype), hunts, both=True)
    yield Tensor("mixed", "decades8", _cast(_uniform_bits(302, (128, 128), (103, 142)), "f16"), hunts)
    steps = _normal(303, (128, 128)) * (F(2) ** (-np.arange(128, dtype=F) % 32))[:, None]
    for dtype in ("bf16", "f32"):
        yield Tensor(
            "mixed",
            "rows",
            _cast(steps, dtype),
            "scales of rows that differ by decades",
            both=dtype == "bf16",
        )


def _outliers() -> Iterator[Tensor]:
    x = _normal(401, (128, 128))
    x[37, 91] = F(1000)
    for dtype in ("bf16", "f32"):
        yield Tensor(
            "outlier", "one", _cast(x, dtype), "underflow of ordinary blocks beside one outlier", both=True
        )
    negative = -abs(_normal(402, (128, 128)))
    positive = abs(_normal(403, (128, 128)))
    positive[5, 7] = F(-40)
    for dtype in ("bf16", "f32"):
        yield Tensor(
            "sign", "all-negative", _cast(negative, dtype), "an amax without abs: zero for negative blocks"
        )
        yield Tensor("sign", "negative-dominant", _cast(positive, dtype), "an amax without abs")


def _zeros() -> Iterator[Tensor]:
    shape = (32, 64)
    patterned = _normal(501, shape)
    blocks = patterned.reshape(-1, 16)
    blocks[::3] = 0
    blocks[1::6] = F(-0.0)
    signs = np.where(_words(502, 2048).reshape(shape) & np.uint32(1), F(-0.0), F(0.0)).astype(F)
    sparse = np.where(_words(503, 2048).reshape(shape) & np.uint32(3), signs, patterned)
    for dtype in _DTYPES:
        yield Tensor(
            "zero",
            "tensor",
            _cast(np.zeros(shape, F), dtype),
            "0/0 in the scale of an all-zero tensor",
            both=True,
        )
        yield Tensor(
            "zero",
            "blocks",
            _cast(patterned, dtype),
            "the scale of a zero block; its codes",
            both=dtype != "f16",
        )
    for dtype in ("bf16", "f32"):
        yield Tensor(
            "zero", "negative-tensor", _cast(np.full(shape, -0.0, F), dtype), "sign of −0 with a zero amax"
        )
        yield Tensor("zero", "signs", _cast(signs, dtype), "sign of −0 with a zero amax")
        yield Tensor(
            "zero",
            "sparse",
            _cast(sparse, dtype),
            "sign of −0 in a block that is not zero",
            both=dtype == "bf16",
        )


def _vanishing() -> Iterator[Tensor]:
    """Elements of both signs that round or underflow to zero; blocks whose scale alone is zero."""
    x = _normal(510, (32, 64)).reshape(-1, 16)
    tiny = np.array(
        [2.0**-3, 2.0**-10, 2.0**-30, 2.0**-60, 2.0**-100, 2.0**-126, 2.0**-149, 0.0], np.float64
    ).astype(F)
    x[:, 1:9] = -tiny * np.where(np.arange(8) < 5, abs(x[:, :1]) + F(1), F(1))
    x[:, 9:] = x[:, 1:8] * F(-1)
    x[:, 0] = F(3)
    scale_zero = np.array([2.0**-20, 2.0**-40, 2.0**-127, 2.0**-149], np.float64).astype(F)
    x[100:, :] = _normal(511, (28, 16)) * np.resize(scale_zero, 28)[:, None]
    for dtype in ("bf16", "f32"):
        yield Tensor(
            "zero",
            "vanishing",
            _cast(x.reshape(32, 64), dtype),
            "sign of a product that rounds or underflows to zero; ±6 of blocks whose scale is zero",
        )


def _global_scales() -> dict[str, Any]:
    """Tensor amaxes by name: exact quotients, thirds and sevenths, and plain values."""
    return {
        "2688": F(2688),  # S = 1
        "896": F(896),  # S = 3, where fl(1/fl(A/2688)) and 2688·fl(1/A) miss
        "384": F(384),  # S = 7
        "21": F(21),  # S = 128, a small amax
        "pi": _float32(0x40490FDB),
        "third": _float32(0x3EAAAAAB),
        "odd": _float32(0x4B35A7C9),
    }


def _encode_scale(amax: Any, d: Array) -> Array:
    """e of the baseline arithmetic for decoded block scales d > 0."""
    decode = F(1) / (F(2688) / amax)
    return F(1) / (d * decode)


def _tie_blocks(amax: Any, offsets: Iterable[int]) -> Array:
    """Blocks [a, +7 ties, −7 ties, 0] whose scaled elements are the E2M1 midpoints moved by some ulps.

    ``a`` gives each E4M3 scale in turn; a tie is an x with fl(x·e) exactly the midpoint, found within 3 ulp.
    """
    global_scale = F(2688) / amax
    d = E4M3_VALUES[1:]
    e = _encode_scale(amax, d)
    a = F(6) * d / global_scale
    middle = E2M1_MIDPOINTS[None, :] / e[:, None]
    candidates = np.stack([_step(middle, k) for k in (0, -1, 1, -2, 2, -3, 3)])
    hit = candidates * e[:, None] == E2M1_MIDPOINTS
    tie = np.take_along_axis(candidates, hit.argmax(0)[None], 0)[0]
    blocks = []
    for offset in offsets:
        x = _step(tie, offset)
        blocks.append(np.concatenate([a[:, None], x, -x, np.zeros_like(a)[:, None]], 1))
    out = np.concatenate(blocks)
    out[125, 0] = amax  # the block of d = 448 carries the tensor's amax itself
    return out


def _ties() -> Iterator[Tensor]:
    hunts = "rounding of ties; any encode scale that is off by one ulp"
    for label, amax in _global_scales().items():
        x = _fill(_tie_blocks(amax, (0, -1, 1)))
        yield Tensor("e2m1-tie", f"amax-{label}", _cast(x, "f32"), hunts, quick=label != "odd")
        if label in ("2688", "896", "384", "21"):
            exact = _fill(_tie_blocks(amax, (0,)))
            yield Tensor("e2m1-tie", f"amax-{label}", _cast(exact, "bf16"), hunts, both=label == "896")
            yield Tensor("e2m1-tie", f"amax-{label}", _cast(exact, "f16"), hunts, quick=label == "2688")
    words = _words(601, 64 * 64).reshape(64, 64)
    quarters = (
        (words % np.uint32(113)).astype(F) * F(0.25) * F(16) * np.where(words >> np.uint32(31), F(-1), F(1))
    )
    quarters[0, 0], quarters[63, 63] = F(896), F(-896)
    yield Tensor(
        "e2m1-tie",
        "lattice-896",
        _cast(quarters, "bf16"),
        "S = 3 computed as 3.0000002 or 2.9999998",
        both=True,
    )
    yield Tensor(
        "e2m1-tie", "lattice-896", _cast(quarters, "f32"), "S = 3 computed as 3.0000002 or 2.9999998"
    )


def _ramp(a: Array) -> Array:
    """A block for each amax: a·16/16 … a·1/16 with alternating sign, so that the codes follow the scale."""
    steps = (np.arange(16, 0, -1) / 16).astype(F) * np.where(np.arange(16) % 2, F(-1), F(1))
    return np.asarray(a, F)[:, None] * steps


def _scale_ties() -> Iterator[Tensor]:
    hunts = "rounding of the block scale at and beside E4M3 midpoints, subnormal ones included"
    for label, amax in _global_scales().items():
        mult = (F(2688) / amax) * SIXTH
        a = np.concatenate([_step(E4M3_MIDPOINTS / mult, k) for k in (-2, -1, 0, 1, 2)])
        x = _fill(_ramp(np.concatenate([[amax], a]).astype(F)))
        yield Tensor(
            "e4m3-tie",
            f"amax-{label}",
            _cast(x, "f32"),
            hunts,
            quick=label not in ("odd", "21"),
            both=label == "pi",
        )
        if label in ("2688", "896", "21"):
            exact = _fill(_ramp(np.concatenate([[amax], F(6) * E4M3_MIDPOINTS / (F(2688) / amax)]).astype(F)))
            yield Tensor("e4m3-tie", f"amax-{label}", _cast(exact, "bf16"), hunts, both=label == "2688")


@lru_cache(maxsize=1)
def order_pairs() -> Mapping[int, Array]:
    """bfloat16 amax pairs (A, a) on which another order of the block-scale operations gives another byte.

    All mantissas of A in [2048, 4096) and of a within 19 binades below; result: A's mantissa -> values of a.
    """
    mantissas = np.arange(128, 256)
    big = (mantissas * 16).astype(F)[:, None]
    small = (mantissas * 16).astype(F)[:, None] * (F(2) ** -np.arange(20, dtype=F))
    a = small.reshape(1, -1)
    scale = F(2688) / big
    inverse = big / F(2688)
    baseline = _round_e4m3(a * (scale * SIXTH))
    others = (
        (a / F(6)) * scale,  # divide-by-6
        scale * (a * SIXTH),  # scale-then-sixth
        a / (F(6) * inverse),  # divide-by-product
        (a / F(6)) / inverse,  # divide-twice
        (a * (F(1) / inverse)) / F(6),  # prescaled
        a * ((F(1) / big * F(2688)) * SIXTH),  # reciprocal-then-multiply
        a * ((F(1) / inverse) * SIXTH),  # reciprocal-form
    )
    differs = np.zeros(baseline.shape, bool)
    for other in others:
        differs |= _round_e4m3(other) != baseline
    differs &= a <= big
    return {int(m): a[0, row] for m, row in zip(mantissas, differs, strict=True) if row.any()}


#: Mantissas of A that between them show every order many times; the rest belong to the full suite.
_QUICK_MANTISSAS = (130, 140, 188, 196, 224, 252)


def _orders() -> Iterator[Tensor]:
    hunts = (
        "order of the block-scale operations: amax/6·S, S·(amax·1/6), amax/(6g), (amax/6)/g and their like"
    )
    for mantissa, a in order_pairs().items():
        x = _fill(_ramp(np.concatenate([[F(16 * mantissa)], a]).astype(F)))
        quick = mantissa in _QUICK_MANTISSAS
        yield Tensor(
            "scale-order", f"m{mantissa}", _cast(x, "bf16"), hunts, quick=quick, both=mantissa == 188
        )


def _allbits() -> Iterator[Tensor]:
    hunts = "any bit pattern handled apart from its neighbours"
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    shuffled = (patterns.astype(np.uint32) * np.uint32(40503) & np.uint32(0xFFFF)).astype(np.uint16)
    for dtype, infinity in (("bf16", 0x7F80), ("f16", 0x7C00)):
        for label, bits in (("ordered", patterns), ("shuffled", shuffled)):
            finite = np.where((bits & np.uint16(0x7FFF)) < infinity, bits, np.uint16(0))
            yield Tensor("allbits", f"finite-{label}", finite.view(_DTYPES[dtype]).reshape(256, 256), hunts)
            yield Tensor(
                "allbits",
                f"all-{label}",
                bits.view(_DTYPES[dtype]).reshape(256, 256),
                hunts,
                quick=dtype == "bf16",
            )
    for low in (118, 126, 134):
        window = np.arange(low * 128, (low + 16) * 128, dtype=np.uint32).astype(np.uint16)
        bits = np.stack([window, window | np.uint16(0x8000)], 1).reshape(-1)
        scattered = bits[(np.arange(4096) * 1237) % 4096]
        yield Tensor(
            "allbits",
            f"window{low}",
            scattered.view(ml_dtypes.bfloat16).reshape(64, 64),
            hunts,
            quick=low == 126,
        )


def _thresholds() -> Iterator[Tensor]:
    """S = 1 and d = 1 (amax 2688, block amax 6): the element is what is rounded; then the smallest scales."""
    edges = np.concatenate([E2M1_MIDPOINTS, np.array([0.5, 1, 1.5, 2, 3, 4, 6, 7, 2.0**-126, 2.0**-149], F)])
    around = np.concatenate(
        [_step(edges, k) for k in (-2, -1, 0, 1, 2) if k >= 0] + [_step(edges[:-1], k) for k in (-2, -1)]
    )
    around = np.resize(np.concatenate([around, -around]), 15 * 32).astype(F)
    blocks = np.concatenate([np.full((32, 1), 6, F), np.minimum(around, F(6)).reshape(32, 15)], 1)
    top = np.zeros((1, 16), F)
    top[0, 0] = 2688
    zero_scale = F(2688) * F(2.0**-10) * F(6) / F(2688)  # block amax at which the scale leaves zero
    small = _step(np.resize(zero_scale, 9), np.arange(-4, 5))
    x = _fill(np.concatenate([top, blocks, _ramp(small), _ramp(small / F(2))]))
    yield Tensor("threshold", "ulps", x, "comparisons that are off by one ulp; < for <=", both=True)
    yield Tensor("threshold", "ulps", _cast(x, "bf16"), "comparisons that are off by one ulp; < for <=")


def _specials() -> Iterator[Tensor]:
    base = _normal(701, (48, 64))  # below the 4096 elements from which XLA drops NaN in an order of its own
    inf, nan = F(np.inf), _float32(0x7FC00000)

    def variant(**places: Any) -> Array:
        x = base.copy()
        for where, value in places.items():
            if where == "element":
                x[3, 5], x[40, 60] = value, -value if value == value else _float32(0xFFC00000)
            elif where == "block":
                x[16:18, 16:32] = value
            elif where == "tile":
                x[16:32, 32:48] = value
            else:
                x[:] = value
        return x

    both = variant(element=inf)
    both[10, 10], both[11, 11:14], both[3, 6] = nan, (_float32(0x7F800001), _float32(0xFFFFFFFF), nan), nan
    tensors = {
        "nan-element": (variant(element=nan), "amax that NaN spreads through; code of a NaN element"),
        "nan-block": (variant(block=nan), "scale of a block that has only NaN"),
        "nan-tile": (variant(tile=nan), "scale of a tile that has only NaN"),
        "nan-all": (variant(everywhere=nan), "amax of a tensor that has only NaN"),
        "inf-element": (variant(element=inf), "an infinite amax: the global scale falls back to 1"),
        "inf-block": (variant(block=-inf), "an infinite amax: the global scale falls back to 1"),
        "inf-all": (variant(everywhere=inf), "an infinite amax: the global scale falls back to 1"),
        "nan-inf": (both, "NaN payloads and signs beside Inf"),
    }
    for label, (x, hunts) in tensors.items():
        for dtype in ("bf16", "f32"):
            yield Tensor(
                "special",
                label,
                _cast(x, dtype),
                hunts,
                both=label in ("nan-element", "inf-element", "nan-inf"),
            )
        yield Tensor("special", label, _cast(x, "f16"), hunts, quick=label == "nan-inf")


def _magnitudes() -> Iterator[Tensor]:
    """Tensors whose amax is tiny or huge; the mantissas are those of normal data."""
    base = _normal(801, (64, 64))
    base = base / abs(base).max()
    clamp = F(2688) / FLT_MAX  # below this amax the global scale saturates
    amaxes = {
        "subnormal": _float32(0x00400001),
        "smallest": _float32(0x00000001),
        "flt-min": FLT_MIN,
        "clamp": clamp,
        "clamp-below": _step(np.asarray([clamp]), -1)[0],
        "clamp-above": _step(np.asarray([clamp]), 1)[0],
        "1e-30": F(1e-30),
        "1e30": F(1e30),
        "flt-max": FLT_MAX,
        "overflow-448": FLT_MAX / F(448),
    }
    for label, amax in amaxes.items():
        x = base * amax
        x[abs(x) > amax] = amax
        x[9, 9] = amax
        yield Tensor(
            "magnitude",
            label,
            x,
            "overflow, underflow and flushed subnormals in the scales",
            both=label == "subnormal",
        )
        bf16 = _cast(x, "bf16")
        bits = bf16.view(np.uint16)
        bits[(bits & np.uint16(0x7FFF)) > 0x7F7F] = 0x7F7F
        yield Tensor(
            "magnitude",
            label,
            bf16,
            "overflow, underflow and flushed subnormals in the scales",
            quick=label != "1e-30",
        )
    for label, amax in (("subnormal", F(2.0**-15)), ("max", F(65504)), ("smallest", F(2.0**-24))):
        yield Tensor(
            "magnitude", label, _cast(base * amax, "f16"), "float16 subnormals and its largest value"
        )


def _shapes() -> Iterator[Tensor]:
    hunts = "tiles at the edge; shapes that are no multiple of 32, 64 or 128"
    for number, shape in enumerate(
        ((16, 16), (16, 48), (48, 16), (144, 80), (80, 144), (272, 16), (16, 272), (112, 208))
    ):
        x = _normal(900 + number, shape)
        label = f"{shape[0]}x{shape[1]}"
        for dtype in ("bf16", "f32"):
            yield Tensor(
                "shape",
                label,
                _cast(x, dtype),
                hunts,
                quick=shape in ((16, 16), (16, 48), (144, 80)),
                both=True,
            )
    for number, shape in enumerate(((1, 16), (1, 256), (3, 32), (17, 16), (5, 80))):
        x = _normal(920 + number, shape)
        yield Tensor(
            "rows",
            f"{shape[0]}x{shape[1]}",
            _cast(x, "bf16"),
            "rows that are no multiple of 16",
            quick=shape[0] < 5,
        )


def _tiles() -> Iterator[Tensor]:
    x = _normal(1001, (64, 96))
    x[:, :] *= (F(2) ** -(np.arange(64) % 16).astype(F))[:, None]
    x[16:32, 32:48] = 0
    x[33, 50] = F(60)
    x[48:64] *= F(2.0**-20)
    for dtype in ("bf16", "f32", "f16"):
        yield Tensor(
            "tile",
            "uneven",
            _cast(x, dtype),
            "a 16x16 amax taken over rows; tiled for repeated scales",
            both=True,
        )


def _tensors() -> Iterator[Tensor]:
    """Every tensor of the plain families: quantized in each block shape and direction that fits."""
    with np.errstate(all="ignore"):  # overflow to Inf and 0/0 are part of the construction
        for family in (
            _normals,
            _mixed,
            _outliers,
            _zeros,
            _vanishing,
            _ties,
            _scale_ties,
            _orders,
            _allbits,
            _thresholds,
            _specials,
            _magnitudes,
            _shapes,
            _tiles,
        ):
            yield from family()


# ---- ways to call ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """How a tensor is quantized."""

    block: tuple[int, int] = (1, 16)
    directions: str = "row"
    suffix: str = ""
    rht_t: Any = None
    amax: Any = None
    amax_t: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def _case(tensor: Tensor, call: _Call, hunts: str = "") -> Case:
    ident = f"{tensor.id}.{call.block[0]}x{call.block[1]}.{call.directions}"
    return Case(
        id=ident + (f".{call.suffix}" if call.suffix else ""),
        family=tensor.family,
        x=tensor.x,
        block=call.block,
        directions=call.directions,
        rht_t=call.rht_t,
        amax=call.amax,
        amax_t=call.amax_t,
        fields=call.fields,
        hunts=hunts or tensor.hunts,
    )


def _plain(suite: str) -> Iterator[Case]:
    for tensor in _tensors():
        if suite == "quick" and not tensor.quick:
            continue
        yield _case(tensor, _Call())
        square = all(n % 16 == 0 for n in tensor.x.shape)
        if square and (tensor.both or suite != "quick"):
            yield _case(tensor, _Call(directions="both"))
            yield _case(tensor, _Call((16, 16), "both"))
        if square and suite != "quick":
            yield _case(tensor, _Call(directions="col"))
            yield _case(tensor, _Call((16, 16), "row"))


def _given_amax(suite: str) -> Iterator[Case]:
    """An amax that is not max(abs(x)): the kernels take what they are given."""
    x = _normal(1101, (64, 64))
    values = {
        "zero": F(0),
        "inf": F(np.inf),
        "nan": _float32(0x7FC00000),
        "stale-half": F(1.25),
        "stale-double": F(8.5),
        "negative": F(-3),
        "flt-max": FLT_MAX,
        "subnormal": _float32(0x00400000),
        "smallest": _float32(1),
        "flt-min": FLT_MIN,
    }
    for label, amax in values.items():
        for dtype in ("bf16", "f32"):
            tensor = Tensor(
                "given-amax", label, _cast(x, dtype), "an amax of 0, Inf, NaN, or not this tensor's"
            )
            calls = [_Call(amax=amax), _Call(directions="both", amax=amax, amax_t=amax)]
            for call in calls + (
                [_Call((16, 16), "both", amax=amax, amax_t=amax)] if suite != "quick" else []
            ):
                yield _case(tensor, call)


def _find(names: Iterable[str]) -> list[Tensor]:
    """Tensors of the plain families by id."""
    wanted = set(names)
    return [tensor for tensor in _tensors() if tensor.id in wanted]


def _row_scaled(suite: str) -> Iterator[Case]:
    names = ["mixed/rows.bf16", "mixed/rows.f32", "zero/blocks.bf16", "normal/s1.bf16", "special/nan-inf.f32"]
    names += (
        []
        if suite == "quick"
        else ["mixed/decades8.bf16", "special/nan-element.bf16", "allbits/all-shuffled.bf16"]
    )
    for tensor in _find(names):
        call = _Call(suffix="row-scaled", fields={"row_scaled": True})
        yield _case(tensor, call, "one global scale for the whole tensor where each row has its own")
        if tensor.x.dtype == ml_dtypes.bfloat16:
            both = _Call(directions="both", suffix="row-scaled", fields={"row_scaled": True})
            yield _case(tensor, both, "row amaxes used for the transpose, whose rows are columns")


def _even_errors() -> Tensor:
    """Blocks that map to 6 and to 4 alike: both errors are zero, or equal and not zero."""
    d = E4M3_VALUES[(np.arange(127) % 8 == 0) & (np.arange(127) >= 8)][:14]  # 1.5·d is an E4M3 value too
    words = _words(1201, d.size * 16).reshape(-1, 16)
    signs = np.where(words & np.uint32(1), F(-1), F(1))
    exact = np.where(words & np.uint32(2), d[:, None] * F(6), F(0)) * signs
    exact[:, 0] = d * F(6)
    even = exact.copy()
    even[:, 5] = d * F(0.125)  # below half a step of either map
    x = np.concatenate([exact, even, np.zeros((4, 16), F)])
    x[len(exact) - 1, 0] = F(2688)
    return Tensor(
        "four-over-six", "even-errors", _cast(_fill(x), "bf16"), "map-to-4 taken when the errors are equal"
    )


def _four_over_six(suite: str) -> Iterator[Case]:
    names = ["normal/s1.bf16", "mixed/decades8.f32", "tile/uneven.f16", "special/nan-inf.bf16"]
    names += (
        []
        if suite == "quick"
        else ["normal/s1.f32", "mixed/rows.bf16", "zero/blocks.bf16", "e4m3-tie/amax-pi.f32"]
    )
    hunts = (
        "candidate errors of 4over6: their formula, the order of their sum, the choice when they are equal"
    )
    for tensor in [_even_errors(), *_find(names)]:
        for mode in ("MAE", "MSE"):
            for maximum in (448, 256):
                for fast in (False, True):
                    fields = {"four_over_six": mode, "e4m3_max": maximum, "four_over_six_fast_error": fast}
                    suffix = f"4over6-{mode}-{maximum}{'-fast' if fast else ''}"
                    for call in (
                        _Call((1, 16), "row", suffix, fields=fields),
                        _Call((1, 16), "both", suffix, fields=fields),
                        _Call((16, 16), "both", suffix, fields=fields),
                    ):
                        if suite != "quick" or call.directions == "both" or tensor.family == "four-over-six":
                            yield _case(tensor, call, hunts)


def _hadamard(suite: str) -> Iterator[Case]:
    names = [
        "normal/s1.bf16",
        "mixed/decades8.bf16",
        "magnitude/subnormal.bf16",
        "special/nan-inf.bf16",
        "zero/sparse.bf16",
    ]
    names += ["e2m1-tie/lattice-896.bf16", "shape/144x80.bf16"]
    if suite != "quick":
        names += [
            "magnitude/flt-max.bf16",
            "allbits/finite-shuffled.bf16",
            "outlier/one.bf16",
            "mixed/rows.bf16",
        ]
        names += ["special/inf-element.bf16", "special/nan-element.bf16", "normal/seed0.bf16"]
    hunts = "the transform: signs, order, scale, its rounding to bfloat16, the tensor core's truncated sum"
    for tensor in _find(names):
        yield _case(tensor, _Call(directions="col", suffix="rht", rht_t=nv.RHT()), hunts)
        if tensor.id == "normal/s1.bf16":
            yield _case(
                tensor,
                _Call(directions="both", suffix="rht", rht_t=nv.RHT()),
                "a transform applied to the rowwise output too",
            )
            yield _case(
                tensor, _Call(directions="col", suffix="rht-no-signs", rht_t=nv.RHT(sign_mask=0)), hunts
            )


def codec_boundaries(midpoints: Array, values: Array) -> Array:
    """Every value and midpoint of a format, both signs, with four ulps on each side."""
    magnitudes = np.unique(
        np.concatenate([midpoints, values, [F(7), F(449), F(464), F(480), FLT_MIN, FLT_MAX]]).astype(F)
    )
    bits = magnitudes.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
    around = np.unique(bits[(bits >= 0) & (bits <= FLT_MAX.view(np.int32))]).view(F)
    extremes = np.array([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 1, 0x007FFFFF], np.uint32).view(F)
    positive = np.concatenate([around, extremes])
    negative = positive.view(np.uint32) | np.uint32(0x80000000)
    return np.concatenate([positive, negative.view(F)])


def _codecs(suite: str) -> Iterator[Case]:
    """Bare conversions, both ways; the kinds are those of the backend that has them."""
    upper = np.arange(65536, dtype=np.uint32)[:, None] << np.uint32(16)
    lows = np.array(
        [0, 0x7FFF, 0x8000] if suite == "quick" else [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    sweep = (upper | lows).view(F).reshape(-1)
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    e2m1_values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
    powers = np.ldexp(F(1), np.arange(-149, 128)).astype(F)

    def case(kind: str, name: str, x: Array, hunts: str) -> Case:
        return Case(f"codec/{kind}.{name}", "codec", x, kind=kind, hunts=hunts)

    for kind, midpoints, values in (
        ("e2m1", E2M1_MIDPOINTS, e2m1_values),
        ("e4m3", E4M3_MIDPOINTS, E4M3_VALUES),
    ):
        yield case(
            kind, "boundaries", codec_boundaries(midpoints, values), "ties and limits of the conversion"
        )
        yield case(kind, "upper-halves", sweep, "signs, subnormals, Inf and NaN of the conversion")
        for dtype in ("bf16", "f16"):
            yield case(kind, f"all-{dtype}", patterns.view(_DTYPES[dtype]), "a conversion that rounds twice")
    for kind in ("e8m0-ceil", "e8m0-floor"):
        yield case(
            kind, "boundaries", codec_boundaries(powers, powers), "direction of the rounding; subnormals"
        )
        yield case(kind, "upper-halves", sweep, "signs, subnormals, Inf and NaN of the conversion")
    yield case(
        "e2m1-pairs", "upper-halves", sweep[: sweep.size // 2 * 2], "the even element in the high nibble"
    )
    yield case("e2m1-decode", "all", np.arange(16, dtype=np.uint8), "values of the codes, the sign of zero")
    for kind in ("e4m3-decode", "e8m0-decode"):
        yield case(kind, "all", np.arange(256, dtype=np.uint8), "values of the codes, NaN and its bits")


def cases(suite: str = "quick") -> Iterator[Case]:
    """The cases of a suite in a fixed order; "exhaustive" has those of "full" (its sweeps are no cases).

    Raises ValueError for an unknown suite.
    """
    if suite not in SUITES:
        raise ValueError(f"suite is one of {', '.join(SUITES)}; got {suite!r}")
    for part in (_codecs, _plain, _given_amax, _row_scaled, _four_over_six, _hadamard):
        yield from part(suite)
    yield from cases_extra.cases()

"""The formats that a study lays side by side, by name: ``nvfp4+16x16``, ``torchao+sr``, ``mxfp4+ceil`` …

A name is a base and modifiers joined by ``+``.  Bases: ``nvfp4`` (Transformer Engine's arithmetic), any preset of
``nvfp4ref.PRESETS``, ``mxfp4``, ``fp8``.  Modifiers: ``16x16``, ``sr``, ``rht`` or ``rht4`` … ``rht256``,
``row-scaled``, ``headroom`` (16/17), ``columnwise``; for ``mxfp4`` also ``ceil``; for ``fp8`` ``128x128``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import e2m1, e8m0, fp8, mxfp4
from ..arithmetic import PRESETS, Arithmetic, arithmetic
from ..fp32 import F32, U8, AnyArray, bfloat16, widen
from ..hadamard import RHT, TE_SIGN_MASK, transform
from ..quantize import dequantize, quantize
from ..recipe import GEMMS, Operand, recipe
from ..streams import Philox

FAMILIES = ("nvfp4", "mxfp4", "fp8")
#: what a study compares when nothing is said
DEFAULT = ("nvfp4", "nvfp4+16x16", "nvfp4+rht", "nvfp4+sr", "four-over-six", "nvfp4+row-scaled", "mxfp4", "fp8")
SIX = np.float32(6)


@dataclass(frozen=True)
class Quantized:
    """What a format made of a matrix; all arrays (R, K) or, of blocks, (R, K/block width).

    Attributes:
        x: float32, what was read (for ``rht`` the transform).
        y: float32, the decoded result.
        codes: E2M1 codes 0..15, or E4M3 bytes for FP8.
        clipped: where the scaled magnitude is beyond the largest element.
        scales: scale bytes, a row for each row; None for FP8's float32 scales.
        exact: float32, decoded when block scales are not rounded; None for stochastic rounding and FP8.
        ratio: rounded over unrounded block scale, 1 for blocks of zeros; NVFP4 only.
    """

    x: F32
    y: F32
    codes: U8
    clipped: AnyArray
    scales: U8 | None = None
    exact: F32 | None = None
    ratio: F32 | None = None


@dataclass(frozen=True)
class Format:
    """One way to quantize; hashable, compared without its name.

    Args:
        name: what tables call it.
        family: "nvfp4", "mxfp4" or "fp8".
        block: (1, 16) or (16, 16); MXFP4 (1, 32); FP8 (1, 128) or (128, 128).
        arithmetic: of NVFP4.
        stochastic: stochastic rounding, by the arithmetic's rule; for MXFP4 with exact probabilities.
        rht: size of the random Hadamard transform along the blocked axis, 0 for none.  The input is rounded to
            bfloat16 first, as the transform reads it, and the error is that of the transformed tensor.
        columnwise: the transpose is quantized.
        ceil: MXFP4's scale rounded up instead of the OCP rule.
    Raises:
        ValueError: a combination that the quantizers refuse.
    """

    name: str = field(compare=False)
    family: str = "nvfp4"
    block: tuple[int, int] = (1, 16)
    arithmetic: Arithmetic = PRESETS["te"]
    stochastic: bool = False
    rht: int = 0
    columnwise: bool = False
    ceil: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family is one of {', '.join(FAMILIES)}; got {self.family!r}")
        if self.arithmetic.global_scale == "inverted":
            raise ValueError("an inverted global scale does not decode: a study of its error says nothing")
        if self.rht:
            _rht(self.rht)  # refuses a size that is none
            if self.columnwise and self.rht > 128:
                raise ValueError(f"{self.name}: columnwise goes with transforms of up to 128: choose a smaller one")
        try:  # what does not go together is refused by the quantizers, in their own words
            height, width = self.tile
            zeros = np.zeros((height, width), np.float32)
            self.apply(zeros, np.zeros(height if self.row_scaled else (), np.float32), self.random(zeros.shape, 0, 0))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def row_scaled(self) -> bool:
        """Whether each row has its own amax."""
        return self.family == "nvfp4" and self.arithmetic.row_scaled

    @property
    def tile(self) -> tuple[int, int]:
        """(height, width) of which what ``apply`` takes is a multiple."""
        return self.block[0], math.lcm(self.block[1], self.rht or 1)

    @property
    def amax_nan(self) -> bool:
        """Whether one NaN makes the tensor amax NaN."""
        return self.family == "nvfp4" and self.arithmetic.amax_nan != "ignore"

    @property
    def has_e2m1(self) -> bool:
        """Whether the codes are E2M1."""
        return self.family != "fp8"

    @property
    def title(self) -> str:
        """The name in words, for legends."""
        base, *rest = self.name.split("+")
        words = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "fp8": "FP8 E4M3", "four-over-six": "4over6"}
        marks = {"sr": "SR", "ceil": "ceil", "rht": "RHT"}
        rest = [marks.get(word, word.replace("rht", "RHT ") if word.startswith("rht") else word) for word in rest]
        return " ".join([words.get(base, base), *rest])

    def transformed(self, x: AnyArray) -> AnyArray:
        """What the quantizer reads of x (R, K): x itself, or bfloat16 after the transform."""
        if not self.rht:
            return x
        return transform(np.asarray(x).astype(bfloat16), _rht(self.rht))

    def random(self, shape: tuple[int, int], seed: int, offset: int) -> Any:
        """The random numbers of one stochastic quantization of that shape; None for nearest even.

        Words come from Philox4x32-10 with this seed and offset; a call may use 16 offsets.  Rules with exact
        probabilities take uniforms instead.
        """
        if not self.stochastic:
            return None
        if self.family == "nvfp4" and e2m1.STOCHASTIC[self.arithmetic.stochastic][1] == 4:
            return Philox(seed, offset, "vector-blockwise").words(shape, dtype="float32", block=self.block)
        bits = np.random.Philox(key=np.array([seed, offset], np.uint64))
        return np.random.Generator(bits).random(shape, np.float32)

    def apply(self, x: AnyArray, amax: AnyArray, random: Any = None) -> Quantized:
        """Quantize a matrix, transformed already; rowwise, in multiples of ``tile``.

        amax: of the whole tensor, float32 0-d, or (R,) when row-scaled; NVFP4 only.
        """
        with np.errstate(all="ignore"):
            found: Quantized = getattr(self, f"_{self.family}")(x, amax, random)
        return found

    def _nvfp4(self, x: AnyArray, amax: F32, random: Any) -> Quantized:
        ar = self.arithmetic
        rounding = "stochastic" if self.stochastic else "nearest-even"
        q = quantize(x, block=self.block, rounding=rounding, rbits=random, amax=amax, arithmetic=ar)
        steps, values, y = q.steps, widen(np.asarray(x)), dequantize(q)
        if ar.global_scale == "none":  # one level: the block scales are the whole scale
            per_unit = np.ones((), np.float32)
        else:
            inverse = np.float32(1) / np.float32(ar.element_max * ar.e4m3_max)
            per_unit = (amax.reshape(-1, 1) if amax.ndim else amax) * inverse  # decode scale of a block scale of 1
        unrounded = steps.block_scale
        ratio = np.where(unrounded > 0, q.block_scales / unrounded, np.float32(1))
        exact = None if self.stochastic else _decoded_with(values, unrounded * per_unit)
        return Quantized(values, y, q.codes, np.abs(steps.scaled) > SIX, q.scales, exact, ratio)

    def _mxfp4(self, x: AnyArray, amax: F32, random: Any) -> Quantized:
        m = mxfp4.quantize(x, scale="ceil" if self.ceil else "floor", uniforms=random)
        values = widen(np.asarray(x))
        magnitude = np.abs(values).reshape(*m.scales.shape, mxfp4.BLOCK)
        limit = e8m0.VALUES[m.scales].astype(np.float32) * SIX
        clipped = (magnitude > limit[..., None]).reshape(values.shape)
        exact = None if self.stochastic else _decoded_with(values, np.fmax.reduce(magnitude, axis=2) / SIX)
        return Quantized(values, m.dequantize(), m.codes, clipped, m.scales, exact)

    def _fp8(self, x: AnyArray, amax: F32, random: Any) -> Quantized:
        if self.stochastic:
            raise ValueError("FP8 is rounded to nearest even here: leave out sr")
        q = fp8.quantize(x, tile=self.block)
        values = widen(np.asarray(x))
        return Quantized(values, q.dequantize(), q.codes, np.zeros(values.shape, np.bool_))


def _decoded_with(x: F32, scale: F32) -> F32:
    """x (R, K) rounded to nearest E2M1 multiples of an unrounded scale (R, blocks); 0 where the scale is 0."""
    blocks = x.reshape(*scale.shape, -1)
    lift = np.where(scale < np.float32(2.0**-64), np.float32(2.0**64), np.float32(1))  # whose inverse would be Inf
    inverse = np.where(scale > 0, np.float32(1) / (scale * lift), np.float32(0))
    index = e2m1.encode_magnitude(np.abs(blocks) * lift[..., None] * inverse[..., None])
    return np.reshape(np.copysign(e2m1.VALUES[index] * scale[..., None], blocks), x.shape)


def _rht(size: int) -> RHT:
    """Transformer Engine's transform; for other sizes its sixteen signs cut off or repeated."""
    mask = sum(TE_SIGN_MASK << 16 * i for i in range(max(1, size // 16)))
    return RHT(size=size, sign_mask=mask & ((1 << size) - 1))


# -- names -----------------------------------------------------------------------------------------------------------

_BASES: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    **{name: {"arithmetic": ar} for name, ar in PRESETS.items()},
    "mxfp4": {"family": "mxfp4", "block": (1, 32)},
    "fp8": {"family": "fp8", "block": (1, 128)},
}
_KNOWN = (
    f"bases {', '.join(_BASES)}; modifiers 16x16, sr, rht, rht4 … rht256, row-scaled, headroom, columnwise, "
    "for mxfp4 ceil, for fp8 128x128"
)


def named(name: str | Format) -> Format:
    """The Format of a name (or the Format itself).

    >>> named("nvfp4+16x16").block
    (16, 16)

    Raises ValueError that lists what is known.
    """
    if isinstance(name, Format):
        return name
    base, *modifiers = name.split("+")
    if base not in _BASES:
        raise ValueError(f"unknown format {name!r}; {_KNOWN}")
    options: dict[str, Any] = dict(_BASES[base])
    family, ar = options.get("family", "nvfp4"), options.get("arithmetic", PRESETS["te"])
    kinds = ["rht" if word.startswith("rht") else word for word in modifiers]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"format {name!r}: a modifier is given twice, or two sizes of rht: leave one out")
    for word in modifiers:
        size = re.fullmatch(r"rht([1-9][0-9]*)?", word)
        if word == "16x16" and family == "nvfp4":
            options["block"] = (16, 16)
        elif word == "128x128" and family == "fp8":
            options["block"] = (128, 128)
        elif word == "ceil" and family == "mxfp4":
            options["ceil"] = True
        elif word == "sr":
            options["stochastic"] = True
        elif word == "columnwise":
            options["columnwise"] = True
        elif size:
            options["rht"] = int(size[1] or 16)
        elif word == "row-scaled" and family == "nvfp4":
            ar = options["arithmetic"] = arithmetic(ar, row_scaled=True)
        elif word == "headroom" and family == "nvfp4":
            ar = options["arithmetic"] = arithmetic(ar, headroom=16 / 17)
        else:
            raise ValueError(f"format {name!r}: unknown modifier {word!r}; {_KNOWN}")
    return Format(name, **options)


def several(names: Iterable[str | Format]) -> tuple[Format, ...]:
    """The Formats of names, each once.  Raises ValueError for none, an unknown one, or two of one name."""
    found = tuple(dict.fromkeys(named(name) for name in names))
    if not found:
        raise ValueError("a study needs at least one format")
    if len({one.name for one in found}) < len(found):
        raise ValueError(f"two formats have one name: {', '.join(one.name for one in found)}")
    return found


def repeated(names: Iterable[str | Format]) -> list[str]:
    """Sentences about names that mean a format which an earlier name means too: it is studied once."""
    found: dict[Format, str] = {}
    said = []
    for one in map(named, names):
        first = found.setdefault(one, one.name)
        if first != one.name:
            said.append(f"{one.name} is the same format as {first}: studied once, as {first}")
    return said


def of_operand(operand: Operand) -> Format:
    """The Format of one operand of a recipe, under the name that makes it."""
    size = 0 if operand.rht is None else operand.rht.size
    base = "four-over-six" if operand.arithmetic.four_over_six else "nvfp4"
    words = {
        "16x16": operand.block == (16, 16),
        "columnwise": operand.axis == 0,
        "rht" if size == 16 else f"rht{size}": bool(size),
        "sr": operand.rounding == "stochastic",
        "row-scaled": operand.arithmetic.row_scaled,
    }
    name = "+".join([base, *(word for word, there in words.items() if there)])
    return Format(
        name,
        block=operand.block,
        arithmetic=operand.arithmetic,
        stochastic=operand.rounding == "stochastic",
        rht=size,
        columnwise=operand.axis == 0,
    )


def of_recipe(name: str, tensors: Iterable[str] = ("x", "w", "dy")) -> tuple[Format, ...]:
    """The formats that a training recipe gives to the operands of its three products, each once.

    ``tensors``: "x", "w", "dy", which of them.  Raises ValueError for an unknown recipe.
    """
    chosen, wanted = recipe(name), set(tensors)
    operands = (operand for gemm in GEMMS for operand in chosen.operands(gemm))
    return tuple(dict.fromkeys(of_operand(operand) for operand in operands if operand.tensor in wanted))

"""The vectors of each rule of docs/spec.md: which operands, and which faults they are there to find.

A group names its faults by the ids of docs/deviations.md; where that list has none, the fault stands here in words
with the settings that make it.  ``tests/test_vectors_export.py`` plants every one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from conformance.deviations import DEVIATIONS
from conformance.vectors import operands, sets
from conformance.vectors.operands import of_suite, only_x, under_scale
from conformance.vectors.operations import OPERATIONS, Operands, Settings
from conformance.vectors.sets import Set

SIZES = ("small", "full")
Maker = Callable[[str], Iterator[Set]]


@dataclass(frozen=True)
class Rows:
    """Constructed rows of one operation."""

    operation: str
    make: Callable[[str], Operands]
    what: str

    def __call__(self, size: str) -> Iterator[Set]:
        yield sets.of_rows(self.operation, self.make(size), self.what)


@dataclass(frozen=True)
class Group:
    """The vectors of one rule.

    Attributes:
        rule: its id in docs/spec.md.
        parts: what makes the sets, given a size.
        hunts: ids of docs/deviations.md.
        faults: further faults, in words, with the settings that make them.
    """

    rule: str
    parts: tuple[Maker, ...]
    hunts: tuple[str, ...] = ()
    faults: Mapping[str, Settings] = field(default_factory=dict)

    def sets(self, size: str) -> list[Set]:
        """The sets of a size, "small" or "full", each with a name of its own."""
        found: dict[str, Set] = {}
        for one in (one for part in self.parts for one in part(size)):
            number = sum(other.operation == one.operation for other in found.values())
            name = f"{one.name}.{number + 1}" if one.name in found else one.name
            found[name] = replace(one, name=name)
        return list(found.values())

    @property
    def rows(self) -> list[Rows]:
        """The parts that the pipe can ask for, line by line."""
        return [part for part in self.parts if isinstance(part, Rows)]

    def planted(self) -> Iterator[tuple[str | None, str, tuple[Settings, ...]]]:
        """(deviation id or None, the fault in words, its forms) of every fault."""
        for ident in self.hunts:
            entry = DEVIATIONS[ident]
            forms: tuple[Settings, ...] = ({"against": ident},) if entry.against else ()
            yield ident, entry.what, (*entry.changes, *forms)
        for what, settings in self.faults.items():
            yield None, what, (settings,)


# ---- parts -------------------------------------------------------------------------------------------------


def tensors(*small: str, more: Sequence[str] = ()) -> Maker:
    """Cases of the suite by id; in full also every quick case whose id starts with one of ``more``."""

    def make(size: str) -> Iterator[Set]:
        quick = operands.quick()
        named = list(small)
        if size == "full" and more:
            named += [ident for ident in quick if ident.startswith(tuple(more)) and ident not in small]
        for ident in named:
            yield sets.of_case(quick[ident])

    return make


def streams(kernel: str, *calls: tuple[int, bool], block: tuple[int, int] = (1, 16)) -> Maker:
    """The words of a kernel, for (axis, both directions in one launch)."""

    def make(size: str) -> Iterator[Set]:
        shapes = [(128, 256)] if size == "small" else [(128, 256), (384, 128), (1152, 256)]
        for shape in shapes:
            for axis, both in calls:
                yield sets.of_stream(kernel, shape, axis, both, block)

    return make


def layouts(operation: str) -> Maker:
    """Scales of shapes that fill tiles and that do not."""

    def make(size: str) -> Iterator[Set]:
        shapes = [(128, 4), (144, 5), (16, 1)] + ([(256, 16), (130, 33), (1, 7)] if size == "full" else [])
        for rows, columns in shapes:
            yield sets.of_layout(operation, rows, columns)

    return make


def _transposes(size: str) -> Iterator[Set]:
    quick = operands.quick()
    for ident in ("tile/uneven.bf16.16x16.both", "shape/144x80.f32.16x16.both")[: 1 if size == "small" else 2]:
        yield sets.of_transpose(quick[ident])


def _pieces(size: str) -> Iterator[Set]:
    for start, length in ((0, 1024), (2, 6), (13, 5), (500, 301), (1023, 1)):
        yield sets.of_piece(start, length)


_SHAPE = {"small": (16, 24, 256), "full": (64, 96, 1024)}


def _accumulators(size: str) -> Iterator[Set]:
    yield sets.of_accumulator("words one after another along K", _SHAPE[size])


def _splits(size: str) -> Iterator[Set]:
    for split_k in (2, 3):
        yield sets.of_accumulator(f"K in {split_k} runs, their results added", _SHAPE[size], split_k)


def _factors(size: str) -> Iterator[Set]:
    for form in ("pytorch", "jax"):
        yield sets.of_matmul(f"matmul.{form}", f"alpha formed as {form} does", _SHAPE[size], alpha_form=form)


def _epilogues(size: str) -> Iterator[Set]:
    shape = _SHAPE[size]
    yield sets.of_matmul("matmul.c-bias", "beta·C and a bias", shape, bias=True, beta=0.5, alpha=1.25)
    yield sets.of_matmul(
        "matmul.bf16", "a bias, then bfloat16", shape, bias=True, out_dtype=ml_dtypes.bfloat16, alpha=3.0
    )


def _four_over_six(*variants: str) -> tuple[Rows, ...]:
    what = "blocks that 4 suits, blocks of equal errors, mixed ones, zeros, NaN and Inf"
    return tuple(Rows(f"four-over-six.{variant}", operands.four_or_six, what) for variant in variants)


def _tiles(size: str) -> Iterator[Set]:
    for mode in ("MAE", "MSE"):
        for axis in (-1, 0):
            yield sets.of_tiles(mode, 448 if axis else 256, axis)


def _quantize(preset: str) -> tuple[Rows, ...]:
    name = f"quantize.{preset}"
    return (Rows(name, operands.peers, "ties of elements and scales, order pairs, zeros, strange amaxes, NaN and Inf"),)


def _one_level(preset: str) -> tuple[Rows, ...]:
    what = "blocks whose scales and elements are ties where S is 1, zeros, tiny blocks, NaN and Inf"
    return (Rows(f"quantize.{preset}", operands.one_level, what),)


# ---- faults in words ---------------------------------------------------------------------------------------

_TE: dict[str, Settings] = {"the arithmetic of te, where another is declared": {"preset": "te"}}
_ROUNDS: dict[str, Settings] = {"seven rounds, not ten": {"rounds": 7}}
_MODELS: dict[str, Settings] = {
    "the exact sum, rounded once to nearest": {"model": "exact"},
    "products added one after another in float32": {"model": "fp32"},
}


def _both(value: bool) -> dict[str, Settings]:
    return {"the count of words as if the launch made " + ("both directions" if value else "one"): {"both": value}}


# ---- the groups --------------------------------------------------------------------------------------------

_TIES = ("element.ties-away", "element.ties-to-zero", "element.truncate", "element.via-bfloat16", "element.via-float16")
_ORDERS = tuple(
    f"block-scale.{name}"
    for name in ("divide-by-6", "scale-then-sixth", "divide-by-product", "divide-twice", "sixth-then-divide")
)
_RANDOM = ("random.byte-per-element", "random.operands-reversed", "random.no-bit-reversal", "random.grid-without-1.5")
_EDGES = "every value and midpoint with four float32 steps to each side"
_SWEEP = _EDGES + "; in full also every upper half of float32 with six lower ones"

_GROUPS = (
    # ---- float32 -------------------------------------------------------------------------------------------
    Group(
        "FP32-RULES",
        (
            Rows("multiply", operands.two_floats, "large, small and subnormal numbers, and random ones"),
            Rows("divide", operands.two_floats, "the same"),
        ),
        ("encode-scale.flushed-subnormals",),
        {"a division made a product with the reciprocal": {"by-reciprocal": True}},
    ),
    Group(
        "DIV-APPROXIMATE",
        (Rows("divide-approximate", operands.two_floats, "large, small and subnormal numbers, and random ones"),),
        faults={"an IEEE division": {"division": "ieee"}},
    ),
    Group(
        "FP32-FMIN",
        (Rows("minimum", operands.one_nan, "one NaN of either sign beside a number, and pairs of numbers"),),
        faults={"NaN goes through the minimum": {"block_scale_nan": "propagate"}},
    ),
    Group(
        "NAN-CANONICAL",
        (
            Rows("multiply", operands.with_nan, "NaN of any payload, and products that make one"),
            Rows("divide", operands.with_nan, "the same"),
        ),
        faults={"the NaN of an x86 processor": {"nan": 0xFFC00000}, "the NaN of C's NAN": {"nan": 0x7FC00000}},
    ),
    Group(
        "INPUT-WIDEN",
        (
            Rows("widen-bf16", operands.halves(ml_dtypes.bfloat16), "every exponent; in full every pattern"),
            Rows("widen-f16", operands.halves(np.float16), "every exponent; in full every pattern"),
        ),
        ("encode-scale.flushed-subnormals",),
    ),
    # ---- codes ---------------------------------------------------------------------------------------------
    Group(
        "E2M1-VALUES",
        (Rows("e2m1-decode", operands.all_codes, "every code"),),
        faults={"the sign of −0 is lost": {"positive-zero": True}},
    ),
    Group("E2M1-RNE", (Rows("e2m1", operands.codec("e2m1", "range"), f"up to 6: {_SWEEP}"),), _TIES),
    Group(
        "E2M1-SATURATE",
        (Rows("e2m1", operands.codec("e2m1", "above"), f"above 6, Inf included: {_SWEEP}"),),
        ("element.no-saturation",),
    ),
    Group(
        "E2M1-NAN",
        (Rows("e2m1", operands.codec("e2m1", "nan"), "NaN of both signs with each single bit of the payload"),),
        ("element.nan-code",),
    ),
    Group(
        "E2M1-ZERO",
        (Rows("e2m1", operands.codec("e2m1", "zero"), f"zeros, and what rounds to zero: {_SWEEP}"),),
        ("element.negative-zero-dropped",),
    ),
    Group(
        "E2M1-PACK",
        (Rows("e2m1-pack", operands.code_pairs, "every pair of codes beside each other, at every place"),),
        ("packing.high-nibble-first", "packing.split-half"),
    ),
    Group(
        "E4M3-VALUES",
        (Rows("e4m3-decode", operands.all_bytes, "every byte"),),
        faults={"0x7F read as the number 480": {"no-nan": True}},
    ),
    Group(
        "E4M3-RNE",
        (Rows("e4m3", operands.codec("e4m3", "range"), f"up to 448: {_SWEEP}"),),
        (
            *("block-scale.round-up", "block-scale.truncate", "block-scale.half-up", "block-scale.power-of-two"),
            *("block-scale.floor-2^-6", "block-scale.floor-2^-9", "block-scale.nan-above-240"),
        ),
    ),
    Group(
        "E4M3-SATURATE",
        (Rows("e4m3", operands.codec("e4m3", "above"), f"above 448, Inf included: {_SWEEP}"),),
        ("block-scale.nan-on-overflow",),
    ),
    Group(
        "E4M3-NAN",
        (Rows("e4m3", operands.codec("e4m3", "nan"), "NaN of both signs with each single bit of the payload"),),
        ("block-scale.nan-byte",),
    ),
    Group(
        "E8M0-VALUES",
        (Rows("e8m0-decode", operands.all_bytes, "every byte"),),
        ("encode-scale.flushed-subnormals",),
    ),
    Group(
        "E8M0-ENCODE",
        tuple(
            Rows(name, operands.powers, "every power of two with four float32 steps to each side, zeros, Inf and NaN")
            for name in ("e8m0-floor", "e8m0-ceil", "e8m0-floor-nan", "e8m0-ceil-nan")
        ),
        faults={"rounded up": {"rounding": "ceil"}, "overflow to NaN": {"overflow": "nan"}},
    ),
    Group(
        "E8M0-NAN",
        (
            Rows(
                "e8m0-floor",
                lambda size: (np.concatenate([operands.codec("e4m3", "nan")(size)[0], [np.float32(1)]]),),
                "NaN of both signs",
            ),
        ),
        faults={"NaN made the largest power": {"nan-byte": 0xFE}},
    ),
    # ---- blocks and amax -----------------------------------------------------------------------------------
    Group(
        "BLOCK-1X16",
        (
            tensors("shape/16x48.bf16.1x16.row", "normal/s1.bf16.1x16.row", more=("normal/", "shape/", "rows/")),
            Rows("block", under_scale(of_suite("e2m1-tie/amax-384.f32", "normal/s1.bf16")), "blocks under a given S"),
        ),
        ("blocks.2d-for-1d", "blocks.size-32", "blocks.wrong-axis", "hadamard.on-rowwise", "packing.split-half"),
    ),
    Group(
        "BLOCK-16X16",
        (tensors("tile/uneven.bf16.16x16.both", "shape/16x48.f32.16x16.both", more=("tile/",)),),
        ("blocks.1d-for-2d", "scales.tiled-not-repeated", "scales.one-per-tile", "block-scale.zero-block-value"),
    ),
    Group(
        "BLOCK-COLUMNWISE",
        (tensors("scale-order/m188.bf16.1x16.both", "shape/16x48.f32.1x16.both", more=("scale-order/", "allbits/")),),
        ("blocks.wrong-axis", *_ORDERS, "scales.transposed", "hadamard.not-declared"),
    ),
    Group(
        "BLOCK-AMAX",
        (
            Rows(
                "block-amax",
                only_x(of_suite("special/", "sign/", "zero/sparse", "mixed/decades8.f32")),
                "negative, zero, NaN, Inf",
            ),
        ),
        ("amax.nan-propagated", "block-scale.amax-without-abs"),
    ),
    Group(
        "AMAX-TENSOR",
        (tensors("sign/negative-dominant.bf16.1x16.row", "outlier/one.f32.1x16.both", more=("sign/", "outlier/")),),
        ("block-scale.amax-without-abs", "global-scale.wrong-amax"),
    ),
    Group(
        "AMAX-NAN",
        (tensors("special/nan-inf.bf16.1x16.row", "special/nan-block.f32.1x16.row", more=("special/",)),),
        ("amax.nan-propagated", "element.nan-code"),
    ),
    Group(
        "AMAX-ROW",
        (tensors("zero/blocks.bf16.1x16.both.row-scaled", "special/nan-inf.f32.1x16.row.row-scaled"),),
        ("amax.nan-propagated",),
        {"one amax for the whole tensor": {"row_scaled": False}},
    ),
    Group(
        "AMAX-SUPPLIED",
        (
            Rows("quantize", operands.supplied, "blocks under amaxes that are not their tensor's"),
            tensors("given-amax/stale-half.bf16.1x16.row", more=("given-amax/",)),
        ),
        ("global-scale.guard", "global-scale.e4m3-max-256", "block-scale.floor-0"),
    ),
    # ---- scales --------------------------------------------------------------------------------------------
    Group(
        "SCALE-GLOBAL",
        (Rows("global-scale", operands.amaxes, "listed ones, all bfloat16 mantissas, random; in full every bfloat16"),),
        (
            *("global-scale.reciprocal-form", "global-scale.reciprocal-then-multiply", "global-scale.bfloat16"),
            *("global-scale.float16", "global-scale.none", "global-scale.inverted", "global-scale.e4m3-max-256"),
            *("global-scale.headroom", "global-scale.product-form", "global-scale.approximate-reciprocal"),
        ),
    ),
    Group(
        "SCALE-GLOBAL-GUARD",
        (Rows("global-scale", operands.strange_amaxes, "0, Inf, NaN, negative, the ends, where S meets FLT_MAX"),),
        ("global-scale.guard", "encode-scale.flushed-subnormals"),
    ),
    Group(
        "SCALE-DECODE",
        (Rows("global-scale", operands.amaxes, "as SCALE-GLOBAL: the result ``decode``"),),
        ("global-scale.reciprocal-form", "global-scale.inverted"),
    ),
    Group(
        "SCALE-BLOCK",
        (
            Rows("block-scale", operands.block_amaxes, "pairs on which another order gives another byte; E4M3 ties"),
            Rows("block-scale", operands.strange_block_amaxes, "0, Inf, NaN and negative operands"),
            Rows("quantize", of_suite("scale-order/", "e4m3-tie/amax-pi.f32"), "blocks of the same kinds"),
            tensors(more=("e4m3-tie/", "magnitude/")),
        ),
        (
            *_ORDERS,
            *("block-scale.bfloat16", "block-scale.float16", "block-scale.prescaled", "block-scale.nan-kept"),
            *("block-scale.unclamped", "block-scale.round-up", "block-scale.half-up", "block-scale.four-over-six"),
        ),
        {"1/6 rounded down": {"headroom": 0.99999994}},
    ),
    Group(
        "SCALE-ENCODE",
        (Rows("encode-scale", operands.bytes_and_scales, "every byte under several S"),),
        (
            *("encode-scale.reciprocal-product", "encode-scale.quotient", "encode-scale.approximate-reciprocal"),
            *("encode-scale.bfloat16-coefficient", "encode-scale.unclamped", "encode-scale.guarded-reciprocal"),
            "encode-scale.flushed-subnormals",
        ),
    ),
    Group(
        "SCALE-ZERO-BLOCK",
        (
            Rows("quantize", of_suite("zero/", "threshold/"), "blocks of zeros, blocks whose scale alone is zero, −0"),
            tensors("zero/negative-tensor.bf16.1x16.row", more=("zero/", "threshold/", "mixed/")),
        ),
        (
            *("block-scale.zero-block-value", "block-scale.floor-2^-9", "block-scale.floor-2^-6"),
            *("encode-scale.zero-scale-zeroes", "encode-scale.guarded-reciprocal", "element.negative-zero-dropped"),
        ),
    ),
    Group(
        "ELEMENT-SCALE",
        (
            Rows("element", operands.elements, "products at E2M1 midpoints and a float32 step beside"),
            Rows("quantize", of_suite("e2m1-tie/"), "blocks whose scaled elements are midpoints, or a step beside"),
            tensors(more=("e2m1-tie/",)),
        ),
        (
            *_TIES,
            *("encode-scale.divide-by-scale", "encode-scale.two-multiplications", "encode-scale.quotient"),
            *("encode-scale.reciprocal-product", "encode-scale.unrounded-block-scale"),
        ),
        {"the product not rounded before its conversion": {"fused": True}},
    ),
    # ---- variations ----------------------------------------------------------------------------------------
    Group(
        "FAST-MATH",
        _quantize("te-fast-math"),
        ("element.negative-zero-dropped", "encode-scale.reciprocal-of-product"),
        _TE,
    ),
    Group(
        "ROW-SCALED",
        (
            tensors(
                "mixed/rows.bf16.1x16.row.row-scaled",
                more=("normal/s1.bf16.1x16.row.row", "normal/s1.bf16.1x16.both.row", "mixed/rows.f32.1x16.row.row"),
            ),
        ),
        ("global-scale.reciprocal-form",),
        {"one amax for the whole tensor": {"row_scaled": False}},
    ),
    Group(
        "TE-2-14",
        _quantize("te-2.14"),
        ("block-scale.amax-times-sixth-of-scale", "block-scale.scale-then-sixth"),
        _TE,
    ),
    Group("TE-REFERENCE", _quantize("te-reference"), ("element.nan-code",), _TE),
    Group(
        "FOUR-OVER-SIX-SCALE",
        _four_over_six("MAE-256", "MAE-448"),
        ("block-scale.not-four-over-six", "global-scale.e4m3-max-448"),
    ),
    Group("FOUR-OVER-SIX-ERROR", _four_over_six("MSE-256", "MSE-448"), ("block-scale.four-over-six-error",)),
    Group(
        "FOUR-OVER-SIX-FAST-ERROR",
        _four_over_six("MAE-256-fast", "MAE-448-fast", "MSE-256-fast", "MSE-448-fast"),
        ("block-scale.four-over-six-error",),
    ),
    Group(
        "FOUR-OVER-SIX-SUM",
        (_tiles, tensors(more=("tile/uneven.f16.16x16.both.4over6", "mixed/decades8.f32.16x16.both.4over6"))),
        ("block-scale.four-over-six-error", "block-scale.not-four-over-six"),
    ),
    Group(
        "FOUR-OVER-SIX-SELECT",
        (
            *_four_over_six("MAE-256", "MSE-448"),
            tensors(
                "four-over-six/even-errors.bf16.1x16.row.4over6-MAE-448",
                more=("four-over-six/", "normal/s1.bf16.1x16.both.4over6", "special/nan-inf.bf16.1x16.both.4over6"),
            ),
        ),
        ("block-scale.not-four-over-six",),
        {"equal errors take 4": {"tie-to-4": True}},
    ),
    # ---- the transform -------------------------------------------------------------------------------------
    Group(
        "RHT-MATRIX",
        (Rows("rht16", operands.vectors, "unit vectors under six masks, sums that cancel, random ones"),),
        ("hadamard.missing", "hadamard.no-signs", "hadamard.signs-on-output", "hadamard.unnormalised"),
    ),
    Group(
        "RHT-SUM",
        (Rows("rht16-sums", operands.vectors, "a small product moved past what the sum holds; random ones"),),
        ("hadamard.float32-sum",),
    ),
    Group(
        "RHT-ROUND",
        (
            tensors(
                "e2m1-tie/lattice-896.bf16.1x16.col.rht",
                "hadamard/cancellation.bf16.1x16.col.rht",
                more=(
                    "normal/s1.bf16.1x16.col.rht",
                    "mixed/decades8.bf16.1x16.col.rht",
                    "shape/144x80.bf16.1x16.col.rht",
                ),
            ),
        ),
        ("hadamard.not-rounded-to-bfloat16", "hadamard.float32-sum", "hadamard.missing"),
    ),
    Group(
        "RHT-SPECIAL",
        (Rows("rht16", operands.special_vectors, "NaN of any payload, Inf of one and of both signs, overflow"),),
        ("hadamard.unnormalised",),
    ),
    Group(
        "RHT-AMAX",
        (
            tensors(
                "zero/sparse.bf16.1x16.col.rht",
                "normal/s1.bf16.1x16.both.rht",
                more=("special/nan-inf.bf16.1x16.col.rht", "magnitude/subnormal.bf16.1x16.col.rht"),
            ),
        ),
        ("hadamard.amax-before-transform", "hadamard.on-rowwise", "hadamard.no-signs", "hadamard.signs-on-output"),
    ),
    Group("FUSED-RHT-GLOBAL", _quantize("te-fused-rht"), ("global-scale.guard",), _TE),
    Group(
        "FUSED-RHT-NAN",
        (Rows("quantize.te-fused-rht", operands.special_blocks, "blocks with NaN, Inf and −0 under several amaxes"),),
        ("element.nan-code", "block-scale.nan-byte", "encode-scale.nan-as-zero"),
        _TE,
    ),
    # ---- dequantization ------------------------------------------------------------------------------------
    Group(
        "DEQUANTIZE",
        tuple(
            Rows(name, operands.stored_blocks, "finite scale bytes with every code, under several amaxes")
            for name in ("dequantize", "dequantize-bf16", "dequantize-f16", "dequantize-256")
        ),
        ("packing.high-nibble-first", "packing.split-half", "global-scale.e4m3-max-256"),
        {
            "the byte's value times D, for fl(fl(d·A)·fl(1/M))": {"factor": "d·D"},
            "d times the product of A and 1/M": {"factor": "A/M first"},
        },
    ),
    Group(
        "DEQUANTIZE-NAN",
        tuple(
            Rows(name, operands.special_stored_blocks, "NaN and negative bytes; amaxes of 0, Inf, NaN, negative")
            for name in ("dequantize", "dequantize-bf16", "dequantize-f16")
        ),
        ("packing.high-nibble-first",),
        {"the byte's value times D, for fl(fl(d·A)·fl(1/M))": {"factor": "d·D"}},
    ),
    # ---- layout --------------------------------------------------------------------------------------------
    Group("LAYOUT-PAD", (layouts("pad"),), ("scales.swizzled", "scales.transposed")),
    Group("LAYOUT-SWIZZLE", (layouts("swizzle"),), ("scales.not-swizzled", "scales.transposed")),
    Group(
        "LAYOUT-TRANSPOSE",
        (_transposes,),
        ("scales.transposed",),
        {"bytes transposed, their nibbles left where they were": {"nibbles": True}},
    ),
    # ---- the recipe kernels --------------------------------------------------------------------------------
    Group(
        "RECIPE-GLOBAL-SCALE",
        (Rows("recipe-global-scale", operands.strange_amaxes, "0, Inf, NaN, negative, the ends"),),
        ("global-scale.guard",),
        {"the guard of the plain kernels": {"global_guard": "te"}},
    ),
    Group(
        "RECIPE-BLOCK-SCALE",
        (Rows("recipe-block-scale", operands.recipe_scales, "pairs on which the order shows, strange amaxes"),),
        _ORDERS,
    ),
    Group(
        "RECIPE-ALPHA",
        (Rows("gemm-alpha", operands.alphas, "combinations of factors and amaxes, overflow and NaN among them"),),
        faults={"each amax divided by 2688 first, as JAX does": {"alpha_form": "jax"}},
    ),
    Group(
        "PARTIAL-CAST-SCALE",
        (Rows("partial-cast", operands.cast_elements, "elements at ties under float32 scales that E4M3 rounds"),),
        faults={"the float32 scale used without its E4M3 rounding": {"unrounded": True}},
    ),
    Group(
        "PARTIAL-CAST-OFFSET",
        (_pieces,),
        faults={
            "the nibble beside the piece cleared": {"whole-bytes": True},
            "the piece begins at the second element": {"start": 1},
        },
    ),
    # ---- other projects ------------------------------------------------------------------------------------
    Group("PEER-TORCHAO", _quantize("torchao"), ("block-scale.floor-2^-9",), _TE),
    Group("PEER-MODELOPT", _quantize("modelopt"), ("block-scale.floor-2^-6",), _TE),
    Group("PEER-COMPRESSED-TENSORS", _quantize("compressed-tensors"), ("encode-scale.quotient",), _TE),
    Group("PEER-VLLM", _quantize("vllm"), ("block-scale.divide-by-6",), _TE),
    Group("PEER-FOUROVERSIX", _quantize("fouroversix"), ("block-scale.not-four-over-six",), _TE),
    Group("PEER-JAX-NN", _quantize("jax-nn"), ("element.nan-code",), _TE),
    Group(
        "PEER-TORCHAO-GPU", _quantize("torchao-gpu"), ("block-scale.floor-2^-9", "global-scale.reciprocal-form"), _TE
    ),
    Group("PEER-JAX-NN-GPU", _quantize("jax-nn-gpu"), ("element.nan-code", "encode-scale.flushed-subnormals"), _TE),
    Group("PEER-TE-JAX-GPU", _quantize("te-jax-gpu"), ("element.nan-code", "encode-scale.flushed-subnormals"), _TE),
    Group("PEER-QWIX", _quantize("qwix"), ("element.nan-code",), _TE),
    Group("PEER-QWANTIZE", _quantize("qwantize"), ("element.ties-away",), _TE),
    Group("PEER-QWIX", _one_level("qwix"), ("block-scale.divide-by-6", "encode-scale.divide-by-scale"), _TE),
    Group("PEER-QWANTIZE", _one_level("qwantize"), ("element.ties-away", "block-scale.scale-then-sixth"), _TE),
    Group("PEER-TE-JAX", _quantize("te-jax"), ("block-scale.nan-on-overflow",), _TE),
    # ---- stochastic rounding -------------------------------------------------------------------------------
    Group(
        "SR-SM100",
        (
            Rows("stochastic.sm100", operands.carries("e2m1"), "sixteenths of every step; words that just carry"),
            tensors(more=("stochastic/normal",)),
        ),
        (*_RANDOM, "random.not-used"),
    ),
    Group(
        "SR-FALLBACK",
        (Rows("stochastic.te-fallback", operands.carries("e2m1"), "sixteenths of every step"),),
        ("random.not-used", "random.other-rule"),
    ),
    Group(
        "SR-JAX",
        (Rows("stochastic.te-jax", operands.uniforms, "sixteenths of every step; the uniform at, below and above"),),
        ("random.not-used", "random.other-rule"),
    ),
    Group(
        "SR-IDEAL",
        (
            Rows("stochastic.ideal", operands.uniforms, "sixteenths of every step; the uniform at, below and above"),
            tensors(more=("stochastic/uniforms",)),
        ),
        ("random.grid-without-1.5", "random.not-used"),
    ),
    Group(
        "SR-E4M3",
        (Rows("stochastic.e4m3", operands.carries("e4m3"), "halves of every step; words that just carry, or not"),),
        ("random.not-used",),
    ),
    Group(
        "PHILOX-ROUNDS",
        (Rows("philox", operands.philox_calls, "the published known answers, every single bit, random ones"),),
        faults=_ROUNDS,
    ),
    Group(
        "PHILOX-COUNTER",
        (Rows("philox-word", operands.philox_numbers, "offsets that carry, seeds of one half, all words of a call"),),
        ("random.wrong-offset",),
        {**_ROUNDS, "the offset read as a count of words": {"offset": "words"}},
    ),
    Group(
        "STREAM-TUNED-1D",
        (
            streams("tuned-1d", (-1, False), (-1, True), (0, True)),
            tensors("stochastic/normal.bf16.1x16.both.tuned-1d"),
        ),
        ("random.wrong-offset", "random.rowwise-stream-reused"),
        {**_ROUNDS, **_both(True)},
    ),
    Group(
        "STREAM-2D",
        (streams("2d", (-1, False), (-1, True), (0, False), (0, True), block=(16, 16)),),
        ("random.wrong-offset",),
        {**_ROUNDS, **_both(True)},
    ),
    Group(
        "STREAM-VECTOR-BLOCKWISE",
        (streams("vector-blockwise", (-1, False), (0, False), (0, True)),),
        ("random.wrong-offset",),
        {**_ROUNDS, **_both(True)},
    ),
    Group("STREAM-UNFUSED-RHT", (streams("unfused-rht", (0, False)),), ("random.wrong-offset",), _ROUNDS),
    Group("STREAM-FUSED-RHT", (streams("fused-rht", (-1, True), (0, True)),), ("random.wrong-offset",), _ROUNDS),
    Group(
        "STREAM-FUSED-RHT-COLUMNWISE",
        (streams("fused-rht-columnwise", (0, False)),),
        ("random.wrong-offset",),
        _ROUNDS,
    ),
    Group("STREAM-GROUPED", (streams("grouped", (-1, True)),), ("random.wrong-offset",), _ROUNDS),
    # ---- matrix multiplication -----------------------------------------------------------------------------
    Group(
        "MMA-SPECIAL",
        (Rows("mma", operands.words("special"), "NaN and negative scales in each group; NaN, Inf and −0 in C"),),
        faults={"the sign bit of a scale counts": {"signed-scales": True}},
    ),
    Group("MMA-GROUP", (Rows("mma", operands.words("group"), "random products under like scales"),), faults=_MODELS),
    Group(
        "MMA-WINDOW",
        (Rows("mma", operands.words("window"), "a small group moved through the window's edge; scales far apart"),),
        faults={
            **_MODELS,
            "a window by products, four of them merged": {"model": "window39-k4"},
            "groups of zeros widen the window": {"model": "blackwell-snapshot"},
        },
    ),
    Group(
        "MMA-ROUND",
        (Rows("mma", operands.words("round"), "sums that end below float32's last bit, of both signs; zeros"),),
        faults=_MODELS,
    ),
    Group("GEMM-ACCUMULATE", (_accumulators,), faults={**_MODELS, "K in two runs": {"split_k": 2}}),
    Group("GEMM-SPLIT-K", (_splits,), faults={"K in one run": {"split_k": 1}}),
    Group("GEMM-ALPHA", (_factors,), faults={"alpha as JAX forms it": {"alpha_form": "jax"}}),
    Group(
        "GEMM-EPILOGUE",
        (_epilogues,),
        faults={"the output rounded before the bias is added": {"rounded-before-bias": True}},
    ),
    # ---- formats for comparison ----------------------------------------------------------------------------
    Group(
        "MXFP4-SCALE",
        (
            Rows("mxfp4-floor", operands.long_blocks(32), "blocks of the suite, every ninth binade, zeros"),
            Rows("mxfp4-ceil", operands.long_blocks(32), "the same"),
        ),
        faults={"the scale rounded up": {"rounding": "ceil"}},
    ),
    Group(
        "FP8-SCALE",
        (Rows("fp8", operands.long_blocks(128), "rows of the suite, every ninth binade, zeros"),),
        faults={"amax/448 stored, and its reciprocal multiplied with": {"by-reciprocal": True}},
    ),
)

#: Rules that say nothing about single bits, or nothing of their own, and why.
NOT_COVERED: dict[str, str] = {
    "INPUT-FLATTEN": "shapes only: a tensor of more dimensions is the matrix of its rows",
    "VB-SINGLE-AMAX": "which of two given amaxes is used; with one amax it says nothing",
    "FUSED-RHT-FAST-MATH": "the bits of its approximate reciprocal are not specified",
    "MXFP4-ELEMENT": "the packed codes of MXFP4-SCALE's vectors",
    "GEMM-EXACT-BOUND": "a statement about MMA-WINDOW; its vectors hold it",
    "RECIPE-FPROP": "which operand is quantized how, no arithmetic of its own",
    "RECIPE-DGRAD": "which operand is quantized how, no arithmetic of its own",
    "RECIPE-WGRAD": "which operand is quantized how, no arithmetic of its own",
    "RECIPE-LAYERS": "which layers take part, no arithmetic",
    "DISPATCH": "which kernel runs, no arithmetic",
}

#: Deviations that no vector shows, and why.
NOT_HUNTED: dict[str, str] = {
    "global-scale.stored-otherwise": "the vectors hold no stored global scale, only the amax",
    "packing.low-nibble-first": "it is the specification's own packing, where a producer declares another",
    "scales.repeated-not-tiled": "it is the specification's own layout, where a producer declares another",
    "hadamard.rounded-to-bfloat16": "it is the specification's own rounding, where a producer declares another",
}

GROUPS: dict[str, Group] = {group.rule: group for group in _GROUPS}


def chosen(rules: Sequence[str] | None = None) -> list[Group]:
    """The groups of some rules in the order of the specification, or all.  Raises ValueError for a rule without one."""
    if rules is None:
        return list(GROUPS.values())
    for rule in rules:
        if rule in NOT_COVERED:
            raise ValueError(f"{rule} has no vectors: {NOT_COVERED[rule]}")
        if rule not in GROUPS:
            near = difflib.get_close_matches(rule.upper(), GROUPS, n=1)
            hint = f"did you mean {near[0]}?" if near else "nvfp4 vectors list has them"
            raise ValueError(f"there is no rule {rule!r} with vectors; {hint}")
    return [group for name, group in GROUPS.items() if name in set(rules)]


def in_operations(groups: Sequence[Group]) -> dict[str, str]:
    """The operations that the groups' rows ask for, with what each is."""
    names = dict.fromkeys(part.operation for group in groups for part in group.rows)
    return {name: OPERATIONS[name].what for name in names}

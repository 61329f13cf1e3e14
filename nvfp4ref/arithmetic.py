"""The variation points of NVFP4 quantization as data, and the named values of real quantizers.

Quantizers in the wild differ in a handful of places.  Each place is a field of :class:`Arithmetic`; a
quantizer is one value of it.  Presets reproduce real software, diagnosis searches over the fields, and
tests plant faults with them.  What each choice computes stands in ``scaling.py`` and ``e2m1.py``.

Notation of the comments: A tensor amax, a block amax, M = element_max·e4m3_max, fl one float32 rounding,
S the global encode scale, D the global decode scale, d the decoded E4M3 block scale, e the encode scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_args, get_type_hints
from typing import Literal as L

T = TypeVar("T")


@dataclass(frozen=True)
class Arithmetic:
    """One quantizer's arithmetic; immutable, compared by value.  The defaults are Transformer Engine's.

    Raises ValueError when a field has a value that is not one of its choices.
    """

    name: str = "te"

    # -- amax ------------------------------------------------------------------------------------
    amax_nan: L["ignore", "propagate", "xla-cpu"] = "ignore"  # what max(abs(x)) does with NaN, tensor and block
    # xla-cpu: propagate, but block amaxes of 4096 elements and more come from a tree of (u > v ? u : v)
    block_amax: L["abs", "signed"] = "abs"  # a = max(abs(x)), or the fault max(x)
    amax_group: L[16, 32] = 16  # elements that share a, or the fault of two neighbouring blocks

    # -- global scale ----------------------------------------------------------------------------
    global_scale: L["quotient", "reciprocal-form", "product-form", "reciprocal-then-multiply", "inverted", "none"] = (
        "quotient"
    )
    # quotient S = fl(M/A), D = fl(1/S); reciprocal-form D = fl(A/M), S = fl(1/D);
    # product-form D = fl(A·fl(1/M)), S = fl(1/D);
    # reciprocal-then-multiply S = fl(fl(1/A)·M), D = fl(1/S); inverted: S and D of quotient exchanged;
    # none S = D = 1
    global_guard: L["te", "fused-rht", "reference", "finite", "zero-amax", "none"] = "te"
    # te: S = fmin(S, FLT_MAX), 1 if A or S is 0; fused-rht: A > 0 ? min.NaN(S, FLT_MAX) : 1;
    # reference: min.NaN(S, FLT_MAX), 1 if S is 0; finite: A at least the smallest normal of the input type,
    # S = 1 unless finite; zero-amax: 1 if A is 0; none: as computed
    global_type: L["float32", "bfloat16", "float16", "input"] = "float32"  # each step of S rounded to this
    e4m3_max: L[448, 256] = 448
    headroom: float = 1.0  # element_max = 6·headroom; 16/17 makes stochastic rounding free of clipping

    # -- block scale -----------------------------------------------------------------------------
    block_scale: L[
        "amax-times-sixth-of-scale",  # fl(a·fl(S·fl(1/6)))            te
        "divide-by-6",  # fl(fl(a/6)·S)
        "scale-then-sixth",  # fl(S·fl(a·fl(1/6)))
        "divide-by-product",  # fl(a/fl(6·D))
        "divide-twice",  # fl(fl(a/6)/D)
        "sixth-then-divide",  # fl(fl(a·fl(1/6))/D)
        "prescaled",  # fl(max(abs(fl(x·S)))/6)
        "prescaled-times-sixth",  # fl(max(abs(fl(x·S)))·fl(1/6))
        "predivided-times-sixth",  # fl(max(abs(fl(x/D)))·fl(1/6))
    ] = "amax-times-sixth-of-scale"
    sixth_type: L["float32", "bfloat16", "float16", "input"] = "float32"  # a/6 of divide-by-6 rounded to this
    block_scale_max: L["float32-max", "e4m3-max", "none"] = "float32-max"  # clamp before E4M3
    block_scale_nan: L["drop", "propagate"] = "drop"  # does that clamp drop NaN (fmin) or keep it
    scale_rounding: L["nearest-even", "up", "truncate", "half-up", "power-of-two"] = "nearest-even"
    scale_overflow: L["saturate", "nan", "nan-above-240"] = "saturate"
    scale_nan_byte: int = 0x7F
    scale_invalid_byte: int = 0x7F  # the same for a NaN that the arithmetic itself made (0/0)
    scale_floor: float | None = None  # the block scale is at least this (0, 2^-9, 2^-6) before E4M3
    zero_block_scale: int | None = None  # byte stored for a zero block, where not what the rest gives
    zero_block_rule: L["amax", "block-scale", "small-block-scale", "byte"] = "amax"
    # zero: a, the float32 scale, or the byte is 0; small-block-scale: the float32 scale is below 2^-63

    # -- encode scale and scaled element ---------------------------------------------------------
    encode_scale: L[
        "reciprocal-of-product",  # e = fl(1/fl(d·D)),  y = fl(x·e)     te
        "quotient",  # e = fl(S/d),  y = fl(x·e)
        "reciprocal-product",  # e = fl(S·fl(1/d)),  y = fl(x·e)
        "divide-by-product",  # y = fl(x/fl(d·D))
        "divide-by-quotient",  # y = fl(x/fl(d/S))
        "two-multiplications",  # y = fl(fl(x·S)·fl(1/d))
        "bfloat16-coefficient",  # e = bf16(fmin(fl(S/d), bf16 max)),  y = fma(x, e, +0)
        "unrounded-block-scale",  # e = fl(1/fl(s·D)) with s the block scale before its E4M3 rounding
    ] = "reciprocal-of-product"
    encode_max: L["float32-max", "none"] = "float32-max"  # clamp of e
    encode_nan: L["drop", "propagate", "as-zero"] = "drop"
    # does that clamp drop NaN or keep it; as-zero: a NaN scale counts as 0, so that elements become ±Inf
    encode_ulp: L[-1, 0, 1] = 0  # e moved by that many ulps: an approximate reciprocal
    reciprocal_of_zero: float | None = None  # what 1/0 gives where it is guarded (1e-8)
    zero_scale_elements: L["scaled", "zero"] = "scaled"  # elements of a block whose scale byte is 0

    # -- element ---------------------------------------------------------------------------------
    element_rounding: L["nearest-even", "ties-away", "ties-to-zero", "truncate"] = "nearest-even"
    element_via: L["bfloat16", "float16", "input"] | None = None  # y rounded to that type first
    saturate: bool = True  # else magnitudes from 7 up become 8, code 8, and Inf the code of NaN
    negative_zero: L["keep", "drop-exact", "drop"] = "keep"
    # keep: −0 and negatives that round to 0 give 8; drop-exact: y = −0 gives 0; drop: both give 0
    nan_code: int = 7
    nan_code_bfloat16: int | None = None  # the same for bfloat16 input, where it is another
    nan_block_codes: tuple[int, int, int] | None = None
    # codes of a block whose scale is NaN because A is, because a is, or by an invalid operation; None: nan_code
    flush_subnormals: bool = False  # every operation reads and writes subnormals as zero (XLA on the CPU)

    # -- operations ------------------------------------------------------------------------------
    division: L["ieee", "rcp-approx"] = "ieee"
    # of S, D, s, e and y, not 4over6's own: fl(p/q), or fl(p·r) with r the reciprocal of q by a GPU's table (rcp.py)

    # -- transform -------------------------------------------------------------------------------
    rht_sum: L["tensor-core", "float32-four-lanes"] = "tensor-core"  # how 16 products are added

    # -- stored form -----------------------------------------------------------------------------
    packing: L["low-nibble-first", "high-nibble-first", "split-half"] = "low-nibble-first"
    tile_scales: L["repeated", "tiled"] = "repeated"  # how a 16x16 tile's scale reaches its 16 rows

    # -- variants --------------------------------------------------------------------------------
    four_over_six: L["MAE", "MSE"] | None = None
    four_over_six_fast_error: bool = False
    four_over_six_sum: L["sequential", "torch-row-sum"] = "sequential"  # order of the error's additions
    row_scaled: bool = False
    stochastic: L[
        "sm100",
        "te-fallback",
        "te-jax",
        "ideal",
        "sm100-operands-reversed",
        "sm100-no-bit-reversal",
        "sm100-without-1.5",
    ] = "sm100"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
                raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r}")
        if (
            isinstance(self.headroom, bool)
            or not isinstance(self.headroom, (int, float))
            or not 0.5 <= self.headroom <= 1
        ):
            raise ValueError(f"headroom is a factor from 0.5 to 1 (1 or 16/17); got {self.headroom!r}")
        for names, limit, what in ((_BYTES, 255, "byte"), (_CODES, 15, "code")):
            for name in names:
                value = getattr(self, name)
                if value is not None and (not isinstance(value, int) or not 0 <= value <= limit):
                    raise ValueError(f"{name} is a {what}, 0..{limit}; got {value!r}")
        if self.scale_floor is not None and not 0 <= self.scale_floor <= 448:
            raise ValueError(f"scale_floor is None or a number from 0 to 448; got {self.scale_floor!r}")
        if self.row_scaled and self.global_scale == "none":
            raise ValueError("row_scaled needs a global scale")

    @property
    def element_max(self) -> float:
        """Largest element the block amax is mapped to: 6, or less with headroom."""
        return 6.0 * self.headroom

    def for_input(self, dtype: str) -> Arithmetic:
        """The arithmetic with what depends on the input's type ("bfloat16", …) settled."""
        changes: dict[str, Any] = {}
        for name in ("global_type", "sixth_type"):
            if getattr(self, name) == "input":
                changes[name] = dtype
        if self.element_via == "input":
            changes["element_via"] = None if dtype == "float32" else dtype
        if self.nan_code_bfloat16 is not None:
            changes |= {"nan_code_bfloat16": None}
            if dtype == "bfloat16":
                changes["nan_code"] = self.nan_code_bfloat16
        return replace(self, **changes) if changes else self

    def fields(self) -> dict[str, Any]:
        """The fields that differ from the preset of the same name, for messages and dumps."""
        base = PRESETS.get(self.name, PRESETS["te"])
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(base, f.name)}


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values a field may take, from its Literal annotation; () when it is free."""
    found: tuple[Any, ...] = ()
    if annotation is bool:
        return (False, True)
    for argument in get_args(annotation):
        found += (None,) if argument is type(None) else (_choices(argument) or (argument,))
    return found


_FREE = (
    "scale_floor",
    "reciprocal_of_zero",
    "zero_block_scale",
    "nan_code_bfloat16",
    "nan_block_codes",
)  # checked by range, not by list
_CHOICES = {
    name: choices
    for name, annotation in get_type_hints(Arithmetic).items()
    if name not in _FREE and (choices := _choices(annotation))
}
_BYTES = ("scale_nan_byte", "scale_invalid_byte", "zero_block_scale")
_CODES = ("nan_code", "nan_code_bfloat16")

_TE = Arithmetic()

#: name -> Arithmetic.  Versions and witnesses: docs/spec.md, section "Presets".
PRESETS: dict[str, Arithmetic] = {
    "te": _TE,
    "te-fused-rht": replace(
        _TE,
        name="te-fused-rht",
        amax_nan="propagate",
        global_guard="fused-rht",
        block_scale_max="none",
        block_scale_nan="propagate",
        encode_nan="propagate",
    ),
    "te-2.14": replace(_TE, name="te-2.14", block_scale="divide-by-6"),
    "te-fast-math": replace(_TE, name="te-fast-math", encode_scale="bfloat16-coefficient"),
    "te-reference": replace(
        _TE,
        name="te-reference",
        amax_nan="propagate",
        global_guard="reference",
        block_scale_nan="propagate",
        encode_nan="propagate",
        negative_zero="drop-exact",
        nan_code=0,
        rht_sum="float32-four-lanes",
    ),
    "te-jax": replace(
        _TE,
        name="te-jax",
        amax_nan="xla-cpu",
        global_guard="reference",
        block_scale_nan="propagate",
        scale_overflow="nan-above-240",
        encode_nan="propagate",
        nan_code=8,
        tile_scales="tiled",
        stochastic="te-jax",
        flush_subnormals=True,
    ),
    "te-jax-gpu": replace(
        _TE,
        name="te-jax-gpu",
        amax_nan="propagate",
        global_guard="reference",
        block_scale_nan="propagate",
        encode_nan="propagate",
        nan_code=8,
        division="rcp-approx",
        tile_scales="tiled",
        stochastic="te-jax",
    ),
    "four-over-six": replace(_TE, name="four-over-six", four_over_six="MAE", e4m3_max=256),
    "fouroversix": replace(
        _TE,
        name="fouroversix",
        amax_nan="propagate",
        global_guard="zero-amax",
        e4m3_max=256,
        block_scale="divide-by-6",
        block_scale_nan="propagate",
        encode_max="none",
        zero_scale_elements="zero",
        saturate=False,
        negative_zero="drop-exact",
        nan_code=11,
        four_over_six="MSE",
        four_over_six_sum="torch-row-sum",
    ),
    "torchao": replace(
        _TE,
        name="torchao",
        amax_nan="propagate",
        global_scale="reciprocal-form",
        block_scale="divide-twice",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        scale_floor=2.0**-6,
        scale_invalid_byte=0xFF,
        encode_scale="quotient",
        encode_max="none",
        nan_code=11,
        nan_block_codes=(3, 4, 12),
    ),
    "torchao-gpu": replace(
        _TE,
        name="torchao-gpu",
        amax_nan="propagate",
        global_scale="product-form",
        block_scale="sixth-then-divide",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        scale_floor=2.0**-6,
        encode_scale="quotient",
        encode_max="none",
        nan_code=4,
    ),
    "modelopt": replace(
        _TE,
        name="modelopt",
        amax_nan="propagate",
        global_scale="reciprocal-form",
        block_scale="divide-by-product",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        scale_floor=2.0**-9,
        zero_block_scale=0x38,
        zero_block_rule="block-scale",
        encode_scale="divide-by-product",
        negative_zero="drop-exact",
    ),
    "compressed-tensors": replace(
        _TE,
        name="compressed-tensors",
        amax_nan="propagate",
        global_scale="reciprocal-then-multiply",
        global_guard="finite",
        global_type="input",
        block_scale="divide-by-6",
        sixth_type="input",
        block_scale_nan="propagate",
        zero_block_scale=0x20,
        zero_block_rule="byte",
        encode_scale="divide-by-quotient",
        negative_zero="drop-exact",
        nan_code=0,
        nan_code_bfloat16=8,
    ),
    "vllm": replace(
        _TE,
        name="vllm",
        amax_nan="propagate",
        global_scale="reciprocal-then-multiply",
        global_guard="none",
        block_scale="scale-then-sixth",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        encode_max="none",
        reciprocal_of_zero=1e-8,
        negative_zero="drop-exact",
    ),
    "jax-nn": replace(
        _TE,
        name="jax-nn",
        amax_nan="xla-cpu",
        global_scale="reciprocal-form",
        block_scale="prescaled-times-sixth",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        scale_floor=0.0,
        encode_scale="two-multiplications",
        encode_max="none",
        nan_code=8,
        flush_subnormals=True,
    ),
    "jax-nn-gpu": replace(
        _TE,
        name="jax-nn-gpu",
        amax_nan="propagate",
        global_scale="product-form",
        block_scale="predivided-times-sixth",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        scale_floor=0.0,
        encode_scale="divide-by-product",
        nan_code=8,
        division="rcp-approx",
    ),
    "qwix": replace(
        _TE,
        name="qwix",
        amax_nan="propagate",
        global_scale="none",
        block_scale="scale-then-sixth",
        block_scale_max="e4m3-max",
        block_scale_nan="propagate",
        zero_block_scale=0x38,
        zero_block_rule="small-block-scale",
        encode_max="none",
        element_via="input",
        nan_code=8,
        flush_subnormals=True,
    ),
    "qwantize": replace(
        _TE,
        name="qwantize",
        amax_nan="propagate",
        global_scale="none",
        block_scale="divide-by-6",
        block_scale_nan="propagate",
        encode_scale="divide-by-product",
        encode_nan="as-zero",
        element_rounding="ties-to-zero",
        negative_zero="drop-exact",
        nan_code=0,
    ),
}


def arithmetic(name: str | Arithmetic = "te", /, **changes: Any) -> Arithmetic:
    """A preset, or an Arithmetic, with fields replaced.

    >>> arithmetic("te", four_over_six="MAE", e4m3_max=256).e4m3_max
    256

    Raises ValueError for an unknown preset or value, TypeError for an unknown field; both list the known.
    """
    return of_name(name, PRESETS, "arithmetic; the presets", changes)


def of_name(name: str | T, known: Mapping[str, T], what: str, changes: Mapping[str, Any]) -> T:
    """One of ``known`` by its name, or such an object itself, with fields other than its name replaced."""
    kind = type(next(iter(known.values())))
    if isinstance(name, str) and name in known:
        base: Any = known[name]
    elif isinstance(name, kind):
        base = name
    else:
        noun, _, plural = what.partition("; ")
        raise ValueError(f"unknown {noun} {name!r}; {plural} are {', '.join(known)}")
    allowed = {f.name for f in fields(kind)} - {"name"}  # type: ignore[arg-type]
    if set(changes) - allowed:
        wrong, right = (", ".join(sorted(some)) for some in (set(changes) - allowed, allowed))
        raise TypeError(f"{kind.__name__} has no field {wrong}; its fields are {right}")
    replaced: T = replace(base, **changes)
    return replaced

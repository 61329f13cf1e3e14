"""Every known deviation as data: its id, the stage it belongs to, and the changes that make it.

A person adds a deviation by one entry.  ``changes`` lists the forms in which it is met, each a mapping that
``model.py`` explains; diagnosis tries every one, planting takes any.  ``infer`` names a function of ``infer.py``
that reads a free value, such as the byte of a zero block, out of the data.  The texts are the documentation:
``docs/deviations.md`` is made of them.

Notation: A tensor amax, a block amax, S global encode scale, g the global decode scale fl(A/2688), s the block
scale in float32, d its E4M3 value, e the encode scale, y the scaled element, fl one float32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import nvfp4ref as nv
from conformance.model import Change

#: The stages of a quantization, in the order in which a departure is looked for.
STAGES = (
    "amax",
    "global-scale",
    "block-scale",
    "encode-scale",
    "rounding",
    "packing",
    "layout",
    "transform",
    "random-bits",
    "unknown",
)


@dataclass(frozen=True)
class Entry:
    """One deviation.

    Attributes:
        id: stable, as in bug reports.
        stage: the first stage of a quantization that departs (STAGES).
        what: what the producer does, as a clause.
        step: the exact arithmetic, and the baseline's.
        seen: who does it, and since when.
        symptom: how it looks in a dump.
        fix: what to do about it.
        changes: the forms in which it is met, the usual one first.
        infer: a function of infer.py that finds further changes in the data.
        directions: the suffixes of the outputs that can have it.
        against: fields of a dump that declares something else, where the deviation is to be like ``te``.
    """

    id: str
    stage: str
    what: str
    step: str
    seen: str
    symptom: str
    fix: str
    changes: tuple[Change, ...] = ()
    infer: str | None = None
    directions: tuple[str, ...] = ("", "_t")
    against: Mapping[str, Any] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The anchor of its section in docs/deviations.md."""
        return self.id.replace("^", "")


_DECODE = {"global_scale": "reciprocal-form"}  # S and D from g = fl(A/2688)
_PRODUCT = {"global_scale": "product-form"}  # S and D from g = fl(A·fl(1/2688))


def _bytes(**changes: Any) -> dict[str, Any]:
    """A change of the scale bytes alone."""
    return {f"bytes.{name}": value for name, value in changes.items()}


def _codes(**changes: Any) -> dict[str, Any]:
    """A change of the codes alone."""
    return {f"codes.{name}": value for name, value in changes.items()}


_TABLE = (
    # ---- amax ----------------------------------------------------------------------------------------------
    Entry(
        "amax.nan-propagated",
        "amax",
        "NaN spreads through the amax, where the kernels ignore it",
        "A and a are NaN when any element is; `te`: NaN is skipped (fmaxf)",
        "every quantizer written with torch or JAX maxima",
        "one NaN in the input makes the amax and its block's scale NaN",
        "take the maximum with fmax, or with NaN replaced by 0",
        ({"amax_nan": "propagate"}, {"amax_nan": "xla-cpu"}),
    ),
    # ---- global scale --------------------------------------------------------------------------------------
    Entry(
        "global-scale.reciprocal-form",
        "global-scale",
        "the global scale is g = amax/2688, and S its reciprocal",
        "g = fl(A/2688), S = fl(1/g); `te`: S = fl(2688/A)",
        "torchao, ModelOpt, jax.nn, comfy-kitchen",
        "S is off by one ulp for many amaxes; codes change where the scaled element is a tie, mostly of bfloat16 input",
        "compute S = 2688/amax first and 1/S from it",
        (_DECODE,),
    ),
    Entry(
        "global-scale.product-form",
        "global-scale",
        "the global scale is g = amax·(1/2688), and S its reciprocal",
        "g = fl(A·fl(1/2688)), S = fl(1/g); `te`: S = fl(2688/A)",
        "torchao and jax.nn on a GPU, where PyTorch and XLA turn a quotient by a constant into a product",
        "g and S are off by one ulp for many amaxes; codes change where the scaled element is a tie, mostly of "
        "bfloat16 input",
        "compute S = 2688/amax first and 1/S from it, with tensors on both sides of the division",
        (_PRODUCT,),
    ),
    Entry(
        "global-scale.approximate-reciprocal",
        "global-scale",
        "every division is a multiplication with the GPU's approximate reciprocal",
        "p/q = fl(p·r), r up to an ulp beside fl(1/q) for 13 % of all q, by the table of an H200; in S, 1/S, s, e and "
        "y; `te`: fl(p/q)",
        "XLA on GPUs, so Transformer Engine's JAX path and jax.nn there; CUDA code built with -prec-div=false",
        "S is off by an ulp for some amaxes, e for some scale bytes: codes change where the scaled element is a tie, "
        "and now and then a scale byte",
        "divide with one rounding: div.rn in CUDA, which is the default; or quantize outside of XLA",
        ({"division": "rcp-approx"},),
    ),
    Entry(
        "global-scale.reciprocal-then-multiply",
        "global-scale",
        "the global scale is 2688·(1/amax), two roundings for one",
        "S = fl(fl(1/A)·2688); `te`: S = fl(2688/A)",
        "PyTorch's `2688.0 / tensor`, which is `tensor.reciprocal() * 2688`: vLLM, FlashInfer's examples, "
        "compressed-tensors, auto-round",
        "27 % of float32 amaxes give an S that is one ulp off; amax 896 gives 3.0000002 for 3",
        "divide tensors: torch.div(torch.tensor(2688.0), amax)",
        ({"global_scale": "reciprocal-then-multiply"},),
    ),
    Entry(
        "global-scale.bfloat16",
        "global-scale",
        "the global scale is rounded to bfloat16",
        "S = bf16(fl(2688/A)), or of a quotient whose parts are bfloat16; `te`: float32",
        "compressed-tensors on bfloat16 weights, whose amax stays bfloat16",
        "S is off by up to 2^-9; 3 % of the scale bytes of normal data change",
        "convert the amax to float32 before the division",
        (
            {"global_type": "bfloat16"},
            {"global_type": "bfloat16", "global_scale": "reciprocal-then-multiply"},
            {"global_type": "bfloat16", "global_scale": "reciprocal-then-multiply", "global_guard": "finite"},
        ),
    ),
    Entry(
        "global-scale.float16",
        "global-scale",
        "the global scale is rounded to float16",
        "S = f16(fl(2688/A)), or of a quotient whose parts are float16; `te`: float32",
        "compressed-tensors on float16 weights",
        "S is off by up to 2^-11, and infinite for an amax below 0.04",
        "convert the amax to float32 before the division",
        (
            {"global_type": "float16"},
            {"global_type": "float16", "global_scale": "reciprocal-then-multiply"},
            {"global_type": "float16", "global_scale": "reciprocal-then-multiply", "global_guard": "finite"},
        ),
    ),
    Entry(
        "global-scale.none",
        "global-scale",
        "there is no global scale",
        "S = 1; `te`: S = fl(2688/A)",
        "qwix, qwantize, breccia, JAX's default configuration, torchao without a per-tensor scale",
        "all scale bytes differ; the largest of them is amax/6 and not 448",
        "scale with 2688/amax, and store amax beside the scales",
        ({"global_scale": "none"},),
    ),
    Entry(
        "global-scale.inverted",
        "global-scale",
        "the global scale and its reciprocal are exchanged",
        "S and 1/S exchanged where they are applied, or where the global scale is stored",
        "checkpoint loaders: compressed-tensors stores 2688/amax, ModelOpt amax/2688",
        "scales all 0 or all 448; or only the stored global scale is the reciprocal of what its form says",
        "say in which form the scale is stored, and invert it once",
        ({"global_scale": "inverted"}, {"form": "exchanged"}),
    ),
    Entry(
        "global-scale.stored-otherwise",
        "global-scale",
        "the stored global scale is not the one that the tensor was quantized with",
        "the stored value is neither S nor 1/S; scales and codes are those of S",
        "loaders that merge or fuse scales of several tensors",
        "the recorded global_scale alone differs",
        "store the value that was used",
        ({"form": "ignored"},),
    ),
    Entry(
        "global-scale.e4m3-max-256",
        "global-scale",
        "the tensor amax is mapped to 6·256, not to 6·448",
        "S = fl(1536/A); `te`: S = fl(2688/A)",
        "4over6, Quartet II; Transformer Engine only with its 4over6 recipe",
        "the largest scale byte is 0x78 (256) and not 0x7E (448)",
        "declare e4m3_max 256 if it is meant, else use 448",
        ({"e4m3_max": 256},),
    ),
    Entry(
        "global-scale.e4m3-max-448",
        "global-scale",
        "the tensor amax is mapped to 6·448, not to 6·256 as declared",
        "S = fl(2688/A) where fl(1536/A) is declared",
        "a 4over6 recipe with the plain global scale",
        "the largest scale byte is 0x7E (448) and not 0x78 (256)",
        "use 1536/amax",
        ({"e4m3_max": 448},),
    ),
    Entry(
        "global-scale.headroom",
        "global-scale",
        "blocks are mapped to 6·16/17, so that stochastic rounding never clips",
        "M = 6·16/17·448 and a·17/96 for 2688 and a/6",
        "Quartet II, fouroversix's adjustment factor",
        "scale bytes are larger by 17/16, codes smaller",
        "declare headroom 16/17 if it is meant",
        ({"headroom": 16 / 17},),
    ),
    Entry(
        "global-scale.guard",
        "global-scale",
        "an amax of 0, Inf or NaN, or an S that overflows, is guarded otherwise",
        "`te`: S = fmin(S, FLT_MAX), and 1 if A or S is 0; others leave 0/0, Inf and NaN as they come",
        "torchao, ModelOpt and jax.nn leave them; Transformer Engine's fused RHT kernels test A > 0",
        "only tensors of zeros, of infinities, or of the tiniest numbers differ",
        "return S = 1 for an amax of 0, and limit S to FLT_MAX",
        tuple({"global_guard": value} for value in ("fused-rht", "reference", "finite", "zero-amax", "none")),
    ),
    Entry(
        "global-scale.wrong-amax",
        "global-scale",
        "the global scale is made of an amax that is not max(abs(x))",
        "S from a stale amax, one reduced over another group, or of x before it was rounded",
        "fused activation amaxes, delayed scaling, Transformer Engine's vector kernel for the transpose",
        "the recorded amax is not max(abs(x)), or all scale bytes are off by one ratio",
        "take the amax of the very tensor that is quantized, after its rounding to the input type",
        ({"amax": "recorded-wrong"},),
        infer="wrong_amax",
    ),
    # ---- block scale ---------------------------------------------------------------------------------------
    Entry(
        "block-scale.divide-by-6",
        "block-scale",
        "the block scale is (a/6)·S",
        "s = fl(fl(a/6)·S); `te`: s = fl(a·fl(S·fl(1/6)))",
        "Transformer Engine ≤ 2.14, its 4over6 to this day, fouroversix, FlashInfer's trace, its JAX path without jit",
        "a scale byte in 10^3 is one step off, where s falls beside an E4M3 midpoint; many tensors show nothing",
        "multiply by S/6 as Transformer Engine ≥ 2.15 does, or compare with the preset te-2.14",
        ({"block_scale": "divide-by-6"},),
    ),
    Entry(
        "block-scale.scale-then-sixth",
        "block-scale",
        "the block scale is S·(a·(1/6))",
        "s = fl(S·fl(a·fl(1/6))); `te`: s = fl(a·fl(S·fl(1/6)))",
        "vLLM, TensorRT-LLM, FlashInfer's fast path, Transformer Engine ≤ 2.14 outside its transpose kernels",
        "as block-scale.divide-by-6, on other blocks",
        "form S·(1/6) once for the tensor",
        ({"block_scale": "scale-then-sixth"},),
    ),
    Entry(
        "block-scale.divide-by-product",
        "block-scale",
        "the block scale is a/(6·g)",
        "s = fl(a/fl(6·g)); `te`: s = fl(a·fl(S·fl(1/6)))",
        "ModelOpt",
        "as block-scale.divide-by-6, on other blocks",
        "multiply by S/6",
        ({"block_scale": "divide-by-product"}, {"block_scale": "divide-by-product"} | _bytes(**_DECODE)),
    ),
    Entry(
        "block-scale.divide-twice",
        "block-scale",
        "the block scale is (a/6)/g",
        "s = fl(fl(a/6)/g); `te`: s = fl(a·fl(S·fl(1/6)))",
        "torchao, quack, comfy-kitchen",
        "as block-scale.divide-by-6, on other blocks",
        "multiply by S/6",
        ({"block_scale": "divide-twice"}, {"block_scale": "divide-twice"} | _bytes(**_DECODE)),
    ),
    Entry(
        "block-scale.sixth-then-divide",
        "block-scale",
        "the block scale is (a·(1/6))/g",
        "s = fl(fl(a·fl(1/6))/g); `te`: s = fl(a·fl(S·fl(1/6)))",
        "torchao on a GPU, where PyTorch turns a/6 into a·(1/6)",
        "as block-scale.divide-by-6, on other blocks",
        "multiply by S/6",
        (
            {"block_scale": "sixth-then-divide"},
            {"block_scale": "sixth-then-divide"} | _bytes(**_PRODUCT),
            {"block_scale": "sixth-then-divide"} | _bytes(**_DECODE),
        ),
    ),
    Entry(
        "block-scale.prescaled",
        "block-scale",
        "elements are scaled by S before the block amax is taken",
        "s = fl(max(abs(fl(x·S)))/6), or ·fl(1/6) for /6, or x/g for x·S; `te`: s = fl(a·fl(S·fl(1/6)))",
        "jax.nn.scaled_matmul's quantizer",
        "as block-scale.divide-by-6, on other blocks",
        "take the amax of x itself",
        (
            {"block_scale": "prescaled"},
            {"block_scale": "prescaled"} | _bytes(**_DECODE),
            {"block_scale": "prescaled-times-sixth"},
            {"block_scale": "prescaled-times-sixth"} | _bytes(**_DECODE),
            {"block_scale": "predivided-times-sixth"},
            {"block_scale": "predivided-times-sixth"} | _bytes(**_PRODUCT),
        ),
    ),
    Entry(
        "block-scale.bfloat16",
        "block-scale",
        "a/6 is rounded to bfloat16 before it meets S",
        "s = fl(bf16(a/6)·S); `te`: s = fl(a·fl(S·fl(1/6)))",
        "compressed-tensors on bfloat16 weights",
        "3 % of the scale bytes are one step off",
        "convert the block amax to float32 before the division",
        ({"sixth_type": "bfloat16", "block_scale": "divide-by-6"},),
    ),
    Entry(
        "block-scale.float16",
        "block-scale",
        "a/6 is rounded to float16 before it meets S",
        "s = fl(f16(a/6)·S); `te`: s = fl(a·fl(S·fl(1/6)))",
        "compressed-tensors on float16 weights",
        "scale bytes are one step off, those of tiny blocks 0",
        "convert the block amax to float32 before the division",
        ({"sixth_type": "float16", "block_scale": "divide-by-6"},),
    ),
    Entry(
        "block-scale.amax-times-sixth-of-scale",
        "block-scale",
        "the block scale is a·(S·(1/6)), where another order is declared",
        "s = fl(a·fl(S·fl(1/6)))",
        "Transformer Engine ≥ 2.15, when held against an older one",
        "a scale byte in 10^3 is one step off",
        "compare with the preset te",
        ({"block_scale": "amax-times-sixth-of-scale"},),
        against={"arithmetic": "te-2.14"},
    ),
    Entry(
        "block-scale.floor-2^-6",
        "block-scale",
        "the block scale is at least 2^-6, the smallest normal E4M3 number",
        "s = max(s, 2^-6); `te`: subnormal scales and 0 are used",
        "torchao, quack: `finfo(float8_e4m3fn).tiny` is the smallest normal",
        "no scale byte below 0x08; codes of small blocks shrink to 0",
        "let the conversion round to subnormals and zero",
        ({"scale_floor": 2.0**-6},),
    ),
    Entry(
        "block-scale.floor-2^-9",
        "block-scale",
        "the block scale is at least 2^-9, the smallest E4M3 number",
        "s = max(s, 2^-9); `te`: 0 is used",
        "ModelOpt",
        "no scale byte 0x00 but for blocks of zeros",
        "let the conversion round to zero",
        ({"scale_floor": 2.0**-9},),
    ),
    Entry(
        "block-scale.floor-0",
        "block-scale",
        "the block scale is at least 0",
        "s = max(s, 0); `te`: a negative amax gives negative scales",
        "jax.nn",
        "scale bytes 0x00 for 0x80 and up, with a negative amax only",
        "nothing: an amax is not negative",
        ({"scale_floor": 0.0},),
    ),
    Entry(
        "block-scale.zero-block-value",
        "block-scale",
        "blocks of zeros have a constant scale byte",
        "d of a block with a = 0, or whose s or byte is 0, is a constant; `te`: 0x00",
        "ModelOpt (0x38, 1.0), qwix (0x38, also where s < 2^-63), compressed-tensors (0x20, 0.125)",
        "scale bytes of zero blocks alone differ, all with one value",
        "store 0x00, or accept it: the block decodes to zeros all the same",
        (
            {"zero_block_scale": 0x38},
            {"zero_block_scale": 0x20},
            {"zero_block_scale": 0x20, "zero_block_rule": "byte"},
            {"zero_block_scale": 0x38, "zero_block_rule": "block-scale"},
            {"zero_block_scale": 0x38, "zero_block_rule": "small-block-scale"},
        ),
        infer="zero_block_value",
    ),
    Entry(
        "block-scale.nan-above-240",
        "block-scale",
        "E4M3 is taken for an IEEE type: NaN from 248 up, and no subnormals",
        "d = NaN where s ≥ 248, 0 where d would be subnormal; `te`: up to 448, subnormals to 2^-9",
        "Transformer Engine's JAX path on XLA's CPU backend (`lax.reduce_precision(x, 4, 3)`)",
        "scale byte 0x7F in the blocks with the largest amaxes, whose codes are all the NaN code",
        "convert with a type, `x.astype(float8_e4m3fn)`, not with reduce_precision",
        ({"scale_overflow": "nan-above-240"},),
    ),
    Entry(
        "block-scale.nan-on-overflow",
        "block-scale",
        "a block scale above 464 becomes NaN, not 448",
        "d = NaN where s ≥ 464; `te`: saturates to 448",
        "casts without a clamp: ml_dtypes, JAX, PyTorch before 2.12",
        "scale byte 0x7F where the recorded amax is smaller than the block's",
        "clamp to 448 before the cast",
        ({"scale_overflow": "nan"},),
    ),
    Entry(
        "block-scale.round-up",
        "block-scale",
        "the block scale is rounded up",
        "d = the E4M3 number at or above s; `te`: nearest, ties to even",
        "triton_kernels' ROUND_UP, its default until nearest was added in 2026",
        "half of the scale bytes are one step larger",
        "round to nearest even",
        ({"scale_rounding": "up"},),
    ),
    Entry(
        "block-scale.truncate",
        "block-scale",
        "the block scale is cut off",
        "d = the E4M3 number at or below s; `te`: nearest, ties to even",
        "triton_kernels' ROUND_DOWN",
        "half of the scale bytes are one step smaller, and block amaxes saturate",
        "round to nearest even",
        ({"scale_rounding": "truncate"},),
    ),
    Entry(
        "block-scale.half-up",
        "block-scale",
        "halfway block scales are rounded up",
        "d = the larger of two E4M3 numbers at equal distance; `te`: the even one",
        "ggml",
        "scale bytes differ where s is exactly a midpoint",
        "round halves to even",
        ({"scale_rounding": "half-up"},),
    ),
    Entry(
        "block-scale.power-of-two",
        "block-scale",
        "block scales are powers of two",
        "d = 2^ceil(log2(s)); `te`: E4M3, nearest even",
        "habits of MX formats (UE8M0)",
        "all scale bytes have a mantissa of 0",
        "use the three mantissa bits",
        ({"scale_rounding": "power-of-two"},),
    ),
    Entry(
        "block-scale.amax-without-abs",
        "block-scale",
        "the block amax is max(x), without the absolute value",
        "a = max(x); `te`: a = max(abs(x))",
        "several test helpers, among them Transformer Engine's own until 2.13",
        "blocks whose largest magnitude is negative have too small a scale, and saturated codes",
        "take the absolute value first",
        ({"block_amax": "signed"},),
    ),
    Entry(
        "block-scale.nan-kept",
        "block-scale",
        "NaN goes through the clamp of the block scale",
        "min(s, limit) gives NaN for NaN; `te`: fminf gives the limit, so 448",
        "torch and JAX quantizers, Transformer Engine's fused RHT kernels",
        "scale byte 0x7F where a or S is NaN; `te` has 0x7E",
        "clamp with fmin",
        (
            {"block_scale_nan": "propagate"},
            {"block_scale_nan": "propagate", "block_scale_max": "none"},
            {"block_scale_nan": "propagate", "block_scale_max": "e4m3-max"},
        ),
    ),
    Entry(
        "block-scale.unclamped",
        "block-scale",
        "the block scale is not limited before its conversion, or limited to 448",
        "s = min(s, 448), or as computed; `te`: min(s, FLT_MAX)",
        "most; a saturating conversion hides it",
        "nothing but for an infinite s",
        "clamp to FLT_MAX, which makes Inf and NaN 448",
        ({"block_scale_max": "none"}, {"block_scale_max": "e4m3-max"}),
    ),
    Entry(
        "block-scale.nan-byte",
        "block-scale",
        "a NaN block scale has another byte",
        "0xFF for 0x7F, or for one that an invalid operation made",
        "torchao (0xFF for 0/0)",
        "scale byte 0xFF",
        "write 0x7F",
        ({"scale_nan_byte": 0xFF, "scale_invalid_byte": 0xFF}, {"scale_invalid_byte": 0xFF}),
    ),
    Entry(
        "block-scale.four-over-six",
        "block-scale",
        "blocks are mapped to 4 or 6, whichever has the smaller error",
        "s of (a/6)·S or of 1.5 times that, chosen by the summed error; `te`: 6 always",
        "the 4over6 recipes: Transformer Engine, fouroversix, FlashInfer",
        "about half of the scale bytes are those of 1.5·s",
        "declare four_over_six, and with it e4m3_max",
        (
            {"four_over_six": "MAE"},
            {"four_over_six": "MSE"},
            {"four_over_six": "MAE", "e4m3_max": 256},
            {"four_over_six": "MSE", "e4m3_max": 256},
        ),
    ),
    Entry(
        "block-scale.not-four-over-six",
        "block-scale",
        "every block is mapped to 6, where 4over6 is declared",
        "s = fl(a·fl(S·fl(1/6)))",
        "a recipe whose 4over6 did not reach the kernel",
        "no block has a code of 4 as its largest",
        "pass the recipe on",
        ({"four_over_six": None}, {"four_over_six": None, "block_scale": "divide-by-6"}),
    ),
    Entry(
        "block-scale.four-over-six-error",
        "block-scale",
        "4over6 chooses by another error",
        "the sum of absolute errors, of squares, the fast form of either, or another order of the sum",
        "FlashInfer's 4over6 against Transformer Engine's",
        "a few blocks are mapped to 4 for 6 or the other way round",
        "compute the error as Transformer Engine does, one addition after the other",
        (
            {"four_over_six_fast_error": True},
            {"four_over_six_fast_error": False},
            {"four_over_six_sum": "torch-row-sum"},
            {"four_over_six_sum": "sequential"},
        ),
    ),
    # ---- encode scale --------------------------------------------------------------------------------------
    Entry(
        "encode-scale.divide-by-scale",
        "encode-scale",
        "elements are divided by d/S, or by d·g, where the kernels multiply by a reciprocal",
        "y = fl(x/fl(d/S)) or fl(x/fl(d·g)); `te`: y = fl(x·fl(1/fl(d·fl(1/S))))",
        "ModelOpt, onnx, comfy-kitchen (d·g); compressed-tensors (d/S)",
        "codes differ by one step where y is beside a midpoint: one in 10^3 of bfloat16 input",
        "multiply by the reciprocal of d·(1/S)",
        (
            {"encode_scale": "divide-by-product"},
            {"encode_scale": "divide-by-quotient"},
            {"encode_scale": "divide-by-product"} | _codes(**_DECODE),
        ),
    ),
    Entry(
        "encode-scale.reciprocal-product",
        "encode-scale",
        "the encode scale is S·(1/d): two roundings in place of the reciprocal of a product",
        "e = fl(S·fl(1/d)); `te`: e = fl(1/fl(d·fl(1/S)))",
        "hand-written kernels",
        "codes differ by one step where y is beside a midpoint",
        "multiply d by 1/S first, then take the reciprocal",
        ({"encode_scale": "reciprocal-product"},),
    ),
    Entry(
        "encode-scale.quotient",
        "encode-scale",
        "the encode scale is S/d",
        "e = fl(S/d), or fl(fl(1/g)/d); `te`: e = fl(1/fl(d·fl(1/S)))",
        "torchao, quack",
        "codes differ by one step where y is beside a midpoint",
        "multiply d by 1/S first, then take the reciprocal",
        ({"encode_scale": "quotient"}, {"encode_scale": "quotient"} | _codes(**_DECODE)),
    ),
    Entry(
        "encode-scale.two-multiplications",
        "encode-scale",
        "elements are multiplied by S, then by 1/d",
        "y = fl(fl(x·S)·fl(1/d)), or with fl(1/g) for S; `te`: y = fl(x·fl(1/fl(d·fl(1/S))))",
        "jax.nn (XLA turns its two divisions into multiplications)",
        "codes differ by one step where y is beside a midpoint; tiny x or S overflow or vanish on the way",
        "form e for the block and multiply once",
        ({"encode_scale": "two-multiplications"}, {"encode_scale": "two-multiplications"} | _codes(**_DECODE)),
    ),
    Entry(
        "encode-scale.bfloat16-coefficient",
        "encode-scale",
        "the encode scale is rounded to bfloat16",
        "e = bf16(min(fl(S/d), bf16 max)), y = fma(x, e, +0); `te`: float32",
        "Transformer Engine's tuned 1-D kernel with fast math (NVTE_USE_FAST_MATH)",
        "codes differ by one step up to 2^-9 away from midpoints: 1 % of them",
        "turn fast math off, or compare with the preset te-fast-math",
        ({"encode_scale": "bfloat16-coefficient"},),
    ),
    Entry(
        "encode-scale.approximate-reciprocal",
        "encode-scale",
        "a reciprocal is approximate, up to 1 ulp off",
        "e = fl(1/fl(d·fl(1/S))) or the float32 beside it; `te`: correctly rounded",
        "`rcp.approx.ftz`: Transformer Engine's fused RHT kernels with fast math, FlashInfer, vLLM, TensorRT-LLM",
        "codes differ by one step where y is exactly a midpoint, in some blocks and not in others",
        "divide, or turn fast math off (FlashInfer: FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH)",
        ({"encode_ulp": 1}, {"encode_ulp": -1}, {"ulp": "any"}),
    ),
    Entry(
        "encode-scale.unrounded-block-scale",
        "encode-scale",
        "the encode scale is made of the block scale before its rounding to E4M3",
        "e = fl(1/fl(s·fl(1/S))); `te`: of d, the rounded one",
        "home-made quantizers",
        "codes are those of a scale up to 6 % off: a tenth of them differ; the largest of each block is 6",
        "decode the stored byte and use that",
        ({"encode_scale": "unrounded-block-scale"},),
    ),
    Entry(
        "encode-scale.reciprocal-of-product",
        "encode-scale",
        "elements are multiplied by 1/(d·(1/S)), where another form is declared",
        "e = fl(1/fl(d·fl(1/S)))",
        "Transformer Engine, when held against others",
        "codes differ by one step where y is beside a midpoint",
        "compare with the preset te",
        ({"encode_scale": "reciprocal-of-product"},),
        against={"arithmetic": {"name": "te", "encode_scale": "quotient"}},
    ),
    Entry(
        "encode-scale.unclamped",
        "encode-scale",
        "an infinite encode scale is not limited to FLT_MAX, or a NaN one is kept",
        "e = fl(1/0) = Inf, so 0·e = NaN; `te`: min(e, FLT_MAX), which drops NaN",
        "torchao, vLLM, jax.nn, fouroversix",
        "blocks whose scale byte is 0 have NaN codes for their zeros",
        "limit e to FLT_MAX with fmin",
        ({"encode_max": "none"}, {"encode_nan": "propagate"}, {"encode_max": "none", "encode_nan": "propagate"}),
    ),
    Entry(
        "encode-scale.nan-as-zero",
        "encode-scale",
        "elements of a block whose scale is NaN become ±6",
        "|x|/NaN is above every midpoint, so y = ±Inf where x is a number and not 0; `te`: no block scale is NaN",
        "qwantize (torch.bucketize puts NaN last)",
        "codes of blocks with scale byte 0x7F are 7 and 15, and 0 for zeros and NaN",
        "take the maximum with fmax, so that no scale is NaN",
        ({"encode_nan": "as-zero"},),
    ),
    Entry(
        "encode-scale.guarded-reciprocal",
        "encode-scale",
        "1/0 is a small constant",
        "fl(1/0) = 1e-8 where it is guarded; `te`: Inf, then FLT_MAX",
        "vLLM's emulation",
        "codes of blocks whose scale byte is 0 are 0 or 8; `te` has ±6",
        "limit the reciprocal to FLT_MAX",
        ({"reciprocal_of_zero": 1e-8},),
    ),
    Entry(
        "encode-scale.zero-scale-zeroes",
        "encode-scale",
        "elements of a block whose scale byte is 0 are 0",
        "y = 0 where d = 0; `te`: y = x·FLT_MAX, so ±6",
        "fouroversix",
        "codes of blocks with scale byte 0x00 are all 0",
        "leave them: they decode to zeros either way",
        ({"zero_scale_elements": "zero"},),
    ),
    Entry(
        "encode-scale.flushed-subnormals",
        "encode-scale",
        "subnormal numbers are flushed to zero in every operation",
        "each operation reads and writes subnormals as 0; `te`: IEEE",
        "XLA's CPU backend; CUDA code built with -ftz=true or --use_fast_math",
        "tensors with an amax near 2^-126, or whose S is near 2^126, differ",
        "build with -ftz=false",
        ({"flush_subnormals": True},),
    ),
    # ---- element -------------------------------------------------------------------------------------------
    Entry(
        "element.ties-away",
        "rounding",
        "ties are rounded away from zero",
        "|y| = midpoint gives the larger magnitude; `te`: the even code",
        "Quartet II's triton kernel (a chain of ≥)",
        "codes differ where y is exactly 0.25, 1.25, 2.5 or 5",
        "compare with > at the midpoints below odd codes",
        ({"element_rounding": "ties-away"},),
    ),
    Entry(
        "element.ties-to-zero",
        "rounding",
        "ties are rounded toward zero",
        "|y| = midpoint gives the smaller magnitude; `te`: the even code",
        "qwantize, breccia, FlashInfer's trace reference, FP-Quant (a chain of > or the first hit of argmin)",
        "codes differ where y is exactly 0.75, 1.75 or 3.5",
        "compare with ≥ at the midpoints below even codes",
        ({"element_rounding": "ties-to-zero"},),
    ),
    Entry(
        "element.truncate",
        "rounding",
        "elements are cut off",
        "the largest magnitude that is not above |y|; `te`: nearest even",
        "integer-style conversions",
        "half of the codes are one step smaller",
        "round to nearest even",
        ({"element_rounding": "truncate"},),
    ),
    Entry(
        "element.via-bfloat16",
        "rounding",
        "scaled elements are rounded to bfloat16 first",
        "code = E2M1(bf16(y)); `te`: code = E2M1(y)",
        "qwix on bfloat16 input, and others that stay in the input type",
        "codes differ by one step within 2^-9 of a midpoint",
        "keep y in float32",
        ({"element_via": "bfloat16"},),
    ),
    Entry(
        "element.via-float16",
        "rounding",
        "scaled elements are rounded to float16 first",
        "code = E2M1(f16(y)); `te`: code = E2M1(y)",
        "quantizers that stay in the input type",
        "codes differ by one step within 2^-12 of a midpoint",
        "keep y in float32",
        ({"element_via": "float16"},),
    ),
    Entry(
        "element.negative-zero-dropped",
        "rounding",
        "the sign of zero is lost",
        "y = −0, or any negative y that rounds to 0, gives code 0; `te`: code 8",
        "Transformer Engine's Python reference, ModelOpt, vLLM, compressed-tensors, qwantize (exact −0 only); "
        "breccia (all)",
        "code 0 for 8; nothing else, and the decoded values are equal",
        "take the sign bit of y, not y < 0",
        ({"negative_zero": "drop"}, {"negative_zero": "drop-exact"}),
    ),
    Entry(
        "element.no-saturation",
        "rounding",
        "elements above 7 are not limited to 6",
        "|y| ≥ 7 gives the code after 7, which is 8: −0; `te`: 6 with its sign",
        "fouroversix",
        "the largest elements of blocks with subnormal scales become −0",
        "clamp to ±6",
        ({"saturate": False},),
    ),
    Entry(
        "element.nan-code",
        "rounding",
        "a NaN element has another code",
        "NaN gives code k; `te`: 7",
        "JAX 8; Transformer Engine's reference and compressed-tensors 0; torchao 3 or 11; fouroversix 11",
        "codes of NaN elements, and of blocks whose scale is NaN, alone differ",
        "cvt.rn.satfinite gives 7; better, do not quantize NaN",
        (
            *({"nan_code": code} for code in (0, 8, 11, 3)),
            {"nan_block_codes": (3, 4, 12)},
        ),
        infer="nan_code",
    ),
    # ---- packing, layout -----------------------------------------------------------------------------------
    Entry(
        "packing.high-nibble-first",
        "packing",
        "the even element is in the high nibble",
        "byte = code[2i]·16 + code[2i+1]; `te`: code[2i] + 16·code[2i+1]",
        "comfy-kitchen by default, torchao before October 2025, breccia, the FLUX.2 checkpoints",
        "scales agree, almost all codes differ, and agree with the nibbles exchanged",
        "exchange the nibbles",
        ({"packing": "high-nibble-first"},),
    ),
    Entry(
        "packing.split-half",
        "packing",
        "byte j of a block holds elements j and j+8",
        "byte = code[j] + 16·code[j+8]; `te`: code[2j] + 16·code[2j+1]",
        "ggml",
        "scales agree, almost all codes differ",
        "interleave the halves of each block",
        ({"packing": "split-half"},),
    ),
    Entry(
        "packing.low-nibble-first",
        "packing",
        "the even element is in the low nibble, where another packing is declared",
        "byte = code[2i] + 16·code[2i+1]",
        "Transformer Engine and CUDA, when held against others",
        "scales agree, almost all codes differ",
        "exchange the nibbles",
        ({"packing": "low-nibble-first"},),
        against={"arithmetic": {"name": "te", "packing": "high-nibble-first"}},
    ),
    Entry(
        "scales.swizzled",
        "layout",
        "scales are swizzled where the dump declares compact",
        "byte (r, c) at ((r/128·⌈C/4⌉ + c/4)·32 + r%32)·16 + (r%128)/32·4 + c%4",
        "loaders of checkpoints made for one GEMM: SGLang, vLLM",
        "scale bytes are right once unswizzled",
        "declare scale_layout swizzled, or unswizzle",
        ({"scales": "swizzled"},),
    ),
    Entry(
        "scales.not-swizzled",
        "layout",
        "scales are compact where the dump declares swizzled",
        "byte (r, c) at r·C + c",
        "a missing swizzle before the GEMM",
        "scale bytes are right as they lie",
        "declare scale_layout compact, or swizzle",
        ({"scales": "compact"},),
        against={"scale_layout": "swizzled"},
    ),
    Entry(
        "scales.transposed",
        "layout",
        "the scale matrix is transposed",
        "byte (r, c) at c·R + r",
        "columnwise scales stored in the order of x",
        "scale bytes are right once transposed",
        "store them (rows, K/16)",
        ({"scales": "transposed"},),
    ),
    Entry(
        "scales.tiled-not-repeated",
        "layout",
        "the scales of 16x16 tiles are tiled over the rows, not repeated",
        "row r holds the scales of tile row r mod (R/16); `te`: of r div 16",
        "Transformer Engine's JAX path (`jnp.tile` for `jnp.repeat`)",
        "row r of the scales equals row r + R/16",
        "repeat each row of tile scales 16 times",
        ({"scales": "tiled"},),
    ),
    Entry(
        "scales.repeated-not-tiled",
        "layout",
        "the scales of 16x16 tiles are repeated, where tiled ones are declared",
        "row r holds the scales of tile row r div 16",
        "Transformer Engine's kernels, when held against its JAX path",
        "16 rows of scales are equal",
        "declare the preset te",
        ({"scales": "repeated"},),
        against={"arithmetic": {"name": "te", "tile_scales": "tiled"}},
    ),
    Entry(
        "scales.one-per-tile",
        "layout",
        "the scales of 16x16 tiles are stored one a tile",
        "scales of shape (R/16, K/16); `te`: (R, K/16), repeated over 16 rows",
        "storage that saves space",
        "a scale matrix of a sixteenth of the rows",
        "repeat each row 16 times",
        ({"scales": "one-per-tile"},),
    ),
    # ---- blocks --------------------------------------------------------------------------------------------
    Entry(
        "blocks.1d-for-2d",
        "block-scale",
        "each 1x16 block has its own scale, where 16x16 tiles are declared",
        "a of 16 elements of a row; `te`: of the 256 of a tile",
        "a recipe whose 2-D scaling did not reach the kernel",
        "the 16 rows of a tile have different scale bytes",
        "pass the recipe on, or declare block [1, 16]",
        ({"block": "1x16"},),
    ),
    Entry(
        "blocks.2d-for-1d",
        "block-scale",
        "16x16 tiles share a scale, where 1x16 blocks are declared",
        "a of the 256 elements of a tile; `te`: of 16 elements of a row",
        "weights quantized with the weight recipe and declared as activations",
        "16 rows of scales are equal",
        "declare block [16, 16]",
        ({"block": "16x16"},),
    ),
    Entry(
        "blocks.size-32",
        "block-scale",
        "32 elements share a scale",
        "a of two neighbouring blocks; `te`: of 16 elements",
        "habits of MX formats; MLX's maximum over a warp's 32 lanes",
        "scale bytes are equal in pairs",
        "take blocks of 16",
        ({"amax_group": 32}, {"amax_group": 32, "scales": "one-per-32"}),
    ),
    Entry(
        "blocks.wrong-axis",
        "block-scale",
        "blocks run along the other axis",
        "a of 16 elements of a column for a row, or the other way round; or of every (K/16)-th element of a row",
        "a transposed weight, a reshape that splits the wrong axis",
        "scale bytes are those of the transpose; their matrix may have its shape",
        "quantize along the axis that the GEMM contracts",
        ({"axis": "transposed"}, {"axis": "in-place"}, {"group": "strided"}),
    ),
    # ---- transform -----------------------------------------------------------------------------------------
    Entry(
        "hadamard.missing",
        "transform",
        "the declared Hadamard transform was not applied",
        "x is quantized; `te`: x·diag(s)·H/4, rounded to bfloat16",
        "a recipe whose transform did not reach the kernel; shapes that its kernels refuse",
        "nothing agrees; all does with the untransformed input",
        "transform, or declare rht_t false",
        ({"rht": "missing"},),
    ),
    Entry(
        "hadamard.no-signs",
        "transform",
        "the Hadamard transform has no random signs",
        "x·H/4; `te`: x·diag(s)·H/4 with the mask 0xD7E8",
        "implementations of the plain transform",
        "nothing agrees; all does with sign_mask 0",
        "negate the elements of the mask first",
        ({"rht.sign_mask": 0},),
    ),
    Entry(
        "hadamard.signs-on-output",
        "transform",
        "the signs are applied after the Hadamard matrix, not before",
        "x·H·diag(s)/4; `te`: x·diag(s)·H/4",
        "a matrix built as H·D, or multiplied from the other side",
        "signs of half of the codes and other magnitudes throughout",
        "build the matrix as diag(s)·H",
        ({"rht.signs_on": "output"},),
    ),
    Entry(
        "hadamard.unnormalised",
        "transform",
        "the Hadamard matrix is not divided by 4",
        "x·diag(s)·H; `te`: x·diag(s)·H/4",
        "fast Hadamard transforms, which leave the factor to the caller",
        "the amax is four times as large; codes and scales agree but for rounding when it is recorded",
        "multiply by 1/sqrt(16)",
        ({"rht.normalised": False},),
    ),
    Entry(
        "hadamard.not-rounded-to-bfloat16",
        "transform",
        "the result of the transform stays in float32",
        "quantize(x·diag(s)·H/4); `te`: the product is rounded to bfloat16",
        "Transformer Engine's fused kernels with fast math; emulations in float32",
        "1 % of the codes and scale bytes differ by one step",
        "round the transform to bfloat16",
        ({"rht.round_to": "float32"},),
    ),
    Entry(
        "hadamard.rounded-to-bfloat16",
        "transform",
        "the result of the transform is rounded to bfloat16, where float32 is declared",
        "quantize(bf16(x·diag(s)·H/4))",
        "Transformer Engine's unfused kernels",
        "1 % of the codes and scale bytes differ by one step",
        "declare round_to bfloat16",
        ({"rht.round_to": "bfloat16"},),
        against={"rht_t": {"size": 16, "sign_mask": 0xD7E8, "round_to": "float32"}},
    ),
    Entry(
        "hadamard.on-rowwise",
        "transform",
        "the transform was applied to the rowwise output",
        "quantize(x·diag(s)·H/4); `te`: the rowwise output is of x itself",
        "a recipe that transforms both operands alike",
        "nothing agrees; all does with the transformed input",
        "transform the columnwise output only",
        ({"rht": "added"},),
        directions=("",),
    ),
    Entry(
        "hadamard.not-declared",
        "transform",
        "the columnwise output was transformed, and is not declared so",
        "quantize(xᵀ·diag(s)·H/4) where quantize(xᵀ) is declared",
        "a dump without rht_t",
        "nothing agrees; all does with the transformed input",
        "declare rht_t",
        ({"rht": "added"},),
        directions=("_t",),
    ),
    Entry(
        "hadamard.float32-sum",
        "transform",
        "the transform adds in float32, not as the tensor core does",
        "float32 sums of products; `te`: 16 products aligned, cut to 25 bits, added exactly, cut to float32",
        "emulations on a CPU, Transformer Engine's Python reference",
        "bfloat16 values of the transform one ulp off, where 8 decades meet in one vector",
        "nothing: on ordinary data there is no difference",
        ({"rht_sum": "float32-four-lanes"},),
    ),
    Entry(
        "hadamard.amax-before-transform",
        "transform",
        "the amax is that of the tensor before its transform",
        "A = max(abs(x)); `te`: of the transform",
        "one amax for both directions; fused kernels without a second reduction",
        "the recorded amax is the rowwise one; scales saturate or lose a bit",
        "take the amax of the transform",
        ({"amax": "before-transform"},),
    ),
    # ---- random bits ---------------------------------------------------------------------------------------
    Entry(
        "random.byte-per-element",
        "random-bits",
        "each element takes 8 random bits, byte i of its word",
        "t = fl(|y| + byte/256·step), cut off; `te` on sm_100: 16 bits an element",
        "Transformer Engine ≥ 2.19 on sm_120 and sm_121",
        "half of the codes that are not exact differ; a bias of 1/512 step toward zero",
        "compare with stochastic='te-fallback' on those devices",
        ({"stochastic": "te-fallback"},),
    ),
    Entry(
        "random.operands-reversed",
        "random-bits",
        "the four elements of a word are handed over in the opposite order",
        "elements 0, 1, 2, 3 take operands a, b, e, f; `te`: f, e, b, a",
        "inline assembly with the operands in reading order",
        "half of the codes that are not exact differ",
        "reverse the operands of cvt.rs.e2m1x4",
        ({"stochastic": "sm100-operands-reversed"},),
    ),
    Entry(
        "random.no-bit-reversal",
        "random-bits",
        "both elements of a pair take their 16 bits in the same order",
        "all four elements take their pair's bits straight; `te`: the second of a pair sees them reversed",
        "emulations",
        "half of the codes of odd elements that are not exact differ",
        "reverse the 16 bits for the second element of each pair",
        ({"stochastic": "sm100-no-bit-reversal"},),
    ),
    Entry(
        "random.grid-without-1.5",
        "random-bits",
        "stochastic rounding never gives 1.5",
        "values in (1, 2) go to 1 or 2; `te`: to the neighbours among 1, 1.5, 2",
        "Transformer Engine's JAX path",
        "no code 3 or 11; the variance in (1, 2) is four times as large",
        "add 1.5 to the grid",
        ({"stochastic": "sm100-without-1.5"}, {"stochastic": "te-jax"}),
    ),
    Entry(
        "random.not-used",
        "random-bits",
        "elements are rounded to nearest, where stochastic rounding is declared",
        "code = E2M1(y); `te`: stochastic",
        "a flag that did not reach the kernel",
        "codes are those of nearest-even",
        "pass the flag on",
        ({"words": "nearest"},),
    ),
    Entry(
        "random.wrong-offset",
        "random-bits",
        "the random words are those of another offset, seed or subsequence",
        "Philox4x32-10 with another counter or key",
        "an offset counted in 32-bit words (cuRAND) and not in calls; a state that was not advanced",
        "half of the codes that are not exact differ, each by one step",
        "pass seed and offset as the kernel counts them: in 128-bit calls",
        tuple({"words": ("advanced", calls)} for calls in (1, -1, 1024, 4)),
        infer="other_state",
    ),
    Entry(
        "random.rowwise-stream-reused",
        "random-bits",
        "the columnwise output was made with the random words of the rowwise one",
        "the same words for both directions; `te`: further calls of each thread",
        "Transformer Engine before 2.12, its JAX path",
        "columnwise codes agree with the rowwise words",
        "draw words of its own for each direction",
        tuple({"words": ("rowwise", how)} for how in ("flat", "alone", "map", "tile")),
        directions=("_t",),
    ),
    Entry(
        "random.other-rule",
        "random-bits",
        "stochastic rounding follows another rule",
        "the exact probabilities of the uniforms, or Transformer Engine's JAX comparison",
        "quantizers that draw one float an element",
        "codes differ where the uniform equals the fraction, or throughout",
        "declare the rule in `stochastic`",
        ({"stochastic": "ideal"}, {"stochastic": "sm100"}),
    ),
)

#: id -> Entry, in the order of the stages.
DEVIATIONS: dict[str, Entry] = {entry.id: entry for entry in _TABLE}


def changes() -> Iterator[tuple[Entry, Change]]:
    """Every entry with each of its changes."""
    for entry in _TABLE:
        for change in entry.changes:
            yield entry, change


#: Fields that say how another field is meant, and alone change nothing.
_QUALIFIERS = frozenset(("sixth_type", "zero_block_rule", "nan_code_bfloat16"))


def of_fields(base: nv.Arithmetic, other: nv.Arithmetic) -> dict[str, Change]:
    """The deviations that together turn one arithmetic into another: id -> the fields it accounts for.

    Each field that differs is given to the entry with the fewest fields that has it at that value, else to the
    first entry that has it at any.  Raises KeyError for a field that no entry has.
    """
    wanted = {name: value for name, value in vars(other).items() if name != "name" and value != getattr(base, name)}
    found: dict[str, dict[str, Any]] = {}
    while wanted:
        if found and set(wanted) <= _QUALIFIERS:  # what they qualify has been given away
            found[next(iter(found))].update(wanted)
            break
        entry, names = _best(wanted)
        found.setdefault(entry.id, {}).update({name: wanted.pop(name) for name in names})
    return dict(found)


def _best(wanted: dict[str, Any]) -> tuple[Entry, list[str]]:
    """The entry whose change covers most of the wanted fields, with exactly their values where one has them."""
    best: tuple[tuple[int, int], Entry, list[str]] | None = None
    for entry, change in changes():
        plain = {key: value for key, value in change.items() if "." not in key}
        if "scales" in plain and plain["scales"] in ("tiled", "repeated"):
            plain["tile_scales"] = plain.pop("scales")
        names = [name for name in plain if name in wanted]
        exact = [name for name in names if wanted[name] == plain[name]]
        if not names or len(exact) < len(plain) and (exact or len(plain) > 1):
            continue
        score = (len(exact), -len(plain))
        if best is None or score > best[0]:
            best = (score, entry, names)
    if best is None:
        raise KeyError(f"no deviation covers the fields {', '.join(wanted)}")
    return best[1], best[2]

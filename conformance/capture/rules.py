"""Which rules of docs/spec.md an output rests on: the rows of a report by rule, and what a witness is a witness of.

A difference in an output speaks against one of its rules, not against all; which one is diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends.base import Case

Array = np.ndarray[Any, Any]

#: What quantizers beside Transformer Engine's kernels are witnesses of, where it is not PEER-…: their own rule.
_OF_PRESET = {"te-2.14": "TE-2-14", "te-reference": "TE-REFERENCE"}
_KERNELS = ("te", "te-fused-rht", "te-fast-math", "four-over-six")
_OF_KIND = {
    "e2m1": ("E2M1-RNE", "E2M1-SATURATE"),
    "e2m1-pairs": ("E2M1-RNE", "E2M1-SATURATE", "E2M1-PACK"),
    "e2m1-decode": ("E2M1-VALUES",),
    "e4m3": ("E4M3-RNE", "E4M3-SATURATE"),
    "e4m3-decode": ("E4M3-VALUES",),
    "e8m0-ceil": ("E8M0-ENCODE",),
    "e8m0-floor": ("E8M0-ENCODE",),
    "e8m0-decode": ("E8M0-VALUES",),
    "amax": ("AMAX-TENSOR",),
    "gemm": ("GEMM-ACCUMULATE", "GEMM-ALPHA", "GEMM-EPILOGUE", "MMA-GROUP", "MMA-WINDOW", "MMA-ROUND"),
    "hadamard": ("RHT-MATRIX", "RHT-SUM", "RHT-ROUND"),
    "hadamard-sums": ("RHT-MATRIX", "RHT-SUM"),
    "dequantize": ("DEQUANTIZE",),
    "swizzle": ("LAYOUT-SWIZZLE",),
}
_PRODUCT = ("GEMM-ACCUMULATE", "GEMM-ALPHA", "GEMM-EPILOGUE")
#: Outputs of a linear layer, and of the helpers of the distributed optimizer, by the part before the dot.
_OF_OUTPUT = {
    ("linear", "y"): ("RECIPE-FPROP", *_PRODUCT),
    ("linear", "dx"): ("RECIPE-DGRAD", *_PRODUCT),
    ("linear", "dw"): ("RECIPE-WGRAD", *_PRODUCT),
    ("linear", "x"): ("RECIPE-FPROP",),
    ("linear", "w"): ("RECIPE-FPROP",),
    ("linear", "dy"): ("RECIPE-DGRAD",),
    **dict.fromkeys((("recipe", "global_scale"), ("recipe", "global_scales")), ("RECIPE-GLOBAL-SCALE",)),
    **dict.fromkeys((("recipe", "block_amax"), ("recipe", "partial_block_amax")), ("BLOCK-AMAX", "BLOCK-16X16")),
    **dict.fromkeys((("recipe", "data_transpose"), ("recipe", "scale_transpose")), ("LAYOUT-TRANSPOSE",)),
    **dict.fromkeys(
        [("recipe", f"{name}_scale") for name in ("per_block", "fused_per_block", "expand", "fused_target")]
        + [("recipe", "scale_bytes")],
        ("RECIPE-BLOCK-SCALE",),
    ),
    ("recipe", "partial_cast"): ("PARTIAL-CAST-SCALE", "PARTIAL-CAST-OFFSET"),
    ("recipe", "tensor_amax"): ("AMAX-TENSOR",),
    ("recipe", "alpha_amax2"): ("RECIPE-ALPHA",),
}
_STOCHASTIC = {"sm100": "SR-SM100", "te-fallback": "SR-FALLBACK", "te-jax": "SR-JAX", "ideal": "SR-IDEAL"}
_SCALES = ("FP32-RULES", "SCALE-GLOBAL", "SCALE-BLOCK", "BLOCK-AMAX", "E4M3-RNE")
_CODES = ("FP32-RULES", "SCALE-GLOBAL", "SCALE-DECODE", "SCALE-ENCODE", "ELEMENT-SCALE", "E2M1-SATURATE", "E2M1-PACK")
_SATURATES_BELOW = np.float32(7.9e-36)  # amax below which the global scale is FLT_MAX


def rules_of(case: Case, output: str, array: Array, preset: str) -> tuple[str, ...]:
    """Ids of the rules that an output of a case rests on, under the arithmetic that it was held against."""
    preset = case.arithmetic or preset
    arithmetic = nv.arithmetic(preset, **case.fields)
    if preset not in _KERNELS and case.kind == "quantize":
        return (_OF_PRESET.get(preset, f"PEER-{preset.upper()}"),)
    found = _quantize(case, output, array, arithmetic) if case.kind == "quantize" else _step(case, output)
    return tuple(dict.fromkeys(found))


def _step(case: Case, output: str) -> Iterator[str]:
    """Of a bare conversion, of one step, or of what is built on quantization."""
    yield from _OF_KIND.get(case.kind, ())
    yield from _OF_OUTPUT.get((case.kind, output.partition(".")[0]), ())
    family = case.kind.split("-")[0].upper()
    if family in ("E2M1", "E4M3", "E8M0") and case.x.dtype.kind == "f" and np.isnan(case.x).any():
        yield f"{family}-NAN"
    if family == "E2M1":
        yield "E2M1-ZERO"


def _quantize(case: Case, output: str, array: Array, arithmetic: nv.Arithmetic) -> Iterator[str]:
    name, columnwise = output.removesuffix("_t"), output.endswith("_t")
    given = case.amax_t if columnwise else case.amax
    nan = bool(np.isnan(case.x.astype(np.float32)).any())
    if case.x.dtype != np.float32:
        yield "INPUT-WIDEN"
    if columnwise and name not in ("rbits", "rht"):
        yield "BLOCK-COLUMNWISE"
    if columnwise and case.rht_t is not None:
        yield from _transform(case, name, arithmetic)
    if name == "amax":
        yield "AMAX-ROW" if arithmetic.row_scaled else "AMAX-TENSOR"
        if given is not None:
            yield "AMAX-SUPPLIED"
        elif nan:
            yield "AMAX-NAN"
    elif name in ("scales", "packed"):
        yield "BLOCK-1X16" if case.block == (1, 16) else "BLOCK-16X16"
        yield from _scaled(case, given, arithmetic)
        yield from _SCALES if name == "scales" else _CODES
        if name == "scales" and (array == 0).any():
            yield "SCALE-ZERO-BLOCK"
        if name == "packed":
            yield from _elements(case, array, nan, arithmetic)
            yield from _random(case, columnwise, arithmetic)
    elif name == "scales_swizzled":
        yield from ("LAYOUT-PAD", "LAYOUT-SWIZZLE")
    elif name == "rbits":
        yield from _random(case, columnwise, arithmetic)
    elif name.startswith("deq_"):
        yield "DEQUANTIZE"


def _scaled(case: Case, given: Any, arithmetic: nv.Arithmetic) -> Iterator[str]:
    with np.errstate(invalid="ignore"):
        amax = np.asarray(np.nanmax(np.abs(case.x.astype(np.float32)), initial=0) if given is None else given)
    if (~(np.abs(amax) >= _SATURATES_BELOW) | np.isinf(amax) | (amax < 0)).any():
        yield "SCALE-GLOBAL-GUARD"
    if arithmetic.row_scaled:
        yield "ROW-SCALED"
    if arithmetic.four_over_six:
        yield from ("FOUR-OVER-SIX-SCALE", "FOUR-OVER-SIX-SUM", "FOUR-OVER-SIX-SELECT")
        yield "FOUR-OVER-SIX-FAST-ERROR" if arithmetic.four_over_six_fast_error else "FOUR-OVER-SIX-ERROR"
    if arithmetic.encode_scale == "bfloat16-coefficient":
        yield "FAST-MATH"


def _elements(case: Case, packed: Array, nan: bool, arithmetic: nv.Arithmetic) -> Iterator[str]:
    if case.rounding == "nearest-even":
        yield "E2M1-RNE"
        if nan:
            yield "E2M1-NAN"
        if ((packed & 15 == 8) | (packed >> 4 == 8)).any():
            yield "E2M1-ZERO"
    elif arithmetic.stochastic in _STOCHASTIC:
        yield _STOCHASTIC[arithmetic.stochastic]


def _random(case: Case, columnwise: bool, arithmetic: nv.Arithmetic) -> Iterator[str]:
    """Of words made from the state of a generator."""
    philox = case.data.get("rng_t" if columnwise else "rng")
    if isinstance(philox, nv.Philox):
        yield from ("PHILOX-ROUNDS", "PHILOX-COUNTER")
        yield "DISPATCH" if philox.kernel == "auto" else f"STREAM-{philox.kernel.upper()}"


def _transform(case: Case, name: str, arithmetic: nv.Arithmetic) -> Iterator[str]:
    if arithmetic.global_guard == "fused-rht":
        yield "FUSED-RHT-GLOBAL"
    yield from ("RHT-MATRIX", "RHT-SUM", "RHT-ROUND")
    if not np.isfinite(case.x.astype(np.float32)).all():
        yield "FUSED-RHT-NAN" if arithmetic.global_guard == "fused-rht" else "RHT-SPECIAL"
    if name == "amax":
        yield "RHT-AMAX"

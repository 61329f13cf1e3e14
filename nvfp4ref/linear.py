"""fprop, dgrad and wgrad of a linear layer under a recipe, in NumPy.

Every operand is quantized from the high-precision tensor, in the forward and in the backward pass, so nothing
is quantized twice; amax is taken after the Hadamard transform; gradients are rounded stochastically; outputs
are bfloat16 and weight gradients accumulate in float32.  Rules RECIPE-FPROP, RECIPE-DGRAD, RECIPE-WGRAD.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .arrays import as_array
from .fp32 import AnyArray, bfloat16
from .gemm import matmul
from .quantize import quantize
from .recipe import Operand, Recipe, recipe
from .streams import Philox
from .tensor import NVFP4Tensor

COLUMNWISE_STATE = 1024  # generator offsets that Transformer Engine reserves for one quantize call


def quantize_operand(x: AnyArray, operand: Operand, rng: Philox | Any = None, *, threads: int = 1) -> NVFP4Tensor:
    """One operand quantized as a recipe says.

    Args:
        x: matrix (R, C), the high-precision tensor.
        operand: from ``Recipe.operands``.
        rng: for stochastic operands a Philox (of the launch that makes both outputs of the gradient), or the
            words themselves, as ``quantize`` takes them.
    Raises:
        ValueError: a stochastic operand without rng, and what ``quantize`` raises.
    """
    rbits = None
    if operand.rounding == "stochastic":
        if rng is None:
            raise ValueError(
                f"{operand.tensor} is rounded stochastically under this recipe: pass rng, an nvfp4ref.Philox "
                "(or disable_stochastic_rounding=True)"
            )
        rbits = _words(x, operand, rng) if isinstance(rng, Philox) else rng
    return quantize(x, rbits=rbits, threads=threads, **operand.options())


def _words(x: AnyArray, operand: Operand, rng: Philox) -> Any:
    """The stream of one output of the gradient.

    With the transform, an eligible shape goes through one fused launch that makes both outputs; another takes
    two launches, the columnwise one with the generator state of the next call.
    """
    shape, dtype = np.shape(x), as_array(x).dtype.name
    if rng.kernel != "auto":
        return rng
    if not operand.paired_with_rht:
        return replace(rng, both=True)  # one launch makes both outputs
    if dtype == "bfloat16" and shape[0] % 64 == 0 and shape[1] % 128 == 0:
        return replace(rng, kernel="fused-rht", both=True)
    if operand.axis == 0:
        return replace(rng, kernel="unfused-rht", offset=rng.offset + COLUMNWISE_STATE, both=False)
    return replace(rng, both=False)


def _matrix(x: Any, name: str) -> AnyArray:
    array = as_array(x)
    if array.ndim < 2:
        raise ValueError(f"{name} is a matrix, or has leading dimensions that are tokens; got shape {array.shape}")
    return array.reshape(-1, array.shape[-1])


def _same(name_a: str, a: int, name_b: str, b: int, what: str) -> None:
    if a != b:
        raise ValueError(f"{name_a} and {name_b} have different {what}: {a} and {b}")


def _gemm(
    name: str, a: AnyArray, b: AnyArray, chosen: Recipe, rng: Philox | Any, threads: int, **epilogue: Any
) -> AnyArray:
    left, right = chosen.operands(name)
    return matmul(
        quantize_operand(a, left, rng, threads=threads), quantize_operand(b, right, rng, threads=threads), **epilogue
    )


def fprop(
    x: Any,
    w: Any,
    recipe_: str | Recipe = "te",
    *,
    bias: Any = None,
    out_dtype: DTypeLike = bfloat16,
    model: str = "blackwell",
    threads: int = 1,
) -> AnyArray:
    """y = x·wᵀ + bias: (T, N) from x (…, K), leading dimensions flattened to T tokens, and w (N, K).

    Raises ValueError for different K, unaligned shapes and what the recipe refuses.
    """
    tokens, weight = _matrix(x, "x"), _matrix(w, "w")
    _same("x", tokens.shape[1], "w", weight.shape[1], "input features (last axis)")
    return _gemm("fprop", tokens, weight, recipe(recipe_), None, threads, bias=bias, out_dtype=out_dtype, model=model)


def dgrad(
    dy: Any,
    w: Any,
    recipe_: str | Recipe = "te",
    *,
    rng: Philox | Any = None,
    out_dtype: DTypeLike = bfloat16,
    model: str = "blackwell",
    threads: int = 1,
) -> AnyArray:
    """dx = dy·w: (T, K) from dy (…, N) and w (N, K).

    ``rng``: the state of the launch that quantizes dy, or the words of its rowwise output, uint32 (T, N/4).
    """
    gradient, weight = _matrix(dy, "dy"), _matrix(w, "w")
    _same("dy", gradient.shape[1], "w", weight.shape[0], "output features")
    return _gemm("dgrad", gradient, weight, recipe(recipe_), rng, threads, out_dtype=out_dtype, model=model)


def wgrad(
    dy: Any,
    x: Any,
    recipe_: str | Recipe = "te",
    *,
    rng: Philox | Any = None,
    accumulate: Any = None,
    out_dtype: DTypeLike = np.float32,
    model: str = "blackwell",
    threads: int = 1,
) -> AnyArray:
    """dw = dyᵀ·x: (N, K) from dy (…, N) and x (…, K), added to ``accumulate`` (N, K) when given.

    ``rng``: as for dgrad; words are those of the columnwise output, uint32 (N, T/4).
    """
    gradient, tokens = _matrix(dy, "dy"), _matrix(x, "x")
    _same("dy", gradient.shape[0], "x", tokens.shape[0], "numbers of tokens")
    beta = 0.0 if accumulate is None else 1.0
    return _gemm(
        "wgrad",
        gradient,
        tokens,
        recipe(recipe_),
        rng,
        threads,
        c=accumulate,
        beta=beta,
        out_dtype=out_dtype,
        model=model,
    )

"""A linear layer under a recipe of ``nvfp4ref.recipe``: fprop, dgrad and wgrad as Transformer Engine does them.

Every operand is quantized once, from bfloat16; gradients are rounded stochastically with words folded from one key;
outputs are bfloat16, weight gradients have the weight's dtype.  Rules RECIPE-FPROP, RECIPE-DGRAD, RECIPE-WGRAD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nvfp4hw.jaxpath import stochastic
from nvfp4hw.jaxpath.gemm import matmul
from nvfp4hw.jaxpath.quantize import dequantize, quantize, quantize_both
from nvfp4hw.jaxpath.tensor import NVFP4Array
from nvfp4ref.recipe import Operand, Recipe, recipe

BF16 = jnp.bfloat16


class Forward(NamedTuple):
    """What the forward pass of one call read and wrote, as NumPy arrays; the operands are NVFP4Arrays of them."""

    x: Any
    w: Any  # as it was quantized, bfloat16
    row_x: NVFP4Array
    row_w: NVFP4Array
    column_x: NVFP4Array
    column_w: NVFP4Array
    y: Any


class Backward(NamedTuple):
    """The same of the backward pass; ``keys`` are the Philox keys (2, 2) of the gradient's two results, if any."""

    dy: Any
    keys: Any
    row_dy: NVFP4Array
    column_dy: NVFP4Array
    column_x: NVFP4Array
    column_w: NVFP4Array
    dx: Any
    dw: Any


Observer = Callable[[Forward | Backward], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call ``observer`` on the host with a Forward and a Backward for every differentiated call traced meanwhile.

    It is called whenever the compiled function runs, also after the context has ended, in no particular order.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _observe(event: Forward | Backward) -> None:
    for observer in _observers:
        jax.debug.callback(observer, event)


class _Static(NamedTuple):
    recipe: Recipe
    across: tuple[str, ...]
    weight_dtype: Any


def linear(
    x: jax.Array,
    w: jax.Array,
    key: Any = None,
    recipe_: str | Recipe = "te",
    *,
    across: Sequence[str] = (),
) -> jax.Array:
    """x·wᵀ, bfloat16, differentiable in x and w.

    Args:
        x: (…, K) float32, bfloat16 or float16; leading dimensions are tokens, rounded to bfloat16.
        w: (N, K), rounded likewise; its gradient is accumulated in float32 and has w's dtype.
        key: a JAX key for the stochastic rounding of the gradient in this call (see ``call_key``): its two results take
            the key folded with 0 (for dgrad) and 1 (for wgrad).
        recipe_: a name or a Recipe.
        across: mesh axes over whose devices the tokens are split; only inside shard_map.
    Returns:
        (…, N) bfloat16.
    Raises:
        TypeError, ValueError: while tracing: shapes that are not aligned, a missing key, what the recipe refuses.
    """
    chosen = recipe(recipe_)
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(f"x has tokens and features, w is a matrix (N, K); got shapes {x.shape} and {w.shape}")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape} have different input features (last axis)")
    tokens = x.reshape(-1, x.shape[-1])
    static = _Static(chosen, tuple(across), w.dtype)
    return _linear(tokens.astype(BF16), w, key, static).reshape(*x.shape[:-1], w.shape[0])


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    key: Any = None,
    recipe_: str | Recipe = "te",
    *,
    across: Sequence[str] = (),
) -> jax.Array:
    """``linear`` in the place of ``jax.lax.dot_general``: activations lhs against a weight rhs.

    The contracted dimensions, in the order given, are the input features; those left of lhs are tokens, those left of
    rhs output features.  Batch dimensions are refused: a product of two activations is not quantized.
    """
    (of_lhs, of_rhs), batch = dimension_numbers
    if tuple(map(tuple, batch)) != ((), ()):
        raise ValueError(
            f"a linear layer has no batch dimensions; got {batch}: use jax.lax.dot_general for products of activations"
        )
    of_lhs, of_rhs = ([axis % a.ndim for axis in axes] for a, axes in ((lhs, of_lhs), (rhs, of_rhs)))
    kept_lhs, kept_rhs = (
        [axis for axis in range(a.ndim) if axis not in axes] for a, axes in ((lhs, of_lhs), (rhs, of_rhs))
    )
    features = math.prod(lhs.shape[axis] for axis in of_lhs)
    x = lhs.transpose(*kept_lhs, *of_lhs).reshape(-1, features)
    w = rhs.transpose(*kept_rhs, *of_rhs).reshape(-1, features)
    y = linear(x, w, key, recipe_, across=across)
    return y.reshape(*(lhs.shape[axis] for axis in kept_lhs), *(rhs.shape[axis] for axis in kept_rhs))


def call_key(key: Any, step: Any, layer: int) -> Any:
    """The key of one call: of a run's key the one for this step and layer; ``linear`` folds in the operand."""
    return jax.random.fold_in(jax.random.fold_in(key, step), layer)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x: jax.Array, w: jax.Array, key: Any, static: _Static) -> jax.Array:
    return matmul(*_fprop_operands(x, w.astype(BF16), static), out_dtype=BF16)


def _forward(x: jax.Array, w: jax.Array, key: Any, static: _Static) -> tuple[jax.Array, Any]:
    wide, override = w.astype(BF16), static.recipe.backward_override
    if override is not None:
        row_x, row_w = _fprop_operands(x, wide, static)
        kept = (x, wide) if override == "high_precision" else (dequantize(row_x, BF16), dequantize(row_w, BF16))
        return matmul(row_x, row_w, out_dtype=BF16), (*kept, None)
    _check_backward(x, w, key, static.recipe)
    row_x, column_x = _both(x, static.recipe.operands("wgrad")[1], static)
    row_w, column_w = _both(wide, static.recipe.operands("dgrad")[1], static)
    y = matmul(row_x, row_w, out_dtype=BF16)
    _observe(Forward(x, wide, row_x, row_w, column_x, column_w, y))
    return y, (column_x, column_w, key)


def _backward(static: _Static, residual: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, key = residual
    if static.recipe.backward_override is not None:
        dx = jnp.dot(dy, w, preferred_element_type=jnp.float32).astype(BF16)
        dw = jnp.dot(dy.T, x, preferred_element_type=jnp.float32)
    else:
        row, column = _both(dy, static.recipe.operands("wgrad")[0], static, key)
        dx, dw = matmul(row, w, out_dtype=BF16), matmul(column, x)
        if _observers:
            keys = None if static.recipe.disable_stochastic_rounding else jnp.stack(stochastic.both_keys(key))
            _observe(Backward(dy, keys, row, column, x, w, dx, dw))
    return dx, dw.astype(static.weight_dtype), None


_linear.defvjp(_forward, _backward)


def _check_backward(x: jax.Array, w: jax.Array, key: Any, chosen: Recipe) -> None:
    if key is None and not chosen.disable_stochastic_rounding:
        raise ValueError(
            f"gradients are rounded stochastically under the recipe {chosen.name!r}: pass a JAX key for this step and "
            "layer (linear's key, or the module's rng stream), or use disable_stochastic_rounding=True"
        )
    if x.shape[0] % 32 or w.shape[0] % 32:
        raise ValueError(
            f"the backward GEMMs sum over {x.shape[0]} tokens (wgrad) and {w.shape[0]} output features (dgrad); both "
            "are multiples of 32 in an FP4 GEMM: pad them with zeros"
        )


def _fprop_operands(x: jax.Array, w: jax.Array, static: _Static) -> tuple[NVFP4Array, NVFP4Array]:
    a, b = static.recipe.operands("fprop")
    return (
        quantize(x, block=a.block, arithmetic=a.arithmetic, across=static.across),
        quantize(w, block=b.block, arithmetic=b.arithmetic),
    )


def _both(x: jax.Array, column: Operand, static: _Static, key: Any = None) -> tuple[NVFP4Array, ...]:
    """A tensor for its rowwise and its columnwise GEMM; the two differ in the transform alone."""
    return quantize_both(
        x,
        block=column.block,
        rounding=column.rounding,
        rbits=key if column.rounding == "stochastic" else None,
        rht=column.rht,
        arithmetic=column.arithmetic,
        across=() if column.tensor == "w" else static.across,  # a weight is whole on every device
    )

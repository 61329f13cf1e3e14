"""A linear layer under a recipe of ``nvfp4ref.recipe``: fprop, dgrad and wgrad as Transformer Engine does them.

Every operand is quantized once, from bfloat16; gradients are rounded stochastically with words folded from one key;
outputs are bfloat16, weight gradients have the weight's dtype.  Rules RECIPE-FPROP, RECIPE-DGRAD, RECIPE-WGRAD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4ref as nv
from nvfp4hw.jaxpath import stochastic
from nvfp4hw.jaxpath.gemm import matmul, product
from nvfp4hw.jaxpath.quantize import dequantize, quantize, quantize_both
from nvfp4hw.jaxpath.tensor import DTYPES, NVFP4Array, require_no_explicit_axes
from nvfp4ref.recipe import Operand, Recipe, recipe

BF16 = jnp.bfloat16
Array = np.ndarray[Any, Any]


class Call(NamedTuple):
    """What one differentiated call of ``linear`` read, quantized and wrote, on the host.

    Attributes:
        recipe: the recipe.
        x, w, dy: (T, K), (N, K), (T, N) bfloat16, as they were quantized.
        keys: uint32 (2, 2), the Philox keys of the gradient's rowwise and columnwise result; None without them.
        operands: (a, b) of each GEMM a·bᵀ that has quantized ones: "fprop", and without an override "dgrad", "wgrad".
        results: y, dx and dw by the name of their GEMM; dw is float32, before it is rounded to the weight's dtype.
    """

    recipe: Recipe
    x: Array
    w: Array
    dy: Array
    keys: Array | None
    operands: Mapping[str, tuple[nv.NVFP4Tensor, nv.NVFP4Tensor]]
    results: Mapping[str, Array]


Observer = Callable[[Call], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Hand a Call to ``observer``, on the host, for every differentiated ``linear`` traced meanwhile, by any thread.

    It is called whenever the compiled function runs, also after the context has ended, in no particular order;
    ``jax.effects_barrier()`` waits for it.  What was compiled before is not observed.  To be seen, the forward pass
    keeps more of its tensors for the backward pass.  The observer runs on a thread of XLA's, which flushes subnormal
    numbers: let it keep the Call (``list.append``), and compute with it afterwards.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _observe(chosen: Recipe, seen: Any) -> None:
    def hand_over(observer: Observer, seen: Any) -> None:
        observer(Call(chosen, *jax.tree.map(_on_host, seen, is_leaf=lambda a: isinstance(a, NVFP4Array))))

    for observer in _observers:
        jax.debug.callback(partial(hand_over, observer), seen)


def _on_host(a: Any) -> Any:
    return a.to_numpy() if isinstance(a, NVFP4Array) else np.asarray(a)


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
        across: mesh axes over whose devices the tokens are split; only inside shard_map, where each device needs a
            key of its own (fold in ``jax.lax.axis_index``).  The gradient of a w that is the same on all devices is
            summed over them, as shard_map does by itself where it checks replication (its default).
    Returns:
        (…, N) bfloat16.
    Raises:
        TypeError, ValueError: while tracing: other dtypes, shapes that are not aligned (K and, to be differentiated,
            N and the number of tokens are multiples of 32), a key that is missing or none, what the recipe refuses.
    """
    chosen = recipe(recipe_)
    x, w = _float(x, "x"), _float(w, "w")
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(f"x has tokens and features, w is a matrix (N, K); got shapes {x.shape} and {w.shape}")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x {x.shape} and w {w.shape} have different input features (last axis): w is (N, K), a Flax kernel is its "
            "transpose"
        )
    if x.size == 0 or w.size == 0:
        raise ValueError(f"x and w are not empty; got shapes {x.shape} and {w.shape}")
    _require_aligned(x.shape[-1], "input features (of x and w, summed over in fprop)", 32)
    if chosen.operands("fprop")[1].block == (16, 16):
        _require_aligned(w.shape[0], "output features (of w, which has 16x16 blocks; to be differentiated, 32)", 16)
    x, w = _varying_alike(x, w)
    tokens = x.reshape(-1, x.shape[-1]).astype(BF16)
    static = _Static(chosen, tuple(across), w.dtype)
    return _linear(tokens, w, None if key is None else _one_key(key), static).reshape(*x.shape[:-1], w.shape[0])


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
    rhs output features.  Raises ValueError for batch dimensions (a product of two activations is not quantized) and
    for contracted dimensions that do not match, and what ``linear`` raises.
    """
    (of_lhs, of_rhs), batch = dimension_numbers
    if any(not -a.ndim <= axis < a.ndim for a, axes in ((lhs, of_lhs), (rhs, of_rhs)) for axis in axes):
        raise ValueError(f"dimensions {of_lhs} and {of_rhs} are contracted; the shapes are {lhs.shape} and {rhs.shape}")
    if tuple(map(tuple, batch)) != ((), ()):
        raise ValueError(
            f"a linear layer has no batch dimensions; got {batch}: use jax.lax.dot_general for products of activations"
        )
    of_lhs, of_rhs = ([axis % a.ndim for axis in axes] for a, axes in ((lhs, of_lhs), (rhs, of_rhs)))
    kept_lhs, kept_rhs = (
        [axis for axis in range(a.ndim) if axis not in axes] for a, axes in ((lhs, of_lhs), (rhs, of_rhs))
    )
    contracted = [lhs.shape[axis] for axis in of_lhs]
    if contracted != [rhs.shape[axis] for axis in of_rhs]:
        raise ValueError(f"dimensions {of_lhs} of {lhs.shape} and {of_rhs} of {rhs.shape} are contracted: they differ")
    features = math.prod(contracted)
    x = lhs.transpose(*kept_lhs, *of_lhs).reshape(-1, features)
    w = rhs.transpose(*kept_rhs, *of_rhs).reshape(-1, features)
    y = linear(x, w, key, recipe_, across=across)
    return y.reshape(*(lhs.shape[axis] for axis in kept_lhs), *(rhs.shape[axis] for axis in kept_rhs))


def call_key(key: Any, step: Any, layer: int) -> Any:
    """The key of one call: of a run's key the one for this step and layer; ``linear`` folds in the operand."""
    return jax.random.fold_in(jax.random.fold_in(key, step), layer)


# -- what is checked while JAX traces --------------------------------------------------------------------------


def _float(a: Any, name: str) -> jax.Array:
    dtype = getattr(a, "dtype", None)
    if dtype is None or dtype not in DTYPES:
        raise TypeError(f"{name} is a float32, bfloat16 or float16 array; got {dtype or type(a).__name__}")
    a = jnp.asarray(a)
    require_no_explicit_axes(a, name)
    return a


def _require_aligned(length: int, what: str, multiple: int) -> None:
    if length % multiple:
        padded = -(-length // 32) * 32
        raise ValueError(
            f"{length} {what} are no multiple of {multiple}: pad with zeros to {padded} and cut the result, or leave "
            "this layer in high precision"
        )


def _one_key(key: Any) -> Any:
    if not stochastic.is_key(key):
        shape = f" of shape {key.shape}" if hasattr(key, "shape") else ""
        raise TypeError(
            f"key is a JAX key, jax.random.key(seed); got {getattr(key, 'dtype', type(key).__name__)}{shape}"
        )
    key = stochastic.as_key(key)
    if key.ndim:
        raise ValueError(f"key is one JAX key; got keys of shape {key.shape}: each call takes one of them")
    return key


def _require_differentiable(x: jax.Array, w: jax.Array, key: Any, chosen: Recipe) -> None:
    if key is None and not chosen.disable_stochastic_rounding:
        raise ValueError(
            f"gradients are rounded stochastically under the recipe {chosen.name!r}: pass a JAX key for this step and "
            "layer (in flax.linen rngs={'sr_rng': jax.random.fold_in(key, step)} of apply, in flax.nnx the rngs of "
            "NnxDotGeneral), or take nvfp4ref.recipe.recipe(name, disable_stochastic_rounding=True)"
        )
    _require_aligned(x.shape[0], "tokens (summed over in wgrad)", 32)
    _require_aligned(w.shape[0], "output features (summed over in dgrad)", 32)


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays that vary over the same axes of a shard_map; the gradient of one that did not is summed over the rest."""
    axes = [_varies_over(a) for a in arrays]
    union = frozenset().union(*axes)
    return [a if own == union else _vary(a, tuple(union - own)) for a, own in zip(arrays, axes, strict=True)]


def _varies_over(a: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(a)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # before JAX 0.8 and since


def _vary(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    pcast: Any = getattr(lax, "pcast", None)
    return pcast(a, axes, to="varying") if pcast else lax.pvary(a, axes)  # type: ignore[attr-defined]


# -- the three GEMMs -------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x: jax.Array, w: jax.Array, key: Any, static: _Static) -> jax.Array:
    return matmul(*_fprop_operands(x, w.astype(BF16), static), out_dtype=BF16)


def _forward(x: jax.Array, w: jax.Array, key: Any, static: _Static) -> tuple[jax.Array, Any]:
    chosen, wide = static.recipe, w.astype(BF16)
    if chosen.backward_override is not None:
        row_x, row_w = _fprop_operands(x, wide, static)
        kept: tuple[Any, Any] = x, wide
        if chosen.backward_override == "dequantized":
            kept = dequantize(row_x, BF16), dequantize(row_w, BF16)
    else:
        _require_differentiable(x, w, key, chosen)
        row_x, column_x = _both(x, chosen.operands("wgrad")[1], static)
        row_w, column_w = _both(wide, chosen.operands("dgrad")[1], static)
        kept = (column_x, column_w)
    y = matmul(row_x, row_w, out_dtype=BF16)
    return y, (*kept, key, (x, wide, (row_x, row_w), y) if _observers else None)


def _backward(static: _Static, residual: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, key, seen = residual
    operands = {}
    if static.recipe.backward_override is not None:
        dx, dw = product(dy, w.T).astype(BF16), product(dy.T, x.T)
    else:
        row, column = _both(dy, static.recipe.operands("wgrad")[0], static, key)
        operands = {"dgrad": (row, w), "wgrad": (column, x)}
        dx, dw = matmul(row, w, out_dtype=BF16), matmul(column, x)
    if seen is not None:
        x, w, fprop, y = seen
        rounded = operands and not static.recipe.disable_stochastic_rounding
        keys = jnp.stack(stochastic.both_keys(key)) if rounded else None
        results = {"fprop": y, "dgrad": dx, "wgrad": dw}
        _observe(static.recipe, (x, w, dy, keys, {"fprop": fprop, **operands}, results))
    return dx, dw.astype(static.weight_dtype), None


_linear.defvjp(_forward, _backward)


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

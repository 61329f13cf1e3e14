"""Block-scaled matmul: exact operands, float32 accumulation in the device's order, the epilogue bit for bit.

A code times its block scale has at most six significant bits, so bfloat16 holds it exactly and so does a float32
product of two.  Only the order of the additions is the device's own; docs/jax.md states what it may change.
Rules GEMM-ALPHA, GEMM-EPILOGUE.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nvfp4hw.jaxpath import bits
from nvfp4hw.jaxpath.bits import Bits, u32
from nvfp4hw.jaxpath.tensor import NVFP4Array, own_settings, without_gradient

ALPHA_FORMS = ("pytorch", "jax", "none")
OUT_DTYPES = tuple(jnp.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


@own_settings
def matmul(
    a: NVFP4Array,
    b: NVFP4Array,
    *,
    out_dtype: Any = jnp.float32,
    alpha: Any = 1.0,
    bias: jax.Array | None = None,
    alpha_form: str = "pytorch",
) -> jax.Array:
    """a·bᵀ of two quantized matrices: (M, N) from (M, K) and (N, K), leading dimensions flattened.

    Args:
        out_dtype: float32, bfloat16 or float16; one rounding at the end.
        alpha: float32 factor, a number or a JAX array.
        bias: (N,) float32, bfloat16 or float16, added in float32 before that rounding.
        alpha_form: "pytorch" or "jax", the operation order of the tensor scales; "none": not applied.
    Returns:
        (M, N) of out_dtype: ``nvfp4ref.matmul`` of the model "exact" up to the order of the float32 additions.
    Raises:
        TypeError, ValueError: while tracing: other types, different K, K no multiple of 32, shape of bias.
    """
    dtype = _checked(a, b, out_dtype, bias, alpha_form)
    total = product(values(a), values(b))
    a, b = (dataclasses.replace(q, amax=without_gradient(q.amax, "matmul")) for q in (a, b))
    bias = None if bias is None else without_gradient(jnp.asarray(bias), "the bias of matmul")
    return _epilogue(total, a, b, bias, _factor(alpha), alpha_form, dtype)


def _factor(alpha: Any) -> Bits:
    """The bits of the factor, traced: as numbers, both zeros would be one key of jit's cache."""
    if isinstance(alpha, jax.Array) and alpha.dtype == jnp.float32 and alpha.ndim == 0:
        return bits.of_float(without_gradient(alpha, "matmul"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float, np.integer, np.floating)):
        raise TypeError(f"alpha is a number, or a float32 array of no dimension; got {type(alpha).__name__}")
    with np.errstate(over="ignore"):
        return jnp.asarray(bits.constant(alpha))


@jax.jit
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a·bᵀ of bfloat16 matrices, exact products summed in float32."""
    shared = (((1,), (1,)), ((), ()))

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:  # XLA of JAX 0.7 has no batched bfloat16 product there
        return lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), shared, precision=lax.Precision.HIGHEST)

    def elsewhere(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, shared, preferred_element_type=jnp.float32)

    return lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)


def values(q: NVFP4Array) -> jax.Array:
    """bfloat16 (rows, K): codes times block scales, exact; the scales' sign is not read, as in the tensor core."""
    codes = q.codes.reshape(-1, q.shape[-1] // 16, 16).astype(jnp.uint32)
    magnitude = codes & u32(7)
    normal = ((magnitude >> u32(1)) + u32(126)) << u32(23) | (magnitude & u32(1)) << u32(22)
    value = jnp.where(magnitude < u32(2), magnitude * bits.constant(0.5), normal) | (codes & u32(8)) << u32(28)
    scales = bits.of_e4m3(q.scales.reshape(*codes.shape[:2], 1) & np.uint8(0x7F))
    exact = bits.to_float(value) * bits.to_float(scales)  # neither rounded nor near float32's limits
    return exact.astype(jnp.bfloat16).reshape(codes.shape[0], -1)


def _checked(a: NVFP4Array, b: NVFP4Array, out_dtype: Any, bias: Any, alpha_form: str) -> np.dtype[Any]:
    """The dtype of the result; TypeError or ValueError for what does not go together."""
    for q in (a, b):
        if not isinstance(q, NVFP4Array):
            raise TypeError(f"matmul takes NVFP4Arrays, from jaxpath.quantize; got {type(q).__name__}")
    k = a.shape[-1]
    if b.shape[-1] != k:
        raise ValueError(
            f"a {a.shape} and b {b.shape} have different K (last axis): matmul computes a·bᵀ, both with blocks "
            "along K; quantize the other operand along the axis it shares (axis=0 for the transpose)"
        )
    if k % 32:
        raise ValueError(f"K is a multiple of 32 in an FP4 GEMM; got {k}: pad both operands with zeros")
    if alpha_form not in ALPHA_FORMS:
        raise ValueError(f"unknown alpha form {alpha_form!r}; the forms are {', '.join(ALPHA_FORMS)}")
    dtype = jnp.dtype(out_dtype)
    if dtype not in OUT_DTYPES:
        raise TypeError(f"matmul gives float32, bfloat16 or float16; got {dtype}")
    columns = math.prod(b.shape[:-1])
    if bias is not None:
        found = getattr(bias, "dtype", type(bias).__name__)
        if found not in OUT_DTYPES:
            raise TypeError(f"bias is a float32, bfloat16 or float16 array; got {found}")
        if bias.shape != (columns,):
            raise ValueError(f"bias has one value for each of the {columns} columns; got shape {bias.shape}")
    return dtype


@partial(jax.jit, static_argnames=("alpha_form", "dtype"))
def _epilogue(
    total: jax.Array,
    a: NVFP4Array,
    b: NVFP4Array,
    bias: jax.Array | None,
    alpha: Bits,
    alpha_form: str,
    dtype: np.dtype[Any],
) -> jax.Array:
    out = bits.of_float(total)
    amaxes = [bits.of_float(q.amax) for q in (a, b)]
    row_scaled = alpha_form != "none" and any(amax.ndim for amax in amaxes)
    if row_scaled:  # a GEMM with amaxes of one, then those of rows and columns
        out = bits.mul(out, _alpha(a, b, [bits.ONE, bits.ONE], alpha, alpha_form))
        rows, columns = amaxes[0].reshape(-1, 1), amaxes[1].reshape(1, -1)
        both = rows.size > 1 and columns.size > 1
        out = bits.mul(bits.mul(out, rows), columns) if both else bits.mul(out, bits.mul(rows, columns))
    else:
        out = bits.mul(out, _alpha(a, b, amaxes, alpha, alpha_form))
    if bias is not None:
        out = bits.add(out, bits.of_float(bias))
    return bits.to_float(out, dtype)


def _alpha(a: NVFP4Array, b: NVFP4Array, amaxes: list[Any], factor: Bits, form: str) -> Bits:
    """fl(fl(fl(alpha·A_a)·A_b)·fl(1/(M_a·M_b))), or as XLA has it fl(alpha·fl(fl(A_a/M_a)·fl(A_b/M_b)))."""
    largest = [q.arithmetic.element_max * q.arithmetic.e4m3_max for q in (a, b)]
    if form == "none":
        return factor
    if form == "jax":
        scales = [bits.div(amax, bits.constant(m)) for amax, m in zip(amaxes, largest, strict=True)]
        return bits.mul(factor, bits.mul(*scales))
    inverse = bits.constant(np.float32(1) / np.float32(largest[0] * largest[1]))
    return bits.mul(bits.mul(bits.mul(factor, amaxes[0]), amaxes[1]), inverse)

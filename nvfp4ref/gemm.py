"""Block-scaled matmul of NVFP4 tensors, bit for bit under a tensor core model.

Accumulation (GEMM-ACCUMULATE): words of 64 along K in ascending order, each word's C the D of the one before,
starting from +0.  A word's exact sum is a multiple of 2^-20 below 2^29, so a 64-wide float64 product is exact
in any order, and rounding toward zero to float32 is one bit mask.  That gives the model's bits wherever its
window cuts nothing off, which the exponents tell beforehand (GEMM-EXACT-BOUND); elsewhere the window is applied.
Epilogue (GEMM-ALPHA, GEMM-EPILOGUE): alpha in the framework's operation order, beta·C, bias, output rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from . import e2m1, e4m3, partial_cast, tensorcore
from .arrays import as_float32
from .fp32 import (
    F32,
    F64,
    NAN,
    U8,
    AnyArray,
    add_nearest,
    add_toward_zero,
    bfloat16,
    canonical_nan,
    cut_to_24_bits,
    require_subnormals,
    to_bfloat16,
    to_float16,
)
from .tensor import NVFP4Tensor, as_tensor, rows_of

TILE = 256  # rows and columns of the output worked on at a time: two float64 tiles fit the cache
STRIPE = 4096  # rows of b kept decoded
STRIPE = 4096  # rows of b kept decoded
EXACT_SPREAD = 27  # exponents apart that the window still holds whole


class Rows(NamedTuple):
    """Some rows of one operand, K padded with zeros to whole words, and what every word needs of them."""

    codes: U8  # (rows, words, 4, 16)
    scales: U8  # (rows, words, 4), sign bit cleared, NaN made 0
    values: F64  # (words, rows, 64): code·scale, exact
    largest: AnyArray  # (words,): largest and smallest scale exponent of a live group,
    smallest: AnyArray  # one with a non-zero scale and a non-zero element

    def words(self, part: slice) -> Rows:
        return Rows(
            self.codes[:, part], self.scales[:, part], self.values[part], self.largest[part], self.smallest[part]
        )


NOTHING = 500  # stands for an exponent where there is no live group


def _rows(codes: U8, scales: U8) -> Rows:
    """Codes (rows, K) and scales (rows, K/16) decoded for the words."""
    rows, k = codes.shape
    words = -(-k // tensorcore.K)
    padded_codes = np.zeros((rows, words * tensorcore.K), np.uint8)
    padded_codes[:, :k] = codes
    padded_scales = np.zeros((rows, words * 4), np.uint8)
    padded_scales[:, : k // 16] = scales
    c, s = padded_codes.reshape(rows, words, 4, 16), padded_scales.reshape(rows, words, 4)
    values = np.empty((words, rows, 4, 16))
    np.multiply(e2m1.VALUES[c].transpose(1, 0, 2, 3), e4m3.VALUES[s].transpose(1, 0, 2)[..., None], out=values)
    live = (s != 0) & ((c & np.uint8(7)) != 0).any(axis=3)
    exponents = tensorcore.EXPONENT[s]
    return Rows(
        c,
        s,
        values.reshape(words, rows, tensorcore.K),
        np.where(live, exponents, -NOTHING).max(axis=(0, 2)),
        np.where(live, exponents, NOTHING).min(axis=(0, 2)),
    )


# -- accumulation -----------------------------------------------------------------------------------------


def _toward_zero(a: Rows, b: Rows, model: str) -> F32:
    """Words in order under a model that rounds each running sum toward zero: (rows of a, rows of b)."""
    total = np.zeros((len(a.codes), len(b.codes)), np.float64)
    product = np.empty_like(total)
    exact = _exact_words(a, b)
    for w, (value_a, value_b) in enumerate(zip(a.values, b.values, strict=True)):
        if exact[w] or _within_bound(a, b, w, total):
            total += np.matmul(value_a, value_b.T, out=product)
            cut_to_24_bits(total, out=total)
        else:
            total = _windowed_word(a.words(slice(w, w + 1)), b.words(slice(w, w + 1)), total, model)
    return total.astype(np.float32) + np.float32(0)


# GEMM-EXACT-BOUND: a word loses nothing to the window, and its sum stays on the grid of the smallest group,
# while max(e(C), largest group exponent) − smallest group exponent so far <= 27.  Exponents are taken over a
# whole tile, so the bound is a sufficient one.


def _exact_words(a: Rows, b: Rows) -> AnyArray:
    """Words for which the bound holds whatever the elements: |C| is below the sum of 64·6·6·(scales) so far."""
    largest = a.largest + b.largest
    smallest = np.minimum.accumulate(a.smallest + b.smallest)
    ceiling = np.cumsum(64 * 36 * 4 * np.exp2(np.maximum(largest, -NOTHING).astype(np.float64)))
    limit = smallest + EXACT_SPREAD
    small = ceiling < np.exp2(np.minimum(limit, 1000).astype(np.float64))
    exact: AnyArray = (smallest >= NOTHING) | ((largest <= limit) & small)
    return exact


def _within_bound(a: Rows, b: Rows, w: int, c: F64) -> bool:
    """The bound for word ``w`` with the C that is really there."""
    limit = int((a.smallest + b.smallest)[: w + 1].min()) + EXACT_SPREAD
    return bool(a.largest[w] + b.largest[w] <= limit and np.abs(c).max(initial=0) < 2.0 ** (limit + 1))


def _windowed_word(a: Rows, b: Rows, c: F64, model: str) -> F64:
    """One word under the full model, every output's own window."""
    rows, columns = c.shape
    out = np.empty_like(c)
    step = max(1, 2**18 // (columns * tensorcore.K))
    codes_b = np.broadcast_to(b.codes.reshape(1, columns, 64), (step, columns, 64)).reshape(-1, 64)
    scales_b = np.broadcast_to(b.scales.reshape(1, columns, 4), (step, columns, 4)).reshape(-1, 4)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        count = (part.stop - start) * columns
        codes_a = np.repeat(a.codes[part].reshape(-1, 64), columns, axis=0)
        scales_a = np.repeat(a.scales[part].reshape(-1, 4), columns, axis=0)
        word = tensorcore.take_apart(
            codes_a, codes_b[:count], c[part].astype(np.float32).reshape(-1), scales_a, scales_b[:count]
        )
        out[part] = tensorcore.MODELS[model](word).reshape(-1, columns)
    return out


def _group64(a: Rows, b: Rows, model: str) -> F32:
    total = np.zeros((len(a.codes), len(b.codes)), np.float32)
    for value_a, value_b in zip(a.values, b.values, strict=True):
        total = add_toward_zero(total, (value_a @ value_b.T).astype(np.float32))
    return total


def _exact(a: Rows, b: Rows, model: str) -> F32:
    """The whole sum exactly, in units of 2^-20 in int64, rounded once to nearest even."""
    total = np.zeros((len(a.codes), len(b.codes)), np.int64)
    for value_a, value_b in zip(a.values, b.values, strict=True):
        total += np.ldexp(value_a @ value_b.T, 20).astype(np.int64)
    high = (total >> 32) << 32
    return add_nearest(np.ldexp(high.astype(np.float64), -20), np.ldexp((total - high).astype(np.float64), -20))


def _fp32(a: Rows, b: Rows, model: str) -> F32:
    total = np.zeros((len(a.codes), len(b.codes)), np.float32)
    for value_a, value_b in zip(a.values.astype(np.float32), b.values.astype(np.float32), strict=True):
        for k in range(tensorcore.K):
            total += np.outer(value_a[:, k], value_b[:, k])
    return total


_ACCUMULATE: dict[str, Callable[[Rows, Rows, str], F32]] = {"group64": _group64, "exact": _exact, "fp32": _fp32}


def accumulate(a: NVFP4Tensor, b: NVFP4Tensor, *, model: str = "blackwell", split_k: int = 1) -> F32:
    """The raw accumulators of a·bᵀ, (M, N) float32, before alpha: block scales applied, tensor scales not.

    ``split_k`` > 1 accumulates that many contiguous runs of words apart and adds the results in order in
    float32, as split-K kernels do; it changes bits (rule GEMM-SPLIT-K).
    """
    tensorcore.require_model(model)
    words = -(-a.shape[-1] // tensorcore.K)
    if not isinstance(split_k, int) or not 1 <= split_k <= words:
        raise ValueError(f"split_k is an integer from 1 to the {words} words of 64 along K; got {split_k!r}")
    (codes_a, scales_a, nan_a), (codes_b, scales_b, nan_b) = _decoded(a), _decoded(b)
    out = np.empty((len(codes_a), len(codes_b)), np.float32)
    for stripe in _pieces(len(codes_b), STRIPE):
        tiles_b = [(t, _rows(codes_b[t], scales_b[t])) for t in _pieces(stripe.stop, TILE, stripe.start)]
        for rows in _pieces(len(codes_a), TILE):
            part_a = _rows(codes_a[rows], scales_a[rows])
            for columns, part_b in tiles_b:
                out[rows, columns] = _tile(part_a, part_b, model, split_k)
    if nan_a.any() or nan_b.any():
        warnings.warn(
            f"{nan_a.sum()} rows of a and {nan_b.sum()} rows of b have NaN scale bytes; their outputs are NaN",
            RuntimeWarning,
            stacklevel=3,
        )
        out[nan_a] = NAN
        out[:, nan_b] = NAN
    return out


def _decoded(q: NVFP4Tensor) -> tuple[U8, U8, AnyArray]:
    """Codes, scales without sign and with zeros in rows that have a NaN scale, and which rows those are."""
    codes, scales = rows_of(q.codes), rows_of(q.scales) & np.uint8(0x7F)
    nan = (scales == e4m3.NAN_BYTE).any(axis=1)
    return codes, np.where(nan[:, None], np.uint8(0), scales), nan


def _pieces(stop: int, size: int, start: int = 0) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _tile(a: Rows, b: Rows, model: str, split_k: int) -> F32:
    """One tile of the accumulators."""
    run = _ACCUMULATE.get(model, _toward_zero)
    words = len(a.values)
    edges = [words * i // split_k for i in range(split_k + 1)]
    parts = [run(a.words(slice(*ends)), b.words(slice(*ends)), model) for ends in zip(edges, edges[1:], strict=False)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# -- epilogue ---------------------------------------------------------------------------------------------


def _jax_alpha(a: NVFP4Tensor, b: NVFP4Tensor, alpha: float) -> F32:
    scales = [q.amax / np.float32(q.arithmetic.element_max * q.arithmetic.e4m3_max) for q in (a, b)]
    return np.asarray(np.float32(alpha) * (scales[0] * scales[1]))


_ALPHA: dict[str, Callable[[NVFP4Tensor, NVFP4Tensor, float], F32]] = {
    # fl(fl(fl(alpha·A_a)·A_b)·fl(1/(36·maxA·maxB)))
    "pytorch": lambda a, b, alpha: partial_cast.alpha(
        a.amax, b.amax, alpha, e4m3_max=(a.arithmetic.e4m3_max, b.arithmetic.e4m3_max)
    ),
    # the grouped kernel has 448 built in
    "grouped": lambda a, b, alpha: partial_cast.alpha(a.amax, b.amax, alpha),
    # fl(alpha·fl(fl(A_a/2688)·fl(A_b/2688)))
    "jax": _jax_alpha,
    # the accumulators times alpha alone
    "none": lambda a, b, alpha: np.asarray(np.float32(alpha)),
}


def _scaled(total: F32, a: NVFP4Tensor, b: NVFP4Tensor, alpha: float, form: str) -> F32:
    """alpha and the tensor scales applied to the accumulators, float32."""
    if not (a.amax.ndim or b.amax.ndim) or form == "none":
        return total * _ALPHA[form](a, b, alpha)
    # row-scaled: the GEMM runs with amaxes of one, the amaxes follow in float32
    ones = [NVFP4Tensor(q.packed, q.scales, np.asarray(np.float32(1)), q.block, q.arithmetic) for q in (a, b)]
    out = total * _ALPHA[form](ones[0], ones[1], alpha)
    rows, columns = a.amax.reshape(-1, 1), b.amax.reshape(1, -1)
    if a.amax.ndim and b.amax.ndim:
        return (out * rows) * columns
    return out * (rows * columns)


def matmul(
    a: NVFP4Tensor,
    b: NVFP4Tensor,
    *,
    model: str = "blackwell",
    out_dtype: DTypeLike = np.float32,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Any = None,
    bias: Any = None,
    alpha_form: str = "pytorch",
    split_k: int = 1,
) -> AnyArray:
    """a·bᵀ of two NVFP4 tensors as a Blackwell GEMM computes it.

    Args:
        a: (M, K); b: (N, K), both with blocks along K.  K is a multiple of 32, as cuBLAS asks.
        model: a tensor core model of ``nvfp4ref.tensorcore.MODELS``.
        out_dtype: float32, bfloat16 or float16; one rounding at the end.
        alpha, beta: float32 factors; c: (M, N), needed when beta is not 0.
        bias: (N,), added in float32 before the output rounding.
        alpha_form: "pytorch", "grouped", "jax": the operation order of the tensor scales; "none": not applied.
        split_k: number of K ranges accumulated apart.
    Returns:
        (M, N) array of out_dtype; a computed NaN is 0x7FFFFFFF (0x7FFF).
    Raises:
        TypeError, ValueError: operands that are not NVFP4Tensors, different or unaligned K, unknown names,
            beta without c, shapes of c and bias.
    Warns:
        RuntimeWarning: NaN scale bytes, whose rows and columns come out NaN.
    """
    require_subnormals()
    _check(as_tensor(a), as_tensor(b), alpha_form, out_dtype)
    total = accumulate(a, b, model=model, split_k=split_k)
    with np.errstate(all="ignore"):
        out = _scaled(total, a, b, alpha, alpha_form)
        if beta != 0:
            out = _add_source(total, out, a, b, alpha, alpha_form, np.float32(beta), _source(c, out.shape))
        if bias is not None:
            out = out + _vector(bias, out.shape[1])
        return _output(canonical_nan(out), np.dtype(out_dtype))


def _check(a: NVFP4Tensor, b: NVFP4Tensor, alpha_form: str, out_dtype: DTypeLike) -> None:
    k = a.shape[-1]
    if b.shape[-1] != k:
        raise ValueError(
            f"a {a.shape} and b {b.shape} have different K (last axis): matmul computes a·bᵀ, both with blocks "
            "along K; quantize the other operand along the axis it shares (axis=0 for the transpose)"
        )
    if k % 32:
        raise ValueError(f"K is a multiple of 32 in an FP4 GEMM; got {k}: pad both operands with zeros")
    if alpha_form not in _ALPHA:
        raise ValueError(f"unknown alpha form {alpha_form!r}; the forms are {', '.join(_ALPHA)}")
    if np.dtype(out_dtype) not in (np.float32, np.float16, bfloat16):
        raise TypeError(f"matmul gives float32, bfloat16 or float16; got {np.dtype(out_dtype)}")


def _source(c: Any, shape: tuple[int, ...]) -> F32:
    if c is None:
        raise ValueError("beta is not 0, so c is needed: a float array of the output's shape")
    source = as_float32(c)
    if source.shape != shape:
        raise ValueError(f"c has the output's shape {shape}; got {source.shape}")
    return source


def _vector(bias: Any, columns: int) -> F32:
    vector = as_float32(bias)
    if vector.shape != (columns,):
        raise ValueError(f"bias has one value for each of the {columns} columns; got shape {vector.shape}")
    return vector


def _add_source(
    total: F32, scaled: F32, a: NVFP4Tensor, b: NVFP4Tensor, alpha: float, form: str, beta: np.float32, c: F32
) -> F32:
    """fma(alpha, accumulator, fl(beta·c)) (rule GEMM-EPILOGUE); row-scaled outputs are added to afterwards."""
    if a.amax.ndim or b.amax.ndim:
        return scaled + beta * c
    product = total.astype(np.float64) * np.float64(_ALPHA[form](a, b, alpha))  # exact: 24 by 24 bits
    source = beta * c
    finite = np.isfinite(product) & np.isfinite(source)
    fused = add_nearest(np.where(finite, product, 0), np.where(finite, source, 0))
    return np.where(finite, fused, scaled + source)


def _output(out: F32, dtype: Any) -> AnyArray:
    if dtype == bfloat16:
        return to_bfloat16(out).view(bfloat16)
    return to_float16(out).view(np.float16) if dtype == np.float16 else out

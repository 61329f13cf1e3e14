"""Block-scaled matmul of NVFP4 tensors, bit for bit under a tensor core model.

Accumulation (GEMM-ACCUMULATE): words of 64 along K in ascending order, each word's C the D of the one before,
starting from +0.  A word's exact sum is a multiple of 2^-20 below 2^29, so a 64-wide float64 product is exact
in any order, and rounding toward zero to float32 is one bit mask.  That gives the model's bits wherever its
window cuts nothing off, which the exponents tell beforehand (GEMM-EXACT-BOUND); elsewhere the window is applied,
to the exact sums of the four groups.
Epilogue (GEMM-ALPHA, GEMM-EPILOGUE): alpha in the framework's operation order, beta·C, bias, output rounding.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from . import e2m1, e4m3, partial_cast, tensorcore
from .arrays import as_float32
from .container import counted
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
    through,
    to_bfloat16,
    to_float16,
)
from .tensor import NVFP4Tensor, as_tensor, rows_of

BLOCK = 64  # rows and columns of one float64 product: the largest that BLAS does on the calling thread alone
TILE = 512  # columns of the output worked on at a time: their sums and products fit the cache
STRIPE = 4096  # rows of b kept decoded
EXACT_SPREAD = 27  # exponents apart that the window still holds whole
NOTHING = 500  # stands for an exponent where there is no live group


class Rows(NamedTuple):
    """Some rows of one operand, K padded with zeros to whole words, and what every word needs of them."""

    values: F64  # code·scale, exact; of a (words, rows, 64), of b in blocks of rows: (words, blocks, 64, BLOCK)
    codes: U8  # (rows, words, 64)
    scales: U8  # (rows, words, 4), sign bit cleared, NaN made 0
    largest: AnyArray  # (words,): largest exponent of a non-zero scale
    smallest: AnyArray  # (words,): smallest exponent of a live group, one whose scale and some element are not zero

    def words(self, part: slice) -> Rows:
        return Rows(
            self.values[part], self.codes[:, part], self.scales[:, part], self.largest[part], self.smallest[part]
        )


def _rows(codes: U8, scales: U8) -> Rows:
    """Codes (rows, K) and scales (rows, K/16) decoded for the words, as operand a has them."""
    rows, k = codes.shape
    words = -(-k // tensorcore.K)
    c = np.zeros((rows, words * 4, 16), np.uint8)
    c.reshape(rows, -1)[:, :k] = codes
    s = np.zeros((rows, words * 4), np.uint8)
    s[:, : k // 16] = scales
    live = (s != 0) & ((c & np.uint8(7)).max(axis=2) != 0)
    exponents = tensorcore.EXPONENT[s]
    largest = np.where(s != 0, exponents, -NOTHING).reshape(rows, words, 4).max(axis=(0, 2))
    smallest = np.where(live, exponents, NOTHING).reshape(rows, words, 4).min(axis=(0, 2))
    c, s = c.reshape(rows, words, 64), s.reshape(rows, words, 4)
    elements = e2m1.VALUES[c.transpose(1, 0, 2)].reshape(words, rows, 4, 16)
    values = np.multiply(elements, e4m3.VALUES[s.transpose(1, 0, 2)][..., None], dtype=np.float64)
    return Rows(values.reshape(words, rows, 64), c, s, largest, smallest)


def _columns(codes: U8, scales: U8) -> Rows:
    """The same as operand b has them: rows padded with zeros to whole blocks, each block's values transposed."""
    padding = ((0, -len(codes) % BLOCK), (0, 0))
    rows = _rows(np.pad(codes, padding), np.pad(scales, padding))
    blocks = rows.values.reshape(len(rows.values), -1, BLOCK, 64)
    return rows._replace(values=np.ascontiguousarray(blocks.transpose(0, 1, 3, 2)))


# -- accumulation: tiles of the output are (blocks, rows, BLOCK), column blocks first ---------------------------


def _zeros(a: Rows, b: Rows, dtype: DTypeLike) -> AnyArray:
    return np.zeros((b.values.shape[1], a.values.shape[1], BLOCK), dtype)


def _toward_zero(a: Rows, b: Rows, model: str) -> F32:
    """Words in order under a model that rounds each running sum toward zero."""
    total = _zeros(a, b, np.float64)
    product = np.empty_like(total)
    exact = _exact_words(a, b)
    for w in range(len(a.values)):
        if exact[w] or _within_bound(a, b, w, total):
            total += np.matmul(a.values[w], b.values[w], out=product)
            cut_to_24_bits(total, out=total)
        else:
            total = _windowed_word(a, b, w, total, model)
    return total.astype(np.float32) + np.float32(0)


# GEMM-EXACT-BOUND: a word loses nothing to the window, and its sum stays on the grid of the smallest group,
# while max(e(C), largest group exponent) − smallest group exponent so far <= 27.  Exponents are taken over a
# whole tile, and the largest over groups of zeros too, so the bound is a sufficient one, for every model.


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
    return bool(a.largest[w] + b.largest[w] <= limit and max(c.max(), -c.min()) < 2.0 ** (limit + 1))


# The window by the rules of tensorcore, for a tile of outputs at once.  The exponents of a group's products are
# added up as weights 32^(e + 1), of which the largest of 16 stands out.

_WEIGHT = np.where(e2m1.VALUES == 0, 0.0, np.exp2(5.0 * (tensorcore.ELEMENT_EXPONENT + 1)))


def _grouped(a: F64, b: F64, width: int) -> F64:
    """Sums of ``width`` consecutive products of one word: (64/width, blocks, rows, BLOCK), exact."""
    left = a.reshape(len(a), -1, width).transpose(1, 0, 2)[:, None]
    right = b.reshape(len(b), -1, width, BLOCK).transpose(1, 0, 2, 3)
    sums: F64 = left @ right
    return sums


def _windowed_word(a: Rows, b: Rows, w: int, c: F64, model: str) -> F64:
    """One word under the full model, every output's own window (MMA-WINDOW, MMA-ROUND)."""
    blocks = len(c)
    exponent_b = tensorcore.EXPONENT[b.scales[:, w]].T.reshape(4, blocks, 1, BLOCK)
    exponents = tensorcore.EXPONENT[a.scales[:, w]].T[:, None, :, None] + exponent_b
    weight_b = _WEIGHT[b.codes[:, w]].reshape(blocks, BLOCK, 64).transpose(0, 2, 1)
    peak = _grouped(_WEIGHT[a.codes[:, w]] * (a.values[w] != 0), weight_b * (b.values[w] != 0), 16)
    c_exponent = np.where(c == 0, tensorcore.DEAD, np.frexp(c)[1] - 1)
    if model == "blackwell-snapshot":
        live = (a.scales[:, w] != 0).T[:, None, :, None] & (b.scales[:, w] != 0).T.reshape(exponent_b.shape)
    else:
        live = peak != 0
    scale_exponent = np.where(live, exponents, tensorcore.DEAD).max(axis=0)
    groups = _grouped(a.values[w], b.values[w], 16)
    if not model.startswith("window39"):
        floor = np.maximum(scale_exponent, c_exponent) - 35
        return _cut_at(floor, c, groups)
    # peak lies in [32^(e + 2), 32^(e + 3)), e the largest exponent of the group's products
    product_exponent = np.where(live, exponents + (np.frexp(peak)[1] - 1) // 5 - 2, tensorcore.DEAD).max(axis=0)
    c_leads = (c != 0) & (c_exponent >= product_exponent)
    floor = np.maximum(np.maximum(product_exponent, c_exponent) - 39, scale_exponent - 35)
    floor = np.where(c_leads, c_exponent - 35, floor)
    if model == "window39-k16":
        return _cut_at(floor, c, groups)
    return np.where(c_leads, _cut_at(floor, c, groups), _cut_at(floor, c, _grouped(a.values[w], b.values[w], 4)))


def _cut_at(floor: AnyArray, c: F64, parts: F64) -> F64:
    """C and the parts cut toward zero at 2^floor, added exactly, cut to 24 bits."""
    total = np.trunc(np.ldexp(c, -floor))
    for part in parts:
        total += np.trunc(np.ldexp(part, -floor))
    return np.ldexp(cut_to_24_bits(total), floor)


def _group64(a: Rows, b: Rows, model: str) -> F32:
    total = _zeros(a, b, np.float32)
    for value_a, value_b in zip(a.values, b.values, strict=True):
        total = add_toward_zero(total, (value_a @ value_b).astype(np.float32))
    return total


def _exact(a: Rows, b: Rows, model: str) -> F32:
    """The whole sum exactly, in units of 2^-20 in int64, rounded once to nearest even."""
    total = _zeros(a, b, np.int64)
    for value_a, value_b in zip(a.values, b.values, strict=True):
        total += np.ldexp(value_a @ value_b, 20).astype(np.int64)
    high = (total >> 32) << 32
    return add_nearest(np.ldexp(high.astype(np.float64), -20), np.ldexp((total - high).astype(np.float64), -20))


def _fp32(a: Rows, b: Rows, model: str) -> F32:
    total = _zeros(a, b, np.float32)
    for value_a, value_b in zip(a.values.astype(np.float32), b.values.astype(np.float32), strict=True):
        for k in range(tensorcore.K):
            total += value_a[:, k, None] * value_b[:, k, None, :]
    return total


_ACCUMULATE: dict[str, Callable[[Rows, Rows, str], F32]] = {"group64": _group64, "exact": _exact, "fp32": _fp32}


def accumulate(
    a: NVFP4Tensor, b: NVFP4Tensor, *, model: str = "blackwell", split_k: int = 1, threads: int | None = None
) -> F32:
    """The raw accumulators of a·bᵀ, (M, N) float32, before alpha: block scales applied, tensor scales not.

    ``split_k`` > 1 accumulates that many contiguous runs of words apart and adds the results in order in
    float32, as split-K kernels do; it changes bits (rule GEMM-SPLIT-K).  ``threads``: None takes every core
    that the process may use; the result does not depend on them.
    """
    tensorcore.require_model(model)
    words = -(-a.shape[-1] // tensorcore.K)
    if not isinstance(split_k, int) or not 1 <= split_k <= words:
        raise ValueError(f"split_k is an integer from 1 to the {words} words of 64 along K; got {split_k!r}")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is a positive integer or None; got {threads!r}")
    (codes_a, scales_a, nan_a), (codes_b, scales_b, nan_b) = _decoded(a), _decoded(b)
    out = np.empty((len(codes_a), len(codes_b)), np.float32)
    with ThreadPoolExecutor(threads or _cores()) as pool:
        for stripe in _pieces(len(codes_b), STRIPE):
            tiles = _pieces(stripe.stop, TILE, stripe.start)
            parts_b = list(pool.map(lambda t: _columns(codes_b[t], scales_b[t]), tiles))

            def work(rows: slice, tiles: list[slice] = tiles, parts_b: list[Rows] = parts_b) -> None:
                part_a = _rows(codes_a[rows], scales_a[rows])
                for columns, part_b in zip(tiles, parts_b, strict=True):
                    tile = _tile(part_a, part_b, model, split_k).transpose(1, 0, 2)
                    out[rows, columns] = tile.reshape(len(tile), -1)[:, : columns.stop - columns.start]

            list(pool.map(work, _pieces(len(codes_a), BLOCK)))
    if nan_a.any() or nan_b.any():
        warnings.warn(
            f"{counted(nan_a.sum(), 'row')} of a and {counted(nan_b.sum(), 'row')} of b have NaN scale bytes; "
            "their outputs are NaN",
            RuntimeWarning,
            stacklevel=3,
        )
        out[nan_a] = NAN
        out[:, nan_b] = NAN
    return out


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _largest_value(q: NVFP4Tensor) -> float:
    """What amax was mapped to: 6·448 or 6·256, less with headroom."""
    return q.arithmetic.element_max * q.arithmetic.e4m3_max


def _pytorch_alpha(a: NVFP4Tensor, b: NVFP4Tensor, alpha: float) -> F32:
    factor = np.float32(1) / np.float32(_largest_value(a) * _largest_value(b))
    return ((np.float32(alpha) * a.amax) * b.amax) * factor


def _jax_alpha(a: NVFP4Tensor, b: NVFP4Tensor, alpha: float) -> F32:
    scale_a, scale_b = (q.amax / np.float32(_largest_value(q)) for q in (a, b))
    return np.float32(alpha) * (scale_a * scale_b)


_ALPHA: dict[str, Callable[[NVFP4Tensor, NVFP4Tensor, float], F32]] = {
    # fl(fl(fl(alpha·A_a)·A_b)·fl(1/(36·maxA·maxB)))
    "pytorch": _pytorch_alpha,
    # the grouped kernel has 448 built in
    "grouped": lambda a, b, alpha: partial_cast.alpha(a.amax, b.amax, alpha),
    # fl(alpha·fl(fl(A_a/2688)·fl(A_b/2688)))
    "jax": _jax_alpha,
    # the accumulators times alpha alone
    "none": lambda a, b, alpha: np.asarray(np.float32(alpha)),
}


def _row_scaled(total: F32, a: NVFP4Tensor, b: NVFP4Tensor, alpha: float, form: str) -> F32:
    """A GEMM with amaxes of one, then the amaxes of rows and columns in float32."""
    ones = [NVFP4Tensor(q.packed, q.scales, np.asarray(np.float32(1)), q.block, q.arithmetic) for q in (a, b)]
    out = total * _ALPHA[form](ones[0], ones[1], alpha)
    rows, columns = a.amax.reshape(-1, 1), b.amax.reshape(1, -1)
    if rows.size > 1 and columns.size > 1:
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
    threads: int | None = None,
) -> AnyArray:
    """a·bᵀ of two NVFP4 tensors as a Blackwell GEMM computes it.

    Args:
        a: (M, K); b: (N, K), both with blocks along K.  K is a multiple of 32, as cuBLAS asks.
        model: a tensor core model of ``nvfp4ref.tensorcore.MODELS``.
        out_dtype: float32, bfloat16 or float16; one rounding at the end.
        alpha, beta: float32 factors; c: (M, N), needed when beta is not 0.
        bias: (N,), added in float32 before the output rounding; of row-scaled operands also before c.
        alpha_form: "pytorch", "grouped", "jax": the operation order of the tensor scales; "none": not applied.
        split_k: number of K ranges accumulated apart.
        threads: worker threads, None for every core that the process may use; the result does not depend on them.
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
    alpha, beta = _factor(alpha, "alpha"), _factor(beta, "beta")
    shape = (len(rows_of(a.packed)), len(rows_of(b.packed)))
    source = None if beta == 0 else _source(c, shape)
    added = None if bias is None else _vector(bias, shape[1])
    total = accumulate(a, b, model=model, split_k=split_k, threads=threads)
    row_scaled = alpha_form != "none" and bool(a.amax.ndim or b.amax.ndim)
    with np.errstate(all="ignore"):
        if row_scaled:
            out = _row_scaled(total, a, b, alpha, alpha_form)
        else:
            factor = _ALPHA[alpha_form](a, b, alpha)
            out = total * factor if source is None else _fused(total, factor, np.float32(beta) * source)
        if added is not None:
            out = out + added
        if row_scaled and source is not None:
            # the output is finished and rounded before it is added to what was there
            out = through(canonical_nan(out), np.dtype(out_dtype).name) + np.float32(beta) * source
        return _output(canonical_nan(out), np.dtype(out_dtype))


def _factor(value: Any, name: str) -> float:
    """A factor as a number; TypeError for anything else."""
    if isinstance(value, str) or np.ndim(value):
        raise TypeError(f"{name} is one number; got {value!r}")
    return float(value)


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


def _fused(total: F32, alpha: F32, source: F32) -> F32:
    """fma(alpha, accumulator, source) with source = fl(beta·c) (rule GEMM-EPILOGUE)."""
    product = total.astype(np.float64) * np.float64(alpha)  # exact: 24 by 24 bits
    finite = np.isfinite(product) & np.isfinite(source)
    fused = add_nearest(np.where(finite, product, 0), np.where(finite, source, 0))
    return np.where(finite, fused, total * alpha + source)


def _output(out: F32, dtype: Any) -> AnyArray:
    if dtype == bfloat16:
        return to_bfloat16(out).view(bfloat16)
    return to_float16(out).view(np.float16) if dtype == np.float16 else out

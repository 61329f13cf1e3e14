"""nvfp4hw.jaxpath.matmul: the oracle's bits where float32 sums are exact, within the derived bounds elsewhere."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from nvfp4hw import jaxpath  # noqa: E402
from nvfp4hw.jaxpath.check import UNIT, bounds, outside  # noqa: E402

Array = np.ndarray[Any, Any]
BF16, F32, F16 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.float16))
M, N, K = 32, 48, 64


def operand(rows: int, seed: int, amax: Any = 1.0, arithmetic: Any = "te", k: int = K) -> nv.NVFP4Tensor:
    """Any codes under scales of 1/2, 1 and 2 of either sign: products are multiples of 1/16, sums of them exact."""
    random = np.random.default_rng(seed)
    packed = random.integers(0, 256, (rows, k // 2), np.uint8)
    scales = random.choice(np.array([0x30, 0x38, 0x40, 0xB8], np.uint8), (rows, k // 16))
    return nv.NVFP4Tensor(packed, scales, np.asarray(amax, np.float32), (1, 16), nv.arithmetic(arithmetic))


def on_jax(q: nv.NVFP4Tensor) -> jaxpath.NVFP4Array:
    return jaxpath.NVFP4Array(jnp.asarray(q.packed), jnp.asarray(q.scales), jnp.asarray(q.amax), q.block, q.arithmetic)


def bits(x: Any) -> Array:
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def assert_equal(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor, **how: Any) -> None:
    expected = nv.matmul(a, b, model="exact", **how)
    found = jaxpath.matmul(on_jax(a), on_jax(b), **how)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(bits(found), bits(expected), err_msg=str(how))


# -- the epilogue ----------------------------------------------------------------------------------------------

AMAXES = [(3.7, 0.013), (1e-21, 3e-20), (3e38, 2e3), (1e-45, 1.0), (0.0, 5.0), (np.inf, 1.0), (np.nan, 1.0)]
ROWS = np.geomspace(1e-3, 1e3, M).astype(np.float32)
COLUMNS = np.geomspace(1e-20, 1e20, N).astype(np.float32)
ROW_SCALED = nv.arithmetic("te", row_scaled=True)


def test_alpha_has_a_sign_even_where_it_is_zero() -> None:
    """Equal numbers to Python, and so to a cache that they are keys of."""
    a, b = operand(M, 1), operand(N, 2)
    for alpha in (0.0, -0.0, 0, 2, -1e-40, float("nan")):
        assert_equal(a, b, alpha=alpha)
    found = jax.jit(lambda alpha: jaxpath.matmul(on_jax(a), on_jax(b), alpha=alpha))(jnp.float32(0.7))
    np.testing.assert_array_equal(bits(found), bits(nv.matmul(a, b, model="exact", alpha=0.7)))
    for wrong in ("2", True, None, jnp.ones(2)):
        with pytest.raises(TypeError, match="alpha is a number, or a float32 array of no dimension"):
            jaxpath.matmul(on_jax(a), on_jax(b), alpha=wrong)


@pytest.mark.parametrize("form", ["pytorch", "jax", "none"])
@pytest.mark.parametrize(("dtype", "alpha", "bias"), [(F32, 0.7, None), (BF16, 1.0, F32), (F16, 1.0, BF16)])
def test_equals_the_oracle_where_sums_are_exact(form: str, dtype: Any, alpha: float, bias: Any) -> None:
    added = None if bias is None else np.random.default_rng(9).standard_normal(N).astype(bias)
    for amax_a, amax_b in AMAXES:
        a, b = operand(M, 1, amax_a), operand(N, 2, amax_b)
        assert_equal(a, b, out_dtype=dtype, alpha=alpha, alpha_form=form, bias=added)


HEADROOM = nv.arithmetic("te", headroom=16 / 17, e4m3_max=256)  # one rounding of the product with te's, or two


@pytest.mark.parametrize("arithmetics", [("te", "four-over-six"), ("te", HEADROOM)])
@pytest.mark.parametrize("form", ["pytorch", "jax"])
def test_alpha_of_other_largest_values(arithmetics: tuple[Any, Any], form: str) -> None:
    for amax in (1.0, 3.7, 0.1):
        assert_equal(operand(M, 3, amax, arithmetics[0]), operand(N, 4, 0.7, arithmetics[1]), alpha_form=form)


@pytest.mark.parametrize("form", ["pytorch", "jax", "none"])
def test_amaxes_of_rows(form: str) -> None:
    rows, columns = operand(M, 5, ROWS, ROW_SCALED), operand(N, 6, COLUMNS, ROW_SCALED)
    assert_equal(rows, operand(N, 6, 0.3), alpha_form=form, out_dtype=BF16)
    if form == "pytorch":
        assert_equal(operand(M, 5, 0.3), columns, alpha_form=form)
        assert_equal(rows, columns, alpha_form=form, bias=ROWS[:1].repeat(N))


def test_zeros_are_positive_and_scales_have_no_sign() -> None:
    a, b = operand(M, 7), operand(N, 8)
    minus_zero = nv.NVFP4Tensor(np.full_like(a.packed, 0x88), a.scales, a.amax, a.block, a.arithmetic)
    assert_equal(minus_zero, b)
    assert not bits(jaxpath.matmul(on_jax(minus_zero), on_jax(b))).any()
    unsigned = nv.NVFP4Tensor(a.packed, a.scales & np.uint8(0x7F), a.amax, a.block, a.arithmetic)
    np.testing.assert_array_equal(jaxpath.matmul(on_jax(a), on_jax(b)), jaxpath.matmul(on_jax(unsigned), on_jax(b)))


def test_a_nan_scale_byte_makes_its_row_nan() -> None:
    a, b = operand(M, 1), operand(N, 2)
    a.scales[3, 1], b.scales[5, 0] = 0x7F, 0xFF
    with pytest.warns(RuntimeWarning, match="NaN scale bytes"):
        assert_equal(a, b)


def test_compiled_batched_and_with_leading_dimensions() -> None:
    a, b = operand(M, 1, 3.7), operand(N, 2, 0.7)
    expected = bits(nv.matmul(a, b, model="exact"))
    np.testing.assert_array_equal(bits(jax.jit(jaxpath.matmul)(on_jax(a), on_jax(b))), expected)
    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), on_jax(a), on_jax(operand(M, 3, 0.1)))
    found = jax.jit(jax.vmap(jaxpath.matmul, in_axes=(0, None)))(both, on_jax(b))
    np.testing.assert_array_equal(bits(found[0]), expected)
    np.testing.assert_array_equal(bits(found[1]), bits(nv.matmul(operand(M, 3, 0.1), b, model="exact")))
    folded = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]) if x.ndim else x, on_jax(a))
    np.testing.assert_array_equal(bits(jaxpath.matmul(folded, on_jax(b))), expected)


A, B = operand(M, 1), operand(N, 2)
ERRORS: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
    (TypeError, "takes NVFP4Arrays", A, B, {}),
    (ValueError, "different K", on_jax(A), on_jax(operand(N, 2, k=32)), {}),
    (ValueError, "multiple of 32 in an FP4 GEMM; got 48", on_jax(operand(M, 1, k=48)), on_jax(operand(N, 1, k=48)), {}),
    (ValueError, "unknown alpha form 'grouped'", on_jax(A), on_jax(B), {"alpha_form": "grouped"}),
    (TypeError, "gives float32, bfloat16 or float16; got int32", on_jax(A), on_jax(B), {"out_dtype": jnp.int32}),
    (ValueError, "each of the 48 columns", on_jax(A), on_jax(B), {"bias": jnp.zeros(M)}),
    (TypeError, "bias is a float32, .* got int32", on_jax(A), on_jax(B), {"bias": jnp.zeros(N, jnp.int32)}),
    (TypeError, "bias is a float32, .* got list", on_jax(A), on_jax(B), {"bias": [0.0] * N}),
]


@pytest.mark.parametrize(("error", "words", "a", "b", "how"), ERRORS, ids=[case[1][:30] for case in ERRORS])
def test_errors_while_tracing(error: type[Exception], words: str, a: Any, b: Any, how: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: jaxpath.matmul(a, b, **how))


# -- the bounds ------------------------------------------------------------------------------------------------


def decades(rows: int, k: int, seed: int) -> nv.NVFP4Tensor:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, k)) * np.exp2(random.integers(-12, 3, (rows, k)))
    return nv.quantize(x.astype(np.float32))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_float32_sums_in_any_order_are_within_the_bounds(dtype: Any) -> None:
    a, b = decades(M, 512, 1), decades(N, 512, 2)
    ends = bounds(a, b, dtype)
    assert outside(np.asarray(jaxpath.matmul(on_jax(a), on_jax(b), out_dtype=dtype)), ends) == 0
    for model in ("exact", "fp32"):
        assert outside(nv.matmul(a, b, model=model, out_dtype=dtype), ends) == 0
    # the tensor core rounds toward zero
    assert outside(nv.matmul(a, b, model="blackwell", out_dtype=dtype), bounds(a, b, dtype, 2 * UNIT)) == 0


def test_most_bfloat16_numbers_have_one_possible_value() -> None:
    low, high = bounds(decades(M, 512, 1), decades(N, 512, 2), BF16)
    assert (low == high).mean() > 0.8  # of sums of 512: the rest lie near a tie


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_small_faults_are_out_of_bounds(dtype: Any) -> None:
    """One scale byte of 1024 off by one; the least significant bit of one code; one block left out; bfloat16 sums."""
    a, b = decades(M, 512, 1), decades(N, 512, 2)
    ends = bounds(a, b, dtype)
    largest = np.unravel_index(a.scales.argmax(), a.scales.shape)
    scales, packed = a.scales.copy(), a.packed.copy()
    scales[largest] -= 1
    packed[0, 0] ^= 1
    for wrong in (
        nv.NVFP4Tensor(a.packed, scales, a.amax, a.block, a.arithmetic),
        nv.NVFP4Tensor(packed, a.scales, a.amax, a.block, a.arithmetic),
    ):
        found = np.asarray(jaxpath.matmul(on_jax(wrong), on_jax(b), out_dtype=dtype))
        assert 0 < outside(found, ends) <= N
    coarse = sum(nv.matmul(*(part(q, i) for q in (a, b)), out_dtype=BF16).astype(np.float32) for i in range(4))
    assert outside(np.asarray(coarse).astype(dtype), ends) > 0.1 * coarse.size


def part(q: nv.NVFP4Tensor, i: int) -> nv.NVFP4Tensor:
    """The i-th quarter of K = 512."""
    packed, scales = q.packed[:, 64 * i : 64 * i + 64], q.scales[:, 8 * i : 8 * i + 8]
    return nv.NVFP4Tensor(packed, scales, q.amax, q.block, q.arithmetic)


def test_nan_is_within_nan_alone() -> None:
    a, b = operand(M, 1, np.nan), operand(N, 2)
    ends = bounds(a, b)
    assert outside(np.full((M, N), np.nan, np.float32), ends) == 0
    assert outside(np.zeros((M, N), np.float32), ends) == M * N

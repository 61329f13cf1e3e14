"""nvfp4hw.jaxpath.linear: the operands of its three GEMMs bit for bit, y, dx and dw within the derived bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from nvfp4ref.recipe import GEMMS, RECIPES, Recipe, recipe

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from nvfp4hw import jaxpath  # noqa: E402
from nvfp4hw.jaxpath import stochastic  # noqa: E402
from nvfp4hw.jaxpath.check import bounds, check, outside, words  # noqa: E402
from nvfp4hw.jaxpath.linear import Call, dot_general, linear, observed  # noqa: E402

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
T, K, N = 64, 96, 32
KEY = jax.random.key(5)

OPERANDS = [f"{gemm} {o.tensor}" for gemm in GEMMS for o in recipe("te").operands(gemm)]
SWITCHES: dict[str, dict[str, Any]] = {
    "nearest": {"disable_stochastic_rounding": True},
    "1x16 weights": {"disable_2d_quantization": True},
    "no transform, nearest": {"disable_rht": True, "disable_stochastic_rounding": True},
    "4over6 weights": {"nvfp4_4over6": "weights"},
    "4over6 MSE 448": {"nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE", "nvfp4_4over6_e4m3_use_256": "none"}
    | {"disable_rht": True},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "high_precision": {"backward_override": "high_precision"},
    "dequantized": {"backward_override": "dequantized"},
    "dequantized, row-scaled 4over6": {"backward_override": "dequantized", "row_scaled_activation": True}
    | {"nvfp4_4over6": "all", "disable_rht": True},
}


def tensors(seed: int = 0) -> tuple[Array, Array, Array]:
    """x and w over many binades, float32; dy bfloat16."""
    random = np.random.default_rng(seed)
    x, w, dy = (
        (random.standard_normal(shape) * np.exp2(random.integers(low, low + 6, shape))).astype(np.float32)
        for shape, low in (((T, K), -3), ((N, K), -6), ((T, N), -12))
    )
    return x, w, dy.astype(BF16)


X, W, DY = tensors()


def differentiate(x: Any, w: Any, dy: Any, key: Any, chosen: str | Recipe) -> tuple[Any, Any, Any]:
    y, gradients = jax.vjp(lambda x, w: linear(x, w, key, chosen), x, w)
    return y, *gradients(dy)


def call_of(chosen: str | Recipe) -> tuple[Call, list[Array]]:
    """One differentiated call, and the y, dx and dw that it returned."""
    calls: list[Call] = []
    with observed(calls.append):
        found = differentiate(jnp.asarray(X), jnp.asarray(W), jnp.asarray(DY), KEY, chosen)
        jax.effects_barrier()
    (call,) = calls
    return call, [np.asarray(a) for a in found]


# -- against the oracle ----------------------------------------------------------------------------------------


ALL = RECIPES | {name: recipe("te", **changes) for name, changes in SWITCHES.items()}


@pytest.mark.parametrize("name", ALL)
def test_three_products(name: str) -> None:
    """RECIPE-FPROP, RECIPE-DGRAD, RECIPE-WGRAD"""
    chosen = ALL[name]
    call, (y, dx, dw) = call_of(chosen)
    assert (y.dtype, dx.dtype, dw.dtype) == (BF16, np.float32, np.float32)
    assert check(call) == dict.fromkeys([*OPERANDS, *GEMMS], 0)

    np.testing.assert_array_equal(call.x, X.astype(BF16))
    np.testing.assert_array_equal(call.w, W.astype(BF16))
    np.testing.assert_array_equal(call.dy, DY)
    for name_, found in zip(GEMMS, (y, dx, dw), strict=True):
        np.testing.assert_array_equal(found, call.results[name_])

    row, column = (np.asarray(stochastic.words(jax.random.fold_in(KEY, i), s)) for i, s in enumerate([(T, N), (N, T)]))
    stochastically = not chosen.disable_stochastic_rounding
    given = ({"rng": row}, {"rng": column}) if stochastically else ({}, {})
    for model in ("exact", "blackwell"):
        expected = {
            "fprop": nv.linear.fprop(call.x, call.w, chosen, model=model),
            "dgrad": nv.linear.dgrad(DY, call.w, chosen, model=model, **given[0]),
            "wgrad": nv.linear.wgrad(DY, call.x, chosen, model=model, **given[1]),
        }
        for gemm in GEMMS:
            ends = bounds(*call.operands[gemm], expected[gemm].dtype, 2.0 ** (-24 if model == "exact" else -23))
            assert outside(expected[gemm], ends) == outside(call.results[gemm], ends) == 0, (gemm, model)


def test_an_infinite_weight_agrees() -> None:
    """Where sums of 0 meet an infinite scale the result is NaN, which no end of an interval is."""
    w, calls = W.copy(), []
    w[3, 5] = -np.inf
    nearest = recipe("te", disable_stochastic_rounding=True)
    with observed(calls.append):
        differentiate(jnp.asarray(X), jnp.asarray(w), jnp.asarray(DY), None, nearest)
        jax.effects_barrier()
    assert not np.isfinite(calls[0].results["dgrad"].astype(np.float32)).any()
    assert not any(check(calls[0]).values())


@pytest.mark.parametrize("name", OVERRIDES)
def test_backward_override(name: str) -> None:
    """fprop is quantized; the gradients are those of the bfloat16 tensors, or of what fprop multiplied."""
    call, (y, dx, dw) = call_of(recipe("te", **OVERRIDES[name]))
    assert check(call) == dict.fromkeys(["fprop x", "fprop w", *GEMMS], 0)
    assert call.keys is None
    x, w = call.x, call.w
    if name != "high_precision":
        x, w = (nv.dequantize(q, BF16) for q in call.operands["fprop"])
    dy, x, w = (t.astype(np.float64) for t in (DY, x, w))
    np.testing.assert_allclose(dw, dy.T @ x, atol=1e-5 * np.abs(dy.T @ x).max())
    np.testing.assert_allclose(dx, dy @ w, rtol=2.0**-8, atol=1e-5 * np.abs(dy @ w).max())
    if name == "dequantized":
        assert np.abs(dw - dy.T @ X.astype(BF16).astype(np.float64)).max() > 1e-2 * np.abs(dw).max()


def test_faults_are_seen() -> None:
    """A code, a scale byte, an amax, a stochastic code rounded with other words, and numbers of y and dw."""
    call, _ = call_of("te")
    a, b = call.operands["dgrad"]
    packed, scales = a.packed.copy(), b.scales.copy()
    packed[3, 4] ^= 0x10
    scales[5, 1] += 1
    wrong_a = nv.NVFP4Tensor(packed, a.scales, np.nextafter(a.amax, np.float32(0)), a.block, a.arithmetic)
    wrong_b = nv.NVFP4Tensor(b.packed, scales, b.amax, b.block, b.arithmetic)
    y, dw = call.results["fprop"].copy(), call.results["wgrad"].copy()
    y.view(np.uint16)[7, :2] ^= 4
    dw[9, 9] += np.abs(dw).max() / 1000
    found = check(
        call._replace(
            operands={**call.operands, "dgrad": (wrong_a, wrong_b)},
            results={**call.results, "fprop": y, "wgrad": dw},
        )
    )
    assert {name: n for name, n in found.items() if n} == {
        "dgrad dy": 2,
        "dgrad w": 1,
        "fprop": 2,
        "wgrad": 1,
    }
    assert call.keys is not None
    other = check(call._replace(keys=call.keys[::-1]))
    assert other["dgrad dy"] > 100 and other["wgrad dy"] > 100 and other["fprop x"] == 0


# -- keys ------------------------------------------------------------------------------------------------------


def test_words_are_the_oracles_philox() -> None:
    call, _ = call_of("te")
    for i, gemm in enumerate(("dgrad", "wgrad")):
        operand = call.recipe.operands(gemm)[0]
        shape = (T, N) if i == 0 else (N, T)
        expected = np.asarray(stochastic.words(jax.random.fold_in(KEY, i), shape))
        np.testing.assert_array_equal(words(call, operand), expected)


def test_every_step_layer_and_operand_has_its_own_words() -> None:
    keys = [jaxpath.call_key(KEY, step, layer) for step in (0, 1, 2) for layer in (0, 1, 2)]
    drawn = [
        tuple(np.asarray(stochastic.words(jax.random.fold_in(key, i), (1, 16)))[0]) for key in keys for i in (0, 1)
    ]
    assert len({word for each in drawn for word in each}) == 4 * len(drawn)
    again = jaxpath.call_key(KEY, jnp.int32(2), 1)
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(jaxpath.call_key(KEY, 2, 1)))


def test_the_same_key_gives_the_same_gradients_and_another_does_not() -> None:
    run = [differentiate(jnp.asarray(X), jnp.asarray(W), DY, key, "te") for key in (KEY, KEY, jax.random.key(6))]
    for first, second, third in list(zip(*run, strict=True))[1:]:
        np.testing.assert_array_equal(first, second)
        assert (np.asarray(first) != np.asarray(third)).mean() > 0.5


@pytest.mark.parametrize("key", [jax.random.PRNGKey(5), np.array([0, 5], np.uint32)], ids=["old", "numpy"])
def test_keys_of_the_old_kind(key: Any) -> None:
    old, new = (differentiate(jnp.asarray(X), jnp.asarray(W), DY, k, "te") for k in (key, KEY))
    for a, b in zip(old, new, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nearest_rounding_takes_no_key() -> None:
    nearest = recipe("te", disable_stochastic_rounding=True)
    without, with_key = (differentiate(jnp.asarray(X), jnp.asarray(W), DY, key, nearest) for key in (None, KEY))
    for a, b in zip(without, with_key, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_gradients_no_key_and_no_alignment_of_tokens() -> None:
    assert jax.eval_shape(linear, zeros(5, K), zeros(48, K)).shape == (5, 48)
    np.testing.assert_array_equal(linear(jnp.asarray(X), jnp.asarray(W)), call_of("te")[1][0])


# -- shapes, dtypes, transformations -----------------------------------------------------------------------------


def test_leading_dimensions_are_tokens() -> None:
    flat = differentiate(jnp.asarray(X), jnp.asarray(W), DY, KEY, "te")
    deep = differentiate(jnp.asarray(X.reshape(2, 4, 8, K)), jnp.asarray(W), DY.reshape(2, 4, 8, N), KEY, "te")
    assert deep[0].shape == (2, 4, 8, N) and deep[1].shape == (2, 4, 8, K)
    for a, b in zip(flat, deep, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b).reshape(a.shape))


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_gradients_have_the_dtypes_of_what_they_belong_to(dtype: Any) -> None:
    """dw is accumulated in float32 and rounded once."""
    x, w = (t.astype(BF16).astype(np.float32) for t in (X, W))
    y, dx, dw = differentiate(jnp.asarray(x, dtype), jnp.asarray(w, dtype), DY, KEY, "te")
    y32, dx32, dw32 = differentiate(jnp.asarray(x), jnp.asarray(w), DY, KEY, "te")
    assert (y.dtype, dx.dtype, dw.dtype) == (BF16, dtype, dtype)
    np.testing.assert_array_equal(y, y32)
    np.testing.assert_array_equal(dx, np.asarray(dx32).astype(dtype))
    np.testing.assert_array_equal(dw, np.asarray(dw32).astype(dtype))


def test_dot_general_is_the_same_layer() -> None:
    """Contracted dimensions in any place and number; the gradients come back in the shapes of lhs and rhs."""
    lhs, rhs = jnp.asarray(X.reshape(T, 8, 12)), jnp.asarray(W.T.reshape(8, 12, N))
    dimensions = (((1, 2), (0, 1)), ((), ()))
    y, gradients = jax.vjp(lambda a, b: dot_general(a, b, dimensions, KEY, "te"), lhs, rhs)
    d_lhs, d_rhs = gradients(jnp.asarray(DY))
    expected = differentiate(jnp.asarray(X), jnp.asarray(W), DY, KEY, "te")
    for found, wanted in zip((y, d_lhs.reshape(T, K), d_rhs.reshape(K, N).T), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    negative = dot_general(jnp.asarray(X.T), jnp.asarray(W), (((-2,), (-1,)), ([], [])), KEY, "te")
    np.testing.assert_array_equal(negative, y)


def test_compiled_and_batched() -> None:
    """jit of vmap over tensors and keys: two calls, each with its own key, and their results"""
    xs, dys = (jnp.stack([jnp.asarray(t), jnp.asarray(t) * 2]) for t in (X, DY))
    keys = jax.random.split(KEY, 2)
    calls: list[Call] = []

    def run(x: Any, w: Any, dy: Any, key: Any) -> tuple[Any, Any, Any]:
        return differentiate(x, w, dy, key, "te_nvfp4")

    with observed(calls.append):
        batched = jax.jit(jax.vmap(run, in_axes=(0, None, 0, 0)))(xs, jnp.asarray(W), dys, keys)
        jax.effects_barrier()
    calls.sort(key=lambda call: float(np.abs(call.dy.astype(np.float32)).max()))
    assert len(calls) == 2
    for i, call in enumerate(calls):
        assert not any(check(call).values())
        np.testing.assert_array_equal(call.keys, stochastic.both_keys(keys[i]))
        for gemm, found in zip(GEMMS, batched, strict=True):
            np.testing.assert_array_equal(found[i], call.results[gemm])


def test_inside_shard_map_the_gradient_of_a_common_weight_is_summed() -> None:
    """On one device: that the types agree; the devices' own operands are checked where there are several."""
    devices = jax.devices()[:2]
    data = PartitionSpec("data")

    def step(x: Any, w: Any, dy: Any) -> tuple[Any, Any, Any]:
        key = jax.random.fold_in(KEY, jax.lax.axis_index("data"))
        y, gradients = jax.vjp(lambda x, w: linear(x, w, key, across=("data",)), x, w)
        return y, *gradients(dy)

    calls: list[Call] = []
    split = jax.shard_map(
        step,
        mesh=Mesh(np.array(devices), ("data",)),
        in_specs=(data, PartitionSpec(), data),
        out_specs=(data, data, PartitionSpec()),
    )
    with observed(calls.append):
        y, dx, dw = (np.asarray(a) for a in jax.jit(split)(X, W, DY))
        jax.effects_barrier()
    assert len(calls) == len(devices)
    np.testing.assert_array_equal(dw, np.sum([call.results["wgrad"] for call in calls], axis=0, dtype=np.float32))
    if len(devices) == 1:
        assert not any(check(calls[0]).values())
        np.testing.assert_array_equal(y, calls[0].results["fprop"])
        np.testing.assert_array_equal(dx, calls[0].results["dgrad"])


# -- errors ----------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


TORCHAO = recipe(arithmetic=nv.arithmetic("torchao"))
FORWARD: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
    (ValueError, "unknown recipe", zeros(T, K), zeros(N, K), {"recipe_": "te_nvfp8"}),
    (TypeError, "x is a float32, bfloat16 or float16 array; got int32", zeros(T, K, dtype=jnp.int32), zeros(N, K), {}),
    (TypeError, "w is a float32, .* got float8_e4m3fn", zeros(T, K), zeros(N, K, dtype=jnp.float8_e4m3fn), {}),
    (ValueError, "w is a matrix", zeros(T, K), zeros(2, N, K), {}),
    (ValueError, "x has tokens and features", zeros(K), zeros(N, K), {}),
    (ValueError, r"different input features", zeros(T, K), zeros(K, N), {}),
    (ValueError, "not empty", zeros(0, K), zeros(N, K), {}),
    (ValueError, "80 input features .* no multiple of 32: pad with zeros to 96", zeros(T, 80), zeros(N, 80), {}),
    (ValueError, "40 output features .* no multiple of 16: pad .* to 64", zeros(T, K), zeros(40, K), {}),
    (TypeError, "key is a JAX key, .* got int", zeros(T, K), zeros(N, K), {"key": 5}),
    (
        TypeError,
        r"key is a JAX key, .* got float32 of shape \(2,\)",
        zeros(T, K),
        zeros(N, K),
        {"key": np.zeros(2, "f")},
    ),
    (ValueError, r"one JAX key; got keys of shape \(3,\)", zeros(T, K), zeros(N, K), {"key": jax.random.split(KEY, 3)}),
    (
        ValueError,
        "use nvfp4ref.quantize",
        zeros(T, K),
        zeros(N, K),
        {"recipe_": recipe(arithmetic=nv.arithmetic("torchao"))},
    ),
]
NO_COLUMNS = replace(recipe("row-scaled"), nvfp4_4over6="all")
BACKWARD: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
    (ValueError, "pass a JAX key for this step and layer", zeros(T, K), zeros(N, K), {}),
    (ValueError, "48 tokens .* no multiple of 32: pad .* to 64", zeros(48, K), zeros(N, K), {"key": KEY}),
    (ValueError, "48 output features .* in dgrad.* no multiple of 32", zeros(T, K), zeros(48, K), {"key": KEY}),
    (ValueError, "no columnwise output", zeros(T, K), zeros(N, K), {"key": KEY, "recipe_": NO_COLUMNS}),
]


def ids(cases: list[Any]) -> list[str]:
    return [case[1][:36] for case in cases]


@pytest.mark.parametrize(("error", "text", "x", "w", "how"), FORWARD, ids=ids(FORWARD))
def test_errors_while_tracing(error: type[Exception], text: str, x: Any, w: Any, how: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda x, w: linear(x, w, **how), x, w)


@pytest.mark.parametrize(("error", "text", "x", "w", "how"), BACKWARD, ids=ids(BACKWARD))
def test_errors_while_tracing_gradients(error: type[Exception], text: str, x: Any, w: Any, how: dict[str, Any]) -> None:
    jax.eval_shape(lambda x, w: linear(x, w, **how), x, w)  # the forward pass alone is fine
    with pytest.raises(error, match=text):
        jax.eval_shape(jax.grad(lambda x, w: linear(x, w, **how).astype(jnp.float32).sum()), x, w)


def test_errors_of_dot_general() -> None:
    x, w = jnp.zeros((2, 4, 32)), jnp.zeros((2, 32, 16))
    with pytest.raises(ValueError, match="no batch dimensions"):
        dot_general(x, w, (((2,), (1,)), ((0,), (0,))))
    with pytest.raises(ValueError, match="are contracted: they differ"):
        dot_general(x, w, (((1, 2), (1, 0)), ((), ())))


def test_not_an_array() -> None:
    with pytest.raises(TypeError, match="x is a float32, bfloat16 or float16 array; got list"):
        linear([[1.0] * K], jnp.asarray(W))  # type: ignore[arg-type]

"""nvfp4hw.jaxpath.quantize and dequantize against the oracle, bit for bit, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from nvfp4hw import jaxpath  # noqa: E402
from nvfp4hw.backends.jaxpath import JaxPath  # noqa: E402
from nvfp4hw.jaxpath import elements, stochastic  # noqa: E402

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (BF16, np.dtype(np.float32), np.dtype(np.float16))
SHAPE = (48, 64)


def inputs(dtype: np.dtype[Any]) -> Iterator[tuple[str, Array]]:
    """Tensors of one shape, so that XLA compiles a call once."""
    random = np.random.default_rng(11)
    normal = random.standard_normal(SHAPE).astype(np.float32)
    yield "normal", normal.astype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        wide = normal * np.exp2(random.integers(-30, 10, SHAPE)).astype(np.float32)
        yield "binades", wide.astype(dtype)
        yield "tiny", (normal * np.float32(1e-38 if dtype != np.float16 else 1e-6)).astype(dtype)
        yield "subnormal", (wide * np.float32(1e-36 if dtype != np.float16 else 1e-5)).astype(dtype)
        yield "huge", np.clip(normal * np.float32(3e38), -3.3e38, 3.3e38).astype(dtype)
    yield "zero", np.where(random.random(SHAPE) < 0.5, np.float32(0), np.float32(-0.0)).astype(dtype)
    blocks = normal.copy()
    blocks[:, 16:32], blocks[3], blocks[5, :16] = 0, np.float32(-0.0), np.float32(1e-30)
    blocks[9, 48:] = np.float32(1e-7)  # a block whose scale is zero
    yield "zero blocks", blocks.astype(dtype)
    lattice = (random.integers(-113, 114, SHAPE) * 4).astype(np.float32)
    lattice[0, 0] = 896
    yield "ties", lattice.astype(dtype)
    special = normal.copy()
    special[2, 3], special[4, 16:32], special[7, 9] = np.nan, np.nan, np.uint32(0xFFC00001).view(np.float32)
    yield "NaN", special.astype(dtype)
    special[11, 12], special[13, 14] = np.inf, -np.inf
    yield "NaN and Inf", special.astype(dtype)


CALLS: dict[str, dict[str, Any]] = {
    "rowwise": {},
    "16x16": {"block": (16, 16)},
    "columnwise": {"axis": 0},
    "columnwise 16x16": {"axis": 0, "block": (16, 16)},
    "transformed": {"axis": 0, "rht": nv.RHT()},
    "transformed rowwise": {"rht": nv.RHT(sign_mask=0)},
    "row-scaled": {"arithmetic": nv.arithmetic("te", row_scaled=True)},
    "row-scaled columns": {"axis": 0, "arithmetic": nv.arithmetic("te", row_scaled=True)},
    "4over6": {"arithmetic": "four-over-six"},
    "4over6 fast 16x16": {
        "block": (16, 16),
        "arithmetic": nv.arithmetic("te", four_over_six="MSE", four_over_six_fast_error=True),
    },
    "4over6 columns 16x16": {"axis": 0, "block": (16, 16), "arithmetic": nv.arithmetic("te", four_over_six="MSE")},
    "4over6 row-scaled": {"arithmetic": nv.arithmetic("te", four_over_six="MAE", row_scaled=True)},
    "headroom": {"arithmetic": nv.arithmetic("te", headroom=16 / 17)},
}


def run(options: dict[str, Any]) -> Callable[..., jaxpath.NVFP4Array]:
    return lambda x, amax=None, rbits=None: jaxpath.quantize(x, amax=amax, rbits=rbits, **options)


@functools.cache
def compiled(name: str) -> Callable[..., jaxpath.NVFP4Array]:
    return jax.jit(run(CALLS[name]))


def assert_equal(found: jaxpath.NVFP4Array, expected: nv.NVFP4Tensor, label: str = "") -> None:
    for name in ("packed", "scales"):
        np.testing.assert_array_equal(
            np.asarray(getattr(found, name)), getattr(expected, name), err_msg=f"{label}: {name}"
        )
    actual = np.asarray(found.amax)
    assert actual.shape == expected.amax.shape
    np.testing.assert_array_equal(actual.view(np.uint32), expected.amax.view(np.uint32), err_msg=f"{label}: amax")


# -- nearest even ----------------------------------------------------------------------------------------------


ALL_TYPES, FLOAT32 = ("rowwise",), ("16x16", "columnwise", "row-scaled columns", "4over6 row-scaled")


@pytest.mark.parametrize("name", CALLS)
def test_equals_the_oracle(name: str) -> None:
    for dtype in DTYPES if name in ALL_TYPES else DTYPES[1:2] if name in FLOAT32 else DTYPES[:1]:
        for label, x in inputs(dtype):
            expected = nv.quantize(x, **CALLS[name])
            assert_equal(compiled(name)(x), expected, f"{label} {dtype}, compiled")
    if name in ("rowwise", "columnwise 16x16", "transformed", "4over6"):
        assert_equal(run(CALLS[name])(jnp.asarray(x)), expected, "eager")


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_any_amax(block: tuple[int, int]) -> None:
    """Zero, stale, infinite, NaN, negative, and so small and negative that the global scale is -Inf."""
    amaxes = [0.0, -0.0, 1.0, 3.0, 2688.0, np.inf, np.nan, -3.0, 1e-45, -1e-45, 1e-40, -1e-37, 1e-36, 3.4e38, -3.4e38]
    quantize = jax.jit(lambda x, amax: jaxpath.quantize(x, amax=amax, block=block))
    for label, x in inputs(DTYPES[block == (1, 16)]):
        for amax in np.array(amaxes, np.float32):
            assert_equal(quantize(x, amax), nv.quantize(x, amax=amax, block=block), f"{label} under {amax}")


def test_amaxes_of_rows() -> None:
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    amax = np.array([0, 1, np.nan, np.inf, -2, 1e-40, *range(1, 11)], np.float32)
    how = {"arithmetic": nv.arithmetic("te", row_scaled=True)}
    assert_equal(jaxpath.quantize(x, amax=amax, **how), nv.quantize(x, amax=amax, **how))
    assert_equal(
        jaxpath.quantize(x.T, axis=0, amax=jnp.asarray(amax), **how), nv.quantize(x.T, axis=0, amax=amax, **how)
    )


def test_every_bfloat16() -> None:
    patterns = np.arange(65536, dtype=np.uint32)
    for bits_ in (patterns, patterns * np.uint32(40503) & np.uint32(0xFFFF)):
        x = bits_.astype(np.uint16).view(BF16).reshape(256, 256)
        for amax in (None, np.float32(6), np.float32(448 * 6)):
            assert_equal(jaxpath.quantize(x, amax=amax), nv.quantize(x, amax=amax))


def test_thresholds_are_the_least_magnitudes() -> None:
    """One ulp below the threshold the product does not reach the decision point, at it it does."""
    random = np.random.default_rng(3)
    e = np.concatenate(
        [
            random.integers(1, 0x7F800000, 4000, np.uint32),
            np.array([1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x3F800000, 0x40400000], np.uint32),
            np.arange(0x3F800000, 0x3F800000 + 2**23, 4099, np.uint32),
        ]
    )
    least = np.asarray(jax.jit(elements.thresholds)(e))[:7]
    with np.errstate(over="ignore"):
        for index, point in enumerate(nv.e2m1.ROUNDING["nearest-even"]):
            at = least[index].view(np.float32)
            assert (at * e.view(np.float32) >= point).all()
            below = (least[index] - np.uint32(1)).view(np.float32)
            assert (below * e.view(np.float32) < point).all()


def test_leading_dimensions_and_vmap() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 32)).astype(BF16)
    q, expected = jaxpath.quantize(x), nv.quantize(x)
    assert_equal(q, expected)
    assert q.shape == x.shape and q.codes.shape == x.shape
    np.testing.assert_array_equal(np.asarray(q.codes), expected.codes)
    many = jax.vmap(jax.vmap(jaxpath.quantize))(x)
    for i in np.ndindex(2, 3):
        assert_equal(jax.tree.map(lambda a, i=i: a[i], many), nv.quantize(x[i]))


def test_other_arrays_and_arguments() -> None:
    """What the oracle takes is taken: float64 that is exact, arrays of other libraries, threads."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(12).standard_normal((16, 32)).astype(BF16)
    expected = nv.quantize(x)
    assert_equal(jaxpath.quantize(torch.from_numpy(x.astype(np.float32)).bfloat16(), threads=2), expected)
    assert_equal(jaxpath.quantize(x.astype(np.float64)), nv.quantize(x.astype(np.float32)))
    with pytest.raises(ValueError, match="float64 input must be exact in float32"):
        jaxpath.quantize(np.full((16, 16), 0.1))


def test_the_result_is_a_pytree() -> None:
    q = jax.jit(lambda x: jaxpath.quantize(x, block=(16, 16), arithmetic="four-over-six"))(
        np.ones((16, 32), np.float32)
    )
    assert (q.block, q.arithmetic) == ((16, 16), nv.arithmetic("four-over-six"))
    assert len(jax.tree.leaves(q)) == 3
    tensor = q.to_numpy()
    assert isinstance(tensor, nv.NVFP4Tensor) and tensor.arithmetic.e4m3_max == 256


def test_the_same_under_64_bit_types() -> None:
    x = next(inputs(BF16))[1]
    jax.config.update("jax_enable_x64", True)
    try:
        assert_equal(jax.jit(lambda x: jaxpath.quantize(x))(x), nv.quantize(x))
        words = np.asarray(stochastic.words(jax.random.key(2), SHAPE))
        q = jaxpath.quantize(x, rounding="stochastic", rbits=jax.random.key(2))
        assert_equal(q, nv.quantize(x, rounding="stochastic", rbits=words))
    finally:
        jax.config.update("jax_enable_x64", False)


def test_the_same_under_other_settings() -> None:
    """Of the user's: promotion of types and ranks, precision of products, raw keys of another generator."""
    x = next(inputs(BF16))[1]
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.default_matmul_precision("highest"),
    ):
        q = jax.jit(lambda x: jaxpath.quantize(x, arithmetic="four-over-six"))(x)
        jaxpath.matmul(q, q, out_dtype="bfloat16")
        jaxpath.quantize_both(x, rht=nv.RHT(), rounding="stochastic", rbits=jax.random.key(0))
    assert_equal(q, nv.quantize(x, arithmetic="four-over-six"))
    with jax.default_prng_impl("unsafe_rbg"):
        raw = jax.random.PRNGKey(7)
        assert stochastic.as_key(raw).dtype == jax.random.key(7, impl="unsafe_rbg").dtype
    assert stochastic.as_key(raw).dtype == jax.random.key(7, impl="rbg").dtype


def test_explicit_axes_are_refused_in_words() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.zeros((16, 32)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d", None)))
    with pytest.raises(ValueError, match=r"x is sharded over a mesh with the explicit axes \['d'\]: call this inside"):
        jax.jit(jaxpath.quantize)(x)
    with pytest.raises(ValueError, match="x is sharded over a mesh with the explicit axes"):
        jaxpath.linear(x, jnp.zeros((32, 32)))


# -- stochastic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, axis, rht",
    [("sm100", -1, None), ("sm100", 0, None), ("sm100", 0, nv.RHT()), ("te-fallback", -1, None)],
)
def test_given_words(rule: str, axis: int, rht: nv.RHT | None) -> None:
    rows, length = SHAPE if axis == -1 else SHAPE[::-1]
    words = np.random.default_rng(4).integers(0, 2**32, (rows, length // 4), np.uint32)
    words[0, :4] = 0, 0xFFFFFFFF, 0x0000FFFF, 0xFFFF0000
    how = {"axis": axis, "rht": rht, "rounding": "stochastic", "arithmetic": nv.arithmetic("te", stochastic=rule)}
    quantize = jax.jit(lambda x, rbits: jaxpath.quantize(x, rbits=rbits, **how))
    for label, x in inputs(DTYPES[0 if rht or rule == "te-fallback" else 1]):
        assert_equal(quantize(x, words), nv.quantize(x, rbits=words, **how), label)


def test_uniforms() -> None:
    how = {"rounding": "stochastic", "arithmetic": nv.arithmetic("te", stochastic="ideal")}
    uniforms = np.random.default_rng(5).random(SHAPE, np.float32)
    uniforms[0, :4] = 0, 0.5, np.float32(1e-45), np.nextafter(np.float32(1), np.float32(0))
    for label, x in inputs(np.dtype(np.float32)):
        assert_equal(jaxpath.quantize(x, rbits=uniforms, **how), nv.quantize(x, rbits=uniforms, **how), label)


@pytest.mark.parametrize("key", ["new", "old", "rbg"])
def test_words_of_a_key(key: str) -> None:
    """They are Philox words whose key JAX's generator gives, one call a block, the same for both kinds of keys."""
    given = {"new": jax.random.key(9), "old": jax.random.PRNGKey(9), "rbg": jax.random.key(9, impl="rbg")}[key]
    words = np.asarray(stochastic.words(given, (32, 64)))
    typed = jax.random.key(9, impl="rbg") if key == "rbg" else jax.random.key(9)
    seed = np.asarray(jax.random.bits(typed, (2,), jnp.uint32))
    counters = np.zeros((128, 4), np.uint32)
    counters[:, 0] = np.arange(128)
    np.testing.assert_array_equal(words.reshape(128, 4), nv.philox.philox4x32(counters, seed))
    x = np.random.default_rng(6).standard_normal((32, 64)).astype(BF16)
    how = {"rounding": "stochastic"}
    assert_equal(jaxpath.quantize(x, rbits=given, **how), nv.quantize(x, rbits=words, **how))
    columnwise = jaxpath.quantize(x.T, axis=0, rbits=given, **how)
    assert_equal(columnwise, nv.quantize(x.T, axis=0, rbits=words, **how))


def test_words_of_the_kernels() -> None:
    x = np.random.default_rng(7).standard_normal((64, 128)).astype(BF16)
    for axis, rht in ((-1, None), (0, nv.RHT())):
        how = {"axis": axis, "rht": rht, "rounding": "stochastic", "rbits": nv.Philox(3, 5)}
        assert_equal(jaxpath.quantize(x, **how), nv.quantize(x, **how))


@pytest.mark.parametrize("rht", [None, nv.RHT()])
def test_both_at_once(rht: nv.RHT | None) -> None:
    x = np.random.default_rng(8).standard_normal(SHAPE).astype(BF16)
    row, column = jaxpath.quantize_both(x, rht=rht)
    assert_equal(row, nv.quantize(x))
    assert_equal(column, nv.quantize(x, axis=0, rht=rht))
    key = jax.random.key(1)
    row, column = jax.jit(lambda x, key: jaxpath.quantize_both(x, rht=rht, rounding="stochastic", rbits=key))(x, key)
    words = [
        np.asarray(stochastic.words(jax.random.fold_in(key, i), shape)) for i, shape in enumerate((SHAPE, SHAPE[::-1]))
    ]
    assert_equal(row, nv.quantize(x, rounding="stochastic", rbits=words[0]))
    assert_equal(column, nv.quantize(x, axis=0, rht=rht, rounding="stochastic", rbits=words[1]))
    by_words = jaxpath.quantize_both(x, rht=rht, rounding="stochastic", rbits=tuple(words))
    assert (by_words[0].packed == row.packed).all() and (by_words[1].packed == column.packed).all()


# -- dequantize ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize(dtype: np.dtype[Any]) -> None:
    random = np.random.default_rng(9)
    packed, scales = random.integers(0, 256, (32, 128), np.uint8), np.arange(512, dtype=np.uint8).reshape(32, 16)
    dequantize = jax.jit(lambda q: jaxpath.dequantize(q, jnp.dtype(dtype)))
    for amax in np.array([1, 0.3, 2688, 1e-38, 1e-44, 3e38, np.inf, np.nan, 0, -1], np.float32):
        for name in ("te", "four-over-six"):
            tensor = nv.NVFP4Tensor.from_arrays(packed, scales, amax, arithmetic=name)
            q = jaxpath.NVFP4Array(
                jnp.asarray(packed), jnp.asarray(scales), jnp.asarray(amax), (1, 16), tensor.arithmetic
            )
            unsigned = f"u{dtype.itemsize}"
            expected = nv.dequantize(tensor, dtype).view(unsigned)
            np.testing.assert_array_equal(np.asarray(dequantize(q)).view(unsigned), expected)
    rows = nv.quantize(
        random.standard_normal((4, 32)).astype(np.float32), arithmetic=nv.arithmetic("te", row_scaled=True)
    )
    q = jaxpath.NVFP4Array(*(jnp.asarray(a) for a in (rows.packed, rows.scales, rows.amax)), (1, 16), rows.arithmetic)
    np.testing.assert_array_equal(np.asarray(jaxpath.dequantize(q)), nv.dequantize(rows))


@pytest.mark.parametrize("axis", [-1, 0])
def test_fake_quantize(axis: int) -> None:
    """The dequantized values, −0 and NaN among them, and a gradient that passes straight through."""
    x = np.random.default_rng(10).standard_normal(SHAPE).astype(BF16)
    x[0, :2], x[1, 2] = -0.0, np.nan
    expected = nv.dequantize(nv.quantize(x, axis=axis), BF16)
    found, gradient = jax.vjp(lambda x: jaxpath.fake_quantize(x, axis=axis), jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), (expected.T if axis == 0 else expected).view("u2"))
    np.testing.assert_array_equal(np.asarray(gradient(jnp.asarray(x))[0]).view("u2"), x.view("u2"))


def test_gradients_are_not_lost_unseen() -> None:
    x = jnp.ones(SHAPE)
    with pytest.raises(TypeError, match="quantize has no gradient: differentiate linear or fake_quantize"):
        jax.grad(lambda x: jaxpath.dequantize(jaxpath.quantize(x)).sum())(x)
    q = jaxpath.quantize(x)
    for lost in (
        lambda a: jaxpath.dequantize(jaxpath.NVFP4Array(q.packed, q.scales, a)).sum(),
        lambda a: jaxpath.dequantize(jaxpath.quantize(x, amax=a)).sum(),
        lambda a: jaxpath.matmul(q, q, bias=jnp.full(SHAPE[0], a)).sum(),
        lambda a: jaxpath.matmul(q, q, alpha=a).sum(),
    ):
        with pytest.raises(TypeError, match="has no gradient: differentiate linear or fake_quantize"):
            jax.grad(lost)(jnp.float32(2))
    stopped = jax.grad(lambda x: (x * jaxpath.dequantize(jaxpath.quantize(jax.lax.stop_gradient(x)))).sum())(x)
    np.testing.assert_array_equal(stopped, jaxpath.dequantize(jaxpath.quantize(x)))
    with pytest.raises(ValueError, match="fake_quantize has no rht"):
        jaxpath.fake_quantize(x.astype(jnp.bfloat16), rht=nv.RHT())


# -- errors, all of them while tracing -------------------------------------------------------------------------

X = np.zeros((32, 64), np.float32)
ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, r"expected an array \(NumPy, torch, JAX, …\); got list", {"x": [[1.0]]}),
    (TypeError, "expected float32, .*; got dtype int32", {"x": X.astype(np.int32)}),
    (
        ValueError,
        r"shape \(3, 20\) has 20 columns, not a multiple of 16.*pad with zeros to 32 columns",
        {"x": X[:3, :20]},
    ),
    (ValueError, r"has 20 rows, not a multiple of 16", {"x": X[:20], "axis": 0}),
    (ValueError, r"has 20 rows, not a multiple of 16, which 16x16", {"x": X[:20], "block": (16, 16)}),
    (ValueError, r"expected a matrix or more dimensions, not empty; got shape \(64,\)", {"x": X[0]}),
    (ValueError, "axis=0 quantizes the transpose of a matrix", {"x": X[None], "axis": 0}),
    (ValueError, "axis is -1 .* or 0 .*; got 1", {"axis": 1}),
    (ValueError, r"block is \(1, 16\) or \(16, 16\)", {"block": (1, 32)}),
    (ValueError, "rounding is 'nearest-even' or 'stochastic'; got 'up'", {"rounding": "up"}),
    (ValueError, "nearest-even takes none", {"rbits": jax.random.key(0)}),
    (ValueError, "stochastic rounding needs rbits: a JAX key", {"rounding": "stochastic"}),
    (TypeError, "rbits for the rule 'sm100' are a JAX key", {"rounding": "stochastic", "rbits": X}),
    (TypeError, "rbits for the rule 'sm100' are a JAX key.*got int", {"rounding": "stochastic", "rbits": 3}),
    (
        ValueError,
        r"have shape \(32, 16\) here; got \(32, 8\)",
        {"rounding": "stochastic", "rbits": np.zeros((32, 8), np.uint32)},
    ),
    (
        ValueError,
        "one JAX key; got keys of shape",
        {"rounding": "stochastic", "rbits": jax.random.split(jax.random.key(0))},
    ),
    (
        TypeError,
        "rule 'ideal' are float32 uniforms",
        {"rounding": "stochastic", "rbits": jax.random.key(0), "arithmetic": nv.arithmetic("te", stochastic="ideal")},
    ),
    (
        ValueError,
        "4over6 does not go with stochastic",
        {"rounding": "stochastic", "rbits": 1, "arithmetic": "four-over-six"},
    ),
    (ValueError, "it lacks amax_nan='propagate', .*: use nvfp4ref.quantize", {"arithmetic": "torchao"}),
    (ValueError, "it lacks stochastic='te-jax'", {"arithmetic": nv.arithmetic("te", stochastic="te-jax")}),
    (ValueError, "unknown arithmetic 'tea'", {"arithmetic": "tea"}),
    (TypeError, "arithmetic is a preset's name", {"arithmetic": 3}),
    (TypeError, "the Hadamard transform reads bfloat16; got float32", {"rht": nv.RHT()}),
    (TypeError, "rht is an nvfp4ref.RHT or None; got bool", {"rht": True}),
    (
        ValueError,
        "transform of 16 elements.*nvfp4ref.quantize has the others",
        {"x": X.astype(BF16), "rht": nv.RHT(size=32)},
    ),
    (
        ValueError,
        "4over6 does not go with the Hadamard",
        {"x": X.astype(BF16), "rht": nv.RHT(), "arithmetic": "four-over-six"},
    ),
    (
        ValueError,
        "row-scaled amax goes with 1x16",
        {"block": (16, 16), "arithmetic": nv.arithmetic("te", row_scaled=True)},
    ),
    (ValueError, r"amax has one value .*; got shape \(2,\)", {"amax": [1, 2]}),
    (
        ValueError,
        r"amax has one value for each of the 32 rows of the result; got shape \(\)",
        {"amax": 1.0, "arithmetic": nv.arithmetic("te", row_scaled=True)},
    ),
    (TypeError, "amax is a float32 number or array; got str of dtype", {"amax": "5"}),
    (TypeError, "amax is a float32 number or array; got bool of dtype bool", {"amax": True}),
    (ValueError, "amax is given, or taken across the devices", {"amax": 1.0, "across": ("data",)}),
    (
        ValueError,
        "row-scaled amaxes are not taken across devices",
        {"across": ("data",), "arithmetic": nv.arithmetic("te", row_scaled=True)},
    ),
]


@pytest.mark.parametrize("error, message, options", ERRORS, ids=[message[:40] for _, message, _ in ERRORS])
def test_errors(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    options = {"x": X} | options
    x = options.pop("x")
    with pytest.raises(error, match=message):
        jaxpath.quantize(x, **options)
    if isinstance(x, np.ndarray):
        with pytest.raises(error, match=message):
            jax.eval_shape(lambda x: jaxpath.quantize(x, **options), jax.ShapeDtypeStruct(x.shape, x.dtype))


def test_errors_of_the_others() -> None:
    with pytest.raises(TypeError, match="rbits of quantize_both are a JAX key, or a pair"):
        jaxpath.quantize_both(X, rounding="stochastic", rbits=np.zeros((32, 16), np.uint32))
    with pytest.raises(TypeError, match="dequantize takes an NVFP4Array, from jaxpath.quantize; got None"):
        jaxpath.dequantize(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dequantize gives float32, bfloat16 or float16"):
        jaxpath.dequantize(jaxpath.quantize(X), jnp.int32)


# -- the suite -------------------------------------------------------------------------------------------------


def test_the_backend_conforms() -> None:
    """Some cases through the backend that the suite runs; make conformance runs them all."""
    from conformance import cases, run

    backend, families = JaxPath(), ("special", "zero", "given-amax", "rows", "codec", "stochastic")
    assert backend.availability() is None and f"jax {jax.__version__}" in backend.version()
    seen = set()
    for case in cases.cases("quick"):
        kind = (case.family, case.kind)
        if case.family in families and case.needs <= backend.features and case.block == (1, 16) and kind not in seen:
            seen.add(kind)
            result = run.run_case(backend, case)
            assert result.status == run.CONFORMS, (case.id, result.outputs, result.error)
    assert len(seen) == 7

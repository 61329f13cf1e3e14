"""The GPU kernels of nvfp4hw.jaxpath in interpret mode, where bits stand for the GPU's instructions, and their PTX.

A CPU flushes subnormals in the maximum of floats, which is XLA's here and the GPU's there: blocks of them are not among
these tensors, and were compared on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from nvfp4hw import jaxpath  # noqa: E402
from nvfp4hw.jaxpath import kernel, stochastic  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
core: Any = importlib.import_module("nvfp4hw.jaxpath.quantize")  # the package has a function of that name


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rows", "transform"):
        monkeypatch.setattr(kernel, name, functools.partial(getattr(kernel, name), interpret=True))


def tensor(dtype: Any = BF16) -> np.ndarray:
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 64)).astype(np.float32)
    x *= np.exp2(random.integers(-20, 5, (32, 1))).astype(np.float32)
    x[3, 5], x[5], x[6], x[7, :16], x[8, :16], x[9, 3] = (
        np.nan,
        0,
        -0.0,
        np.nan,
        -1e-37,
        np.uint32(0xFFC00001).view("f4"),
    )
    return x.astype(dtype)


def assert_equal(found: jaxpath.NVFP4Array, expected: nv.NVFP4Tensor) -> None:
    np.testing.assert_array_equal(np.asarray(found.packed), expected.packed)
    np.testing.assert_array_equal(np.asarray(found.scales), expected.scales)
    assert np.asarray(found.amax).view(np.uint32) == expected.amax.view(np.uint32)


def as_on_a_gpu(x: np.ndarray, rbits: Any = None, amax: Any = None, **options: Any) -> jaxpath.NVFP4Array:
    """What ``quantize`` does on a GPU."""
    rounding = "nearest-even" if rbits is None else "stochastic"
    how = (options.get("block", (1, 16)), options.get("axis", -1), rounding, rbits, options.get("rht"), "te", ())
    array, fixed = core._checked(x, *how)
    random = (
        None if rbits is None else stochastic.of(rbits, "sm100", array, fixed.axis, fixed.block, fixed.rht is not None)
    )
    return core._on_gpu(array, random, None if amax is None else jnp.asarray(amax), how=fixed)


@pytest.mark.parametrize("dtype, block", [(BF16, (1, 16)), (np.float32, (16, 16))])
def test_rows(dtype: Any, block: tuple[int, int]) -> None:
    x = tensor(dtype)
    assert_equal(as_on_a_gpu(x, block=block), nv.quantize(x, block=block))


@pytest.mark.parametrize("block, given", [((1, 16), "key"), ((16, 16), "words")])
def test_stochastic_rows(block: tuple[int, int], given: str) -> None:
    x, key = tensor(), jax.random.key(3)
    words = np.asarray(stochastic.words(key, x.shape))
    expected = nv.quantize(x, block=block, rounding="stochastic", rbits=words)
    assert_equal(as_on_a_gpu(x, {"key": key, "words": words}[given], block=block), expected)


def test_given_amax() -> None:
    x = tensor(np.float32)
    quantize = jax.jit(lambda x, amax: as_on_a_gpu(x, amax=amax))
    for amax in np.array([0, 1, np.nan, np.inf, -3, 1e-40, -1e-40, 3e38], np.float32):
        assert_equal(quantize(x, amax), nv.quantize(x, amax=amax))


def test_transformed() -> None:
    x = np.random.default_rng(1).standard_normal((64, 128)).astype(BF16)
    rht = nv.RHT(sign_mask=5)
    for axis in (0, -1):
        assert_equal(as_on_a_gpu(x, axis=axis, rht=rht), nv.quantize(x, axis=axis, rht=rht))


@pytest.mark.parametrize("rht", [None, nv.RHT()])
def test_both(rht: nv.RHT | None) -> None:
    """Of a shape that large powers of two do not divide."""
    x, te = np.random.default_rng(1).standard_normal((48, 80)).astype(BF16), nv.Arithmetic()
    row, column = core.How(-1, (1, 16), None, te), core.How(0, (1, 16), rht, te)
    found = core._both_on_gpu(jnp.asarray(x), (None, None), row=row, column=column)
    assert_equal(found[0], nv.quantize(x))
    assert_equal(found[1], nv.quantize(x, axis=0, rht=rht))


def test_what_is_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that the kernels lack, transforms smaller than a tensor core tile, and machines without such a GPU."""
    x, te = jnp.zeros((64, 128), jnp.bfloat16), nv.Arithmetic()
    assert not kernel.fits(x, core.How(-1, (1, 16), None, te), None)  # no GPU here
    monkeypatch.setattr(kernel, "_device", lambda: True)
    assert kernel.fits(x, core.How(-1, (1, 16), None, te), None)
    assert kernel.fits(x, core.How(0, (1, 16), nv.RHT(), te), None)
    for ar in (nv.arithmetic("te", row_scaled=True), nv.arithmetic("four-over-six")):
        assert not kernel.fits(x, core.How(-1, (1, 16), None, ar), None)
    fallback = nv.arithmetic("te", stochastic="te-fallback")
    assert not kernel.fits(x, core.How(-1, (1, 16), None, fallback), jnp.zeros((64, 32), jnp.uint32))
    assert not kernel.fits(jnp.zeros((16, 48), jnp.bfloat16), core.How(0, (1, 16), nv.RHT(), te), None)
    for shape in ((1, 16), (3, 48), (9, 8 * 16)):
        assert not kernel.fits(jnp.zeros(shape, jnp.bfloat16), core.How(-1, (1, 16), None, te), None)
    assert kernel.fits(jnp.zeros((16, 48), jnp.bfloat16), core.How(-1, (16, 16), None, te), None)


def test_the_instructions_round_as_they_must() -> None:
    """No approximate, flushing or unspecified float operation in the PTX."""
    texts = [kernel._GLOBAL_SCALE, kernel._SCALE_BYTE, kernel._ENCODE_SCALE, kernel._NEAREST, kernel._STOCHASTIC]
    operations = {op for text in texts for op in re.findall(r"^\s*([a-z0-9_.]+)\s", text.replace(";", "\n"), re.M)}
    assert not [op for op in operations if "approx" in op or "ftz" in op or "full" in op]
    floats = {op for op in operations if op.startswith(("mul", "add", "rcp", "div")) and op.endswith("f32")}
    assert floats == {"div.rn.f32", "mul.rn.f32", "add.rn.f32", "add.rz.f32", "rcp.rn.f32"}


def test_it_is_lowered_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the kernels: the largest call lowers for a GPU that is not here (JAX before 0.12)."""
    if tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 12):
        pytest.skip("this JAX lowers Triton kernels only where a GPU is")
    monkeypatch.undo()
    monkeypatch.setattr(kernel, "_device", lambda: True)
    call = jax.jit(lambda x, key: jaxpath.quantize_both(x, rht=nv.RHT(), rounding="stochastic", rbits=key))
    x, key = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.uint32)
    text = call.trace(x, key).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") >= 3

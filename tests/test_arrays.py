"""Arrays of any origin: torch, JAX, DLPack, __array__, foreign byte orders; and those that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, WIDENED, bfloat16, bits, random, same_bits

import nvfp4ref as nv
from nvfp4ref import arrays

pytestmark = pytest.mark.filterwarnings("error")


class OnlyArray:
    """Speaks __array__ and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.x


class OnlyDLPack:
    """Speaks __dlpack__ and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise OSError("the disk is gone")


def equal(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor) -> None:
    for name in ("packed", "scales", "amax"):
        same_bits(getattr(a, name), getattr(b, name))
    assert a.shape == b.shape


@pytest.mark.parametrize("wrap", [OnlyArray, OnlyDLPack], ids=["__array__", "__dlpack__"])
@pytest.mark.parametrize("shape", [(32, 48), (2, 16, 48)])
def test_array_protocols(wrap: Any, shape: tuple[int, ...]) -> None:
    """INPUT-WIDEN, INPUT-FLATTEN"""
    x = random(32, 48).reshape(shape)
    equal(nv.quantize(wrap(x)), nv.quantize(x))
    if len(shape) == 2:
        equal(nv.quantize(wrap(x), axis=0), nv.quantize(x, axis=0))


def test_nothing_is_copied_or_changed_without_need() -> None:
    for x in (WIDENED, FLOAT16, BFLOAT16):
        found = arrays.as_array(x)
        assert np.shares_memory(found, x) and found.dtype == x.dtype
    assert arrays.narrow(WIDENED) is WIDENED


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">f8"])
def test_foreign_byte_order(dtype: str) -> None:
    x = random(16, 32)
    equal(nv.quantize(x.astype(dtype)), nv.quantize(x.astype(dtype[1:])))
    same_bits(arrays.as_float32(x.astype(dtype)), x.astype(dtype[1:]).astype(np.float32))


def test_subclasses_are_plain_arrays() -> None:
    x = random(16, 32)
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(x)
    equal(nv.quantize(matrix), nv.quantize(x))
    assert type(arrays.as_array(matrix)) is np.ndarray


def test_float64_must_be_float32_exact() -> None:
    x = random(16, 32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 3.4028234663852886e38])
    same_bits(arrays.narrow(special)[:4], special[:4].astype(np.float32))
    assert np.isnan(arrays.narrow(special)[4])
    equal(nv.quantize(x.astype(np.float64)), nv.quantize(x))
    for bad in (0.1, 1e-50, 1e300, 2.0**24 + 1, 3.4028235677973366e38):
        y = x.astype(np.float64)
        y[3, 5] = bad
        with pytest.raises(ValueError, match=r"exact in float32, but element \[3, 5\] is .*round it yourself"):
            nv.quantize(y)
    with pytest.raises(ValueError, match=r"element \[\] is"):
        arrays.as_float32(0.1)


def test_signalling_nans_make_no_warning() -> None:
    signalling = np.array([0x7FF0000000000001, 0xFFF0000000000001], np.uint64).view(np.float64)
    assert np.isnan(arrays.narrow(signalling)).all()
    assert np.isnan(arrays.as_float32(FLOAT16)).sum() == np.isnan(FLOAT16).sum()


def test_python_numbers_and_lists_where_codecs_take_them() -> None:
    same_bits(arrays.as_float32([1, -2]), np.array([1, -2], np.float32))
    same_bits(arrays.as_float32(1.5), np.array(1.5, np.float32))
    with pytest.raises(ValueError, match="exact in float32"):
        arrays.as_float32([2**24 + 1])


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ([[1.0] * 16], "expected an array .*; got list"),
        (None, "expected an array .*; got NoneType"),
        ("abc", "expected an array .*; got str"),
        (np.zeros((16, 16), int), "expected float32, float16, bfloat16, or float64.*; got dtype int64"),
        (np.zeros((16, 16), object), "got dtype object"),
        (np.zeros((16, 16), complex), "got dtype complex128"),
        (np.zeros((16, 16), bool), "got dtype bool"),
        (np.zeros((16, 16), "S4"), r"got dtype \|S4"),
        (np.zeros((16, 16), np.longdouble), "got dtype float128"),
        (np.zeros((16, 16), "M8[s]"), r"got dtype datetime64\[s\]"),
        (np.zeros((16, 16), [("a", np.float32)]), "got dtype"),
        (np.zeros((16, 16), np.uint16), "got dtype uint16"),
        (Broken(), "Broken cannot be read as a NumPy array: the disk is gone"),
    ],
    ids=lambda v: type(v).__name__ + str(getattr(v, "dtype", "")) if not isinstance(v, str) else "",
)
def test_what_is_no_float_array_is_refused(x: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as raised:
        nv.quantize(x)
    assert "\n" not in str(raised.value)


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    x = random(32, 48)
    t = torch.from_numpy(x.copy())
    equal(nv.quantize(t), nv.quantize(x))
    equal(nv.quantize(t.T), nv.quantize(np.ascontiguousarray(x.T)))
    equal(nv.quantize(t, axis=0), nv.quantize(x, axis=0))
    equal(nv.quantize(t.clone().requires_grad_()), nv.quantize(x))
    equal(nv.quantize(torch.nn.Parameter(t)), nv.quantize(x))
    equal(nv.quantize(t.reshape(2, 16, 48).to(torch.float16)), nv.quantize(x.reshape(2, 16, 48).astype(np.float16)))
    half = t.to(torch.bfloat16)
    for view, wanted in ((half, x), (half.T, x.T), (half[::2, 16:], x[::2, 16:]), (half.clone().requires_grad_(), x)):
        equal(nv.quantize(view), nv.quantize(wanted.astype(bfloat16)))
    equal(nv.quantize(t.to(torch.float64)), nv.quantize(x))
    equal(nv.quantize(half, amax=torch.tensor(3.0)), nv.quantize(x, amax=3.0))
    patterns = torch.from_numpy(bits(BFLOAT16).view(np.int16)).view(torch.bfloat16)
    same_bits(arrays.as_array(patterns), BFLOAT16)


def test_torch_tensors_that_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for bad in (
        torch.zeros(16, 16, dtype=torch.int32),
        torch.zeros(16, 16, dtype=torch.complex64),
        torch.zeros(16, 16, dtype=torch.float8_e4m3fn),
        torch.zeros(16, 16).to_sparse(),
        torch.zeros(16, 16, device="meta"),
    ):
        with pytest.raises(TypeError):
            nv.quantize(bad)


def test_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = random(32, 48)
    equal(nv.quantize(jnp.asarray(x)), nv.quantize(x))
    equal(nv.quantize(jnp.asarray(x).astype(jnp.bfloat16), axis=0), nv.quantize(x.astype(bfloat16), axis=0))
    equal(nv.quantize(jnp.asarray(x), amax=jnp.float32(2.5)), nv.quantize(x, amax=2.5))
    with pytest.raises(TypeError, match="got dtype int32"):
        nv.quantize(jnp.zeros((16, 16), jnp.int32))

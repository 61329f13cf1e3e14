"""The backends of installed packages: what they say when they cannot run; that they equal their preset."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Backend, Case
from nvfp4ref import e4m3

Array = np.ndarray[Any, Any]

MODULES = ("torchao", "modelopt", "compressed_tensors", "jax_nn", "te_jax")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def backend_class(module: str) -> Any:
    return importlib.import_module(f"nvfp4hw.backends.{module}").BACKEND


def available(module: str) -> Any:
    """The backend of that module; skips where its package is not installed, and nowhere else."""
    found = backend_class(module)()
    reason = found.availability()
    if reason is not None and reason.startswith("not installed"):
        pytest.skip(f"{found.name}: {reason}")
    assert reason is None
    return found


@pytest.fixture(params=MODULES)
def backend(request: pytest.FixtureRequest) -> Any:
    return available(request.param)


# ---- tensors that bite -------------------------------------------------------------------------------------


def blocks_of(rng: np.random.Generator, amaxes: Array) -> Array:
    """(n, 16·k) normal values, each block's largest magnitude as given, with a random sign."""
    x = rng.standard_normal((*amaxes.shape, 16)).astype(np.float32)
    largest: Array = np.max(np.abs(x), axis=-1, keepdims=True)
    x *= amaxes[..., None] / largest
    at = np.asarray(rng.integers(16, size=amaxes.shape))[..., None]
    np.put_along_axis(x, at, (amaxes * rng.choice([-1, 1], amaxes.shape)).astype(np.float32)[..., None], -1)
    return x.reshape(len(amaxes), -1)


def tensors(seed: int) -> dict[str, Array]:
    """float32 tensors (32, 64) by name; what float16 or bfloat16 make of them is part of the test."""
    rng = np.random.default_rng(seed)
    shape, grid = (32, 64), (32, 4)
    normal = rng.standard_normal(shape).astype(np.float32)
    levels = e4m3.decode(np.arange(127, dtype=np.uint8))
    midpoints = (levels[:-1] + levels[1:]) / 2
    hit = (midpoints * 6).astype(np.float32)
    near = np.concatenate([hit, np.nextafter(hit, np.float32(0)), np.nextafter(hit, np.float32(np.inf))])
    quarters = np.round(rng.uniform(-1, 1, shape) * rng.choice([4, 8, 24, 64, 3584], shape)) / 4
    zero_blocks = normal.copy()
    zero_blocks.reshape(-1, 16)[::3] = 0
    zero_blocks.reshape(-1, 16)[1::7] = -0.0
    zero_blocks.reshape(-1)[::11] = -0.0
    outlier = normal * np.float32(1e-3)
    outlier[7, 9] = -6e4
    scale_midpoints = blocks_of(rng, rng.choice(near, grid))
    scale_midpoints[0, 0] = 2688
    found = {
        "normal": normal,
        "mixed decades": normal * (10.0 ** rng.uniform(-8, 0, shape)).astype(np.float32),
        "mixed blocks": blocks_of(rng, (2.0 ** rng.uniform(-24, 6, grid)).astype(np.float32)),
        "E4M3 midpoints": scale_midpoints,
        "quarters, amax 896": np.clip(quarters, -896, 896).astype(np.float32),
        "zeros": np.zeros(shape, np.float32),
        "minus zeros": -np.zeros(shape, np.float32),
        "zero blocks": zero_blocks,
        "all equal": np.full(shape, 3.3, np.float32),
        "one outlier": outlier,
        "tiny": normal * np.float32(1e-30),
        "tinier": normal * np.float32(1e-36),
        "subnormal": normal * np.float32(1e-39),
        "huge": normal * np.float32(5e37),
        "single block": normal[:1, :16].copy(),
    }
    found["quarters, amax 896"][0, :2] = 896, -896
    for name, value in {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}.items():
        found[name] = normal.copy()
        found[name][5, 21], found[name][6, 3] = value, 0
    return found


def assert_equals_preset(backend: Any, case: Case) -> None:
    """Every output of the backend equals the oracle's under the preset that it declares."""
    found = backend.quantize(case)
    for suffix, axis, amax in (("", -1, case.amax), ("_t", 0, case.amax_t)):
        if f"packed{suffix}" not in found:
            continue
        q = nv.quantize(case.x, block=case.block, axis=axis, amax=amax, arithmetic=backend.preset)
        for name in ("scales", "packed"):
            expected, actual = getattr(q, name), found[name + suffix]
            assert (actual.dtype, actual.shape) == (np.uint8, expected.shape)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{case.id}: {name}{suffix}")
        if f"amax{suffix}" not in found:
            assert backend.name == "te-jax" and 0 < q.amax < np.finfo(np.float32).smallest_normal
            continue
        actual = found[f"amax{suffix}"]
        assert (actual.dtype, actual.shape) == (np.float32, ())
        assert actual.view(np.uint32) == np.asarray(q.amax).view(np.uint32), case.id


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_its_preset(backend: Any, dtype: str) -> None:
    if dtype not in backend.features:
        pytest.skip(f"{backend.name} takes no {dtype}")
    for seed in (1, 2):
        for name, x in tensors(seed).items():
            with np.errstate(over="ignore"):
                assert_equals_preset(backend, Case(f"{name} {seed}", "test", x.astype(DTYPES[dtype])))


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (33, 16), (64, 128), (17, 272)])
def test_shapes(backend: Any, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(3).standard_normal(shape).astype(ml_dtypes.bfloat16)
    assert_equals_preset(backend, Case("shape", "test", x))


@pytest.mark.parametrize("amax", [0.0, -1.0, np.nan, np.inf, 1e-45, 1e-40, 0.3, 2688.0, 3e38])
def test_given_amax(backend: Any, amax: float) -> None:
    if "given-amax" not in backend.features:
        pytest.skip(f"{backend.name} takes no amax")
    for name, x in tensors(4).items():
        assert_equals_preset(backend, Case(name, "test", x, amax=np.float32(amax)))


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("directions", ["col", "both"])
def test_te_jax_blocks_and_directions(block: tuple[int, int], directions: str) -> None:
    backend = available("te_jax")
    for name in ("normal", "mixed blocks", "zero blocks", "E4M3 midpoints"):
        x = tensors(5)[name].astype(ml_dtypes.bfloat16)
        assert_equals_preset(backend, Case(name, "test", x, block=block, directions=directions))


def test_te_jax_leaves_no_stand_ins() -> None:
    """Other code that imports Transformer Engine must get the real package."""
    available("te_jax")
    assert "transformer_engine_jax" not in sys.modules
    assert not any(name.startswith("transformer_engine.jax") for name in sys.modules)


# ---- the protocol ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_protocol(module: str) -> None:
    backend = backend_class(module)()
    assert isinstance(backend, Backend)
    assert backend.name == backend.preset and backend.preset in nv.PRESETS
    assert {"quantize", "1x16", "row"} <= backend.features
    assert backend.cases("quick") is None


def test_version_names_every_package_that_decides_the_bits(backend: Any) -> None:
    for distribution in backend.distributions:
        assert f"{distribution} {importlib.metadata.version(distribution)}" in backend.version()


@pytest.mark.parametrize("module", MODULES)
def test_missing_package(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_class(module)()
    monkeypatch.setattr(type(backend), "distributions", ("no-such-package",))
    assert backend.availability() == f"not installed: no-such-package ({backend.install})"
    with pytest.raises(RuntimeError, match="not installed"):
        backend.quantize(Case("x", "test", np.zeros((1, 16), np.float32)))


@pytest.mark.parametrize("module", ["torchao", "modelopt", "compressed_tensors", "jax_nn"])
def test_version_without_the_call(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_class(module)()
    monkeypatch.setattr(type(backend), "distributions", ("numpy",))
    monkeypatch.setattr(type(backend), "uses", ("numpy:no_such_function",))
    monkeypatch.setattr(type(backend), "versions", None)
    reason = backend.availability()
    assert reason.startswith(f"numpy {np.__version__} lacks what this backend calls (AttributeError")
    assert backend.install in reason


def test_nan_scale_bytes_are_one() -> None:
    torch = pytest.importorskip("torch")
    scales = torch.tensor([0x7F, 0xFF, 0x38], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert _package.to_scale_bytes(scales).tolist() == [0x7F, 0x7F, 0x38]

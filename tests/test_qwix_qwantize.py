"""qwix and qwantize, really run on the CPU: equal to their presets, and explained by diagnosis.

PEER-QWIX, PEER-QWANTIZE.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_backends import tensors

import nvfp4ref as nv
from conformance import cases, suggest
from conformance.diagnose import diagnosis
from nvfp4hw.backends.base import Backend, Case
from nvfp4ref import e4m3
from nvfp4ref.dump import Dump

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
NAMES = ("qwix", "qwantize")
DTYPES = {"float32": np.float32, "bfloat16": BF16, "float16": np.float16}
SIDES = (("", -1), ("_t", 0))
UNFITTED = (71, 72)  # seeds that no preset was fitted to


def backend_class(name: str) -> Any:
    return importlib.import_module(f"nvfp4hw.backends.{name}").BACKEND


def available(name: str) -> Any:
    """The backend of that name; skips where its package is not installed, and nowhere else."""
    found = backend_class(name)()
    reason = found.availability()
    if reason is not None and reason.startswith("not installed"):
        pytest.skip(f"{name}: {reason}")
    assert reason is None
    return found


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return available(request.param)


def assert_equals_preset(backend: Any, case: Case) -> None:
    """Every output of the backend, of the directions asked for and no other, equals the oracle's."""
    found = backend.quantize(case)
    wanted = {"row": SIDES[:1], "col": SIDES[1:], "both": SIDES}[case.directions]
    assert set(found) == {name + suffix for suffix, _ in wanted for name in ("packed", "scales")}
    for suffix, axis in wanted:
        q = nv.quantize(case.x, block=case.block, axis=axis, arithmetic=backend.preset)
        for name in ("scales", "packed"):
            expected, actual = getattr(q, name), found[name + suffix]
            assert (actual.dtype, actual.shape) == (np.uint8, expected.shape)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{case.id}: {name}{suffix}")


# ---- equal to the preset -----------------------------------------------------------------------------------


def test_every_quick_case_that_it_serves(backend: Any) -> None:
    served = [case for case in cases.cases("quick") if case.needs <= backend.features]
    assert len(served) > 100
    for case in served:
        assert_equals_preset(backend, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_seeds_never_fitted(backend: Any, dtype: str) -> None:
    if dtype not in backend.features:
        pytest.skip(f"{backend.name} serves no {dtype}")
    blocks = [block for block in ((1, 16), (16, 16)) if f"{block[0]}x{block[1]}" in backend.features]
    for seed in UNFITTED:
        for name, x in tensors(seed).items():
            with np.errstate(over="ignore"):
                x = x.astype(DTYPES[dtype])
            for block in blocks if len(x) > 1 else blocks[:1]:
                directions = "both" if len(x) > 1 else "row"
                assert_equals_preset(backend, Case(f"{name} {seed}", "test", x, block=block, directions=directions))


def around_midpoints() -> Array:
    """(n, 16) float32 blocks whose amax is 6 times an E4M3 midpoint, or up to three ulps beside it."""
    levels = e4m3.decode(np.arange(127, dtype=np.uint8))
    hit: Array = (levels[:-1] + levels[1:]) * np.float32(3)
    amaxes = (hit.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32)
    x: Array = amaxes.reshape(-1, 1) * np.linspace(-0.9, 1, 16, dtype=np.float32)
    return x


def test_a_sixth_is_a_product_in_qwix_and_a_quotient_in_qwantize() -> None:
    """XLA turns the division by 6 into a product with fl(1/6); a few bytes in a thousand show it."""
    x = around_midpoints()
    product, quotient = (
        nv.quantize(x, arithmetic=nv.arithmetic("qwix", block_scale=form)).scales
        for form in ("scale-then-sixth", "divide-by-6")
    )
    assert (product != quotient).any()
    for name, expected in zip(NAMES, (product, quotient), strict=True):
        found = available(name).quantize(Case("midpoints", "test", x))
        np.testing.assert_array_equal(found["scales"], expected, err_msg=name)


def test_qwix_called_eagerly_gives_the_same() -> None:
    (quantize,) = available("qwix")._objects()
    import jax

    for name, x in tensors(73).items():
        for dtype in (np.float32, BF16):
            with np.errstate(over="ignore"):
                x = x.astype(dtype)
            with jax.default_device(jax.devices("cpu")[0]):
                found = quantize(jax.numpy.asarray(x), "nvfp4", channelwise_axes=[0], tiled_axes={1: 16})
            q = nv.quantize(x, arithmetic="qwix")
            np.testing.assert_array_equal(np.asarray(found.qvalue).view(np.uint8), q.codes, err_msg=name)
            np.testing.assert_array_equal(np.asarray(found.scale, np.float32), e4m3.decode(q.scales), err_msg=name)


def test_what_the_preset_leaves_out_of_qwantize() -> None:
    """It takes the sign of x, the preset that of the quotient: apart where that underflows, |x| ≤ 224·2^-149."""
    x = np.zeros((1, 16), np.float32)
    x[0, :4] = 2688, -224 * 2.0**-149, -225 * 2.0**-149, -0.0
    found = available("qwantize").quantize(Case("underflow", "test", x))
    assert nv.e2m1.unpack(found["packed"])[0, :4].tolist() == [7, 8, 8, 0]
    assert nv.quantize(x, arithmetic="qwantize").codes[0, :4].tolist() == [7, 0, 8, 0]


# ---- explained ---------------------------------------------------------------------------------------------


def inputs() -> dict[str, Array]:
    found = {f"probe.{dtype}": suggest.probe(dtype) for dtype in ("float32", "bfloat16")}
    found["normal"] = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32).astype(BF16)
    for name in ("mixed blocks", "zero blocks", "tiny", "NaN"):
        x = tensors(UNFITTED[0])[name]
        found |= {f"{name}.float32": x, f"{name}.bfloat16": x.astype(BF16)}
    return found


@pytest.mark.parametrize("x", inputs().values(), ids=inputs())
def test_diagnosis_explains_every_byte_and_calls_it_by_its_name(backend: Any, x: Array) -> None:
    for block in ((1, 16), (16, 16)):
        case = Case("real", "test", x, block=block, directions="both")
        if not case.needs <= backend.features:
            continue
        found = diagnosis(Dump(x=x, block=block, **backend.quantize(case)))
        assert found.deviations and all(one.exact for one in found.deviations) and not found.relations
        assert backend.name in found.presets


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_deviations_named_on_a_probe(backend: Any, dtype: str) -> None:
    x = suggest.probe(dtype)
    found = diagnosis(Dump(x=x, **backend.quantize(Case("probe", "test", x))))
    named = {ident for one in found.explanations for ident in one}
    expected = {
        "qwix": {"global-scale.none", "block-scale.zero-block-value"},
        "qwantize": {"global-scale.none", "element.negative-zero-dropped"},
    }[backend.name]
    assert expected <= named


# ---- the protocol ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_protocol(name: str) -> None:
    backend = backend_class(name)()
    assert isinstance(backend, Backend)
    assert backend.name == backend.preset == name and name in nv.PRESETS
    assert backend.cases("quick") is None


def test_version_names_every_package_that_decides_the_bits(backend: Any) -> None:
    for distribution in backend.distributions:
        assert f"{distribution} {importlib.metadata.version(distribution)}" in backend.version()


@pytest.mark.parametrize("name", NAMES)
def test_missing_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_class(name)()
    monkeypatch.setattr(type(backend), "distributions", ("no-such-package",))
    assert backend.availability() == f"not installed: no-such-package ({backend.install})"
    with pytest.raises(RuntimeError, match="not installed"):
        backend.quantize(Case("x", "test", np.zeros((1, 16), np.float32)))


@pytest.mark.parametrize(("name", "version"), [("qwix", "0.1.7"), ("qwix", "0.1.9"), ("qwantize", "0.2.0")])
def test_versions_that_were_not_read(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """qwix knows the type "nvfp4" from 0.1.8 on; of what comes later nothing is known yet."""
    installed = importlib.metadata.version

    def pretended(distribution: str) -> str:
        return version if distribution == name else installed("numpy")

    monkeypatch.setattr(importlib.metadata, "version", pretended)
    backend = backend_class(name)()
    reason = backend.availability()
    assert reason is not None and f"{name} {version} is installed" in reason and backend.install in reason
    with pytest.raises(RuntimeError, match="is installed, and this backend calls"):
        backend.quantize(Case("x", "test", np.zeros((1, 16), np.float32)))

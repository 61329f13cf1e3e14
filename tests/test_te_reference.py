"""Transformer Engine's Python reference, run: the preset ``te-reference`` against it, and its own rules."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from inputs import AMAXES, BFLOAT16, Array, bfloat16, bits, decades, every_class, random, same_bits, ties

import nvfp4ref as nv
from nvfp4hw.backends import Backend, Case, Outputs, _te_package, load, te_reference
from nvfp4hw.backends.te_vectors import TEVectors

BACKEND = te_reference.TransformerEngineReference()
_reason = BACKEND.availability()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": bfloat16, "float16": np.dtype(np.float16)}
#: every mode of the reference: block and fields
PLAIN: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((1, 16), {}),
    ((16, 16), {}),
    ((1, 16), {"row_scaled": True}),
]
MODES = PLAIN + [
    (block, fields | {"four_over_six": error, "e4m3_max": largest, "four_over_six_fast_error": fast})
    for block, fields in PLAIN
    for error in ("MAE", "MSE")
    for largest in (448, 256)
    for fast in (False, True)
]


def cast(x: Array, dtype: Any) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def bit_patterns(dtype: Any, seed: int) -> Array:
    """(64, 64) of every class of number, NaN only in the first rows."""
    width = np.dtype(dtype).itemsize
    patterns = np.random.default_rng(seed).integers(0, 256**width, (64, 64)).astype(f"u{width}")
    x = patterns.view(dtype)
    x[4:][np.isnan(x[4:].astype(np.float32))] = 1
    return x


def tensors(dtype: Any) -> dict[str, Array]:
    """Inputs (64, 64) by name: ordinary ones and those that ask for each special rule."""
    zeros = np.zeros((64, 64), np.float32)
    zeros[::2] = -0.0
    one_nan, infinite = random(64, 64, 5), random(64, 64, 6)
    one_nan[3, 20], infinite[7, 1], infinite[40, 60] = np.nan, np.inf, -np.inf
    largest = np.full((64, 64), float(np.finfo(np.float32).max if dtype == np.float32 else 6e4), np.float32)
    return {
        "normal": cast(random(64, 64), dtype),
        "decades": cast(decades(64, 64), dtype),
        "tiny": cast(np.ldexp(random(64, 64, 7), -20 if dtype == np.float16 else -130), dtype),
        "ties": cast(np.resize(ties(), (64, 64)), dtype),
        "zeros": cast(zeros, dtype),
        "one NaN": cast(one_nan, dtype),
        "infinite": cast(infinite, dtype),
        "largest": cast(largest, dtype),
        "every class": cast(every_class(64, 64), dtype),
        "bit patterns": bit_patterns(dtype, 8),
    }


def oracle(case: Case, arithmetic: str = "te-reference") -> Outputs:
    chosen = nv.arithmetic(arithmetic, **case.fields)
    outputs: Outputs = {}
    if case.directions in ("row", "both"):
        q = nv.quantize(case.x, block=case.block, amax=case.amax, arithmetic=chosen)
        outputs |= {"packed": q.packed, "scales": q.scales, "amax": q.amax}
    if case.directions in ("col", "both"):
        q = nv.quantize(case.x, block=case.block, axis=0, rht=case.rht_t, amax=case.amax_t, arithmetic=chosen)
        outputs |= {"packed_t": q.packed, "scales_t": q.scales, "amax_t": q.amax}
    return outputs


def assert_conforms(case: Case) -> None:
    assert case.needs <= BACKEND.features
    found, expected = BACKEND.quantize(case), oracle(case)
    assert found.keys() == expected.keys()
    for name in found:
        same_bits(found[name], expected[name])


# ---- the preset, bit for bit -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("block", "fields"), MODES, ids=str)
def test_the_preset_is_the_reference(dtype: Any, block: tuple[int, int], fields: dict[str, Any]) -> None:
    for name, x in tensors(dtype).items():
        assert_conforms(Case(name, "mode", x, block=block, directions="both", fields=fields))


@pytest.mark.parametrize("sign_mask", [0xD7E8, 0])
@pytest.mark.parametrize(("block", "fields"), MODES[:2], ids=str)
def test_the_preset_transforms_as_the_reference(
    sign_mask: int, block: tuple[int, int], fields: dict[str, Any]
) -> None:
    for name, x in tensors(bfloat16).items():
        rht = nv.RHT(sign_mask=sign_mask)
        assert_conforms(Case(name, "rht", x, block=block, directions="both", fields=fields, rht_t=rht))


@pytest.mark.parametrize("amax", AMAXES)
def test_the_preset_takes_any_amax_as_the_reference_does(amax: float) -> None:
    given: Any = {"amax": np.float32(amax), "amax_t": np.float32(amax)}
    for name, x in tensors(bfloat16).items():
        for block, fields in (MODES[0], MODES[1], MODES[3]):
            assert_conforms(Case(name, "amax", x, block=block, directions="both", fields=fields, **given))


def test_each_row_may_have_any_amax() -> None:
    given = np.resize(np.array(AMAXES, np.float32), 64)
    for name, x in tensors(np.dtype(np.float32)).items():
        for fields in ({"row_scaled": True}, {"row_scaled": True, "four_over_six": "MSE"}):
            assert_conforms(
                Case(name, "amax", x, directions="both", fields=fields, amax=given, amax_t=given[::-1])
            )


def test_a_transform_and_a_given_amax_go_together() -> None:
    x = tensors(bfloat16)["decades"]
    assert_conforms(Case("both", "amax", x, directions="both", rht_t=nv.RHT(), amax_t=np.float32(0.5)))


@pytest.mark.parametrize("directions", ["row", "col", "both"])
def test_only_the_directions_asked_for_come_back(directions: str) -> None:
    x = random(32, 48)
    assert_conforms(Case(directions, "directions", x, directions=directions))
    case = Case(directions, "directions", x, directions=directions, fields={"row_scaled": True})
    found = BACKEND.quantize(case)
    assert_conforms(case)
    if "amax_t" in found:
        assert found["amax_t"].shape == (48,) and found["packed_t"].shape == (48, 16)
    if "amax" in found:
        assert found["amax"].shape == (32,) and found["scales"].shape == (32, 3)


def test_every_bfloat16_number_is_quantized_alike() -> None:
    finite = np.where(np.isnan(BFLOAT16.astype(np.float32)), np.zeros_like(BFLOAT16), BFLOAT16)
    assert_conforms(Case("all", "sweep", finite.reshape(256, 256), directions="both"))
    for amax in (1e-38, 1.0, 1e30):
        given = np.float32(amax)
        assert_conforms(Case("all", "sweep", finite.reshape(256, 256), amax=given))


# ---- its own rules -----------------------------------------------------------------------------------------


def first_codes(x: Array, **how: Any) -> list[int]:
    packed = BACKEND.quantize(Case("rule", "rule", x, **how))["packed"]
    return [int(code) for code in nv.e2m1.unpack(packed)[0]]


def test_an_exact_zero_has_no_sign_but_a_small_negative_has() -> None:
    x = np.ones((16, 16), np.float32)
    x[0, :3] = [-0.0, -1e-3, 1e-3]
    assert first_codes(x)[:3] == [0, 8, 0]
    assert nv.quantize(x).codes[0, :3].tolist() == [8, 8, 0]


def test_a_product_that_underflows_loses_its_sign() -> None:
    x = np.full((16, 16), 3e38, np.float32)
    x[0, 1:3] = [-1e-45, -1e-6]  # times 1.9e-38: less than half the smallest float32, and a subnormal
    assert first_codes(x)[1:3] == [0, 8]
    assert nv.quantize(x).codes[0, 1:3].tolist() == [8, 8]


def test_one_nan_spoils_the_whole_tensor() -> None:
    x = random(32, 64)
    x[5, 7] = -np.nan
    found = BACKEND.quantize(Case("NaN", "rule", x))
    assert bits(found["amax"]) == 0x7FFFFFFF
    assert np.unique(found["scales"]).tolist() == [0x7F] and not found["packed"].any()


def test_one_nan_spoils_its_row_when_row_scaled() -> None:
    x = random(32, 64)
    x[5, 7] = np.nan
    found = BACKEND.quantize(Case("NaN", "rule", x, directions="both", fields={"row_scaled": True}))
    assert np.flatnonzero((found["scales"] == 0x7F).all(axis=1)).tolist() == [5]
    assert np.flatnonzero((found["scales_t"] == 0x7F).all(axis=1)).tolist() == [7]
    assert (found["scales"] == 0x7F).sum() == 4 and (found["scales_t"] == 0x7F).sum() == 2


def test_a_given_amax_of_zero_is_an_encode_scale_of_float32_max() -> None:
    x = np.ones((16, 16), np.float32)
    found = BACKEND.quantize(Case("zero", "rule", x, amax=np.float32(0)))
    assert np.unique(found["scales"]).tolist() == [0x7E] and first_codes(x, amax=np.float32(0))[0] == 7
    kernel = nv.quantize(x, amax=np.float32(0))
    assert np.unique(kernel.scales).tolist() == [0x23]


def test_the_transform_keeps_subnormals_and_leaves_onednn_as_it_was() -> None:
    import torch

    x = np.full((16, 16), 2.0**-130, np.float32).astype(bfloat16)
    before: Any = torch.backends.mkldnn.enabled
    found = BACKEND.quantize(Case("tiny", "rule", x, directions="col", rht_t=nv.RHT(sign_mask=0)))
    assert found["amax_t"] == np.float32(2.0**-128)
    assert torch.backends.mkldnn.enabled is before


def test_finite_data_differ_from_the_kernels_in_signs_of_zero_only() -> None:
    counts: Counter[str] = Counter()
    for dtype in DTYPES.values():
        for name, x in tensors(dtype).items():
            if np.isnan(x.astype(np.float32)).any():
                continue
            for block, fields in MODES:
                case = Case(name, "te", x, block=block, directions="both", fields=fields)
                count_differences(BACKEND.quantize(case), oracle(case, "te"), counts)
    assert counts["sign of zero"] > 1000 and set(counts) == {"sign of zero"}


def count_differences(found: Outputs, kernel: Outputs, counts: Counter[str]) -> None:
    """Codes and scales by cause; a block whose scale the reference made NaN differs because of NaN."""
    for name in ("packed", "packed_t"):
        if name not in kernel or name.replace("packed", "scales") not in kernel:
            continue
        ours, theirs = nv.e2m1.unpack(found[name]), nv.e2m1.unpack(kernel[name])
        scales, wanted = (side[name.replace("packed", "scales")] for side in (found, kernel))
        nan = scales == 0x7F
        spoiled = np.repeat(nan, 16, axis=1)
        differ = ours != theirs
        sign = differ & (ours == 0) & (theirs == 8) & ~spoiled
        counts["sign of zero"] += int(sign.sum())
        counts["NaN"] += int((differ & spoiled).sum()) + int(((scales != wanted) & nan).sum())
        counts["other"] += int((differ & ~sign & ~spoiled).sum()) + int(((scales != wanted) & ~nan).sum())
    for cause in [cause for cause, count in counts.items() if not count]:
        del counts[cause]


def test_the_recorded_kernels_differ_from_it_in_signs_of_zero_and_nan_only() -> None:
    recorded = TEVectors()
    if (reason := recorded.availability()) is not None:
        pytest.skip(reason)
    counts: Counter[str] = Counter()
    compared = 0
    for case in recorded.cases("quick"):
        zero_given = case.amax is not None and not np.any(case.amax)
        masked = case.rht_t is not None and case.rht_t.sign_mask not in (0, 0xD7E8)
        if not case.needs <= BACKEND.features or case.arithmetic not in (None, "te") or zero_given or masked:
            continue
        kernel = recorded.quantize(case)
        if kernel.keys() >= {"packed", "scales"} or kernel.keys() >= {"packed_t", "scales_t"}:
            count_differences(BACKEND.quantize(case), kernel, counts)
            compared += 1
    assert compared > 50 and set(counts) == {"sign of zero", "NaN"}


# ---- the backend around it ---------------------------------------------------------------------------------


def test_it_is_a_backend_that_says_what_it_runs() -> None:
    backend = load("te-reference")
    assert isinstance(backend, Backend) and backend.preset == "te-reference" and backend.cases("full") is None
    assert backend.version().startswith("transformer-engine 2.") and "torch 2." in backend.version()


def test_the_module_is_the_installed_file() -> None:
    module = te_reference.reference()
    assert module.__file__.endswith("transformer_engine/pytorch/custom_recipes/reference_nvfp4.py")


def test_nothing_of_transformer_engine_stays_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", theirs)
    te_reference.reference.cache_clear()
    BACKEND.quantize(Case("again", "import", random(16, 16)))
    left = [name for name in sys.modules if name.startswith("transformer_engine")]
    assert left == ["transformer_engine"] and sys.modules["transformer_engine"] is theirs
    monkeypatch.delitem(sys.modules, "transformer_engine")
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.origin is not None and spec.origin.endswith("__init__.py")


def test_a_failed_import_leaves_the_modules_as_they_were() -> None:
    before, extension = dict(sys.modules), ModuleType("transformer_engine_torch")
    with pytest.raises(ModuleNotFoundError):
        _te_package.import_file("pytorch.no_such_file", ("pytorch",), {extension.__name__: extension})
    assert {name for name in sys.modules if "transformer_engine" in name} == {
        name for name in before if "transformer_engine" in name
    }


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_reference.TransformerEngineReference, "requirements", ("no-such-package",))
    assert BACKEND.availability() == "not installed: no-such-package (pip install 'nvfp4ref[te]')"
    with pytest.raises(RuntimeError, match="not installed: no-such-package"):
        BACKEND.quantize(Case("normal", "rule", random(16, 16)))


def test_a_package_without_the_file_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ModuleNotFoundError("no module named reference_nvfp4")

    monkeypatch.setattr(te_reference, "reference", broken)
    reason = BACKEND.availability()
    assert reason is not None and "reference_nvfp4" in reason and "pip install 'nvfp4ref[te]'" in reason


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kind": "e2m1"}, "asked for 'e2m1'"),
        ({"rounding": "stochastic"}, "asked for 'quantize', 'stochastic'"),
        ({"fields": {"nan_code": 7}}, "no setting for nan_code"),
        ({"fields": {"e4m3_max": 256}}, "e4m3_max 256 only with 4over6"),
        ({"rht_t": nv.RHT(sign_mask=1)}, "sign mask 0 or 0xd7e8"),
        ({"rht_t": nv.RHT(size=32, sign_mask=0)}, "transforms 16 elements"),
        ({"rht_t": nv.RHT()}, "the kernels' is bfloat16"),
    ],
)
def test_what_it_cannot_be_asked_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"te-reference cannot run case odd: .*{message}"):
        BACKEND.quantize(Case("odd", "refused", random(32, 32), directions="both", **how))

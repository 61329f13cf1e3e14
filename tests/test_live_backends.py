"""The backends on a GPU, driven where there is none: by fakes that the oracle plays, with and without a fault.

What is real is used: the packages' Python files where they import, torchao's own quantizer, JAX on the CPU.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib
import inspect
import os
import struct
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cases as suite_cases
from conformance import run
from conformance.expect import Expectation
from nvfp4hw import backends, cut_fatbin, rng
from nvfp4hw.backends import _gpu, _package, _te_package, cublaslt, flashinfer, jax_nn, live_cases, te_jax, te_torch
from nvfp4hw.backends.base import Backend, Case, Refused
from nvfp4hw.backends.te_kernels import TransformerEngineKernels
from nvfp4hw.backends.te_torch import TransformerEngineTorch

torch = pytest.importorskip("torch")
from fake_engine import Engine, print_on_device, to_torch  # noqa: E402 - it needs torch

Array = np.ndarray[Any, Any]

LIVE = ["te-torch", "te-torch-kernels", "te-jax-gpu", "te-jax-cuda", "torchao-gpu", "torchao-mslk", "torchao-training"]
LIVE += ["flashinfer", "jax-nn-gpu", "cublaslt"]


@pytest.fixture(autouse=True)
def _fresh_imports() -> Iterator[None]:
    yield
    _package._imported.cache_clear()


def quick() -> list[Case]:
    """Two cases of each family and way to call of the quick suite."""
    seen: dict[Any, int] = {}
    chosen = []
    for case in suite_cases.cases("quick"):
        key = case.family, case.block, case.directions, case.x.dtype.name, tuple(case.fields.items()), case.rounding
        seen[key] = seen.get(key, 0) + 1
        if case.kind == "quantize" and seen[key] <= 2:
            chosen.append(case)
    return chosen


def results(backend: Any, cases: list[Case] | None = None) -> dict[str, run.CaseResult]:
    """What a backend makes of the cases that it serves, by id."""
    assert backend.availability() is None
    served = [case for case in (quick() if cases is None else cases) if case.needs <= backend.features]
    return {case.id: run.run_case(backend, case) for case in served}


def refusal(one: run.CaseResult) -> str | None:
    """What was refused, in words; None where there is an answer or an error."""
    return one.refused if not one.outputs else None


def refusals(found: dict[str, run.CaseResult]) -> dict[str, str]:
    return {ident: words for ident, one in found.items() if (words := refusal(one)) is not None}


def answered(found: dict[str, run.CaseResult]) -> dict[str, run.CaseResult]:
    """What was not refused; an error that is no refusal fails."""
    right = {ident: one for ident, one in found.items() if refusal(one) is None}
    wrong = [one for one in right.values() if one.error is not None]
    assert not wrong, wrong[0]
    return right


def flip(name: str) -> Any:
    """A fault: the lowest bit of the last item of one output."""

    def fault(output: str, array: Array) -> Array:
        if output != name:
            return array
        changed = np.array(array, order="C")
        changed.reshape(-1).view(np.uint8)[-1 if array.itemsize == 1 else -array.itemsize] ^= 1
        return changed

    return fault


def departing(found: dict[str, run.CaseResult]) -> set[str]:
    return {name for one in found.values() for name, count in one.outputs.items() if count.different}


# ---- availability ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIVE)
def test_says_why_it_cannot_run(name: str) -> None:
    backend = backends.load(name)
    assert isinstance(backend, Backend) and backend.name == name and backend.preset in nv.PRESETS
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    reason = backend.availability()
    assert reason is not None and ("not installed: " in reason or "GPU" in reason or "CUDA" in reason)
    assert len(reason.splitlines()) == 1


def test_what_would_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, (8, 0))
    backend = TransformerEngineTorch()
    assert backend.availability() == "its kernels need sm_90 or newer, and this GPU is sm_80"
    engine.capability = (9, 0)
    assert backend.availability() is None
    assert backend.version() == f"transformer-engine 2.20.2 (torch {metadata.version('torch')}) on Fake GPU (sm_90)"
    monkeypatch.setattr(TransformerEngineTorch, "versions", ("2.21", "3"))
    assert "transformer-engine 2.20.2 is installed, and this backend calls 2.21 or later, below 3" in str(
        backend.availability()
    )
    monkeypatch.setattr(TransformerEngineTorch, "versions", ("2.15", "2.20"))
    assert "below 2.20" in str(backend.availability())


@pytest.mark.parametrize(
    "version, numbers", [("2.20.2", (2, 20, 2)), ("2.20.2+cu13", (2, 20, 2)), ("0.7.4rc1", (0, 7, 4))]
)
def test_version_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert _package._numbers(version) == numbers


def test_torch_without_cuda() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(RuntimeError, match="built without CUDA: install a CUDA build"):
        _gpu.torch_capability()


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    monkeypatch.delenv("NVTE_OTHER", raising=False)
    with _gpu.environment(NVTE_USE_FAST_MATH="0", NVTE_OTHER="x"):
        assert (os.environ["NVTE_USE_FAST_MATH"], os.environ["NVTE_OTHER"]) == ("0", "x")
    assert os.environ["NVTE_USE_FAST_MATH"] == "1" and "NVTE_OTHER" not in os.environ


def test_what_kernels_print_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    with _gpu.printed() as lines:
        print_on_device("SM 10.0+ is required.")
        print_on_device("another")
    print_on_device("not read")
    assert lines == ["SM 10.0+ is required.", "another"]
    assert "SM 10.0+" not in capfd.readouterr().out


# ---- te-torch ----------------------------------------------------------------------------------------------


def test_te_torch_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(monkeypatch)
    backend = TransformerEngineTorch()
    found = results(backend)
    assert backend.features >= {"rht", "row_scaled", "four_over_six", "stochastic", "given-amax", "16x16", "col"}
    right = answered(found)
    assert not departing(right) and len(right) > 100 and not backend.refused
    words = set(refusals(found).values())
    assert all("multiples of 16" in word or "with its kernel" in word for word in words), words
    outputs = {name for one in right.values() for name in one.outputs}
    assert outputs == {f"{name}{side}" for name in ("packed", "scales", "amax") for side in ("", "_t")}


@pytest.mark.parametrize("output", ["packed", "scales", "amax", "packed_t", "scales_t", "amax_t"])
def test_te_torch_shows_a_wrong_bit(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    Engine(monkeypatch, fault=flip(output))
    cases = [case for case in quick() if case.family in ("normal", "stochastic", "given-amax", "hadamard")]
    found = answered(results(TransformerEngineTorch(), cases))
    assert departing(found) == {output}
    assert all(one.outputs[output].different for one in found.values() if output in one.outputs)


def test_te_torch_shows_unwritten_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel leaves alone is not what it was before by chance."""
    engine = Engine(monkeypatch)
    engine.quantize = lambda x, quantizer, tensor, amaxes=(None, None): tensor  # type: ignore[method-assign]
    case = next(case for case in quick() if case.family == "zero")
    outputs = TransformerEngineTorch().quantize(case)
    assert {value for array in outputs.values() for value in array.reshape(-1).tobytes()} == {te_torch.UNWRITTEN}


def test_te_torch_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Hopper's build does not do is refused in its words, and never compared."""
    Engine(monkeypatch, (9, 0))
    backend = TransformerEngineTorch()
    found = results(backend)
    right = answered(found)
    assert not departing(right) and "stochastic" not in backend.features
    assert {name for one in right.values() for name in one.outputs} == {"scales", "amax", "scales_t", "amax_t"}
    assert set(backend.refused) == set(right)
    assert "packed, packed_t: every byte 0; the kernel prints on sm_90: FP4 cvt PTX" in "".join(
        backend.refused.values()
    )
    said = " ".join(refusals(found).values())
    assert "create_2D_tensor_map: CUDA Error: invalid argument" in said
    assert "sm_100 or higher is required.; it leaves packed, scales, amax" in said
    assert "SM 10.0+ is required.; FP4 cvt" in said


def test_te_torch_by_software_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Blackwell without the stochastic conversion: everything but the rule of the suite's stochastic cases."""
    Engine(monkeypatch, (12, 0))
    backend = TransformerEngineTorch()
    assert backend.stochastic_rule == "te-fallback" and "stochastic" not in backend.features
    assert not departing(answered(results(backend)))


def test_older_quantizer_has_fewer_features(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(monkeypatch)

    class Older:
        def __init__(self, rowwise: bool = True, columnwise: bool = True, with_rht: bool = False) -> None: ...

    sys.modules["transformer_engine.pytorch"].__dict__["NVFP4Quantizer"] = Older
    features = TransformerEngineTorch().features
    assert "rht" in features and not features & {"row_scaled", "four_over_six", "e4m3_max"}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rht", [False, True])
@pytest.mark.parametrize("directions", ["row", "col", "both"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_launch_of_a_case(block: tuple[int, int], directions: str, rht: bool, fused: bool) -> None:
    """The generator's state before a call, from the words after it: the inverse of rng.pytorch_launch."""
    for shape in ((128, 256), (144, 80), (64, 96)):
        for dtype in (ml_dtypes.bfloat16, np.float32):
            if rht and dtype == np.float32:
                continue
            x = np.zeros(shape, dtype)
            launch = rng.pytorch_launch(
                (7, 4096), shape, dtype=x.dtype.name, block=block, directions=directions, rht=rht, fused=fused
            )
            states = {"rng": launch.row, "rng_t": launch.column}
            case = Case("c", "test", x, block=block, directions=directions, rounding="stochastic", data=states)
            case = Case(**{**vars(case), "rht_t": nv.RHT() if rht else None})
            if block == (16, 16) and rht and fused and not any(n % 64 for n in shape) and shape[1] % 128 == 0:
                continue  # the fused kernel has no tiles, and the recipe never asks
            expected = {name: state for name, state in states.items() if state is not None}
            if any(not _philox_fits(case, name, state) for name, state in expected.items()):
                continue
            assert te_torch.launch_of(case, fused) == (7, 4096), (shape, x.dtype)


def _philox_fits(case: Case, name: str, state: nv.Philox) -> bool:
    """Whether the state has the flag that a launch of its directions has."""
    rht = case.rht_t is not None
    return rht or state.both == (case.directions == "both")


def test_launch_that_the_package_does_not_make() -> None:
    x = np.zeros((128, 128), ml_dtypes.bfloat16)

    def case(**changes: Any) -> Case:
        return Case("c", "test", x, rounding="stochastic", **changes)

    for data, words in (
        ({"rng": np.zeros((128, 128), np.float32)}, "takes no random numbers"),
        ({"rng": nv.Philox(1, 0, "vector-blockwise")}, "with its kernel 'tuned-1d'"),
        ({"rng": nv.Philox(1, 0, both=True)}, "makes one output"),
    ):
        with pytest.raises(Refused, match=words):
            te_torch.launch_of(case(data=data), True)
    two = {"rng": nv.Philox(1, 0, both=True), "rng_t": nv.Philox(1, 4, both=True)}
    with pytest.raises(Refused, match="one seed and offset"):
        te_torch.launch_of(case(directions="both", data=two), True)
    early = {"rng_t": nv.Philox(1, 0, "unfused-rht")}
    with pytest.raises(Refused, match="1024 on"):
        te_torch.launch_of(case(directions="col", rht_t=nv.RHT(), data=early), False)


def test_real_quantizer_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed package's own NVFP4Quantizer and NVFP4Tensor; only the compiled extension is the oracle's."""
    try:
        installed = metadata.distribution("transformer-engine")
    except metadata.PackageNotFoundError:
        pytest.skip("transformer-engine is not installed")
    root = str(installed.locate_file("transformer_engine"))
    engine = Engine(monkeypatch)

    class Extension(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    extension = Extension("transformer_engine_torch")
    members = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
    forward = [f"GEMM{n}_{role}" for n in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")]
    backward = [f"GRAD_{role}{n}" for n in (1, 2, 3) for role in ("OUTPUT", "INPUT")]
    extension.DType = enum.IntEnum("DType", members, start=0)  # type: ignore[attr-defined]
    extension.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", forward, start=0)  # type: ignore[attr-defined]
    extension.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", backward, start=0)  # type: ignore[attr-defined]
    common = Extension("transformer_engine.common")
    common.__path__ = [f"{root}/common"]
    common.__file__ = f"{root}/common/__init__.py"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    packages = ("common", "pytorch", "pytorch.tensor", "pytorch.tensor.storage")
    module = _te_package.import_file(
        "pytorch.tensor.nvfp4_tensor", packages, {extension.__name__: extension, common.__name__: common}
    )

    def arguments(quantizer: Any) -> dict[str, Any]:
        found = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
        names = "with_rht with_2d_quantization stochastic_rounding row_scaled_nvfp4 nvfp4_use_4over6 nvfp4_e4m3_max"
        found |= {name: getattr(quantizer, name) for name in (*names.split(), "nvfp4_4over6_err_mode")}
        return {**found, "with_random_sign_mask": quantizer.rht_matrix_random_sign_mask_t != 0}

    def create(quantizer: Any, shape: list[int], dtype: Any, device: Any, pin: bool) -> Any:
        specs = quantizer.inner_tensor_specs(tuple(shape))
        if quantizer.row_scaled_nvfp4 and quantizer.columnwise_usage:
            specs["_amax_columnwise"] = ((shape[1],), torch.float32)
        names = (
            "rowwise_data",
            "rowwise_scale_inv",
            "columnwise_data",
            "columnwise_scale_inv",
            "amax_rowwise",
            "amax_columnwise",
        )
        arrays = {
            n: torch.empty(*specs[f"_{n}"][:1], dtype=specs[f"_{n}"][1]) if f"_{n}" in specs else None for n in names
        }
        rest = {
            "fp4_dtype": quantizer.dtype,
            "quantizer": quantizer,
            "with_gemm_swizzled_scales": False,
            "fake_dtype": dtype,
        }
        return module.NVFP4Tensor(shape=torch.Size(shape), dtype=dtype, **arrays, **rest)

    def quantize(x: Any, quantizer: Any, tensor: Any, noop: Any) -> Any:
        return engine.quantize(x, SimpleNamespace(args=arguments(quantizer)), tensor)

    extension.create_empty_quantized_tensor, extension.quantize = create, quantize  # type: ignore[attr-defined]
    monkeypatch.setattr(TransformerEngineTorch, "_objects", lambda self: (module.NVFP4Quantizer, None))
    backend = TransformerEngineTorch()
    assert backend.features >= {"row_scaled", "four_over_six", "e4m3_max"}
    cases = [case for case in quick() if case.amax is None and case.x.size <= 16384]
    right = answered(results(backend, cases))
    assert not departing(right) and len(right) > 80
    engine.fault = flip("scales_t")
    assert departing(answered(results(backend, cases[:40]))) == {"scales_t"}


# ---- te-torch-kernels --------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases of te-torch-kernels on small tensors, of the same kinds."""
    monkeypatch.setattr(live_cases, "ODD", (144, 80))
    monkeypatch.setattr(live_cases, "EVEN", (128, 256))
    monkeypatch.setattr(live_cases, "WEIGHTS", ((192, 320),))
    monkeypatch.setattr(live_cases, "PRODUCTS", ((128, 128, 64), (64, 128, 256)))
    monkeypatch.setattr(live_cases, "TRANSFORMED", (144, 112))
    return list(live_cases.kernel_cases())


KERNEL_OUTPUTS = ["packed", "scales", "amax", "packed_t", "scales_t", "rht_t", "deq_f32", "deq_bf16", "deq_f16"]
KERNEL_OUTPUTS += ["scales_swizzled", "global_scale", "block_amax", "per_block_scale", "expand_scale"]
KERNEL_OUTPUTS += ["scale_transpose", "partial_cast", "data_transpose", "d"]


def test_kernels_on_blackwell(monkeypatch: pytest.MonkeyPatch, small: list[Case]) -> None:
    Engine(monkeypatch)
    found = results(TransformerEngineKernels(), small)
    right = answered(found)
    assert not departing(right)
    assert {ident.split(".")[-1] for ident in refusals(found)} == {"te-fallback"}
    assert {case.kind for case in small if case.id in right} == {case.kind for case in small}
    (layer,) = (one for one in right.values() if one.family == "live/linear")
    operands = {f"{t}.{n}{s}" for t in ("x", "w", "dy") for n in ("packed", "scales", "amax") for s in ("", "_t")}
    assert set(layer.outputs) == operands | {"y", "dx", "dw"}
    assert all(one.compared for one in layer.outputs.values())


@pytest.mark.parametrize("output", KERNEL_OUTPUTS)
def test_kernels_show_a_wrong_bit(monkeypatch: pytest.MonkeyPatch, small: list[Case], output: str) -> None:
    Engine(monkeypatch, fault=flip(output))
    kinds = {
        "packed": "quantize",
        "scales": "quantize",
        "packed_t": "quantize",
        "scales_t": "quantize",
        "rht_t": "hadamard",
    }
    kinds |= {"deq_f32": "dequantize", "deq_bf16": "dequantize", "deq_f16": "dequantize", "scales_swizzled": "swizzle"}
    kinds |= {"amax": "amax", "d": "gemm"}
    kind = kinds.get(output, "recipe")
    found = answered(results(TransformerEngineKernels(), [case for case in small if case.kind == kind]))
    wrong = departing(found)
    assert any(output in name for name in wrong), wrong
    if kind != "recipe":  # a later step of the recipe reads what an earlier one wrote
        assert wrong == {output}


def test_layer_shows_which_operand_is_wrong(monkeypatch: pytest.MonkeyPatch, small: list[Case]) -> None:
    engine = Engine(monkeypatch)
    (case,) = (case for case in small if case.kind == "linear" and case.fields["stochastic"] == "sm100")
    (one,) = results(TransformerEngineKernels(), [case]).values()
    assert one.status == run.CONFORMS
    engine.fault = flip("packed_t")
    (one,) = results(TransformerEngineKernels(), [case]).values()
    wrong = departing({"one": one})
    assert {"x.packed_t", "w.packed_t", "dy.packed_t", "dx", "dw"} == wrong


def test_kernels_on_hopper(monkeypatch: pytest.MonkeyPatch, small: list[Case]) -> None:
    Engine(monkeypatch, (9, 0))
    monkeypatch.setattr(te_torch, "LOUD", 20000)
    backend = TransformerEngineKernels()
    found = results(backend, small)
    right = answered(found)
    assert not departing(right)
    stochastic = [one for one in right.values() if one.family == "live/stochastic"]
    assert stochastic and all("packed" in one.outputs or "packed_t" in one.outputs for one in stochastic)
    assert any("te-fallback" in one.id and one.id not in backend.refused for one in stochastic)
    said = " ".join(refusals(found).values())
    for words in (
        "sm_90 rounds stochastically by the rule te-fallback",
        "compute capability 10.0 or higher required for NVFP4 execution",
        "Unable to find suitable cuBLAS GEMM algorithm",
        "its kernels print that once a thread",
        "create_2D_tensor_map",
    ):
        assert words in said
    assert "partial_cast, data_transpose: no codes on sm_90" in " ".join(backend.refused.values())
    assert not any("partial_cast" in one.outputs for one in right.values())


def test_kernels_by_software_rounding(monkeypatch: pytest.MonkeyPatch, small: list[Case]) -> None:
    Engine(monkeypatch, (12, 0))
    found = results(TransformerEngineKernels(), small)
    assert not departing(answered(found))
    assert {ident.split(".")[-1] for ident in refusals(found)} == {"sm100"}


# ---- the live cases ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> list[Case]:
    return [*live_cases.kernel_cases(), *live_cases.gemm_cases("none")]


def test_live_cases_are_enough(large: list[Case]) -> None:
    """As many codes and scales as the record is to have on Hopper: ten million, and a million each way."""
    assert len({case.id for case in large}) == len(large) and all(case.hunts for case in large)
    codes: dict[str, int] = {}
    for case in large:
        if (
            case.family == "live/stochastic"
            and case.fields["stochastic"] == "te-fallback"
            and case.x.shape == live_cases.ODD
        ):
            for side in {"row": ("",), "col": ("_t",), "both": ("", "_t")}[case.directions]:
                for shape in (f"{case.block[0]}x{case.block[1]}", side):
                    codes[shape] = codes.get(shape, 0) + case.x.size
    assert min(codes.values()) > 10**7 and codes["1x16"] + codes["16x16"] > 16 * 10**6


def test_live_inputs_do_not_change(large: list[Case]) -> None:
    """Recordings name these cases: an id keeps its input."""
    said = hashlib.sha256()
    for case in large:
        said.update(case.id.encode())
        said.update(np.ascontiguousarray(case.x).view(np.uint8).tobytes())
    assert said.hexdigest() == "6d4512d60108c8a316756373b88095bbbfd98bbad29e661431dc660d82da318a"


@pytest.mark.parametrize(
    "change",
    [
        {"block_scale": "divide-by-6"},
        {"block_scale": "scale-then-sixth"},
        {"block_scale": "divide-twice"},
        {"global_scale": "reciprocal-form"},
        {"global_scale": "reciprocal-then-multiply"},
        {"encode_scale": "quotient"},
        {"encode_scale": "reciprocal-product"},
        {"encode_ulp": 1},
        {"encode_ulp": -1},
        {"negative_zero": "drop-exact"},
        {"scale_floor": 2.0**-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_live_inputs_bite(dtype: str, change: dict[str, Any]) -> None:
    """Another arithmetic shows in one of the two amaxes, in both block shapes, many times."""
    for block in ((1, 16), (16, 16)):
        different = 0
        for amax in live_cases.AMAXES:
            x = live_cases.adversarial((272, 528), dtype, amax)
            right, wrong = (
                nv.quantize(x, block=block, arithmetic=nv.arithmetic("te", **fields)) for fields in ({}, change)
            )
            different += int((right.codes != wrong.codes).sum() + (right.scales != wrong.scales).sum())
        assert different > 10, block


def test_wide_input_shows_the_truncated_sum() -> None:
    """The transform's window cuts something off, so that an exactly rounded sum is another one."""
    x = live_cases.wide((1072, 1040))
    found = nv.hadamard.transform(x, nv.RHT(), axis=0)
    signs = np.array([-1.0 if 0xD7E8 >> k & 1 else 1.0 for k in range(16)])
    matrix = np.array([[(-1.0) ** (k & j).bit_count() for j in range(16)] for k in range(16)]) / 4
    tiles = x.astype(np.float64).reshape(67, 16, 1040) * signs[None, :, None]
    exact = np.einsum("bkc,kj->cbj", tiles, matrix).reshape(1040, 1072).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert 0 < np.count_nonzero(exact.view(np.uint16) != found.view(np.uint16)) < 1000


def test_products_differ_between_models() -> None:
    """The wide operands tell accumulator models apart, the near ones do not."""
    told = {}
    for case in live_cases.gemm_cases("none"):
        if case.data["out_dtype"] == "float32" and case.id.split(".")[2] == "128x128x64":
            a, b = (
                nv.NVFP4Tensor.from_arrays(*(case.data[f"{one}_{n}"] for n in ("packed", "scales", "amax")))
                for one in "ab"
            )
            right, other = (nv.matmul(a, b, model=model, alpha_form="none") for model in ("blackwell", "exact"))
            assert np.array_equal(right, Expectation(case, "te").output("d"))
            told[case.id.split(".")[1]] = int((right.view(np.uint32) != other.view(np.uint32)).sum())
    assert told["wide"] > 0


# ---- flashinfer, cublaslt, torchao -------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's GPU is the CPU."""
    monkeypatch.setattr(_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(_gpu, "torch_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fake GPU")


def objects(monkeypatch: pytest.MonkeyPatch, backend: type, *found: Any) -> Any:
    """A backend whose package is there, with these objects."""
    monkeypatch.setattr(backend, "_lacking", classmethod(lambda cls: None))
    monkeypatch.setattr(backend, "_import", classmethod(lambda cls: found))
    monkeypatch.setattr(backend, "version", lambda self: "fake")
    return backend()


@pytest.mark.parametrize("output", [None, "packed", "scales"])
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, on_cpu: None, output: str | None) -> None:
    fault = flip(output or "none")

    def nvfp4_quantize(a: Any, a_global_sf: Any, *, sfLayout: Any, nvfp4_4over6: Any, backend: str) -> Any:  # noqa: N803
        assert sfLayout == "128x4" and nvfp4_4over6 is None and backend == "cuda"
        assert os.environ["FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH"] == "1" and a_global_sf.shape == (1,)
        x, scale = _gpu.to_numpy(a), a_global_sf.numpy()[0]
        tiles = np.abs(x.astype(np.float32)).reshape(len(x), -1, 16)
        with np.errstate(all="ignore"):  # the kernel's arithmetic, from the scale that it is given
            scales = nv.e4m3.encode(
                np.fmin(np.fmax.reduce(tiles, -1) * (scale * (np.float32(1) / np.float32(6))), 3.4028235e38)
            )
            d = nv.e4m3.decode(scales).astype(np.float32)
            e = np.fmin(np.float32(1) / (d * (np.float32(1) / scale)), np.float32(3.4028235e38))
            codes = nv.e2m1.encode(x.astype(np.float32) * np.repeat(e, 16, axis=1))
        swizzled = nv.layout.swizzle(fault("scales", scales))
        return to_torch(fault("packed", nv.e2m1.pack(codes))), to_torch(swizzled)

    backend = objects(monkeypatch, flashinfer.FlashInfer, nvfp4_quantize, SimpleNamespace(layout_128x4="128x4"))
    cases = [case for case in quick() if case.family not in ("special", "allbits")]
    found = answered(results(backend, cases))
    assert len(found) > 20 and departing(found) == ({output} if output else set())
    assert "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH" not in os.environ


@pytest.mark.parametrize("wrong", [False, True])
def test_cublaslt(monkeypatch: pytest.MonkeyPatch, on_cpu: None, wrong: bool) -> None:
    monkeypatch.setattr(live_cases, "PRODUCTS", ((128, 256, 64), (144, 128, 320)))

    def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any) -> Any:
        assert a.dtype == torch.float4_e2m1fn_x2 and b.stride(0) == 1, "b is column-major"
        operands = []
        for codes, scales in ((a, scale_a), (b.t(), scale_b)):
            packed, flat = _package.to_bytes(codes), _package.to_bytes(scales)
            assert scales.dtype == torch.float8_e4m3fn and flat.ndim == 1
            compact = nv.layout.unswizzle(flat, len(packed), packed.shape[1] // 8)
            operands.append(nv.NVFP4Tensor.from_arrays(packed, compact, np.float32(1)))
        dtype: Any = np.float32 if out_dtype == torch.float32 else ml_dtypes.bfloat16
        found = np.array(nv.matmul(*operands, out_dtype=dtype, alpha_form="none"))
        return to_torch(flip("d")("d", found) if wrong else found)

    fp4, fp8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    backend = objects(monkeypatch, cublaslt.CuBLASLt, scaled_mm, fp4, fp8)
    found = answered(results(backend, list(backend.cases("quick"))))
    assert len(found) == 8 and departing(found) == ({"d"} if wrong else set())


def torchao() -> ModuleType:
    pytest.importorskip("torchao")
    return importlib.import_module("nvfp4hw.backends.torchao")


def test_torchao_eager_is_the_same_call(on_cpu: None) -> None:
    """With the CPU for a GPU, the GPU's backend gives the CPU's bytes."""
    module = torchao()
    with contextlib.suppress(RuntimeError):
        assert module.Torchao().availability() is None
    for case in quick():
        if case.needs <= module.TorchaoGpu.features:
            ours, theirs = module.TorchaoGpu().quantize(case), module.Torchao().quantize(case)
            assert ours.keys() == theirs.keys() and all(ours[n].tobytes() == theirs[n].tobytes() for n in ours), case.id


def test_torchao_kernel_of_mslk(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    module = torchao()
    tensor = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    assert {"per_tensor_scale", *module.TorchaoMslk._options} <= set(
        inspect.signature(tensor.NVFP4Tensor.to_nvfp4).parameters
    )

    def to_nvfp4(x: Any, *, per_tensor_scale: Any, is_swizzled_scales: bool, use_triton_kernel: bool) -> Any:
        assert is_swizzled_scales and use_triton_kernel
        return tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_scale, is_swizzled_scales=True)

    backend = objects(monkeypatch, module.TorchaoMslk, to_nvfp4, tensor.per_tensor_amax_to_scale, None)
    found = answered(results(backend))
    assert len(found) > 10 and not departing(found)


@pytest.mark.parametrize("output", [None, "packed", "scales_t", "as its source says"])
def test_torchao_training_kernels(monkeypatch: pytest.MonkeyPatch, on_cpu: None, output: str | None) -> None:
    module = torchao()
    names = [use.split(":") for use in module.TorchaoTraining.uses]
    real = [getattr(importlib.import_module(name), member) for name, member in names]
    assert list(inspect.signature(real[0]).parameters)[:2] == ["A", "global_amax"]
    assert list(inspect.signature(real[1]).parameters)[:4] == ["A", "col_global_amax", "row_global_amax", "sign_vector"]
    fault = flip(output or "none")
    played = module.TorchaoTraining.computes if output == "as its source says" else "te-2.14"

    def side(x: Array, name: str, **how: Any) -> tuple[Any, Any]:
        q = nv.quantize(x, arithmetic=played, **how)
        rows, columns = q.scales.shape
        swizzled = nv.layout.swizzle(fault(f"scales{name}", q.scales)).reshape(rows // 128, columns // 4, 32, 16)
        return to_torch(fault(f"packed{name}", q.packed)), to_torch(swizzled)

    def weight(a: Any, amax: Any) -> Any:
        x, how = _gpu.to_numpy(a), {"block": (16, 16), "amax": amax.numpy()[0]}
        return (*side(x, "", **how), *side(x, "_t", axis=0, **how))

    def activation(a: Any, column: Any, row: Any, signs: list[int]) -> Any:
        x, mask = _gpu.to_numpy(a), sum(1 << bit for bit, sign in enumerate(signs) if sign == -1)
        transform = nv.RHT(sign_mask=mask)
        return (*side(x, "_t", axis=0, rht=transform, amax=column.numpy()[0]), *side(x, "", amax=row.numpy()[0]))

    backend = objects(monkeypatch, module.TorchaoTraining, weight, activation)
    families = ("normal", "hadamard", "e2m1-tie", "shape", "allbits", "mixed")
    finite = [case for case in quick() if np.isfinite(case.x.astype(np.float32)).all()]  # a caller's amax spreads NaN
    cases = [case for case in finite if case.family in families]
    found = results(backend, cases)
    right = answered(found)
    expected = {"packed", "scales", "packed_t", "scales_t"} if output == "as its source says" else {output} - {None}
    assert len(right) > 5 and departing(right) == expected
    words = refusals(found).values()
    assert all("multiples of 128" in said or "transforms" in said for said in words)


def test_torchao_training_departs_from_its_preset_where_its_docs_say() -> None:
    """By the floor: 0x08 wherever te-2.14 has a smaller byte, and only under those bytes other codes."""
    torch = pytest.importorskip("torch")
    computes = torchao().TorchaoTraining.computes
    assert computes.scale_floor == torch.finfo(torch.float8_e4m3fn).tiny == nv.e4m3.decode(np.uint8(0x08))
    exact = nv.arithmetic(computes, division="ieee")
    below = codes_below = 0
    for case in quick():
        plain = case.kind == "quantize" and not case.fields and case.rounding == "nearest-even" and case.amax is None
        if not plain or case.x.dtype != ml_dtypes.bfloat16 or not np.isfinite(case.x.astype(np.float32)).all():
            continue
        declared, found = (nv.quantize(case.x, block=case.block, arithmetic=ar) for ar in ("te-2.14", exact))
        floored = declared.scales < 0x08
        assert (found.scales == np.where(floored, np.uint8(0x08), declared.scales)).all(), case.id
        apart = (found.codes != declared.codes).reshape(*floored.shape, 16).any(-1)
        assert not (apart & ~floored).any(), case.id
        below, codes_below = below + int(floored.sum()), codes_below + int(apart.sum())
    assert below > 100 and codes_below > 10  # the suite shows it
    x = nv.quantize(np.full((1, 16), 3, np.float32), amax=np.float32(7), arithmetic=computes)
    assert x.steps.global_scale == nv.quantize(np.zeros((1, 16)), amax=7.0, arithmetic="te-jax-gpu").steps.global_scale


# ---- JAX ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cpu, gpu", [(jax_nn.JaxNN, jax_nn.JaxNNGpu), (te_jax.TransformerEngineJax, te_jax.TransformerEngineJaxGpu)]
)
def test_jax_backends_are_the_same_call(monkeypatch: pytest.MonkeyPatch, cpu: Any, gpu: Any) -> None:
    """With the CPU for a GPU, the GPU's backend gives the CPU's bytes, and the amax that the CPU's leaves out."""
    jax = pytest.importorskip("jax")
    reason = cpu().availability()
    if reason is not None:
        pytest.skip(reason)
    assert "finds no NVIDIA GPU" in str(gpu().availability()) or any("NVIDIA" in d.device_kind for d in jax.devices())
    monkeypatch.setattr(_gpu, "jax_gpu", lambda: jax.devices("cpu")[0])
    backend = gpu()
    assert backend.availability() is None and backend.version().startswith(cpu().version())
    for case in [
        case for case in quick() if case.needs <= gpu.features and case.family in ("zero", "magnitude", "tile")
    ]:
        ours, theirs = backend.quantize(case), cpu().quantize(case)
        assert theirs.keys() <= ours.keys() and "amax" in {name.removesuffix("_t") for name in ours}
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs), case.id


@pytest.mark.parametrize("output", [None, "packed", "scales", "amax", "packed_t", "scales_t", "amax_t"])
def test_te_jax_custom_calls(monkeypatch: pytest.MonkeyPatch, output: str | None) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(_gpu, "jax_gpu", lambda: SimpleNamespace(device_kind="NVIDIA", compute_capability="10.0"))
    monkeypatch.setattr(jax, "jit", lambda function: function)  # the fake computes in NumPy
    fault = flip(output or "none")

    class Quantizer(SimpleNamespace):
        pass

    class Factory:
        @staticmethod
        def create(**arguments: Any) -> Quantizer:
            assert arguments["q_dtype"] == jax.numpy.float4_e2m1fn
            return Quantizer(**arguments)

    def one(x: Array, quantizer: Quantizer, name: str) -> Any:
        axis = 0 if name else -1
        rht = nv.RHT() if quantizer.use_rht and axis == 0 else None
        random: dict[str, Any] = {}
        if quantizer.stochastic_rounding_rng_state is not None:
            seed, offset = rng.jax_seed_offset(np.asarray(quantizer.stochastic_rounding_rng_state))
            launch = rng.jax_launch((seed, offset), x.shape, directions=quantizer.q_layout, rht=quantizer.use_rht)
            random = {"rounding": "stochastic", "rbits": launch.column if name else launch.row}
        block = (1, 16) if quantizer.scaling_mode == "1d" else (16, 16)
        q = nv.quantize(x, axis=axis, block=block, rht=rht, **random)
        codes = nv.e2m1.unpack(fault(f"packed{name}", q.packed)).view(ml_dtypes.float4_e2m1fn)
        scales = fault(f"scales{name}", q.scales).view(ml_dtypes.float8_e4m3fn)
        return SimpleNamespace(data=codes, scale_inv=scales, amax=fault(f"amax{name}", np.asarray(q.amax)).reshape(1))

    def quantize(x: Any, *, quantizer: Quantizer) -> Any:
        array = np.asarray(x)
        if quantizer.q_layout != "both":
            return one(array, quantizer, "_t" if quantizer.q_layout == "col" else "")
        return SimpleNamespace(rowwise_tensor=one(array, quantizer, ""), colwise_tensor=one(array, quantizer, "_t"))

    modes = SimpleNamespace(NVFP4_1D_SCALING="1d", NVFP4_2D_SCALING="2d")
    layouts = SimpleNamespace(ROWWISE="row", COLWISE="col", ROWWISE_COLWISE="both")
    backend = objects(monkeypatch, te_jax.TransformerEngineJaxCuda, quantize, Factory, modes, layouts)
    families = ("normal", "hadamard", "stochastic", "tile", "e2m1-tie", "outlier")
    cases = [case for case in quick() if case.family in families]
    # the transform on a tensor that the fused kernel takes, and its words
    x = live_cases.adversarial((128, 256), "bf16")
    cases.append(Case("fused", "hadamard", x, directions="col", rht_t=nv.RHT()))
    words = {"rng": nv.Philox(3, 8, "tuned-1d"), "rng_t": nv.Philox(3, 8, "fused-rht-columnwise")}
    cases.append(Case("both", "stochastic", x, directions="both", rht_t=nv.RHT(), rounding="stochastic", data=words))
    words = {"rng": nv.Philox(3, 8, both=True), "rng_t": nv.Philox(3, 9, both=True)}
    cases.append(Case("two", "stochastic", x, directions="both", rounding="stochastic", data=words))
    found = results(backend, cases)
    right = answered(found)
    assert {"fused", "both"} <= set(right) and len(right) > 20 and departing(right) == ({output} if output else set())
    said = " ".join(refusals(found).values())
    assert "in multiples of 64" in said and "with its kernel 'tuned-1d'" in said and "one seed and offset" in said
    alone = run.run_case(backend, Case("c", "test", x, directions="col"))
    assert "made by the pure-JAX quantizer" in str(alone.refused)


def test_te_jax_custom_calls_need_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_jax.TransformerEngineJaxCuda, "_lacking", classmethod(lambda cls: None))
    monkeypatch.setattr(_gpu, "jax_gpu", lambda: SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0"))
    assert te_jax.TransformerEngineJaxCuda().availability() == "its kernels need sm_100 or newer, and this GPU is sm_90"


# ---- cutting a library -------------------------------------------------------------------------------------


def library(entries: list[tuple[int, int, bytes]], section: bytes = b".nv_fatbin", magic: int = 0xBA55ED50) -> bytes:
    """An ELF file with a fatbin section of two containers that have these entries: kind, architecture, code."""
    containers = []
    for part in (entries[::2], entries[1::2]):
        body = b""
        for kind, architecture, code in part:
            header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 8, 1, architecture).ljust(64, b"\0")
            body += header + code
        containers.append(struct.pack("<IHHQ", magic, 1, 16, len(body)) + body + b"\0" * (-len(body) % 8))
    fatbin = (b"\0" * 8).join(containers)
    names = b"\0" + section + b"\0.shstrtab\0"
    offset, table = 64 + len(names), 64 + len(names) + len(fatbin)
    head = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)
    sections = [(0, 0, 0), (1, offset, len(fatbin)), (1 + len(section) + 1, 64, len(names))]
    headers = [struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections]
    return bytes(head) + names + fatbin + b"".join(headers)


ENTRIES = [(2, 80, b"a" * 24), (2, 90, b"b" * 40), (1, 90, b"ptx." * 4), (2, 90, b"c" * 16), (2, 100, b"d" * 8)]


def test_cut_keeps_one_architecture() -> None:
    whole = library(ENTRIES)
    small, kept = cut_fatbin.cut(whole, 90)
    assert kept == [hashlib.sha256(code).hexdigest() for code in (b"c" * 16, b"b" * 40)] or len(kept) == 2
    assert len(small) == len(whole) and b"b" * 40 in small and b"c" * 16 in small
    assert not any(code in small for code in (b"a" * 24, b"ptx.", b"d" * 8))
    changed = [i for i, (one, other) in enumerate(zip(whole, small, strict=True)) if one != other]
    assert len(changed) == 24 + 16 + 8, "headers and everything else stay"


def test_cut_says_what_is_wrong() -> None:
    for content, words in (
        (b"#!/bin/sh", "no 64-bit little-endian ELF"),
        (library(ENTRIES, section=b".text_____"), "holds no CUDA code"),
        (library(ENTRIES, magic=0x12345678), "where a container begins with"),
        (library([(7, 90, b"x" * 8), (2, 90, b"y" * 8)]), "entry of unknown form"),
        (library([(2, 80, b"a" * 8), (2, 100, b"b" * 8)]), "no machine code for 90; it has 80, 100"),
    ):
        with pytest.raises(ValueError, match=words):
            cut_fatbin.cut(content, 90)


def test_cut_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "lib.so", tmp_path / "cut.so"
    source.write_bytes(library(ENTRIES))
    assert cut_fatbin.main([str(source), "90", str(target)]) == 0
    assert "2 entries of sm_90 kept" in capsys.readouterr().out and target.read_bytes() != source.read_bytes()
    assert cut_fatbin.main([str(source), "120", str(tmp_path / "other.so")]) == 2
    assert "no machine code for 120" in capsys.readouterr().err and not (tmp_path / "other.so").exists()
    assert cut_fatbin.main([str(tmp_path / "missing.so"), "90", str(target)]) == 2
    assert cut_fatbin.main([]) == 2
    assert "usage" in capsys.readouterr().err

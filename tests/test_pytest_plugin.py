"""The pytest plug-in, in runs of pytest of its own: the assertion, the suite, expected failures, and what it costs."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance.assertion import as_dump
from conformance.compare import check
from conformance.pytest_plugin import assert_nvfp4_equal, assert_pipe_conforms, nvfp4_quantizer
from conformance.pytest_suite import Diagnoses

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "check_my_kernel"
#: Without an installed entry point the plug-in is named.
INSTALLED = any(one.value == "conformance.pytest_plugin" for one in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "conformance.pytest_plugin")
FEW = "e2m1-tie and amax-896 and row"  # cases that show most faults of the element's scale

X = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
Q = nv.quantize(X)

KERNELS = """
import nvfp4ref as nv

def good(x, **how):
    return nv.quantize(x, **how)

def plain(x):
    q = nv.quantize(x)
    return q.packed, q.scales, q.amax

def broken(x):
    q = nv.quantize(x, arithmetic=nv.arithmetic("te", encode_scale="quotient"))
    return q.packed, q.scales, q.amax

def refusing(x, block=(1, 16)):
    if block == (16, 16):
        raise NotImplementedError("no tiles here")
    return plain(x)

def nothing(x, **how):
    raise NotImplementedError

def failing(x):
    return x / 0 / missing

number = 5
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with kernels and a test of its own, not on a CI, where pytest repeats whole messages in its summary."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(kernels=KERNELS, test_own="def test_own():\n    assert True\n")
    pytester.syspathinsert()
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", *arguments)


def output(result: pytest.RunResult) -> str:
    return "\n".join([*result.outlines, *result.errlines])


# ---- the assertion -----------------------------------------------------------------------------------------


def torch_like(q: nv.NVFP4Tensor) -> Any:
    import torch

    scales = torch.from_numpy(q.scales.copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(q.packed.copy()), scales, torch.tensor(float(q.amax))


def jax_like(q: nv.NVFP4Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(q.packed), jnp.asarray(q.scales).view(jnp.float8_e4m3fn), jnp.asarray(q.amax)


def jax_codes(q: nv.NVFP4Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(q.codes.view(ml_dtypes.float4_e2m1fn)), jnp.asarray(q.scales)


FORMS = {
    "tensor": (lambda q: q, None),
    "dump": (lambda q: nv.from_tensor(q, X), None),
    "triple": (lambda q: (q.packed, q.scales, q.amax), None),
    "pair": (lambda q: (q.packed, q.scales), None),
    "list": (lambda q: [q.packed, q.scales, float(q.amax)], None),
    "mapping": (lambda q: {"packed": q.packed, "scales": q.scales, "amax": q.amax}, None),
    "float8": (lambda q: (q.packed, q.scales.view(ml_dtypes.float8_e4m3fn)), None),
    "padded": (lambda q: (q.packed, nv.layout.pad(q.scales, fill=0xAA)), None),
    "torch": (torch_like, "torch"),
    "jax": (jax_like, "jax"),
    "jax-codes": (jax_codes, "jax"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_output(form: str) -> None:
    make, package = FORMS[form]
    if package is not None:
        pytest.importorskip(package)
    assert_nvfp4_equal(make(Q), X)
    wrong = nv.quantize(X, arithmetic=nv.arithmetic("te", scale_rounding="up"))
    with pytest.raises(AssertionError, match="differs from te, first at block-scale"):
        assert_nvfp4_equal(make(wrong), X, arithmetic="te")


WAYS: dict[str, dict[str, Any]] = {
    "tiles": {"block": (16, 16)},
    "columnwise": {"axis": 0},
    "columnwise-tiles": {"axis": 0, "block": (16, 16)},
    "transform": {"axis": 0, "rht": nv.RHT()},
    "transform-of-rows": {"rht": nv.RHT(sign_mask=0x0101)},
    "philox": {"rounding": "stochastic", "rbits": nv.Philox(1, 2)},
    "words": {"rounding": "stochastic", "rbits": nv.Philox(1, 2).words((64, 128))},
    "amax": {"amax": np.float32(1.5)},
    "amax-zero": {"amax": 0.0},
    "amax-nan": {"amax": np.float32("nan")},
    "preset": {"arithmetic": "te-2.14"},
    "row-scaled": {"arithmetic": nv.arithmetic("te", row_scaled=True)},
    "four-over-six": {"arithmetic": "four-over-six"},
    "threads": {"threads": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_quantize(way: str) -> None:
    """Right output passes, as a tensor and as arrays."""
    how = WAYS[way]
    q = nv.quantize(X, **how)
    assert_nvfp4_equal(q, X, **how)
    assert_nvfp4_equal((q.packed, q.scales, q.amax), X, **how)


@pytest.mark.parametrize("way", ["tiles", "columnwise", "transform", "philox", "words", "amax", "four-over-six"])
def test_a_wrong_output_of_every_way(way: str) -> None:
    """Nibbles exchanged are found and named, whatever else was asked."""
    how = WAYS[way]
    q = nv.quantize(X, **how)
    packed = q.packed >> 4 | q.packed << 4
    with pytest.raises(AssertionError, match="packing.high-nibble-first"):
        assert_nvfp4_equal((packed, q.scales, q.amax), X, **how)


def test_more_dimensions_are_rows() -> None:
    x = X.reshape(4, 16, 128)
    q = nv.quantize(x)
    assert q.packed.ndim == 3
    assert_nvfp4_equal((q.packed, q.scales, q.amax), x)


def test_swizzled_scales() -> None:
    assert_nvfp4_equal((Q.packed, Q.swizzled_scales, Q.amax), X, scale_layout="swizzled")
    with pytest.raises(AssertionError, match="scales.swizzled"):
        assert_nvfp4_equal((Q.packed, Q.swizzled_scales, Q.amax), X)


def test_the_message_is_the_diagnosis_with_five_elements() -> None:
    x = nv.dequantize(Q)  # values on a coarse grid, of which many are ties of another scale
    wrong = nv.quantize(x, arithmetic=nv.arithmetic("te", element_rounding="truncate"))
    with pytest.raises(AssertionError) as caught:
        assert_nvfp4_equal((wrong.packed, wrong.scales, wrong.amax), x)
    text = str(caught.value)
    assert text.startswith("differs from te, first at rounding\n")
    assert "element.truncate explains every byte" in text
    assert "5 of the elements whose code differs, rowwise [row, column]" in text
    table = text.split("found only where it differs\n")[1].splitlines()
    head = next(line for line in table if line.strip().startswith("["))
    assert len(re.findall(r"\[\d+, \d+\]", head)) == 5
    steps = ("x ", "block amax a", "block scale before E4M3", "block scale, E4M3", "encode scale e", "scaled element")
    for step in (*steps, "code, E2M1, expected", "found", "dequantized"):
        assert any(line.strip().startswith(step) for line in table), step
    assert any(line.startswith("  global scale S ") for line in table), "once for all five"
    places = [tuple(map(int, place.split(","))) for place in re.findall(r"\[(\d+, \d+)\]", head)]
    codes = nv.quantize(x).codes
    assert all(codes[place] != wrong.codes[place] for place in places)
    assert len({(row, column // 16) for row, column in places}) == 5, "each of another block"
    x_row = next(line for line in table if line.strip().startswith("x "))
    assert str(x[places[0]]) in x_row
    assert max(len(line) for line in table) < 120


def test_the_message_of_scales_and_of_an_amax() -> None:
    scales = Q.scales.copy()
    scales[7, 3] += 1
    with pytest.raises(AssertionError, match=r"first elements of blocks whose scale byte differs(.|\n)*\[7, 48\]"):
        assert_nvfp4_equal((Q.packed, scales, Q.amax), X)
    with pytest.raises(AssertionError, match="the amax that was given is not the one that was used"):
        assert_nvfp4_equal(Q, X, amax=np.float32(1.5))
    wrong = nv.quantize(X, amax=1.5, arithmetic="te-2.14")
    with pytest.raises(AssertionError, match=r"block-scale.divide-by-6(.|\n)*amax A, given 1.5") as caught:
        assert_nvfp4_equal((wrong.packed, wrong.scales, wrong.amax), X, amax=np.float32(1.5))
    assert "wrong-amax" not in str(caught.value)


def test_arrays_that_are_no_output() -> None:
    with pytest.raises(AssertionError, match=r"no NVFP4 output of that x: contradictory shapes"):
        assert_nvfp4_equal((Q.packed[:3], Q.scales[:3]), X)
    with pytest.raises(AssertionError, match="amax has the shape"):
        assert_nvfp4_equal((Q.packed, Q.scales, np.ones(5, np.float32)), X)


@pytest.mark.parametrize(
    ("found", "how", "sentence"),
    [
        (X, {}, "one array of bfloat16 is no NVFP4 output"),
        (object(), {}, "cannot make a dump of builtins.object"),
        ({"packed": Q.packed, "scales": Q.scales, "scale": 1}, {}, "got 'scale' too"),
        (Q, {"blocks": (16, 16)}, "there is no argument 'blocks'"),
    ],
)
def test_what_cannot_be_judged(found: Any, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        assert_nvfp4_equal(found, X, **how)


def test_stochastic_without_words_is_not_judged() -> None:
    with pytest.raises(ValueError, match="neither rbits nor rng"):
        assert_nvfp4_equal((Q.packed, Q.scales, Q.amax), X, rounding="stochastic")


def test_an_objects_own_declaration_counts() -> None:
    """A tensor says by which arithmetic it was made; arrays say nothing; the argument beats both."""
    q = nv.quantize(X, arithmetic="te-2.14", block=(16, 16))
    assert as_dump(q, X, {}).arithmetic == "te-2.14" and as_dump(q, X, {}).block == (16, 16)
    assert as_dump((q.packed, q.scales), X, {}).arithmetic is None
    assert as_dump(q, X, {"arithmetic": "te"}).arithmetic == "te"


# ---- the suite against a function --------------------------------------------------------------------------


def test_a_good_function_passes_every_case(project: pytest.Pytester) -> None:
    """All of the quick suite: blocks, directions, transforms, given amaxes, 4over6, random words."""
    result = run(project, "--nvfp4-quantizer", "kernels:good", "-q")
    outcomes = result.parseoutcomes()
    assert result.ret == 0 and outcomes["passed"] > 300 and not {"failed", "skipped", "errors"} & set(outcomes)
    assert re.search(r"kernels:good against te, quick suite: \d+ conform", output(result))


def test_what_a_signature_lacks_is_skipped(project: pytest.Pytester) -> None:
    result = run(project, "--nvfp4-quantizer", "kernels:plain", "-k", "shape", "-rs")
    text = output(result)
    assert result.ret == 0 and "refused: it takes no argument axis" in text
    assert re.search(r"kernels:plain against te, quick suite: \d+ conform, \d+ refused", text)


def test_what_a_function_refuses_is_skipped_with_its_reason(project: pytest.Pytester) -> None:
    result = run(project, "--nvfp4-quantizer", "kernels:refusing", "-k", "shape and 16x16", "-rs")
    assert result.ret == 0 and "refused: no tiles here" in output(result)


def test_a_broken_function_fails_with_the_diagnosis(project: pytest.Pytester) -> None:
    result = run(project, "--nvfp4-quantizer", "kernels:broken", "-k", FEW)
    text = output(result)
    assert result.ret == 1
    assert "kernels:broken: e2m1-tie/amax-896.bf16.1x16.row" in text
    assert "encode-scale.quotient" in text and "5 of the elements whose code differs" in text
    assert "the case hunts: rounding of ties" in text
    assert "def assert_equal" not in text, "no traceback of the plug-in"


NOISY = """
import nvfp4ref as nv

def quantize(x):
    q = nv.quantize(x)
    packed, scales = q.packed.copy(), q.scales.copy()
    packed[::3, ::5] ^= 0x02  # as no known deviation does
    return packed, scales, q.amax
"""


def test_the_first_failures_of_a_stage_are_diagnosed_and_the_others_told(project: pytest.Pytester) -> None:
    project.makepyfile(noisy=NOISY)
    chosen = ("--nvfp4-quantizer", "noisy:quantize", "-k", "e2m1-tie and amax and 1x16.row")
    text = output(run(project, *chosen, "--nvfp4-diagnose", "1"))
    failed = len(re.findall(r"first at packing", text))
    brief = "not diagnosed, after 1 failure at packing: --nvfp4-diagnose all diagnoses every one"
    assert failed > 5 and text.count(brief) == failed - 1 == text.count(brief.partition(":")[0])
    assert text.count("found only where it differs") == 1  # the tables of elements
    assert len(re.findall(r"packed +\d[\d,]* of ", text)) == failed  # counts are there for all
    assert f"  {failed - 1} failures not diagnosed, but the first of each stage: --nvfp4-diagnose all" in text
    text = output(run(project, *chosen, "--nvfp4-diagnose", "0"))
    assert text.count("not diagnosed, as asked: --nvfp4-diagnose all") == failed


def test_how_many_are_diagnosed() -> None:
    three, every = Diagnoses.read(None), Diagnoses.read("all")
    said = [three.of("mine", stage) for stage in ("rounding", "rounding", "rounding", "rounding", "packing")]
    assert [one is None for one in said] == [True, True, True, False, True]
    assert three.of("another", "rounding") is None
    assert all(every.of("mine", "rounding") is None for _ in range(9))


def test_what_is_expected_to_fail_is_not_diagnosed(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("conformance.diagnose")  # its name in the package is the function's
    project.makepyfile(noisy=NOISY)
    project.path.joinpath("xfails.txt").write_text("e2m1-tie/*\n", encoding="utf-8")
    monkeypatch.setattr(module, "of_sides", lambda sides: pytest.fail("diagnosed"))
    chosen = ("--nvfp4-quantizer", "noisy:quantize", "-k", FEW, "--nvfp4-xfails", "xfails.txt")
    result = run(project, *chosen)
    assert result.ret == 0 and result.parseoutcomes()["xfailed"] == 2 and "failures not diagnosed" not in output(result)


def test_a_glance_sees_the_stage_by_the_shape_of_the_difference() -> None:
    for changes, stage in (
        ({"scale_rounding": "up"}, "block-scale"),
        ({"element_rounding": "truncate"}, "rounding"),
        ({"encode_scale": "quotient"}, "rounding"),  # it shows in ties, where the diagnosis knows better
    ):
        q = nv.quantize(X, arithmetic=nv.arithmetic("te", **changes))
        dump = nv.from_tensor(q, X, arithmetic="te")
        glance, whole = check(dump, diagnose=False), check(dump)
        assert glance.outputs == whole.outputs and glance.verdict == whole.verdict == "differs"
        assert glance.deviations == () and glance.stage == stage, changes
        assert whole.deviations and whole.stage == ("encode-scale" if "encode_scale" in changes else stage)


def test_nothing_judged_is_no_pass(project: pytest.Pytester) -> None:
    result = run(project, "--nvfp4-quantizer", "kernels:nothing", "-k", "shape")
    assert result.ret == 1 and "NOTHING WAS JUDGED" in output(result)


def test_nothing_chosen_is_no_failure(project: pytest.Pytester) -> None:
    """-k that leaves the project's own tests only is not the quantizer's fault."""
    result = run(project, "--nvfp4-quantizer", "kernels:nothing", "-k", "test_own")
    assert result.ret == 0 and "no case ran" in output(result)


def test_a_function_that_raises_shows_its_own_frames(project: pytest.Pytester) -> None:
    result = run(project, "--nvfp4-quantizer", "kernels:failing", "-k", "zero/tensor.f32.1x16.row")
    text = output(result)
    assert result.ret == 1 and "return x / 0 / missing" in text and "NameError" in text
    assert "conformance/pytest_suite.py" not in text and "/_pytest/runner.py" not in text


def test_declared_features_leave_cases_out(project: pytest.Pytester) -> None:
    project.makepyfile(
        declared="""
        import nvfp4ref as nv
        from conformance.pytest_plugin import nvfp4_quantizer

        @nvfp4_quantizer(arithmetic="te-2.14", features={"float32", "1x16", "row", "given-amax"})
        def quantize(x, amax=None):
            assert x.dtype == "float32"
            return nv.quantize(x, amax=amax, arithmetic="te-2.14")
        """
    )
    result = run(project, "--nvfp4-quantizer", "declared:quantize")
    text = output(result)
    assert result.ret == 0, text
    assert re.search(r"declared:quantize against te-2.14, quick suite: \d+ conform, \d+ beyond its features", text)
    assert "skipped" not in result.parseoutcomes()


@pytest.mark.parametrize("arrays", ["torch", "jax"])
def test_arrays_of_a_framework(project: pytest.Pytester, arrays: str) -> None:
    package = pytest.importorskip(arrays)
    kind = {"torch": "torch.Tensor", "jax": "jax.Array"}[arrays]
    project.makepyfile(
        framework=f"""
        import {package.__name__}
        import nvfp4ref as nv
        from conformance.pytest_plugin import nvfp4_quantizer

        @nvfp4_quantizer(arrays="{arrays}")
        def quantize(x):
            assert isinstance(x, {kind})
            return nv.quantize(x)
        """
    )
    result = run(project, "--nvfp4-quantizer", "framework:quantize", "-k", "e2m1-tie and 2688 and row")
    assert result.ret == 0 and result.parseoutcomes()["passed"] == 3


def test_another_arithmetic_for_a_function_that_declares_none(project: pytest.Pytester) -> None:
    arguments = ("--nvfp4-quantizer", "kernels:plain", "--nvfp4-arithmetic", "te-fast-math", "-k", FEW)
    result = run(project, *arguments)
    assert result.ret == 1 and "differs from te-fast-math, first at encode-scale" in output(result)


def test_the_full_suite(project: pytest.Pytester) -> None:
    quick = run(project, "--nvfp4-quantizer", "kernels:plain", "--collect-only", "-q")
    full = run(project, "--nvfp4-quantizer", "kernels:plain", "--nvfp4-suite", "full", "--collect-only", "-q")
    assert len(full.outlines) > 3 * len(quick.outlines)
    assert "nvfp4::kernels:plain::normal/s1.bf16.1x16.row" in quick.outlines


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nvfp4-quantizer", "kernels"], "expected MODULE:FUNCTION"),
        (["--nvfp4-quantizer", "kernels:absent"], "has no attribute 'absent'"),
        (["--nvfp4-quantizer", "absent:quantize"], "No module named 'absent'"),
        (["--nvfp4-quantizer", "kernels:number"], "int is no function"),
        (["--nvfp4-quantizer", "kernels:good", "--nvfp4-arithmetic", "tee"], "there is no preset 'tee'"),
        (["--nvfp4-backend", "absent"], "there is no backend 'absent'"),
        (["--nvfp4-quantizer", "kernels:good", "--nvfp4-diagnose", "some"], "takes a number or all; got 'some'"),
        (["--nvfp4-diagnose", "all"], "--nvfp4-diagnose needs --nvfp4-quantizer"),
        (["--nvfp4-suite", "quick"], "--nvfp4-suite needs --nvfp4-quantizer"),
        (["--nvfp4-xfails", "x.txt"], "--nvfp4-xfails needs --nvfp4-quantizer"),
        (["--nvfp4-quantizer", "kernels:good", "--nvfp4-xfails", "absent.txt"], "absent.txt: cannot be read"),
    ],
)
def test_options_that_make_no_sense(project: pytest.Pytester, arguments: list[str], sentence: str) -> None:
    result = run(project, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR and sentence in output(result)
    assert "Traceback" not in output(result)


def test_a_declaration_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="arrays is 'numpy', 'torch' or 'jax'; got 'cupy'"):
        nvfp4_quantizer(arrays="cupy")


# ---- expected failures -------------------------------------------------------------------------------------


def xfails(project: pytest.Pytester, text: str, function: str = "broken", choose: str = FEW) -> pytest.RunResult:
    project.path.joinpath("xfails.txt").write_text(text, encoding="utf-8")
    quantizer = ("--nvfp4-quantizer", f"kernels:{function}", "-k", choose)
    return run(project, *quantizer, "--nvfp4-xfails", "xfails.txt", "-rx")


def test_expected_failures_pass_the_run(project: pytest.Pytester) -> None:
    result = xfails(project, "# S/d, known\ne2m1-tie/amax-896.*.1x16.row  # known to us\n")
    text = output(result)
    assert result.ret == 0 and result.parseoutcomes()["xfailed"] == 2 and "known to us" in text
    assert re.search(r"kernels:broken against te, quick suite: \d+ expected failures", text)


def test_an_expected_failure_that_passes_fails_the_run(project: pytest.Pytester) -> None:
    result = xfails(project, "e2m1-tie/amax-896.*\n", "plain")
    assert result.ret == 1 and "XPASS(strict)" in output(result)


def test_an_expected_failure_may_name_the_quantizer(project: pytest.Pytester) -> None:
    assert xfails(project, "kernels:broken::e2m1-tie/amax-896.*\n").ret == 0
    assert xfails(project, "kernels:plain::e2m1-tie/amax-896.*\n").ret == 1


def test_a_refused_case_is_still_refused(project: pytest.Pytester) -> None:
    result = xfails(project, "shape/*.16x16.both\n", "refusing", "shape and 16x16.both")
    assert result.ret == 1 and "skipped" in result.parseoutcomes(), "nothing was judged, whatever was expected"


def test_a_line_without_a_case_is_reported(project: pytest.Pytester) -> None:
    text = "\n# comment\ne2m1-tie/amax-896.*.row\n   \nzero/tensor.f23.1x16.row\nnormal/seed0.bf16.1x16.row\n"
    result = xfails(project, text)
    said = output(result)
    assert result.ret == 0
    assert "xfails.txt:5: there is no case 'zero/tensor.f23.1x16.row'; did you mean zero/tensor.f" in said
    assert "xfails.txt:6" not in said, "it is a case of the full suite"


# ---- backends, the fixture, the pipe -----------------------------------------------------------------------


def test_a_backend_that_runs_and_one_that_cannot(project: pytest.Pytester) -> None:
    backends = ("--nvfp4-backend", "te-vectors", "--nvfp4-backend", "absent-device")
    project.makepyfile(
        conftest="""
        import nvfp4hw.backends as backends

        real = backends.load

        def load(name):
            absent = backends.Unavailable(name, "there is no such device", "te")
            return absent if name == "absent-device" else real(name)

        backends.load = load
        """
    )
    project.makepyfile(plug="import conftest")
    result = run(project, "-p", "conftest", *backends, "-k", "availability or codec", "-rs")
    text = output(result)
    assert result.ret in (0, 5), text
    assert "not run: there is no such device" in text


def test_a_backend_that_departs_is_diagnosed(project: pytest.Pytester) -> None:
    project.makepyfile(
        departing="""
        import nvfp4hw.backends.base
        import nvfp4hw.backends as backends
        import nvfp4ref as nv

        class Departing:
            name, preset = "departing", "te"
            features = frozenset(("quantize", "bfloat16", "float32", "1x16", "row"))
            availability = lambda self: None
            version = lambda self: "1"
            cases = lambda self, suite: None

            def quantize(self, case):
                if case.x.dtype == "float32":
                    raise backends.base.Refused("float32 is not for this device")
                q = nv.quantize(case.x, arithmetic="te-2.14")
                return {"packed": q.packed, "scales": q.scales, "amax": q.amax}

        real = backends.load
        backends.load = lambda name: Departing() if name == "departing" else real(name)
        """
    )
    result = run(
        project, "-p", "departing", "--nvfp4-backend", "departing", "-k", "scale-order/m188 or zero/signs", "-rs"
    )
    text = output(result)
    assert result.ret == 1 and "block-scale.divide-by-6" in text and "expected" in text
    assert "refused: float32 is not for this device" in text
    assert re.search(r"departing against te, quick suite: .*\b1 fails.*, \d+ beyond its features", text)


def test_the_fixture(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_fixture="""
        import numpy as np
        import pytest

        def test_oracle(nvfp4_oracle):
            x = np.linspace(-3, 3, 512, dtype=np.float32).reshape(16, 32)
            q = nvfp4_oracle.quantize(x)
            assert q.arithmetic.name == nvfp4_oracle.arithmetic == "te-2.14"
            nvfp4_oracle.assert_equal((q.packed, q.scales, q.amax), x)
            assert nvfp4_oracle.dequantize(q).shape == x.shape
            with pytest.raises(AssertionError, match="differs from te-2.14"):
                nvfp4_oracle.assert_equal((q.packed ^ 1, q.scales, q.amax), x)
        """
    )
    assert run(project, "test_fixture.py", "--nvfp4-arithmetic", "te-2.14").ret == 0


def test_the_pipe_as_an_assertion(tmp_path: Path) -> None:
    device = tmp_path / "device.py"
    device.write_text(
        "import sys\nfor line in map(str.rstrip, sys.stdin):\n"
        "    print(line if line[0] == '#' else line + ' 0', flush=True)\n",
        encoding="utf-8",
    )
    with pytest.raises(AssertionError, match=r"e2m1  40 answers, \d+ differ"):
        assert_pipe_conforms([sys.executable, str(device)], rules=["E2M1-RNE"], count=40)


# ---- what it costs -----------------------------------------------------------------------------------------


def test_a_run_that_does_not_use_it_imports_nothing() -> None:
    """Under 0.2 s: the plug-in, with the package around it, imports neither NumPy nor the oracle."""
    script = """
import sys, time, pytest
start = time.perf_counter()
import conformance.pytest_plugin
assert time.perf_counter() - start < 0.2
assert not {"numpy", "nvfp4ref", "ml_dtypes", "nvfp4hw"} & set(sys.modules), "imported too early"
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# ---- five foreign quantizers -------------------------------------------------------------------------------


@pytest.fixture
def examples(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The examples in a place of their own, with the C client where they look for it."""
    for folder in ("examples/check_my_kernel", "clients/c"):
        shutil.copytree(ROOT / folder, pytester.path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pytester.makeini("[pytest]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.chdir(pytester.path / "examples" / "check_my_kernel")
    return pytester


def example(examples: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return examples.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", *arguments)


FEW_OF_EACH = "e2m1-tie or e4m3-tie or scale-order or zero or magnitude or special"


@pytest.mark.parametrize(
    ("package", "kernel", "preset"),
    [("torchao", "torchao_kernel", "torchao"), ("modelopt", "modelopt_kernel", "modelopt")],
)
def test_a_foreign_quantizer_conforms(examples: pytest.Pytester, package: str, kernel: str, preset: str) -> None:
    pytest.importorskip(package)
    result = example(examples, "--nvfp4-quantizer", f"{kernel}:quantize", "-k", FEW_OF_EACH)
    text = output(result)
    assert result.ret == 0, text
    assert re.search(rf"{kernel}:quantize against {preset}, quick suite: \d\d conform", text)


def test_a_jax_kernel_conforms_but_for_subnormals(examples: pytest.Pytester) -> None:
    pytest.importorskip("jax")
    chosen = ("--nvfp4-quantizer", "jax_kernel:quantize", "-k", FEW_OF_EACH)
    result = example(examples, *chosen, "--nvfp4-xfails", "xfails.txt")
    text = output(result)
    assert result.ret == 0, text
    assert re.search(r"jax_kernel:quantize against te, quick suite: .*13 expected failures", text)


def test_a_broken_kernel_is_found_and_named(examples: pytest.Pytester) -> None:
    result = example(examples, "--nvfp4-quantizer", "broken_kernel:quantize", "-k", FEW)
    text = output(result)
    assert result.ret == 1 and "encode-scale.quotient" in text
    result = example(examples, "test_my_kernel.py")
    assert result.ret == 1 and "26 of 262,144 differ" in output(result)


def test_a_c_program_conforms(examples: pytest.Pytester) -> None:
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("make") is None:
        pytest.skip("no C compiler, or no make")
    subprocess.run(["make", "-s", "-C", str(examples.path / "clients" / "c"), "dut"], check=True)
    result = example(examples, "test_c_program.py")
    assert result.ret == 0, output(result)


# ---- the guide ---------------------------------------------------------------------------------------------

GUIDE = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def test_the_guides_code_runs() -> None:
    from conformance.pytest_suite import Oracle

    def my_kernel(x: Any) -> Any:
        return Q.packed, Q.scales, Q.amax

    for block in blocks("python"):
        names: dict[str, Any] = {"my_kernel": my_kernel, "x": X}
        exec(block, names)
        assert {"test_my_kernel", "quantize", "test_scales"} & set(names)
        if "test_my_kernel" in names:
            names["test_my_kernel"]()
        if "test_scales" in names:
            names["test_scales"](Oracle("te"))


def test_the_guides_message_is_what_is_said() -> None:
    """Line by line in this order, but for what is left out."""
    q = nv.quantize(X, arithmetic=nv.arithmetic("te", encode_scale="quotient"))
    with pytest.raises(AssertionError) as caught:
        assert_nvfp4_equal((q.packed, q.scales, q.amax), X)
    said = iter(str(caught.value).splitlines())
    (block,) = blocks("text")
    for line in block.splitlines():
        assert line.strip() in ("", "…") or line in said, line

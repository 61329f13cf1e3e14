"""The suite as pytest items: one a case, of backends and of a project's own quantizers."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cases as suite_cases
from conformance.assertion import InFull, assert_equal, judged
from conformance.plant import suffixes
from conformance.pytest_plugin import Declaration
from conformance.run import compare
from nvfp4hw import backends
from nvfp4hw.backends.base import Case, Outputs, Refused
from nvfp4ref.container import agreed, counted
from nvfp4ref.dump import Dump

ROOT = "nvfp4"
#: What came of items, for one and for several.
_WORDS = {
    "conform": ("conforms", "conform"),
    "fail": ("fails", "fail"),
    "refused": ("refused", "refused"),
    "expected failures": ("expected failure", "expected failures"),
}
_OUTPUTS = tuple(name + suffix for suffix in ("", "_t") for name in ("packed", "scales", "amax", "global_scale"))


@dataclass(frozen=True)
class Oracle:
    """What the fixture ``nvfp4_oracle`` is: the oracle under one arithmetic."""

    arithmetic: str

    def quantize(self, x: Any, **how: Any) -> nv.NVFP4Tensor:
        """What a right quantizer gives; arguments as for nvfp4ref.quantize."""
        return nv.quantize(x, **{"arithmetic": self.arithmetic, **how})

    def dequantize(self, q: nv.NVFP4Tensor, dtype: Any = np.float32) -> Any:
        """The values of a quantized tensor."""
        return nv.dequantize(q, dtype)

    def assert_equal(self, found: Any, x: Any, **how: Any) -> None:
        """As ``assert_nvfp4_equal``, under this arithmetic."""
        __tracebackhide__ = True
        assert_equal(found, x, {"arithmetic": self.arithmetic, **how})


def preset(config: pytest.Config) -> str:
    """The preset of --nvfp4-arithmetic.  UsageError for an unknown one."""
    name = config.getoption("nvfp4_arithmetic") or "te"
    if name not in nv.PRESETS:
        raise pytest.UsageError(f"--nvfp4-arithmetic: there is no preset {name!r}; they are {', '.join(nv.PRESETS)}")
    return str(name)


# ---- who is asked ------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A quantizer under test: its name, its cases, and the question put to it.

    ``ask`` raises AssertionError when the answer is wrong, with a diagnosis if that is wanted, NotImplementedError or
    Refused when there is none.
    """

    name: str
    follows: str
    cases: list[Case]
    ask: Callable[[Case, InFull], None]
    unserved: int = 0
    absent: str | None = None


def _of_quantizer(spec: str, suite: str, default: str) -> Subject:
    """A function given as module:function."""
    function = _imported(spec)
    declared = getattr(function, "nvfp4_declaration", Declaration())
    follows = declared.arithmetic or default
    if follows not in nv.PRESETS:
        raise pytest.UsageError(f"{spec} declares the arithmetic {follows!r}; presets are {', '.join(nv.PRESETS)}")
    every = [case for case in suite_cases.cases(suite) if case.kind == "quantize"]
    served = [case for case in every if declared.features is None or _needs(case) <= declared.features]

    def ask(case: Case, in_full: InFull) -> None:
        for suffix in suffixes(case):
            _ask_quantizer(function, declared, follows, case, suffix, in_full)

    return Subject(spec, follows, served, ask, len(every) - len(served))


def _needs(case: Case) -> frozenset[str]:
    return case.needs - {"quantize", "four_over_six_fast_error", "e4m3_max", "stochastic" if case.fields else ""}


def _imported(spec: str) -> Callable[..., Any]:
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise pytest.UsageError(f"--nvfp4-quantizer {spec}: expected MODULE:FUNCTION, such as my_package.fp4:quantize")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the import of a project's module raises is one sentence here
        raise pytest.UsageError(f"--nvfp4-quantizer {spec}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise pytest.UsageError(f"--nvfp4-quantizer {spec}: {type(found).__name__} is no function")
    return found


def _ask_quantizer(
    function: Callable[..., Any], declared: Declaration, follows: str, case: Case, suffix: str, in_full: InFull
) -> None:
    """Quantize one direction of a case, and compare."""
    how = _how(case, suffix)
    arithmetic = nv.arithmetic(case.arithmetic or follows, **case.fields)
    given = {**how, "arithmetic": arithmetic} if case.fields else how
    _refuse_unknown(function, given)
    found = function(_array(case.x, declared.arrays), **given)
    assert_equal(found, case.x, {**how, "arithmetic": arithmetic}, in_full)


def _how(case: Case, suffix: str) -> dict[str, Any]:
    """The arguments of one direction of a case that are not the defaults of nvfp4ref.quantize."""
    how: dict[str, Any] = {}
    if case.block != (1, 16):
        how["block"] = case.block
    if suffix:
        how["axis"] = 0
    if suffix and case.rht_t is not None:
        how["rht"] = case.rht_t
    amax = getattr(case, "amax" + suffix)
    if amax is not None:
        how["amax"] = np.float32(amax)
    if case.rounding != "nearest-even":
        how |= {"rounding": case.rounding, "rbits": case.data["rng" + suffix]}
    return how


def _refuse_unknown(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """NotImplementedError when the function's signature has no such arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # no signature to be had: let it speak for itself
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    missing = [name for name in given if name not in names]
    if missing:
        raise NotImplementedError(f"it takes no argument {missing[0]}")


def _array(x: Any, kind: str) -> Any:
    """The input as the framework's array, of its own memory."""
    if kind == "torch":
        import torch

        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(x.copy())
    if kind == "jax":
        import jax

        return jax.numpy.asarray(x)
    return x.copy()


def _of_backend(name: str, suite: str) -> Subject:
    """A backend of nvfp4hw, or one that another package registered."""
    try:
        backend = backends.load(name)
    except ValueError as reason:
        raise pytest.UsageError(f"--nvfp4-backend: {reason}") from None
    absent = backend.availability()
    if absent is not None:
        return Subject(name, backend.preset, [], lambda case, in_full: None, absent=absent)
    own = backend.cases(suite)
    every = list(suite_cases.cases(suite) if own is None else own)
    served = [case for case in every if case.needs <= backend.features]

    def ask(case: Case, in_full: InFull) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = backend.quantize(case)
        counts = compare(case, found, backend.preset)
        if any(one.different for one in counts.values()):
            departing = "\n".join(f"{output}: {one}" for output, one in counts.items() if one.different)
            raise AssertionError(_diagnosed(case, found, backend.preset, in_full) or departing)

    return Subject(name, backend.preset, served, ask, len(every) - len(served))


def _diagnosed(case: Case, found: Outputs, follows: str, in_full: InFull) -> str | None:
    """The message of a quantization that differs; None where the outputs are others, or show nothing so."""
    if case.kind != "quantize" or not {"packed", "packed_t"} & set(found):
        return None
    outputs: dict[str, Any] = {name: np.asarray(found[name]) for name in _OUTPUTS if name in found}
    for suffix in suffixes(case):
        state = case.data.get("rng" + suffix)
        if state is not None:
            outputs[("rng" if isinstance(state, nv.Philox) else "rbits") + suffix] = state
    dump = Dump(
        x=case.x.reshape(-1, case.x.shape[-1]),
        block=case.block,
        rounding=case.rounding,
        rht_t=False if case.rht_t is None else case.rht_t,
        arithmetic=nv.arithmetic(case.arithmetic or follows, **case.fields),  # type: ignore[arg-type]
        **outputs,
    )
    given = case.amax if case.amax is not None else case.amax_t
    report, text = judged(dump, given, in_full)
    return text if report.verdict == "differs" else None


# ---- how many are diagnosed --------------------------------------------------------------------------------

_DIAGNOSED = 3  # failures of a quantizer at one stage that are diagnosed: further ones tend to be of the same fault
_BRIEF = "nvfp4-brief"


@dataclass
class Diagnoses:
    """Which failures are diagnosed: the first ``limit`` of each quantizer and stage, all with None.

    A diagnosis takes seconds where the fault is not a known one, and one fault fails hundreds of cases.
    """

    limit: int | None = _DIAGNOSED
    made: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def read(cls, text: str | None) -> Diagnoses:
        """The limit of an option.  UsageError when it is none."""
        if text is None:
            return cls()
        if text != "all" and not (text.isascii() and text.isdigit()):
            raise pytest.UsageError(f"--nvfp4-diagnose takes a number or all; got {text!r}")
        return cls(None if text == "all" else int(text))

    def of(self, subject: str, stage: str) -> str | None:
        """None when a failure is to be diagnosed, and counted as such; else why it is not."""
        if self.limit is not None and self.made[subject, stage] >= self.limit:
            before = f"after {counted(self.limit, 'failure')} at {stage}" if self.limit else "as asked"
            return (
                f"not diagnosed, {before}: --nvfp4-diagnose all diagnoses every one, a few seconds each.\n"
                "The stage is by the shape of the difference alone."
            )
        self.made[subject, stage] += 1
        return None


# ---- expected failures -------------------------------------------------------------------------------------


@dataclass
class Expected:
    """Cases that are expected to fail, as a file lists them.

    A line is a case's id, or ``subject::id``, with ``*`` and ``?`` for anything; ``#`` begins a comment, and what
    stands behind one on a line is the reason.
    """

    path: str
    lines: list[tuple[int, str, str]] = field(default_factory=list)  # number, pattern, reason
    used: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, path: str) -> Expected:
        """The file.  UsageError when it cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise pytest.UsageError(f"--nvfp4-xfails {path}: cannot be read: {error}") from None
        found = cls(path)
        for number, line in enumerate(text.splitlines(), 1):
            pattern, _, reason = line.strip().partition("#")
            if pattern.strip():
                found.lines.append((number, pattern.strip(), reason.strip()))
        return found

    def reason(self, subject: str, case: str) -> str | None:
        """Why a case is expected to fail, None when it is not."""
        matching = [one for one in self.lines if _matches(one[1], subject, case)]
        self.used |= {number for number, _, _ in matching}
        return None if not matching else matching[0][2] or f"{self.path}:{matching[0][0]}"

    def unknown(self, subjects: list[Subject]) -> Iterator[str]:
        """A sentence for each line that names no case of any suite."""
        unused = [one for one in self.lines if one[0] not in self.used]
        if not unused:
            return
        ids = [case.id for case in suite_cases.cases("full")] + [case.id for one in subjects for case in one.cases]
        names = [one.name for one in subjects] or [""]
        for number, pattern, _ in unused:
            if not any(_matches(pattern, name, ident) for name in names for ident in ids):
                near = difflib.get_close_matches(pattern.rpartition("::")[2], ids, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                yield f"{self.path}:{number}: there is no case {pattern!r}{hint}"


def _matches(pattern: str, subject: str, case: str) -> bool:
    return fnmatch.fnmatchcase(case, pattern) or fnmatch.fnmatchcase(f"{subject}::{case}", pattern)


# ---- pytest ------------------------------------------------------------------------------------------------


class SubjectNode(pytest.Collector):
    """One quantizer in the tree of tests."""

    def collect(self) -> list[pytest.Item]:
        """Nothing: the items are made with it."""
        return []


class CaseItem(pytest.Item):
    """One case put to one quantizer."""

    subject: Subject
    case: Case | None = None
    diagnoses: Diagnoses
    expected: bool = False  # to fail: then nobody reads why

    def in_full(self, stage: str) -> str | None:
        """Why a failure at this stage is not diagnosed, None when it is to be."""
        if self.expected and not self.config.getoption("runxfail", False):
            return "not diagnosed: it is expected to fail"
        why_not = self.diagnoses.of(self.subject.name, stage)
        if why_not is not None:
            self.user_properties.append((_BRIEF, stage))
        return why_not

    def runtest(self) -> None:
        """Ask and compare; skipped when the quantizer says that it does not do this."""
        if self.case is None:
            pytest.skip(f"not run: {self.subject.absent}")
        try:
            self.subject.ask(self.case, self.in_full)
        except (NotImplementedError, Refused) as reason:
            pytest.skip(f"refused: {reason}" if str(reason) else "refused")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The diagnosis alone for a wrong answer; the traceback for anything else."""
        if self.case is None or not isinstance(excinfo.value, AssertionError):
            own = [entry for entry in excinfo.traceback.cut(path=__file__) if str(entry.path) != __file__]
            excinfo.traceback = type(excinfo.traceback)(own) or excinfo.traceback  # the quantizer's frames alone
            return super().repr_failure(excinfo, style)
        return f"{excinfo.value}\n\nthe case hunts: {self.case.hunts}"

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """What the head of a failure says."""
        return self.path, None, f"{self.subject.name}: {self.name}"


class Suite:
    """Adds the items, expects the failures that are listed, and says in the end what came of it."""

    def __init__(self, config: pytest.Config) -> None:
        for folder in (config.invocation_params.dir, config.rootpath):
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        self.size = config.getoption("nvfp4_suite") or "quick"
        default = preset(config)
        self.subjects = [_of_quantizer(one, self.size, default) for one in config.getoption("nvfp4_quantizer") or ()]
        self.own = {one.name for one in self.subjects}
        self.subjects += [_of_backend(one, self.size) for one in config.getoption("nvfp4_backend") or ()]
        self.diagnoses = Diagnoses.read(config.getoption("nvfp4_diagnose"))
        self.brief: Counter[str] = Counter()
        path = config.getoption("nvfp4_xfails")
        self.expected = Expected("") if path is None else Expected.read(path)
        self.results: dict[str, Counter[str]] = {one.name: Counter() for one in self.subjects}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Before -k and -m choose among them."""
        for subject in self.subjects:
            node = SubjectNode.from_parent(session, name=subject.name, nodeid=f"{ROOT}::{subject.name}")
            if subject.absent is not None:
                items.append(self._item(node, subject, None))
            items += [self._item(node, subject, case) for case in subject.cases]
        for sentence in self.expected.unknown(self.subjects):
            warnings.warn(pytest.PytestWarning(sentence), stacklevel=1)

    def _item(self, node: SubjectNode, subject: Subject, case: Case | None) -> CaseItem:
        item: CaseItem = CaseItem.from_parent(node, name="availability" if case is None else case.id)
        item.subject, item.case, item.diagnoses = subject, case, self.diagnoses
        reason = None if case is None else self.expected.reason(subject.name, case.id)
        if reason is not None:
            item.expected = True
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        return item

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what came of each item."""
        for name, counter in self.results.items():
            if report.nodeid.startswith(f"{ROOT}::{name}::"):
                if hasattr(report, "wasxfail"):
                    counter["expected failures"] += report.when == "call"
                elif report.when == "call" or report.outcome != "passed":
                    self.brief[name] += any(key == _BRIEF for key, _ in report.user_properties)
                    counter[{"passed": "conform", "failed": "fail", "skipped": "refused"}[report.outcome]] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A project's quantizer of which no case was judged has not passed."""
        if exitstatus == pytest.ExitCode.OK and any(self._unjudged(name) for name in self.own):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _unjudged(self, name: str) -> bool:
        counter = self.results[name]
        return bool(counter) and not any(counter[key] for key in ("conform", "fail", "expected failures"))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line for each quantizer."""
        terminalreporter.section("NVFP4 conformance")
        for subject in self.subjects:
            counter = self.results[subject.name]
            if subject.absent is not None:
                terminalreporter.write_line(f"{subject.name}: not run: {subject.absent}")
                continue
            parts = [f"{n} {agreed(n, *_WORDS[what])}" for what, n in counter.items()] or ["no case ran"]
            parts += [f"{subject.unserved} beyond its features"] if subject.unserved else []
            unjudged = ": NOTHING WAS JUDGED" if subject.name in self.own and self._unjudged(subject.name) else ""
            terminalreporter.write_line(
                f"{subject.name} against {subject.follows}, {self.size} suite: {', '.join(parts)}{unjudged}"
            )
            if brief := self.brief[subject.name]:
                terminalreporter.write_line(
                    f"  {counted(brief, 'failure')} not diagnosed, but the first of each stage: --nvfp4-diagnose all "
                    "diagnoses every one, a few seconds each"
                )

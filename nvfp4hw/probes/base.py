"""What a probe is: one CUDA program that asks the hardware one question, and the oracle that checks its record.

A probe's program runs somewhere (:mod:`nvfp4hw.probes.toolchain` on a GPU, :mod:`nvfp4hw.probes.simulation` in
software) and writes arrays; :meth:`Probe.run` turns them into a *record*, plain JSON, and *arrays*, and
:meth:`Probe.verify` recomputes both with ``nvfp4ref`` on a CPU.  A run's verdict is that of ``verify``, which every
later reader of the record gets too; the device's own comparison must agree with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nvfp4ref.container import counted

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]

FORMAT = 1  # of records; raised when an older reader would misread a newer one
SHOWN = 8  # counterexamples kept


class ProbeError(RuntimeError):
    """A probe that came to no result: not built, stopped, hung, or left nothing readable.  One sentence says which."""


class BadRecord(ValueError):
    """A record that is not what such a probe writes, whatever it claims."""


@dataclass(frozen=True)
class ProbeResult:
    """What one probe found.

    Attributes:
        status: "pass" or "fail".
        compared: outputs held against the oracle; different: those that differ.
        first: up to eight counterexamples, or what is wrong with the record, as plain values.
        record: every fact in plain values, for JSON; arrays: the outputs, without loss.
        device: what it ran on; seconds: how long the program took there.
    """

    name: str
    status: str
    compared: int
    different: int
    first: list[dict[str, Any]]
    record: dict[str, Any]
    arrays: dict[str, Array]
    device: str
    seconds: float

    def __str__(self) -> str:
        verdict = "PASS" if self.status == "pass" else "FAIL"
        lines = [f"{verdict} {self.name}: {self.compared:,} compared, {self.different:,} different ({self.device})"]
        lines += ["  " + ", ".join(f"{key} {_text(value)}" for key, value in one.items()) for one in self.first]
        return "\n".join(printable(line) for line in lines)


def printable(line: str) -> str:
    """A line as a terminal may be given it: control characters, and what is no character, are escaped."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)


def _text(value: Any) -> str:
    """A value from a record in words."""
    try:
        return str(value)
    except RecursionError:
        return f"a {type(value).__name__} too deep to show"


def is_simulated(record: Mapping[str, Any]) -> bool:
    """Whether a record says that its device was simulated."""
    return str(record.get("device")).startswith("simulated")


@dataclass(frozen=True)
class Output:
    """What a program left: its lines, its files, and where it ran.

    ``lines`` maps a line's first word to the rest of each line that begins with it, in order.
    """

    lines: dict[str, list[str]]
    files: dict[str, bytes]
    environment: dict[str, Any]

    def one(self, key: str) -> str:
        """The rest of the only line that begins with ``key``; ProbeError otherwise."""
        found = self.lines.get(key, [])
        if len(found) != 1:
            raise ProbeError(f"the probe's output has {len(found)} lines {key!r}; expected one")
        return found[0]

    def integers(self, key: str, count: int = 1) -> list[int]:
        """The ``count`` integers of that line; ProbeError when it holds something else."""
        try:
            found = [int(word, 0) for word in self.one(key).split()]
        except ValueError:
            found = []
        if len(found) != count:
            raise ProbeError(f"the probe's line {key!r} does not hold {counted(count, 'integer')}: {self.one(key)!r}")
        return found

    def array(self, name: str, dtype: Any, shape: tuple[int, ...] | None = None) -> Array:
        """The array of one file; ProbeError when it is missing or of another size."""
        if name not in self.files:
            raise ProbeError(f"the probe wrote no file {name}")
        kind, data = np.dtype(dtype), self.files[name]
        size = len(data) // kind.itemsize if shape is None else int(np.prod(shape))
        if len(data) != size * kind.itemsize:
            raise ProbeError(
                f"the probe's file {name} has {counted(len(data), 'byte')}; expected {size * kind.itemsize}"
            )
        array: Array = np.frombuffer(data, kind).reshape(size if shape is None else shape)
        return array


class Launcher(Protocol):
    """Where programs run."""

    def availability(self, probe: Probe) -> str | None:
        """None when the probe can run there, else why not and what would change that."""

    def version(self) -> str:
        """Compiler, driver and device, as read."""

    def launch(self, probe: Probe, inputs: Mapping[str, bytes], progress: Progress | None) -> Output:
        """The program's output; ProbeError when it came to none."""


@dataclass(frozen=True)
class Findings:
    """What the oracle makes of a record: facts, all of which the record must state just so.

    ``on_device``: how many outputs the program compares, where that is not ``compared``.
    """

    compared: int
    different: int
    first: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    on_device: int | None = None


class Probe:
    """One question; subclasses say which, and how its record is read.

    Attributes:
        name: as on the command line; rules: ids of docs/spec.md that it holds; what: the question, one sentence.
        architectures: nvcc's names of the targets that have the instruction.
        source: the program's file in this folder.
        instruction: pattern of the machine instruction that the compiled program must hold.
        limit: seconds that the program may take.
        earlier: fingerprints of earlier states of the program whose records are still good.
    """

    name: str
    rules: tuple[str, ...]
    what: str
    architectures: tuple[str, ...]
    source: str
    instruction: str
    limit: float = 120.0
    earlier: tuple[str, ...] = ()

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def availability(self) -> str | None:
        """None when it can run here; otherwise why not and what would change that."""
        return self.launcher.availability(self)

    def version(self) -> str:
        """Compiler, driver and device, as read; "" where there is none."""
        return self.launcher.version()

    def run(self, progress: Progress | None = None) -> ProbeResult:
        """Build the program, run it, and have the oracle check what it recorded.

        Raises:
            ProbeError: it is not available, does not build, crashes, hangs, or leaves no readable result.
        """
        reason = self.availability()
        if reason is not None:
            raise ProbeError(reason)
        output = self.launcher.launch(self, self.inputs(), progress)
        arrays = self.collect(output)
        record: dict[str, Any] = {
            "format": FORMAT,
            "probe": self.name,
            "rules": list(self.rules),
            **output.environment,
            "device_verdict": output.one("verdict"),
            "device_compared": output.integers("compared")[0],
            "device_different": output.integers("different")[0],
            "device_first": output.lines.get("counterexample", []),
            **self.stated(output),
        }
        try:
            findings = self.examine(record, arrays)
        except BadRecord as error:  # outputs too strange to be counted
            findings = Findings(0, 0, [{"what": str(error)}])
        record |= self._claims(findings)
        record["seal"] = seal(record, arrays)
        return self._judged(record, arrays, findings, [])

    def verify(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> ProbeResult:
        """Recompute with the oracle, on a CPU, everything that a recorded run says.

        A record passes when its arrays hold what the oracle computes, the device found the same, and every number in
        it is the recomputed one.  One changed byte fails.  Never raises for a bad record: the result says what it is.
        """
        record, arrays = dict(record), {name: np.asarray(array) for name, array in arrays.items()}
        try:
            problems = self._sealed(record, arrays) + self._origin(record)
            findings = self.examine(record, arrays)
        except BadRecord as error:
            problems, findings = [], Findings(0, 0, [{"what": str(error)}])
        except Exception as error:  # noqa: BLE001 - a record may hold anything, at any depth
            what = f"it cannot be examined: {type(error).__name__}: {error}"
            problems, findings = [], Findings(0, 0, [{"what": what}])
        for key, value in {"rules": list(self.rules), **self._claims(findings)}.items():
            if not _same(record.get(key), value):
                problems.append({"what": f"the record's {key}", "found": record.get(key), "expected": value})
        return self._judged(record, arrays, findings, problems)

    def _judged(
        self, record: dict[str, Any], arrays: dict[str, Array], findings: Findings, problems: list[dict[str, Any]]
    ) -> ProbeResult:
        """The verdict, which also takes the device's own comparison: it must have found nothing either."""
        different = findings.different
        meant = findings.compared if findings.on_device is None else findings.on_device
        if not _same(record.get("device_compared"), meant):
            found = record.get("device_compared")
            problems = problems + [{"what": "outputs compared on the device", "found": found, "expected": meant}]
        told, verdict, lines = (record.get(f"device_{name}") for name in ("different", "verdict", "first"))
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            problems = problems + [{"what": "the device's counterexamples", "found": _text(lines), "expected": "lines"}]
            lines = []
        if not _same(told, 0) or verdict != "PASS" or lines:
            different = max(different, told if type(told) is int else 0)
            if not findings.different:
                shown = lines or [
                    f"{_text(told)} {'difference' if _same(told, 1) else 'differences'}, verdict {_text(verdict)}"
                ]
                problems = problems + [{"what": "the device found", "found": line} for line in shown]
        first = (findings.first + problems)[:SHOWN]
        told_seconds: Any = record.get("seconds")
        timed = type(told_seconds) in (int, float) and 0 <= told_seconds < math.inf
        return ProbeResult(
            name=self.name,
            status="fail" if first or different else "pass",
            compared=findings.compared,
            different=different,
            first=first,
            record=record,
            arrays=arrays,
            device=_text(record.get("device", "unknown")),
            seconds=float(told_seconds) if timed else 0.0,
        )

    # -- what a subclass says -------------------------------------------------------------------------------

    def inputs(self) -> dict[str, bytes]:
        """Files that the program reads."""
        return {}

    def collect(self, output: Output) -> dict[str, Array]:
        """The arrays of a record from the program's files."""
        raise NotImplementedError

    def stated(self, output: Output) -> dict[str, Any]:
        """Facts that only the program can tell."""
        return {}

    def examine(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Findings:
        """Recompute with the oracle.  BadRecord when the arrays are not such a probe's."""
        raise NotImplementedError

    # -- shared ---------------------------------------------------------------------------------------------

    @staticmethod
    def _claims(findings: Findings) -> dict[str, Any]:
        counts = {"compared": findings.compared, "different": findings.different, "first": findings.first}
        return {**findings.facts, **counts}

    def _sealed(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[dict[str, Any]]:
        if record.get("probe") != self.name or not _same(record.get("format"), FORMAT):
            raise BadRecord(
                f"this is a record of probe {record.get('probe')!r}, format {record.get('format')!r}; "
                f"expected {self.name!r}, format {FORMAT}"
            )
        try:
            expected = seal(record, arrays)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRecord(f"its record is no JSON: {error}") from None
        if record.get("seal") == expected:
            return []
        return [{"what": "the record's seal: something was changed", "found": record.get("seal"), "expected": expected}]

    def _origin(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What is wrong with where it says that it was run: a program and a target of this probe, or a simulation."""
        from nvfp4hw.probes.toolchain import fingerprint  # which needs this module

        target, source = record.get("architecture"), record.get("source")
        if is_simulated(record):
            right = target == "simulated"
            return [] if right else [{"what": "a simulated device has no target", "found": target}]
        known = (fingerprint(self.source), *self.earlier)
        problems = []
        if target not in self.architectures:
            problems.append({"what": "its target", "found": target, "expected": ", ".join(self.architectures)})
        if source not in known:
            problems.append({"what": f"the program was not {self.source}", "found": source, "expected": known[0]})
        return problems


def _same(found: Any, expected: Any) -> bool:
    """Whether two plain values are the same in JSON, where 1 is neither 1.0 nor true."""
    try:
        return json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return False


def seal(record: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """SHA-256 over a record, its seal apart, and its arrays: shows accidental change, not forgery."""
    plain = {key: value for key, value in record.items() if key != "seal"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def required(arrays: Mapping[str, Array], shapes: Mapping[str, tuple[Any, tuple[int, ...] | None]]) -> None:
    """BadRecord unless ``arrays`` are exactly those named, each of its dtype and (unless None) shape."""
    if set(arrays) != set(shapes):
        raise BadRecord(f"its arrays are {sorted(arrays)}; expected {sorted(shapes)}")
    for name, (dtype, shape) in shapes.items():
        array = arrays[name]
        if array.dtype != np.dtype(dtype) or (array.ndim != 1 if shape is None else array.shape != shape):
            wanted = "one dimension" if shape is None else f"shape {shape}"
            raise BadRecord(f"its array {name} is {array.dtype} {array.shape}; expected {np.dtype(dtype)} of {wanted}")

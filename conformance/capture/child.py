"""One backend or one probe in a process of its own: asked case by case, written down at once, never judged.

    python -m conformance.capture.child FOLDER backend|probe NAME SUITE

What the process prints is nobody's protocol: it may be garbage.  The parent reads the folder and the exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import cases as suite_cases
from conformance.capture import simulated
from conformance.capture.bundle import BundleError, Record, describe, without_folders
from conformance.capture.journal import Writer
from conformance.capture.question import digest
from conformance.expect import Expectation
from conformance.run import said
from nvfp4hw.backends.base import Backend, Case, Outputs, Refused

_PARENT = os.getppid()
#: Exit codes: the folder cannot be written; the device is lost to this process, so go on in a new one.
UNWRITABLE, LOST = 3, 4
#: What an error says after which every later call of the process fails too: CUDA's errors that end the context.
_LOST_SAYS = (
    *("illegal memory access", "misaligned address", "illegal instruction", "invalid program counter"),
    *("unspecified launch failure", "device-side assert", "hardware stack error", "uncorrectable"),
    *("CUDA_ERROR_ILLEGAL_", "CUDA_ERROR_MISALIGNED_", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ASSERT"),
)
#: Bytes of right answers that a backend may leave in a bundle; of later ones only the hash is kept.
RIGHT_BYTES = 4 << 20


def record_backend(unit: Writer, name: str, suite: str) -> int:
    """Ask a backend, and write down each answer.  The exit code."""
    backend = simulated.load_backend(name)
    info: dict[str, Any] = {"name": name, "kind": "backend", "preset": backend.preset}
    try:
        reason = backend.availability()
        version = "" if reason is not None else backend.version()
        own = [] if reason is not None else backend.cases(suite)
        listed = list(suite_cases.cases(suite) if own is None else own)
    except Exception as failure:  # noqa: BLE001 - another package's failure is a result
        reason, version, listed = f"it cannot be asked: {said(failure)}", "", []
    served = [case for case in listed if case.needs <= backend.features]
    info |= {
        "version": version,
        "reason": reason,
        "features": sorted(backend.features),
        "device": str(getattr(backend, "device", "cpu")),
        "simulated": simulated.is_simulated(name),
        "unserved": len(listed) - len(served),
        "asked": [case.id for case in served],
    }
    if not _begin(unit, info):
        return 0
    spent = 0
    for done, case in enumerate(served):
        if case.id in unit.recorded:
            continue
        question = digest(case)
        unit.now(id=case.id, question=question, done=done, total=len(served))
        start = time.monotonic()
        outputs, error, refused = _answer(backend, case)
        record = Record(case.id, question, time.monotonic() - start, {}, error, refused)
        keep = {}
        if spent + sum(array.nbytes for array in outputs.values()) > RIGHT_BYTES:
            keep = {n: not _is_right(case, backend.preset, n, array) for n, array in outputs.items()}
        spent += sum(array.nbytes for name, array in outputs.items() if keep.get(name, True))
        _alive()
        unit.add(record, outputs, keep)
        if error is not None and any(sign in error for sign in _LOST_SAYS):
            return LOST
    return 0


def _answer(backend: Backend, case: Case) -> tuple[Outputs, str | None, str | None]:
    """The outputs of a case, the error in one line, and what was refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = backend.quantize(case)
        for array in found.values():
            describe(array)  # refuses what cannot be written down
        return found, None if found else "the backend returned no output", getattr(backend, "refused", {}).get(case.id)
    except Refused as refusal:
        return {}, None, str(refusal) or "it does not say why"
    except Exception as error:  # noqa: BLE001 - as above
        return {}, said(error), None


def _is_right(case: Case, preset: str, name: str, array: Any) -> bool:
    """Whether an output is what the oracle gives, to the byte; then its hash says all about it."""
    try:
        expected = Expectation(case, preset).output(name)
    except Exception:  # noqa: BLE001 - the oracle has no such output: the bytes are all there is
        return False
    return describe(expected) == describe(array)


def record_probe(unit: Writer, name: str) -> int:
    """Run a probe, and write down what it found.  The exit code."""
    try:
        probe = simulated.load_probe(name)
        reason = probe.availability()
        version = "" if reason is not None else probe.version()
        what, rules = probe.what, list(probe.rules)
    except Exception as failure:  # noqa: BLE001 - as above
        reason, version, what, rules = f"it cannot be asked: {said(failure)}", "", "", []
    info: dict[str, Any] = {
        "name": name,
        "kind": "probe",
        "version": version,
        "reason": reason,
        "what": what,
        "rules": rules,
    }
    info |= {"device": "cuda", "simulated": simulated.is_simulated(name), "asked": [] if reason else [name]}
    if not _begin(unit, info) or name in unit.recorded:
        return 0
    unit.now(id=name, question="", done=0, total=0)
    last = 0.0

    def progress(label: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.2:
            last = time.monotonic()
            with contextlib.suppress(BundleError):  # what cannot be written now will be refused at the end
                unit.now(id=name, question="", label=label, done=done, total=total)

    start = time.monotonic()
    arrays: Mapping[str, Any] = {}
    facts: dict[str, Any] = {}
    error: str | None = None
    try:
        found = probe.run(progress)
        arrays, facts = (
            found.arrays,
            {key: getattr(found, key) for key in ("status", "compared", "different", "first", "record", "device")},
        )
        json.dumps(facts, allow_nan=False)
        for array in arrays.values():
            describe(array)
    except Exception as failure:  # noqa: BLE001 - as above
        arrays, facts, error = {}, {}, said(failure)
    _alive()
    unit.add(Record(name, "", time.monotonic() - start, {}, error, None, facts), arrays)
    return 0


def _begin(unit: Writer, info: dict[str, Any]) -> bool:
    """Say what is recorded here; whether there is something to ask.

    Records of another version stay as they are: nothing is mixed with them, and nothing is thrown away.
    """
    info |= {name: without_folders(info[name]) for name in ("version", "reason") if info[name]}
    before = unit.read("unit.json")
    if unit.recorded and before.get("version") != info["version"]:
        now = info["version"] or f"nothing that runs: {info['reason']}"
        unit.write(
            "end.json", {"state": "stopped", "reason": f"recorded with {before.get('version')}, and here is now {now}"}
        )
        return False
    unit.write("unit.json", info)
    return info["reason"] is None


def _alive() -> None:
    """End here when the parent has gone: what is recorded now would be recorded beside somebody else."""
    if os.name == "posix" and os.getppid() != _PARENT:
        os._exit(1)


def _die_with_parent() -> None:
    """Have the kernel end this process with its parent, even one that hangs (Linux)."""
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Record one unit.  The exit code: 0, UNWRITABLE or LOST."""
    _die_with_parent()
    folder, kind, name, suite = arguments
    try:
        unit = Writer(Path(folder))
        return record_backend(unit, name, suite) if kind == "backend" else record_probe(unit, name)
    except BundleError as error:
        print(error)
        return UNWRITABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

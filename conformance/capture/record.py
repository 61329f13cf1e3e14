"""The recording: a process for each backend and probe, watched, replaced when it dies, and a bundle at the end."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.capture import bundle as bundles
from conformance.capture import generations, machine
from conformance.capture.bundle import FORMAT, UNIT_NAME, VERSION, BundleError, Record, printable, without_folders
from conformance.capture.child import LOST, UNWRITABLE
from conformance.capture.journal import Writer, locked, write_json
from nvfp4ref.container import foreign, shown

#: Called with a label, how many are done, and of how many (0: not known).
Progress = Callable[[str, int, int], None]
#: Called with a sentence that the user should see at once.
Say = Callable[[str], None]

TIMEOUT = 300.0  # seconds
_STARTS = 4  # of a unit's process: the first, and after the deaths of three
_GRACE = 20.0  # seconds for what was killed to be gone
#: Of the header, for a recording to be gone on with.
_SAME = ("format", "version", "suite", "generation", "oracle", "environment", "gpus")


@dataclass(frozen=True)
class Asked:
    """What to record, by name."""

    suite: str
    backends: Sequence[str]
    probes: Sequence[str]

    def units(self) -> list[tuple[str, str]]:
        return [*(("backend", name) for name in self.backends), *(("probe", name) for name in self.probes)]


def capture(
    path: str | os.PathLike[str],
    asked: Asked,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    say: Say = print,
) -> str:
    """Record into ``path``, going on with what an earlier, stopped capture left there.  The root hash.

    Args:
        path: the bundle; until it is complete the recording is the folder ``path`` + ".partial".
        asked: suite, backends and probes.
        timeout: seconds that one case, one probe step, or asking whether a package can run, may take.
        progress, say: called as the work goes on.
    Raises:
        BundleError: the file or folder cannot be written, or holds a recording that this one cannot go on with;
            what was recorded stays.
        ValueError: a name that no folder can have.
    """
    for _, name in asked.units():
        if not UNIT_NAME.fullmatch(name):
            raise ValueError(
                f"the name {name!r} has characters other than letters, digits and ._+-, "
                "and cannot be a folder's: choose others with --backend and --probe"
            )
    target, folder = Path(path), bundles.partial(path)
    with foreign(f"{folder}: cannot be written"):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(os.listdir(folder))
    if there and not {"bundle.json", "lock"} & set(there):
        raise BundleError(
            f"{folder}: holds {shown(there[0])} and is no recording, which would be made there: "
            "move it away, or give another -o"
        )
    with locked(folder) as lock:
        try:
            _begin(target, folder, asked)
        finally:
            if made and not (folder / "bundle.json").exists():  # nothing was begun
                bundles.remove(folder)
        recording = _Recording(folder, asked.suite, timeout, lock, progress, say)
        for kind, name in asked.units():
            recording.record(kind, name)
        _refuse_damaged(folder)
        try:
            root = bundles.seal(folder, target)
        except BundleError as error:
            raise BundleError(f"{error}; what was recorded is in {folder}: run the same command again") from None
        bundles.remove(folder)
    return root


def _refuse_damaged(folder: Path) -> None:
    """BundleError when bytes of the folder are not those that were recorded, of a unit that was not asked now."""
    for unit in bundles.open_bundle(folder).units:
        try:
            for record in unit.records.values():
                for ref in record.outputs.values():
                    if ref.at is not None:
                        unit.array(ref)
        except BundleError as error:
            raise BundleError(
                f"{folder}: {error}; run the same command with --{unit.kind} {unit.name} as well, and it is asked again"
            ) from None


def _begin(target: Path, folder: Path, asked: Asked) -> None:
    """The header: written, or found to be that of the same machine and suite and extended by what is asked now."""
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "suite": asked.suite,
        "generation": generations.latest(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **machine.facts(),
        "asked": {"backends": list(asked.backends), "probes": list(asked.probes)},
    }
    begun = (folder / "bundle.json").exists()
    if begun or target.exists():
        before = bundles.open_bundle(folder if begun else target)
        changed = [name for name in _SAME if before.header.get(name) != header[name]]
        if changed:
            pairs = {name: (_short(before.header.get(name)), _short(header[name])) for name in changed}
            said = "; ".join(f"{name} was {was} and is {now}" for name, (was, now) in pairs.items())
            raise BundleError(f"{target}: holds a recording that cannot be gone on with here, {said}: give another -o")
        if not begun:
            bundles.unpack(before, folder)
        for kind, names in header["asked"].items():
            header["asked"][kind] = list(dict.fromkeys([*before.header["asked"][kind], *names]))
        header["date"] = before.header["date"]
    write_json(folder / "bundle.json", header)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(" ".join(map(str, dict(one).values())) for one in value) or "none"
    return " ".join(str(one)[:16] for one in value.values()) if isinstance(value, dict) else str(value)


# ---- one unit ----------------------------------------------------------------------------------------------


#: How a unit ended: a state, and the reason where it is not "complete".
Outcome = tuple[str, str | None]


@dataclass(frozen=True)
class _Recording:
    """The folder, and how its units are recorded."""

    folder: Path
    suite: str
    timeout: float
    lock: int | None
    progress: Progress | None
    say: Say

    def record(self, kind: str, name: str) -> None:
        """Run a unit's process until it has answered everything, and a new one when it dies."""
        place = self.folder / f"{kind}s" / name
        start = time.monotonic()
        (place / "end.json").unlink(missing_ok=True)
        outcome: Outcome | None = None
        for _ in range(_STARTS):
            outcome = self._attempt(place, kind, name)
            if outcome is not None:
                break
        state, reason = outcome or ("failed", f"its process ended {_STARTS} times before it was done")
        seconds = round(time.monotonic() - start, 3)
        Writer(place).write("end.json", {"state": state, "reason": reason, "seconds": seconds})

    def _attempt(self, place: Path, kind: str, name: str) -> Outcome | None:
        """One process; how the unit ended with it, or None when a new one is to go on.

        Raises BundleError: the folder cannot be written.
        """
        Writer(place).idle()
        child = _Child([str(place), kind, name, self.suite], self.lock)
        show = self.progress
        fault = child.wait(Writer(place), self.timeout, None if show is None else lambda *done: show(name, *done))
        unit = Writer(place)
        if child.code == UNWRITABLE:
            raise BundleError(f"{child.last_line()}; what was recorded before is kept: run the same command again")
        stopped = unit.read("end.json")
        if stopped:  # it would not mix what it found with what is there
            self.say(f"{name}: {stopped['reason']}: give another -o to record that")
            return str(stopped["state"]), str(stopped["reason"])
        if fault is None and child.code == LOST:
            return None
        if fault is None and child.code == 0:
            return ("complete", None) if unit.recorded else ("not run", unit.read("unit.json").get("reason"))
        return self._died(unit, kind, name, fault or child.said())

    def _died(self, unit: Writer, kind: str, name: str, fault: str) -> Outcome | None:
        """After the death of a process: the case that it was at is recorded as failed, and the rest goes on."""
        doing, info = unit.watch(), unit.read("unit.json")
        if unit.recorded and set(info.get("asked", ())) <= set(unit.recorded):
            return "complete", f"{fault}, when everything was answered"
        if doing.get("id") is None or doing["id"] in unit.recorded:
            return "failed", f"{fault}, {'between cases' if unit.recorded else 'when it was asked whether it can run'}"
        unit.add(Record(str(doing["id"]), str(doing.get("question")), 0.0, {}, fault), {})
        self.say(f"{name}: {fault} in {doing['id']}")
        return ("complete", None) if kind == "probe" else None


class _Child:
    """The process of a unit.  What it prints is kept only as far as an error message needs it."""

    def __init__(self, arguments: Sequence[str], lock: int | None) -> None:
        path = os.pathsep.join(os.path.abspath(one) for one in sys.path)
        self._tail: deque[bytes] = deque(maxlen=16)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", "-m", "conformance.capture.child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.code = 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := os.read(self._process.stdout.fileno(), 4096):
            self._tail.append(piece)

    def wait(self, unit: Writer, timeout: float, progress: Callable[[int, int], None] | None) -> str | None:
        """Wait for the end; what was wrong when it had to be ended, else None."""
        seen: dict[str, Any] = {}
        since, pause = time.monotonic(), 0.005
        try:
            while self._process.poll() is None:
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
                now = unit.watch()
                if now != seen:
                    seen, since = now, time.monotonic()
                    if progress is not None and "done" in now:
                        progress(now["done"], now["total"])
                elif time.monotonic() - since > timeout:
                    self._kill()
                    return f"no answer within {timeout:g} s"
        except BaseException:
            self._kill()
            raise
        finally:
            if progress is not None:
                progress(1, 1)
        self._finish()
        return None

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._finish()

    def _finish(self) -> None:
        try:
            self.code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:  # stuck in the driver, where no signal reaches it
            self.code = -9
        self._reader.join(_GRACE)  # a grandchild may hold the pipe open

    def said(self) -> str:
        """How it ended, in words."""
        if self.code < 0:
            return f"its process was ended by {signal.Signals(-self.code).name} ({signal.strsignal(-self.code)})"
        return f"its process ended with exit code {self.code}: {self.last_line()}"

    def last_line(self) -> str:
        """The last line that it printed."""
        lines = b"".join(self._tail).decode(errors="replace").splitlines()
        said = next((" ".join(line.split())[:300] for line in reversed(lines) if line.strip()), "it said nothing")
        return printable(without_folders(said))

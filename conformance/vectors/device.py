"""Running a device under test between the generator and the verifier, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from conformance.vectors.pipe import Plan, generate
from conformance.vectors.source import Source
from conformance.vectors.verify import Outcome, Verifier

GRACE = 5.0  # seconds that a device has to end after its answers
TAIL = 2000  # characters of what it said on stderr that are shown


def run(command: Sequence[str], plan: Plan, timeout: float | None = 60.0) -> Outcome:
    """Start a program, ask it the stream, and judge what it answers.

    Args:
        command: the program and its arguments; it reads lines on stdin and writes them on stdout.
        plan: what to ask.
        timeout: seconds without an answer after which it is stopped; None: any.
    Returns:
        The outcome; that the program failed, with the end of its stderr, is among the faults.
    Raises:
        ValueError: the program cannot be started.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=os.name == "posix",
        )
    except OSError as error:
        raise ValueError(f"{command[0]}: cannot be started: {(error.strerror or str(error)).lower()}") from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    said = _Tail(process.stderr)
    feeder = threading.Thread(target=_feed, args=(plan, process.stdin), daemon=True)
    feeder.start()
    verifier, descriptor = Verifier(), process.stdout.fileno()
    source = Source(lambda n: os.read(descriptor, n), timeout, lambda: verifier.accepted)
    try:
        outcome = verifier.read(source, timeout)
        listening = "stop" not in outcome.counts or outcome.read_to_the_end
        status = _ended(process, GRACE if listening else 0.0)
    finally:
        _kill(process)
        if verifier.outcome.read_to_the_end or source.drained():
            process.stdout.close()
    if status is None:
        if listening:
            outcome.fault("stop", "the device did not end after its output, and was stopped")
    elif status:
        what = f"signal {-status}{_signal(-status)}" if status < 0 else f"exit status {status}"
        outcome.fault("stop", f"the device ended with {what}")
    if outcome.faults and said.text():
        outcome.faults.append("its stderr ends: " + said.text())
    return outcome


def _feed(plan: Plan, stdin: Any) -> None:
    """Write the stream; a device that is gone or closed its input needs no more of it."""
    with suppress(OSError, ValueError), stdin:
        generate(plan, stdin)


def _ended(process: subprocess.Popen[bytes], patience: float) -> int | None:
    """The exit status, None when it does not come."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it started."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()


def _signal(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


class _Tail:
    """The end of what a process says on stderr."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with suppress(OSError, ValueError), stream:
            while chunk := os.read(stream.fileno(), 4096):
                self._kept = (self._kept + chunk)[-TAIL:]

    def text(self) -> str:
        """One line of it."""
        self._thread.join(1.0)
        return " ".join(self._kept.decode(errors="replace").split())

"""Lines from a device that may be slow, dead, or talking nonsense: read apart, so that nobody waits for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

READ = 1 << 16  # bytes read at a time
LONGEST = 1 << 16  # characters that a line may have


class Stalled(Exception):
    """No answer came in time."""


class TooLong(Exception):
    """A line that does not end."""


class Source:
    """The lines of a stream, without their ends.

    Args:
        read: gives the next bytes, at most as many as asked, b"" at the end; called by a thread of its own.
        timeout: seconds that may pass without an answer; None: any.
        answered: how many answers were accepted so far; what comes between them does not count as one.
    """

    def __init__(self, read: Callable[[int], bytes], timeout: float | None, answered: Callable[[], int]) -> None:
        self._timeout, self._answered = timeout, answered
        self._since, self._seen = time.monotonic(), 0
        self._chunks: queue.Queue[bytes | OSError] = queue.Queue(maxsize=16)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, read: Callable[[int], bytes]) -> None:
        try:
            while chunk := read(READ):
                self._chunks.put(chunk)
        except OSError as error:
            self._chunks.put(error)
        self._chunks.put(b"")

    def __iter__(self) -> Iterator[bytes]:
        """Raises Stalled, TooLong, OSError."""
        rest = b""
        while chunk := self._next():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > LONGEST:
                raise TooLong
        if rest:
            yield rest

    def drained(self) -> bool:
        """Read what is left of a stream whose writer has ended; False when it does not end with its writer."""
        try:
            while self._chunks.get(timeout=1.0):
                pass
        except queue.Empty:
            return False
        return True

    def _next(self) -> bytes:
        """The next bytes.  Bytes that hold no answer do not prolong the wait."""
        answered = self._answered()
        if answered != self._seen:
            self._since, self._seen = time.monotonic(), answered
        left = None if self._timeout is None else self._since + self._timeout - time.monotonic()
        try:
            found = self._chunks.get(timeout=left if left is None or left > 0 else 0.001)
        except queue.Empty:
            raise Stalled from None
        if isinstance(found, OSError):
            raise found
        if left is not None and left <= 0 and found:
            raise Stalled
        return found

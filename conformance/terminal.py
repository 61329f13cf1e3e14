"""What a command says beside its output: sentences and progress on stderr, and a refusal before long work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    print(f"nvfp4: {' '.join(str(sentence).split())}", file=sys.stderr)


def refuse_unwritable(path: str) -> None:
    """Minutes of work are not to end at a folder that does not exist.  Raises ValueError."""
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(
            f"{path}: cannot be written: it is a directory, or its folder does not exist or is not writable"
        )


def progress() -> Callable[[str, int, int], None] | None:
    """A line on a terminal that overwrites itself and is gone when the work is done; None where nobody watches."""
    if not sys.stderr.isatty():
        return None

    def show(label: str, done: int, total: int) -> None:
        text = f"{label}: {done} of {total}" if total else label
        sys.stderr.write(f"\r{'' if done >= total > 0 else text}\x1b[K")
        sys.stderr.flush()

    return show

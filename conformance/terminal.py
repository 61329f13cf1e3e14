"""What a command says beside its output: its help, sentences and progress on stderr, a refusal before long work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    print(f"nvfp4: {' '.join(str(sentence).split())}", file=sys.stderr)


def add_command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A sub-command that says on its own help page too what it does."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
    return parser


def refuse_unwritable(path: str) -> None:
    """Minutes of work are not to end at a folder that does not exist.  Raises ValueError."""
    folder = os.path.dirname(os.path.realpath(path))
    reasons = {
        "it is a folder": os.path.isdir(path),
        f"there is no folder {os.path.dirname(path)}": not os.path.isdir(folder),
        "its folder is not writable": not os.access(folder, os.W_OK),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{path}: cannot be written: {reason}")


def progress() -> Callable[[str, int, int], None] | None:
    """A line on a terminal that overwrites itself and is gone when the work is done; None where nobody watches."""
    if not sys.stderr.isatty():
        return None

    def show(label: str, done: int, total: int) -> None:
        text = f"{label}: {done} of {total}" if total else label
        sys.stderr.write(f"\r{'' if done >= total > 0 else text}\x1b[K")
        sys.stderr.flush()

    return show

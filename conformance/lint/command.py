"""The command ``nvfp4 lint``."""

from __future__ import annotations

import json
import sys
from typing import Any

from conformance.lint.run import Progress, lint


def add_arguments(parser: Any) -> None:
    """The arguments that main_lint reads."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help=".safetensors, a folder, or an index")
    parser.add_argument("--original", metavar="PATH", help="the weights before quantization, under the same names")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def main_lint(args: Any) -> int:
    """``nvfp4 lint``: print the report; exit code 0 no fault, 1 faults, 2 cannot be read or judged.

    args: ``checkpoint``, a path or a list of them, and if there ``original`` and ``json``.
    """
    given = args.checkpoint
    paths = [given] if isinstance(given, str) else list(given)
    progress = terminal_progress() if sys.stderr.isatty() else None
    found = [lint(path, original=getattr(args, "original", None), progress=progress) for path in paths]
    if getattr(args, "json", False):
        objects = [one.to_json() for one in found]
        print(json.dumps(objects[0] if len(objects) == 1 else {"checkpoints": objects}, indent=1))
    for one in found:
        if not getattr(args, "json", False) and one.tensors:
            print(one)
        for error in one.errors:
            print(f"nvfp4: {error}", file=sys.stderr)
    return max(one.exit_code for one in found)


def terminal_progress() -> Progress:
    """A line on stderr that overwrites itself and is gone when the work is done."""
    last = [-1]

    def show(name: str, done: int, total: int) -> None:
        if done == last[0] and done < total:
            return
        last[0] = done
        text = f"{done:,} of {total:,} MiB  {name[-60:]}" if name else ""
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()

    return show

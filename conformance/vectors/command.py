"""The command ``nvfp4 vectors``; everything behind it is imported when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from conformance.terminal import add_command
from nvfp4ref.container import counted


def add(subparsers: Any) -> None:
    """Add ``vectors`` and its actions to the parser of ``nvfp4``."""
    vectors = add_command(subparsers, "vectors", "language-neutral vectors, and the pipe to a device under test")
    actions = vectors.add_subparsers(metavar="ACTION", required=True, parser_class=type(vectors))

    one = add_command(actions, "export", "write JSON and binary files for any language")
    one.add_argument("folder", metavar="DIR", help="a new folder, or an earlier export, which is replaced")
    one.add_argument("--size", choices=["small", "full"], default="small", help="small, the default, has under 5 MB")
    _add_rules(one)
    one.set_defaults(run=_export)

    one = add_command(actions, "lint", "are exported files whole and right; exit 0 yes, 1 no, 2 not readable")
    one.add_argument("folder", metavar="DIR", help="of an export")
    one.set_defaults(run=_lint)

    one = add_command(actions, "list", "the rules that have vectors, and the operations of the pipe")
    one.set_defaults(run=_list)

    one = add_command(actions, "generate", "write requests, a line an operation, for a device under test")
    _add_stream(one)
    one.set_defaults(run=_generate)

    one = add_command(actions, "verify", "judge the answers on stdin; exit 0 right, 1 wrong, 2 not whole")
    _add_timeout(one)
    one.add_argument("--json", action="store_true", help="one JSON object on stdout")
    one.set_defaults(run=_verify)

    one = add_command(actions, "run", "generate | DEVICE | verify in one, with a time limit")
    _add_stream(one)
    _add_timeout(one)
    one.add_argument("--json", action="store_true", help="one JSON object on stdout")
    one.add_argument(
        "command", metavar="DEVICE", nargs=argparse.REMAINDER, help="the program and its arguments, after --"
    )
    one.set_defaults(run=_run)

    one = add_command(actions, "answer", "a device that follows the specification: answers requests on stdin")
    one.add_argument("--deviation", metavar="ID", help="with this known fault, to see how it is reported")
    one.set_defaults(run=_answer)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rule", action="append", metavar="ID", help="only this rule; may be given again")


def _add_stream(parser: argparse.ArgumentParser) -> None:
    _add_rules(parser)
    parser.add_argument("--count", type=_positive, metavar="N", help="how many lines; default: every constructed one")
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="S", help="seed of the random lines beyond those; default 0"
    )


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="seconds without an answer; default 60, 0 for ever"
    )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 64 bits")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return value


# ---- files -------------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    from conformance.terminal import complain, progress
    from conformance.vectors.export import export

    index = export(options.folder, options.size, options.rule, progress(), complain)
    size = sum(one["bytes"] for one in index["groups"])
    results = sum(one["results"] for one in index["groups"])
    print(
        f"{options.folder}: {counted(len(index['groups']), 'rule')}, {counted(results, 'result')}, "
        f"{size / 1e6:.1f} MB of data, specification {index['spec']}"
    )
    return 0


def _lint(options: argparse.Namespace) -> int:
    from conformance.vectors.lint import lint

    found = lint(options.folder)
    for sentence in found:
        print(sentence)
    print(f"{options.folder}: {counted(len(found), 'fault') if found else 'whole, consistent and right'}")
    return 1 if found else 0


def _list(options: argparse.Namespace) -> int:
    from conformance.vectors.groups import GROUPS, NOT_COVERED, in_operations
    from conformance.vectors.operations import OPERATIONS

    width = max(map(len, (*GROUPS, *NOT_COVERED)))
    for rule, group in GROUPS.items():
        names = list(dict.fromkeys(part.operation for part in group.rows))
        print(f"{rule:<{width}}  {'pipe: ' + ' '.join(names) if names else 'files only'}")
    for rule, why in NOT_COVERED.items():
        print(f"{rule:<{width}}  no vectors: {why}")
    print()
    for name, what in in_operations(list(GROUPS.values())).items():
        one = OPERATIONS[name]
        print(f"{name}: {what}")
        print(f"    {' '.join(map(str, one.operands))} -> {' '.join(map(str, one.results))}")
    return 0


# ---- the pipe ----------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> Any:
    from conformance.vectors.pipe import Plan

    return Plan(None if options.rule is None else tuple(options.rule), options.count, options.seed)


def _generate(options: argparse.Namespace) -> int:
    from conformance.vectors.pipe import generate

    generate(_plan(options), sys.stdout.buffer)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from conformance.vectors.source import Source
    from conformance.vectors.verify import Verifier

    verifier, descriptor = Verifier(), sys.stdin.fileno()
    source = Source(lambda n: os.read(descriptor, n), options.timeout or None, lambda: verifier.accepted)
    return _report(verifier.read(source, options.timeout), options)


def _run(options: argparse.Namespace) -> int:
    from conformance.vectors.device import run

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("which device? nvfp4 vectors run [options] -- ./device arguments")
    return _report(run(command, _plan(options), options.timeout or None), options)


def _report(outcome: Any, options: argparse.Namespace) -> int:
    print(json.dumps(outcome.to_json(), indent=1) if options.json else outcome)
    code: int = outcome.exit_code
    return code


def _answer(options: argparse.Namespace) -> int:
    """Answer as lines come: whatever is there is answered at once, so that a person can type."""
    from conformance.vectors.pipe import answer

    forms = _forms(options.deviation)
    rest, first, descriptor = b"", 1, sys.stdin.fileno()
    while True:
        chunk = os.read(descriptor, 1 << 20)
        *lines, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            lines, rest = [rest], b""
        if lines:
            texts = [line.decode("ascii", "replace").rstrip("\r") for line in lines]
            sys.stdout.buffer.write(("\n".join(answer(texts, forms, first)) + "\n").encode())
            sys.stdout.buffer.flush()
            first += len(lines)
        if not chunk:
            return 0


def _forms(ident: str | None) -> tuple[Any, ...]:
    from conformance.deviations import DEVIATIONS

    if ident is None:
        return ()
    if ident not in DEVIATIONS:
        raise ValueError(f"there is no deviation {ident!r}; docs/deviations.md lists them")
    return DEVIATIONS[ident].changes

"""``nvfp4 conformance capture`` and ``nvfp4 conformance replay``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance import terminal
from conformance.run import NOT_RUN
from conformance.terminal import add_command

if TYPE_CHECKING:
    from conformance.capture.replay import Replay


def add_capture(actions: Any) -> None:
    """The action ``capture``."""
    action = add_command(
        actions,
        "capture",
        "record in one file what the quantizers and the GPU of this machine answer; exit 0 when all conforms",
    )
    action.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the bundle to write; one that is there is continued"
    )
    action.add_argument("--suite", choices=["quick", "full"], default="quick", help="default quick")
    action.add_argument("--backend", action="append", metavar="NAME", help="only this backend; may be given again")
    action.add_argument("--probe", action="append", metavar="NAME", help="only this probe; may be given again")
    action.add_argument("--no-probes", action="store_true", help="backends alone")
    action.add_argument(
        "--simulate",
        action="store_true",
        help="a rehearsal: a simulated Blackwell in place of this machine; evidence of nothing",
    )
    action.add_argument(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="seconds that one case or probe may take; default 300",
    )
    _add_reports(action)
    action.set_defaults(run=_capture)


def add_replay(actions: Any) -> None:
    """The action ``replay``."""
    action = add_command(
        actions,
        "replay",
        "judge a bundle again, every byte, without its machine; exit 0 conforms, 1 not, 2 not judged",
    )
    action.add_argument("bundle", metavar="FILE", help="the bundle; FILE.partial is read while it is not finished")
    _add_reports(action)
    action.add_argument(
        "--update-ledger",
        action="store_true",
        help="make it evidence: conformance/evidence and docs/evidence.md of a clone",
    )
    action.set_defaults(run=_replay)


def _add_reports(action: argparse.ArgumentParser) -> None:
    action.add_argument("--json", metavar="FILE", help="write the report for programs")
    action.add_argument("--junit", metavar="FILE", help="write the report for continuous integration")
    action.add_argument("--html", metavar="FILE", help="write the report as a page")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _capture(options: argparse.Namespace) -> int:
    from conformance.capture import bundle as bundles
    from conformance.capture import record

    if options.no_probes and options.probe:
        raise ValueError("--probe and --no-probes contradict each other: leave one of them out")
    if not options.output:
        raise ValueError("-o is empty: give the name of the file to write")
    for path in filter(None, (options.output, options.json, options.junit, options.html)):
        terminal.refuse_unwritable(path)
    asked = record.Asked(options.suite, *_asked(options))
    try:
        root = record.capture(options.output, asked, options.timeout, terminal.progress(), terminal.complain)
    except KeyboardInterrupt:
        folder = bundles.partial(options.output)
        terminal.complain(f"interrupted; what was recorded is in {folder}: run the same command again to go on")
        raise
    found = _report(options.output, options)
    size = Path(options.output).stat().st_size
    print(f"{options.output}: {size / 1e6:.1f} MB, root sha256 {root}")
    print(f"to judge it again, on any machine: nvfp4 conformance replay {options.output}")
    if size > bundles.LARGEST:
        terminal.complain(
            f"{options.output}: larger than the {bundles.LARGEST >> 20} MiB that a bundle may have to be handed on"
        )
    nothing_ran = not found.compared and all(one.status == NOT_RUN for one in found.units)
    return 0 if nothing_ran else found.exit_code  # nothing to record is no fault of a machine


def _asked(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Backends and probes by name: those given, else all.  Raises ValueError for one that there is not."""
    from conformance.capture import simulated, witness
    from nvfp4hw import backends, probes

    here = [name for name in backends.names() if name not in witness.RECORDINGS]
    all_backends = ["simulated"] if options.simulate else here
    all_probes = simulated.probe_names() if options.simulate else probes.names()
    chosen = list(dict.fromkeys(options.backend or ([] if options.probe else all_backends)))
    probing = [] if options.no_probes or (options.backend and not options.probe) else options.probe or all_probes
    for name in chosen:
        simulated.load_backend(name)
    for name in probing:
        simulated.load_probe(name)
    return chosen, list(dict.fromkeys(probing))


def _replay(options: argparse.Namespace) -> int:
    return _report(options.bundle, options, options.update_ledger).exit_code


def _report(path: str, options: argparse.Namespace, update: bool = False) -> Replay:
    """Judge a bundle, print and write the reports, and make evidence of it if that is asked."""
    from conformance import report as reports
    from conformance.capture import report, witness
    from conformance.capture.replay import replay

    for target in filter(None, (options.json, options.junit, options.html)):
        terminal.refuse_unwritable(target)
    found = replay(path, terminal.progress())
    print(report.as_text(found))
    if options.json:
        reports.write_json(options.json, report.as_json(found))
    if options.junit:
        reports.write_text(options.junit, report.as_junit(found))
    if options.html:
        report.write_html(options.html, found)
    if update:
        for sentence in witness.update(found):
            print(sentence)
    return found

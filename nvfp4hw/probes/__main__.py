"""``python -m nvfp4hw.probes``: list, run and verify the probes, and compile them for other GPUs.

Exit status: 0 when every probe that ran (record that was read) passes, 1 when one fails, 2 when one came to no result,
or when what was asked cannot be done.
A probe that cannot run here is reported as not run and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nvfp4hw import probes
from nvfp4hw.probes import storage, toolchain
from nvfp4hw.probes.base import Probe, ProbeError, ProbeResult, printable

CI_TARGETS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4hw.probes", description="Ask the hardware, and check its answers."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    listing = commands.add_parser("list", help="every probe, and whether it can run here")
    listing.set_defaults(run=_list)

    run = commands.add_parser("run", help="compile and run probes on this machine's GPU")
    run.add_argument("names", nargs="*", metavar="NAME", help="probes; default all")
    run.add_argument("--all", action="store_true", help="all probes, the default")
    run.add_argument("-o", "--output", type=_folder, metavar="FOLDER", help="write one record a probe, NAME.npz, there")
    run.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of each program, instead of its own")
    run.set_defaults(run=_run)

    verify = commands.add_parser("verify", help="recompute recorded runs with the oracle; needs no GPU")
    verify.add_argument("files", nargs="+", type=Path, metavar="RECORD", help="files that run wrote")
    verify.set_defaults(run=_verify)

    compile_ = commands.add_parser("compile", help="compile probes to machine code and look for their instructions")
    compile_.add_argument("names", nargs="*", metavar="NAME", help="probes; default all")
    compile_.add_argument("--target", action="append", metavar="SM", help=f"default {', '.join(CI_TARGETS)}")
    compile_.set_defaults(run=_compile)

    options = parser.parse_args(arguments)
    for name in getattr(options, "names", ()):
        if name not in probes.names():
            parser.error(f"there is no probe {name!r}; the probes are {', '.join(probes.names())}")
    return int(options.run(options))


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return Path(text)


def _list(options: argparse.Namespace) -> int:
    for name in probes.names():
        probe = probes.load(name)
        print(f"{name}: {probe.what}\n  {', '.join(probe.rules)}; {', '.join(probe.architectures)}")
        print(f"  {probe.availability() or 'can run here'}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.output is not None:
        try:
            _writable(options.output)
        except OSError as error:
            return _refuse(f"-o {options.output}: no records can be written there: {(error.strerror or '?').lower()}")
    worst = 0
    for name in options.names or probes.names():
        probe = probes.load(name)
        if options.limit is not None:
            probe.limit = options.limit
        reason = probe.availability()
        if reason is not None:
            print(f"not run {name}: {reason}", flush=True)
            continue
        try:
            result = probe.run(_show if sys.stderr.isatty() else None)
        except ProbeError as error:
            print(f"no result {name}: {error}", flush=True)
            worst = 2
            continue
        worst = max(worst, _told(result))
        if options.output is not None:
            path = options.output / f"{name}.npz"
            try:
                storage.save(path, result)
            except OSError as error:
                return _refuse(f"{path}: cannot be written: {(error.strerror or '?').lower()}")
    return worst


def _writable(folder: Path) -> None:
    """Make a folder, and a file in it.  Raises OSError: minutes of work are not to end there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _refuse(sentence: str) -> int:
    print(f"python -m nvfp4hw.probes: {sentence}", file=sys.stderr, flush=True)
    return 2


def _verify(options: argparse.Namespace) -> int:
    worst = 0
    for path in options.files:
        try:
            record, arrays = storage.load(path)
            probe = probes.load(str(record.get("probe")))
        except (OSError, ValueError) as error:
            print(printable(f"no result {path}: {error}"), flush=True)
            worst = 2
            continue
        worst = max(worst, _told(probe.verify(record, arrays)))
    return worst


def _told(result: ProbeResult) -> int:
    print(f"{result} in {result.seconds:.1f} s", flush=True)
    return 0 if result.status == "pass" else 1


def _compile(options: argparse.Namespace) -> int:
    names = options.names or probes.names()
    for target in options.target or ():
        if not any(targets(probes.load(name), [target]) for name in names):
            there = sorted({one for name in names for one in probes.load(name).architectures})
            return _refuse(f"no probe that was asked is for {target!r}; they are for {', '.join(there)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="nvfp4-cubin-") as folder:
        for name in names:
            for target in targets(probes.load(name), options.target or CI_TARGETS):
                try:
                    found = toolchain.instructions(probes.load(name), target, Path(folder))
                except ProbeError as error:
                    failed = True
                    print(f"FAIL {name} {target}: {error}", flush=True)
                    continue
                print(f"compiled {name} {target}: {found}", flush=True)
    return 1 if failed else 0


def targets(probe: Probe, wanted: Sequence[str]) -> list[str]:
    """The probe's own targets for the GPUs that are wanted: "sm_100" for "sm_100a" where it needs no suffix."""
    numbers = [name.removeprefix("sm_").rstrip("af") for name in wanted]
    return [name for name in probe.architectures if name.removeprefix("sm_").rstrip("af") in numbers]


def _show(label: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{label}{' ' * 20}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader of a pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

"""The command ``nvfp4 study``: quantization error of every tensor of a checkpoint, as a page, tables and figures."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.terminal import add_command, complain
from nvfp4ref.container import counted

_DONE, _INCOMPLETE = 0, 2


def add(subparsers: Any) -> None:
    """The sub-command and its options."""
    parser = add_command(
        subparsers,
        "study",
        "quantization error of real tensors: a page, tables and figures; exit 0 all measured, 2 not all",
    )
    parser.add_argument("files", metavar="FILE", nargs="*", help=".safetensors, .npy, .npz, a folder of them, an index")
    parser.add_argument("-o", "--output", metavar="DIR", help="folder for report.html, tables and figures")
    parser.add_argument(
        "--format",
        metavar="NAME",
        action="append",
        dest="formats",
        help="nvfp4+16x16, torchao, mxfp4+ceil …; may be given again; --formats lists them",
    )
    parser.add_argument(
        "--recipe", metavar="NAME", action="append", help="the formats of a training recipe's operands: te, paper …"
    )
    parser.add_argument("--formats", action="store_true", dest="listing", help="list what a format's name is made of")
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", default=[], help="only tensors of such a name: '*.mlp.*'"
    )
    parser.add_argument("--exclude", metavar="PATTERN", action="append", default=[], help="no tensors of such a name")
    parser.add_argument("--dtype", choices=["bfloat16"], help="uint16 arrays are bit patterns of it")
    parser.add_argument("--title", metavar="TEXT", help="title of the page; default: the first file's name")
    parser.add_argument("--seed", type=int, metavar="S", default=0, help="seed of stochastic rounding; default 0")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: all cores that --memory allows")
    parser.add_argument("--memory", type=int, metavar="MIB", default=1024, help="memory that it may use; default 1024")
    parser.add_argument("--fresh", action="store_true", help="measure again what DIR has from an earlier run")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, write, say what was written; 0, or 2 when anything could not be measured or written."""
    from nvfp4ref.study import formats, page
    from nvfp4ref.study.files import FAILED, study_files
    from nvfp4ref.study.sources import printable

    if options.listing:
        print(_listing(formats))
        return _DONE
    if not options.files:
        raise ValueError("say which files to study; see nvfp4 study --help")
    if not options.output:
        raise ValueError("say with -o which folder to write to")
    if not 0 <= options.seed < 1 << 63 or (options.workers is not None and options.workers < 1):
        raise ValueError("--seed is 0 to 2^63 − 1 and --workers at least 1")
    missing = page.missing_packages()
    if missing:
        raise ValueError(f"a study needs {', '.join(missing)}: pip install 'nvfp4ref[study]'")
    names = [*(options.formats or []), *(one for name in options.recipe or [] for one in formats.of_recipe(name))]
    chosen = formats.several(names or formats.DEFAULT)
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; -o names a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before an hour of work, not after it
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{folder}: cannot be made: {reason}; name a folder after -o that can be written to") from None

    found = study_files(
        options.files,
        chosen,
        folder=folder,
        only=options.only,
        exclude=options.exclude,
        seed=options.seed,
        bits=options.dtype,
        workers=options.workers,
        memory=options.memory,
        fresh=options.fresh,
        progress=_progress() if sys.stderr.isatty() else None,
    )
    written = page.write(found, folder, options.title or f"Quantization error of {Path(options.files[0]).name}")
    failed = [f"{one.source.file}: {one.source.name}: {one.note}" for one in found.results if one.status == FAILED]
    remarks = [*formats.repeated(options.formats or []), *found.remarks]
    for sentence in [*remarks, *found.errors, *failed, *written.errors]:
        complain(printable(sentence))
    print(_summary(found, folder, written))
    return _DONE if found.complete and not written.errors else _INCOMPLETE


def _listing(formats: Any) -> str:
    return (
        (formats.__doc__ or "").partition("\n\n")[2].strip()
        + f"\n\nPresets: {', '.join(formats.PRESETS)}\n"
        + (f"Without --format: {', '.join(formats.DEFAULT)}")
    )


def _summary(found: Any, folder: Path, written: Any) -> str:
    from nvfp4ref.study import tables
    from nvfp4ref.study.statistics import figures

    width = max(len(one.name) for one in found.formats)
    lines = [f"{'':{width}}  Σe²/Σx² %   SNR dB     gain  zero codes %"] if found.totals else []
    for one in found.formats:
        if one.name in found.totals:
            f = figures(one, found.totals[one.name])
            error, zeros = 100 * f["relative_mse"], 100 * f["zero_codes"]
            lines.append(f"{one.name:{width}}  {error:9.4f} {f['snr_db']:8.2f} {f['gain']:8.4f} {zeros:13.2f}")
    first = tables.ranking(found)[:3]
    if first:
        lines.append(f"largest error in {found.formats[0].name}: {', '.join(one.name for one in first)}")
    skipped = sum(one.status == "skipped" for one in found.results)
    resumed = f", {found.resumed} of them by an earlier run" if found.resumed else ""
    lines.append(
        f"{counted(len(found.measured), 'tensor')} measured{resumed}; {skipped} skipped; "
        f"{counted(len(written.files), 'file')} in {folder}"
    )
    return "\n".join(lines)


def _progress() -> Callable[[str, int, int], None]:
    """A line on a terminal that overwrites itself and is gone when the work is done; ten times a second at most."""
    from nvfp4ref.study.sources import printable

    start = time.monotonic()
    shown = [0.0]

    def show(name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - shown[0] < 0.1:
            return
        shown[0] = now
        spent = now - start
        left = spent * (total - done) / done if done else 0.0
        share = 100 * done / total if total else 100.0
        text = f"{share:3.0f} %  {_time(spent)} spent, {_time(left)} left  {printable(name)}"
        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{text[:columns] if done < total else ''}\x1b[K")
        sys.stderr.flush()

    return show


def _time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

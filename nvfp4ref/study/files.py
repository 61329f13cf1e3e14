"""A study of every tensor under some paths: in parts, on all cores, in bounded memory, resumable.

Two passes: what quantizing needs to know of each tensor (amax, rms), then the error of every format.  A tensor is
read in parts of about four million elements; parts go to worker processes and come back in order, so that no figure
depends on how many there are.  Finished tensors are written to a journal, from which an interrupted study goes on.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from ..container import DumpError, PathLike, counted
from . import pieces, sources
from .formats import DEFAULT, Format, several
from .pieces import Lines, Measured, Survey, Tensor
from .sources import Source
from .statistics import Shape, Sums, figures

T = TypeVar("T")
Progress = Callable[[str, int, int], None]

JOURNAL, VERSION = "study.jsonl", 2
WORKER_MIB, PARENT_MIB = 100, 250  # what a worker needs at most, and the rest; measured
WORTHWHILE = 1 << 22  # elements, times formats, for which another process is started
MEASURED, SKIPPED, FAILED = "measured", "skipped", "failed"


@dataclass(frozen=True)
class Result:
    """One tensor of a study.

    status: "measured", "skipped" (by its kind, or not chosen) or "failed"; note: why, or what was done first.
    figures: by format's name, then by figure's name.
    """

    source: Source
    status: str
    note: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        """The layer that it belongs to, with the file where several files have tensors of these names."""
        return _layer(self.source)


@dataclass
class Study:
    """What a study found.

    results: tensors in the order of their files.  totals: Sums of each format over all of them; layers: the same a
    layer.  shape: of the elements of all tensors, each over its own rms.  errors: what could not be opened.  remarks:
    what else is to be known, as a file that was given twice.
    """

    formats: tuple[Format, ...]
    seed: int
    results: list[Result] = field(default_factory=list)
    totals: dict[str, Sums] = field(default_factory=dict)
    layers: dict[str, dict[str, Sums]] = field(default_factory=dict)
    shape: Shape = field(default_factory=Shape)
    errors: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    resumed: int = 0  # tensors taken from the journal

    @property
    def measured(self) -> list[Result]:
        """The tensors that have figures."""
        return [one for one in self.results if one.status == MEASURED]

    @property
    def complete(self) -> bool:
        """Whether nothing failed."""
        return not self.errors and all(one.status != FAILED for one in self.results)

    def add(self, source: Source, shape: Shape, sums: dict[str, Sums], found: dict[str, dict[str, float]]) -> None:
        """Take in a tensor."""
        facts = next(iter(found.values()))
        notes = [source.note] if source.note else []
        bad = int(facts["nan"]), int(facts["inf"])
        if any(bad):
            notes.append(f"{bad[0]:,} NaN and {bad[1]:,} Inf are left out of the error")
        for lines in ("rows", "columns"):
            padded = max((sums[f.name].padded for f in self.formats if f.columnwise == (lines == "rows")), default=0)
            if padded:
                notes.append(f"{counted(padded, lines.removesuffix('s'))} of zeros added to whole blocks, not counted")
        lost = {name: int(one["lost"]) - sum(bad) for name, one in found.items() if one["lost"] > sum(bad)}
        notes += [f"{name} makes {counted(count, 'finite element')} NaN or Inf" for name, count in lost.items()]
        self.results.append(Result(source, MEASURED, "; ".join(notes), found))
        self.shape.add(shape)
        layer = self.layers.setdefault(_layer(source), {one.name: Sums() for one in self.formats})
        for name, one in sums.items():
            layer[name].add(one)
            self.totals.setdefault(name, Sums()).add(one)

    def layer_figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """The figures of each layer and format, its tensors taken together."""
        formats = {one.name: one for one in self.formats}
        return {
            layer: {name: figures(formats[name], sums) for name, sums in of.items()}
            for layer, of in self.layers.items()
        }


def layer_of(name: str) -> str:
    """The layer of a tensor: its name up to the first number, or without its last part when there is none.

    >>> layer_of("model.layers.3.mlp.experts.7.up_proj.weight"), layer_of("lm_head.weight")
    ('model.layers.3', 'lm_head')
    """
    numbered = re.match(r"(?:.*?[._])??\d+(?=[._]|$)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _layer(source: Source) -> str:
    layer = layer_of(source.name)
    return sources.printable(f"{source.apart}: {layer}" if source.apart else layer)


def study_files(
    paths: PathLike | Sequence[PathLike],
    formats: Iterable[str | Format] = DEFAULT,
    *,
    folder: PathLike | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    seed: int = 0,
    bits: str | None = None,
    workers: int | None = 1,
    memory: int = 1024,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Study:
    """Measure every tensor under paths in every format.

    Args:
        paths: .safetensors, .npy, .npz, folders of them, Hugging Face indexes.
        formats: names or Formats, see ``formats.named``.
        folder: where the journal is kept, and temporary files; None for no journal.
        only, exclude: patterns (``*.mlp.*``) of tensor names.
        seed: of the random words of stochastic formats.
        bits: "bfloat16" to take uint16 arrays as bit patterns of it.
        workers: processes; None for all cores.  As many are used as ``memory`` allows.
        memory: MiB that the whole study may use.
        fresh: begin anew, whatever the journal has.
        progress: called with (tensor, elements done, elements in all).
    Returns:
        Study.  What cannot be read or measured is in it; the rest goes on.
    Raises:
        ValueError: unknown formats, no format, paths that hold nothing at all.
    """
    given = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else list(paths)
    chosen = several(formats)
    made = Study(chosen, seed)
    with _scratch(folder) as scratch:
        found = sources.find(given, scratch, bits)
        made.errors += found.errors
        made.remarks += found.remarks
        for pattern in only:
            if not any(fnmatchcase(one.name, pattern) for one in found.tensors):
                made.errors.append(f"no tensor's name matches {pattern!r}: nothing is measured for it")
        wanted = [_chosen(one, only, exclude) for one in found.tensors]
        if not wanted and not made.errors:
            raise ValueError(f"no tensor under {', '.join(map(str, given))}")
        run = _Run(made, wanted, _Journal(folder, made, fresh), progress or (lambda name, done, total: None))
        with _pool(_workers(workers, memory, run.parts, run.total)) as pool:
            run.run(pool)
    return made


def _chosen(one: Source, only: Sequence[str], exclude: Sequence[str]) -> Source:
    if one.skip:
        return one
    wanted = not only or any(fnmatchcase(one.name, pattern) for pattern in only)
    if wanted and not any(fnmatchcase(one.name, pattern) for pattern in exclude):
        return one
    return replace(one, skip="not chosen")


_SCRATCH = ".nvfp4-study-"


@contextmanager
def _scratch(folder: PathLike | None) -> Iterator[Path]:
    """A folder for temporary files, made when there is one, gone afterwards.

    A lock beside it says that it is in use; what a study that was killed has left is removed by the next one.
    """
    place = Path(tempfile.gettempdir()) if folder is None else Path(os.fsdecode(folder))
    _remove_stale(place)
    path = place / f"{_SCRATCH}{secrets.token_hex(8)}"
    lock = path.with_suffix(".lock")
    with ExitStack() as stack:  # ends in the opposite order: what was unpacked, the lock, its file
        with suppress(OSError):  # where nothing can be written, which is said when something has to be
            place.mkdir(parents=True, exist_ok=True)
            stack.callback(_removed, lock)
            _lock(stack.enter_context(open(lock, "xb")))  # closed by the system, whatever ends this process
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _removed(lock: Path) -> None:
    with suppress(OSError):
        lock.unlink()


def _lock(file: IO[bytes]) -> None:
    """Raises OSError when another process holds it.  On Windows an open file cannot be removed, which is enough."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_stale(place: Path) -> None:
    """Remove the temporary folders whose process is gone."""
    for lock in place.glob(f"{_SCRATCH}*.lock"):
        try:
            with open(lock, "rb") as file:
                _lock(file)
            lock.unlink()
        except OSError:
            continue  # in use, or another user's
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)


# -- workers ---------------------------------------------------------------------------------------------------------


def _workers(asked: int | None, memory: int, parts: int, elements: int) -> int:
    """Processes: as asked, as there are parts, as memory allows; unless asked, as there are cores, and enough to do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = min(cores, elements // WORTHWHILE) if asked is None else asked
    return max(1, min(wanted, parts, (memory - PARENT_MIB) // WORKER_MIB))


Submit = Callable[..., Callable[[], Any]]  # of a function and its arguments: what waits for the result


@contextmanager
def _pool(workers: int) -> Iterator[tuple[Submit, int]]:
    """How to submit work, and how much to keep waiting."""
    if workers == 1:
        yield (lambda function, *arguments: lambda: function(*arguments)), 0
        return
    context = multiprocessing.get_context("spawn")  # the same on every system, and safe whatever threads there are
    pool = ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts)

    def submit(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        future: Future[Any] = pool.submit(function, *arguments)
        return future.result

    try:
        yield submit, 2 * workers
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C ends the study in the parent, which then ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _survey(tensor: Tensor, source: Source, rows: slice, columns: slice) -> Survey | str:
    return _reported(lambda: pieces.survey(tensor, source.read, rows, columns))


def _measure(tensor: Tensor, source: Source, found: Survey, rows: slice, columns: slice) -> Measured | str:
    return _reported(lambda: pieces.measure_part(tensor, found, source.read, rows, columns))


def _reported(work: Callable[[], T]) -> T | str:
    """The result, or one sentence: whatever goes wrong with one tensor, the others go on."""
    try:
        return work()
    except DumpError as error:
        return str(error)
    except MemoryError:
        return "not enough memory"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# -- the two passes --------------------------------------------------------------------------------------------------


class _Run:
    """One pass after the other over the tensors that the journal does not have."""

    def __init__(self, made: Study, tensors: list[Source], journal: _Journal, progress: Progress) -> None:
        self.made, self.tensors, self.journal, self.progress = made, tensors, journal, progress
        self.surveys: dict[int, Survey] = {}
        self.failures: dict[int, str] = {}
        self.reported = 0  # tensors before this one have their result
        self.todo = {
            index: Tensor(one.name, one.matrix, made.formats, made.seed)
            for index, one in enumerate(tensors)
            if not one.skip and not journal.has(one)
        }
        self.done, self.total = 0, sum(tensors[index].size for index in self.todo) * (1 + len(made.formats))
        self.parts = sum(1 for one in self.todo.values() for _ in one.parts())

    def run(self, pool: tuple[Submit, int]) -> None:
        """Everything; results are in the order of the tensors."""
        try:
            for index, rows, columns, found in self._work(pool, _survey, lambda i: ()):
                self.surveys.setdefault(index, Survey()).add(found, self.todo[index], rows, columns)
            self._second(pool)
        except BrokenProcessPool:
            self.made.errors.append("a worker process was ended from outside (out of memory?): run again to go on")
        self._report_from(len(self.tensors))
        self.progress("", self.total, self.total)

    def _work(
        self, pool: tuple[Submit, int], task: Callable[..., Any], extra: Callable[[int], tuple[Any, ...]]
    ) -> Iterator[tuple[int, slice, slice, Any]]:
        """Every part of every tensor through a task, in order; parts of a tensor that failed are left out."""
        submit, window = pool
        waiting: deque[tuple[int, slice, slice, Callable[[], Any]]] = deque()

        def finished() -> Iterator[tuple[int, slice, slice, Any]]:
            index, rows, columns, wait = waiting.popleft()
            found = wait()
            size = (rows.stop - rows.start) * (columns.stop - columns.start)
            self.done += size if task is _survey else size * len(self.made.formats)
            self.progress(self.tensors[index].name, self.done, self.total)
            if isinstance(found, str):
                self.failures.setdefault(index, found)
            elif index not in self.failures:
                yield index, rows, columns, found

        for index, tensor in self.todo.items():
            for rows, columns in tensor.parts():
                if index in self.failures:
                    break
                work = submit(task, tensor, self.tensors[index], *extra(index), rows, columns)
                waiting.append((index, rows, columns, work))
                if len(waiting) > window:
                    yield from finished()
        while waiting:
            yield from finished()

    def _second(self, pool: tuple[Submit, int]) -> None:
        """The error of every format, tensor by tensor."""
        at, total = -1, None
        for index, rows, columns, found in self._work(pool, _measure, lambda i: (self.surveys[i],)):
            if index != at:
                self._finish(at, total)
                at, total = index, Measured.empty(self.todo[index])
            assert total is not None
            total.add(found, rows, columns)
        self._finish(at, total)

    def _finish(self, index: int, total: Measured | None) -> None:
        """File one tensor, and before it those that need no measuring."""
        if total is None or index in self.failures:
            return
        found, one, done = self.surveys.pop(index), self.tensors[index], total
        records = _reported(lambda: {f.name: pieces.record(found, done, f) for f in self.made.formats})
        if isinstance(records, str):
            self.failures[index] = records
            return
        self._report_from(index)
        self.journal.write(one, total, records)
        self.made.add(one, total.shape, total.sums, records)
        self.reported = index + 1

    def _report_from(self, stop: int) -> None:
        """Results of the tensors up to ``stop`` that are skipped, failed or in the journal."""
        for index in range(self.reported, stop):
            one = self.tensors[index]
            if index in self.todo:
                self.made.results.append(Result(one, FAILED, self.failures.get(index, "not measured")))
            elif one.skip:
                self.made.results.append(Result(one, SKIPPED, one.skip))
            else:
                self.made.add(one, *self.journal.read(one))
                self.made.resumed += 1
        self.reported = stop


# -- the journal -----------------------------------------------------------------------------------------------------


class _Journal:
    """Finished tensors, one JSON object a line, in ``study.jsonl``; an incomplete last line counts as none."""

    def __init__(self, folder: PathLike | None, made: Study, fresh: bool) -> None:
        self.made = made
        self.path = None if folder is None else Path(os.fsdecode(folder)) / JOURNAL
        self.names = {fingerprint(one, made.seed): one.name for one in made.formats}
        self.expected = {one.name: pieces.record(*_nothing(one), one).keys() for one in made.formats}
        self.places: dict[str, int] = {}
        if self.path is not None:
            try:
                if fresh:
                    self.path.unlink(missing_ok=True)
                self._index()
            except OSError as error:
                self._give_up("read", error)

    def _index(self) -> None:
        assert self.path is not None
        if not self.path.is_file():
            return
        with open(self.path, "rb") as file:
            place = 0
            for line in file:
                entry = self._parsed(line)
                if entry is not None:
                    self.places[entry[0]] = place
                place += len(line)

    def has(self, one: Source) -> bool:
        """Whether every format of this tensor, its file unchanged, is there."""
        return one.key in self.places

    def read(self, one: Source) -> tuple[Shape, dict[str, Sums], dict[str, dict[str, float]]]:
        """What ``Study.add`` takes."""
        assert self.path is not None
        with open(self.path, "rb") as file:
            file.seek(self.places[one.key])
            entry = self._parsed(file.readline())
        assert entry is not None
        return entry[1:]

    def _parsed(self, line: bytes) -> tuple[str, Shape, dict[str, Sums], dict[str, dict[str, float]]] | None:
        """Key, and what ``Study.add`` takes; None of what is no entry, of another layout, or lacks a format."""
        try:
            entry = json.loads(line)
            if entry["study"] != VERSION or not isinstance(entry["key"], str):
                return None
            found = {name: entry["formats"][key] for key, name in self.names.items()}
            records = {name: {k: float(v) for k, v in each["figures"].items()} for name, each in found.items()}
            if any(records[name].keys() != keys for name, keys in self.expected.items()):
                return None
            sums = {name: Sums.from_json(each["sums"]) for name, each in found.items()}
            return entry["key"], Shape.from_json(entry["shape"]), sums, records
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    def write(self, one: Source, total: Measured, records: dict[str, dict[str, float]]) -> None:
        """Add a tensor.  When that is not possible the study goes on without, and says so."""
        if self.path is None:
            return
        entry = {
            "study": VERSION,
            "key": one.key,
            "shape": total.shape.to_json(),
            "formats": {
                key: {
                    "sums": total.sums[name].to_json(),
                    "figures": {
                        k: v if v == v and abs(v) != float("inf") else str(v) for k, v in records[name].items()
                    },
                }
                for key, name in self.names.items()
            },
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                if file.tell() and not _ends_in_newline(self.path):
                    file.write(b"\n")
                file.write(json.dumps(entry, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        except ValueError as error:  # a number that JSON has not
            self.made.errors.append(f"{self.path}: {one.label} is not in it and will be measured again: {error}")
        except OSError as error:
            self._give_up("written", error)

    def _give_up(self, what: str, error: OSError) -> None:
        reason = (error.strerror or str(error)).lower()
        self.made.errors.append(f"{self.path}: cannot be {what}: {reason}; the study cannot be resumed")
        self.path, self.places = None, {}


def _nothing(one: Format) -> tuple[Survey, Measured]:
    none = Lines(None, None)
    return Survey(), Measured(sums={one.name: Sums()}, errors={one.name: none}, squares={one.name: none})


def _ends_in_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@cache
def source_hash() -> str:
    """SHA-256 of this package's source: figures of another state of it are not taken for those of this one."""
    said, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        said.update(path.relative_to(folder).as_posix().encode())
        said.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return said.hexdigest()


def fingerprint(one: Format, seed: int) -> str:
    """What decides the figures of a format, whatever its name: settings and source."""
    settings = {name: value for name, value in asdict(one).items() if name != "name"}
    settings["arithmetic"].pop("name")
    settings["source"] = source_hash()
    if one.stochastic:
        settings["seed"] = seed
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

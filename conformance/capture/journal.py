"""The folder in which a bundle is recorded: appended to case by case, so that a stop at any moment loses one case.

An array is written before the line that speaks of it, and a line counts once its end is there.  Whoever goes on
after a stop cuts off what is half written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.capture.bundle import (
    Array,
    BundleError,
    Record,
    Ref,
    describe,
    intact,
    little,
    parse_records,
    without_folders,
)
from nvfp4ref.container import blame, foreign, replacing

_LOCK, _NOW = "lock", "now.json"


@contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """The folder for one recording alone; its processes inherit the descriptor, and with it the lock.

    Raises BundleError when another one has it.  Where the system has no such locks (Windows) nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        yield None
        return
    with foreign(f"{folder}: cannot be written"):
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BundleError(
                f"{folder}: another capture, or a process that an interrupted one left, still writes here: "
                "wait for it to end, or give another file with -o"
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object to a file, completely or not at all.  Raises BundleError."""
    with blame(path), foreign("cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write((json.dumps(value, indent=1) + "\n").encode())


class Writer:
    """What one backend or probe has recorded, and its further records.

    Attributes:
        recorded: ids of the records that are there.
    Every method raises BundleError when the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorded: dict[str, Record] = {}
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
        self._repair()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with blame(self.folder), foreign("cannot be written"):
            yield

    def _repair(self) -> None:
        """Drop what a stop leaves, half a line and bytes that no line speaks of, and records with damaged bytes."""
        lines, arrays = self.folder / "records.jsonl", self.folder / "arrays.bin"
        with self._writing():
            text = lines.read_bytes() if lines.exists() else b""
            data = arrays.read_bytes() if arrays.exists() else b""
        kept: list[bytes] = []
        end = used = 0
        with suppress(BundleError):
            for record, end_of_line in parse_records(text):
                line, end = text[end:end_of_line], end_of_line
                refs = [ref for ref in record.outputs.values() if ref.at is not None]
                if all(intact(data, ref) for ref in refs):
                    self.recorded[record.id] = record
                    kept.append(line)
                    used = max(used, *(ref.at + ref.nbytes for ref in refs if ref.at is not None), 0)
        whole = b"".join(kept)
        with self._writing():
            if lines.exists() and whole != text[: len(whole)]:
                with replacing(lines) as file:
                    file.write(whole)
            for path, length in ((lines, len(whole)), (arrays, used)):
                if path.exists():
                    os.truncate(path, length)

    def clear(self) -> None:
        """Forget every record."""
        self.recorded = {}
        with self._writing():
            for name in ("records.jsonl", "arrays.bin", "unit.json", "end.json"):
                (self.folder / name).unlink(missing_ok=True)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; {} when it is not there or not readable."""
        try:
            return dict(json.loads((self.folder / name).read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder."""
        write_json(self.folder / name, value)

    def add(self, record: Record, arrays: Mapping[str, Array], keep: Mapping[str, bool] | None = None) -> None:
        """Append a record whose outputs are these arrays; those that ``keep`` names False leave only their hash.

        Of paths in its messages only the names of files are written.
        """
        with self._writing():
            outputs: dict[str, Ref] = {}
            with open(self.folder / "arrays.bin", "ab") as file:
                for name, array in arrays.items():
                    ref = describe(array)
                    if keep is None or keep.get(name, True):
                        ref = Ref(ref.dtype, ref.shape, ref.sha256, file.tell())
                        file.write(little(array)[1].tobytes())
                    outputs[name] = ref
            error, refused = (text and without_folders(text) for text in (record.error, record.refused))
            whole = replace(record, outputs=outputs, error=error, refused=refused)
            with open(self.folder / "records.jsonl", "ab") as file:
                file.write((json.dumps(whole.to_json()) + "\n").encode())
        self.recorded[record.id] = whole

    # ---- what is being done, for whoever watches -----------------------------------------------------------

    def now(self, **state: Any) -> None:
        """Say what is being done now."""
        with self._writing():
            temporary = self.folder / f"{_NOW}.new"
            temporary.write_text(json.dumps(state), encoding="utf-8")
            with suppress(PermissionError):  # Windows, while it is being read: the next one will do
                os.replace(temporary, self.folder / _NOW)

    def watch(self) -> dict[str, Any]:
        """What was being done when it was last said; {} when nothing was."""
        return self.read(_NOW)

    def idle(self) -> None:
        """Nothing is being done."""
        with self._writing():
            (self.folder / _NOW).unlink(missing_ok=True)

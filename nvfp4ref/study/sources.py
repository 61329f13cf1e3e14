"""Which tensors lie under a path, and reading any part of one.

Nothing but headers is read when a path is opened.  A tensor that no study can measure (integers, a vector, no
element) is listed with the reason.  Compressed members of an .npz are written out to a temporary folder first, for
a part of one cannot be read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..container import DumpError, PathLike, blame, counted, foreign, open_archive, shown
from ..fp32 import AnyArray, bfloat16

_FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": bfloat16,
}
_SUFFIXES = (".safetensors", ".npz", ".npy")
_INDEX = ".safetensors.index.json"
_KNOWN = ".safetensors, .npz, .npy, a folder of them, or model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """A tensor at rest.

    Attributes:
        name: as the file has it; of an .npy the file's name without the suffix.
        file: the path it was found under, for people.
        shape: as stored; dtype: in NumPy's terms.
        path, offset: where its bytes are.
        skip: why it is not measured, "" when it is.
        note: what is done to it first, "" for nothing.
        fortran: stored by columns, of an .npy.
        place: where ``file`` has it, also when ``path`` is what it was unpacked to.
        state: of the file when it was opened: device, inode, bytes, time of the last change.
        apart: the file, where another file of the study has tensors of the same names.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    path: str = ""
    offset: int = 0
    skip: str = ""
    note: str = ""
    fortran: bool = False
    place: int = 0
    state: tuple[int, ...] = ()
    apart: str = ""

    @property
    def label(self) -> str:
        """The name for people: unlike that of any other tensor, and without control characters."""
        return printable(f"{self.apart}: {self.name}" if self.apart else self.name)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """The matrix that is quantized: leading dimensions are rows; a last one below 16 (kernels of convolutions)
        is joined with all but the first."""
        if len(self.shape) > 2 and self.shape[-1] < 16:
            return self.shape[0], math.prod(self.shape[1:])
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the bytes."""
        return bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)

    @property
    def kind(self) -> str:
        """The dtype's name for people."""
        return np.dtype(self.dtype).name if self.dtype[:1] in "<>=" else self.dtype

    @property
    def key(self) -> str:
        """What a finished measurement is filed under: the same bytes of the same file, as far as can be told."""
        where = [os.path.realpath(self.file), self.name, self.place, *self.state]
        return json.dumps([*where, list(self.shape), self.dtype])

    def read(self, rows: slice, columns: slice) -> AnyArray:
        """That part of the matrix, as stored but float64 rounded to float32.

        Raises DumpError when the bytes are not there any more.
        """
        height, width = self.matrix
        with blame(self.file), blame(shown(self.name)), foreign("cannot be read"):
            if self.fortran:
                part = self._bytes((width, height), columns, rows).T
            else:
                part = self._bytes((height, width), rows, columns)
        part = np.ascontiguousarray(part).astype(part.dtype.newbyteorder("="), copy=False)
        if part.dtype == np.float64:
            with np.errstate(over="ignore"):
                part = part.astype(np.float32)
        return part

    def _bytes(self, shape: tuple[int, int], rows: slice, columns: slice) -> AnyArray:
        dtype, width = self.numpy_dtype, shape[1]
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
        pieces = [out] if out.shape[1] == width else list(out)
        with open(self.path, "rb") as file:
            for index, piece in enumerate(pieces):
                file.seek(self.offset + dtype.itemsize * ((rows.start + index) * width + columns.start))
                if file.readinto(piece.view(np.uint8).reshape(-1).data) != piece.nbytes:
                    raise DumpError("is cut short: the file changed while it was read")
        return out


@dataclass(frozen=True)
class Found:
    """What lies under the paths: tensors, sentences about what could not be opened, and other remarks."""

    tensors: tuple[Source, ...]
    errors: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def printable(text: str) -> str:
    """A text from a file for a terminal, a page or a figure: control characters and the like as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _state(path: Path) -> tuple[int, ...]:
    with foreign("cannot be opened"):
        stat = os.stat(path)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def find(paths: list[PathLike], scratch: Path, bits: str | None = None) -> Found:
    """Every tensor under paths: .safetensors, .npy, .npz, folders of them, Hugging Face indexes.

    Args:
        scratch: a folder for compressed members of .npz files; made when there is one.
        bits: "bfloat16" to take uint16 arrays as bit patterns of it.

    A file that cannot be opened is among the errors, and the others are listed.  A file that comes again, by whatever
    path, is left out the second time, with a remark.
    """
    tensors: list[Source] = []
    errors: list[str] = []
    remarks: list[str] = []
    opened: dict[tuple[int, ...], list[Source]] = {}
    for path in paths:
        given = Path(os.fsdecode(path))
        try:
            with blame(given):
                files, listed = _files(given)
        except DumpError as error:
            errors.append(str(error))
            continue
        there: set[str] = set()
        broken = False
        for file in files:
            try:
                with blame(file):
                    state = _state(file)
                    again = opened.get(state)
                    found = again if again is not None else list(_open(file, scratch, bits))
            except DumpError as error:
                errors.append(str(error))
                broken = True
                continue
            there |= {one.name for one in found}
            if again is not None:
                remarks.append(f"{file}: given twice: studied once")
                continue
            opened[state] = [replace(one, state=state) for one in found]
            tensors += opened[state]
        missing = [] if broken else [name for name in listed if name not in there]
        if missing:
            errors.append(
                f"{given}: lists {counted(len(missing), 'tensor')} that no file has: {', '.join(missing[:3])} …"
            )
    return Found(_kept_apart(tensors), tuple(errors), tuple(remarks))


def _kept_apart(tensors: list[Source]) -> tuple[Source, ...]:
    """Tensors of files that share a tensor's name are told apart by their file; shards of one checkpoint share none."""
    files: dict[str, set[str]] = {}
    for one in tensors:
        files.setdefault(one.name, set()).add(one.file)
    apart = {file for named in files.values() if len(named) > 1 for file in named}
    return tuple(replace(one, apart=one.file) if one.file in apart else one for one in tensors)


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The files of a path, and the names that its index lists."""
    with foreign("cannot be opened"):
        if path.is_dir():
            indexes = sorted(one for one in path.iterdir() if one.name.endswith(_INDEX))
            if len(indexes) == 1:
                return _index(indexes[0])
            files = sorted(one for one in path.iterdir() if one.suffix.lower() in _SUFFIXES)
            if not files:
                raise DumpError(f"has no {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file")
            return files, []
        if path.name.endswith(".json"):
            return _index(path)
        if path.exists() and path.suffix.lower() not in _SUFFIXES:
            raise DumpError(f"the suffix is {path.suffix!r}, expected {_KNOWN}")
        os.stat(path)
        return [path], []


def _index(path: Path) -> tuple[list[Path], list[str]]:
    with foreign("is no index"):
        index = json.loads(path.read_text(encoding="utf-8"))
    listed = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise DumpError("is no index: it needs a weight_map from tensor names to file names")
    for name in set(listed.values()):
        parts = PurePosixPath(name.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or ":" in name:
            raise DumpError(f"names the file {shown(name)}, which is outside its folder")
    return [path.parent / name for name in sorted(set(listed.values()))], list(listed)


def _open(path: Path, scratch: Path, bits: str | None) -> Iterator[Source]:
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        yield from _safetensors(path, bits)
    elif suffix == ".npz":
        yield from _npz(path, scratch, bits)
    else:
        with foreign("cannot be opened"), open(path, "rb") as file:
            yield _npy(path.stem, str(path), path, file, 0, bits)


def _safetensors(path: Path, bits: str | None) -> Iterator[Source]:
    with open_archive(path):  # the library checks every claim of the header, and says what is wrong
        pass
    with foreign("is no .safetensors, or damaged or cut short"), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        kind = _FLOATS.get(one["dtype"])
        stored = {"BF16": "bfloat16", "U16": "uint16"}.get(one["dtype"], one["dtype"] if kind is None else kind.str)
        yield _judged(name, str(path), tuple(one["shape"]), stored, path, 8 + length + one["data_offsets"][0], bits)


def _npz(path: Path, scratch: Path, bits: str | None) -> Iterator[Source]:
    with open_archive(path):  # checks what the members claim
        pass
    with foreign("is no .npz, or damaged or cut short"), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type != zipfile.ZIP_STORED:
                with blame(shown(name)), foreign("cannot be unpacked"):
                    scratch.mkdir(parents=True, exist_ok=True)
                    handle, plain = tempfile.mkstemp(".npy", dir=scratch)
                    with archive.open(info) as packed, open(handle, "wb") as out:
                        shutil.copyfileobj(packed, out)
                with open(plain, "rb") as file:
                    one = _npy(name, str(path), Path(plain), file, 0, bits)
                yield replace(one, place=info.header_offset)
                continue
            with open(path, "rb") as file:
                file.seek(info.header_offset + 26)
                lengths = file.read(4)
                skip = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                yield _npy(name, str(path), path, file, info.header_offset + 30 + skip, bits)


def _npy(name: str, shown_as: str, path: Path, file: Any, start: int, bits: str | None) -> Source:
    with foreign("is no .npy, or damaged or cut short"):
        file.seek(start)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        offset, end = file.tell(), os.fstat(file.fileno()).st_size
    stored = "bfloat16" if dtype == np.dtype("V2") else dtype.str if dtype.kind == "f" else dtype.name
    if dtype.hasobject:
        stored = "object"
    elif end - offset < math.prod(shape) * dtype.itemsize:
        raise DumpError(f"claims {dtype} {shape}, {math.prod(shape) * dtype.itemsize} bytes, and has {end - offset}")
    return _judged(name, shown_as, shape, stored, path, offset, bits, fortran and len(shape) > 1)


def _judged(
    name: str,
    file: str,
    shape: tuple[int, ...],
    dtype: str,
    path: Path,
    offset: int,
    bits: str | None,
    by_column: bool = False,
) -> Source:
    """The Source, with the reason where it is not measured."""
    if dtype == "uint16" and bits == "bfloat16":
        dtype = "bfloat16"
    kind = Source(name, file, shape, dtype).kind
    skip, note = "", "float64 rounded to float32" if kind == "float64" else ""
    if kind == "uint16":
        skip = "uint16, not floating point (bit patterns of bfloat16? say so)"
    elif kind not in ("float64", "float32", "float16", "bfloat16"):
        skip = f"{kind}, not float64, float32, float16 or bfloat16"
    elif 0 in shape:
        skip = "no element"
    elif len(shape) < 2:
        skip = "a vector or scalar, which stays in high precision (reshape it to (1, -1) to measure it)"
    elif by_column and len(shape) > 2:
        skip = "more than two dimensions stored by columns: save it in C order"
    return Source(name, file, shape, dtype, str(path), offset, skip, note, by_column, offset)

"""Arrays in files: .npy, .npz and .safetensors, without trusting a length that a file claims.

Every size is held against the real length of the file before memory is taken for it, so a damaged or
hostile file costs one sentence, not the machine.  Writing is all or nothing, and the same content gives the
same bytes.

The two containers are read and written here.  ``numpy.load`` allocates what a member's header claims before
it looks at the data; the safetensors package gives no E4M3 tensor to NumPy and writes its metadata in an
order that changes from run to run.  Both formats stay theirs: the tests hold this file against both.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PathLike = str | os.PathLike[str]

_CHUNK = 1 << 20  # bytes a read; decompression holds one such piece at a time
_NPY_HEADER = 12 + 10_000  # magic, version, length, and the longest header that NumPy itself accepts
_DEFLATE_MAX = 1032  # the most that deflate can expand: a member that claims more lies
_INFLATED_FREE = 1 << 28  # bytes that an .npz may always expand to …
_INFLATED_RATIO = 100  # … and beyond them, this many times its own size
_SAFETENSORS_HEADER = 100_000_000  # the format's own limit
_NUMERIC = "biufc"  # dtype.kind of plain numbers


class DumpError(ValueError):
    """A file, or the content meant for one, that cannot be read or written; the message is one sentence."""


@contextmanager
def blame(subject: object) -> Iterator[None]:
    """Put the file, tensor or field at fault in front of a DumpError's message."""
    try:
        yield
    except DumpError as error:
        raise DumpError(f"{subject}: {error}") from None


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turn whatever zipfile, zlib, numpy, json or the system raise at hostile bytes into a DumpError.

    The parsers promise no closed set of exceptions, hence the broad clause; nothing of ours runs inside.
    """
    try:
        yield
    except DumpError:
        raise
    except MemoryError:
        raise DumpError(f"{what}: not enough memory") from None
    except OSError as error:
        raise DumpError(f"{what}: {(error.strerror or str(error)).lower()}") from None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DumpError(f"{what}: {reason[:200]}") from None


def shown(value: Any) -> str:
    """repr of something from a file, cut to a length that a message can bear."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 100 else f"{text[:70]} … {text[-20:]}"


# -- reading -----------------------------------------------------------------------------------------


class Archive(Protocol):
    """An open file of named arrays and named texts; arrays are read when asked for."""

    names: list[str]

    def read(self, name: str) -> Array:
        """The array of that name: C order, native byte order, owned by the caller.  Raises DumpError."""

    def text(self, name: str) -> str | None:
        """The text of that name, None if the file has none.  Raises DumpError if it is no UTF-8 text."""


@contextmanager
def open_archive(path: PathLike) -> Iterator[Archive]:
    """Open an .npz or .safetensors file.  Raises DumpError, whose message leaves the path to the caller."""
    opener = _OPENERS[check_suffix(path, *_OPENERS)]
    with open_file(path) as (file, size):
        yield opener(file, size)


def load_npy(path: PathLike) -> Array:
    """The array of an .npy file.  Raises DumpError, whose message leaves the path to the caller."""
    with open_file(path) as (file, size):
        return _read_npy(file, size)


def check_suffix(path: PathLike, *known: str) -> str:
    """The suffix of path in lower case, one of `known`.  Raises DumpError that lists them."""
    found = Path(os.fsdecode(path)).suffix.lower()
    if found not in known:
        was = f"the suffix is {found!r}" if found else "the name has no suffix"
        raise DumpError(f"{was}, expected {' or '.join(known)}")
    return found


@contextmanager
def open_file(path: PathLike) -> Iterator[tuple[BinaryIO, int]]:
    """A regular, non-empty file and its length in bytes.  Raises DumpError for anything else."""
    with foreign("cannot be opened"):
        mode = os.stat(path).st_mode  # before open(), which would wait at a pipe
        if stat.S_ISDIR(mode):
            raise DumpError("is a directory, expected a file")
        if not stat.S_ISREG(mode):
            raise DumpError("is not a regular file")
        file = open(path, "rb")  # noqa: SIM115  (closed below; the body must stay outside foreign())
    with file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise DumpError("is empty")
        yield file, size


def parse_object(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN or Infinity, no key twice.  Raises DumpError."""
    with foreign(f"{what} is not valid JSON"):
        try:
            value = json.loads(
                text if isinstance(text, str) else text.decode(),
                parse_constant=_no_constant,
                object_pairs_hook=_no_twins,
            )
        except RecursionError:
            raise DumpError(f"{what} is nested too deeply") from None
    if not isinstance(value, dict):
        raise DumpError(f"{what} is JSON {type(value).__name__}, expected an object {{…}}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} stands there twice")
        found[key] = value
    return found


def _fill(stream: BinaryIO, size: int, start: bytes = b"") -> Array:
    """`size` bytes: `start`, then the stream's.  Raises DumpError if the stream ends early or late."""
    data: Array = np.empty(size, np.uint8)
    view = data.data
    view[: len(start)] = start
    filled = len(start)
    while filled < size:
        count = stream.readinto(view[filled : filled + _CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise DumpError(f"is cut short: {size} bytes of data expected, {filled} found")
        filled += count
    return data


def _plain(data: Array, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any = "C") -> Array:
    """Bytes as an array in C order and native byte order; bit patterns, NaN payloads included, are kept."""
    array = data.view(dtype).reshape(shape, order=order)
    return np.asarray(array, dtype=dtype.newbyteorder("="), order="C")


# -- .npy and .npz -----------------------------------------------------------------------------------


def _read_npy(stream: BinaryIO, size: int) -> Array:
    """One .npy of `size` bytes."""
    with foreign("is no .npy, or damaged or cut short"):
        head = stream.read(min(size, _NPY_HEADER))
        shape, fortran, dtype, start = _npy_header(head)
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != size - start:
        raise DumpError(f"claims {claimed} bytes, {dtype} {shape}, but has {size - start}")
    with foreign("is no .npy, or damaged or cut short"):
        return _plain(_fill(stream, claimed, head[start:]), dtype, shape, "F" if fortran else "C")


def _npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether Fortran order, dtype, and where the data start."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise DumpError(f"is .npy version {version[0]}.{version[1]}, expected 1.0 or 2.0 (plain numbers)")
    shape, fortran, dtype = readers[version](stream)
    if dtype.hasobject:
        raise DumpError("holds pickled Python objects, which are never loaded; save plain numeric arrays")
    if dtype.kind not in _NUMERIC + "SUV" or dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise DumpError(f"is {dtype}, expected plain numbers or text")
    if min(shape, default=0) < 0:
        raise DumpError(f"claims the shape {shape}")
    return tuple(map(int, shape)), fortran, dtype, stream.tell()


class _Npz:
    """An .npz: a zip of .npy members, stored or deflated."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        with foreign("is no .npz, or damaged or cut short"):
            self._zip = zipfile.ZipFile(file)
            self._members = _npz_members(self._zip.infolist(), size)
        self.names = list(self._members)

    def read(self, name: str) -> Array:
        info = self._members[name]
        with blame(shown(name)), foreign("is damaged or cut short"), self._zip.open(info) as stream:
            array = _read_npy(stream, info.file_size)  # type: ignore[arg-type]
            stream.read(1)  # at the end of the member zipfile compares its checksum
            return array

    def text(self, name: str) -> str | None:
        return _text(name, self.read(name)) if name in self._members else None


def _npz_members(infos: list[zipfile.ZipInfo], size: int) -> dict[str, zipfile.ZipInfo]:
    """The members by name, once their claims are possible in a file of `size` bytes."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name == info.filename:
            raise DumpError(f"member {shown(name)} is not an .npy")
        if name in members:
            raise DumpError(f"member {shown(name)} is there twice")
        _check_member(name, info)
        members[name] = info
    packed = sum(info.compress_size for info in infos)
    inflated = sum(info.file_size for info in infos)
    if packed > size:
        raise DumpError(f"the members claim {packed} bytes in a file of {size}")
    if inflated > max(_INFLATED_FREE, _INFLATED_RATIO * size):
        raise DumpError(f"{size} bytes would expand to {inflated}; save it uncompressed (numpy.savez)")
    return members


def _check_member(name: str, info: zipfile.ZipInfo) -> None:
    """Raises DumpError for a member that is encrypted, in another compression, or expands impossibly."""
    if info.flag_bits & 1:
        raise DumpError(f"member {shown(name)} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DumpError(f"member {shown(name)} is neither stored nor deflated; write it with numpy.savez")
    stored = info.compress_type == zipfile.ZIP_STORED
    most = info.compress_size if stored else _DEFLATE_MAX * info.compress_size
    if info.file_size > most:
        raise DumpError(f"member {shown(name)} claims {info.file_size} bytes from {info.compress_size}")


def _text(name: str, array: Array) -> str:
    """The text in a one-element unicode or bytes array, or in an array of UTF-8 bytes."""
    with blame(shown(name)), foreign("is not UTF-8 text"):
        if array.dtype.kind == "U" and array.size == 1:
            return str(array.item())
        if array.dtype.kind == "S" and array.size == 1:
            return bytes(array.item()).decode()
        if array.dtype == np.uint8 and array.ndim <= 1:
            return array.tobytes().decode()
    raise DumpError(
        f"{shown(name)} is {array.dtype} {array.shape}, expected text: a 0-d unicode or a uint8 array"
    )


# -- .safetensors ------------------------------------------------------------------------------------

_SAFETENSORS_DTYPES: dict[str, npt.DTypeLike] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_SAFETENSORS_NAMES = {np.dtype(dtype).name: name for name, dtype in _SAFETENSORS_DTYPES.items()}


class _Safetensors:
    """A .safetensors: a length, a JSON header, and the arrays one after the other without a gap."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _SAFETENSORS_HEADER):
            raise DumpError(f"is not a .safetensors: the header claims {length} bytes in a file of {size}")
        header = parse_object(file.read(length), "the safetensors header")
        self._text = _check_texts(header.pop("__metadata__", {}))
        self._start = 8 + length
        self._entries = {name: _check_entry(name, entry) for name, entry in header.items()}
        _check_spans([entry[2] for entry in self._entries.values()], size - self._start)
        self.names = list(self._entries)

    def read(self, name: str) -> Array:
        kind, shape, (start, stop) = self._entries[name]
        with blame(shown(name)):
            dtype, shape = _safetensors_layout(kind, shape)
            if math.prod(shape) * dtype.itemsize != stop - start:
                raise DumpError(f"{kind} {shape} does not take the {stop - start} bytes that it has")
            with foreign("cannot be read"):
                self._file.seek(self._start + start)
                return _plain(_fill(self._file, stop - start), dtype, shape)

    def text(self, name: str) -> str | None:
        return self._text.get(name)


_Entry = tuple[str, tuple[int, ...], tuple[int, int]]


def _safetensors_layout(kind: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape in memory; F4 counts elements in the file and becomes bytes of two."""
    if kind == "F4" and shape and shape[-1] % 2 == 0:
        return np.dtype(np.uint8), (*shape[:-1], shape[-1] // 2)
    if kind not in _SAFETENSORS_DTYPES:
        raise DumpError(f"is {kind} {shape}, expected one of {', '.join(_SAFETENSORS_DTYPES)} or an even F4")
    return np.dtype(_SAFETENSORS_DTYPES[kind]), shape


def _check_texts(found: Any) -> dict[str, str]:
    """`__metadata__`, a map from text to text."""
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise DumpError("the safetensors header's __metadata__ is not a map from text to text")
    return found


def _check_entry(name: str, entry: Any) -> _Entry:
    """Dtype, shape and span of one tensor, if they have the right form at all."""
    fields = [entry.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else []
    match fields:
        case [str(kind), list(shape), [start, stop]] if all(_is_size(n) for n in (*shape, start, stop)):
            return kind, tuple(shape), (start, stop)
    raise DumpError(f"the safetensors header gives {shown(name)} no valid dtype, shape and data_offsets")


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_spans(spans: list[tuple[int, int]], size: int) -> None:
    """The format allows neither gap nor overlap: sorted, each span starts where the last one ended."""
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop < start:
            raise DumpError(f"the safetensors header puts bytes {start} to {stop} after byte {end}")
        end = stop
    if end != size:
        raise DumpError(f"the safetensors header describes {end} bytes of data, the file has {size}")


_OPENERS: dict[str, Callable[[BinaryIO, int], Archive]] = {".npz": _Npz, ".safetensors": _Safetensors}


# -- writing -----------------------------------------------------------------------------------------


def write_archive(path: PathLike, arrays: Mapping[str, Array], texts: Mapping[str, str]) -> None:
    """Write an .npz or .safetensors file, completely or not at all.

    The same content gives the same bytes.  Raises DumpError, whose message leaves the path to the caller;
    a file that was there before then still is.
    """
    write = _WRITERS[check_suffix(path, *_WRITERS)]
    with foreign("cannot be written"), _replacing(path) as file:
        write(file, arrays, texts)


@contextmanager
def _replacing(path: PathLike) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is complete, and vanishes if it never is."""
    target = Path(os.path.realpath(os.fsdecode(path)))
    if target.exists() and not target.is_file():
        raise DumpError("is a directory or device, expected a file")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _write_npz(file: BinaryIO, arrays: Mapping[str, Array], texts: Mapping[str, str]) -> None:
    """Stored, never deflated; a fixed date and system, which zip would otherwise record."""
    members = {**arrays, **{name: np.array(text) for name, text in texts.items()}}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in members.items():
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _write_safetensors(file: BinaryIO, arrays: Mapping[str, Array], texts: Mapping[str, str]) -> None:
    """Widest elements first, then by name, so that every array is aligned; header padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(texts.items()))} if texts else {}
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    end = 0
    for name, array in ordered:
        if array.dtype.name not in _SAFETENSORS_NAMES:
            raise DumpError(f"safetensors has no dtype for {shown(name)}, which is {array.dtype}")
        kind, span = _SAFETENSORS_NAMES[array.dtype.name], [end, end + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, array in ordered:
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        file.write(little.reshape(-1).view(np.uint8).data)


_WRITERS = {".npz": _write_npz, ".safetensors": _write_safetensors}

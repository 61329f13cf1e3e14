"""Arrays in files: .npy and .npz through NumPy, .safetensors through its own library, imported when needed.

A damaged or hostile file costs one sentence, not the machine.  The safetensors library checks what a header
claims; for .npy and .npz that is done here, for NumPy allocates what a header claims before it looks at the
data, and zipfile inflates without a limit.  Writing is all or nothing, and the same content gives the same
bytes.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PathLike = str | os.PathLike[str]

_NPY_HEADER = 12 + 10_000  # magic, version, length, and the longest header that NumPy itself accepts
_DEFLATE_MAX = 1032  # the most that deflate can expand: a member that claims more lies
_INFLATED_FREE = 1 << 28  # bytes that an .npz may always expand to …
_INFLATED_RATIO = 100  # … and beyond them, this many times its own size


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
    """Turn whatever a library or the system raises at hostile bytes into a DumpError.

    The parsers promise no closed set of exceptions, hence the broad clause.
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


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 case", "2 cases", "1,024 indices"."""
    return f"{number:,} {agreed(number, noun, plural or f'{noun}s')}"


def agreed(number: int, one: str, many: str) -> str:
    """The word that goes with a number: "differs" with 1, "differ" with any other."""
    return one if number == 1 else many


def native(array: Array) -> Array:
    """The array in C order and native byte order, every bit pattern kept."""
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def check_suffix(path: PathLike, *known: str) -> str:
    """The suffix of path in lower case, one of `known`.  Raises DumpError that lists them."""
    found = Path(os.fsdecode(path)).suffix.lower()
    if found not in known:
        was = f"the suffix is {found!r}" if found else "the name has no suffix"
        raise DumpError(f"{was}, expected {', '.join(known[:-1])} or {known[-1]}")
    return found


# -- reading: all raise DumpError, whose message leaves the path to the caller -------------------------


class Archive(Protocol):
    """An open file of named arrays and named texts; an array's data are read when it is asked for."""

    names: list[str]

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype, in the file's own terms, and shape of an array, without its data."""

    def read(self, name: str) -> Array:
        """The array of that name: C order, native byte order, owned by the caller."""

    def text(self, name: str) -> str | None:
        """The text of that name, None if the file has none."""


@contextmanager
def open_archive(path: PathLike) -> Iterator[Archive]:
    """Open an .npz or .safetensors file."""
    suffix = check_suffix(path, ".npz", ".safetensors")
    with _open(path) as file:
        yield _Npz(file) if suffix == ".npz" else _Safetensors(file, path)


def load_npy(path: PathLike) -> Array:
    """The array of an .npy file."""
    with _open(path) as file, foreign("is no .npy, or damaged or cut short"):
        _npy_claim(file, _size(file))
        file.seek(0)
        return native(np.lib.format.read_array(file, allow_pickle=False))


@contextmanager
def _open(path: PathLike) -> Iterator[BinaryIO]:
    """A regular file that is not empty."""
    with foreign("cannot be opened"):
        mode = os.stat(path).st_mode  # before open(), which would wait at a pipe
        if stat.S_ISDIR(mode):
            raise DumpError("is a directory, expected a file")
        if not stat.S_ISREG(mode):
            raise DumpError("is not a regular file")
        file = open(path, "rb")  # noqa: SIM115  (closed below; the body must stay outside foreign())
    with file:
        if _size(file) == 0:
            raise DumpError("is empty")
        yield file


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _npy_claim(stream: Any, size: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape that an .npy claims, once they take just the `size` bytes it has."""
    head = io.BytesIO(stream.read(min(size, _NPY_HEADER)))
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0)):
        raise DumpError(f"is .npy version {version[0]}.{version[1]}, expected 1.0 or 2.0 (plain numbers)")
    first = version == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(head)
    if dtype.hasobject:
        raise DumpError("holds pickled Python objects, which are never loaded; save plain numeric arrays")
    if dtype.kind not in "biufcSUV" or dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise DumpError(f"is {dtype}, expected plain numbers or text")
    if min(shape, default=0) < 0:
        raise DumpError(f"claims the shape {shape}")
    claimed, there = math.prod(shape) * dtype.itemsize, size - head.tell()
    if claimed != there:
        raise DumpError(f"claims {claimed} bytes, {dtype} {shape}, but has {there}")
    return dtype, shape


class _Npz:
    """An .npz: a zip of .npy members, stored or deflated."""

    def __init__(self, file: BinaryIO) -> None:
        with foreign("is no .npz, or damaged or cut short"):
            self._zip = zipfile.ZipFile(file)
            self._members = _npz_members(self._zip.infolist(), _size(file))
        self.names = list(self._members)

    @contextmanager
    def _member(self, name: str) -> Iterator[Any]:
        problem = foreign("is no .npy, or damaged or cut short")
        with blame(shown(name)), problem, self._zip.open(self._members[name]) as stream:
            yield stream

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        with self._member(name) as stream:
            dtype, shape = _npy_claim(stream, self._members[name].file_size)
        return dtype.name, shape

    def read(self, name: str) -> Array:
        self.describe(name)
        with self._member(name) as stream:  # opened anew: after a seek, zipfile does not compare its checksum
            return native(np.lib.format.read_array(stream, allow_pickle=False))

    def text(self, name: str) -> str | None:
        """The text in a one-element unicode or bytes array, or in an array of UTF-8 bytes."""
        if name not in self._members:
            return None
        array = self.read(name)
        with blame(shown(name)), foreign("is not UTF-8 text"):
            if array.dtype.kind == "U" and array.size == 1:
                return str(array.item())
            if (array.dtype.kind == "S" and array.size == 1) or (array.dtype == np.uint8 and array.ndim < 2):
                return array.tobytes().decode()
            raise DumpError(f"is {array.dtype} {array.shape}, expected text: a 0-d unicode or a uint8 array")


def _npz_members(infos: list[zipfile.ZipInfo], size: int) -> dict[str, zipfile.ZipInfo]:
    """The members by name, once their claims are possible in a file of `size` bytes."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        most = info.compress_size * (1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE_MAX)
        odd = info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        faults = {
            "is not an .npy": name == info.filename,
            "is there twice": name in members,
            "is encrypted": info.flag_bits & 1,
            "is neither stored nor deflated; write it with numpy.savez": odd,
            f"claims {info.file_size} bytes from {info.compress_size}": info.file_size > most,
        }
        for fault, found in faults.items():
            if found:
                raise DumpError(f"member {shown(name)} {fault}")
        members[name] = info
    packed = sum(info.compress_size for info in infos)
    inflated = sum(info.file_size for info in infos)
    if packed > size:
        raise DumpError(f"the members claim {packed} bytes in a file of {size}")
    if inflated > max(_INFLATED_FREE, _INFLATED_RATIO * size):
        raise DumpError(f"{size} bytes would expand to {inflated}; save it uncompressed (numpy.savez)")
    return members


def _safetensors() -> Any:
    """The safetensors package, of a version that reads without a memory map."""
    try:
        import safetensors.numpy
    except ImportError:
        raise DumpError("needs the safetensors package: pip install 'nvfp4ref[safetensors]'") from None
    if tuple(map(int, safetensors.__version__.split(".")[:2])) < (0, 8):
        found = f"needs safetensors 0.8 or newer and finds {safetensors.__version__}"
        raise DumpError(f"{found}: pip install --upgrade 'nvfp4ref[safetensors]'")
    return safetensors


class _Safetensors:
    """A .safetensors: named tensors, and `__metadata__`, a map from text to text."""

    def __init__(self, file: BinaryIO, path: PathLike) -> None:
        self._file = file
        library = _safetensors()
        with foreign("is no .safetensors, or damaged or cut short"):
            # not the default, mmap: when a mapped file is cut short, reading on kills the process
            self._tensors = library.safe_open(path, "numpy", backend="pread")
            self._texts = self._tensors.metadata() or {}
            self.names: list[str] = self._tensors.keys()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        with blame(shown(name)), foreign("cannot be read"):
            tensor = self._tensors.get_slice(name)
        return tensor.get_dtype(), tuple(tensor.get_shape())

    def read(self, name: str) -> Array:
        """As promised; F8_E4M3 is ml_dtypes.float8_e4m3fn, F4 uint8 of two elements each."""
        kind, shape = self.describe(name)
        with blame(shown(name)), foreign("cannot be read"):
            if kind == "F8_E4M3":
                e4m3: Array = self._bytes(name).view(ml_dtypes.float8_e4m3fn)
                return e4m3.reshape(shape)
            if kind == "F4" and shape[-1] % 2 == 0:
                return self._bytes(name).reshape(*shape[:-1], shape[-1] // 2)
            try:
                return native(self._tensors.get_tensor(name))
            except AttributeError:  # numpy.float8_…, of which there is none
                raise DumpError(f"is {kind} {shape}, expected a NumPy dtype, BF16, F8_E4M3 or an even F4") from None

    def _bytes(self, name: str) -> Array:
        """The bytes of a tensor whose dtype NumPy has not, which the library does not hand out."""
        start, header = self._header
        first, last = header[name]["data_offsets"]
        self._file.seek(start + first)
        return np.fromfile(self._file, np.uint8, last - first)

    @cached_property
    def _header(self) -> tuple[int, Any]:
        """Where the data start, and the header: checked by the library, it alone says where a tensor lies."""
        self._file.seek(0)
        length = int.from_bytes(self._file.read(8), "little")
        return 8 + length, json.loads(self._file.read(length))

    def text(self, name: str) -> str | None:
        return self._texts.get(name)


# -- writing -----------------------------------------------------------------------------------------


def write_archive(path: PathLike, arrays: Mapping[str, Array], meta: str = "") -> None:
    """Write arrays, and one text named `meta`, to an .npz or .safetensors file, completely or not at all.

    One text, because the safetensors library writes several in an order that changes from run to run.
    Raises DumpError, whose message leaves the path to the caller; a file that was there before then still is.
    """
    suffix = check_suffix(path, ".npz", ".safetensors")
    with foreign("cannot be written"), replacing(path) as file:
        if suffix == ".npz":
            _write_npz(file, {**arrays, "meta": np.array(meta)} if meta else arrays)
        else:
            _write_safetensors(file, arrays, {"meta": meta} if meta else None)


def save_tensor(path: PathLike, array: Array) -> None:
    """Write one array to an .npy, .npz or .safetensors file, completely or not at all.

    In the latter two its name is x.  bfloat16 is BF16 in .safetensors and uint16 bit patterns in the others,
    which have no such dtype.  Raises DumpError.
    """
    with blame(path):
        suffix = check_suffix(path, ".npy", ".npz", ".safetensors")
        if suffix != ".safetensors" and array.dtype == ml_dtypes.bfloat16:
            array = array.view(np.uint16)
        if suffix != ".npy":
            return write_archive(path, {"x": array})
        with foreign("cannot be written"), replacing(path) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)


def _write_npz(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """As numpy.savez, which has no way to refuse pickles in every version, and takes no array named file."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _write_safetensors(file: BinaryIO, arrays: Mapping[str, Array], texts: dict[str, str] | None) -> None:
    """By name, for the library's bytes would take twice the memory; it puts a file of mode 0600 there."""
    # native(): the library writes the memory of an array that is not in C order as if it were
    tensors = {name: native(array) for name, array in arrays.items()}
    mode = os.fstat(file.fileno()).st_mode
    file.close()
    _safetensors().numpy.save_file(tensors, file.name, texts)
    os.chmod(file.name, stat.S_IMODE(mode))


@contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is complete, and vanishes if it never is."""
    target = Path(os.path.realpath(os.fsdecode(path)))
    if target.exists() and not target.is_file():
        raise DumpError("is a directory or device, expected a file")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
        with open(temporary, "r+b") as file:  # anew, for it may have been replaced
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise

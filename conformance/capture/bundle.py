"""The bundle: what a machine answered, in one file that anybody can read and nobody can change unnoticed.

A bundle is a zip of these members; while it is recorded they are the files of a folder, ``FILE.partial``, which
can be read as well::

    manifest.json    SHA-256 and size of every other member; its own SHA-256 is the bundle's root hash
    bundle.json      format, version, what was asked, of which generation the cases were, machine and versions
    backends/NAME/   one folder a backend, and probes/NAME/ one a probe, each with
        unit.json        what it is, which version ran, which cases it was to answer, or why it could not
        records.jsonl    a line a case: id, hash of the question, outputs or error
        arrays.bin       the bytes of the outputs, one after the other, C order, little endian
        end.json         how it ended

An output is ``{"dtype", "shape", "sha256", "at"}``, ``at`` its place in ``arrays.bin``.  Without ``at`` the bytes
were not kept, because they were those that the oracle gives: the hash is what vouches for them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import ml_dtypes
import numpy as np

from nvfp4ref.container import DumpError, blame, foreign, replacing, shown

Array = np.ndarray[Any, Any]

FORMAT, VERSION = "nvfp4-bundle", 2
#: Versions that are read.  One of version 1 says nothing of the generation of its cases: there was only the first.
READ = (1, VERSION)
KINDS = ("backend", "probe")
UNIT_FILES = ("unit.json", "records.jsonl", "arrays.bin", "end.json")
#: A unit's name is the name of a folder, on every system.
UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_MEMBER = re.compile(
    rf"(?:bundle\.json|manifest\.json|(?:backends|probes)/{UNIT_NAME.pattern}/(?:{'|'.join(UNIT_FILES)}))"
)

#: Files of a recording that are no members: its lock, what is being done, and halves of files.
_LEFT = re.compile(r"lock|now\.json(?:\.new)?|\..*\.tmp")

LARGEST = 100 << 20  # bytes of a bundle that may be handed on
_LARGEST_READ = 256 << 20  # of one that is read
_LARGEST_INFLATED = 1 << 30  # of all its members

_DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(dtype).name: np.dtype(dtype).newbyteorder("<")
    for dtype in (
        *(bool, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
        *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    )
}


#: A bundle that cannot be read, written or trusted is a file that cannot; the message is one sentence.
BundleError = DumpError


def printable(text: str) -> str:
    """Text of a recording as a terminal may be given it: control characters, and what is no character, are escaped."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


_FOLDERS = re.compile(r"(?<![\w/.…])(?:/[^\s/'\":,;()<>]+)+/|(?<!\w)[A-Za-z]:\\(?:[^\s\\'\"]+\\)*")


def without_folders(text: str) -> str:
    """Text of another's message as it is recorded: of each absolute path no more than the file's name."""
    return _FOLDERS.sub("…/", text.replace(os.path.expanduser("~") + os.sep, "…/"))


def _require(found: Mapping[str, Any], where: str, *fields: tuple[str, type | tuple[type, ...], str]) -> None:
    """BundleError unless each field is of its type; a field that is not there is left to whoever needs it."""
    for name, kinds, words in fields:
        value = found.get(name)
        if name not in found or (isinstance(value, kinds) and not (isinstance(value, bool) and kinds is int)):
            continue
        raise BundleError(f"{where} gives {name} as {shown(value)}; expected {words}")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# ---- arrays and records ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ref:
    """An array of a record: where its bytes are (``at`` None: not kept) and what they hash to."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    at: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "sha256": self.sha256}
        return found if self.at is None else found | {"at": self.at}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Ref:
        shape, at = (found.get(name) if isinstance(found, dict) else None for name in ("shape", "at"))
        right = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if not right or found.get("dtype") not in list(_DTYPES) or not (at is None or type(at) is int):
            raise BundleError(f"describes an array as {shown(found)}")
        return cls(found["dtype"], tuple(shape or ()), str(found.get("sha256")), at)


def little(array: Any) -> tuple[str, Array]:
    """An output's dtype name, and the array in C order and little endian.  Raises ValueError for other dtypes."""
    array = np.asarray(array)
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"an output of dtype {array.dtype} cannot be recorded: return a plain NumPy array")
    return array.dtype.name, np.asarray(array, _DTYPES[array.dtype.name], order="C")


def describe(array: Any) -> Ref:
    """The reference of an array whose bytes are not kept."""
    dtype, plain = little(array)
    return Ref(dtype, plain.shape, hashlib.sha256(plain.tobytes()).hexdigest())


def intact(data: bytes, ref: Ref) -> bool:
    """Whether the bytes of arrays.bin hold an array as it was recorded."""
    part = data[ref.at : ref.at + ref.nbytes] if ref.at is not None and ref.at >= 0 else b""
    return len(part) == ref.nbytes and hashlib.sha256(part).hexdigest() == ref.sha256


@dataclass(frozen=True)
class Record:
    """What one case, or a whole probe, gave: arrays, or the error in a sentence.

    Attributes:
        question: the hash of everything that was asked (question.py).
        error: why there is no answer.
        refused: what the package or the device says that it does not do: no answer, or a part of one, and no error.
        facts: a probe's own.
    """

    id: str
    question: str = ""
    seconds: float = 0.0
    outputs: dict[str, Ref] = field(default_factory=dict)
    error: str | None = None
    refused: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self.id, "question": self.question, "seconds": round(self.seconds, 6)}
        for name in ("error", "refused", "facts"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        return found | {"outputs": {name: ref.to_json() for name, ref in self.outputs.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Record:
        if not isinstance(found, dict) or not {"id", "question", "seconds", "outputs"} <= set(found):
            raise BundleError("holds a line that is no record: it has no id, question, seconds or outputs")
        where = f"the record {shown(found['id'])}"
        text, object_ = (str, "a text"), (dict, "an object")
        _require(
            found,
            where,
            *((name, *text) for name in ("id", "question", "error", "refused") if found.get(name) is not None),
            ("seconds", (int, float), "a number"),
            *((name, *object_) for name in ("outputs", "facts")),
        )
        seconds = found["seconds"]
        if isinstance(seconds, bool) or not 0 <= seconds < 1e12 or found["id"] is None or found["question"] is None:
            wrong = next((name for name in ("id", "question") if found[name] is None), "seconds")
            raise BundleError(f"{where} gives {wrong} as {shown(found[wrong])}")
        error, refused = (found.get(name) for name in ("error", "refused"))
        return cls(
            found["id"],
            found["question"],
            float(seconds),
            {str(name): Ref.from_json(ref) for name, ref in dict(found["outputs"]).items()},
            error,
            refused,
            dict(found.get("facts", {})),
        )


def parse_records(text: bytes) -> Iterator[tuple[Record, int]]:
    """The records of complete lines, each with the offset behind its line.  Raises BundleError at a bad one."""
    end = 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        if not line.endswith(b"\n"):  # its writer was stopped here
            return
        with foreign("holds a line that is no record"):
            yield Record.from_json(_parsed(line)), end


# ---- reading -----------------------------------------------------------------------------------------------


class _Members(Protocol):
    """Where the members are."""

    names: list[str]

    def read(self, name: str) -> bytes:
        """The content of a member."""


@dataclass(frozen=True)
class Unit:
    """One backend or probe of a bundle."""

    kind: str
    name: str
    members: _Members = field(repr=False)

    @property
    def folder(self) -> str:
        return f"{self.kind}s/{self.name}"

    def _json(self, name: str) -> dict[str, Any]:
        """The object of a file of this unit; {} where it was never written."""
        path = f"{self.folder}/{name}"
        return _object(path, self.members.read(path)) if path in self.members.names else {}

    @cached_property
    def info(self) -> dict[str, Any]:
        """unit.json; {} when it was stopped before it could say what it is."""
        found, where = self._json("unit.json"), f"{self.folder}/unit.json"
        _require(
            found,
            where,
            *((name, str, "a text") for name in ("name", "kind", "preset", "version", "device", "what")),
            ("reason", (str, type(None)), "a text, or null"),
            ("unserved", int, "a number of cases"),
            ("simulated", bool, "true or false"),
        )
        for name in ("asked", "features", "rules"):
            if name in found and not _texts(found[name]):
                raise BundleError(f"{where} gives {name} as {shown(found[name])}; expected a list of texts")
        return found

    @cached_property
    def end(self) -> dict[str, Any]:
        """end.json; {} when the recording was stopped."""
        found = self._json("end.json")
        _require(found, f"{self.folder}/end.json", ("state", str, "a text"), ("reason", (str, type(None)), "a text"))
        return found

    @cached_property
    def records(self) -> dict[str, Record]:
        """By id, in the order in which they were recorded."""
        path = f"{self.folder}/records.jsonl"
        found: dict[str, Record] = {}
        with blame(path):
            for record, _ in parse_records(self.members.read(path)) if path in self.members.names else ():
                if record.id in found:
                    raise BundleError(f"records {shown(record.id)} twice")
                found[record.id] = record
        return found

    @cached_property
    def _bytes(self) -> bytes:
        path = f"{self.folder}/arrays.bin"
        return self.members.read(path) if path in self.members.names else b""

    def array(self, ref: Ref) -> Array:
        """An array whose bytes were kept.  Raises BundleError when they are not those that were recorded."""
        assert ref.at is not None
        if not intact(self._bytes, ref):
            raise BundleError(f"{self.folder}/arrays.bin: the bytes from {ref.at} are not those that were recorded")
        return np.frombuffer(self._bytes, _DTYPES[ref.dtype], math.prod(ref.shape), ref.at).reshape(ref.shape)


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been read; ``root`` is None for a recording that is not sealed."""

    path: Path
    header: dict[str, Any]
    units: list[Unit]
    root: str | None
    members: _Members = field(repr=False)

    @property
    def generation(self) -> int:
        """Of which generation the cases were that could be asked (generations.py)."""
        return int(self.header.get("generation", 1))


def partial(path: str | os.PathLike[str]) -> Path:
    """The folder in which a bundle is recorded."""
    return Path(f"{os.fspath(path)}.partial")


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle, or the folder of one that is not finished, and verify every member.

    Raises BundleError: in one sentence, every member that is changed, missing or added; or why it is no bundle.
    """
    path = Path(path)
    if not path.exists() and partial(path).is_dir():
        path = partial(path)
    with blame(path):
        if path.is_dir():
            return _opened(path, _Folder(path), None)
        with foreign("cannot be read"):
            size = path.stat().st_size
            if size > _LARGEST_READ:
                raise BundleError(f"has {size:,} bytes, and no bundle has more than {_LARGEST_READ:,}")
            with open(path, "rb") as file, foreign("is no bundle, or is damaged or cut short"):
                members = _Zip(file)
        return _opened(path, members, _verified(members))


def _opened(path: Path, members: _Members, root: str | None) -> Bundle:
    if "bundle.json" not in members.names:
        raise BundleError("is no bundle: it has no bundle.json")
    header = _versioned("bundle.json", members.read("bundle.json"))
    _require(
        header,
        "bundle.json",
        *((name, dict, "an object") for name in ("oracle", "environment", "packages")),
        *((name, str, "a text") for name in ("suite", "date")),
        ("gpus", list, "a list of devices"),
        ("generation", int, "the number of a generation of cases"),
    )
    if header["version"] > 1 and header.get("generation", 0) < 1:
        raise BundleError(f"bundle.json gives generation as {shown(header.get('generation'))}; expected 1 or more")
    for name in ("oracle", "environment"):
        if not all(isinstance(one, str) for one in header.get(name, {}).values()):
            raise BundleError(f"bundle.json gives {name} as {shown(header[name])}; expected texts")
    for gpu in header.get("gpus", ()):
        if not isinstance(gpu, dict) or not all(
            isinstance(gpu.get(name), str) for name in ("name", "compute_capability", "driver")
        ):
            raise BundleError(f"bundle.json gives a device as {shown(gpu)}; expected its name, capability and driver")
    asked = header.get("asked")
    units = []
    for kind in KINDS:
        there = {name.split("/")[1] for name in members.names if name.startswith(f"{kind}s/")}
        order = asked.get(f"{kind}s") if isinstance(asked, dict) else None
        if not _texts(order):
            raise BundleError(f"bundle.json does not say what was asked: it gives {shown(asked)}")
        assert order is not None
        units += [Unit(kind, name, members) for name in (*order, *sorted(there - set(order)))]
    return Bundle(path, header, units, root, members)


def _object(name: str, data: bytes) -> dict[str, Any]:
    with blame(name), foreign("is no JSON object"):
        found = _parsed(data)
    if not isinstance(found, dict):
        raise BundleError(f"{name}: is no JSON object, but {shown(found)}")
    return found


def _parsed(data: bytes) -> Any:
    """The value of a JSON text, which has no number and no character that there is not."""
    found = json.loads(data)
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise BundleError("holds a number that is none, or half a character") from None
    return found


def _versioned(name: str, data: bytes) -> dict[str, Any]:
    """A JSON object that says which format it has, of a version that is known here."""
    found = _object(name, data)
    if found.get("format") != FORMAT:
        raise BundleError(f"is no bundle: {name} gives the format {shown(found.get('format'))}, expected {FORMAT!r}")
    version = found.get("version")
    if type(version) is not int or version not in READ:
        raise BundleError(
            f"is a bundle of version {shown(version)}, and this nvfp4ref reads versions "
            f"{' and '.join(map(str, READ))}: replay it with the nvfp4ref that wrote it, or a newer one"
        )
    return found


class _Folder:
    """The members as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self.names = sorted(name for name in found if _MEMBER.fullmatch(name))

    def read(self, name: str) -> bytes:
        with blame(name), foreign("cannot be read"):
            return (self.folder / name).read_bytes()


class _Zip:
    """The members of a zip, inflated; nothing is inflated before all claims are known to be possible."""

    def __init__(self, file: BinaryIO) -> None:
        self._data: dict[str, bytes] = {}
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            _refuse_impossible(infos)
            if "manifest.json" not in archive.namelist():
                raise BundleError("is no bundle: it has no manifest.json")
            _versioned("manifest.json", archive.read("manifest.json"))
            for info in infos:
                if not _MEMBER.fullmatch(info.filename):
                    raise BundleError(f"holds a member {shown(info.filename)}, which no bundle has")
                with blame(info.filename), foreign("was changed or is damaged"):
                    self._data[info.filename] = archive.read(info)
        self.names = list(self._data)

    def read(self, name: str) -> bytes:
        return self._data[name]


def _refuse_impossible(infos: list[zipfile.ZipInfo]) -> None:
    names = [info.filename for info in infos]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise BundleError(f"holds {shown(twice)} twice")
    inflated = sum(info.file_size for info in infos)
    if inflated > _LARGEST_INFLATED:
        raise BundleError(f"would expand to {inflated:,} bytes, and no bundle has more than {_LARGEST_INFLATED:,}")


def _verified(members: _Members) -> str:
    """The root hash, once every member is what the manifest says.  Raises BundleError that lists those that are not."""
    data = members.read("manifest.json")
    manifest: Any = _object("manifest.json", data).get("members")
    with foreign("manifest.json lists no members"):
        claimed = {str(name): str(dict(entry)["sha256"]) for name, entry in dict(manifest).items()}
    present = set(members.names) - {"manifest.json"}
    faults = {
        "changed": [n for n in sorted(present & set(claimed)) if _sha256(members.read(n)) != claimed[n]],
        "missing": sorted(set(claimed) - present),
        "added": sorted(present - set(claimed)),
    }
    if any(faults.values()):
        said = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise BundleError(f"is not what was recorded ({said})")
    return _sha256(data)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- sealing -----------------------------------------------------------------------------------------------


def seal(folder: Path, path: str | os.PathLike[str]) -> str:
    """Make the bundle of a folder, completely or not at all; the folder stays.  The root hash.

    The same content gives the same members in the same order.  Raises BundleError.
    """
    source = _Folder(folder)
    names = [name for name in source.names if name != "manifest.json"]
    entries = {name: {"sha256": _file_sha256(folder / name), "bytes": (folder / name).stat().st_size} for name in names}
    manifest = json.dumps({"format": FORMAT, "version": VERSION, "members": entries}, indent=1, sort_keys=True) + "\n"
    with (
        blame(os.fspath(path)),
        foreign("cannot be written"),
        replacing(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive,
    ):
        archive.writestr(_entry("manifest.json"), manifest)
        for name in names:
            with open(folder / name, "rb") as content, archive.open(_entry(name), "w") as member:
                shutil.copyfileobj(content, member, 1 << 20)
    return _sha256(manifest.encode())


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # dated 1980: the time of sealing is no part of the content
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(folder: Path) -> None:
    """Remove what a recording made of a folder, and nothing that somebody else put there."""
    found = sorted(folder.rglob("*"), reverse=True)  # a folder comes after what is in it
    for path in (*found, folder):
        name = path.relative_to(folder).as_posix()
        with suppress(OSError):  # what cannot be removed, or is not empty, stays
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif _MEMBER.fullmatch(name) or _LEFT.fullmatch(path.name):
                path.unlink()


def unpack(bundle: Bundle, folder: Path) -> None:
    """The members of a bundle as a folder, to go on recording; the header last.  Raises BundleError."""
    names = [name for name in bundle.members.names if name not in ("manifest.json", "bundle.json")]
    for name in (*names, "bundle.json"):
        target = folder / name
        with blame(target), foreign("cannot be written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                file.write(bundle.members.read(name))

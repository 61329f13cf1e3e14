"""The linter of exported vectors: whole, consistent, and still what the specification says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance.deviations import DEVIATIONS
from conformance.vectors import FORMAT_VERSION
from conformance.vectors.export import ALIGNMENT, text_index
from conformance.vectors.fields import TYPES, Array, different_rows
from conformance.vectors.groups import GROUPS
from conformance.vectors.operations import OPERATIONS
from conformance.vectors.schema import FORMAT
from nvfp4ref.container import agreed, counted

_FIXED = ("index.json", "index.txt", "schema.json")


def lint(folder: str | os.PathLike[str]) -> list[str]:
    """What is wrong with exported vectors, a sentence each; [] when nothing is.

    Files and checksums, the place of every array, the text index, rules and deviations that exist, and every set
    of rows answered again.  Raises ValueError when there is no index to start from, or it is of another version.
    """
    root = Path(folder)
    index = _object(root / "index.json", "index")
    if index["spec"] != nv.SPEC_VERSION:
        raise ValueError(f"{root}: these are vectors of specification {index['spec']}, and this is {nv.SPEC_VERSION}")
    found: list[str] = []
    lines: list[str] = []
    whole = True
    known = set(_FIXED)
    for entry in _list(index, "groups", root / "index.json"):
        rule = str(entry.get("rule"))
        known |= {f"{rule}.json", f"{rule}.bin"}
        try:
            group, data = _group(root, entry)
            lines += text_index(group)
            found += [f"{rule}: {sentence}" for sentence in _of_group(group, data)]
        except ValueError as reason:
            whole = False
            found.append(str(reason))
        except (KeyError, TypeError, AttributeError, IndexError) as reason:
            whole = False
            found.append(f"{rule}: {rule}.json is not as schema.json says: {type(reason).__name__} {reason}")
    written = _text(root / "index.txt").splitlines()[1:]
    if whole and written != lines:
        place = next(i for i, (one, other) in enumerate(zip_longest(written, lines)) if one != other)
        found.append(f"index.txt: line {place + 2} is not what the groups say")
    found += [f"{name} belongs to no group" for name in sorted(os.listdir(root)) if name not in known]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None


def _object(path: Path, kind: str) -> dict[str, Any]:
    """A JSON object of this format.  ValueError says what it is instead."""
    try:
        value = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("kind") != kind:
        raise ValueError(f'{path}: is no {kind} of vectors; it needs "format": "{FORMAT}" and "kind": "{kind}"')
    if value.get("version") != FORMAT_VERSION or not isinstance(value.get("spec"), str):
        raise ValueError(f"{path}: is of format version {value.get('version')}, and this reads {FORMAT_VERSION}")
    return value


def _list(value: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    found = value.get(key)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path}: {key} is no list of objects")
    return found


def _group(root: Path, entry: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A group and its data, as long as they have the checksums of the index."""
    group = _object(root / f"{entry['rule']}.json", "group")
    try:
        data = (root / f"{entry['rule']}.bin").read_bytes()
    except OSError as error:
        raise ValueError(f"{entry['rule']}.bin cannot be read: {(error.strerror or str(error)).lower()}") from None
    text = (root / f"{entry['rule']}.json").read_bytes()
    for suffix, content, key in (("json", text, "sha256"), ("bin", data, "data_sha256")):
        if hashlib.sha256(content).hexdigest() != entry[key]:
            raise ValueError(f"{entry['rule']}.{suffix} is not the file of index.json: its checksum differs")
    return group, data


def _of_group(group: dict[str, Any], data: bytes) -> Iterator[str]:
    if group["rule"] not in GROUPS:
        yield "is no rule with vectors"
    for fault in group["hunts"]:
        if fault["deviation"] is not None and fault["deviation"] not in DEVIATIONS:
            yield f"hunts {fault['deviation']!r}, which docs/deviations.md does not have"
        if not fault["changes"]:
            yield f"hunts {fault['fault']!r}, which changes no result"
    names = [one["name"] for one in group["sets"]]
    if len(set(names)) != len(names):
        yield "two sets have the same name"
    end = 0
    for one in group["sets"]:
        arrays: dict[str, Array] = {}
        for array in one["arrays"]:
            sentence, end = _misplaced(array, end, data)
            if sentence is not None:
                yield f"set {one['name']}: {array['name']} {sentence}"
                return
            arrays[array["name"]] = _read(array, data)
            if array["type"] == "e2m1" and arrays[array["name"]].max() > 15:
                yield f"set {one['name']}: {array['name']} holds codes above 15"
        yield from _of_rows(one, arrays) if one["rows"] else ()
    if end != len(data):
        yield f"its data have {len(data):,} bytes, and its arrays end at {end:,}"


def _misplaced(array: dict[str, Any], end: int, data: bytes) -> tuple[str | None, int]:
    """(what is wrong with the place of an array, where it ends); arrays follow one another."""
    if array["type"] not in TYPES:
        return f"has the unknown type {array['type']!r}", end
    size = int(np.prod(array["shape"])) * np.dtype(TYPES[array["type"]].dtype).itemsize
    start = -(-end // ALIGNMENT) * ALIGNMENT
    if array["bytes"] != size:
        return f"of shape {array['shape']} has {size} bytes, not {array['bytes']}", end
    if array["offset"] != start:
        return f"begins at {array['offset']}, and {start} is next", end
    if start + size > len(data):
        return f"ends at {start + size}, beyond the {len(data)} bytes there are", end
    return None, start + size


def _read(array: dict[str, Any], data: bytes) -> Array:
    dtype = np.dtype(TYPES[array["type"]].dtype)
    part = np.frombuffer(data, f"<u{dtype.itemsize}", array["bytes"] // dtype.itemsize, array["offset"])
    return part.astype(f"u{dtype.itemsize}").view(dtype).reshape(array["shape"])


def _of_rows(one: dict[str, Any], arrays: dict[str, Array]) -> Iterator[str]:
    """The answers, computed again."""
    operation = OPERATIONS.get(one["operation"])
    if operation is None:
        yield f"set {one['name']}: there is no operation {one['operation']!r}"
        return
    wanted = [field.name for field in (*operation.operands, *operation.results)]
    if list(arrays) != wanted:
        yield f"set {one['name']}: its arrays are {', '.join(arrays)}; {operation.name} has {', '.join(wanted)}"
        return
    try:
        expected = operation.answer(tuple(arrays[field.name] for field in operation.operands))
    except (ValueError, TypeError) as reason:
        yield f"set {one['name']}: {reason}"
        return
    found = [arrays[field.name] for field in operation.results]
    wrong = different_rows(found, expected)
    if wrong.any():
        yield (
            f"set {one['name']}: {int(wrong.sum())} of {counted(len(wrong), 'row')} "
            f"{agreed(int(wrong.sum()), 'holds', 'hold')} another result than the specification's, "
            f"first row {int(wrong.argmax())}"
        )

"""Writing the vectors as files for any language: docs/vectors.md describes them, schema.py holds them to that.

    DIR/index.json         what there is: version, groups, their files and checksums
    DIR/index.txt          the same arrays, a line each, for readers without JSON
    DIR/schema.json        the JSON schema of index.json and of the groups
    DIR/RULE.json          a group: its faults, its sets, where their arrays are
    DIR/RULE.bin           the arrays, little-endian, each at a multiple of 16

The same specification gives the same bytes, whatever the platform.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nvfp4ref as nv
from conformance.vectors import FORMAT_VERSION
from conformance.vectors.fields import TYPES, little_endian
from conformance.vectors.groups import NOT_COVERED, SIZES, Group, chosen
from conformance.vectors.schema import FORMAT, SCHEMA
from conformance.vectors.sets import Named, Set
from nvfp4ref.container import counted

ALIGNMENT = 16
Progress = Callable[[str, int, int], None]


def export(
    folder: str | os.PathLike[str],
    size: str = "small",
    rules: Sequence[str] | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write the vectors into a folder, all of them or nothing.

    Args:
        folder: a new one, an empty one, or an earlier export, which is replaced.
        size: "small" (under 5 MB) or "full".
        rules: ids of docs/spec.md; default all that have vectors.
        progress: called with a rule, groups done, groups in all.
        say: called with what is replaced, in a sentence, before anything is done.
    Returns:
        The object of index.json.
    Raises:
        ValueError: an unknown size or rule; a folder that holds something else, or cannot be written.
    """
    if size not in SIZES:
        raise ValueError(f"size is one of {', '.join(SIZES)}; got {size!r}")
    groups, target = chosen(rules), Path(os.path.realpath(folder))
    replaced = _earlier(target)
    if replaced is not None and say is not None:
        say(f"{folder}: replaces the export that is there, of {replaced}")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir(parents=True)
        index = _write(temporary, groups, size, progress)
        if target.exists():
            old = temporary.with_suffix(".old")
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old)
        else:
            temporary.rename(target)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return index


def _earlier(target: Path) -> str | None:
    """What an export would replace, in words; None where there is nothing.

    It replaces an earlier export, all of whose files are its own, and nothing else: ValueError.
    """
    if not target.exists():
        return None
    if not target.is_dir():
        raise ValueError(f"{target} is no folder: name a new one, or an earlier export")
    found = {path.name for path in target.iterdir()}
    if not found:
        return None
    index: Any = None
    with suppress(OSError, ValueError):
        index = json.loads((target / "index.json").read_bytes())
    rules: list[str] = []
    if isinstance(index, dict) and index.get("format") == FORMAT and isinstance(index.get("groups"), list):
        rules = [str(one.get("rule")) for one in index["groups"] if isinstance(one, dict)]
    files = {f"{rule}{suffix}" for rule in rules for suffix in (".json", ".bin")}
    foreign = sorted(found - {"index.json", "index.txt", "schema.json", *files} if rules else found)
    if foreign:
        raise ValueError(f"{target} holds {foreign[0]!r}, which is no part of an export: name a new folder")
    return f"{counted(len(rules), 'rule')}, size {index.get('size')}, specification {index.get('spec')}"


def _write(folder: Path, groups: Sequence[Group], size: str, progress: Progress | None) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    lines: list[str] = []
    for done, group in enumerate(groups, 1):
        description, data = encoded(group, size)
        text = _json(description)
        (folder / f"{group.rule}.bin").write_bytes(data)
        (folder / f"{group.rule}.json").write_bytes(text)
        entries.append(
            {
                "rule": group.rule,
                "file": f"{group.rule}.json",
                "sha256": _sha256(text),
                "data": f"{group.rule}.bin",
                "data_sha256": _sha256(data),
                "bytes": len(data),
                "results": sum(one["results"] for one in description["sets"]),
            }
        )
        lines += text_index(description)
        if progress is not None:
            progress(group.rule, done, len(groups))
    index = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "spec": nv.SPEC_VERSION,
        "kind": "index",
        "size": size,
        "producer": {"name": "nvfp4ref", "version": nv.__version__},
        "types": {name: one.what for name, one in TYPES.items()},
        "groups": entries,
        "not_covered": [{"rule": rule, "why": why} for rule, why in NOT_COVERED.items()],
    }
    columns = "rule set operation role name type rows columns offset"
    head = f"# {FORMAT} {FORMAT_VERSION} spec {nv.SPEC_VERSION} {size}: {columns}"
    (folder / "index.txt").write_bytes("\n".join([head, *lines, ""]).encode())
    (folder / "schema.json").write_bytes(_json(SCHEMA))
    (folder / "index.json").write_bytes(_json(index))
    return index


def encoded(group: Group, size: str) -> tuple[dict[str, Any], bytes]:
    """A group as the object of its JSON file and the bytes of its data file."""
    sets = group.sets(size)
    data = bytearray()
    described = [_described(one, data) for one in sets]
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "spec": nv.SPEC_VERSION,
        "kind": "group",
        "size": size,
        "rule": group.rule,
        "documentation": f"docs/spec.md#{group.rule.lower()}",
        "data": f"{group.rule}.bin",
        "hunts": [_hunted(*fault, sets) for fault in group.planted()],
        "sets": described,
    }, bytes(data)


def _described(one: Set, data: bytearray) -> dict[str, Any]:
    """The JSON of a set; its arrays go to the end of ``data``."""
    return {
        "name": one.name,
        "operation": one.operation,
        "what": one.what,
        "rows": one.rows,
        "results": one.count if one.rows else sum(array.size for _, array in one.results.values()),
        "covers": {"inputs": one.count, "of": one.space or None, "exhaustive": one.exhaustive},
        "parameters": dict(one.parameters),
        "arrays": [*_arrays("operand", one.operands, data), *_arrays("result", one.results, data)],
    }


def _arrays(role: str, named: Named, data: bytearray) -> Iterator[dict[str, Any]]:
    for name, (kind, array) in named.items():
        data.extend(bytes(-len(data) % ALIGNMENT))
        offset, content = len(data), little_endian(array)
        data.extend(content)
        shape = list(array.shape)
        yield {"role": role, "name": name, "type": kind, "shape": shape, "offset": offset, "bytes": len(content)}


def _hunted(ident: str | None, what: str, forms: tuple[Any, ...], sets: list[Set]) -> dict[str, Any]:
    """A fault, how many results it changes, and the first of them: of the first form that changes any."""
    for settings in forms:
        changes = {one.name: one.changed(settings) for one in sets}
        found = {name: change for name, change in changes.items() if change is not None and change[0]}
        if found:
            first = next(iter(found))
            place = {"set": first, "result": found[first][1]}
            total = sum(change[0] for change in found.values())
            return {"deviation": ident, "fault": what, "changes": total, "first": place}
    return {"deviation": ident, "fault": what, "changes": 0, "first": None}


def text_index(description: dict[str, Any]) -> Iterator[str]:
    """The lines of index.txt for one group."""
    for number, one in enumerate(description["sets"]):
        for array in one["arrays"]:
            rows, columns = table_shape(array["shape"])
            words = (description["rule"], number, one["operation"], array["role"], array["name"], array["type"])
            yield " ".join(map(str, (*words, rows, columns, array["offset"])))


def table_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of an array: its first dimension, and everything after it."""
    rest = 1
    for n in shape[1:]:
        rest *= n
    return shape[0], rest


def digests(groups: Sequence[Group], size: str) -> Iterator[tuple[str, str]]:
    """(rule, SHA-256 of its data) of each group."""
    for group in groups:
        data = bytearray()
        for one in group.sets(size):
            _described(one, data)
        yield group.rule, _sha256(bytes(data))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()

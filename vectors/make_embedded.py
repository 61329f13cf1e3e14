"""Choose the subset of the recordings that the wheel carries, and write it to nvfp4hw/vectors.

    python vectors/make_embedded.py

Cases of a recording are grouped by what they exercise: family, kernel, kind of call, flags, dtype, outputs.
Groups take turns in giving their smallest case that is left until the budget is used, so every group is
represented.  The result depends on nothing but the recordings.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
EMBEDDED = HERE.parent / "nvfp4hw" / "vectors"
BUDGET = 2_500_000  # compressed bytes of each recording, its index apart

#: Flags whose value is data: calls that differ only in them exercise the same thing.
_VALUES = (
    "seed",
    "off",
    "seedc",
    "offc",
    "amax",
    "amaxc",
    "start",
    "len",
    "offset",
    "offset_after",
    "global_amax",
)
#: Calls that are only understood together.
_ALWAYS = ("deq.", "recipe.", "swizzle.", "probe.e4m3")
_NEVER = ("deq.rt.f_sties", "probe.rcp", "te.Linear")

Key = tuple[str, str]  # (file, array)


class Source:
    """The arrays of one recording and the bytes that each takes when compressed."""

    def __init__(self, folder: Path) -> None:
        self.index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.files = {path.stem: np.load(path) for path in sorted(folder.glob("*.npz"))}
        self._bytes: dict[Key, int] = {}

    def cost(self, key: Key) -> int:
        if key not in self._bytes:
            self._bytes[key] = len(zlib.compress(self.files[key[0]][key[1]].tobytes()))
        return self._bytes[key]


def kernel_keys(source: Source, name: str) -> set[Key]:
    call = source.index["cases"][name]
    keys = {(call["family"], key) for key in call["outputs"].values()}
    return keys | ({("inputs", call["input"])} if call["input"] else set())


def binary_keys(source: Source, name: str) -> set[Key]:
    arrays = source.index["arrays"]
    call = source.index["cases"].get(name, {})
    names = [key for key in arrays if key.startswith(f"{name}|")]
    names += [f"in|{call['input']}"] if f"in|{call.get('input')}" in arrays else []
    names += ["deq.codes", "deq.scales"] if name.startswith("deq.") else []
    return {("arrays", arrays[key]) for key in names}


def group(call: dict[str, Any]) -> str:
    """What a call exercises, as text."""
    flags = {**call, **call.get("flags", {}), **call.get("args", {})}
    skip = {"input", "shape", "outputs", "flags", "args", "emulated", "padding", *_VALUES}
    said = {
        key: value for key, value in flags.items() if key not in skip and not key.startswith("codes_bytes")
    }
    given = sorted(set(flags) & {"amax", "amaxc"})
    return json.dumps([said, given, sorted(call["outputs"])], sort_keys=True)


def choose(source: Source, keys_of: Any, names: list[str]) -> list[str]:
    """Names of the chosen cases, in the order of ``names``."""
    chosen = [name for name in names if name.startswith(_ALWAYS) and not name.startswith(_NEVER)]
    taken: set[Key] = set().union(*(keys_of(source, name) for name in chosen))
    used = sum(map(source.cost, taken))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name not in chosen and not name.startswith(_NEVER) and name in source.index["cases"]:
            groups[group(source.index["cases"][name])].append(name)
    order = {
        name: (sum(map(source.cost, keys_of(source, name))), name)
        for group in groups.values()
        for name in group
    }
    turns = [sorted(members, key=order.__getitem__) for members in groups.values()]
    turns.sort(key=lambda members: order[members[0]])
    while used < BUDGET and any(turns):
        for members in turns:
            if members and used < BUDGET:
                name = members.pop(0)
                new = keys_of(source, name) - taken
                used += sum(map(source.cost, new))
                taken |= new
                chosen.append(name)
    return [name for name in names if name in set(chosen)]


def write(folder: Path, index: dict[str, Any], arrays: dict[str, dict[str, np.ndarray[Any, Any]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    (folder / "index.json").write_text(
        json.dumps(index, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8"
    )
    for file, named in arrays.items():
        np.savez_compressed(folder / f"{file}.npz", allow_pickle=False, **dict(sorted(named.items())))


def gather(source: Source, keys_of: Any, chosen: list[str]) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = defaultdict(dict)
    for name in chosen:
        for file, key in sorted(keys_of(source, name)):
            arrays[file][key] = source.files[file][key]
    return arrays


def main() -> None:
    kernels = Source(HERE / "te-kernels-h200")
    chosen = choose(kernels, kernel_keys, list(kernels.index["cases"]))
    index = {**kernels.index, "cases": {name: kernels.index["cases"][name] for name in chosen}}
    write(EMBEDDED / "te-kernels-h200", index, gather(kernels, kernel_keys, chosen))
    report("te-kernels-h200", len(chosen), len(kernels.index["cases"]))

    binary = Source(HERE / "te-binary-h200")
    listed = list(binary.index["cases"])
    unlisted = sorted(
        {key.split("|")[0] for key in binary.index["arrays"] if key.startswith("deq.") and "|" in key}
        - set(listed)
    )
    chosen = choose(binary, binary_keys, listed + unlisted)
    kept = gather(binary, binary_keys, chosen)
    index = {key: value for key, value in binary.index.items() if key != "refused_or_not"}
    index["cases"] = {name: binary.index["cases"][name] for name in chosen if name in binary.index["cases"]}
    names = {key for name in chosen for key in binary.index["arrays"] if key.startswith(f"{name}|")}
    names |= {f"in|{call['input']}" for call in index["cases"].values() if "input" in call} | {
        "deq.codes",
        "deq.scales",
    }
    index["arrays"] = {
        key: value
        for key, value in binary.index["arrays"].items()
        if key in names and value in kept["arrays"]
    }
    write(EMBEDDED / "te-binary-h200", index, kept)
    report("te-binary-h200", len(chosen), len(listed + unlisted))


def report(name: str, chosen: int, whole: int) -> None:
    size = sum(path.stat().st_size for path in (EMBEDDED / name).glob("*"))
    print(f"{name}: {chosen} of {whole} cases, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

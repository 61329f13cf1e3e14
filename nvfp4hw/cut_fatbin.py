"""A CUDA library reduced to the machine code of one GPU generation, so that it can travel.

    python -m nvfp4hw.cut_fatbin libtransformer_engine.so 90 cut.so

NVIDIA's libraries carry the same kernels for every generation.  The loader takes the entry that fits the device
and never reads the others; their code is overwritten with zeros here, which compress to nothing.  Headers, file
size and every other byte stay as they are, and so does the code that is kept: the SHA-256 of every kept entry is
that of the original.  docs/te-on-hopper.md uses it.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nvfp4ref.container import replacing

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SECTION = ".nv_fatbin"
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, size of this header, of the code; ..., architecture
_PTX, _CUBIN = 1, 2


class Entry(NamedTuple):
    """One piece of code in a library: of which architecture (90 for sm_90 and sm_90a), and where."""

    kind: int
    architecture: int
    start: int
    end: int


def entries(library: bytes | bytearray) -> Iterator[Entry]:
    """Every entry of an ELF library's fatbin section.

    Raises ValueError for a file that is no 64-bit little-endian ELF, has no such section, or one of another form.
    """
    begin, end = _section(library)
    start = begin
    while start < end:
        if library[start : start + 8] == bytes(8):  # padding between containers
            start += 8
            continue
        magic, _, header, size = _CONTAINER.unpack_from(library, start)
        if magic != _MAGIC:
            raise ValueError(
                f"{_SECTION} has {magic:#010x} at offset {start}, where a container begins with {_MAGIC:#010x}"
            )
        at, start = start + header, start + header + size
        while at < start:
            kind, _, header, size, *_, architecture = _ENTRY.unpack_from(library, at)
            if kind not in (_PTX, _CUBIN) or not header or at + header + size > start:
                raise ValueError(f"{_SECTION} has an entry of unknown form at offset {at}")
            yield Entry(kind, architecture, at + header, at + header + size)
            at += header + size
        start += (begin - start) % 8


def _section(library: bytes | bytearray) -> tuple[int, int]:
    """Offsets of the fatbin section."""
    if library[:6] != _ELF64_LITTLE:
        raise ValueError("this is no 64-bit little-endian ELF file, which a CUDA library for Linux is")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        text = headers[names][4] + name
        if library[text : library.index(b"\0", text)] == _SECTION.encode():
            return offset, offset + length
    raise ValueError(f"this library has no section {_SECTION}: it holds no CUDA code")


def cut(library: bytes, architecture: int) -> tuple[bytes, list[str]]:
    """The library with the code of every other architecture zeroed, and the SHA-256 of each entry that is kept.

    Raises ValueError when nothing would be kept, and what ``entries`` raises.
    """
    found = list(entries(library))
    kept = [one for one in found if one.kind == _CUBIN and one.architecture == architecture]
    if not kept:
        known = ", ".join(f"{n}" for n in sorted({one.architecture for one in found}))
        raise ValueError(f"this library has no machine code for {architecture}; it has {known}")
    small = bytearray(library)
    for one in found:
        if one not in kept:
            small[one.start : one.end] = bytes(one.end - one.start)
    return bytes(small), [hashlib.sha256(library[one.start : one.end]).hexdigest() for one in kept]


def main(arguments: Sequence[str]) -> int:
    """The command.  Exit code 0, or 2 with the reason."""
    if len(arguments) != 3 or not arguments[1].isdecimal():
        print("usage: python -m nvfp4hw.cut_fatbin LIBRARY ARCHITECTURE OUTPUT   (ARCHITECTURE as 90)", file=sys.stderr)
        return 2
    source, architecture, target = Path(arguments[0]), int(arguments[1]), Path(arguments[2])
    try:
        library = source.read_bytes()
        small, before = cut(library, architecture)
        with replacing(target) as file:
            file.write(small)
    except (OSError, ValueError) as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 2
    _, after = cut(target.read_bytes(), architecture)
    if before != after:
        print(f"{target}: the code that was kept is not that of {source}", file=sys.stderr)
        return 2
    print(f"{target}: {len(before)} entries of sm_{architecture} kept, each with the SHA-256 that it had")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A grid as a picture: a PNG of one colour in sixteen strengths, none of it where nothing differs.

The colour stands out from white and from black alike, so that one picture serves light, dark and paper.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from conformance.count import Array
from conformance.report.places import Grid

_COLOUR = bytes((0xD9, 0x3A, 0x1C))
_FAINTEST = 72  # opacity, of 255, of a cell in which hardly anything differs
_FULL = 3  # steps on the E2M1 grid that are drawn as strongly as any


def picture(grid: Grid) -> str:
    """The data URI of a PNG, one pixel a cell."""
    return "data:image/png;base64," + base64.b64encode(_png(levels(grid))).decode("ascii")


def levels(grid: Grid) -> Array:
    """Strength of each cell, 0 (nothing differs) to 15.

    By the root of the share that differs, the largest share being full, so that a lone difference is still seen;
    of a close-up by the distance on the grid, in which a sign of zero is the faintest.
    """
    if grid.steps is not None:
        strength = np.minimum(np.abs(grid.steps) + 2, _FULL + 2) / (_FULL + 2)
    else:
        share = grid.counts / grid.compared
        strength = np.sqrt(share / max(share.max(), 1e-30))
    return np.where(grid.counts > 0, np.clip(np.ceil(15 * strength), 1, 15), 0).astype(np.uint8)


def _png(level: Array) -> bytes:
    """A palette PNG of four bits a pixel."""
    rows, columns = level.shape
    even = np.zeros((rows, columns + columns % 2), np.uint8)
    even[:, :columns] = level
    packed = even[:, 0::2] << 4 | even[:, 1::2]
    lines = np.hstack([np.zeros((rows, 1), np.uint8), packed])  # each line starts with its filter, none
    opacity = [0, *(_FAINTEST + (255 - _FAINTEST) * n // 14 for n in range(15))]
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 4, 3, 0, 0, 0)),
        (b"PLTE", _COLOUR * 16),
        (b"tRNS", bytes(opacity)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )

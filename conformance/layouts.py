"""Ways in which the bytes of the block scales are stored: how each is written, and how it is read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nvfp4ref import layout

Array = np.ndarray[Any, Any]


class Layout(NamedTuple):
    """``store`` makes what is stored of compact scales (rows, columns); ``read`` the reverse, None: it cannot be."""

    store: Callable[[Array], Array]
    read: Callable[[Array, int, int], Array | None]


def _compact(stored: Array, rows: int, columns: int) -> Array | None:
    shapes = ((rows, columns), layout.padded_shape(rows, columns))
    if stored.shape in shapes:
        return stored[:rows, :columns]
    return stored.reshape(rows, columns) if stored.ndim != 2 and stored.size == rows * columns else None


def _swizzled(stored: Array, rows: int, columns: int) -> Array | None:
    padded = layout.padded_shape(rows, columns)
    return layout.unswizzle(stored, rows, columns) if stored.size == padded[0] * padded[1] else None


def _transposed(stored: Array, rows: int, columns: int) -> Array | None:
    found = _compact(stored, columns, rows)
    if found is None and stored.size == rows * columns:
        found = stored.reshape(columns, rows)  # transposed bytes in an array of the right shape
    return None if found is None else found.T


def _one_per_tile(stored: Array, rows: int, columns: int) -> Array | None:
    if rows % 16:
        return None
    found = _compact(stored, rows // 16, columns)
    return None if found is None else np.repeat(found, 16, axis=0)


def _tiled(stored: Array, rows: int, columns: int) -> Array | None:
    found = _compact(stored, rows, columns)
    if found is None or rows % 16:
        return None
    tiles = found.reshape(16, rows // 16, columns)
    return np.repeat(tiles[0], 16, axis=0) if rows > 16 and (tiles == tiles[0]).all() else None


def _one_per_32(stored: Array, rows: int, columns: int) -> Array | None:
    if columns % 2 or stored.shape != (rows, columns // 2):
        return None
    return np.repeat(stored, 2, axis=1)


LAYOUTS: dict[str, Layout] = {
    "compact": Layout(lambda scales: scales, _compact),
    "swizzled": Layout(layout.swizzle, _swizzled),
    "transposed": Layout(lambda scales: np.ascontiguousarray(scales.T), _transposed),
    "one-per-tile": Layout(lambda scales: scales[::16], _one_per_tile),
    "tiled": Layout(lambda scales: np.tile(scales[::16], (16, 1)), _tiled),
    "one-per-32": Layout(lambda scales: scales[:, ::2], _one_per_32),
}


def readings(stored: Array, rows: int, columns: int, declared: str, tiles: bool) -> dict[str, Array]:
    """Compact scales (rows, columns) under every layout that the stored bytes allow, the declared one first.

    ``tiles``: whether a scale serves 16 rows; the two layouts of tiles are no readings otherwise.
    """
    found: dict[str, Array] = {}
    for name in sorted(LAYOUTS, key=lambda name: name != declared):
        if name in ("one-per-tile", "tiled") and not tiles:
            continue
        scales = LAYOUTS[name].read(stored, rows, columns)
        if scales is not None:
            found[name] = scales
    return found


def read(stored: Array, rows: int, columns: int, declared: str) -> Array | None:
    """Compact scales (rows, columns) stored as declared, "compact" or "swizzled"; None when the shape is no such."""
    if declared == "compact" and stored.ndim != 2:  # flat: diagnosis reads it, a consumer would not
        return None
    return LAYOUTS[declared].read(stored, rows, columns)

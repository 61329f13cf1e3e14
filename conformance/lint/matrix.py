"""The matrices of a tensor, and the orders that the shape of their scales leaves open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.checkpoint import Quantized, Stored
from conformance.lint.words import Blocks
from nvfp4ref import layout

Array = np.ndarray[Any, Any]

_SLAB = 1 << 21  # packed bytes in hand at a time


@dataclass(frozen=True)
class Matrix:
    """A matrix of a tensor, an expert of several perhaps: rows R, columns of blocks C.

    packed is (R, 8·C) bytes, or (8·C, R) when ``upright`` is false (experts that are multiplied from the left).
    ``orders`` are the readings that the stored shape of the scales allows; none when it fits nothing.
    """

    quantized: Quantized
    expert: int | None
    rows: int
    columns: int
    upright: bool
    stored: tuple[int, int] | None  # shape of the stored scales, None without
    orders: tuple[str, ...]

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, in multiples of 128."""
        step = max(128, _SLAB // max(8 * self.columns, 1) // 128 * 128)
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def packed(self, start: int, stop: int) -> Array:
        """Packed bytes of rows, (stop - start, 8·C)."""
        stored, width = _present(self.quantized.packed), 8 * self.columns
        first = (self.expert or 0) * self.rows * width
        if self.upright:
            return stored.bytes(first + start * width, first + stop * width).reshape(-1, width)
        return np.ascontiguousarray(stored.strip(first, (width, self.rows), start, stop).T)

    def scales(self, order: str, start: int, stop: int) -> Array:
        """Scale bytes of rows read in one order, (stop - start, C); start is a multiple of 128."""
        return _ORDERS[order](self, start, stop)

    def scale_bytes(self, start: int, stop: int) -> Array:
        """A range of the stored scale bytes of this matrix, flat."""
        first = self._first_scale
        return _present(self.quantized.scales).bytes(first + start, first + stop)

    @property
    def _first_scale(self) -> int:
        height, width = _present(self.stored)
        return (self.expert or 0) * height * width

    def rectangle(self, start: int, stop: int, width: int | None = None) -> Array:
        """Rows of scales that lie one after the other, of that width, cut to C columns."""
        width = width or self.columns
        return self.scale_bytes(start * width, stop * width).reshape(-1, width)[:, : self.columns]

    def padded(self, start: int, stop: int) -> Array:
        """The same from padded rows."""
        return self.rectangle(start, stop, layout.padded_shape(self.rows, self.columns)[1])

    def repeated(self, start: int, stop: int) -> Array:
        """Rows of scales that are stored once for 16 of them."""
        tiles = self.rectangle(start // 16, -(-stop // 16))
        return np.repeat(tiles, 16, axis=0)[: stop - start]

    def unswizzled(self, start: int, stop: int) -> Array:
        """Rows of scales in the 128x4 order: 128 rows of them are one contiguous range of bytes."""
        width = layout.padded_shape(self.rows, self.columns)[1]
        tall = -(-stop // 128) * 128
        return layout.unswizzle(self.scale_bytes(start * width, tall * width), stop - start, self.columns)

    def transposed(self, start: int, stop: int) -> Array:
        """Rows of scales that are stored as columns, padded perhaps."""
        columns = _present(self.quantized.scales).strip(self._first_scale, _present(self.stored), start, stop)
        return np.ascontiguousarray(columns[: self.columns].T)


_ORDERS: dict[str, Callable[[Matrix, int, int], Array]] = {
    "compact": Matrix.rectangle,
    "padded": Matrix.padded,
    "swizzled": Matrix.unswizzled,
    "transposed": Matrix.transposed,
    "one a tile": Matrix.repeated,
}


def _present(value: Any) -> Any:
    """The value, which the caller knows to be there."""
    assert value is not None
    return value


# ---- shapes ----------------------------------------------------------------------------------------------------


def matrices(one: Quantized) -> list[Matrix]:
    """The matrices of a tensor whose arrays are there: one, or one an expert.

    Raises ValueError, a sentence, when the packed codes are no matrix of blocks.
    """
    packed, scales = _present(one.packed), one.scales if one.has_scale_bytes else None
    shape = packed.shape
    if len(shape) < 2 or 0 in shape:
        raise ValueError(f"packed codes are (R, K/2); found {packed.dtype} of shape {shape}")
    if packed.dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    upright = scales is None or not _is_upended(packed, shape, scales.shape)
    rows, width = shape[-2:] if upright else shape[:-3:-1]
    if width % 8:
        raise ValueError(f"{width} packed bytes a row are {2 * width} elements, no multiple of 16")
    count = int(np.prod(shape[:-2]))
    stored = None if scales is None else _per_matrix(scales.shape, count)
    orders = () if stored is None else _orders(stored, rows, width // 8, upright)
    return [
        Matrix(one, index if len(shape) > 2 else None, rows, width // 8, upright, stored, orders)
        for index in range(count)
    ]


def _is_upended(packed: Stored, shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Whether codes and scales are both stored as the transpose: (K/2, R) and (K/16, R).

    When the packed bytes are square the scales alone may be: the blocks' ±6 decide.
    """
    if len(scales) != len(shape) or (shape[-2], shape[-1]) != (8 * scales[-2], scales[-1]):
        return False
    if shape[-2] != shape[-1]:
        return True
    rows = packed.bytes(0, 64 * shape[-1]).reshape(64, -1)
    across, down = (np.mean(Blocks(one).six) for one in (rows, np.ascontiguousarray(rows.T)))
    return bool(down > across)


def _per_matrix(shape: tuple[int, ...], count: int) -> tuple[int, int] | None:
    """The shape of one matrix's scales, as (height, width); a flat array is one row."""
    size = int(np.prod(shape))
    if not shape or size % count or size == 0:
        return None
    if count > 1 and (len(shape) < 3 or int(np.prod(shape[:-2])) != count):
        return 1, size // count
    return (1, size // count) if len(shape) < 2 else (size // count // shape[-1], shape[-1])


def _orders(stored: tuple[int, int], rows: int, columns: int, upright: bool) -> tuple[str, ...]:
    """The orders that stored scales of this shape can be in."""
    if not upright:
        return ("transposed",)
    padded = layout.padded_shape(rows, columns)
    size = stored[0] * stored[1]
    possible = {
        "compact": size == rows * columns and stored in ((rows, columns), (1, size), _folded(padded)),
        "padded": stored == padded and padded != (rows, columns),
        "swizzled": size == padded[0] * padded[1],
        "transposed": stored in ((columns, rows), padded[::-1]),
        "one a tile": rows % 16 == 0 and stored == (rows // 16, columns) and rows > 16,
    }
    return tuple(name for name, fits in possible.items() if fits)


def _folded(padded: tuple[int, int]) -> tuple[int, int]:
    """The shape that torchao gives swizzled scales: 128x4 of them as 32x16."""
    return padded[0] // 4, padded[1] * 4

"""NVFP4Tensor: stores packed codes, scales and amax; everything else is made on access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import e2m1, e4m3, layout
from .arithmetic import Arithmetic
from .arithmetic import arithmetic as named
from .arrays import from_torch
from .blocks import as_block
from .fp32 import F32, U8, AnyArray


@dataclass(frozen=True)
class Steps:
    """The intermediates of one quantization, float32; block arrays are (R, K/16), element arrays (R, K).

    For axis=0 all of them have the shapes of the transpose.  ``block_scale`` is the value before its E4M3
    rounding; ``err4``/``err6`` are None unless 4over6; ``transformed`` is None unless an RHT was applied.
    """

    global_scale: F32
    block_amax: F32
    block_scale: F32
    encode_scale: F32
    scaled: F32
    err4: F32 | None = None
    err6: F32 | None = None
    transformed: F32 | None = None


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A quantized tensor.

    Attributes:
        packed: uint8 (…, K/2), two E2M1 codes a byte.
        scales: uint8 (…, K/16), E4M3 bytes; 16x16 blocks have each tile's byte in all 16 rows.
        amax: float32, 0-d, or (R,) when row-scaled: the value used, not always max(abs(x)).
        block: (1, 16) or (16, 16).
        arithmetic: how it was made, and so how it decodes (e4m3_max, packing).
    """

    packed: U8
    scales: U8
    amax: F32
    block: tuple[int, int] = (1, 16)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    _make_steps: Callable[[], Steps] | None = field(default=None, repr=False)

    @classmethod
    def from_arrays(
        cls,
        packed: ArrayLike,
        scales: ArrayLike,
        amax: ArrayLike,
        *,
        block: tuple[int, int] = (1, 16),
        layout: str = "compact",
        arithmetic: str | Arithmetic = "te",
    ) -> NVFP4Tensor:
        """A tensor from somebody else's arrays.

        Args:
            packed: uint8 (…, K/2).
            scales: bytes; (…, K/16) for layout "compact", the padded matrix for "padded" and "swizzled".
            amax: float32, one value or one a row.
        Raises:
            TypeError: a wrong dtype.  ValueError: shapes that do not belong together, unknown layout.
        """
        return cls(*_checked(packed, scales, amax, layout), as_block(block), named(arithmetic))

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (…, K)."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    @property
    def codes(self) -> U8:
        """uint8 (…, K), one E2M1 code 0..15 an element; unpacked on access."""
        packing = self.arithmetic.packing
        if packing == "low-nibble-first":
            return e2m1.unpack(self.packed)
        low, high = self.packed & np.uint8(15), self.packed >> np.uint8(4)
        if packing == "high-nibble-first":
            return np.stack([high, low], axis=-1).reshape(self.shape)
        halves = np.stack([a.reshape(*a.shape[:-1], -1, 8) for a in (low, high)], axis=-2)
        return halves.reshape(self.shape)

    @property
    def values(self) -> F32:
        """float32 (…, K): the decoded codes without any scale."""
        return e2m1.VALUES[self.codes]

    @property
    def block_scales(self) -> F32:
        """float32 (…, K/16): the decoded E4M3 bytes."""
        return e4m3.VALUES[self.scales]

    @property
    def steps(self) -> Steps:
        """Every intermediate of the quantization, computed again from the input (which must not have changed)."""
        if self._make_steps is None:
            raise ValueError("this tensor was not made by quantize(), so its intermediates are not known")
        return self._make_steps()

    @property
    def swizzled_scales(self) -> U8:
        """The scales padded and in the 128x4 order that a GEMM reads."""
        return layout.swizzle(self.scales.reshape(-1, self.scales.shape[-1]))


def _checked(packed: ArrayLike, scales: ArrayLike, amax: ArrayLike, layout_name: str) -> tuple[U8, U8, F32]:
    packed, scales, amax = (np.asarray(from_torch(a)) for a in (packed, scales, amax))
    if packed.dtype != np.uint8:
        raise TypeError(f"packed codes are uint8, two a byte; got dtype {packed.dtype}")
    if scales.dtype.itemsize != 1:
        raise TypeError(f"scales are E4M3 bytes (uint8); got dtype {scales.dtype}")
    if packed.ndim < 2 or packed.size == 0 or packed.shape[-1] % 8:
        raise ValueError(f"packed codes are (…, K/2) with K a multiple of 16; got shape {packed.shape}")
    rows, columns = int(np.prod(packed.shape[:-1])), packed.shape[-1] // 8
    compact = (*packed.shape[:-1], columns)
    scales = _compact_scales(scales.view(np.uint8), rows, columns, layout_name)
    if scales.shape not in (compact, (rows, columns)):
        raise ValueError(f"packed codes of shape {packed.shape} need scales of shape {compact}; got {scales.shape}")
    if amax.dtype != np.float32:
        raise TypeError(f"amax is float32; got dtype {amax.dtype}")
    amax = amax.reshape(()) if amax.size == 1 else amax
    if amax.ndim and amax.shape != (rows,):
        raise ValueError(f"amax is one float32 or one a row ({rows}); got shape {amax.shape}")
    return packed, scales.reshape(compact), amax


def _compact_scales(scales: U8, rows: int, columns: int, layout_name: str) -> U8:
    if layout_name == "compact":
        return scales
    if layout_name == "padded":
        padded = layout.padded_shape(rows, columns)
        if scales.shape != padded:
            raise ValueError(f"padded scales of {rows}x{columns} blocks have shape {padded}; got {scales.shape}")
        return np.ascontiguousarray(scales[:rows, :columns])
    if layout_name == "swizzled":
        return layout.unswizzle(scales, rows, columns)
    raise ValueError(f"layout is 'compact', 'padded' or 'swizzled'; got {layout_name!r}")


def rows_of(array: AnyArray) -> AnyArray:
    """An array with its leading dimensions flattened to rows."""
    return array.reshape(-1, array.shape[-1])


def as_tensor(q: Any) -> NVFP4Tensor:
    """``q`` when it is an NVFP4Tensor; TypeError otherwise."""
    if not isinstance(q, NVFP4Tensor):
        raise TypeError(f"expected an NVFP4Tensor (from quantize or NVFP4Tensor.from_arrays); got {type(q).__name__}")
    return q

"""MXFP4, for comparison: E2M1 elements in blocks of 32 under a UE8M0 scale.  Rules MXFP4-SCALE, MXFP4-ELEMENT.

Scale rules: "floor", 2^(floor(log2 amax) − 2), the OCP specification's, which lets up to a third of the top
binade saturate; "ceil", 2^ceil(log2(amax/6)), which never saturates and wastes up to a binade.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import e2m1, e8m0
from .arithmetic import Arithmetic
from .arrays import as_array, narrow
from .fp32 import F32, U8, AnyArray, require_subnormals, widen

BLOCK = 32
SLAB = 2**20


@dataclass(frozen=True, eq=False)
class MXFP4Tensor:
    """packed: uint8 (R, K/2), two codes a byte; scales: uint8 (R, K/32), UE8M0."""

    packed: U8
    scales: U8

    @property
    def codes(self) -> U8:
        """uint8 (R, K), one E2M1 code an element."""
        return e2m1.unpack(self.packed)

    def dequantize(self) -> F32:
        """float32 (R, K): code·2^(scale − 127), one rounding (a subnormal result may lose bits)."""
        values = e2m1.VALUES[self.codes].reshape(*self.scales.shape, BLOCK)
        return (values * e8m0.VALUES[self.scales][..., None]).reshape(self.codes.shape)


def block_scale(amax: F32, scale: str) -> U8:
    """UE8M0 codes of block amaxes (rule MXFP4-SCALE)."""
    if scale == "floor":
        exponent = np.frexp(amax)[1] - 1 - 2
    else:
        # 6 = 1.5·2^2: the scale is one binade higher where the significand of amax is above 1.5
        fraction, exponent = np.frexp(amax)
        exponent = exponent - 3 + (fraction > np.float32(0.75))
    code: U8 = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    code[amax == 0] = 0
    code[np.isinf(amax)] = 254
    code[np.isnan(amax)] = e8m0.NAN_BYTE
    return code


def quantize(x: Any, *, scale: str = "floor", uniforms: AnyArray | None = None) -> MXFP4Tensor:
    """MXFP4 of a matrix (R, K), blocks of 32 along K.

    Args:
        x: float32, float16 or bfloat16; K a multiple of 32.
        scale: "floor" or "ceil".
        uniforms: float32 (R, K) in [0, 1) for stochastic rounding with exact probabilities; None: nearest even.
    Raises:
        TypeError, ValueError: dtype, shape, unknown scale rule.
    """
    require_subnormals()
    matrix = narrow(as_array(x))
    if scale not in ("floor", "ceil"):
        raise ValueError(f"scale is 'floor' or 'ceil'; got {scale!r}")
    if matrix.ndim != 2 or matrix.size == 0 or matrix.shape[1] % BLOCK:
        raise ValueError(f"MXFP4 needs a matrix with a multiple of 32 columns; got shape {matrix.shape}")
    rows, columns = matrix.shape
    if uniforms is not None:
        uniforms = e2m1.checked_random(uniforms, "ideal", (rows, columns // 4))
    packed, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // BLOCK), np.uint8)
    rounding = Arithmetic(stochastic="ideal")
    step = max(1, SLAB // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = widen(matrix[part]).reshape(-1, columns // BLOCK, BLOCK)
        magnitude = np.abs(values)
        amax = np.where(np.isnan(magnitude).any(axis=2), np.float32(np.nan), np.fmax.reduce(magnitude, axis=2))
        scales[part] = block_scale(amax, scale)
        with np.errstate(all="ignore"):
            # dividing by a power of two rounds only what is far below half the smallest element
            scaled = (values.astype(np.float64) / e8m0.VALUES[scales[part]][..., None]).astype(np.float32)
        random = None if uniforms is None else uniforms[part].reshape(scaled.shape)
        packed[part] = e2m1.pack(e2m1.round_elements(scaled, rounding, random).reshape(-1, columns))
    return MXFP4Tensor(packed, scales)

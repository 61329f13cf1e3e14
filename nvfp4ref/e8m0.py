"""UE8M0 block-scale codes of the MX formats: a power of two, 2^(code-127); 0xFF is NaN.  Rules E8M0-*."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import as_float32
from .fp32 import F32, NAN, U8

NAN_BYTE = 0xFF
VALUES: F32 = np.array([2.0 ** (code - 127) for code in range(255)] + [NAN], np.float32)


def encode(x: ArrayLike, rounding: str = "floor", *, overflow: str = "saturate") -> U8:
    """UE8M0 bytes of float32 values; the sign is ignored, as ``cvt.*.ue8m0x2.f32`` does.

    Args:
        x: float32 array of any shape.
        rounding: "floor" (toward zero, the OCP rule) or "ceil" (toward +Inf, NVIDIA's recommendation).
        overflow: "saturate": Inf and what exceeds 2^127 give 0xFE; "nan": 0xFF.
    Returns:
        uint8 array; magnitudes up to 2^-127 give 0x00; NaN gives 0xFF.  With "floor" every float32
        subnormal gives 0x00.
    Raises:
        TypeError, ValueError: as :func:`nvfp4ref.e4m3.encode`.
    """
    if rounding not in ("floor", "ceil"):
        raise ValueError(f"rounding {rounding!r} is not 'floor' or 'ceil'")
    if overflow not in ("saturate", "nan"):
        raise ValueError(f"overflow {overflow!r} is not 'saturate' or 'nan'")
    values = as_float32(x)
    bits = np.abs(values).view(np.uint32)
    code = (bits >> np.uint32(23)).astype(np.int32)  # the biased exponent; 0 for subnormals
    if rounding == "ceil":
        # a subnormal above 2^-127 (mantissa above one half) is above code 0 too
        inexact = np.where(code == 0, bits > 0x00400000, (bits & np.uint32(0x7FFFFF)) != 0)
        code = np.where(np.isinf(values), 255, code + inexact)
    code = np.where(code >= 255, 0xFE if overflow == "saturate" else 0xFF, code)
    return np.where(np.isnan(values), NAN_BYTE, code).astype(np.uint8)


def decode(code: ArrayLike) -> F32:
    """float32 values of UE8M0 bytes (0x00 is 2^-127, a subnormal; 0xFF gives NaN); TypeError unless uint8."""
    code = np.asarray(code)
    if code.dtype != np.uint8:
        raise TypeError(f"UE8M0 bytes are uint8; got dtype {code.dtype}")
    values: F32 = VALUES[code]
    return values

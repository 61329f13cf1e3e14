"""Arrays of any origin as NumPy arrays of a float dtype that the oracle takes.  Rule INPUT-WIDEN."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .fp32 import F32, AnyArray, bfloat16


def as_array(x: Any) -> AnyArray:
    """``x`` as a NumPy array of float32, float16, bfloat16 or float64, without changing a bit.

    Takes NumPy, torch and JAX arrays and whatever has ``__array__`` or ``__dlpack__``.
    Raises TypeError for anything that is not an array of those dtypes.
    """
    if not hasattr(x, "dtype") and not hasattr(x, "__array__") and not hasattr(x, "__dlpack__"):
        raise TypeError(f"expected an array (NumPy, torch, JAX, …); got {type(x).__name__}")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("a masked array has no value where it is masked: fill it first (x.filled(0))")
    if not isinstance(x, np.ndarray):
        try:
            x = from_torch(x)
            x = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
        except Exception as error:
            raise TypeError(f"{type(x).__name__} cannot be read as a NumPy array: {error}") from None
    if x.dtype.kind == "f" and not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if x.dtype not in (np.float32, np.float16, np.float64, bfloat16):
        raise TypeError(
            f"expected float32, float16, bfloat16, or float64 that is exact in float32; got dtype {x.dtype}"
        )
    return np.asarray(x)  # a masked or matrix subclass would change the arithmetic


def from_torch(x: Any) -> Any:
    """A torch tensor as a NumPy array, bfloat16 and one-byte floats by their bits; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own to receive it
        return x.contiguous().view(torch.int16).numpy().view(bfloat16)
    if x.is_floating_point() and x.element_size() == 1:  # block scales, say
        return x.contiguous().view(torch.uint8).numpy()
    return x.numpy()


def as_float32(x: Any) -> F32:
    """``x`` as float32 (exact), of any shape; ValueError when a float64 is not a float32 value."""
    if not hasattr(x, "dtype"):
        x = np.asarray(x)
        if x.dtype.kind in "iu":
            x = x.astype(np.float64)
    return narrow(as_array(x)).astype(np.float32)


def narrow(x: AnyArray) -> AnyArray:
    """float64 that is exact in float32 as float32; the other dtypes as they are.

    Raises ValueError that names the first element which float32 cannot hold.
    """
    if x.dtype != np.float64:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        single = x.astype(np.float32)
    inexact = (single.astype(np.float64) != x) & ~np.isnan(x)
    if inexact.any():
        where = tuple(int(i) for i in np.argwhere(inexact)[0])
        raise ValueError(
            f"float64 input must be exact in float32, but element {list(where)} is {x[where]!r}; "
            "round it yourself (x.astype(np.float32)) so that the rounding is yours"
        )
    return single

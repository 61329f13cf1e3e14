"""NVFP4Tensor: made from foreign arrays, in every layout and packing, and what is computed on access."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inputs import Array, bits, random, same_bits

import nvfp4ref as nv
from nvfp4ref import NVFP4Tensor, layout

pytestmark = pytest.mark.filterwarnings("error")

Q = nv.quantize(random(48, 80))


def test_parts_are_what_they_say() -> None:
    assert Q.packed.shape == (48, 40) and Q.scales.shape == (48, 5) and Q.amax.shape == () and Q.shape == (48, 80)
    assert Q.packed.dtype == Q.scales.dtype == Q.codes.dtype == np.uint8 and Q.amax.dtype == np.float32
    assert Q.block == (1, 16) and Q.arithmetic == nv.PRESETS["te"]
    same_bits(Q.codes[:, 0::2], Q.packed & np.uint8(15))
    same_bits(Q.codes[:, 1::2], Q.packed >> np.uint8(4))
    same_bits(Q.values, nv.e2m1.decode(Q.codes))
    same_bits(Q.block_scales, Q.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    same_bits(Q.swizzled_scales, layout.swizzle(Q.scales))
    with pytest.raises(FrozenInstanceError):
        Q.packed = Q.packed  # type: ignore[misc]


def test_leading_dimensions_are_swizzled_as_rows() -> None:
    """INPUT-FLATTEN, LAYOUT-SWIZZLE"""
    q = nv.quantize(random(48, 80).reshape(3, 16, 80))
    assert q.scales.shape == (3, 16, 5) and q.shape == (3, 16, 80) and q.codes.shape == (3, 16, 80)
    same_bits(q.swizzled_scales, Q.swizzled_scales)


@pytest.mark.parametrize("packing", ["low-nibble-first", "high-nibble-first", "split-half"])
@pytest.mark.parametrize("shape", [(2, 16), (48, 80), (3, 16, 80)], ids=str)
def test_codes_of_every_packing(packing: str, shape: tuple[int, ...]) -> None:
    """E2M1-PACK"""
    x = random(int(np.prod(shape[:-1])), shape[-1]).reshape(shape)
    ar = nv.arithmetic("te", packing=packing)
    q = nv.quantize(x, arithmetic=ar)
    same_bits(q.codes, nv.quantize(x).codes)
    foreign = NVFP4Tensor.from_arrays(q.packed, q.scales, q.amax, arithmetic=ar)
    same_bits(foreign.codes, q.codes)
    pairs = {
        "low-nibble-first": (q.codes[..., 0], q.codes[..., 1]),
        "high-nibble-first": (q.codes[..., 1], q.codes[..., 0]),
        "split-half": (q.codes[..., 0], q.codes[..., 8]),
    }[packing]
    same_bits(q.packed[..., 0], pairs[0] | pairs[1] << np.uint8(4))


@pytest.mark.parametrize("name", ["compact", "padded", "swizzled"])
@pytest.mark.parametrize("shape", [(48, 80), (3, 16, 80)], ids=str)
def test_from_arrays_in_every_layout(name: str, shape: tuple[int, ...]) -> None:
    """LAYOUT-PAD, LAYOUT-SWIZZLE"""
    q = nv.quantize(random(48, 80).reshape(shape))
    flat = q.scales.reshape(48, 5)
    scales = {"compact": q.scales, "padded": layout.pad(flat, 0x55), "swizzled": layout.swizzle(flat)}[name]
    found = NVFP4Tensor.from_arrays(q.packed, scales, q.amax, layout=name)
    assert found.shape == q.shape
    for part in ("packed", "scales", "amax", "codes"):
        same_bits(getattr(found, part), getattr(q, part))
    same_bits(nv.dequantize(found), nv.dequantize(q))
    as_float8 = NVFP4Tensor.from_arrays(q.packed, scales.view(ml_dtypes.float8_e4m3fn), q.amax.reshape(1), layout=name)
    same_bits(as_float8.scales, q.scales)
    assert as_float8.amax.shape == ()


def test_from_arrays_keeps_block_arithmetic_and_row_amax() -> None:
    amax = np.abs(random(48, 1)).reshape(48)
    made = NVFP4Tensor.from_arrays(Q.packed, Q.scales, amax, block=(16, 16), arithmetic="four-over-six")
    assert made.block == (16, 16) and made.arithmetic.name == "four-over-six"
    same_bits(made.amax, amax)
    listed = NVFP4Tensor.from_arrays(Q.packed, Q.scales, Q.amax, block=[16, 16])  # type: ignore[arg-type]
    assert listed.block == (16, 16)


def test_foreign_tensors_have_no_steps() -> None:
    with pytest.raises(ValueError, match="not made by quantize.*not known"):
        _ = NVFP4Tensor.from_arrays(Q.packed, Q.scales, Q.amax).steps


def bad(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"packed": Q.packed, "scales": Q.scales, "amax": Q.amax} | changes
    return lambda: NVFP4Tensor.from_arrays(**arguments)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (bad(packed=Q.packed.astype(int)), TypeError, "packed codes are uint8, two a byte; got dtype int64"),
        (bad(packed=Q.packed[:, :39]), ValueError, r"\(…, K/2\) with K a multiple of 16; got shape \(48, 39\)"),
        (bad(packed=Q.packed[0]), ValueError, r"K a multiple of 16; got shape \(40,\)"),
        (bad(packed=Q.packed[:0]), ValueError, r"got shape \(0, 40\)"),
        (bad(scales=Q.block_scales), TypeError, r"E4M3 bytes \(uint8\); got dtype float32"),
        (bad(scales=Q.scales[:40]), ValueError, r"shape \(48, 40\) need scales of shape \(48, 5\); got \(40, 5\)"),
        (bad(scales=np.ascontiguousarray(Q.scales.T)), ValueError, r"need scales of shape \(48, 5\); got \(5, 48\)"),
        (bad(scales=Q.scales.reshape(-1)), ValueError, r"need scales of shape \(48, 5\); got \(240,\)"),
        (bad(scales=layout.pad(Q.scales)), ValueError, r"need scales of shape \(48, 5\); got \(128, 8\)"),
        (bad(layout="padded"), ValueError, r"padded scales of 48x5 blocks have shape \(128, 8\); got \(48, 5\)"),
        (
            bad(layout="swizzled"),
            ValueError,
            r"swizzled scales of 48x5 blocks are 128x8 bytes; got uint8 of shape \(48, 5\)",
        ),
        (bad(layout="cublas"), ValueError, "layout is 'compact', 'padded' or 'swizzled'; got 'cublas'"),
        (bad(amax=1.5), TypeError, "amax is float32; got dtype float64"),
        (bad(amax=np.ones(5, np.float32)), ValueError, r"one float32 or one a row \(48\); got shape \(5,\)"),
        (bad(amax=np.ones((48, 1), np.float32)), ValueError, r"one float32 or one a row \(48\); got shape \(48, 1\)"),
        (bad(block=(1, 32)), ValueError, r"block is \(1, 16\) or \(16, 16\); got \(1, 32\)"),
        (bad(block=16), ValueError, r"block is \(1, 16\) or \(16, 16\); got 16"),
        (bad(arithmetic="cutlass"), ValueError, "unknown arithmetic 'cutlass'; the presets are te"),
    ],
)
def test_bad_arrays_are_refused_in_one_sentence(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_steps_are_computed_from_the_input_again() -> None:
    x: Array = random(4, 32)
    q = nv.quantize(x)
    first, second = q.steps, q.steps
    assert first is not second
    same_bits(first.scaled, second.scaled)
    first.scaled[:] = 0
    assert q.steps.scaled.any() and not np.shares_memory(q.steps.scaled, x)
    assert bits(q.steps.global_scale).shape == () and q.steps.err4 is None and q.steps.err6 is None

"""The float32 ground: casts in integers, the canonical NaN, the guard against flushed subnormals, the import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, WIDENED, Array, around, bfloat16, bits, same_bits

from nvfp4ref import fp32, scalar

pytestmark = pytest.mark.filterwarnings("error")


def patterns(values: Array) -> Array:
    """All float32 halfway between neighbours of a 16-bit type, and an ulp and two to their sides."""
    finite = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float32))
    return around((finite[1:] + finite[:-1]) / np.float32(2), 2)


def test_constants_have_their_bits() -> None:
    """FP32-RULES, FP32-FMIN, NAN-CANONICAL"""
    named = (fp32.FLT_MAX, fp32.FLT_MIN, fp32.SIXTH, fp32.NAN, fp32.BF16_MAX)
    assert [int(bits(c)) for c in named] == [0x7F7FFFFF, 0x00800000, 0x3E2AAAAB, 0x7FFFFFFF, 0x7F7F0000]
    assert scalar.fl(Fraction(1, 6)) == fp32.SIXTH


def test_bfloat16_of_every_bfloat16() -> None:
    """Every pattern comes back; NaNs become 0x7FFF (NAN-CANONICAL)."""
    number = ~np.isnan(WIDENED)
    found = fp32.to_bfloat16(WIDENED)
    same_bits(found[number], bits(BFLOAT16)[number])
    assert (found[~number] == 0x7FFF).all()
    same_bits(fp32.from_bfloat16(bits(BFLOAT16)), WIDENED)


def test_bfloat16_rounds_to_nearest_even_at_every_midpoint() -> None:
    with np.errstate(over="ignore"):
        x = patterns(WIDENED)
        x = np.concatenate([x, around([3.3895314e38, 3.3961775e38, np.finfo(np.float32).max])])
        expected = bits(x.astype(bfloat16))
    number = ~np.isnan(x)
    same_bits(fp32.to_bfloat16(x)[number], expected[number])
    sample = x[::211]
    slow = [scalar.bf16(float(v)) for v in sample]
    same_bits(fp32.from_bfloat16(fp32.to_bfloat16(sample)), np.array(slow, np.float32))


def test_float16_of_every_float16_and_bfloat16() -> None:
    for values in (FLOAT16.astype(np.float32), WIDENED):
        number = ~np.isnan(values)
        with np.errstate(over="ignore"):
            expected = bits(values.astype(np.float16))
        found = fp32.to_float16(values)
        same_bits(found[number], expected[number])
        assert (found[~number] == 0x7FFF).all()


def test_float16_rounds_to_nearest_even_at_every_midpoint() -> None:
    with np.errstate(over="ignore"):
        x = np.concatenate([patterns(FLOAT16), around([65504, 65519, 65520, 65536, 2.0**-25, 2.0**-24, 1e-30, 1e38])])
        expected = bits(x.astype(np.float16))
    same_bits(fp32.to_float16(x), expected)
    slow = [scalar.half(float(v)) for v in x[::211]]
    same_bits(fp32.to_float16(x[::211]).view(np.float16).astype(np.float32), np.array(slow, np.float32))


@pytest.mark.parametrize("cast", [fp32.to_bfloat16, fp32.to_float16])
def test_casts_keep_any_shape(cast: object) -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
    flat = cast(x.reshape(-1))  # type: ignore[operator]
    for view in (x, np.asfortranarray(x), x[::-1][::-1]):
        same_bits(cast(view), flat.reshape(2, 3, 4))  # type: ignore[operator]
    assert cast(np.array(1.5, np.float32)).shape == ()  # type: ignore[operator]


def test_canonical_nan_replaces_every_nan_in_place() -> None:
    """NAN-CANONICAL"""
    x = np.array([0x7F800001, 0xFFC00000, 0x7FC00000, 0x7F800000, 0x80000000], np.uint32).view(np.float32)
    assert fp32.canonical_nan(x) is x
    assert bits(x).tolist() == [0x7FFFFFFF] * 3 + [0x7F800000, 0x80000000]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_widen_copies_exactly_and_contiguously(dtype: object) -> None:
    """INPUT-WIDEN"""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16 if dtype is np.float16 else bfloat16)
    x = (x.astype(np.float32) if dtype is np.float32 else x).reshape(256, 256)
    expected = x.astype(np.float32)
    number = ~np.isnan(expected)
    for view, wanted in ((x, expected), (x.T, expected.T), (x[::-1, ::3], expected[::-1, ::3])):
        found = fp32.widen(view)
        assert found.flags.c_contiguous and found.dtype == np.float32 and not np.shares_memory(found, x)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        np.testing.assert_array_equal(bits(found)[~np.isnan(wanted)], bits(wanted.copy())[~np.isnan(wanted)])
    assert number.any()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


FLUSHED = """
import numpy as np, torch
import nvfp4ref as nv
x = np.full((32, 16), 1e-39, np.float32)
q = nv.quantize(x)
assert torch.set_flush_denormal(True)
for call in (lambda: nv.quantize(x), lambda: nv.quantize(x, threads=2), lambda: nv.dequantize(q)):
    try:
        call()
    except RuntimeError as error:
        assert "flushes subnormal" in str(error) and "process of its own" in str(error), error
    else:
        raise SystemExit("no error")
torch.set_flush_denormal(False)
assert (nv.quantize(x).packed == q.packed).all()
"""


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch to set the processor's mode")
def test_a_process_that_flushes_subnormals_is_refused() -> None:
    """FP32-RULES: never a wrong answer about tiny tensors."""
    done = run(FLUSHED)
    assert done.returncode == 0, done.stderr


def test_the_guard_lets_this_process_pass() -> None:
    fp32.require_subnormals()


def test_import_is_quick_and_needs_only_numpy_and_ml_dtypes() -> None:
    code = """
import sys, time
import numpy, ml_dtypes
before = set(sys.modules)
start = time.perf_counter()
import nvfp4ref
took = time.perf_counter() - start
new = {m.partition(".")[0] for m in set(sys.modules) - before}
foreign = {m for m in new if m not in sys.stdlib_module_names and m not in ("nvfp4ref", "numpy", "ml_dtypes")}
print(took, *sorted(foreign))
"""
    first, second = run(code), run(code)
    assert first.returncode == 0, first.stderr
    took, *foreign = second.stdout.split()
    assert foreign == []
    assert min(float(first.stdout.split()[0]), float(took)) < 0.3

"""Sweeps over whole input spaces: the codecs against NVIDIA's header, a block against the slow twin.

The codec sweep puts all 2^32 float32 through both.  The block sweep rests on this: what a block becomes
depends only on the tensor amax A, the block amax a and each element x.  For several A it takes every bfloat16
a and, for each, every bfloat16 x whose magnitude is not above it, both signs.  The slow twin gives the scale
byte of each (A, a) and the code of each (e, x); as e depends on the scale byte alone, and codes do not fall
as x grows, its codes are fixed by seven thresholds for each byte, found by bisection.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance.cases import E2M1_MIDPOINTS, E4M3_MIDPOINTS
from conformance.count import Count, count, count_codes
from nvfp4ref import scalar

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]

CODECS = ("e2m1", "e4m3")
#: float32 bit patterns in a piece of work: one sign and one exponent, so that a piece has one class of input.
_CHUNK = 1 << 23
_CHUNKS = (1 << 32) // _CHUNK

#: Tensor amaxes of the block sweep: exact scales, S = 3, a plain one, S clamped, S tiny, and an amax of zero.
TENSOR_AMAXES = (2688.0, 896.0, 4.09375, 2.0**-119, 3.3895313892515355e38, 0.0)
_PATTERNS = 0x7F80  # finite bfloat16 magnitudes, zero included


@dataclass(frozen=True)
class Sweep:
    """The result of one sweep.

    Attributes:
        name: what was held against what.
        classes: counts by class of input.
        reason: why it was not run; None when it was.
    """

    name: str
    classes: dict[str, Count]
    seconds: float = 0.0
    reason: str | None = None

    @property
    def total(self) -> Count:
        """All classes that do not overlap: ties are part of the normal numbers."""
        total = Count(0, 0)
        for name, one in self.classes.items():
            if name != "ties":
                total += one
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        counts = {name: one.to_json() for name, one in self.classes.items()}
        return {
            "name": self.name,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "classes": counts,
        }

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}: not run: {self.reason}"
        lines = [f"{self.name}: {self.total} ({self.seconds:.0f} s)"]
        lines += [f"  {name:<22} {one}" for name, one in self.classes.items()]
        return "\n".join(lines)


def sweeps(progress: Progress | None = None, processes: int = 2) -> Iterator[Sweep]:
    """Every sweep of the suite "exhaustive", one after the other."""
    for codec in CODECS:
        yield codec_sweep(codec, progress, processes=processes)
    yield block_sweep(progress=progress, processes=processes)


def _each(
    work: Callable[[Any], Any], items: Sequence[Any], label: str, progress: Progress | None, processes: int
) -> Iterator[Any]:
    """Results in order, from worker processes unless one is enough."""
    if processes == 1:
        for done, item in enumerate(items, 1):
            yield work(item)
            _tell(progress, label, done, len(items))
        return
    # spawned, for a fork would copy whatever threads the backends have started; deaf to Ctrl-C, which is ours
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        for done, result in enumerate(pool.map(work, items), 1):
            yield result
            _tell(progress, label, done, len(items))
    finally:
        pool.shutdown(cancel_futures=True)


def _tell(progress: Progress | None, label: str, done: int, total: int) -> None:
    if progress is not None:
        progress(label, done, total)


# ---- all float32 through a codec ---------------------------------------------------------------------------


def codec_sweep(
    codec: str, progress: Progress | None = None, *, chunks: Sequence[int] | None = None, processes: int = 2
) -> Sweep:
    """Every float32 through ``nvfp4ref``'s codec and through NVIDIA's header.

    Args:
        codec: "e2m1" or "e4m3".
        progress: called with a label, pieces done, pieces in all.
        chunks: pieces of 2^23 patterns to do, 0..511; default all.
    """
    name = f"all float32 to {codec}, nvfp4ref against cuda-header"
    reason = _header_missing()
    if reason is not None:
        return Sweep(name, {}, reason=reason)
    start = time.monotonic()
    classes = {label: Count(0, 0) for label in _CLASSES}
    pieces = [(codec, chunk) for chunk in (range(_CHUNKS) if chunks is None else chunks)]
    for found in _each(_codec_chunk, pieces, codec, progress, processes):
        for label, one in found.items():
            classes[label] += one
    return Sweep(
        name, {label: one for label, one in classes.items() if one.compared}, time.monotonic() - start
    )


_CLASSES = [f"{sign}{kind}" for sign in "+-" for kind in ("zero", "subnormal", "normal", "inf", "nan")] + [
    "ties"
]


def _header_missing() -> str | None:
    from nvfp4hw.backends import load

    return load("cuda-header").availability()


def _codec_chunk(piece: tuple[str, int]) -> dict[str, Count]:
    """Counts by class of one piece of 2^23 patterns: one sign, one exponent."""
    from nvfp4hw.backends import cuda_header

    codec, chunk = piece
    if codec == "e2m1":
        theirs, midpoints = cuda_header.codes_of_range, E2M1_MIDPOINTS
    else:
        theirs, midpoints = cuda_header.bytes_of_range, E4M3_MIDPOINTS
    start = chunk * _CHUNK
    expected = theirs(start, _CHUNK)
    found = np.empty_like(expected)
    for low in range(0, _CHUNK, 1 << 18):  # pieces that stay in the cache
        patterns = np.arange(start + low, start + low + (1 << 18), dtype=np.int64).astype(np.uint32)
        values = patterns.view(np.float32)
        found[low : low + (1 << 18)] = nv.e2m1.encode(values) if codec == "e2m1" else nv.e4m3.encode(values)
    classes = _split(chunk, found, expected)
    ties = midpoints.view(np.uint32).astype(np.int64) | (chunk >> 8 << 31)
    here = ties[(ties >= start) & (ties < start + _CHUNK)] - start
    if here.size:
        classes["ties"] = _count_patterns(found[here], expected[here], here + start)
    return classes


def _split(chunk: int, found: Array, expected: Array) -> dict[str, Count]:
    """The counts of one sign and exponent by class; zero and Inf are the patterns with an empty mantissa."""
    sign, exponent = "+-"[chunk >> 8], chunk & 255
    first, rest = {0: ("zero", "subnormal"), 255: ("inf", "nan")}.get(exponent, ("normal", "normal"))
    patterns = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK, dtype=np.int64)
    if first == rest:
        return {sign + first: _count_patterns(found, expected, patterns)}
    return {
        sign + first: _count_patterns(found[:1], expected[:1], patterns[:1]),
        sign + rest: _count_patterns(found[1:], expected[1:], patterns[1:]),
    }


def _count_patterns(found: Array, expected: Array, patterns: Array) -> Count:
    """As ``count``, with the first difference given as its float32 bit pattern."""
    one = count(found, expected)
    if not one.different or one.first is None:
        return one
    return Count(one.compared, one.different, [int(patterns[one.first[0]])], one.found, one.expected)


# ---- every block of one tensor -----------------------------------------------------------------------------


def block_sweep(
    amaxes: Sequence[float] = TENSOR_AMAXES,
    arithmetic: str | nv.Arithmetic = "te",
    *,
    progress: Progress | None = None,
    processes: int = 2,
    step: int = 1,
) -> Sweep:
    """Every bfloat16 block amax times every bfloat16 element not above it: fast path against slow twin.

    Args:
        amaxes: tensor amaxes, each a sweep of its own.
        step: take every step-th block amax only.
    """
    start = time.monotonic()
    resolved = nv.arithmetic(arithmetic)
    name = (
        f"every bfloat16 block amax and element, nvfp4ref against its scalar twin, arithmetic {resolved.name}"
    )
    classes: dict[str, Count] = {}
    pieces = [(amax, resolved, part, step) for amax in amaxes for part in range(_PARTS)]
    for (amax, *_), (scales, codes) in zip(
        pieces, _each(_block_part, pieces, "blocks", progress, processes), strict=True
    ):
        for label, one in ((f"amax {amax:.6g} scales", scales), (f"amax {amax:.6g} codes", codes)):
            classes[label] = classes.get(label, Count(0, 0)) + one
    return Sweep(name, classes, time.monotonic() - start)


_PARTS = 16  # pieces of one tensor amax; their block amaxes interleave, so that they take equally long
_BATCH = 1 << 20  # elements quantized in one call


def _block_part(piece: tuple[float, nv.Arithmetic, int, int]) -> tuple[Count, Count]:
    amax, arithmetic, part, step = piece
    slow = _SlowTwin(amax, arithmetic)
    scales, codes = Count(0, 0), Count(0, 0)
    batch: list[int] = []
    size = 0
    for a in range(part * step, _PATTERNS, _PARTS * step):
        batch.append(a)
        size += 2 * a
        if size >= _BATCH or a + _PARTS * step >= _PATTERNS:
            found_scales, found_codes = _hold(slow, batch)
            scales, codes = scales + found_scales, codes + found_codes
            batch, size = [], 0
    return scales, codes


def _hold(slow: _SlowTwin, amaxes: list[int]) -> tuple[Count, Count]:
    """Scales and codes of the blocks of some block amaxes, given as bfloat16 patterns."""
    blocks, expected_codes, expected_scales = [], [], []
    for a in amaxes:
        byte = slow.scale(a)
        blocks.append(_blocks_of(a))
        codes = slow.codes(byte)[blocks[-1] & 0x7FFF] | (blocks[-1] >> 15 << 3).astype(np.uint8)
        expected_codes.append(codes)
        expected_scales.append(np.full(len(codes), byte, np.uint8))
    x = np.concatenate(blocks).view(ml_dtypes.bfloat16)
    q = nv.quantize(x, amax=slow.amax, arithmetic=slow.arithmetic)
    return (
        count(q.scales[:, 0], np.concatenate(expected_scales)),
        count_codes(q.packed, nv.e2m1.pack(np.concatenate(expected_codes))),
    )


def _blocks_of(a: int) -> Array:
    """Blocks (n, 16) of bfloat16 patterns: the block amax, then every element of both signs not above it."""
    magnitudes = np.arange(a + 1, dtype=np.uint16)
    elements = np.concatenate([magnitudes, magnitudes | np.uint16(0x8000)])
    rows = -(-elements.size // 15)
    filled = np.zeros(rows * 15, np.uint16)
    filled[: elements.size] = elements
    return np.concatenate([np.full((rows, 1), a, np.uint16), filled.reshape(rows, 15)], axis=1)


class _SlowTwin:
    """The scalar implementation, asked once for each thing that it can say about one tensor amax."""

    def __init__(self, amax: float, arithmetic: nv.Arithmetic) -> None:
        self.amax, self.arithmetic = np.float32(amax), arithmetic
        self._s, self._d = scalar.global_scale(float(self.amax), arithmetic)
        self._codes: dict[int, Array] = {}
        self._encode: dict[int, float] = {}

    def scale(self, a: int) -> int:
        """Scale byte of a block amax, given as bfloat16 pattern."""
        magnitude = _bfloat16(a)
        value = scalar.block_scale(magnitude, self._s, self._d, self.arithmetic)
        byte = scalar.scale_byte(value, magnitude, self._s, self.arithmetic)
        if byte not in self._encode:
            self._encode[byte] = scalar.encode_scale(byte, value, self._s, self._d, self.arithmetic)
        return byte

    def codes(self, byte: int) -> Array:
        """Magnitude code of every bfloat16 magnitude under one scale byte."""
        if byte not in self._codes:
            codes = np.zeros(_PATTERNS, np.uint8)
            for code in range(1, 8):
                codes[self._threshold(byte, code) :] = code
            self._codes[byte] = codes
        return self._codes[byte]

    def _threshold(self, byte: int, code: int) -> int:
        """The smallest pattern whose code is at least ``code``: codes do not fall as patterns grow."""
        low, high = 0, _PATTERNS
        while low < high:
            middle = (low + high) // 2
            y = scalar.scale_element(_bfloat16(middle), self._encode[byte], self._s, self.arithmetic)
            if scalar.e2m1_encode(y, self.arithmetic) >= code:
                high = middle
            else:
                low = middle + 1
        return low


def _bfloat16(pattern: int) -> float:
    return float(np.uint32(pattern << 16).view(np.float32))

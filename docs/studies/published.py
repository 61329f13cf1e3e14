"""The published figures T1 to T22 again: published.json, published.md and its figures.

    python docs/studies/published.py [--quick] [--write]

Without --quick: five tensors of 4096x4096 for each row, about ten minutes on one core.  With it: two of 1024x1024,
some seconds, against tolerances that are wider in proportion; this is what the tests run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4ref import e2m1, e4m3
from nvfp4ref.study import schemes, statistics

import pages  # isort: skip

Array = np.ndarray[Any, Any]
F32 = np.float32
HEADROOM = schemes.HEADROOM
MSE, GAIN, BIAS = 3e-5, 2e-4, 0.08  # the tolerances that came with the targets, at 4096x4096


def dot(a: Array, b: Array) -> float:
    return float(np.einsum("i,i->", a.ravel(), b.ravel(), dtype=np.float64))


def mse(y: Array, x: Array) -> float:
    """Σ(y − x)²/Σx²."""
    error = y - x
    return dot(error, error) / dot(x, x)


def gain(y: Array, x: Array) -> float:
    """⟨y, x⟩/⟨x, x⟩."""
    return dot(y, x) / dot(x, x)


@dataclass
class Sample:
    """The tensors of one seed, (side, side) float32."""

    seed: int
    side: int

    def _of(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])

    @cached_property
    def normal(self) -> Array:
        return self._of(0).standard_normal((self.side, self.side), F32)

    @cached_property
    def laplace(self) -> Array:
        return self._of(1).laplace(size=(self.side, self.side)).astype(F32)

    @cached_property
    def uniform(self) -> Array:
        return self._of(2).uniform(-1, 1, (self.side, self.side)).astype(F32)

    @cached_property
    def t5(self) -> Array:
        return self._of(3).standard_t(5, (self.side, self.side)).astype(F32)

    @cached_property
    def squared_relu(self) -> Array:
        return np.square(np.maximum(self.normal, F32(0)))

    @property
    def small(self) -> Array:
        """Two million normal numbers at most, for what needs no more."""
        return self.normal[: max(1, 2**21 // self.side)]

    def words(self, number: int) -> nv.Philox:
        return nv.Philox(2024, 1024 * (1000 * self.seed + number))

    def uniforms(self, number: int) -> Array:
        return self._of(100 + number).random((self.side, self.side), F32)


def quantized(x: Array, **how: Any) -> Array:
    return nv.dequantize(nv.quantize(x, **how))


def stochastic(s: Sample, x: Array, **fields: Any) -> Array:
    """By the recipe's rule, from Philox words."""
    return quantized(x, rounding="stochastic", rbits=s.words(1), arithmetic=nv.arithmetic("te", **fields))


def four_over_six(rule: str, largest: int = 256) -> nv.Arithmetic:
    return nv.arithmetic("te", four_over_six=rule, e4m3_max=largest)


Values = Iterator[tuple[str, float]]


# -- the rows, by what they share ------------------------------------------------------------------------------------


def nearest(s: Sample) -> Values:
    x = s.normal
    for key, block in (("1x16", (1, 16)), ("16x16", (16, 16))):
        q = nv.quantize(x, block=block)
        y = nv.dequantize(q)
        yield f"rtn {key}", mse(y, x)
        yield f"rtn {key} gain", gain(y, x)
        yield f"rtn {key} shrinkage", float(np.abs(y).sum(dtype=np.float64) / np.abs(x).sum(dtype=np.float64))
        yield f"rtn {key} underflow %", 100 * float(np.mean((q.codes & 7) == 0))
    for block, key in (((1, 16), "1x16"), ((16, 16), "16x16")):
        q = nv.quantize(x, block=block, arithmetic=four_over_six("MSE"))
        yield f"4/6 {key}", mse(nv.dequantize(q), x)
        yield f"4/6 {key} map-4 %", 100 * _mapped_to_4(x, q, block, "MSE")
    for rule, largest in (("MAE", 256), ("MAE", 448), ("MSE", 448)):
        q = nv.quantize(x, arithmetic=four_over_six(rule, largest))
        yield f"4/6 {rule} {largest}", mse(nv.dequantize(q), x)
        if (rule, largest) == ("MAE", 256):
            yield "4/6 MAE 256 map-4 %", 100 * _mapped_to_4(x, q, (1, 16), rule)


def _mapped_to_4(x: Array, q: nv.NVFP4Tensor, block: tuple[int, int], rule: str) -> float:
    part = x[:1024]
    steps = nv.quantize(part, block=block, amax=q.amax, arithmetic=four_over_six(rule)).steps
    assert steps.err4 is not None and steps.err6 is not None
    return float(np.mean(steps.err4 < steps.err6))


def random(s: Sample) -> Values:
    x = s.normal
    y = stochastic(s, x, headroom=HEADROOM)
    yield "sr 16/17", mse(y, x)
    yield "sr 16/17 gain", gain(y, x)
    y = stochastic(s, x)
    yield "sr te", mse(y, x)
    yield "sr te gain", gain(y, x)
    steps = nv.quantize(x[:1024], amax=np.abs(x).max()).steps
    scaled, scale = np.abs(steps.scaled), steps.encode_scale.repeat(16, axis=1)
    lost = (scaled - np.minimum(scaled, F32(6))) / scale
    yield "sr te clipped %", 100 * float(np.mean(scaled > 6))
    yield "sr te largest", float(scaled.max())
    yield "sr te bias", dot(lost, lost) / dot(x[:1024], x[:1024])
    six, four = schemes.words(10 + s.seed, x.size // 4), schemes.words(90 + s.seed, x.size // 4)
    for key, coins in (("", four), (" one coin", six)):
        y = schemes.stochastic_four_over_six(x, coins, six)
        yield f"sr 4/6{key}", mse(y, x)
        yield f"sr 4/6{key} gain", gain(y, x)
    y = quantized(x, rounding="stochastic", rbits=s.uniforms(0), arithmetic=nv.arithmetic("te", stochastic="te-jax"))
    yield "sr te-jax", mse(y, x)
    for group in (16, 128):
        y = schemes.ms_eden(x, s.seed, group=group)
        yield f"ms-eden {group}", mse(y, x)
        yield f"ms-eden {group} gain", gain(y, x)


def amax_elements(s: Sample) -> Values:
    """T11: what becomes of the largest element of each block."""
    x = s.normal
    q = nv.quantize(x)
    blocks, y = x.reshape(-1, 16), nv.dequantize(q).reshape(-1, 16)
    largest = np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)
    error = np.abs(y[largest] / blocks[largest] - 1).astype(np.float64)
    yield "six %", 100 * float(np.mean((q.codes & 7) == 7))
    yield "amax error mean %", 100 * float(error.mean())
    yield "amax error rms %", 100 * math.sqrt(float(np.square(error).mean()))
    yield "amax error max %", 100 * float(error.max())
    gap = y[largest] - blocks[largest]
    yield "amax share of error %", 100 * dot(gap, gap) / dot(y - blocks, y - blocks)


def distributions(s: Sample) -> Values:
    for name, x in (("laplace", s.laplace), ("uniform", s.uniform), ("t5", s.t5)):
        q = nv.quantize(x)
        y = nv.dequantize(q)
        yield f"{name} 1x16", mse(y, x)
        if name == "uniform":
            yield "uniform 1x16 gain", gain(y, x)
        if name == "laplace":
            yield "laplace 1x16 underflow %", 100 * float(np.mean((q.codes & 7) == 0))
        q = nv.quantize(x, block=(16, 16))
        yield f"{name} 16x16", mse(nv.dequantize(q), x)
        if name == "laplace":
            yield "laplace 16x16 underflow %", 100 * float(np.mean((q.codes & 7) == 0))
        yield f"{name} sr", mse(stochastic(s, x), x)
    x = s.squared_relu
    q = nv.quantize(x)
    yield "squared relu 1x16", mse(nv.dequantize(q), x)
    yield "squared relu underflow %", 100 * float(np.mean((x != 0) & ((q.codes & 7) == 0)))


def mxfp4(s: Sample) -> Values:
    for name, x in (("normal", s.normal), ("laplace", s.laplace), ("t5", s.t5), ("squared relu", s.squared_relu)):
        for rule in ("floor", "ceil"):
            yield f"mxfp4 {rule} {name}", mse(nv.mxfp4.quantize(x, scale=rule).dequantize(), x)
        if name in ("normal", "laplace"):
            yield f"mxfp4 oas {name}", mse(schemes.mxfp4_overflow_aware(x), x)
    x = s.normal
    yield "mxfp4 ceil sr", mse(nv.mxfp4.quantize(x, scale="ceil", uniforms=s.uniforms(1)).dequantize(), x)


def grids(s: Sample) -> Values:
    """T14, T15, T17, T19, T21."""
    x = s.small
    for size in (4, 8, 16, 32, 64):
        yield f"two levels B={size}", mse(schemes.blocks_of(x, size, tensor_scale=True), x)
        for sigma in (0.02, 0.01):
            narrow = x * F32(sigma)
            yield f"one level e4m3 {sigma:g} B={size}", mse(schemes.blocks_of(narrow, size), narrow)
        narrow = x * F32(0.02)
        yield f"one level ue5m3 0.02 B={size}", mse(schemes.blocks_of(narrow, size, "ue5m3"), narrow)
    narrow = x * F32(1e-3)
    yield "one level e4m3 0.001 B=16", mse(schemes.blocks_of(narrow, 16), narrow)
    for name, values in (("normal", s.normal), ("laplace", s.laplace)):
        y = schemes.int4(values)
        yield f"int4 {name}", mse(y, values)
        if name == "normal":
            yield "int4 gain", gain(y, values)
    yield "exact scale", mse(schemes.blocks_of(s.normal, 16, "exact"), s.normal)
    yield "scale up", mse(quantized(s.normal, arithmetic=nv.arithmetic("te", scale_rounding="up")), s.normal)
    yield "map to 4", mse(_all_to_4(s.normal), s.normal)
    yield "scale only", _scale_only(s.normal)
    for tile in ((1, 128), (128, 128)):
        yield f"fp8 {tile[0]}x128", mse(nv.fp8.quantize(s.normal, tile=tile).dequantize(), s.normal)


def _all_to_4(x: Array) -> Array:
    """Every block with 4over6's candidate that maps its amax to 4."""
    blocks = x.reshape(-1, 16)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    unit = amax.max() / F32(6 * 256)
    scale = e4m3.VALUES[e4m3.encode(amax / F32(4) / unit)] * unit
    return (e2m1.VALUES[e2m1.encode(blocks / scale)] * scale).reshape(x.shape)


def _scale_only(x: Array) -> float:
    """Σx²(rounded/unrounded scale − 1)²/Σx²."""
    amax = np.abs(x.reshape(-1, 16)).max(axis=1).astype(np.float64)
    wanted = amax / 6 * (2688 / amax.max())
    ratio = e4m3.VALUES[e4m3.encode(wanted.astype(F32))] / wanted - 1
    energy = np.square(x.reshape(-1, 16), dtype=np.float64).sum(axis=1)
    return float((energy * ratio * ratio).sum() / energy.sum())


def directions(s: Sample) -> Values:
    """T18."""
    x = s.normal
    for key, block in (("1x16", (1, 16)), ("16x16", (16, 16))):
        rows, columns = quantized(x, block=block), quantized(x, block=block, axis=0).T
        gap = rows - columns
        yield f"rows against columns {key}", dot(gap, gap) / dot(x, x)
        yield f"rows against columns {key} differ %", 100 * float(np.mean(gap != 0))


def draws(s: Sample) -> Values:
    """T22: the mean of B draws."""
    x = s.normal[: max(1, 2**19 // s.side)]
    for key, headroom, wanted in (("te", 1.0, (1, 4, 16, 64, 256)), ("16/17", HEADROOM, (256,))):
        ar = nv.arithmetic("te", headroom=headroom)
        total = np.zeros(x.shape)
        for draw in range(256):
            total += quantized(x, rounding="stochastic", rbits=s.words(10 + draw), arithmetic=ar)
            if draw + 1 in wanted:
                yield f"mean of {draw + 1} {key}", mse((total / (draw + 1)).astype(F32), x)


def transforms(s: Sample) -> Values:
    """What a Hadamard transform does to heavy tails, and to one outlier in 16."""
    rng = np.random.default_rng([s.seed, 50])
    shape = (s.small.shape[0], s.small.shape[1])
    spikes = rng.standard_normal(shape).astype(F32)
    spikes[:, ::16] *= 30
    for name, x in (("t3", rng.standard_t(3, shape).astype(F32)), ("outlier", spikes)):
        for size in (1, 4, 16, 128):
            if name == "outlier" and size in (4, 128):
                continue
            signs = np.where(rng.random(size) < 0.5, F32(-1), F32(1))
            y = (x.reshape(-1, size) @ (signs[:, None] * schemes.hadamard(size))).reshape(shape) if size > 1 else x
            q = nv.quantize(y)
            yield f"{name} d={size} nvfp4", mse(nv.dequantize(q), y)
            yield f"{name} d={size} mxfp4", mse(nv.mxfp4.quantize(y, scale="ceil").dequantize(), y)
            moments = statistics.Moments()
            moments.count(y)
            yield f"{name} d={size} kurtosis", moments.kurtosis
            if name == "outlier":
                yield f"outlier d={size} zeros %", 100 * float(np.mean((q.codes & 7) == 0))


GROUPS: tuple[Callable[[Sample], Values], ...] = (
    nearest,
    random,
    amax_elements,
    distributions,
    mxfp4,
    grids,
    directions,
    draws,
    transforms,
)


@dataclass(frozen=True)
class Target:
    """One figure.  given: what a paper has, "" when it has none; expected: the figure that was on file before.

    tolerance: absolute; None: three standard deviations of the mean over seeds, and the last digit of ``expected``.
    """

    id: str
    what: str
    key: str
    expected: float
    digit: float
    tolerance: float | None = None
    given: str = ""
    source: str = ""

    @property
    def by_amax(self) -> bool:
        """Whether it moves with where the tensor's amax falls between powers of two, and so with the tensor's size."""
        return self.key.startswith("amax ") or self.key == "scale only"


#: figures that were on file and are not right -> what ours must be instead, and why
CORRECTED = {
    "mean of 1 te": (18.88e-3, 5e-5, "One draw is T6: 18.88e-3. 18.7e-3 was the scatter of one small tensor."),
    "mean of 4 te": (
        4.797e-3,
        5e-5,
        "The mean of B draws has the error b + (v − b)/B, with v of one draw and b the bias. From T6, v = 18.88e-3 and "
        "b = 1.02e-4, so 4 draws have 4.80e-3; the same formula gives the other figures of the row (1.28e-3, 3.95e-4, "
        "1.75e-4). 4.85e-3 was the scatter of one sample.",
    ),
}

QII, PAPER = "arXiv 2601.22813, table 1", "arXiv 2509.25149"
E3, E4, E5 = 1e-3, 1e-4, 1e-5


def _t(id_: str, what: str, key: str, expected: float, digit: float, *rest: Any) -> Target:
    return Target(id_, what, key, expected, digit, *rest)


TARGETS: tuple[Target, ...] = (
    _t("T1", "nearest, 1x16", "rtn 1x16", 9.051e-3, 1e-6, MSE, "9.0e-3", QII),
    _t("T2", "nearest, 16x16", "rtn 16x16", 12.39e-3, E5, MSE, "12.4e-3", QII),
    _t("T3", "4over6 (MSE, 256), 1x16", "4/6 1x16", 7.561e-3, 1e-6, MSE, "7.6e-3", QII),
    _t("T3", "blocks mapped to 4 (%)", "4/6 1x16 map-4 %", 45.3, 0.1),
    _t("T4", "4over6 (MSE, 256), 16x16", "4/6 16x16", 12.38e-3, E5, MSE, "12.4e-3", QII),
    _t("T4", "blocks mapped to 4 (%)", "4/6 16x16 map-4 %", 3.0, 0.1),
    _t("T5", "SR with 16/17", "sr 16/17", 23.54e-3, E5, MSE, "23.5e-3", QII),
    _t("T5", "gain", "sr 16/17 gain", 1.0, E4, GAIN),
    _t("T6", "SR, Transformer Engine's recipe", "sr te", 18.88e-3, E5, MSE),
    _t("T6", "gain", "sr te gain", 0.99653, E5, GAIN),
    _t("T6", "clipped (%)", "sr te clipped %", 3.45, 0.01),
    _t("T6", "largest scaled element", "sr te largest", 6.375, E3),
    _t("T6", "power of the bias", "sr te bias", 1.02e-4, 1e-6, BIAS * 1.02e-4),
    _t("T7", "SR + 4over6, a coin for each candidate", "sr 4/6", 17.49e-3, E5, MSE, "17.5e-3", QII),
    _t("T7", "gain", "sr 4/6 gain", 1.0074, E4, GAIN),
    _t("T7", "one coin for both", "sr 4/6 one coin", 18.53e-3, E5, MSE),
    _t("T7", "gain", "sr 4/6 one coin gain", 1.0015, E4, GAIN),
    _t("T8", "MS-EDEN, correction of 16", "ms-eden 16", 9.33e-3, E5, MSE, "9.4e-3", QII),
    _t("T8", "gain", "ms-eden 16 gain", 1.00001, E5, GAIN),
    _t("T8", "correction of 128", "ms-eden 128", 9.74e-3, E5, MSE),
    _t("T9", "SR over nearest", "sr/rtn", 2.60, 0.01, None, "≈2.5", "arXiv 2601.22813, text"),
    _t("T9", "SR over MS-EDEN", "sr/ms-eden", 2.52, 0.01, None, ">2", "arXiv 2601.22813, text"),
    _t("T10", "4over6 MAE 256", "4/6 MAE 256", 7.794e-3, 1e-6, MSE),
    _t("T10", "blocks mapped to 4 (%)", "4/6 MAE 256 map-4 %", 33.9, 0.1),
    _t("T10", "4over6 MAE 448", "4/6 MAE 448", 7.793e-3, 1e-6, MSE),
    _t("T10", "4over6 MSE 448", "4/6 MSE 448", 7.561e-3, 1e-6, MSE),
    _t("T11", "elements with code ±6 (%)", "six %", 11.20, 0.01, None, "≥ 6.25", f"{PAPER}, section 2"),
    _t("T11", "error of a block's amax, mean (%)", "amax error mean %", 2.29, 0.01),
    _t("T11", "rms (%)", "amax error rms %", 2.69, 0.01),
    _t("T11", "largest (%)", "amax error max %", 100 / 17, E3),
    _t("T11", "its share of the squared error (%)", "amax share of error %", 2.16, 0.01),
    _t("T12", "underflow, 1x16, normal (%)", "rtn 1x16 underflow %", 6.80, 0.01),
    _t("T12", "16x16, normal (%)", "rtn 16x16 underflow %", 10.08, 0.01),
    _t("T12", "1x16, Laplace (%)", "laplace 1x16 underflow %", 12.79, 0.01),
    _t("T12", "16x16, Laplace (%)", "laplace 16x16 underflow %", 22.40, 0.01),
    _t("T12", "1x16, squared ReLU (%)", "squared relu underflow %", 13.76, 0.01),
    _t("T13", "NVFP4, Laplace", "laplace 1x16", 8.59e-3, E5, MSE, "below normal's", "arXiv 2509.23202, claim 1"),
    _t("T13", "MXFP4 floor, Laplace", "mxfp4 floor laplace", 16.06e-3, E5, MSE, "above normal's", "the same"),
    _t("T13", "NVFP4, Student's t, 5", "t5 1x16", 8.53e-3, E5),
    _t("T13", "MXFP4 floor, t5", "mxfp4 floor t5", 15.92e-3, E5),
    *(
        _t("T14", f"one level, E4M3, σ 0.02, B={b}", f"one level e4m3 0.02 B={b}", v, E5)
        for b, v in ((4, 0.01138), (8, 0.01052), (16, 0.01063), (32, 0.01108))
    ),
    *(
        _t("T14", f"one level, UE5M3, σ 0.02, B={b}", f"one level ue5m3 0.02 B={b}", v, E5)
        for b, v in ((4, 0.00514), (8, 0.00729), (16, 0.00903), (32, 0.01032))
    ),
    *(
        _t("T14", f"one level, E4M3, σ 0.01, B={b}", f"one level e4m3 0.01 B={b}", v, E4)
        for b, v in ((4, 0.0258), (8, 0.0192), (16, 0.0158), (32, 0.0133))
    ),
    _t("T14", "one level, E4M3, σ 0.001, B=16: all zero", "one level e4m3 0.001 B=16", 1.0, E3),
    *(
        _t("T14", f"two levels, B={b}", f"two levels B={b}", v, E5)
        for b, v in ((4, 0.00514), (8, 0.00729), (16, 0.00903), (32, 0.01032), (64, 0.01123))
    ),
    _t("T15", "gain of nearest, 1x16", "rtn 1x16 gain", 0.9955, E4, GAIN, "shrinks", "arXiv 2606.20381"),
    _t("T15", "16x16", "rtn 16x16 gain", 0.9908, E4, GAIN),
    _t("T15", "Σabs(y)/Σabs(x), 1x16", "rtn 1x16 shrinkage", 0.9927, E4, GAIN),
    _t("T15", "gain of INT4", "int4 gain", 1.0002, E4, GAIN, "does not shrink", "arXiv 2606.20381"),
    _t("T15", "INT4, normal", "int4 normal", 7.45e-3, E5, MSE),
    _t("T15", "INT4, Laplace", "int4 laplace", 10.55e-3, E5, MSE),
    _t("T16", "MXFP4 floor", "mxfp4 floor normal", 13.22e-3, E5, MSE),
    _t("T16", "MXFP4 ceil", "mxfp4 ceil normal", 13.32e-3, E5, MSE),
    _t("T16", "MXFP4 as qwix has it", "mxfp4 oas normal", 12.51e-3, E5, MSE),
    _t("T16", "MXFP4 ceil, SR", "mxfp4 ceil sr", 27.1e-3, E4, MSE),
    _t("T16", "ceil, Laplace", "mxfp4 ceil laplace", 17.46e-3, E5, MSE),
    _t("T16", "qwix, Laplace", "mxfp4 oas laplace", 15.35e-3, E5, MSE),
    _t("T16", "ceil, squared ReLU", "mxfp4 ceil squared relu", 16.3e-3, E4, MSE),
    _t("T16", "NVFP4, squared ReLU", "squared relu 1x16", 5.6e-3, E4, MSE),
    _t("T17", "block scales not rounded", "exact scale", 8.868e-3, 1e-6, MSE),
    _t("T17", "error of the scale alone", "scale only", 7.05e-4, 1e-6),
    _t("T17", "block scales rounded up", "scale up", 10.08e-3, E5, MSE),
    _t("T17", "every block mapped to 4", "map to 4", 9.66e-3, E5, MSE),
    _t("T18", "rows against columns, 1x16", "rows against columns 1x16", 0.0170, E4),
    _t("T18", "elements that differ (%)", "rows against columns 1x16 differ %", 77.4, 0.1),
    _t("T18", "rows against columns, 16x16", "rows against columns 16x16", 0.0, 0.0, 0.0),
    _t("T19", "best 16 levels for normal numbers", "lloyd-max 16", 9.501e-3, 1e-6, 5e-7, "", "Lloyd, Max"),
    _t("T19", "best 15 levels", "lloyd-max 15", 10.74e-3, E5, 5e-6, "", "Lloyd, Max"),
    _t("T20", "SR without 1.5 (te-jax)", "sr te-jax", 22.77e-3, E5, MSE),
    _t("T21", "FP8, 1x128", "fp8 1x128", 6.61e-4, 1e-6, MSE),
    _t("T21", "FP8, 128x128", "fp8 128x128", 7.00e-4, 1e-6, MSE),
    *(
        _t("T22", f"mean of {b}, Transformer Engine's recipe", f"mean of {b} te", v, d, t)
        for b, v, d, t in (
            (1, 0.0187, E4, None),
            (4, 0.00485, E5, None),
            (16, 0.00128, E5, None),
            (64, 4.0e-4, 1e-5, BIAS * 1e-4),
            (256, 1.8e-4, 1e-5, BIAS * 1e-4),
        )
    ),
    _t("T22", "mean of 256, 16/17", "mean of 256 16/17", 9.2e-5, 1e-6),
    *(
        _t("others", f"{name}: {what}", f"{name.lower()} {key}", v, E5)
        for name, row in (
            ("Laplace", ((8.59e-3, "1x16"), (16.76e-3, "16x16"), (18.26e-3, "sr"))),
            ("Uniform", ((10.33e-3, "1x16"), (12.15e-3, "16x16"), (21.03e-3, "sr"))),
            ("t5", ((8.53e-3, "1x16"), (18.62e-3, "16x16"), (18.10e-3, "sr"))),
        )
        for v, key in row
        for what in ({"1x16": "nearest, 1x16", "16x16": "nearest, 16x16", "sr": "SR, 1x16"}[key],)
    ),
    _t("others", "Uniform: gain", "uniform 1x16 gain", 1.005, E3),
    *(
        _t("RHT", f"t3, d={d}: {what}", f"t3 d={d} {key}", v, digit)
        for d, row in (
            (1, (0.00820, 0.0227, 255)),
            (4, (0.00925, 0.0155, 66)),
            (16, (0.00965, 0.0133, 19)),
            (128, (0.00933, 0.0133, 4.9)),
        )
        for v, key, what, digit in zip(
            row, ("nvfp4", "mxfp4", "kurtosis"), ("NVFP4", "MXFP4 ceil", "kurtosis"), (E5, E4, 0.1), strict=True
        )
    ),
    *(
        _t("RHT", f"one of 16 thirty times as large, d={d}: {what}", f"outlier d={d} {key}", v, digit)
        for d, row in ((1, (0.0064, 0.0222, 46, 53.6)), (16, (0.0134, 0.0112, 3.0, 1.1)))
        for v, key, what, digit in zip(
            row,
            ("nvfp4", "mxfp4", "kurtosis", "zeros %"),
            ("NVFP4", "MXFP4 ceil", "kurtosis", "zeros (%)"),
            (E4, E4, 1.0 if d == 1 else 0.1, 0.1),
            strict=True,
        )
    ),
)


# -- running ---------------------------------------------------------------------------------------------------------


def values_of(sample: Sample) -> dict[str, float]:
    """Every figure of one seed."""
    found = {key: value for group in GROUPS for key, value in group(sample)}
    found["sr/rtn"] = found["sr 16/17"] / found["rtn 1x16"]
    found["sr/ms-eden"] = found["sr 16/17"] / found["ms-eden 16"]
    for levels in (15, 16):
        found[f"lloyd-max {levels}"] = schemes.lloyd_max(levels)[1]
    return found


def reproduce(side: int, seeds: int) -> dict[str, Any]:
    """Mean, standard deviation over seeds, and number of seeds of every figure."""
    rows = []
    for seed in range(seeds):
        print(f"seed {seed} of {seeds}, {side}x{side}", file=sys.stderr)
        rows.append(values_of(Sample(seed, side)))
    values = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        "side": side,
        "seeds": seeds,
        "values": {
            key: {"mean": float(np.mean(v)), "sd": float(np.std(v, ddof=1))} for key, v in sorted(values.items())
        },
    }


def expected(target: Target) -> float:
    """What ours must be: what was on file, or what is right instead."""
    return CORRECTED[target.key][0] if target.key in CORRECTED else target.expected


def tolerance(target: Target, found: dict[str, Any]) -> float:
    """How far the mean may be from what is expected."""
    sd, small = found["values"][target.key]["sd"], found["side"] < 4096
    if target.key in CORRECTED:
        most = CORRECTED[target.key][1]
    elif target.tolerance is not None:
        most = target.tolerance + target.digit / 2
    else:
        most = 3 * sd + target.digit / 2
    if small:  # the tolerances are those of 4096x4096; smaller tensors scatter more, and have a smaller amax
        share = 0.08 * target.by_amax + 0.004 * (target.tolerance is None)
        most += 4 * sd + share * abs(expected(target))
    return most


def misses(found: dict[str, Any]) -> list[tuple[Target, float, float]]:
    """(target, our value, tolerance) of the targets that are not met."""
    missed = []
    for target in TARGETS:
        ours, most = found["values"][target.key]["mean"], tolerance(target, found)
        if not abs(ours - expected(target)) <= most:
            missed.append((target, ours, most))
    return missed


# -- the page --------------------------------------------------------------------------------------------------------


def number(value: float, digit: float) -> str:
    """A value with one digit more than the one it is compared with."""
    places = max(0, 1 - math.floor(math.log10(digit))) if digit else 0
    if 0 < abs(value) < 1e-3:
        return f"{value:.3e}"
    return f"{value:.{places}f}"


def numbers(found: dict[str, Any]) -> str:
    """The page's table."""
    rows = []
    for target in TARGETS:
        one = found["values"][target.key]
        verdict = "met" if target.key not in CORRECTED else "**not right**"
        given = f"{target.given} ({target.source})" if target.given else target.source
        ours, scatter = number(one["mean"], target.digit or 1.0), f"{one['sd']:.1e}" if one["sd"] else "0"
        on_file = f"{target.expected:.6g}"
        most = f"{tolerance(target, found):.1e}" if tolerance(target, found) else "0"
        rows.append((target.id, target.what, given, on_file, ours, scatter, most, verdict))
    head = ("", "figure", "published", "on file", "here", "sd over tensors", "tolerance", "")
    return pages.table(head, rows)


def draw_schemes(found: dict[str, Any]) -> Any:
    """The error of every scheme on normal numbers, as published and as here."""
    from nvfp4ref.study import figures

    rows = (
        ("4over6 (MSE), 1x16", "4/6 1x16", 7.6),
        ("nearest, 1x16", "rtn 1x16", 9.0),
        ("MS-EDEN", "ms-eden 16", 9.4),
        ("best 16 fixed levels", "lloyd-max 16", None),
        ("4over6 (MSE), 16x16", "4/6 16x16", 12.4),
        ("nearest, 16x16", "rtn 16x16", 12.4),
        ("MXFP4, OCP scale", "mxfp4 floor normal", None),
        ("SR + 4over6", "sr 4/6", 17.5),
        ("SR, Transformer Engine", "sr te", None),
        ("SR, pure JAX (no 1.5)", "sr te-jax", None),
        ("SR with 16/17", "sr 16/17", 23.5),
        ("MXFP4 ceil, SR", "mxfp4 ceil sr", None),
    )
    figure, axes = figures.new(8, 4.2)
    values = [1000 * found["values"][key]["mean"] for _, key, _ in rows]
    axes.barh(range(len(rows)), values, height=0.65, label="here", **figures.bar(1))
    there = [(i, given) for i, (_, _, given) in enumerate(rows) if given is not None]
    axes.plot(
        [v for _, v in there], [i for i, _ in there], "D", color="black", mfc="white", label="Quartet II, table 1"
    )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("relative error power on N(0, 1) (10⁻³)")
    figures.legend_below(figure, axes)
    return figure


def draw_sizes(found: dict[str, Any]) -> Any:
    """T14: error against block size."""
    from nvfp4ref.study import figures

    figure, axes = figures.new(8, 3.8)
    values, sizes = found["values"], (4, 8, 16, 32, 64)
    for i, (label, key) in enumerate(
        (
            ("one level, E4M3, σ = 0.02", "one level e4m3 0.02"),
            ("one level, E4M3, σ = 0.01", "one level e4m3 0.01"),
            ("one level, UE5M3, σ = 0.02", "one level ue5m3 0.02"),
            ("with a tensor scale (NVFP4)", "two levels"),
        )
    ):
        axes.plot(sizes, [1000 * values[f"{key} B={b}"]["mean"] for b in sizes], label=label, **figures.line(i, 1))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(b) for b in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size (elements)")
    axes.set_ylabel("relative error power (10⁻³)")
    figures.legend_below(figure, axes, 2)
    return figure


def draw_draws(found: dict[str, Any]) -> Any:
    """T22: the mean of B draws."""
    from nvfp4ref.study import figures

    figure, axes = figures.new(7, 3.8)
    values, draws = found["values"], np.array((1, 4, 16, 64, 256))
    measured = [values[f"mean of {b} te"]["mean"] for b in draws]
    one, bias = values["sr te"]["mean"], values["sr te bias"]["mean"]
    axes.plot(draws, measured, label="Transformer Engine's recipe", **{**figures.line(1, 1), "linestyle": "none"})
    axes.plot(draws, bias + (one - bias) / draws, label="bias + (one draw − bias)/B", **figures.line(1))
    axes.plot(256, values["mean of 256 16/17"]["mean"], label="16/17", **{**figures.line(2, 1), "linestyle": "none"})
    axes.plot(draws, values["sr 16/17"]["mean"] / draws, label="one draw/B", **figures.line(2))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(draws, [str(b) for b in draws])
    axes.set_xlabel("draws B of which the mean is taken")
    axes.set_ylabel("relative error power of the mean (1)")
    figures.legend_below(figure, axes, 2)
    return figure


def phases() -> dict[str, list[float]]:
    """T17's error of the scale alone, and the whole error, against the tensor amax between two powers of two."""
    x = Sample(0, 1024).normal
    amax = np.exp2(2 + np.arange(33) / 32 + 0.0)
    energy = np.square(x.reshape(-1, 16), dtype=np.float64).sum(axis=1)
    a = np.abs(x.reshape(-1, 16)).max(axis=1).astype(np.float64)
    alone, whole = [], []
    for one in 8 * amax:  # above the tensor's own, so that nothing saturates
        wanted = a / 6 * (2688 / one)
        ratio = e4m3.VALUES[e4m3.encode(wanted.astype(F32))] / wanted - 1
        alone.append(float((energy * ratio * ratio).sum() / energy.sum()))
        whole.append(mse(quantized(x, amax=F32(one)), x))
    return {"octaves": (np.arange(33) / 32).tolist(), "scale only": alone, "all": whole}


def draw_phases(found: dict[str, Any]) -> Any:
    """What the place of the tensor amax between powers of two decides."""
    from nvfp4ref.study import figures

    figure, axes = figures.new(8, 3.2, ncols=2)
    for ax, key, what in zip(
        axes, ("scale only", "all"), ("error of the scale alone", "error, nearest, 1x16"), strict=True
    ):
        ax.plot(found["phases"]["octaves"], [1000 * v for v in found["phases"][key]], **figures.line(1))
        ax.set_xlabel("log2 of the tensor amax, fraction (octaves)")
        ax.set_ylabel(f"{what} (10⁻³)")
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="Published error figures, reproduced.")
    parser.add_argument("--quick", action="store_true", help="two tensors of 1024x1024")
    parser.add_argument("--write", action="store_true", help="write the page's numbers and figures")
    parser.add_argument("--again", action="store_true", help="from published.json, computing nothing")
    options = parser.parse_args()
    if options.again:
        found = pages.load("published.json")
    else:
        found = reproduce(1024, 2) if options.quick else reproduce(4096, 5)
    missed = misses(found)
    for target, ours, most in missed:
        print(f"{target.id} {target.what}: {ours:.6g}, expected {expected(target):.6g} ± {most:.1g}", file=sys.stderr)
    if options.write:
        found["phases"] = phases()
        pages.save("published.json", found)
        pages.fill("published.md", {"numbers": numbers(found)})
        for name, work in (
            ("schemes", draw_schemes),
            ("sizes", draw_sizes),
            ("draws", draw_draws),
            ("phases", draw_phases),
        ):
            pages.draw(name, lambda work=work: work(found))
    else:
        print(numbers(found))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

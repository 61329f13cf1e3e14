"""Probes of stochastic conversion: every float32 with 66 random words, and the threshold of every random field."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4hw.probes.base import SHOWN, Array, Findings, Output, Probe, required
from nvfp4hw.probes.conversions import float32_facts, special
from nvfp4hw.probes.runs import Runs, compare, dense_runs, float_runs, read_runs, restored, stored
from nvfp4ref import e2m1, e4m3
from nvfp4ref.fp32 import reverse_halves

FIELDS = 1 << 16
WORDS = 66


def hashed(x: Array) -> Array:
    """The finaliser of MurmurHash3 on uint32, as the programs have it."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    out: Array = x ^ x >> np.uint32(16)
    return out


def words() -> Array:
    """The random words: none, all, every single bit, and 32 arbitrary ones."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    return np.concatenate([np.array([0, 0xFFFFFFFF], np.uint32), bits, hashed(np.arange(34, WORDS, dtype=np.uint32))])


# ---- the formats -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One stochastic rule of the oracle.

    Attributes:
        name: of its arrays; rule: its id; last, sign: of its codes.
    """

    name: str
    rule: str
    last: int
    sign: int

    def encode(self, x: Array, random: Array) -> Array:
        """The oracle's codes of x (n, 4) with one word a row."""
        with np.errstate(invalid="ignore"):
            if self.name == "e4m3":
                return e4m3.encode_stochastic(x, random)
            return e2m1.encode_stochastic(x, random, "sm100" if self.name == "e2m1" else "te-fallback")

    def fields(self, random: Array) -> Array:
        """The 16 random bits of each element, (n, 4)."""
        if self.name == "e2m1":
            return np.stack(e2m1.sm100_fields(random), axis=-1)
        mirrored, low, high = reverse_halves(random), np.uint32(0xFFFF), np.uint32(16)
        return np.stack([random & low, mirrored & low, random >> high, mirrored >> high], axis=-1)

    def words(self, first: Array, second: Array) -> Array:
        """The words whose elements 0 and 2 have these fields."""
        if self.name == "e4m3":
            return first | second << np.uint32(16)
        byte, eight = np.uint32(0xFF), np.uint32(8)
        low, high = first & byte | (first >> eight) << np.uint32(16), second & byte | (second >> eight) << np.uint32(16)
        return low | high << eight

    @property
    def values(self) -> Array:
        """Float32 values of the magnitude codes."""
        return (e4m3.VALUES if self.name == "e4m3" else e2m1.VALUES)[: self.last + 1]


E2M1 = Rule("e2m1", "SR-SM100", 7, 8)
E4M3 = Rule("e4m3", "SR-E4M3", 0x7E, 0x80)
FALLBACK = Rule("fallback", "SR-FALLBACK", 7, 8)


def encode_curves(rule: Rule, curve: Array, bits: Array) -> Array:
    """Codes of float32 patterns: curve 4·word + element."""
    rows = np.arange(len(bits))
    x = np.zeros((len(bits), 4), np.float32)
    x.view(np.uint32)[rows, curve % 4] = bits
    return rule.encode(x, words()[curve // 4])[rows, curve % 4]


@functools.cache
def expected_patterns(rule: Rule) -> Runs:
    """The oracle's runs over all float32, words and elements."""
    return float_runs(functools.partial(encode_curves, rule), 4 * WORDS, rule.last, rule.sign)


def threshold_arguments(rule: Rule, code: int, below: int) -> tuple[Array, Array]:
    """Float32 patterns (2^16, 4) where each field goes up from ``code``, or one ulp below; and the words (2^16,).

    value(code) + (value(code + 1) − value(code))·(2^16 − r)/2^16 is a float32: 16 bits under the leading ones.
    Odd codes are tried with negative numbers.
    """
    i = np.arange(FIELDS, dtype=np.uint32)
    random = rule.words(i, i[::-1].copy())
    part = (np.uint32(FIELDS) - rule.fields(random)).astype(np.float32) * np.float32(1 / FIELDS)
    value, gap = rule.values[code], rule.values[code + 1] - rule.values[code]
    bits = (value + gap * part).view(np.uint32) - np.uint32(below)
    return bits | np.uint32((code & 1) << 31), random


@functools.cache
def expected_thresholds(rule: Rule) -> Runs:
    """The oracle's runs over all fields: curve 2·(4·code + element) + below."""
    codes = np.empty((rule.last, 4, 2, FIELDS), np.uint8)
    for code in range(rule.last):
        for below in (0, 1):
            bits, random = threshold_arguments(rule, code, below)
            codes[code, :, below] = rule.encode(bits.view(np.float32), random).T
    return dense_runs(codes.reshape(-1, FIELDS))


# ---- the probes --------------------------------------------------------------------------------------------


def describe_pattern(curve: int, point: int) -> dict[str, Any]:
    """A counterexample of the sweep over float32."""
    return {"word": f"0x{int(words()[curve // 4]):08X}", "element": curve % 4, **float32_facts(point)}


def describe_threshold(rule: Rule, curve: int, point: int) -> dict[str, Any]:
    """A counterexample of the sweep over fields."""
    code, element, below = curve // 8, curve // 2 % 4, curve % 2
    bits, random = threshold_arguments(rule, code, below)
    field = int(rule.fields(random[point : point + 1])[0, element])
    return {
        "word": f"0x{int(random[point]):08X}",
        "element": element,
        **float32_facts(int(bits[point, element])),
        "field": f"0x{field:04X}",
        "at": "one ulp below the threshold" if below else "the threshold",
    }


class StochasticProbe(Probe):
    """Sweeps of stochastic rules; ``sweeps`` maps the name of a program's file to (rule, over what)."""

    sweeps: Mapping[str, tuple[Rule, str]]
    limit = 240.0

    def collect(self, output: Output) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for file, (rule, over) in self.sweeps.items():
            arrays |= stored(read_runs(output, file), f"{rule.name}_{over}")
        return arrays

    def examine(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Findings:
        kinds = {"curve": np.uint16, "start": np.uint32, "code": np.uint16}
        names = [f"{rule.name}_{over}" for rule, over in self.sweeps.values()]
        required(arrays, {f"{name}_{part}": (kind, None) for name in names for part, kind in kinds.items()})
        compared, different, first = 0, 0, []
        counts: dict[str, Any] = {}
        for name, (rule, over) in zip(names, self.sweeps.values(), strict=True):
            if over == "patterns":
                runs, expected = restored(arrays, name, 4 * WORDS), expected_patterns(rule)
                wrong, shown = compare(runs, expected, describe_pattern)
                counts[name] = {"runs": len(runs.start), "different": wrong, "special": special(runs)}
            else:
                runs = restored(arrays, name, 8 * rule.last, 0, FIELDS)
                wrong, shown = compare(runs, expected_thresholds(rule), functools.partial(describe_threshold, rule))
                counts[name] = {"runs": len(runs.start), "different": wrong}
            compared += runs.curves * runs.count
            different += wrong
            first += [{"sweep": name, **one} for one in shown]
        return Findings(compared, different, first[:SHOWN], {"words": WORDS, "sweeps": counts})


class RsE2m1(StochasticProbe):
    name = "rs-e2m1"
    rules = ("SR-SM100",)
    what = (
        "Does cvt.rs.satfinite.e2m1x4.f32 follow SR-SM100 for all 2^32 float32 in each of four positions with 66 "
        "random words, and at the threshold of each of the 2^16 random fields?"
    )
    architectures = ("sm_100a", "sm_103a")
    source = "rs_e2m1.cu"
    instruction = r"F2FP\.SATFINITE\.E2M1\.F32\.PACK_AB_MERGE_C\.RS "
    sweeps = {"runs.bin": (E2M1, "patterns"), "thresholds.bin": (E2M1, "thresholds")}


class RsE4m3(StochasticProbe):
    name = "rs-e4m3"
    rules = ("SR-E4M3",)
    what = (
        "Does cvt.rs.satfinite.e4m3x4.f32 follow SR-E4M3 for all 2^32 float32 in each of four positions with 66 "
        "random words, and at the threshold of each of the 2^16 random fields?"
    )
    architectures = ("sm_100a", "sm_103a")
    source = "rs_e4m3.cu"
    instruction = r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB_MERGE_C\.RS "
    sweeps = {"runs.bin": (E4M3, "patterns"), "thresholds.bin": (E4M3, "thresholds")}


class RsModel(StochasticProbe):
    name = "rs-model"
    rules = ("SR-SM100", "SR-E4M3", "SR-FALLBACK")
    what = (
        "Do the stochastic rules in software give the same codes on this GPU as the oracle on a CPU, for all 2^32 "
        "float32 with 66 random words and at every threshold?"
    )
    architectures = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
    source = "rs_model.cu"
    instruction = r"(LOP3|SHF)\."  # integers: there is no conversion instruction to find
    sweeps = {
        "e2m1.bin": (E2M1, "patterns"),
        "e2m1-thresholds.bin": (E2M1, "thresholds"),
        "e4m3.bin": (E4M3, "patterns"),
        "e4m3-thresholds.bin": (E4M3, "thresholds"),
        "fallback.bin": (FALLBACK, "patterns"),
    }

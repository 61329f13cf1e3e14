"""Stochastic rounding: the rules against exact twins, recorded codes, the real JAX package; what is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from inputs import Array, around, bfloat16, decades, every_class, random, same_bits
from test_spec_examples import run

import nvfp4ref as nv
from conformance import sweep_stochastic
from nvfp4ref import e2m1, e4m3

VECTORS = Path(__file__).parent.parent / "vectors"
needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason="the recordings are only in the repository")

GRID = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3_GRID = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


# ---- the rules in exact arithmetic --------------------------------------------------------------------------

#: bit of the word, most significant first, of the 16 that elements 0, 1, 2, 3 see: the published table, whose
#: operands f, e, b, a are elements 0, 1, 2, 3
E2M1_BITS = [
    [*range(23, 15, -1), *range(7, -1, -1)],
    [*range(8), *range(16, 24)],
    [*range(31, 23, -1), *range(15, 7, -1)],
    [*range(8, 16), *range(24, 32)],
]
E4M3_BITS = [list(range(15, -1, -1)), list(range(16)), list(range(31, 15, -1)), list(range(16, 32))]


def field(word: int, bits: list[int]) -> int:
    return int("".join(str(word >> bit & 1) for bit in bits), 2)


def between(x: Fraction, grid: list[Fraction]) -> tuple[int, Fraction]:
    """(k, f): x lies the fraction f of the way from value k to value k + 1."""
    k = max(i for i, value in enumerate(grid) if value <= x)
    return (k, Fraction(0)) if k == len(grid) - 1 else (k, (x - grid[k]) / (grid[k + 1] - grid[k]))


def carry(x: float, r: int, grid: list[Fraction]) -> int:
    """SR-SM100, SR-E4M3: index of the value, of a finite magnitude."""
    k, f = between(Fraction(x), grid)
    return k + (int(f * 2**16) + r >= 2**16)


def to_float32(x: Fraction) -> Fraction:
    """Nearest float32, ties to even, of a number in its normal range."""
    exponent = 0
    while x / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while x / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    units = x / Fraction(2) ** exponent
    return round(units) * Fraction(2) ** exponent


def fused_add(x: float, byte: int) -> int:
    """SR-FALLBACK: t = fma(byte/256, step(x), x), cut to the grid of its own step, at most 6."""

    def step(v: Fraction) -> Fraction:
        return Fraction(1, 2) if v < 2 else Fraction(1) if v < 4 else Fraction(2)

    exact = Fraction(x) + Fraction(byte, 256) * step(Fraction(x))
    t = to_float32(exact) if exact >= Fraction(1, 2**40) else Fraction(0)
    return GRID.index(min(t // step(t) * step(t), Fraction(6)))


def signed(index: int, x: float) -> int:
    return index + 8 * bool(np.signbit(np.float32(x)))


def expected_e2m1(x: Array, words: Array, rule: str) -> Array:
    found = np.zeros(x.shape, np.uint8)
    for (row, i), value in np.ndenumerate(x):
        word = int(words[row])
        if np.isnan(value):
            found[row, i] = 7
        elif np.isinf(value):
            found[row, i] = signed(7, value)
        elif rule == "sm100":
            found[row, i] = signed(carry(abs(float(value)), field(word, E2M1_BITS[i]), GRID), value)
        else:
            found[row, i] = signed(fused_add(abs(float(value)), word >> 8 * i & 255), value)
    return found


def random_words(shape: Any, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint64).astype(np.uint32)


def hard_values() -> Array:
    """On the grid and beside it, where the 16-bit and the 8-bit fraction change, and everything else a float is."""
    rng = np.random.default_rng(1)
    eighths = np.array([float(v + (w - v) * k / 8) for v, w in itertools.pairwise(GRID) for k in range(8)])
    fine = np.array(
        [float(v + (w - v) * k / 2**16) for v, w in itertools.pairwise(GRID) for k in (1, 2**15, 2**16 - 1)]
    )
    coarse = np.array([float(v + (w - v) * k / 2**8) for v, w in itertools.pairwise(GRID) for k in (1, 128, 255)])
    special = np.array([0x00000001, 0x007FFFFF, 0x00800000, 0x7F800000, 0x7FC00000, 0xFFC00000, 0x7F7FFFFF], np.uint32)
    random_ = rng.uniform(-7, 7, 400)
    tiny = np.ldexp(rng.uniform(1, 2, 60), np.arange(-30, 0).repeat(2))
    every = np.concatenate([eighths, fine, coarse, random_, tiny, [6, 6.5, 7, 8, 1e9]])
    values = np.concatenate([around(every, 1), special.view(np.float32)])
    return values[: values.size // 4 * 4].reshape(-1, 4)


def early_values() -> Array:
    """Magnitudes at which the float32 sum of the 8-bit rule rounds up to the next value before it is reached.

    x + b/512 lies less than half a unit in the last place below 0.5.
    """
    b = np.arange(129, 256)
    exact = 0.5 - b / 512
    x = np.nextafter(exact.astype(np.float32), np.float32(0))
    return np.concatenate([x, np.nextafter(x, np.float32(0))]).astype(np.float32)


@pytest.mark.parametrize("rule", ["sm100", "te-fallback"])
def test_word_rules_against_exact_twins(rule: str) -> None:
    """SR-SM100, SR-FALLBACK"""
    x = hard_values()
    rng = np.random.default_rng(2)
    for seed in range(3):
        words = random_words(len(x), seed)
        if seed == 2:  # extreme fields
            words = rng.choice(np.array([0, 0xFFFFFFFF, 0x00FF00FF, 0xFF00FF00, 1, 1 << 31], np.uint32), len(x))
        same_bits(e2m1.encode_stochastic(x, words, rule), expected_e2m1(x, words, rule))


def test_every_bit_of_the_word_by_hand() -> None:
    """SR-SM100: one hot bit is worth 2^-16 … 2^-1 of a step to the element that sees it, and nothing elsewhere."""
    for bit in range(32):
        word = np.array([1 << bit], np.uint32)
        for element, bits in enumerate(E2M1_BITS):
            worth = 2 ** (15 - bits.index(bit)) if bit in bits else 0
            place = 2**16 - worth  # the fraction, in 2^-16, that this R carries over
            for fraction, moves in ((place, worth > 0), (place - 1, False)):
                x = np.full((1, 4), 2 + min(fraction, 2**16 - 1) / 2**16, np.float32)
                assert e2m1.encode_stochastic(x, word)[0, element] == (5 if moves else 4)


def test_half_of_a_word_serves_a_pair() -> None:
    """SR-SM100: of elements 0 and 1, and of 2 and 3, one sees the other's bits reversed."""
    word = np.array([0x00800080], np.uint32)  # bytes 0 and 2 are 0x80, so element 0 has 0x8080 and 1 has 0x0101
    x = np.array([[2.5, 2 + 255 / 256, 2.5, 2.5]], np.float32)
    assert e2m1.encode_stochastic(x, word).tolist() == [[5, 5, 4, 4]]
    x[0, :2] = 2 + 127 / 256, 2 + 254 / 256
    assert e2m1.encode_stochastic(x, word).tolist() == [[4, 4, 4, 4]]


def test_bits_below_the_sixteenth_are_ignored() -> None:
    """SR-SM100: no sticky bit."""
    just_below = np.nextafter(np.float32(2.0**-17), np.float32(0))  # 2^-16 of the step from 0 to 0.5
    x = np.array([[just_below, 2.0**-17, 1, 1]], np.float32)
    assert e2m1.encode_stochastic(x, np.array([0xFFFFFFFF], np.uint32)).tolist() == [[0, 1, 2, 2]]


@pytest.mark.parametrize("rule", ["sm100", "te-fallback"])
def test_what_is_on_the_grid_never_moves(rule: str) -> None:
    grid = np.array([float(v) for v in GRID], np.float32)
    x = np.concatenate([grid, -grid]).reshape(4, 4)
    for word in (0, 0xFFFFFFFF, 0x5A5AA5A5):
        words = np.full(4, word, np.uint32)
        same_bits(e2m1.encode_stochastic(x, words, rule).reshape(-1), np.arange(16, dtype=np.uint8))


@pytest.mark.parametrize("rule", ["sm100", "te-fallback", "te-jax", "ideal"])
def test_special_values_whatever_the_random_bits(rule: str) -> None:
    """E2M1-NAN, E2M1-SATURATE, E2M1-ZERO for .rs: open until a Blackwell run, see docs/stochastic-rounding.md."""
    x = np.array([[np.nan, -np.nan, np.inf, -np.inf], [0.0, -0.0, 1e30, -1e30]], np.float32)
    nan = 8 if rule == "te-jax" else 7
    for bits in (0, 0xFFFFFFFF, 0x12345678):
        numbers = np.full(2, bits, np.uint32)
        if rule in ("te-jax", "ideal"):
            numbers = np.full((2, 4), 0.9999 if bits else 0.0, np.float32)  # type: ignore[assignment]
        assert e2m1.encode_stochastic(x, numbers, rule).tolist() == [[nan, nan, 7, 15], [0, 8, 7, 15]]


def test_fallback_rounds_up_early_by_one_ulp() -> None:
    """SR-FALLBACK: the float32 sum reaches 0.5 before the exact one does."""
    early = 0
    for x in early_values().tolist():
        byte = 0
        while byte < 256 and Fraction(x) + Fraction(byte, 512) < Fraction(1, 2):
            byte += 1
        for b in (byte - 1, min(byte, 255)):
            word = np.array([b * 0x01010101], np.uint32)
            found = e2m1.encode_stochastic(np.full((1, 4), x, np.float32), word, "te-fallback")
            assert (found == fused_add(x, b)).all()
            early += fused_add(x, b) == 1 and Fraction(x) + Fraction(b, 512) < Fraction(1, 2)
    assert early > 100


def test_fallback_takes_byte_i_for_element_i() -> None:
    """SR-FALLBACK"""
    for i in range(4):
        x = np.full((1, 4), 2 + 1 / 256, np.float32)
        found = e2m1.encode_stochastic(x, np.array([0xFF << 8 * i], np.uint32), "te-fallback")
        assert found.tolist() == [[5 if j == i else 4 for j in range(4)]]


def test_jax_rule_never_gives_one_and_a_half() -> None:
    """SR-JAX: values in [1, 2) go to 1 or 2; the fraction is theirs on that wider step."""
    x = np.linspace(-7, 7, 4096, dtype=np.float32).reshape(-1, 4)
    uniforms = np.random.default_rng(0).random(x.shape, np.float32)
    codes = e2m1.encode_stochastic(x, uniforms, "te-jax")
    assert not np.isin(codes, (3, 11)).any() and set(np.unique(codes)) == set(range(16)) - {3, 11}
    for value, u, code in ((1.5, 0.5, 4), (1.5, 0.50001, 2), (1.25, 0.25, 4), (1.25, 0.2501, 2), (0.25, 0.5, 1)):
        given = np.full((1, 4), value, np.float32), np.full((1, 4), u, np.float32)
        assert (e2m1.encode_stochastic(*given, "te-jax") == code).all()


def test_ideal_rule_has_exactly_the_fraction_as_probability() -> None:
    """SR-IDEAL: over all 2^16 equidistant uniforms the ups are the fraction's number."""
    uniforms = (np.arange(2**16, dtype=np.float32) / 2**16).reshape(-1, 4)
    for value in (0.125, 0.3, 1.25, 1.7, 2.75, 3.3, 4.5, 5.9):
        x = np.full(uniforms.shape, value, np.float32)
        codes = e2m1.encode_stochastic(x, uniforms, "ideal")
        k, f = between(Fraction(float(np.float32(value))), GRID)
        assert np.count_nonzero(codes == k + 1) == -int(-f * 2**16 // 1)  # u = 0 … below f: ceil(f·2^16)
        assert set(np.unique(codes)) <= {k, k + 1}


def test_sm100_is_at_most_two_to_the_minus_16_of_a_step_low() -> None:
    """SR-SM100: over all 2^16 fields an element goes up exactly floor(f·2^16) times."""
    fields = np.arange(2**16, dtype=np.uint32)
    words = fields & 255 | fields >> 8 << 16  # element 0 sees the field, element 1 its reverse
    for value in (0.1, 0.3, 1.7, 2.75, 3.3, 5.9):
        x = np.full((2**16, 4), value, np.float32)
        codes = e2m1.encode_stochastic(x, words)
        k, f = between(Fraction(float(np.float32(value))), GRID)
        for element in (0, 1):
            assert np.count_nonzero(codes[:, element] == k + 1) == int(f * 2**16)


# ---- E4M3 ---------------------------------------------------------------------------------------------------


def test_e4m3_against_the_exact_twin() -> None:
    """SR-E4M3"""
    rng = np.random.default_rng(3)
    middles = np.array([float(v + (w - v) * f) for v, w in itertools.pairwise(E4M3_GRID) for f in (0, Fraction(1, 3))])
    x = np.concatenate([around(middles, 1), around([448, 449, 464, 480, 512, 1e20, 2.0**-10, 2.0**-26, 1e-40], 1)])
    x = np.concatenate([x, np.exp2(rng.uniform(-12, 10, 400)).astype(np.float32)])
    x = x[: x.size // 4 * 4].reshape(-1, 4)
    words = random_words(len(x), 4)
    expected = np.zeros(x.shape, np.uint8)
    for (row, i), value in np.ndenumerate(x):
        index = carry(min(abs(float(value)), 512.0), field(int(words[row]), E4M3_BITS[i]), E4M3_GRID)
        expected[row, i] = index + 128 * bool(np.signbit(value))
    same_bits(e4m3.encode_stochastic(x, words), expected)


def test_e4m3_special_values() -> None:
    """SR-E4M3"""
    x = np.array([[np.nan, -np.nan, np.inf, -np.inf], [0.0, -0.0, 448, -448]], np.float32)
    for word in (0, 0xFFFFFFFF):
        found = e4m3.encode_stochastic(x, np.full(2, word, np.uint32))
        assert found.tolist() == [[0x7F, 0x7F, 0x7E, 0xFE], [0, 0x80, 0x7E, 0xFE]]


# ---- recorded: an independent evaluation of the sm_100 rule -------------------------------------------------


@needs_vectors
def test_conversion_vectors() -> None:
    """SR-SM100: vectors/conversions, codes of another implementation."""
    recorded = np.load(VECTORS / "conversions" / "stochastic-e2m1x4.npz")
    x, words = recorded["x_bits"].view(np.float32), recorded["rbits"]
    assert x.size == 40_000
    same_bits(e2m1.encode_stochastic(x, words), recorded["codes"])
    assert (e2m1.encode_stochastic(x, words, "te-fallback") != recorded["codes"]).mean() > 0.05


# ---- recorded: the kernels and the shipped binary, from seed and offset alone -------------------------------


class Recorded(NamedTuple):
    name: str
    x: Array
    axis: int
    packed: Array
    how: dict[str, Any]  # arguments of quantize


class Recordings:
    """The stochastic outputs of one folder of vectors/."""

    def __init__(self, folder: str) -> None:
        self.path = VECTORS / folder
        self.index: dict[str, Any] = json.loads((self.path / "index.json").read_text())
        self._files: dict[str, Any] = {}

    def array(self, file: str, key: str) -> Array:
        if file not in self._files:
            self._files[file] = np.load(self.path / f"{file}.npz")
        found: Array = self._files[file][key]
        return found


KERNELS = {"tuned": "tuned-1d", "twod": "2d", "vb": "vector-blockwise"}
INPUT_TYPES = {"bf16": bfloat16, "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}


def kernel_cases() -> Iterator[Recorded]:
    """te-kernels-h200: kernels named, words and rule of the software fallback."""
    data = Recordings("te-kernels-h200")
    for name, case in data.index["cases"].items():
        flags, family = case["flags"], case["family"]
        if flags.get("sr") != "1":
            continue
        x = data.array("inputs", case["input"]).view(INPUT_TYPES[case["dtype"]])
        amax = data.array(family, case["outputs"]["amax"])
        preset = "te-fast-math" if flags.get("fast") == "1" else "te"
        both = flags["dir"] == "both"
        how: dict[str, Any] = {
            "block": (16, 16) if flags.get("q2d") == "1" else (1, 16),
            "arithmetic": nv.arithmetic(preset, stochastic="te-fallback"),
        }
        seed, offset = int(flags["seed"], 0), int(flags["off"], 0)
        philox = nv.Philox(seed, offset, KERNELS.get(family, "auto"), both and family != "rht")
        sides: dict[str, tuple[int, dict[str, Any]]] = {
            "q": (-1, how | {"amax": amax[0], "rbits": philox}),
            # one amax for both directions where the kernel takes one: VB-SINGLE-AMAX
            "qt": (0, how | {"amax": amax[0 if family == "vb" and both else 1], "rbits": philox}),
        }
        if family == "rht":
            apart = nv.Philox(int(flags["seedc"], 0), int(flags["offc"], 0), "unfused-rht")
            rht = nv.RHT(sign_mask=int(flags["mask"]))
            sides["q_rht"] = 0, how | {"amax": amax[1], "rbits": apart, "rht": rht}
        for output, (axis, arguments) in sides.items():
            if output in case["outputs"]:
                packed = data.array(family, case["outputs"][output])
                yield Recorded(f"{name} {output}", x, axis, packed, arguments)


def binary_cases() -> Iterator[Recorded]:
    """te-binary-h200: the kernel by the dispatch rule; the transform's output drawn 1024 calls later."""
    data = Recordings("te-binary-h200")

    def array(key: str) -> Array:
        return data.array("arrays", data.index["arrays"][key])

    for name, case in data.index["cases"].items():
        outputs = [key for key in ("q", "qt", "q0", "q1", "q2") if f"{name}|{key}" in data.index["arrays"]]
        if not outputs or case.get("noop") or not (case.get("sr") or "seed" in case):
            continue
        stored = array(f"in|{case['input']}")
        half = case["input"].split(":")[-1].startswith("h_")
        dtype = np.float32 if stored.dtype == np.uint32 else np.float16 if half else bfloat16
        x = stored.view(dtype)
        arguments = case.get("args", {})
        two_d = arguments.get("with_2d_quantization") or case.get("q2d")
        row_scaled = bool(case.get("rowsc"))
        ar = nv.arithmetic("te", stochastic="te-fallback", row_scaled=row_scaled)
        how: dict[str, Any] = {"block": (16, 16) if two_d else (1, 16), "arithmetic": ar}
        seed, first = int(case.get("seed", "1234" if name == "graph" else "0"), 0), int(case.get("offset", "0"), 0)
        offsets = dict.fromkeys(outputs, first)
        if name == "graph":  # three replays
            offsets = {f"q{i}": int(offset, 0) for i, offset in enumerate(case["offsets"])}
        if "offset_mid" in case:
            offsets["q2"] = int(case["offset_mid"], 0)
        transform = bool(arguments.get("with_rht"))
        both = "qt" in outputs and "q" in outputs and not transform
        amaxes = {
            side: array(f"{name}|{side}").view(np.float32)
            for side in ("amax", "amax_t")
            if f"{name}|{side}" in data.index["arrays"]
        }
        for output in outputs:
            axis = 0 if output == "qt" else -1
            side = dict(how)
            if axis == 0 and transform:
                mask = 0 if arguments.get("with_random_sign_mask") is False else 0xD7E8
                side |= {"rht": nv.RHT(sign_mask=mask), "amax": amaxes["amax_t"]}
                side["rbits"] = nv.Philox(seed, first + 1024, "unfused-rht")
            else:
                if amaxes:
                    # the vector-blockwise kernel has one amax for both directions, the rowwise one if it is there
                    side["amax"] = (
                        amaxes["amax_t"] if axis == 0 and (row_scaled or "amax" not in amaxes) else amaxes["amax"]
                    )
                side["rbits"] = nv.Philox(seed, offsets[output], "auto", both)
            yield Recorded(f"{name} {output}", x, axis, array(f"{name}|{output}"), side)


def differences(case: Recorded) -> int:
    found = nv.quantize(case.x, axis=case.axis, rounding="stochastic", **case.how)
    return int(np.count_nonzero(found.codes != e2m1.unpack(case.packed)))


@needs_vectors
@pytest.mark.parametrize(
    ("cases", "least"), [(kernel_cases, 1_800_000), (binary_cases, 8_700_000)], ids=["kernels", "binary"]
)
def test_every_recorded_code_from_seed_and_offset(cases: Any, least: int) -> None:
    """SR-FALLBACK, STREAM-*, DISPATCH and the whole scale arithmetic: 0 differences."""
    compared, wrong = 0, []
    for case in cases():
        compared += 2 * case.packed.size
        if different := differences(case):
            wrong.append(f"{case.name}: {different} of {2 * case.packed.size}")
    assert wrong == []
    assert compared >= least, compared


@needs_vectors
def test_the_cases_that_were_recorded_for_one_question() -> None:
    """Two calls in a row, three replays of a CUDA graph, no generator given, the transform's own state."""
    names = [case.name for case in binary_cases()]
    for name in ("api.two_in_a_row q", "api.two_in_a_row q2", "graph q0", "graph q1", "graph q2"):
        assert name in names
    assert "c.f_normal_144x80.norng q" in names and "c.f_normal_144x80.norng qt" in names
    assert sum(name.startswith("rhtq.") and name.endswith("qt") for name in names) == 6
    assert sum(name.endswith("rowsc q") for name in names) == 2


@needs_vectors
def test_a_skipped_call_writes_nothing() -> None:
    """The kernel returns at once when the no-op flag is set; its output keeps what was in the buffer."""
    data = Recordings("te-binary-h200")
    for output in ("q", "qt", "s", "st"):
        key = data.index["arrays"][f"c.f_normal_144x80.noop1|{output}"]
        assert (data.array("arrays", key) == 0xA5).all()


@needs_vectors
def test_a_wrong_rule_or_stream_is_seen() -> None:
    """The comparison bites."""
    case = next(c for c in binary_cases() if c.name == "api.two_in_a_row q")
    philox: nv.Philox = case.how["rbits"]
    assert differences(case) == 0
    for changes in (
        {"arithmetic": nv.arithmetic("te")},
        {"rbits": nv.Philox(philox.seed, philox.offset + 1)},
        {"rbits": nv.Philox(philox.seed + 1, philox.offset)},
        {"rbits": nv.Philox(philox.seed, philox.offset, rounds=7)},
        {"rbits": np.ascontiguousarray(philox.words(case.x.shape, dtype="float32")[:, ::-1])},
    ):
        assert differences(case._replace(how=case.how | changes)) > 1000


# ---- Transformer Engine's pure-JAX rule, the real one -------------------------------------------------------


@pytest.fixture(scope="module")
def te_jax() -> Any:
    from nvfp4hw.backends import te_jax

    reason = te_jax.BACKEND().availability()
    if reason is not None:
        pytest.skip(reason)
    return te_jax._quantizer_module()


STATE = np.array([[0x12345678, 0x7FFFFFFF, 0, 0x0BADCAFE]], np.uint32)


def jax_quantizer(te: Any, block: tuple[int, int], layout: str) -> Any:
    import jax

    return te.NVFP4Quantizer(
        q_dtype=jax.numpy.float4_e2m1fn,
        scaling_mode=te.ScalingMode["NVFP4_1D_SCALING" if block == (1, 16) else "NVFP4_2D_SCALING"],
        q_layout=te.QuantizeLayout[layout],
        data_layout="NT",
        stochastic_rounding_rng_state=jax.numpy.asarray(STATE),
    )


def test_jax_rule_against_the_package_function(te_jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SR-JAX: its function on values of every kind, with uniforms that hit the fraction and miss it by one."""
    import jax

    x = np.concatenate([hard_values().reshape(-1), np.float32([1.5, -1.5, 1.0, 2.0])])
    x = x[: x.size // 4 * 4].reshape(-1, 4)
    smallest = np.finfo(np.float32).smallest_normal
    x = np.where(np.abs(x) < smallest, np.copysign(np.float32(0), x), x)  # XLA on the CPU flushes subnormals
    magnitude = np.minimum(np.abs(x), np.float32(6))
    floor = np.array([0, 0.5, 1, 1, 2, 3, 4, 6], np.float32)[
        np.minimum(np.searchsorted(e2m1.MAGNITUDES, np.nan_to_num(magnitude), "right") - 1, 7)
    ]
    gap = np.array([0.5, 0.5, 1, 1, 1, 1, 2, 1], np.float32)[
        np.minimum(np.searchsorted(e2m1.MAGNITUDES, np.nan_to_num(magnitude), "right") - 1, 7)
    ]
    exact = np.nan_to_num((magnitude - floor) / gap)
    below_one = np.nextafter(np.float32(1), np.float32(0))
    quantizer = jax_quantizer(te_jax, (1, 16), "ROWWISE")
    for uniforms in (
        np.minimum(exact, below_one),
        np.minimum(np.nextafter(exact, np.float32(2)), below_one),
        np.zeros_like(x),
        np.full_like(x, below_one),
        np.random.default_rng(5).random(x.shape, np.float32),
    ):
        monkeypatch.setattr(jax.random, "uniform", lambda key, shape, u=uniforms: jax.numpy.asarray(u))
        values = jax.numpy.clip(quantizer._apply_stochastic_rounding(jax.numpy.asarray(x)), -6, 6)
        theirs = np.asarray(values.astype(jax.numpy.float4_e2m1fn)).view(np.uint8)
        same_bits(e2m1.encode_stochastic(x, uniforms.astype(np.float32), "te-jax"), theirs)


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_jax_quantizer_from_its_state(te_jax: Any, block: tuple[int, int], axis: int) -> None:
    """SR-JAX: the whole quantizer, jitted, from its four uint32: codes and scales bit for bit."""
    import jax

    from nvfp4hw import rng

    quantizer = jax_quantizer(te_jax, block, "ROWWISE" if axis == -1 else "COLWISE")
    run = jax.jit(lambda x: [getattr(quantizer.quantize(x), name) for name in ("data", "scale_inv")])
    for x in (random(128, 96, 7).astype(bfloat16), random(64, 64, 8), decades(64, 64, 9, -8, 8)):
        x[0, 0] = 64  # on the CPU scales from 248 on become NaN: one large block, so that the others are not
        codes, scales = (np.asarray(a).view(np.uint8) for a in run(jax.numpy.asarray(x)))
        shape = x.shape if axis == -1 else x.shape[::-1]
        found = nv.quantize(
            x, axis=axis, block=block, arithmetic="te-jax", rounding="stochastic", rbits=rng.jax_uniforms(STATE, shape)
        )
        np.testing.assert_array_equal(found.codes, codes)
        np.testing.assert_array_equal(found.scales, scales)
        assert len(np.unique(codes)) > 8


# ---- the sweep that proves the rules, in part ---------------------------------------------------------------

#: exponents of float32 magnitudes: zero and subnormals, 2^-18, 2^-17, 2^-1, 2^0, 2^1, 2^2, NaN and Inf
PIECES = {"e2m1": [127, 128, 129], "e4m3": [118, 135], "te-fallback": [118, 129]}


@pytest.mark.parametrize("rule", sorted(PIECES))
def test_part_of_the_sweep(rule: str) -> None:
    """SR-SM100, SR-E4M3, SR-FALLBACK: every float32 of some exponents, and every random field."""
    fields = range(0, 2**16, 37) if rule == "e4m3" else None
    found = sweep_stochastic.field_sweep(rule, fields)
    assert found.different == 0, str(found)
    found = sweep_stochastic.pattern_sweep(rule, PIECES[rule][:1], processes=1)
    assert found.different == 0, str(found)
    assert found.compared >= 2 * sweep_stochastic.CHUNK


@pytest.mark.parametrize("rule", ["e2m1", "e4m3", "te-fallback"])
@pytest.mark.parametrize("chunk", [0, 109, 110, 126, 136, 255])
def test_ends_of_every_kind_of_piece(rule: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_stochastic, "CHUNK", sweep_stochastic.PART)
    for first in (chunk << 23, (chunk + 1 << 23) - sweep_stochastic.PART):
        part = first // sweep_stochastic.PART
        found = sweep_stochastic._piece((rule, part))
        assert found.different == 0, str(found)
        assert found.compared >= 2 * sweep_stochastic.PART


def test_the_statement_of_the_sweep_is_the_exact_one() -> None:
    """Its table and thresholds against rational arithmetic."""
    for name, grid in (("e2m1", GRID), ("e4m3", E4M3_GRID), ("te-fallback", GRID)):
        rule = sweep_stochastic.RULES[name]
        assert [Fraction(v) for v in rule.values.tolist()] == grid
        values = np.abs(hard_values().reshape(-1))
        values = values[np.isfinite(values)]
        k, t = sweep_stochastic.thresholds(rule, values)
        for x, code, threshold in zip(values.tolist(), k.tolist(), t.tolist(), strict=True):
            for r in {0, max(threshold - 1, 0), min(threshold, rule.size - 1), rule.size - 1}:
                expected = fused_add(x, r) if name == "te-fallback" else carry(x, r, grid)
                assert code + (r >= threshold) == expected, (name, x, r)


def test_the_sweep_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It bites, and says where: element, float32 bits, word."""
    right = sweep_stochastic.RULES["e2m1"]
    wrong = right._replace(encode=sweep_stochastic.RULES["te-fallback"].encode)
    monkeypatch.setitem(sweep_stochastic.RULES, "e2m1", wrong)
    monkeypatch.setattr(sweep_stochastic, "CHUNK", 1 << 14)
    found = sweep_stochastic.pattern_sweep("e2m1", [0x40300000 >> 14], processes=1)
    assert found.different > 10_000 and found.first is not None
    element, pattern, word = found.first
    x = np.full((1, 4), pattern, np.uint32).view(np.float32)
    assert int(found.expected, 16) == e2m1.encode_stochastic(x, np.array([word], np.uint32))[0, element]
    assert sweep_stochastic.field_sweep("e2m1", range(100)).different > 100


def test_the_sweep_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_stochastic, "CHUNKS", 1)
    monkeypatch.setattr(sweep_stochastic.pattern_sweep, "__defaults__", (range(118, 119), None, 1))
    assert sweep_stochastic.main(["te-fallback", "--processes", "1"]) == 0
    assert "all equal" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        sweep_stochastic.main(["sm101"])
    assert stopped.value.code == 2 and "unknown rule 'sm101'" in capsys.readouterr().err


# ---- quantize -----------------------------------------------------------------------------------------------

WORD_RULES = ["sm100", "te-fallback"]


@pytest.mark.parametrize("rule", ["sm100", "te-fallback", "te-jax", "ideal"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_quantize_is_scale_and_round(rule: str, block: tuple[int, int], axis: int) -> None:
    """Codes are the rule on the scaled values of the nearest-even path; scales do not depend on the rounding."""
    for x in (random(96, 64, 1).astype(bfloat16), every_class(64, 48, 2), decades(48, 80, 3)):
        shape = x.shape if axis == -1 else x.shape[::-1]
        numbers = random_words((shape[0], shape[1] // 4), 4)
        if rule in ("te-jax", "ideal"):
            numbers = np.random.default_rng(4).random(shape, np.float32)
        ar = nv.arithmetic("te", stochastic=rule)
        q = nv.quantize(x, axis=axis, block=block, arithmetic=ar, rounding="stochastic", rbits=numbers)
        nearest = nv.quantize(x, axis=axis, block=block)
        same_bits(q.scales, nearest.scales)
        same_bits(q.amax, nearest.amax)
        same_bits(q.steps.scaled, nearest.steps.scaled)
        groups = numbers.reshape(-1) if numbers.dtype == np.uint32 else numbers.reshape(-1, 4)
        scaled = q.steps.scaled.reshape(-1, 4)
        expected = e2m1.encode_stochastic(scaled, groups, rule)
        expected[np.isnan(scaled)] = 7
        np.testing.assert_array_equal(q.codes, expected.reshape(shape))


def test_words_and_their_generator_are_the_same() -> None:
    for x, axis, block, rht in (
        (random(96, 160, 1).astype(bfloat16), -1, (1, 16), None),
        (random(96, 160, 1).astype(bfloat16), 0, (16, 16), None),
        (random(96, 160, 1).astype(np.float16), 0, (1, 16), None),
        (random(96, 160, 1).astype(bfloat16), 0, (1, 16), nv.RHT()),
        (random(64, 128, 1).astype(bfloat16), 0, (1, 16), nv.RHT()),
        (random(96, 160, 1), -1, (1, 16), None),
    ):
        philox = nv.Philox(1, 2, both=True)
        words = philox.words(x.shape, axis, dtype=x.dtype.name, block=block, rht=rht is not None)
        how: dict[str, Any] = {"axis": axis, "block": block, "rht": rht, "rounding": "stochastic"}
        one, two = nv.quantize(x, rbits=philox, **how), nv.quantize(x, rbits=words, **how)
        same_bits(one.packed, two.packed)
        assert (one.codes != nv.quantize(x, axis=axis, block=block, rht=rht).codes).mean() > 0.2


@pytest.mark.parametrize("axis", [-1, 0])
def test_slabs_and_threads_do_not_show(axis: int) -> None:
    x = random(544, 1056, 5).astype(bfloat16)
    q = nv.quantize(x, axis=axis, rounding="stochastic", rbits=nv.Philox(3, 4))
    same_bits(nv.quantize(x, axis=axis, rounding="stochastic", rbits=nv.Philox(3, 4), threads=3).packed, q.packed)
    words = nv.Philox(3, 4).words(x.shape, axis)
    scaled = q.steps.scaled.reshape(-1, 4)
    np.testing.assert_array_equal(q.codes, e2m1.encode_stochastic(scaled, words.reshape(-1)).reshape(q.codes.shape))


def test_leading_dimensions_are_rows() -> None:
    x = random(24, 64, 6)
    words = random_words((24, 16), 7)
    flat = nv.quantize(x, rounding="stochastic", rbits=words)
    deep = nv.quantize(x.reshape(2, 3, 4, 64), rounding="stochastic", rbits=words)
    assert deep.packed.shape == (2, 3, 4, 32)
    same_bits(deep.packed.reshape(24, 32), flat.packed)


def test_words_of_any_layout_are_read_only() -> None:
    x, words = random(32, 64, 6), random_words((32, 16), 7)
    expected = nv.quantize(x, rounding="stochastic", rbits=words).packed
    for same in (np.asfortranarray(words), np.repeat(words, 2, axis=0)[::2], words.astype(">u4").astype(np.uint32)):
        frozen = same.copy(order="K")
        frozen.flags.writeable = False
        same_bits(nv.quantize(x, rounding="stochastic", rbits=frozen).packed, expected)
    np.testing.assert_array_equal(words, random_words((32, 16), 7))


def test_row_scaled_and_stochastic() -> None:
    """Allowed by the kernels' C interface, and recorded there."""
    x = decades(32, 64, 8, -3, 3)
    ar = nv.arithmetic("te", row_scaled=True)
    q = nv.quantize(x, arithmetic=ar, rounding="stochastic", rbits=nv.Philox(1, 2))
    scaled, words = q.steps.scaled.reshape(-1, 4), nv.Philox(1, 2).words(x.shape, dtype="float32").reshape(-1)
    np.testing.assert_array_equal(q.codes.reshape(-1, 4), e2m1.encode_stochastic(scaled, words))


X, WORDS = random(32, 64, 9), random_words((32, 16), 9)
UNIFORMS = np.full((32, 64), 0.25, np.float32)


def stochastic(x: Any = X, rule: str = "sm100", **how: Any) -> Any:
    how = {"rounding": "stochastic", "arithmetic": nv.arithmetic("te", stochastic=rule)} | how
    return nv.quantize(x, **how)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: stochastic(), ValueError, "stochastic rounding needs rbits: uint32 words, one for 4 elements"),
        (lambda: stochastic(rbits=WORDS, rounding="nearest-even"), ValueError, "nearest-even takes none"),
        (lambda: stochastic(rbits=WORDS, rounding="random"), ValueError, "'nearest-even' or 'stochastic'; got 'ran"),
        (lambda: stochastic(rbits=WORDS[:, :8]), ValueError, r"shape \(32, 16\) here; got \(32, 8\)"),
        (lambda: stochastic(rbits=WORDS.T), ValueError, r"shape \(32, 16\) here; got \(16, 32\)"),
        (lambda: stochastic(rbits=WORDS, axis=0), ValueError, r"shape \(64, 8\) here; got \(32, 16\)"),
        (lambda: stochastic(rbits=WORDS.reshape(-1)), ValueError, r"got \(512,\)"),
        (lambda: stochastic(rbits=WORDS.astype(np.int64)), TypeError, "uint32 words.*got dtype int64"),
        (lambda: stochastic(rbits=UNIFORMS), TypeError, "uint32 words, one for 4 elements; got dtype float32"),
        (lambda: stochastic(rbits=1234), TypeError, "uint32 words.*got dtype int64"),
        (lambda: stochastic(rbits=WORDS, rule="te-jax"), TypeError, "float32 uniforms.*got dtype uint32"),
        (lambda: stochastic(rbits=UNIFORMS.astype(float), rule="ideal"), TypeError, "float32 uni.*got dtype float64"),
        (lambda: stochastic(rbits=UNIFORMS[:, :16], rule="ideal"), ValueError, r"shape \(32, 64\) here; got \(32, 16"),
        (lambda: stochastic(rbits=UNIFORMS + 1, rule="te-jax"), ValueError, r"lie in \[0, 1\); got 1.25..1.25"),
        (lambda: stochastic(rbits=-UNIFORMS, rule="te-jax"), ValueError, r"lie in \[0, 1\); got -0.25"),
        (lambda: stochastic(rbits=UNIFORMS * np.nan, rule="ideal"), ValueError, r"lie in \[0, 1\)"),
        (lambda: stochastic(rbits=nv.Philox(1, 2), rule="te-jax"), ValueError, "float32 uniforms.*not Philox words"),
        (lambda: stochastic(rbits=nv.Philox(1, 2, "tuned-1d")), ValueError, "takes bfloat16; got float32"),
        (lambda: stochastic(X[:16].astype(bfloat16), rbits=nv.Philox(1, 2, "tuned-1d")), ValueError, "multiples of 32"),
        (lambda: stochastic(rbits=nv.Philox(1, 2, "unfused-rht")), ValueError, "use axis=0"),
        (lambda: stochastic(X.astype(bfloat16), rbits=nv.Philox(1, 2, "2d")), ValueError, "no 1x16 blocks"),
        (lambda: stochastic(rbits=WORDS, rule="sm90"), ValueError, "stochastic is one of 'sm100', 'te-fallback'"),
        (
            lambda: stochastic(rbits=WORDS, arithmetic="four-over-six"),
            ValueError,
            "4over6 does not go with stochastic rounding",
        ),
        (lambda: e2m1.encode_stochastic(X[:, :4], WORDS[:, 0], "sm90"), ValueError, "'sm90' is not one of 'sm100'"),
        (lambda: e2m1.encode_stochastic(X, WORDS[:, 0]), ValueError, r"shape \(n, 4\); got \(32, 64\)"),
        (lambda: e2m1.encode_stochastic(X[0, :4], WORDS[:1, 0]), ValueError, r"shape \(n, 4\); got \(4,\)"),
        (lambda: e2m1.encode_stochastic(X[:, :4].astype(int), WORDS[:, 0]), TypeError, "got dtype int64"),
        (lambda: e2m1.encode_stochastic(X[:, :4], WORDS[:5, 0]), ValueError, r"got \(5,\)"),
        (lambda: e4m3.encode_stochastic(X, WORDS[:, 0]), ValueError, r"shape \(n, 4\); got \(32, 64\)"),
        (lambda: e4m3.encode_stochastic(X[:, :4], WORDS[:5, 0]), TypeError, r"one word a row, shape \(32,\)"),
        (lambda: e4m3.encode_stochastic(X[:, :4], UNIFORMS[:, 0]), TypeError, "uint32.*got float32"),
    ],
)
def test_refusals_say_what_to_do(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)


# ---- docs/stochastic-rounding.md -----------------------------------------------------------------------------

DOCUMENT = (Path(__file__).parent.parent / "docs" / "stochastic-rounding.md").read_text(encoding="utf-8")
_PARTS = re.split(r"^### +([A-Z0-9-]+)$", DOCUMENT, flags=re.MULTILINE)
RULES = dict(zip(_PARTS[1::2], _PARTS[2::2], strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_the_examples_of_the_document_hold(rule: str) -> None:
    examples = re.findall(r"^```example\n(.*?)^```", RULES[rule], re.DOTALL | re.MULTILINE)
    assert any(" => " in example for example in examples), f"{rule} has no example"
    assert "Witness:" in RULES[rule], f"{rule} names no witness"
    wrong = [message for example in examples for message in run(example)]
    assert not wrong, f"{rule} of docs/stochastic-rounding.md:\n" + "\n".join(wrong)


def test_the_document_has_every_rule_that_the_code_names() -> None:
    source = Path(nv.__file__).parent
    families = re.compile(r"\b(?:(?:PHILOX|STREAM|SR)-[A-Z0-9-]*[A-Z0-9]|DISPATCH)\b(?!-\*)")
    named = {word for path in source.glob("*.py") for word in families.findall(path.read_text(encoding="utf-8"))}
    assert named and named <= set(RULES), sorted(named - set(RULES))

"""The MMA word: recorded hardware words, each model's predictions, and the slow twin over words that bite."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import slow_mma
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import Array, same_bits
from slow_mma import MODELS, Words, twin

from nvfp4ref import fp32, tensorcore

pytestmark = pytest.mark.filterwarnings("error")

VECTORS = Path(__file__).parent.parent / "vectors" / "mma"
NAMES = {
    "align_g16_f35": "blackwell",
    "align_g16_f35_snapshot": "blackwell-snapshot",
    "window39_k4": "window39-k4",
    "window39_k16": "window39-k16",
}


def recorded(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return cases


def words(cases: list[dict[str, Any]]) -> Words:
    """Codes are lists of integers, or a string of hexadecimal digits."""
    a, b = (np.array([[int(str(code), 16) for code in _digits(case[k])] for case in cases], np.uint8) for k in "ab")
    c = np.array([case["c"] for case in cases], np.uint32).view(np.float32)
    return Words(a, b, c, *(np.array([case[k] for case in cases], np.uint8) for k in ("sa", "sb")))


def _digits(codes: str | list[int]) -> str | list[str]:
    return codes if isinstance(codes, str) else [f"{code:x}" for code in codes]


def one(a: dict[int, int], b: dict[int, int], c: int, sa: Any = 0x38, sb: Any = 0x38, model: str = "blackwell") -> int:
    """Bits of D of a word whose codes are zero but at the places given."""
    codes = np.zeros((2, 1, 64), np.uint8)
    for row, given_codes in zip(codes, (a, b), strict=True):
        row[0, list(given_codes)] = list(given_codes.values())
    scales = [np.broadcast_to(np.array(s, np.uint8), (1, 4)) for s in (sa, sb)]
    d = tensorcore.mma_words(*codes, np.array([c], np.uint32).view(np.float32), *scales, model=model)
    return int(d.view(np.uint32)[0])


# -- recorded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["blackwell", "blackwell-snapshot", "window39-k4", "window39-k16"])
def test_published_b200_words(model: str) -> None:
    """MMA-GROUP, MMA-WINDOW, MMA-ROUND, MMA-SPECIAL: all four words that hardware results are published of"""
    cases = recorded("b200-published")
    assert len(cases) == 4
    expected = np.array([case["d"] for case in cases], np.uint32)
    same_bits(tensorcore.mma_words(*words(cases), model=model).view(np.uint32), expected)


@pytest.mark.parametrize(("model", "wrong"), [("group64", 2), ("exact", 1), ("fp32", 3)])
def test_the_published_words_refute(model: str, wrong: int) -> None:
    """The models for comparison, in so many of the four words"""
    cases = recorded("b200-published")
    found = tensorcore.mma_words(*words(cases), model=model).view(np.uint32)
    assert int((found != [case["d"] for case in cases]).sum()) == wrong


def test_model_words() -> None:
    """MMA-*: 1200 words of an independent integer implementation"""
    cases = recorded("model-words")
    assert len(cases) == 1200
    expected = np.array([case["d"] for case in cases], np.uint32)
    same_bits(tensorcore.mma_words(*words(cases)).view(np.uint32), expected)


@pytest.mark.parametrize("case", recorded("open-questions"), ids=lambda case: case["name"])
def test_open_questions(case: dict[str, Any]) -> None:
    """Every model gives what it is said to give where models differ"""
    assert set(case["predictions"]) == set(NAMES)
    for name, expected in case["predictions"].items():
        found = tensorcore.mma_words(*words([case]), model=NAMES[name]).view(np.uint32)
        assert int(found[0]) == expected, f"{name}: {int(found[0]):#010x}, predicted {expected:#010x}"


# -- the slow twin ---------------------------------------------------------------------------------------------


def test_every_model_has_a_twin() -> None:
    assert set(MODELS) == set(tensorcore.MODELS)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_twin(seed: int) -> None:
    """MMA-*: raw bits, scales at their ends, cancelling groups, and links of chains"""
    for kind, model, _, different in slow_mma.compared(1000 + seed, 300):
        assert not different, f"{kind}, {model}"


def test_every_pair_of_scales() -> None:
    """MMA-GROUP: all 127 magnitudes by 127, the sign bit ignored"""
    sa, sb = (np.repeat(m.reshape(-1, 1), 4, axis=1).astype(np.uint8) for m in np.meshgrid(range(127), range(127)))
    rng = np.random.default_rng(7)
    n = len(sa)
    pick = rng.permutation(n)[:4000]
    a, b = (rng.integers(0, 16, (len(pick), 64), np.uint8) for _ in range(2))
    w = Words(a, b, np.zeros(len(pick), np.float32), sa[pick], sb[pick])
    for model in ("blackwell", "exact"):
        same_bits(tensorcore.mma_words(*w, model=model).view(np.uint32), twin(w, model))
    signs = w._replace(sa=w.sa | 0x80, sb=w.sb | 0x80)
    for model in MODELS:
        same_bits(tensorcore.mma_words(*signs, model=model), tensorcore.mma_words(*w, model=model))


def test_every_pair_of_codes() -> None:
    """MMA-GROUP: the product of every two E2M1 values, in every place of a word"""
    for place in range(0, 64, 7):
        x, y = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
        codes = np.zeros((2, 256, 64), np.uint8)
        codes[0, :, place], codes[1, :, place] = x.ravel(), y.ravel()
        scales = np.full((256, 4), 0x38, np.uint8)
        values = slow_mma.HALVES
        expected = [
            (-1 if (i ^ j) & 8 else 1) * Fraction(values[i & 7] * values[j & 7], 4)
            for i, j in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)
        ]
        for model in MODELS:
            d = tensorcore.mma_words(*codes, np.zeros(256, np.float32), scales, scales, model=model)
            same_bits(d, np.array([float(v) for v in expected], np.float32) + np.float32(0))


@given(st.data(), st.sampled_from(MODELS), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_any_word(data: st.DataObject, model: str, seed: int) -> None:
    kind = data.draw(st.sampled_from(slow_mma.KINDS))
    w = kind(np.random.default_rng(seed), 4)
    c = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
    w = w._replace(c=np.array(c, np.uint32).view(np.float32))
    same_bits(tensorcore.mma_words(*w, model=model).view(np.uint32), twin(w, model))


# -- rule by rule, by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_special(model: str) -> None:
    """MMA-SPECIAL: NaN scales and C, infinite C, −0"""
    product = ({0: 2}, {0: 2})  # 1·1
    for byte in (0x7F, 0xFF):
        for place in range(4):
            scales = [0x38] * 4
            scales[place] = byte
            assert one({}, {}, 0, scales, 0x38, model) == 0x7FFFFFFF
            assert one({}, {}, 0x7F800000, 0x38, scales, model) == 0x7FFFFFFF
    for c in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        assert one(*product, c, model=model) == 0x7FFFFFFF
    for c in (0x7F800000, 0xFF800000):
        assert one(*product, c, model=model) == c
    assert one({}, {}, 0x80000000, model=model) == 0
    assert one({0: 8}, {0: 2}, 0x80000000, model=model) == 0
    assert one({0: 2}, {0: 2}, 0xBF800000, model=model) == 0  # 1 − 1
    assert one(*product, 0, 0xB8, 0x38, model) == 0x3F800000  # the scale's sign is ignored


@pytest.mark.parametrize("model", MODELS)
def test_nothing_but_c(model: str) -> None:
    """A word of zeros gives C back, subnormals and the largest float32 included"""
    for c in (1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800001):
        assert one({}, {}, c, 0, 0, model=model) == c
        if model != "blackwell-snapshot":  # there the zeros' scales count
            assert one({}, {}, c, model=model) == c


def test_rounding_is_toward_zero() -> None:
    """MMA-ROUND: 2^24 + 1.5, and below a tie, of both signs; the sum of four groups is rounded once"""
    c = int(np.float32(2**24).view(np.uint32))
    three = ({0: 3}, {0: 2})  # 1.5
    assert one(*three, c) == c
    assert one(*three, c, model="exact") == c + 1
    minus = ({0: 11}, {0: 2})
    assert one(*minus, c) == int(np.float32(2**24 - 2).view(np.uint32))  # 16777214.5
    assert one(*minus, c | 0x80000000) == c | 0x80000000
    halves = ({0: 1, 16: 1, 32: 1, 48: 1}, {0: 2, 16: 2, 32: 2, 48: 2})  # four groups of 0.5
    assert one(*halves, c) == c + 1


def test_a_group_is_exact_whatever_its_parts_cancel() -> None:
    """MMA-GROUP: 36·(scales) − 36·(scales) + a quarter, in one group, against the same in two"""
    same = ({0: 7, 1: 15, 2: 1}, {0: 7, 1: 7, 2: 1})
    assert one(*same, 0, 0x7E, 0x7E) == int(np.float32(0.25 * 448 * 448).view(np.uint32))
    apart = ({0: 7, 16: 15, 32: 1}, {0: 7, 16: 7, 32: 1})
    scales = ([0x7E, 0x7E, 1, 0], [0x7E, 0x7E, 1, 0])
    assert one(*apart, 0, *scales) == 0  # 2^-20 is below 2^(16 − 35)
    assert one(*apart, 0, *scales, model="exact") == int(np.float32(2.0**-20).view(np.uint32))


@pytest.mark.parametrize(("exponent", "left"), [(15, 2.0**-20), (16, 0.0)])
def test_the_window_goes_by_the_scales_and_c(exponent: int, left: float) -> None:
    """MMA-WINDOW: C = 2^exponent cancels; 2^-20 beside it survives 27 binades below C's exponent, not 28"""
    down = (exponent - 4) // 2  # −4·4·2^down·2^(exponent − 4 − down) is −C
    scales = ([1, (down + 7) << 3, 0, 0], [1, (exponent - 4 - down + 7) << 3, 0, 0])
    c = int(np.float32(2.0**exponent).view(np.uint32))
    assert one({0: 1, 16: 14}, {0: 1, 16: 6}, c, *scales) == int(np.float32(left).view(np.uint32))


def test_a_dead_group_does_not_count_and_a_cancelled_one_does() -> None:
    """MMA-WINDOW: 2^-20 beside a group of zeros under 448·448, and beside one that cancels"""
    small = int(np.float32(2.0**-20).view(np.uint32))
    scales = [1, 0x7E, 0, 0]
    assert one({0: 1}, {0: 1}, 0, scales, scales) == small
    assert one({0: 1}, {0: 1}, 0, scales, scales, "blackwell-snapshot") == 0
    assert one({0: 1, 16: 2, 17: 10}, {0: 1, 16: 2, 17: 2}, 0, scales, scales) == 0


def test_group64_rounds_each_word_to_nearest_first() -> None:
    """36·448·448 + 0.375, where float32 has steps of a half: nearest up within a word, toward zero onto C"""
    word = ({0: 7, 16: 3}, {0: 7, 16: 2}, 0, [0x7E, 0x30, 0, 0], [0x7E, 0x30, 0, 0])
    exact = 36 * 448 * 448
    assert one(*word, model="group64") == int(np.float32(exact + 0.5).view(np.uint32))
    assert one(*word, model="blackwell") == int(np.float32(exact).view(np.uint32))
    small = ({0: 3}, {0: 2}, int(np.float32(exact).view(np.uint32)), 0x30, 0x30)
    assert one(*small, model="group64") == int(np.float32(exact).view(np.uint32))
    assert one(*small, model="exact") == int(np.float32(exact + 0.5).view(np.uint32))


def test_truncation_bias() -> None:
    """Magnitude bias of RNE of 64-product sums added toward zero, published −1.169 and −1.283 ppm; nearest has none"""
    rng = np.random.default_rng(0)
    for rho, expected in ((0.0, -1.194), (0.25, -1.290)):
        x, z = rng.standard_normal((2, 4000, 4096), dtype=np.float32)
        y = rho * x + np.sqrt(1 - rho**2) * z
        pair: list[Array] = [v.astype(ml_dtypes.bfloat16).astype(np.float64) for v in (x, y)]
        partial = (pair[0] * pair[1]).reshape(-1, 64, 64).sum(axis=2)
        exact = partial.sum(axis=1)
        down = near = np.zeros(len(exact), np.float32)
        for column in partial.T.astype(np.float32):
            down, near = fp32.add_toward_zero(down, column), fp32.add_nearest(near, column)
        bias = [float((np.abs(c) - np.abs(exact)).sum() / np.abs(exact).sum()) * 1e6 for c in (down, near)]
        assert abs(bias[0] - expected) < 0.03 and abs(bias[1]) < 0.02


# -- errors ----------------------------------------------------------------------------------------------------


def test_no_words() -> None:
    for model in MODELS:
        empty = tensorcore.mma_words(
            np.zeros((0, 64), np.uint8), np.zeros((0, 64), np.uint8), np.zeros(0, np.float32),
            np.zeros((0, 4), np.uint8), np.zeros((0, 4), np.uint8), model=model,
        )  # fmt: skip
        assert empty.shape == (0,) and empty.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("a", np.zeros((2, 63), np.uint8), r"a is uint8 of shape \(2, 64\)"),
        ("a", np.zeros(64, np.uint8), r"a is uint8 of shape"),
        ("b", np.zeros((3, 64), np.uint8), r"b is uint8 of shape \(2, 64\)"),
        ("b", np.zeros((2, 64), np.int8), "b is uint8 .* got int8"),
        ("c", np.zeros(2, np.float64), r"c is float32 of shape \(2,\)"),
        ("c", np.zeros((2, 1), np.float32), r"c is float32 of shape \(2,\)"),
        ("sa", np.zeros((2, 3), np.uint8), r"sa is uint8 of shape \(2, 4\)"),
        ("sb", np.zeros((2, 4), np.float32), r"sb is uint8 of shape \(2, 4\)"),
        ("a", np.full((2, 64), 16, np.uint8), "E2M1 codes are 0..15; got 16"),
        ("model", "hopper", "unknown tensor core model 'hopper'; the models are blackwell"),
    ],
)
def test_errors(name: str, array: Any, message: str) -> None:
    given_words: dict[str, Any] = words(recorded("b200-published")[:2])._asdict()
    given_words[name] = array
    model = given_words.pop("model", "blackwell")
    with pytest.raises((TypeError, ValueError), match=message):
        tensorcore.mma_words(**given_words, model=model)

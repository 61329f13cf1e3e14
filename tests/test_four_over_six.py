"""4over6: both candidates, their errors and the choice against the slow twin."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from inputs import AMAXES, Array, bfloat16, bits, decades, every_class, random, same_bits, slow, ties

import nvfp4ref as nv
from nvfp4ref import e4m3, four_over_six, scalar
from nvfp4ref.arithmetic import Arithmetic
from nvfp4ref.fp32 import canonical_nan
from nvfp4ref.scalar import div, mul

pytestmark = pytest.mark.filterwarnings("error")

MODES = [
    nv.arithmetic("te", four_over_six=measure, e4m3_max=top, four_over_six_fast_error=fast)
    for measure, top, fast in product(("MAE", "MSE"), (448, 256), (False, True))
]
IDS = [f"{ar.four_over_six}-{ar.e4m3_max}{'-fast' * ar.four_over_six_fast_error}" for ar in MODES]


def single(values: Any) -> Array:
    return canonical_nan(np.array(values, np.float64).astype(np.float32))


def judge(x: Array, ar: Arithmetic, block: tuple[int, int], amax: Any = None) -> None:
    """Codes, scales and both errors of every block equal the slow twin's."""
    q = nv.quantize(x, block=block, arithmetic=ar, amax=amax)
    codes, scales = slow(x, ar, block, amax)
    same_bits(q.codes, codes)
    same_bits(q.scales, scales)


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("ar", MODES, ids=IDS)
def test_every_mode_on_ordinary_and_odd_data(ar: Arithmetic, block: tuple[int, int]) -> None:
    """FOUR-OVER-SIX-SCALE, -ERROR, -FAST-ERROR, -SUM, -SELECT"""
    judge(random(16, 32), ar, block)
    judge(decades(16, 32), ar, block)
    judge(every_class(16, 32), ar, block, amax=3.0)


@pytest.mark.parametrize("ar", MODES, ids=IDS)
def test_every_mode_where_the_candidates_tie(ar: Arithmetic) -> None:
    """FOUR-OVER-SIX-SELECT: equal errors keep 6"""
    judge(ties()[::18], ar, (1, 16), amax=2688.0)
    q = nv.quantize(np.full((16, 16), 6, np.float32), arithmetic=ar, amax=np.float32(6 * ar.e4m3_max))
    assert (q.codes == 7).all() and (e4m3.decode(q.scales) == 1).all()
    steps = q.steps
    same_bits(steps.err4, np.zeros((16, 1), np.float32))
    same_bits(steps.err6, np.zeros((16, 1), np.float32))


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("ar", MODES[::3], ids=IDS[::3])
def test_any_tensor_amax(ar: Arithmetic, amax: float) -> None:
    """AMAX-SUPPLIED, SCALE-GLOBAL-GUARD with 4over6"""
    judge(every_class(2, 48, seed=4), ar, (1, 16), amax)


class Mapped(NamedTuple):
    """One candidate of one row of 16 elements, written out once more in scalar float32 operations."""

    byte: int
    error: float


def mapped(row: list[float], factor: float, a: float, amax: float, ar: Arithmetic) -> Mapped:
    """FOUR-OVER-SIX-SCALE, FOUR-OVER-SIX-ERROR, FOUR-OVER-SIX-FAST-ERROR"""
    s, d = scalar.global_scale(amax, ar)
    byte = scalar.e4m3_encode(scalar.fmin(mul(mul(div(a, 6.0), s), factor), 448.0), ar)
    scale = scalar.e4m3_decode(byte)
    e = scalar.fmin(div(1.0, mul(scale, d)), scalar.FLT_MAX)
    error = 0.0
    for x in row:
        q = mul(scalar.e2m1_decode(scalar.e2m1_encode(mul(x, e), ar)), scale)
        if ar.four_over_six_fast_error:
            difference = scalar.sub(q, mul(x, s))
        else:
            difference = scalar.sub(div(mul(q, amax), 6.0 * ar.e4m3_max), x)
        error = scalar.add(error, abs(difference) if ar.four_over_six == "MAE" else mul(difference, difference))
    return Mapped(byte, error)


def tree(errors: list[float]) -> float:
    """FOUR-OVER-SIX-SUM of the 16 rows of a tile"""
    while len(errors) > 1:
        middle = len(errors) // 2
        errors = [scalar.add(u, v) for u, v in zip(errors[:middle], errors[middle:], strict=True)]
    return errors[0]


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("ar", MODES, ids=IDS)
def test_errors_and_choice_are_in_the_steps(ar: Arithmetic, block: tuple[int, int]) -> None:
    """FOUR-OVER-SIX-ERROR, FOUR-OVER-SIX-SUM, FOUR-OVER-SIX-SELECT: element by element"""
    x = random(16, 32)
    q = nv.quantize(x, block=block, arithmetic=ar)
    steps = q.steps
    assert steps.err4 is not None and steps.err6 is not None
    for b in range(2):
        rows = [[float(v) for v in row[16 * b : 16 * b + 16]] for row in x]
        a = [max(map(abs, row)) for row in rows]
        if block == (16, 16):
            a = [max(a)] * 16
        four, six = (
            [mapped(row, factor, a[r], float(q.amax), ar) for r, row in enumerate(rows)] for factor in (1.5, 1.0)
        )
        for candidates, found in ((four, steps.err4), (six, steps.err6)):
            errors = [c.error for c in candidates]
            same_bits(found[:, b], single([tree(errors)] * 16 if block == (16, 16) else errors))
        for r in range(16):
            chosen = four if steps.err4[r, b] < steps.err6[r, b] else six
            assert q.scales[r, b] == chosen[r].byte
    if block == (1, 16):
        assert 0 < (steps.err4 < steps.err6).mean() < 1
    same_bits(e4m3.encode(steps.block_scale), q.scales)
    same_bits(nv.e2m1.encode(steps.scaled), q.codes)


def test_the_error_of_nan_keeps_six() -> None:
    """FOUR-OVER-SIX-SELECT, NaN in a block: no comparison with NaN is true"""
    x = random(1, 32)
    x[0, 3] = np.nan
    for ar in MODES:
        steps = nv.quantize(x, arithmetic=ar, amax=3.0).steps
        assert steps.err4 is not None and steps.err6 is not None
        assert bits(steps.err4)[0, 0] == bits(steps.err6)[0, 0] == 0x7FFFFFFF
        six = mapped([float(v) for v in x[0, :16]], 1.0, float(np.nanmax(np.abs(x[0, :16]))), 3.0, ar)
        assert nv.quantize(x, arithmetic=ar, amax=3.0).scales[0, 0] == six.byte


def test_tree() -> None:
    """FOUR-OVER-SIX-SUM: halves onto halves; the order shows in the last place"""
    error = np.float32(10) ** np.random.default_rng(0).uniform(-6, 6, (32, 3)).astype(np.float32)
    found = four_over_six.block_sum(np.concatenate([error[None], np.zeros((15, 32, 3), np.float32)]), (16, 16))
    for t, b in product(range(2), range(3)):
        column = [float(v) for v in error[16 * t : 16 * t + 16, b]]
        same_bits(found[16 * t : 16 * t + 16, b], single([tree(column)] * 16))
    in_order = np.zeros(3, np.float32)
    for row in error[:16]:
        in_order += row
    assert (in_order != found[0]).any()


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
def test_the_order_of_torch_s_row_sum(block: tuple[int, int]) -> None:
    """PEER-FOUROVERSIX: 8 lanes, 4 accumulators; 16 or 256 values row by row"""
    errors = 10 ** np.random.default_rng(1).uniform(-6, 6, (16, 32, 3)).astype(np.float32)
    found = four_over_six.torch_row_sum(errors, block)
    assert found.shape == (32, 3)
    for top, b in product(range(0, 32, block[0]), range(3)):
        values = [float(v) for r in range(top, top + block[0]) for v in errors[:, r, b]]
        same_bits(found[top : top + block[0], b], single([scalar.torch_row_sum(values)] * block[0]))
    assert (found != four_over_six.block_sum(errors, block)).any()


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
def test_bfloat16_is_its_float32(block: tuple[int, int]) -> None:
    x = random(32, 48).astype(bfloat16)
    for ar in MODES:
        a, b = nv.quantize(x, arithmetic=ar, block=block), nv.quantize(x.astype(np.float32), arithmetic=ar, block=block)
        same_bits(a.packed, b.packed)
        same_bits(a.scales, b.scales)


def test_row_scaled_with_four_over_six() -> None:
    """ROW-SCALED: the errors use each row's own amax and global scale"""
    x = decades(6, 32, low=-6, high=6)
    for ar in MODES:
        rows = nv.arithmetic(ar, row_scaled=True)
        q = nv.quantize(x, arithmetic=rows)
        for r in range(6):
            one = nv.quantize(x[r : r + 1], arithmetic=ar)
            same_bits(q.packed[r : r + 1], one.packed)
            same_bits(q.scales[r : r + 1], one.scales)
            same_bits(q.amax[r], one.amax[()])


def test_the_recipe_s_default() -> None:
    """The preset "four-over-six" is MAE, 256, exact error."""
    ar = nv.PRESETS["four-over-six"]
    assert (ar.four_over_six, ar.e4m3_max, ar.four_over_six_fast_error) == ("MAE", 256, False)
    x = random(16, 32)
    same_bits(nv.quantize(x, arithmetic="four-over-six").packed, nv.quantize(x, arithmetic=MODES[2]).packed)


@pytest.mark.parametrize(
    "fields",
    [{"scale_rounding": r} for r in ("up", "truncate", "half-up", "power-of-two")]
    + [
        {"element_rounding": "truncate"},
        {"negative_zero": "drop"},
        {"scale_overflow": "nan-above-240"},
        {"zero_block_scale": 0x38},
        {"nan_code": 0},
    ],
    ids=str,
)
def test_planted_faults_reach_the_candidates(fields: dict[str, Any]) -> None:
    """A fault of another stage acts in 4over6 as it does without."""
    x = np.concatenate([random(4, 32), np.zeros((2, 32), np.float32)])
    x[0, 0], x[4, 1] = np.nan, -0.0
    x[5, :16] = np.array([102, 48, 64, 24, 32, 16, 8, 96] * 2) / 512  # 6 wins, its scale is a tie: 17
    judge(x, nv.arithmetic("four-over-six", **fields), (1, 16), amax=3.0)
    changed = nv.quantize(x, arithmetic=nv.arithmetic("four-over-six", **fields), amax=3.0)
    plain = nv.quantize(x, arithmetic="four-over-six", amax=3.0)
    assert (changed.packed != plain.packed).any() or (changed.scales != plain.scales).any()

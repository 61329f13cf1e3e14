"""quantize(): directions, slabs, threads, layouts in memory, dtypes, steps, and what it refuses."""

from __future__ import annotations

import pickle
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import AMAXES, FLOAT16, Array, bfloat16, bits, decades, every_class, random, same_bits

import nvfp4ref as nv
from nvfp4ref import e2m1, scaling
from nvfp4ref.arithmetic import _CHOICES
from nvfp4ref.fp32 import canonical_nan

pytestmark = pytest.mark.filterwarnings("error")

PARTS = ("packed", "scales", "amax")
STEPS = ("global_scale", "block_amax", "block_scale", "encode_scale", "scaled", "err4", "err6", "transformed")
#: options that change the path through quantize(), for tests that hold under all of them
OPTIONS: list[dict[str, Any]] = [
    {"arithmetic": name, "block": block} for name, block in product(nv.PRESETS, ((1, 16), (16, 16)))
] + [
    {"arithmetic": nv.arithmetic(name, row_scaled=True)} for name in ("te", "te-reference", "four-over-six")
] + [
    {"rht": nv.RHT()},
    {"rht": nv.RHT(size=32, sign_mask=5), "block": (16, 16)},
    {"rht": nv.RHT(round_to="float32"), "arithmetic": "te-fused-rht"},
    {"rht": nv.RHT(), "arithmetic": "te-reference"},
    {"amax": 2.25},
    {"amax": 2.25, "block": (16, 16), "arithmetic": nv.arithmetic("four-over-six", four_over_six_fast_error=True)},
    {"arithmetic": nv.arithmetic("te", packing="split-half")},
    {"arithmetic": nv.arithmetic("te", packing="high-nibble-first", tile_scales="tiled"), "block": (16, 16)},
]  # fmt: skip


def name_of(option: Any) -> str:
    return "-".join(str(getattr(v, "name", v)) for v in option.values()) if isinstance(option, dict) else str(option)


def equal(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor) -> None:
    for part in PARTS:
        same_bits(getattr(a, part), getattr(b, part))
    assert a.shape == b.shape and a.block == b.block and a.arithmetic == b.arithmetic


def mixed(rows: int, columns: int) -> Array:
    """bfloat16 data of many kinds, NaN and Inf included, but a finite amax where the rest is ordinary."""
    x = decades(rows, columns, low=-12, high=4)
    odd = every_class(rows, columns)
    some = np.random.default_rng(7).random((rows, columns // 16)).repeat(16, axis=1) < 0.05
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.where(some, odd, x).astype(bfloat16)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_columnwise_is_the_quantization_of_the_transpose(option: dict[str, Any], finite: bool) -> None:
    """BLOCK-COLUMNWISE, AMAX-ROW"""
    x = decades(64, 96, low=-9, high=3).astype(bfloat16) if finite else mixed(64, 96)
    column, row = nv.quantize(x, axis=0, **option), nv.quantize(np.ascontiguousarray(x.T), **option)
    equal(column, row)
    a, b = column.steps, row.steps
    for step in STEPS:
        if getattr(a, step) is not None:
            same_bits(getattr(a, step), getattr(b, step))
        else:
            assert getattr(b, step) is None
    assert column.packed.shape == (96, 32) and column.scales.shape == (96, 4) and column.shape == (96, 64)


def views(x: Array) -> dict[str, Array]:
    """The same matrix in every kind of memory."""
    rows, columns = x.shape
    big = np.zeros((rows * 2, columns * 3), x.dtype)
    big[::2, ::3] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    offset = np.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    offset[:] = x
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[:] = x
    return {
        "fortran": np.asfortranarray(x),
        "strided": big[::2, ::3],
        "negative": x[::-1, ::-1].copy()[::-1, ::-1],
        "negative rows": x[::-1].copy()[::-1],
        "read-only": read_only,
        "offset": offset,
        "unaligned": unaligned,
        "window": np.pad(x.view(f"u{x.itemsize}"), 3)[3:-3, 3:-3].view(x.dtype),
    }


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=["float32", "bfloat16"])
def test_memory_layout_does_not_matter(dtype: Any, option: dict[str, Any]) -> None:
    """INPUT-FLATTEN: nothing but the values counts, and the input is left as it was"""
    x = mixed(32, 64).astype(dtype)
    for axis in (-1, 0):
        expected = nv.quantize(x, axis=axis, **option)
        for view in views(x).values():
            before = bits(view.copy())
            equal(nv.quantize(view, axis=axis, **option), expected)
            same_bits(bits(view.copy()), before)


def test_broadcast_input() -> None:
    row = random(1, 32)
    equal(nv.quantize(np.broadcast_to(row, (16, 32))), nv.quantize(np.repeat(row, 16, axis=0)))
    one = np.broadcast_to(np.float32(1.5), (32, 32))
    equal(nv.quantize(one, block=(16, 16), axis=0), nv.quantize(one.copy(), block=(16, 16), axis=0))


EDGES = [
    (1, 16), (1, 4096), (1, 4112), (17, 4112), (16, 1024), (40, 4000),
    (4111, 16), (4112, 16), (127, 528), (144, 512), (129, 528),
]  # fmt: skip


@pytest.mark.parametrize("slab", [2**12, 2**13, None])
@pytest.mark.parametrize("shape", EDGES, ids=str)
@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
def test_slabs_and_threads_do_not_show(
    axis: int, block: tuple[int, int], shape: tuple[int, int], slab: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLOCK-1X16, BLOCK-16X16: each block depends on its own elements and the tensor amax only"""
    if slab is not None:  # 16 and 16 or 32 blocks rowwise, many slabs; None: as it ships, about one
        monkeypatch.setattr(sys.modules["nvfp4ref.quantize"], "SLAB", slab)
    if block == (16, 16):
        shape = (-(-shape[0] // 16) * 16, shape[1])
    x = decades(*shape, low=-12, high=3).astype(bfloat16)
    if axis == 0:
        x = np.ascontiguousarray(x.T)
    whole = nv.quantize(x, block=block, axis=axis)
    equal(nv.quantize(x, block=block, axis=axis, threads=3), whole)
    rows, columns = whole.shape
    height, step = (16, 512) if block == (16, 16) else (13, 208)
    for top in range(0, rows, max(height, rows // 4 // height * height)):
        for left in range(0, columns, max(step, columns // 4 // step * step)):
            part = np.s_[top : top + height, left : left + step]
            piece = x[part] if axis == -1 else x[part[::-1]]
            alone = nv.quantize(piece, block=block, axis=axis, amax=whole.amax)
            same_bits(alone.codes, whole.codes[part])
            same_bits(alone.scales, whole.scales[top : top + height, left // 16 : (left + step) // 16])


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_threads_do_not_show_under_any_option(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.tile(mixed(64, 96), (2, 4))
    expected = {axis: nv.quantize(x, axis=axis, **option) for axis in (-1, 0)}
    monkeypatch.setattr(sys.modules["nvfp4ref.quantize"], "SLAB", 2**12)
    for axis in (0, -1):
        for threads in (1, 2, 5):
            equal(nv.quantize(x, axis=axis, threads=threads, **option), expected[axis])


@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 40),
    axis=st.sampled_from([-1, 0]),
    seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)
@settings(max_examples=40)
def test_rows_are_quantized_one_by_one(rows: int, blocks: int, axis: int, seed: int, threads: int) -> None:
    """BLOCK-1X16 for any shape"""
    x = every_class(rows, 16 * blocks, seed)
    amax = 3.5
    q = nv.quantize(x if axis == -1 else x.T, axis=axis, amax=amax, threads=threads)
    for r in {0, rows // 2, rows - 1}:
        alone = nv.quantize(x[r : r + 1], amax=amax)
        same_bits(q.packed[r : r + 1], alone.packed)
        same_bits(q.scales[r : r + 1], alone.scales)


@pytest.mark.parametrize("row_scaled", [False, True])
@pytest.mark.parametrize("form", _CHOICES["encode_scale"])
def test_many_blocks_are_scaled_like_few(form: str, row_scaled: bool) -> None:
    """SCALE-ENCODE: whatever is shared by the blocks of a large tensor is shared by those of a small one"""
    x = decades(160, 256, low=-6, high=3)
    ar = nv.arithmetic("te", encode_scale=form, row_scaled=row_scaled)
    amax: Any = np.linspace(1, 9, 160, dtype=np.float32) if row_scaled else np.float32(9)
    q = nv.quantize(x, arithmetic=ar, amax=amax)
    for r in range(0, 160, 32):
        rows = slice(r, r + 32)
        part = nv.quantize(x[rows], arithmetic=ar, amax=amax[rows] if row_scaled else amax)
        same_bits(q.packed[rows], part.packed)
        same_bits(q.scales[rows], part.scales)


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_leading_dimensions(option: dict[str, Any]) -> None:
    """INPUT-FLATTEN"""
    x = mixed(48, 64)
    flat = nv.quantize(x, **option)
    for lead in ((48,), (3, 16), (2, 3, 8), (1, 48)):
        for view in (x.reshape(*lead, 64), np.asfortranarray(x.reshape(*lead, 64))):
            q = nv.quantize(view, **option)
            assert q.shape == (*lead, 64) and q.packed.shape == (*lead, 32) and q.scales.shape == (*lead, 4)
            same_bits(q.packed.reshape(48, 32), flat.packed)
            same_bits(q.scales.reshape(48, 4), flat.scales)
            same_bits(q.amax, flat.amax)
            same_bits(q.steps.scaled, flat.steps.scaled)


@pytest.mark.parametrize("option", [o for o in OPTIONS if "compressed" not in name_of(o)], ids=name_of)
def test_sixteen_bits_are_their_float32(option: dict[str, Any]) -> None:
    """INPUT-WIDEN, for arithmetics that do not look at the input's type"""
    x = mixed(32, 64)
    equal(nv.quantize(x, **option), nv.quantize(x.astype(np.float32), **option))
    if "rht" not in option:
        half = FLOAT16.reshape(256, 256)[::8, :48].copy()
        with np.errstate(invalid="ignore"):
            equal(nv.quantize(half, **option), nv.quantize(half.astype(np.float32), **option))


def test_every_bfloat16_and_float16_pattern() -> None:
    """E2M1-RNE, INPUT-WIDEN: with A = 2688 and a block amax of 6 a value's code is its own rounding."""
    for values in (np.arange(2**16, dtype=np.uint16).view(bfloat16), FLOAT16):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            kept = values[~(np.abs(values.astype(np.float32)) > 6)]
        x = np.zeros((-(-kept.size // 15), 16), values.dtype)
        x[:, 0] = 6
        rest = np.zeros(x[:, 1:].size, values.dtype)
        rest[: kept.size] = kept
        x[:, 1:] = rest.reshape(-1, 15)
        q = nv.quantize(x, amax=2688.0)
        assert (q.scales == 0x38).all()
        same_bits(q.codes, e2m1.encode(x))


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_steps_fit_the_outputs(option: dict[str, Any]) -> None:
    """Every intermediate is the one that made the bytes; NaN is canonical; nothing is shared."""
    x = mixed(32, 64)
    for axis in (-1, 0):
        q = nv.quantize(x, axis=axis, **option)
        steps, ar = q.steps, q.arithmetic.for_input("bfloat16")
        rows, columns = q.shape
        for step in STEPS:
            value = getattr(steps, step)
            if value is None:
                continue
            assert value.dtype == np.float32 and value.flags.writeable and not np.shares_memory(value, x)
            if step != "transformed":
                assert (bits(value)[np.isnan(value)] == 0x7FFFFFFF).all()
        assert steps.scaled.shape == (rows, columns)
        assert steps.block_amax.shape == steps.block_scale.shape == steps.encode_scale.shape == (rows, columns // 16)
        assert (steps.err4 is None) == (steps.err6 is None) == (ar.four_over_six is None)
        assert (steps.transformed is None) == ("rht" not in option)
        assert steps.global_scale.shape == q.amax.shape
        if ar.nan_block_codes is None:
            same_bits(q.codes, e2m1.round_elements(steps.scaled.copy(), ar))
        with np.errstate(all="ignore"):
            g = scaling.global_scale(q.amax.reshape(-1, 1) if q.amax.ndim else q.amax, ar)
            same_bits(steps.global_scale, canonical_nan(g.encode.reshape(q.amax.shape).copy()))
            if ar.four_over_six is None and ar.tile_scales == "repeated":
                same_bits(scaling.round_scale(steps.block_scale, steps.block_amax, g, ar), q.scales)


def test_steps_of_te_by_their_formulas() -> None:
    """AMAX-TENSOR, BLOCK-AMAX, SCALE-GLOBAL, SCALE-BLOCK, SCALE-ENCODE, ELEMENT-SCALE, once more in NumPy"""
    x = random(32, 48)
    f = np.float32
    for block in ((1, 16), (16, 16)):
        steps, q = nv.quantize(x, block=block).steps, nv.quantize(x, block=block)
        amax = np.abs(x).max()
        s = f(2688) / amax
        a = np.abs(x).reshape(32, 3, 16).max(axis=2)
        if block == (16, 16):
            a = a.reshape(2, 16, 3).max(axis=1).repeat(16, axis=0)
        scale = a * (s * (f(1) / f(6)))
        e = f(1) / (nv.e4m3.decode(q.scales) * (f(1) / s))
        same_bits(q.amax, np.asarray(amax))
        same_bits(steps.global_scale, np.asarray(s))
        same_bits(steps.block_amax, a)
        same_bits(steps.block_scale, scale)
        same_bits(q.scales, nv.e4m3.encode(scale))
        same_bits(steps.encode_scale, e)
        same_bits(steps.scaled, x * e.repeat(16, axis=1))
        same_bits(q.codes, e2m1.encode(x * e.repeat(16, axis=1)))


@pytest.mark.parametrize("amax", AMAXES)
def test_a_supplied_amax_is_kept_as_it_is(amax: float) -> None:
    """AMAX-SUPPLIED"""
    x = random(4, 32)
    for given_amax in (amax, np.float32(amax), np.array([amax], np.float32), np.array([[amax]], np.float32)):
        same_bits(nv.quantize(x, amax=given_amax).amax, np.array(amax, np.float32))
    rows = nv.arithmetic("te", row_scaled=True)
    q = nv.quantize(x, amax=np.full(4, amax, np.float32), arithmetic=rows)
    same_bits(q.amax, np.full(4, amax, np.float32))
    same_bits(q.packed, nv.quantize(x, amax=amax).packed)


@pytest.mark.parametrize("axis", [-1, 0])
def test_row_scaled_rows_are_tensors_of_one_row(axis: int) -> None:
    """ROW-SCALED, AMAX-ROW"""
    x = mixed(32, 48)
    rows = x if axis == -1 else np.ascontiguousarray(x.T)
    for preset in ("te", "te-reference", "te-2.14"):
        ar = nv.arithmetic(preset, row_scaled=True)
        q = nv.quantize(x, axis=axis, arithmetic=ar)
        for r in range(len(rows)):
            alone = nv.quantize(rows[r : r + 1], arithmetic=preset)
            same_bits(q.packed[r : r + 1], alone.packed)
            same_bits(q.scales[r : r + 1], alone.scales)
            same_bits(q.amax[r], alone.amax[()])
        given_amax = np.linspace(1, 5, len(rows), dtype=np.float32)
        q = nv.quantize(x, axis=axis, arithmetic=ar, amax=given_amax)
        for r in range(len(rows)):
            same_bits(q.packed[r], nv.quantize(rows[r : r + 1], arithmetic=preset, amax=given_amax[r]).packed[0])


def test_zeros_of_both_signs() -> None:
    """SCALE-ZERO-BLOCK, E2M1-ZERO, SCALE-GLOBAL-GUARD"""
    x = np.zeros((16, 32), np.float32)
    x[:, 1::2] = -0.0
    q = nv.quantize(x)
    assert (q.scales == 0).all() and q.amax == 0 and (q.codes[:, ::2] == 0).all() and (q.codes[:, 1::2] == 8).all()
    x[0, 0] = 1
    q = nv.quantize(x)
    assert q.scales[0, 0] == 0x7E and not q.scales[1:].any() and (q.codes[1:, 1::2] == 8).all()


def test_nan_and_inf() -> None:
    """AMAX-NAN, E2M1-NAN, SCALE-GLOBAL-GUARD, E2M1-SATURATE"""
    x = random(2, 32)
    x[0, 0], x[1, 20] = np.nan, -np.inf
    q = nv.quantize(x)
    assert np.isposinf(q.amax) and q.codes[0, 0] == 7
    assert q.scales[1, 1] == 0x7E and q.codes[1, 20] == 15
    q = nv.quantize(np.full((1, 16), np.nan, np.float32))
    assert q.amax == 0 and q.scales.tolist() == [[0]] and (q.codes == 7).all()


def test_fused_rht_is_the_unfused_path_on_finite_data() -> None:
    """FUSED-RHT-GLOBAL, FUSED-RHT-NAN, FUSED-RHT-FAST-MATH (its first half)"""
    x = decades(64, 96, low=-9, high=3).astype(bfloat16)
    rht = nv.RHT()
    fused, plain = nv.quantize(x, axis=0, rht=rht, arithmetic="te-fused-rht"), nv.quantize(x, axis=0, rht=rht)
    for part in PARTS:
        same_bits(getattr(fused, part), getattr(plain, part))
    unrounded = nv.quantize(x, axis=0, rht=nv.RHT(round_to="float32")).steps
    assert unrounded.transformed is not None and plain.steps.transformed is not None
    same_bits(unrounded.transformed.astype(bfloat16).astype(np.float32), plain.steps.transformed)
    assert (unrounded.transformed != plain.steps.transformed).any()


def test_fused_rht_on_what_is_not_finite() -> None:
    """FUSED-RHT-GLOBAL: S of Inf is 0, of NaN and negatives 1; FUSED-RHT-NAN: a NaN block is 0x7F and code 7"""
    x = random(1, 32)
    for amax, s in (
        (np.inf, 0.0),
        (np.nan, 1.0),
        (-2.0, 1.0),
        (0.0, 1.0),
        (2.0, 1344.0),
        (1e-40, float(np.finfo(np.float32).max)),
    ):
        same_bits(nv.quantize(x, amax=amax, arithmetic="te-fused-rht").steps.global_scale, np.array(s, np.float32))
    infinite = nv.quantize(x, amax=np.inf, arithmetic="te-fused-rht")
    assert not infinite.scales.any() and (infinite.codes == 7).all()
    x[0, 5] = np.nan
    q = nv.quantize(x, amax=2.0, arithmetic="te-fused-rht")
    assert q.scales[0, 0] == 0x7F and (q.codes[0, :16] == 7).all()
    same_bits(q.codes[0, 16:], nv.quantize(x, amax=2.0).codes[0, 16:])
    assert bits(nv.quantize(x, arithmetic="te-fused-rht").amax) == 0x7FFFFFFF


def test_the_transposing_kernels_until_2_14() -> None:
    """TE-2-14: (a/6)·S in place of a·(S·fl(1/6)); nothing else differs"""
    x = np.zeros((128, 16), bfloat16)
    x[:, 0] = np.arange(0x3F80, 0x4000, dtype=np.uint16).view(bfloat16)
    old, new = nv.quantize(x, amax=2.03125, arithmetic="te-2.14"), nv.quantize(x, amax=2.03125)
    different = bits(old.steps.block_scale) != bits(new.steps.block_scale)
    assert 0 < different.mean() < 1 and (old.scales != new.scales).any()
    same_bits(old.steps.global_scale, new.steps.global_scale)
    same = old.scales == new.scales
    same_bits(old.packed[same[:, 0]], new.packed[same[:, 0]])
    one = nv.quantize(np.array([[0x3FC3] + [0] * 15], np.uint16).view(bfloat16), amax=2.03125, arithmetic="te-2.14")
    assert one.scales.tolist() == [[0x7A]] and bits(one.steps.block_scale).tolist() == [[0x43A80000]]


def test_results_are_fresh() -> None:
    x, amax = random(32, 32), np.ones(1, np.float32)
    q = nv.quantize(x, amax=amax)
    for part in (q.packed, q.scales, q.amax):
        assert (
            not np.shares_memory(part, x)
            and not np.shares_memory(part, amax)
            and part.flags.owndata
            or part.base is not None
        )
    amax[0] = 7
    assert q.amax == 1
    again = nv.quantize(x, amax=1.0)
    q.packed[:] = 0
    assert again.packed.any() and nv.quantize(x, amax=1.0).packed.any()


def test_lists_and_numpy_integers_are_taken_as_options() -> None:
    x = random(32, 32)
    equal(nv.quantize(x, block=[16, 16]), nv.quantize(x, block=(16, 16)))  # type: ignore[arg-type]
    numbers: Any = np.array([16, 16, 2])
    equal(nv.quantize(x, block=(numbers[0], numbers[1]), threads=numbers[2]), nv.quantize(x, block=(16, 16)))


X = random(16, 32)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"block": (16, 1)}, ValueError, r"block is \(1, 16\) or \(16, 16\); got \(16, 1\)"),
        ({"block": 16}, ValueError, r"block is \(1, 16\) or \(16, 16\); got 16"),
        ({"block": None}, ValueError, r"block is \(1, 16\) or \(16, 16\); got None"),
        ({"axis": 1}, ValueError, "axis is -1 .*; got 1"),
        ({"rounding": "up"}, ValueError, "rounding is 'nearest-even'.*; got 'up'"),
        ({"rounding": "stochastic"}, ValueError, "rbits|rounding"),
        ({"rbits": np.zeros((16, 8), np.uint32)}, ValueError, "rbits are random words for stochastic rounding"),
        ({"rht": 16}, TypeError, "rht is an nvfp4ref.RHT or None; got int"),
        ({"threads": 0}, ValueError, "threads is a positive integer; got 0"),
        ({"threads": -2}, ValueError, "threads is a positive integer; got -2"),
        ({"threads": 1.5}, ValueError, "threads is a positive integer; got 1.5"),
        ({"threads": None}, ValueError, "threads is a positive integer; got None"),
        ({"arithmetic": "tf"}, ValueError, "unknown arithmetic 'tf'; the presets are te"),
        ({"arithmetic": None}, (ValueError, TypeError), "arithmetic"),
        ({"arithmetic": ["te"]}, (ValueError, TypeError), "arithmetic"),
        (
            {"arithmetic": nv.arithmetic("te", row_scaled=True), "block": (16, 16)},
            ValueError,
            "row-scaled amax goes with 1x16",
        ),
        (
            {"arithmetic": nv.arithmetic("te", row_scaled=True), "rht": nv.RHT()},
            ValueError,
            "row-scaled amax goes with 1x16",
        ),
        ({"arithmetic": "four-over-six", "rht": nv.RHT()}, ValueError, "4over6 does not go with the Hadamard"),
        ({"amax": "3"}, TypeError, "amax is a float32 number or array; got str"),
        ({"amax": True}, TypeError, "amax is a float32 number or array; got bool"),
        ({"amax": 1j}, TypeError, "amax is a float32 number or array; got complex"),
        ({"amax": [1.0, 2.0]}, ValueError, r"amax has one value; got shape \(2,\)"),
        ({"amax": np.ones(16, np.float32)}, ValueError, r"amax has one value; got shape \(16,\)"),
        (
            {"amax": 1.0, "arithmetic": nv.arithmetic("te", row_scaled=True)},
            ValueError,
            r"each of the 16 rows of the result; got shape \(\)",
        ),
        (
            {"amax": np.ones(16), "arithmetic": nv.arithmetic("te", row_scaled=True), "axis": 0},
            ValueError,
            r"each of the 32 rows of the result; got shape \(16,\)",
        ),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        nv.quantize(X, **options)
    assert "\n" not in str(raised.value)


def test_a_tensor_can_be_pickled_with_its_steps() -> None:
    x = np.linspace(-3, 3, 512, dtype=np.float32).reshape(16, 32)
    q = nv.quantize(x)
    back = pickle.loads(pickle.dumps(q))
    assert (back.packed == q.packed).all() and back.arithmetic == q.arithmetic
    assert (back.steps.scaled == q.steps.scaled).all()


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(TypeError, match="masked"):
        nv.quantize(np.ma.masked_array(np.ones((16, 16), np.float32), mask=True))

"""The figures of a study against their definitions, written out plainly on whole arrays."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import Array, bfloat16, decades, random

import nvfp4ref as nv
from nvfp4ref import study
from nvfp4ref.recipe import RECIPES
from nvfp4ref.study import formats, pieces, schemes, statistics
from nvfp4ref.study.statistics import Facts, Moments, Shape, Sums

F32 = np.float32
#: the formats of a default study, and one of every further kind
FORMATS = (
    *study.DEFAULT,
    "nvfp4+columnwise",
    "nvfp4+columnwise+rht+sr",
    "nvfp4+row-scaled+columnwise",
    "torchao+16x16",
    "te-jax+sr",
    "nvfp4+sr+headroom",
    "nvfp4+row-scaled+sr",
    "mxfp4+ceil+sr",
    "mxfp4+columnwise",
    "fp8+128x128",
    "nvfp4+rht128",
)


def exact(x: Array) -> Array:
    return np.asarray(x, np.float64)


def direct(name: str, x: Array, columnwise: bool = False) -> Any:
    """The quantizer called on the whole array: (what was read, its tensor)."""
    given = np.ascontiguousarray(x.T) if columnwise else x
    if "rht" in name:
        given = nv.hadamard.transform(given.astype(bfloat16), formats._rht(study.named(name).rht))
    one = study.named(name)
    if one.family == "mxfp4":
        return given, nv.mxfp4.quantize(given, scale="ceil" if one.ceil else "floor")
    if one.family == "fp8":
        return given, nv.fp8.quantize(given, tile=one.block)
    return given, nv.quantize(given, block=one.block, arithmetic=one.arithmetic)


def decoded(q: Any) -> Array:
    return exact(nv.dequantize(q) if isinstance(q, nv.NVFP4Tensor) else q.dequantize())


@pytest.mark.parametrize(
    "x", [random(256, 384, 3), decades(256, 256, 4, low=-3, high=3).astype(bfloat16)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("name", [name for name in FORMATS if "sr" not in name])
def test_figures_are_what_they_are_defined_as(name: str, x: Array) -> None:
    one = study.named(name)
    given, q = direct(name, x, one.columnwise)
    found = study.measure(x, name)[name]
    read, y = exact(given), decoded(q)
    e = y - read
    magnitude = q.codes & (7 if one.has_e2m1 else 0x7F)
    lost = (magnitude == 0) & (read != 0)
    expected = {
        "relative_mse": (e * e).sum() / (read * read).sum(),
        "snr_db": -10 * math.log10((e * e).sum() / (read * read).sum()),
        "cosine": (y * read).sum() / math.sqrt((y * y).sum() * (read * read).sum()),
        "gain": (y * read).sum() / (read * read).sum(),
        "shrinkage": np.abs(y).sum() / np.abs(read).sum(),
        "max_error_of_amax": np.abs(e).max() / np.abs(read).max(),
        "zero_codes": np.mean(magnitude == 0),
        "te_underflows_percent": 100 * lost.mean(),
        "underflow_part": (e[lost] ** 2).sum() / (e * e).sum(),
        "amax": np.abs(exact(x)).max(),
        "rms": math.sqrt((exact(x) ** 2).mean()),
        "zeros": np.mean(x == 0),
    }
    if one.family == "nvfp4":
        clipped = np.abs(q.steps.scaled) > 6
        expected |= {
            "clipped": clipped.mean(),
            "clipping_part": (e[clipped] ** 2).sum() / (e * e).sum(),
            "scale_zero": np.mean(q.scales == 0),
            "scale_subnormal": np.mean((q.scales > 0) & (q.scales < 8)),
            "scale_utilisation": q.block_scales.max() / 448,
        }
    for key, value in expected.items():
        assert found.figures[key] == pytest.approx(float(value), rel=1e-5, abs=1e-12), key
    parts = [found.figures[f"{part}_part"] for part in ("rounding", "underflow", "clipping")]
    assert sum(parts) == pytest.approx(1)

    rows, channels = ((e * e).sum(axis=k) / (read * read).sum(axis=k) for k in (1, 0))
    rows, channels = (channels, rows) if one.columnwise else (rows, channels)
    assert found.rows == pytest.approx(rows, rel=1e-5) and found.channels == pytest.approx(channels, rel=1e-5)
    assert found.figures["row_mse_max"] == found.rows.max() and found.rows.argmax() == found.figures["worst_row"]
    assert found.figures["channel_mse_median"] == pytest.approx(np.median(channels), rel=1e-5)
    height, width = one.block
    tiles = (v.reshape(len(v) // height, height, -1, width).sum(axis=(1, 3)) for v in (e * e, read * read))
    with np.errstate(invalid="ignore"):
        blocks = np.divide(*tiles)
    assert found.blocks == pytest.approx(blocks, rel=1e-3, nan_ok=True)

    counts = np.bincount(q.codes.ravel(), minlength=256)
    assert np.array_equal(found.sums.codes, counts)
    if one.family != "fp8":
        assert np.array_equal(found.sums.scales, np.bincount(q.scales[::height].ravel(), minlength=256))


def test_a_block_scale_that_is_not_rounded() -> None:
    """T17: scale_part and scale_only."""
    x = random(512, 1024, 5)
    found = study.measure(x, ["nvfp4", "mxfp4", "fp8", "nvfp4+sr"])
    exact_scale = schemes.blocks_of(x, 16, "exact")
    e2 = (exact(exact_scale - x) ** 2).sum() / (exact(x) ** 2).sum()
    nvfp4 = found["nvfp4"].figures
    assert nvfp4["scale_part"] == pytest.approx(1 - e2 / nvfp4["relative_mse"], abs=1e-3)
    q = nv.quantize(x)
    amax = np.abs(x).reshape(len(x), -1, 16).max(axis=2)
    ratio = exact(q.block_scales) / (exact(amax) / 6 * (2688 / amax.max()))
    energy = (exact(x) ** 2).reshape(len(x), -1, 16).sum(axis=2)
    assert nvfp4["scale_only"] == pytest.approx((energy * (ratio - 1) ** 2).sum() / energy.sum(), rel=1e-4)
    assert found["mxfp4"].figures["scale_part"] > 0.2 and math.isnan(found["mxfp4"].figures["scale_only"])
    assert math.isnan(found["fp8"].figures["scale_part"]) and math.isnan(found["nvfp4+sr"].figures["scale_part"])


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4+16x16", "four-over-six", "mxfp4"])
def test_rows_against_columns(name: str) -> None:
    """T18"""
    x = random(256, 512, 6)
    found = study.measure(x, name)[name].figures
    _, by_row = direct(name, x)
    _, by_column = direct(name, x, columnwise=True)
    gap = decoded(by_row) - decoded(by_column).T
    assert found["transposed_inconsistency"] == pytest.approx((gap**2).sum() / (exact(x) ** 2).sum(), rel=1e-5)
    assert found["transposed_differ"] == np.mean(gap != 0)
    if name == "nvfp4+16x16":
        assert found["transposed_inconsistency"] == 0


# -- Transformer Engine's debug statistics ---------------------------------------------------------------------------


@pytest.fixture(name="te", scope="module")
def imported() -> ModuleType:
    """transformer_engine.debug.features.utils.stats_computation, as installed."""
    pytest.importorskip("torch")
    if not any(one.metadata["Name"] == "transformer-engine" for one in importlib.metadata.distributions()):
        pytest.skip("transformer-engine is not installed")
    from nvfp4hw.backends._te_package import import_file, module

    packages = ("common", "pytorch", "debug", "debug.features", "debug.features.utils")
    stand_ins = {
        "transformer_engine.common.recipe": module("transformer_engine.common.recipe", Format=None),
        "transformer_engine.pytorch": module("transformer_engine.pytorch", DType=None),
    }
    found: ModuleType = import_file("debug.features.utils.stats_computation", packages, stand_ins)
    return found


class _Quantized:
    """The three things that the statistics ask of Transformer Engine's tensor."""

    def __init__(self, q: nv.NVFP4Tensor, dtype: Any) -> None:
        import torch

        self._rowwise_data = torch.from_numpy(q.packed)
        self._values = torch.from_numpy(nv.dequantize(q)).to(dtype)

    def numel(self) -> int:
        return self._values.numel()

    def dequantize(self) -> Any:
        return self._values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_transformer_engines_own_code_gives_the_same(te: ModuleType, dtype: str, block: tuple[int, int]) -> None:
    torch = importlib.import_module("torch")
    x = decades(128, 256, 7, low=-6, high=2)
    x[3, :40] = 0
    given = x.astype(bfloat16) if dtype == "bfloat16" else x
    aux = {"nvfp4": _Quantized(nv.quantize(given, block=block), getattr(torch, dtype))}
    tensor = torch.from_numpy(given.astype(F32)).to(getattr(torch, dtype))
    found = study.measure(given, "nvfp4" if block == (1, 16) else "nvfp4+16x16").popitem()[1].figures
    underflows = te.STATS["nvfp4_underflows%"][0](tensor, aux)
    assert found["te_underflows_percent"] == pytest.approx(float(underflows), rel=1e-6)
    mse = float(te.STATS["nvfp4_mse"][0](tensor, aux))
    # theirs is a number of the tensor's type
    assert found["te_mse"] == pytest.approx(mse, rel=1e-5 if dtype == "float32" else 2**-8)
    ranges = te.compute_max_blockwise_dynamic_range(tensor, te.BlockwiseDynamicRangeStat(16, 1, False))
    assert found["block_range_max"] == pytest.approx(float(ranges), rel=1e-6)


# -- the tensor itself -----------------------------------------------------------------------------------------------


def test_kurtosis_before_and_after_a_transform() -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_t(5, (256, 384)).astype(F32)
    x[:, 7::16] *= 12
    found = study.measure(x)["nvfp4"].figures

    def kurtosis(v: Array) -> float:
        v = exact(v) - exact(v).mean()
        return float((v**4).mean() / (v**2).mean() ** 2)

    assert found["kurtosis"] == pytest.approx(kurtosis(x), rel=1e-5)
    signs = np.tile([-1.0 if nv.RHT().sign_mask >> i & 1 else 1.0 for i in range(16)], 8)
    for size in (4, 16, 128):
        turned = (exact(x).reshape(-1, size) * signs[:size]) @ exact(schemes.hadamard(size))
        if size == 4:  # the signs go on along the row, not anew for each vector
            turned = (exact(x).reshape(-1, 16) * signs[:16]).reshape(-1, 4) @ exact(schemes.hadamard(4))
        assert found[f"kurtosis_rht{size}"] == pytest.approx(kurtosis(turned), rel=1e-4), size
    assert found["kurtosis_rht128"] < found["kurtosis_rht16"] < found["kurtosis_rht4"] < found["kurtosis"]
    assert found["outliers"] == np.mean(np.abs(x) > 6 * np.sqrt((exact(x) ** 2).mean()))
    assert found["outlier_channels"] == 24 / 384


def test_blocks_and_range() -> None:
    x = np.zeros((16, 32), F32)
    x[0, 0], x[0, 1], x[1, 16], x[2, :16] = 8, 2**-10, 3, 1
    found = study.measure(x)["nvfp4"]
    assert found.figures["block_range_max"] == 13 and found.figures["dynamic_range"] == 13
    crest = found.shape.moments[1].crest
    edges = statistics.crest_edges()
    there = {float(edges[i]): int(crest[i]) for i in np.flatnonzero(crest)}
    assert there == {1.0: 1, edges[-2]: 2}  # sixteen equal elements; one value and (almost) zeros, twice
    assert found.figures["lost"] == 0 and found.figures["zeros"] == 1 - 19 / 512


def test_a_narrow_tensor_has_no_large_transform() -> None:
    found = study.measure(random(32, 96, 1))["nvfp4"].figures
    assert math.isfinite(found["kurtosis_rht16"]) and math.isnan(found["kurtosis_rht128"])
    found = study.measure(random(32, 24, 1))["nvfp4"].figures
    assert math.isfinite(found["kurtosis_rht4"])
    found = study.measure(random(3, 5, 1))["nvfp4"].figures
    assert math.isnan(found["kurtosis_rht4"]) and math.isfinite(found["relative_mse"])


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (2, 40), (17, 33), (130, 200), (5, 2000)])
def test_what_is_added_to_fill_blocks_is_not_counted(shape: tuple[int, int]) -> None:
    x = random(*shape, 9) + F32(0.1)
    whole = np.zeros((-(-shape[0] // 128) * 128, -(-shape[1] // 128) * 128), F32)
    whole[: shape[0], : shape[1]] = x
    for name in ("nvfp4", "nvfp4+16x16", "mxfp4", "fp8", "fp8+128x128", "nvfp4+row-scaled", "nvfp4+columnwise"):
        one = study.named(name)
        _, q = direct(name, whole, one.columnwise)
        y = decoded(q).T if one.columnwise else decoded(q)
        e = y[: shape[0], : shape[1]] - exact(x)
        found = study.measure(x, name)[name]
        assert found.figures["relative_mse"] == pytest.approx((e**2).sum() / (exact(x) ** 2).sum(), rel=1e-5), name
        assert found.sums.n == x.size == found.sums.codes.sum() == found.sums.mag_n.sum() == found.sums.signed.sum()
        assert found.sums.padded == -shape[0 if one.columnwise else 1] % one.block[1]
        assert found.rows.shape == (shape[0],) and found.channels.shape == (shape[1],)


def test_numbers_that_are_not_finite_are_left_out_and_counted() -> None:
    x = random(64, 128, 10)
    clean = study.measure(x)["nvfp4"].figures
    x[3, 5], x[7, 9] = np.nan, np.nan
    found = study.measure(x, ["nvfp4", "mxfp4", "fp8"])
    assert found["nvfp4"].figures["nan"] == 2 and found["nvfp4"].figures["inf"] == 0
    assert found["nvfp4"].sums.n == x.size - 2 and found["nvfp4"].figures["lost"] == 2
    assert found["nvfp4"].figures["relative_mse"] == pytest.approx(clean["relative_mse"], rel=0.02)
    assert found["mxfp4"].figures["lost"] == 64  # MXFP4 has a scale that is NaN: the block is lost
    x[9, 9] = np.inf
    found = study.measure(x, ["nvfp4", "nvfp4+16x16", "fp8"])
    assert found["nvfp4"].figures["inf"] == 1
    assert found["nvfp4"].figures["lost"] == x.size  # an infinite amax decodes everything to NaN or Inf
    assert math.isnan(found["nvfp4"].figures["relative_mse"])
    nothing = study.measure(np.full((32, 32), np.nan, F32))["nvfp4"].figures
    assert nothing["lost"] == 1024 and math.isnan(nothing["gain"]) and math.isnan(nothing["kurtosis"])


def test_a_preset_that_propagates_nan() -> None:
    x = random(64, 128, 11)
    x[0, 0] = np.nan
    found = study.measure(x, ["torchao", "nvfp4"])
    assert found["torchao"].figures["lost"] == x.size and found["nvfp4"].figures["lost"] == 1


@pytest.mark.parametrize("columns", [40, 64, 192])
@pytest.mark.parametrize(
    "name", ["nvfp4+rht", "nvfp4+rht128", "nvfp4+columnwise+rht", "mxfp4+sr", "te-jax+sr", "nvfp4+sr"]
)
def test_other_formats_change_no_figure(name: str, columns: int) -> None:
    """Nor are the zeros that they are filled up with counted."""
    x = random(48, columns, 25)
    alone = study.measure(x, name)[name]
    others = study.measure(x, [name, "fp8", "fp8+128x128", "nvfp4+16x16", "nvfp4+rht256"])[name]
    assert others.figures == pytest.approx(alone.figures, rel=0, abs=0, nan_ok=True)
    length, size = (48 if alone.format.columnwise else columns), alone.format.rht or 1
    assert alone.sums.n + alone.lost == x.size // length * -(-length // size) * size == alone.sums.codes.sum()


@pytest.mark.parametrize(("shape", "name"), [((90, 700), "nvfp4+rht256"), ((512, 256), "nvfp4+rht128+columnwise")])
def test_pieces_cut_no_transform(shape: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(*shape, 26)
    whole = study.measure(x, name)[name]
    monkeypatch.setattr(pieces, "PIECE", 1 << 14)
    found = study.measure(x, name)[name]
    assert found.sums.n == whole.sums.n and np.array_equal(found.sums.codes, whole.sums.codes)


@pytest.mark.parametrize("name", ["te-jax", "mxfp4", "mxfp4+sr", "te-jax+sr"])
def test_what_a_format_loses_is_left_out_of_every_figure(name: str) -> None:
    """The rest of the tensor has the figures that it has when x is zero where the format lost it."""
    x = random(64, 96, 0)
    if name.startswith("mxfp4"):
        x[3, 5] = np.nan
    one = study.named(name)
    found = study.measure(x, name)[name]
    assert found.lost > 1
    amax = np.asarray(np.nanmax(np.abs(x)))
    random_ = pieces._Piece(
        pieces.Tensor("x", (64, 96), (one,)), pieces.Survey(), pieces.Measured(), x, slice(0, 64), slice(0, 96)
    )._random(one, (64, 96))
    q = one.apply(x, amax, random_)
    there = np.isfinite(q.y) & np.isfinite(x)
    e, kept = np.where(there, exact(q.y) - exact(x), 0), np.where(there, exact(x), 0)
    assert found.lost == x.size - there.sum()
    rows = (e**2).sum(1) / (kept**2).sum(1)
    assert found.rows == pytest.approx(rows, rel=1e-12)
    assert found.row_mse_max == pytest.approx(rows.max(), rel=1e-12)
    if one.stochastic:
        # a draw is worth what any other is: the mean of one has about the error of the tensor
        assert found.mean_of_1 == pytest.approx(found.relative_mse, rel=0.2) and found.mean_of_64 < found.mean_of_1 / 5
    else:
        assert q.exact is not None
        other = np.where(there, exact(q.exact) - exact(x), 0)
        assert found.scale_part == pytest.approx(1 - (other**2).sum() / (e**2).sum(), rel=1e-9)


@pytest.mark.parametrize("power", [-80, -74, 66, 110])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nvfp4+sr", "fp8"])
def test_no_relative_figure_depends_on_the_magnitude(name: str, power: int) -> None:
    """A power of two leaves every quantizer's codes as they are, and so every figure without a unit."""
    x = random(64, 128, 27)
    plain, scaled = (study.measure(v, name)[name] for v in (x, np.ldexp(x, power)))
    with_unit = {"amax": 1, "rms": 1, "te_mse": 2}
    for key, value in plain.figures.items():
        expected = math.ldexp(value, power * with_unit.get(key, 0))
        assert scaled.figures[key] == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True), key
    assert np.array_equal(scaled.blocks, plain.blocks, equal_nan=True)
    for key in ("signed", "relative", "log_error", "log_relative", "mag_n", "blocks"):
        assert np.array_equal(getattr(scaled.sums, key), getattr(plain.sums, key)), key
    for key in ("mag_e2", "mag_x2", "code_e2"):
        assert np.array_equal(getattr(scaled.sums, key), np.ldexp(getattr(plain.sums, key), 2 * power)), key


def test_zeros_have_no_relative_error() -> None:
    found = study.measure(np.zeros((32, 64), F32), [name for name in FORMATS if "torchao" not in name])
    for name, one in found.items():
        assert math.isnan(one.figures["relative_mse"]) and one.figures["zero_codes"] == 1, name
        assert one.figures["te_underflows_percent"] == 0 and np.isnan(one.rows).all()
    assert study.measure(np.zeros((32, 64), F32), "torchao")["torchao"].figures["lost"] == 2048  # 0/0 is its own


def test_exact_numbers_have_no_error() -> None:
    x = np.tile(nv.e2m1.VALUES, (16, 4)).astype(F32)
    found = study.measure(x, ["nvfp4", "nvfp4+sr"])
    for one in found.values():
        assert one.figures["relative_mse"] == 0 and one.figures["snr_db"] == math.inf and one.figures["gain"] == 1
    assert found["nvfp4"].sums.codes[:16].tolist() == [64] * 16


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((0, 16), F32), "a matrix with elements; got shape (0, 16)"),
        (np.zeros(16, F32), "x.reshape(1, -1)"),
    ],
)
def test_no_matrix(x: Array, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        study.measure(x)
    assert message in str(caught.value)


def test_types() -> None:
    x = random(32, 64, 12)
    leading = study.measure(x.reshape(4, 8, 64))["nvfp4"].figures
    assert leading == pytest.approx(study.measure(x)["nvfp4"].figures, rel=0, nan_ok=True)
    assert study.measure(exact(x))["nvfp4"].relative_mse == study.measure(x)["nvfp4"].relative_mse
    with pytest.raises(TypeError, match="got dtype int64"):
        study.measure(np.zeros((16, 16), np.int64))
    with pytest.raises(AttributeError, match="no figure 'mse'; there are relative_mse"):
        _ = study.measure(x)["nvfp4"].mse


def test_one_level_of_scales() -> None:
    """T14: without a tensor scale a narrow tensor has more error."""
    one_level = study.Format("one level", arithmetic=nv.arithmetic("te", global_scale="none"))
    for sigma, expected in ((0.02, 0.01063), (0.01, 0.0158)):
        x = random(512, 512, 18) * F32(sigma)
        found = study.measure(x, [one_level, "nvfp4"])
        assert found["one level"].relative_mse == pytest.approx(expected, rel=0.01)
        assert found["one level"].relative_mse > found["nvfp4"].relative_mse
        blocks = schemes.blocks_of(x, 16)
        assert found["one level"].relative_mse == pytest.approx(
            float(((blocks - x) ** 2).sum() / (x**2).sum()), rel=1e-5
        )


# -- stochastic rounding ---------------------------------------------------------------------------------------------


def test_bias_of_stochastic_rounding() -> None:
    """T22: the mean of B draws falls as 1/B to the bias, which 16/17 takes away."""
    x = random(128, 1024, 13)
    found = study.measure(x, ["nvfp4+sr", "nvfp4+sr+headroom", "te-jax+sr", "mxfp4+ceil+sr"])
    te, free = found["nvfp4+sr"].figures, found["nvfp4+sr+headroom"].figures
    assert te["mean_of_1"] == pytest.approx(0.0188, rel=0.05)
    assert te["bias_power"] == pytest.approx(1.02e-4, rel=0.25)
    for b in (4, 16, 64):
        assert te[f"mean_of_{b}"] == pytest.approx(1.02e-4 + (0.0188 - 1.02e-4) / b, rel=0.1)
    assert abs(free["bias_power"]) < 1e-5 and abs(found["mxfp4+ceil+sr"].figures["bias_power"]) < 1e-5
    assert math.isnan(study.measure(x)["nvfp4"].figures["mean_of_4"])


def test_random_words_depend_on_seed_and_name_only() -> None:
    x = random(64, 128, 14)

    def codes(**how: Any) -> list[int]:
        counts: list[int] = study.measure(x, "nvfp4+sr", **how)["nvfp4+sr"].sums.codes.tolist()
        return counts

    assert codes() == codes() == codes(seed=0, name="x")
    assert codes(seed=1) != codes() and codes(name="y") != codes() and codes(seed=1) != codes(name="y")


# -- counting in parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(700, 96), (260, 1500), (3, 40_000), (16, 16)])
def test_parts_add_up_to_the_whole(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(*shape, 15)
    chosen = study.several(["nvfp4", "nvfp4+16x16", "nvfp4+rht", "nvfp4+row-scaled+columnwise", "mxfp4", "nvfp4+sr"])
    monkeypatch.setattr(pieces, "PIECE", 1 << 14)
    tensor = pieces.Tensor("x", shape, chosen)
    whole = slice(0, shape[0]), slice(0, shape[1])
    survey = pieces.survey(tensor, lambda r, c: x[r, c], *whole)
    expected = pieces.measure_part(tensor, survey, lambda r, c: x[r, c], *whole)
    parts = list(tensor.parts(1 << 15))
    assert len(parts) > 1 or x.size < 1 << 15
    joined, found = pieces.Survey(), pieces.Measured.empty(tensor)
    for rows, columns in parts:
        joined.add(pieces.survey(tensor, lambda r, c: x[r, c], rows, columns), tensor, rows, columns)
    for rows, columns in parts:
        found.add(pieces.measure_part(tensor, joined, lambda r, c: x[r, c], rows, columns), rows, columns)
    for key, amax in survey.amax.items():
        assert np.array_equal(joined.amax[key], amax), key
    for one in chosen:
        a, b = (pieces.record(joined, measured, one) for measured in (expected, found))
        assert a == pytest.approx(b, rel=1e-9, nan_ok=True)
        assert np.array_equal(expected.sums[one.name].codes, found.sums[one.name].codes)


def test_very_many_rows_have_no_figures_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LINES", 64)
    found = study.measure(random(100, 64, 16))["nvfp4"]
    assert math.isnan(found.figures["row_mse_max"]) and found.figures["channel_mse_max"] > 0
    assert found.rows.size == 0


def test_what_is_not_finite_survives_json() -> None:
    sums = Sums(e2=math.inf, sum_e=-math.inf, x2=math.nan)
    sums.code_e2[2:4] = math.inf, math.nan
    again = Sums.from_json(json.loads(json.dumps(sums.to_json(), allow_nan=False)))
    assert (again.e2, again.sum_e) == (math.inf, -math.inf) and math.isnan(again.x2)
    assert np.array_equal(again.code_e2, sums.code_e2, equal_nan=True)


def test_counts_survive_json() -> None:
    found = study.measure(random(64, 64, 17), ["nvfp4", "fp8"])
    for one in found.values():
        again = Sums.from_json(one.sums.to_json())
        assert statistics.figures(one.format, again) == pytest.approx(
            statistics.figures(one.format, one.sums), nan_ok=True, rel=0
        )
        assert np.array_equal(again.log_error, one.sums.log_error)
        shape = Shape.from_json(one.shape.to_json())
        assert shape.moments[16].kurtosis == one.shape.moments[16].kurtosis
        assert np.array_equal(shape.ranges, one.shape.ranges)


@given(st.floats(2.0**-27, 2.0**11, width=32))
def test_bins_of_magnitudes(v: float) -> None:
    bin_ = int(statistics.magnitude_bins(np.array([v], F32))[0])
    edges = statistics.magnitude_edges()
    assert edges[bin_] <= v < edges[bin_ + 1]


def test_bins_at_the_ends() -> None:
    v = np.array([0, 1e-38, 1e-12, 4096, 1e30, np.inf], F32)
    assert statistics.magnitude_bins(v).tolist() == [0, 0, 0, *[statistics.BINS - 1] * 3]
    signed = statistics._signed_bins(np.array([-np.inf, -1.001, -1, -0.001, 0, 0.0199, 0.99, 1, 9], F32))
    assert signed.tolist() == [0, 0, 1, 50, 51, 51, 100, 101, 101]
    assert len(statistics.signed_edges()) == statistics.SIGNED - 1


def test_moments_and_facts_of_nothing() -> None:
    assert math.isnan(Moments().kurtosis) and Facts().rms == 0
    assert math.isnan(statistics.quantile(np.zeros(statistics.BINS), 0.5))
    flat = Moments()
    flat.count(np.ones((2, 16), F32))
    assert math.isnan(flat.kurtosis)  # no variance


# -- formats ---------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert study.named("nvfp4") == study.named("te") and study.named("te").name == "te"
    assert study.named("nvfp4+16x16+sr").block == (16, 16) and study.named("mxfp4+ceil").ceil
    assert study.named("four-over-six").arithmetic == nv.arithmetic("four-over-six")
    assert study.named("nvfp4+rht").rht == 16 and study.named("mxfp4+rht32").rht == 32
    assert [one.name for one in study.several(["nvfp4", "te", "nvfp4"])] == ["nvfp4"]  # each arithmetic once
    titles = {name: study.named(name).title for name in ("nvfp4+rht128+sr", "mxfp4+ceil", "torchao", "fp8+128x128")}
    assert list(titles.values()) == ["NVFP4 RHT 128 SR", "MXFP4 ceil", "torchao", "FP8 E4M3 128x128"]
    for preset in nv.PRESETS:
        assert study.named(preset).arithmetic.name == preset


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp5", "unknown format 'nvfp5'; bases nvfp4, te"),
        ("nvfp4+2d", "unknown modifier '2d'"),
        ("mxfp4+row-scaled", "unknown modifier 'row-scaled'"),
        ("fp8+16x16", "unknown modifier '16x16'"),
        ("nvfp4+ceil", "unknown modifier 'ceil'"),
        ("nvfp4+rht3", "RHT size is a power of two"),
        ("four-over-six+sr", "four-over-six+sr: 4over6 does not go with stochastic rounding"),
        ("nvfp4+row-scaled+16x16", "row-scaled amax goes with 1x16 blocks"),
        ("fp8+sr", "FP8 is rounded to nearest even"),
        ("nvfp4+rht256+columnwise", "columnwise goes with transforms of up to 128"),
        ("nvfp4+rht0", "unknown modifier 'rht0'"),
        ("nvfp4+rht+rht4", "a modifier is given twice, or two sizes of rht"),
        ("nvfp4+sr+sr", "a modifier is given twice"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        study.named(name)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_formats_that_no_study_takes() -> None:
    with pytest.raises(ValueError, match="an inverted global scale does not decode"):
        study.Format("mine", arithmetic=nv.arithmetic("te", global_scale="inverted"))
    with pytest.raises(ValueError, match="family is one of nvfp4, mxfp4, fp8"):
        study.Format("mine", family="int4")
    with pytest.raises(ValueError, match="at least one format"):
        study.several([])
    with pytest.raises(ValueError, match="two formats have one name"):
        study.several(["nvfp4", study.Format("nvfp4", block=(16, 16))])


@pytest.mark.parametrize("name", [*RECIPES])
def test_formats_of_a_recipe_are_those_of_its_operands(name: str) -> None:
    found = study.of_recipe(name)
    for one in found:
        if one.arithmetic.name == "te" or one.arithmetic == nv.arithmetic("four-over-six"):
            assert study.named(one.name) == one or one.arithmetic.four_over_six, one.name
    names = {one.name for one in found}
    assert any("sr" in one for one in names) and any("16x16" in one for one in names)
    if name == "te":
        assert names == {
            "nvfp4",
            "nvfp4+16x16",
            "nvfp4+sr",
            "nvfp4+16x16+columnwise",
            "nvfp4+columnwise+rht+sr",
            "nvfp4+columnwise+rht",
        }
    assert {one.name for one in study.of_recipe("te", ["w"])} == {"nvfp4+16x16", "nvfp4+16x16+columnwise"}

"""Lint: clean checkpoints of the real packages stay clean, and every planted fault is found by its name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import ml_dtypes
import numpy as np
import pytest
from checkpoints import Array, Arrays, e4m3, f32, save

import nvfp4ref as nv
from conformance.checkpoint import open_checkpoint
from conformance.lint import LintReport, lint, main_lint
from nvfp4ref.dump import save_dump

pytest.importorskip("safetensors")

BF16 = ml_dtypes.bfloat16
NAME = "model.layers.0.mlp.down_proj.weight"
SHAPE = (256, 512)  # whole 128x4 atoms of scales, so that the shape does not tell their order


def weight(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Array:
    """Like weights: heavier tails than normal, rows and columns of different size."""
    rng = np.random.default_rng(seed)
    rows, columns = (np.exp(0.3 * rng.standard_normal(n)) for n in shape[-2:])
    return (0.02 * rng.standard_t(6, shape) * rows[:, None] * columns).astype(BF16)


def lookup(arrays: Arrays, suffix: str) -> str:
    (name,) = (name for name in arrays if name.endswith(suffix))
    return name


def linted(folder: Path, arrays: Arrays, metadata: dict[str, str] | None = None, **how: Any) -> LintReport:
    return lint(save(folder / "model.safetensors", arrays, metadata), **how)


def faults(report: LintReport) -> set[str]:
    return {one.id for _, one in report.all_findings() if one.severity == "fault"}


def notes(report: LintReport) -> set[str]:
    return {one.id for _, one in report.all_findings() if one.severity == "note"}


# ---- clean checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", checkpoints.BUILDERS)
def test_real_checkpoints_are_clean(family: str, tmp_path: Path) -> None:
    originals = checkpoints.weights()
    arrays, metadata = checkpoints.BUILDERS[family](originals)
    others = checkpoints.smaller_parts()
    report = linted(tmp_path, {**arrays, **others}, metadata)
    assert report.verdict == "clean" and report.exit_code == 0, str(report)
    assert not list(report.all_findings()), str(report)
    assert {one.family for one in report.tensors} == {family.removesuffix("-swizzled")}
    assert {one.name for one in report.others} == set(others)


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("modelopt", "modelopt"),
        ("compressed-tensors", "compressed-tensors"),
        ("torchao", "torchao"),
        ("torchao-swizzled", "torchao"),
        ("transformer-engine", "te"),
    ],
)
def test_real_checkpoints_against_their_originals(family: str, preset: str, tmp_path: Path) -> None:
    originals = checkpoints.weights()
    arrays, metadata = checkpoints.BUILDERS[family](originals)
    source = save(tmp_path / "original.safetensors", originals)
    report = linted(tmp_path, arrays, metadata, original=source)
    assert report.verdict == "clean" and not list(report.all_findings()), str(report)
    for one in report.tensors:
        assert one.original is not None and preset in one.original["presets"]
        assert 0.08 < one.original["relative_error"] < 0.13


@pytest.mark.parametrize("family", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    "arithmetic", [n for n, ar in nv.PRESETS.items() if ar.tile_scales == "repeated" and ar.global_scale != "none"]
)
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (128, 64), SHAPE])
def test_every_preset_is_clean(family: str, arithmetic: str, shape: tuple[int, int], tmp_path: Path) -> None:
    for block in ((1, 16), (16, 16)):
        arrays = checkpoints.oracle_checkpoint({NAME: weight(shape)}, family, arithmetic=arithmetic, block=block)
        report = linted(tmp_path, arrays)
        assert report.verdict == "clean", str(report)


def unusual(rows: int, columns: int) -> dict[str, Array]:
    """Matrices that are no weights, and yet no quantizer's fault."""
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((rows, columns))
    by_block = np.repeat(2.0 ** rng.uniform(-20, 3, (rows, columns // 16)), 16, axis=1)
    ramp = np.linspace(-3, 3, rows * columns).reshape(rows, columns)
    waves = np.stack([np.sin(ramp[:, ::2] * 9), np.cos(ramp[:, ::2] * 9)], axis=-1).reshape(rows, columns)
    return {
        "uniform": rng.uniform(-1, 1, (rows, columns)),
        "heavy": rng.standard_t(2, (rows, columns)),
        "rows": normal * np.exp(2 * rng.standard_normal((rows, 1))),
        "columns": normal * np.exp(2 * rng.standard_normal((1, columns))),
        "blocks": normal * by_block,
        "constant": np.ones((rows, columns)),
        "ternary": rng.integers(-1, 2, (rows, columns)).astype(float),
        "sparse": normal * (rng.random((rows, columns)) < 0.05),
        "dead rows": normal * (np.arange(rows) % 5 > 0)[:, None],
        "ramp": ramp,
        "waves": waves,
        "walk": np.cumsum(normal, axis=1),
        "rank one": normal[:, :1] * normal[:1],
        "diagonal": np.eye(rows, columns),
        "powers": 2.0 ** rng.integers(-8, 8, (rows, columns)),
        "positive": np.maximum(normal, 0),
    }


@pytest.mark.parametrize("arithmetic", ["te", "torchao", "modelopt", "compressed-tensors", "vllm", "four-over-six"])
@pytest.mark.parametrize("shape", [(48, 96), (128, 64), SHAPE])
def test_unusual_matrices_are_clean(arithmetic: str, shape: tuple[int, int], tmp_path: Path) -> None:
    originals = {name: x.astype(BF16) for name, x in unusual(*shape).items()}
    for block in ((1, 16), (16, 16)):
        arrays = checkpoints.oracle_checkpoint(originals, arithmetic=arithmetic, block=block)
        report = linted(tmp_path, arrays)
        assert report.verdict == "clean", str(report)


def test_stochastic_rounding_is_clean(tmp_path: Path) -> None:
    x = weight()
    q = nv.quantize(x, rounding="stochastic", rbits=nv.Philox(7, 0))
    arrays = {NAME: q.packed, f"{NAME}_scale": e4m3(q.scales), f"{NAME}_scale_2": q.amax / f32(2688)}
    report = linted(tmp_path, arrays)
    assert report.verdict == "clean" and notes(report) == {"codes.block-maximum"}, str(report)


def test_layers_that_share_a_global_scale_are_clean(tmp_path: Path) -> None:
    arrays: Arrays = {}
    shared = np.abs(weight().astype(np.float32)).max()
    for part, size in (("q_proj", 1.0), ("k_proj", 2.0**-6)):
        q = nv.quantize((weight().astype(np.float32) * size).astype(BF16), arithmetic="modelopt", amax=shared)
        arrays |= {part: q.packed, f"{part}_scale": e4m3(q.scales), f"{part}_scale_2": q.amax / f32(2688)}
    assert not list(linted(tmp_path, arrays).all_findings())


# ---- planted faults ----------------------------------------------------------------------------------------


@pytest.fixture(params=["modelopt", "compressed-tensors"])
def sound(request: pytest.FixtureRequest) -> Arrays:
    arrays = checkpoints.oracle_checkpoint({NAME: weight()}, request.param)
    inputs = {"modelopt": ("input_scale", 5 / 2688), "compressed-tensors": ("input_global_scale", 2688 / 5)}
    name, value = inputs[request.param]
    return {**arrays, NAME.removesuffix("weight") + name: f32(value)}


def packed_of(arrays: Arrays) -> str:
    return next(name for name in arrays if name in (NAME, f"{NAME}_packed"))


def whole_of(arrays: Arrays) -> str:
    return next(name for name in arrays if name in (f"{NAME}_scale_2", f"{NAME}_global_scale"))


def input_of(arrays: Arrays) -> str:
    return next(name for name in arrays if name.endswith(("input_scale", "input_global_scale")))


SCALES = f"{NAME}_scale"


def on_scales(change: Callable[[Array], Array]) -> Callable[[Arrays], None]:
    def plant(arrays: Arrays) -> None:
        arrays[SCALES] = e4m3(np.ascontiguousarray(change(arrays[SCALES].view(np.uint8).copy())))

    return plant


def on_codes(change: Callable[[Array], Array]) -> Callable[[Arrays], None]:
    def plant(arrays: Arrays) -> None:
        arrays[packed_of(arrays)] = np.ascontiguousarray(change(arrays[packed_of(arrays)].copy()))

    return plant


def on_whole(change: Callable[[Array], Any]) -> Callable[[Arrays], None]:
    def plant(arrays: Arrays) -> None:
        name = whole_of(arrays)
        arrays[name] = np.asarray(change(arrays[name]), np.float32).reshape(arrays[name].shape)

    return plant


def on_input(change: Callable[[Array], Any]) -> Callable[[Arrays], None]:
    def plant(arrays: Arrays) -> None:
        arrays[input_of(arrays)] = np.asarray(change(arrays[input_of(arrays)]), np.float32)

    return plant


def put(index: Any, value: int) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array[index] = value
        return array

    return change


def requantized(**fields: Any) -> Callable[[Arrays], None]:
    """The same weights by an arithmetic with a fault."""

    def plant(arrays: Arrays) -> None:
        family = "modelopt" if packed_of(arrays) == NAME else "compressed-tensors"
        arrays.update(checkpoints.oracle_checkpoint({NAME: weight()}, family, arithmetic="te", **fields))

    return plant


def with_amax(factor: float) -> Callable[[Arrays], None]:
    """The global scale of an amax that is so many times the weights'."""

    def plant(arrays: Arrays) -> None:
        q = nv.quantize(weight(), amax=np.float32(factor) * np.abs(weight().astype(np.float32)).max())
        arrays[packed_of(arrays)], arrays[SCALES] = q.packed, e4m3(q.scales)
        encode = whole_of(arrays).endswith("_global_scale")
        arrays[whole_of(arrays)] = np.asarray(f32(2688) / q.amax if encode else q.amax / f32(2688))

    return plant


def without_one_and_a_half(arrays: Arrays) -> None:
    ar = nv.arithmetic("te", stochastic="sm100-without-1.5")
    q = nv.quantize(weight(), rounding="stochastic", rbits=nv.Philox(7, 0), arithmetic=ar)
    arrays[packed_of(arrays)], arrays[SCALES] = q.packed, e4m3(q.scales)


def tiled(arrays: Arrays) -> None:
    q = nv.quantize(weight(), block=(16, 16), arithmetic=nv.arithmetic("te", tile_scales="tiled"))
    arrays[packed_of(arrays)], arrays[SCALES] = q.packed, e4m3(q.scales)


def one_per_tile(arrays: Arrays) -> None:
    q = nv.quantize(weight(), block=(16, 16))
    arrays[packed_of(arrays)], arrays[SCALES] = q.packed, e4m3(q.scales[::16].copy())


def swizzled_tiles(arrays: Arrays) -> None:
    q = nv.quantize(weight(), block=(16, 16))
    arrays[packed_of(arrays)], arrays[SCALES] = q.packed, e4m3(nv.layout.swizzle(q.scales))


def upended(arrays: Arrays) -> None:
    on_codes(np.transpose)(arrays)
    on_scales(np.transpose)(arrays)


def permuted_columns(packed: Array) -> Array:
    """Activation order applied to the codes and not to the scales."""
    order = np.random.default_rng(0).permutation(2 * packed.shape[1])
    return nv.e2m1.pack(nv.e2m1.unpack(packed)[:, order])


def never_converted(arrays: Arrays) -> None:
    arrays[packed_of(arrays)][:] = 0


def never_loaded(arrays: Arrays) -> None:
    arrays[packed_of(arrays)][:] = 0x88
    arrays[SCALES].view(np.uint8)[:] = 0


def float_scales(arrays: Arrays) -> None:
    arrays[SCALES] = nv.e4m3.decode(arrays[SCALES].view(np.uint8))


def never_packed(arrays: Arrays) -> None:
    arrays[packed_of(arrays)] = weight()


def removed(which: Callable[[Arrays], str]) -> Callable[[Arrays], None]:
    def plant(arrays: Arrays) -> None:
        del arrays[which(arrays)]

    return plant


PLANTED: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "one NaN scale": (on_scales(put((3, 5), 0x7F)), "block-scale.nan"),
    "one negative NaN scale": (on_scales(put((200, 31), 0xFF)), "block-scale.nan"),
    "one negative scale": (on_scales(lambda s: put((255, 0), s[255, 0] | 0x80)(s)), "block-scale.negative"),
    "all scales negative": (on_scales(lambda s: s | 0x80), "block-scale.negative"),
    "one zero scale": (on_scales(put((7, 9), 0)), "block-scale.zero"),
    "a row of zero scales": (on_scales(put(17, 0)), "block-scale.zero"),
    "minus zero scales": (on_scales(put(17, 0x80)), "block-scale.zero"),
    "swizzled": (on_scales(nv.layout.swizzle), "scales.swizzled"),
    "swizzled tiles": (swizzled_tiles, "scales.swizzled"),
    "transposed scales": (on_scales(np.transpose), "scales.transposed"),
    "flat scales": (on_scales(np.ravel), "scales.shape"),
    "half the rows of scales": (on_scales(lambda s: s[:128]), "scales.shape"),
    "one scale a tile": (one_per_tile, "scales.one-per-tile"),
    "a period of tiles": (tiled, "scales.tiled-not-repeated"),
    "one scale for 32": (on_scales(lambda s: s[:, ::2]), "blocks.size-32"),
    "amax over 32": (requantized(amax_group=32), "blocks.size-32"),
    "upended": (upended, "scales.transposed"),
    "one code a byte": (on_codes(nv.e2m1.unpack), "packing.one-code-per-byte"),
    "an odd number of bytes": (on_codes(lambda p: p[:, :-3]), "packing.shape"),
    "float scales": (float_scales, "scales.dtype"),
    "never packed": (never_packed, "packing.dtype"),
    "powers of two": (requantized(scale_rounding="power-of-two"), "block-scale.power-of-two"),
    "NaN above 240": (requantized(scale_overflow="nan-above-240"), "block-scale.nan-above-240"),
    "never converted": (never_converted, "codes.all-zero"),
    "never loaded": (never_loaded, "codes.all-zero"),
    "a block of zeros": (on_codes(put((9, slice(16, 24)), 0)), "codes.zero-under-scale"),
    "half written": (on_codes(put(slice(128, None), 0)), "codes.zero-under-scale"),
    "columns shifted by 8": (on_codes(lambda p: np.roll(p, 4, axis=1)), "packing.shifted"),
    "columns shifted by 2": (on_codes(lambda p: np.roll(p, 1, axis=1)), "packing.shifted"),
    "columns shifted by -2": (on_codes(lambda p: np.roll(p, -1, axis=1)), "packing.shifted"),
    "permuted columns": (on_codes(permuted_columns), "codes.block-maximum"),
    "no 1.5": (without_one_and_a_half, "random.grid-without-1.5"),
    "inverted global scale": (on_whole(lambda g: 1 / g), "global-scale.inverted"),
    "global scale NaN": (on_whole(lambda g: np.nan), "global-scale.nan"),
    "global scale Inf": (on_whole(lambda g: np.inf), "global-scale.infinite"),
    "global scale 0": (on_whole(lambda g: 0), "global-scale.zero"),
    "global scale negative": (on_whole(lambda g: -g), "global-scale.negative"),
    "no global scale used": (requantized(global_scale="none"), "global-scale.none"),
    "range of 1/64": (with_amax(64.0), "global-scale.unused-range"),
    "input scale NaN": (on_input(lambda g: np.nan), "input-scale.nan"),
    "input scale Inf": (on_input(lambda g: np.inf), "input-scale.infinite"),
    "input scale 0": (on_input(lambda g: 0), "input-scale.zero"),
    "input scale negative": (on_input(lambda g: -g), "input-scale.negative"),
    "input scale inverted": (on_input(lambda g: 1 / g), "input-scale.inverted"),
    "no scales": (removed(lambda arrays: SCALES), "checkpoint.missing-part"),
    "no global scale": (removed(whole_of), "checkpoint.missing-part"),
}


def test_the_sound_checkpoint_is_clean(sound: Arrays, tmp_path: Path) -> None:
    assert not list(linted(tmp_path, sound).all_findings())


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name: str, sound: Arrays, tmp_path: Path) -> None:
    plant, expected = PLANTED[name]
    if name == "no global scale used":
        sound.pop(whole_of(sound))
        plant(sound)
        sound[whole_of(sound)] = f32(1)
    else:
        plant(sound)
    report = linted(tmp_path, sound)
    assert faults(report) == {expected}, str(report)
    assert report.verdict == "faults" and report.exit_code == 1


@pytest.mark.parametrize("family", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("fault", ["swizzled", "transposed", "inverted", "shifted", "zero"])
def test_faults_planted_in_real_checkpoints(family: str, fault: str, tmp_path: Path) -> None:
    """In every tensor of MiniLM, whatever its shape."""
    arrays, metadata = checkpoints.BUILDERS[family](checkpoints.weights())
    expected = {
        "swizzled": "scales.swizzled",
        "transposed": "scales.transposed",
        "inverted": "global-scale.inverted",
        "shifted": "packing.shifted",
        "zero": "block-scale.zero",
    }[fault]
    for name in arrays:
        if name.endswith("weight_scale"):
            scales = arrays[name].view(np.uint8)
            if fault == "swizzled":
                arrays[name] = e4m3(nv.layout.swizzle(scales))
            elif fault == "transposed":
                arrays[name] = e4m3(np.ascontiguousarray(scales.T))
            elif fault == "zero":
                scales[::7, ::5] = 0
        elif name.endswith(("weight", "weight_packed")) and fault == "shifted":
            arrays[name] = np.roll(arrays[name], 3, axis=1)
        elif name.endswith(("scale_2", "weight_global_scale")) and fault == "inverted":
            arrays[name] = 1 / arrays[name]
    report = linted(tmp_path, arrays, metadata)
    for one in report.tensors:
        assert {found.id for found in one.findings} == {expected}, str(report)


def test_upended_codes_and_transposed_scales_of_the_same_shape(tmp_path: Path) -> None:
    """Square packed bytes: (K/2, R) and (R, K/2) are one shape."""
    arrays = checkpoints.oracle_checkpoint({NAME: weight((256, 512))})
    on_scales(np.transpose)(arrays)
    assert "as the transpose" in str(linted(tmp_path, arrays))
    on_codes(np.transpose)(arrays)
    report = linted(tmp_path, arrays)
    assert "as columns" in str(report) and report.tensors[0].shape == (256, 512)


def test_scales_of_another_tensor_are_suspect(sound: Arrays, tmp_path: Path) -> None:
    quantized = nv.quantize(weight((512, 512)))
    name = packed_of(sound)
    sound[name], sound[SCALES] = quantized.packed, e4m3(nv.quantize(weight((512, 512), 1)).scales)
    report = linted(tmp_path, sound)
    assert report.verdict == "clean" and notes(report) == {"scales.unrelated"}, str(report)


def test_square_transposed_scales_are_seen(tmp_path: Path) -> None:
    arrays = checkpoints.oracle_checkpoint({NAME: weight((32, 512))})
    on_scales(np.transpose)(arrays)
    assert faults(linted(tmp_path, arrays)) == {"scales.transposed"}


@pytest.mark.parametrize(("order", "expected"), [("padded", "scales.padded"), ("swizzled", "scales.swizzled")])
@pytest.mark.parametrize("shape", [(100, 80), (30, 384), (384, 80)])
def test_padded_scales(order: str, expected: str, shape: tuple[int, int], tmp_path: Path) -> None:
    arrays = checkpoints.oracle_checkpoint({NAME: weight(shape)})
    on_scales(nv.layout.pad if order == "padded" else nv.layout.swizzle)(arrays)
    assert faults(linted(tmp_path, arrays)) == {expected}


def test_columns_of_padding_left_in(tmp_path: Path) -> None:
    arrays = checkpoints.oracle_checkpoint({NAME: weight((100, 80))})
    on_scales(lambda s: nv.layout.pad(s)[:100])(arrays)
    assert faults(linted(tmp_path, arrays)) == {"scales.padding-columns"}


def test_scales_that_are_declared_swizzled_and_are_not(tmp_path: Path) -> None:
    arrays, metadata = checkpoints.torchao_checkpoint({NAME: weight()}, swizzled=True)
    name = lookup(arrays, "_scale") if f"{NAME}_scale" in arrays else next(n for n in arrays if n.endswith("t_scale"))
    scales = arrays[name].view(np.uint8)
    arrays[name] = e4m3(nv.layout.unswizzle(scales, 256, 32).reshape(scales.shape))
    assert faults(linted(tmp_path, arrays, metadata)) == {"scales.not-swizzled"}


def test_half_of_the_layers_with_large_activations_is_a_convention(tmp_path: Path) -> None:
    """Activations of 1000 are possible, and so is one inverted scale that looks like it; not in most layers."""
    arrays: Arrays = {}
    for layer in range(4):
        name = f"layers.{layer}.weight"
        arrays |= checkpoints.oracle_checkpoint({name: weight((16, 32), layer)})
        arrays[f"layers.{layer}.input_scale"] = f32(2688 / 300)
    report = linted(tmp_path, arrays)
    assert faults(report) == {"input-scale.inverted"} and report.counts["input-scale.inverted"] == 4


def test_experts_that_were_never_calibrated(tmp_path: Path) -> None:
    arrays: Arrays = {}
    for expert in range(5):
        name = f"layers.0.experts.{expert}.up_proj.weight"
        arrays |= checkpoints.oracle_checkpoint({name: weight((16, 32), expert)}, "compressed-tensors")
        if expert != 3:
            arrays[f"layers.0.experts.{expert}.up_proj.input_global_scale"] = f32(500.0)
    report = linted(tmp_path, arrays)
    assert [(name, one.id) for name, one in report.all_findings()] == [
        ("layers.0.experts.3.up_proj.weight", "input-scale.missing")
    ]


def stacked(count: int = 4) -> Arrays:
    """Experts in one array, as ModelOpt exports Llama 4's: multiplied from the left, so stored upended."""
    parts = [nv.quantize(weight((64, 128), seed), arithmetic="modelopt") for seed in range(count)]
    return {
        "experts.down_proj": np.stack([q.packed.T for q in parts]),
        "experts.down_proj_weight_scale": e4m3(np.stack([q.scales.T for q in parts])),
        "experts.down_proj_weight_scale_2": np.array([q.amax / f32(2688) for q in parts], np.float32),
        "experts.down_proj_input_scale": f32(0.01),
    }


def test_stacked_experts(tmp_path: Path) -> None:
    report = linted(tmp_path, stacked())
    assert report.verdict == "clean" and not report.others, str(report)
    assert report.tensors[0].shape == (4, 64, 128)
    original = {"experts.down_proj": np.stack([weight((64, 128), seed).T for seed in range(4)])}
    report = linted(tmp_path, stacked(), original=save(tmp_path / "original.safetensors", original))
    assert report.tensors[0].original is not None and report.tensors[0].original["presets"] == ["modelopt"]
    assert report.verdict == "clean", str(report)


def test_one_expert_of_several(tmp_path: Path) -> None:
    arrays = stacked()
    arrays["experts.down_proj_weight_scale_2"][2] = np.inf
    arrays["experts.down_proj"][1] = 0
    report = linted(tmp_path, arrays)
    sentences = {one.id: one.sentence for _, one in report.all_findings()}
    assert set(sentences) == {"global-scale.infinite", "codes.all-zero"}
    assert "expert 2 (of 4)" in sentences["global-scale.infinite"] and "expert 1" in sentences["codes.all-zero"]


def test_mxfp4_cast_to_nvfp4_is_a_note(tmp_path: Path) -> None:
    """gpt-oss: scales are powers of two and serve 32 elements, and half a block may well hold no 6."""
    ar = nv.arithmetic("te", amax_group=32, scale_rounding="power-of-two")
    arrays = checkpoints.oracle_checkpoint({NAME: weight()}, arithmetic=ar)
    report = linted(tmp_path, arrays)
    assert report.verdict == "clean" and "producer.from-mxfp4" in notes(report), str(report)


# ---- what zeros tell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "who", "byte"),
    [
        ("modelopt", "ModelOpt", "0x38"),
        ("compressed-tensors", "compressed-tensors", "0x20"),
        ("torchao", "torchao", "0x08"),
    ],
)
def test_blocks_of_zeros_tell_the_producer(family: str, who: str, byte: str, tmp_path: Path) -> None:
    x = weight()
    x[5, 32:64] = 0
    arrays, metadata = checkpoints.BUILDERS[family]({NAME: x})
    report = linted(tmp_path, arrays, metadata)
    assert report.verdict == "clean", str(report)
    assert report.tensors[0].fingerprint["zero_block_scales"] == [byte]
    (_, found), *others = report.all_findings()
    assert not others and found.id == "producer.zero-block" and who in found.sentence


@pytest.mark.parametrize("family", ["modelopt", "compressed-tensors", "torchao"])
def test_tensors_of_zeros(family: str, tmp_path: Path) -> None:
    """Never-loaded experts, as the real packages quantize them: codes 0x77, 0x00, 0xCC."""
    arrays, metadata = checkpoints.BUILDERS[family]({NAME: np.zeros(SHAPE, BF16)})
    report = linted(tmp_path, arrays, metadata)
    assert "codes.all-zero" in faults(report), str(report)


def test_zeros_that_were_zeros_are_no_fault(tmp_path: Path) -> None:
    originals = {NAME: np.zeros(SHAPE, BF16)}
    arrays = checkpoints.oracle_checkpoint(originals, "compressed-tensors", arithmetic="te")
    arrays[f"{NAME}_global_scale"] = f32(1)
    assert faults(linted(tmp_path, arrays)) == {"codes.all-zero"}
    report = linted(tmp_path, arrays, original=save(tmp_path / "original.safetensors", originals))
    assert report.verdict == "clean", str(report)


# ---- nibbles -----------------------------------------------------------------------------------------------


def swapped(packed: Array) -> Array:
    return packed << 4 | packed >> 4


def split_halves(packed: Array) -> Array:
    codes = nv.e2m1.unpack(packed).reshape(len(packed), -1, 2, 8)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(packed.shape)


def test_swapped_nibbles_of_weights_cannot_be_seen_without_them(sound: Arrays, tmp_path: Path) -> None:
    on_codes(swapped)(sound)
    assert linted(tmp_path, sound).verdict == "clean"


@pytest.mark.parametrize("kind", ["walk", "wave"])
def test_swapped_nibbles_of_smooth_data_can(kind: str, tmp_path: Path) -> None:
    wave = np.sin(np.arange(1024) / 4) * np.cos(np.arange(128) / 20)[:, None]
    x = {"walk": unusual(128, 1024)["walk"], "wave": wave}[kind].astype(BF16)
    arrays = checkpoints.oracle_checkpoint({NAME: x})
    assert linted(tmp_path, arrays).verdict == "clean"
    on_codes(swapped)(arrays)
    assert faults(linted(tmp_path, arrays)) == {"packing.high-nibble-first"}


# ---- against the original ----------------------------------------------------------------------------------

AGAINST: dict[str, tuple[Callable[[Arrays], None], set[str]]] = {
    "swapped nibbles": (on_codes(swapped), {"packing.high-nibble-first"}),
    "split halves": (on_codes(split_halves), {"packing.split-half"}),
    "another tensor's scales": (
        on_scales(lambda s: nv.quantize(weight(seed=1)).scales),
        {"original.differs"},
    ),
    "another tensor": (on_codes(lambda p: nv.quantize(weight(seed=1)).packed), {"original.differs"}),
    "rows exchanged": (on_codes(lambda p: p[::-1]), {"original.differs"}),
    "global scale doubled": (on_whole(lambda g: 2 * g), {"global-scale.wrong-factor"}),
    "global scale inverted": (on_whole(lambda g: 1 / g), {"global-scale.inverted"}),
    "stale amax": (with_amax(0.5), {"global-scale.wrong-amax"}),
    "larger amax": (with_amax(1.5), {"global-scale.wrong-amax"}),
    "swizzled": (on_scales(nv.layout.swizzle), {"scales.swizzled"}),
}


@pytest.mark.parametrize("name", AGAINST)
def test_against_the_original(name: str, sound: Arrays, tmp_path: Path) -> None:
    plant, expected = AGAINST[name]
    plant(sound)
    report = linted(tmp_path, sound, original=save(tmp_path / "original.safetensors", {NAME: weight()}))
    found = {one.id for _, one in report.all_findings() if one.id != "codes.block-maximum"}
    assert expected <= found, str(report)


def test_original_of_another_shape_or_name(sound: Arrays, tmp_path: Path) -> None:
    source = save(tmp_path / "original.safetensors", {NAME: weight((256, 256))})
    assert faults(linted(tmp_path, sound, original=source)) == {"original.shape"}
    source = save(tmp_path / "original.safetensors", {"other": weight()})
    report = linted(tmp_path, sound, original=source)
    assert report.verdict == "clean" and notes(report) == {"original.missing"}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_originals_in_every_type(dtype: Any, tmp_path: Path) -> None:
    x = weight().astype(np.float32).astype(dtype)
    arrays = checkpoints.oracle_checkpoint({NAME: x}, "compressed-tensors")
    report = linted(tmp_path, arrays, original=save(tmp_path / "original.safetensors", {NAME: x}))
    assert report.tensors[0].original is not None
    assert "compressed-tensors" in report.tensors[0].original["presets"], str(report)


def test_quantized_in_float32_from_bfloat16_weights(tmp_path: Path) -> None:
    """A quantizer that converts first: the preset fits the same weights as float32."""
    x = (np.random.default_rng(1).integers(-19, 20, SHAPE) / 4).astype(BF16)  # ties, where quantizers differ
    arrays = checkpoints.oracle_checkpoint({NAME: x.astype(np.float32)}, "compressed-tensors")
    report = linted(tmp_path, arrays, original=save(tmp_path / "original.safetensors", {NAME: x}))
    assert report.tensors[0].original is not None
    assert "compressed-tensors" in report.tensors[0].original["presets"], str(report)


def test_smoothed_weights_are_said_to_be_smoothed(tmp_path: Path) -> None:
    scaled = (weight().astype(np.float32) * np.geomspace(0.05, 20, SHAPE[1])).astype(BF16)
    arrays = checkpoints.oracle_checkpoint({NAME: scaled})
    arrays[NAME.removesuffix("weight") + "pre_quant_scale"] = np.ones(SHAPE[1], BF16)
    report = linted(tmp_path, arrays, original=save(tmp_path / "original.safetensors", {NAME: weight()}))
    assert report.verdict == "clean" and "original.differs" in notes(report), str(report)


# ---- other formats -----------------------------------------------------------------------------------------


def test_what_is_not_nvfp4_is_listed_and_not_judged(sound: Arrays, tmp_path: Path) -> None:
    fp8 = weight().astype(ml_dtypes.float8_e4m3fn)
    others = {
        "fp8.weight": fp8,
        "fp8.weight_scale": f32(0.1),
        "mxfp4.weight_packed": np.zeros((64, 64), np.uint8),
        "mxfp4.weight_scale": np.full((64, 4), 127, np.uint8),
        "gpt.mlp1_blocks": np.zeros((4, 8, 16), np.uint8),
        "gpt.mlp1_scales": np.zeros((4, 8), np.uint8),
        "awq.weight": np.zeros((64, 128), np.uint8),
        "awq.weight_scale": np.ones((128, 1), np.float32),
        "awq.weight_scale_2": f32(0.5),
        "int4.weight_packed": np.zeros((64, 16), np.int32),
        "int4.weight_scale": np.ones((64, 1), BF16),
        "int4.weight_shape": np.array([64, 128], np.int64),
        "norm.weight": np.ones(64, BF16),
    }
    report = linted(tmp_path, {**sound, **others})
    assert report.verdict == "clean" and [one.name for one in report.tensors] == [NAME], str(report)
    assert {one.name for one in report.others} == set(others)


def test_comfyui_checkpoints_are_swizzled_and_high_nibble_first(tmp_path: Path) -> None:
    arrays = checkpoints.oracle_checkpoint({NAME: weight()})
    on_scales(nv.layout.swizzle)(arrays)
    on_codes(swapped)(arrays)
    marker = np.frombuffer(b'{"format": "nvfp4"}', np.uint8)
    arrays[NAME.removesuffix("weight") + "comfy_quant"] = marker
    report = linted(tmp_path, arrays, original=save(tmp_path / "original.safetensors", {NAME: weight()}))
    assert report.verdict == "clean" and report.families == {"comfyui": 1}, str(report)
    assert report.tensors[0].original is not None and report.tensors[0].original["presets"] != []


def test_dumps(tmp_path: Path) -> None:
    x = weight()
    for block in ((1, 16), (16, 16)):
        q = nv.quantize(x, block=block)
        path = tmp_path / f"{block[0]}.npz"
        save_dump(path, packed=q.packed, scales=q.scales, amax=q.amax, block=block)
        assert lint(path).verdict == "clean", str(lint(path))
    both = tmp_path / "both.safetensors"
    columnwise = nv.quantize(x, axis=0, rht=nv.RHT())
    save_dump(both, {"w": nv.from_tensor(nv.quantize(x), columnwise=columnwise, rht_t=True)})
    report = lint(both)
    assert report.verdict == "clean" and [one.name for one in report.tensors] == ["w", "w (columnwise)"]
    padded = nv.layout.pad(nv.quantize(x).scales, fill=0x7F)
    save_dump(both, {"w": nv.Dump(packed=nv.quantize(x).packed, scales=padded, amax=nv.quantize(x).amax)})
    assert lint(both).verdict == "clean"


def test_dump_with_its_input_is_checked(tmp_path: Path) -> None:
    x = weight((64, 128))
    q = nv.quantize(x)
    path = tmp_path / "dump.npz"
    save_dump(path, q, x=x)
    assert lint(path).verdict == "clean"
    save_dump(path, nv.Dump(x=x, packed=swapped(q.packed), scales=q.scales, amax=q.amax))
    assert faults(lint(path)) == {"check.packing"}


def test_dump_that_declares_square_blocks(tmp_path: Path) -> None:
    q = nv.quantize(weight())
    save_dump(tmp_path / "dump.npz", packed=q.packed, scales=q.scales, amax=q.amax, block=(16, 16))
    assert faults(lint(tmp_path / "dump.npz")) == {"blocks.1d-for-2d"}


# ---- files, folders, indexes -------------------------------------------------------------------------------


def sharded(folder: Path, arrays: Arrays) -> Path:
    """Two shards and an index; one tensor's arrays lie in both."""
    names = list(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save(folder / file, {name: arrays[name] for name in members})
    index = folder / "model.safetensors.index.json"
    listed = {name: file for file, members in shards.items() for name in members}
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}), encoding="utf-8")
    return index


def test_index_and_folder_are_the_same(sound: Arrays, tmp_path: Path) -> None:
    index = sharded(tmp_path, sound)
    on_scales(put((3, 5), 0x7F))(sound)
    for path in (index, tmp_path):
        report = lint(path)
        assert report.verdict == "clean" and len(report.tensors) == 1, str(report)


def test_folder_without_an_index(sound: Arrays, tmp_path: Path) -> None:
    sharded(tmp_path, sound).unlink()
    assert lint(tmp_path).verdict == "clean"


def test_files_that_the_index_leaves_out(sound: Arrays, tmp_path: Path) -> None:
    sharded(tmp_path, sound)
    save(tmp_path / "consolidated.safetensors", sound)
    report = lint(tmp_path)
    assert report.verdict == "clean" and notes(report) == {"checkpoint.not-read"}


def test_tensor_that_only_the_index_has(sound: Arrays, tmp_path: Path) -> None:
    index = sharded(tmp_path, sound)
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "a.safetensors"
    index.write_text(json.dumps(content))
    assert faults(lint(tmp_path)) == {"checkpoint.missing-tensor"}


def test_shard_that_is_missing(sound: Arrays, tmp_path: Path) -> None:
    sharded(tmp_path, sound)
    (tmp_path / "b.safetensors").unlink()
    report = lint(tmp_path)
    assert report.exit_code == 2 and len(report.errors) == 1 and "b.safetensors" in report.errors[0]


def test_the_same_tensor_in_two_files(sound: Arrays, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", sound)
    report = lint(tmp_path)
    assert report.exit_code == 2 and "keep one" in " ".join(report.errors)


def unreadable(folder: Path, sound: Arrays) -> dict[str, Path]:
    """Paths that hold no checkpoint, by what is the matter."""
    good = save(folder / "good.safetensors", sound).read_bytes()

    def file(name: str, content: bytes) -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

    def index(name: str, content: Any) -> Path:
        return file(name, json.dumps(content).encode())

    (folder / "empty").mkdir()
    (folder / "above" / "transformer").mkdir(parents=True)
    save(folder / "above" / "transformer" / "model.safetensors", sound)
    return {
        "no such file": folder / "nothing.safetensors",
        "empty file": file("none.safetensors", b""),
        "cut short": file("short.safetensors", good[:-100]),
        "cut in its header": file("head.safetensors", good[:100]),
        "huge header": file("huge.safetensors", b"\xff" * 64),
        "text": file("text.safetensors", b"not a checkpoint at all"),
        "torch": file("pytorch_model.bin", b"PK"),
        "no suffix": file("model", b"x"),
        "empty folder": folder / "empty",
        "folder of folders": folder / "above",
        "not JSON": file("a.safetensors.index.json", b"{"),
        "JSON of something else": index("b.safetensors.index.json", {"a": 1}),
        "a list": index("c.safetensors.index.json", [1]),
        "no names": index("d.safetensors.index.json", {"weight_map": {}}),
        "numbers": index("e.safetensors.index.json", {"weight_map": {"a": 1}}),
        "outside": index("f.safetensors.index.json", {"weight_map": {"a": "../../etc/passwd"}}),
        "absolute": index("g.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}),
        "no NVFP4": save(folder / "plain.safetensors", {"w": np.ones(4, np.float32)}),
        "broken npz": file("x.npz", b"PK\x03\x04 nothing"),
        "npz of something else": plain_npz(folder / "y.npz"),
    }


def plain_npz(path: Path) -> Path:
    np.savez(path, a=np.arange(3))
    return path


def test_what_cannot_be_read_costs_one_sentence(
    sound: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, path in unreadable(tmp_path, sound).items():
        report = lint(path)
        assert report.verdict == "not-judged" and len(report.errors) == 1, what
        assert str(path) in report.errors[0] and "\n" not in report.errors[0], what
        assert report.to_json()["error"] == report.errors[0]
        assert main_lint(Namespace(checkpoint=str(path))) == 2, what
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, what
        assert lint(save(tmp_path / "good.safetensors", sound), original=path).exit_code == 2 or what == "no NVFP4"


def test_nearest_folder_is_named(sound: Arrays, tmp_path: Path) -> None:
    path = unreadable(tmp_path, sound)["folder of folders"]
    assert "transformer" in lint(path).errors[0]


def test_file_that_shrinks_under_our_hands(sound: Arrays, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", sound)
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-200_000])
    from conformance.lint.run import _Run

    report = _Run(checkpoint, None, lambda name, done, total: None).report()
    assert report.exit_code == 2 and "cut short" in report.errors[0]


# ---- report and command ------------------------------------------------------------------------------------


def test_json(sound: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_scales(put((3, 5), 0x7F))(sound)
    path = save(tmp_path / "model.safetensors", {**sound, "norm.weight": np.ones(4, np.float32)})
    assert main_lint(Namespace(checkpoint=str(path), original=None, json=True)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "faults" and found["error"] is None
    assert found["counts"] == {"block-scale.nan": 1}
    (tensor,) = found["tensors"]
    assert tensor["name"] == NAME and tensor["shape"] == list(SHAPE) and tensor["scale_order_seen"]
    (one,) = tensor["findings"]
    assert (one["id"], one["severity"], one["count"], one["total"]) == ("block-scale.nan", "fault", 1, 8192)
    assert "row 3, block 5" in one["sentence"]
    assert found["not_nvfp4"] == [{"name": "norm.weight", "dtype": "F32", "shape": [4]}]


def test_several_checkpoints(sound: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(save(tmp_path / "good.safetensors", sound))
    assert main_lint(Namespace(checkpoint=[good, str(tmp_path / "none.safetensors")], json=True)) == 2
    assert len(json.loads(capsys.readouterr().out)["checkpoints"]) == 2
    assert main_lint(Namespace(checkpoint=[good, good])) == 0


def test_text_lists_the_first_of_many(tmp_path: Path) -> None:
    arrays: Arrays = {}
    for expert in range(12):
        name = f"experts.{expert}.weight"
        arrays |= checkpoints.oracle_checkpoint({name: weight((16, 32), expert)})
        arrays[f"{name}_scale"].view(np.uint8)[0, 0] = 0x7F
    text = str(linted(tmp_path, arrays))
    assert text.count("fault block-scale.nan") == 6 and "and 7 more" in text
    assert "faults in 12; NVFP4 tensors: 12 modelopt" in text


def test_progress_goes_to_the_end(sound: Arrays, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    linted(tmp_path, sound, progress=lambda *state: seen.append(state))
    assert seen[0][0] == NAME and seen[-1][0] == "" and seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_slabs_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.lint import matrix

    x = unusual(512, 512)["blocks"]
    x[300:310] = 0
    arrays = checkpoints.oracle_checkpoint({"a": x.astype(BF16), "b": weight((500, 80))}, arithmetic="te")
    arrays |= checkpoints.oracle_checkpoint({"c": weight((512, 128))}, arithmetic="te", block=(16, 16))
    arrays |= checkpoints.oracle_checkpoint({"d": weight((384, 512)), "e": weight((520, 80))}, arithmetic="te")
    arrays["d"], arrays["d_scale"] = (np.ascontiguousarray(arrays[name].T) for name in ("d", "d_scale"))
    arrays["e_scale"] = e4m3(np.ascontiguousarray(nv.layout.pad(arrays["e_scale"].view(np.uint8)).T))
    arrays["a_scale"].view(np.uint8)[400, 3] = 0x7F
    arrays["c_scale"].view(np.uint8)[411, 3] = 0
    report = linted(tmp_path, arrays)
    assert report.counts["scales.transposed"] == 2, str(report)
    whole = report.to_json()
    monkeypatch.setattr(matrix, "_SLAB", 1)
    assert linted(tmp_path, arrays).to_json() == whole


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A tensor of 256 MB, sparse on disk, in a process that may have 150 MB."""
    rows, columns = 1 << 15, 1 << 10
    header = {
        NAME: {"dtype": "U8", "shape": [rows, 8 * columns], "data_offsets": [0, 8 * rows * columns]},
        f"{NAME}_scale": {
            "dtype": "F8_E4M3",
            "shape": [rows, columns],
            "data_offsets": [8 * rows * columns, 9 * rows * columns],
        },
        f"{NAME}_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [9 * rows * columns, 9 * rows * columns + 4]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 9 * rows * columns + 4)
    program = (
        "import sys; from conformance.lint import lint; report = lint(sys.argv[1]); "
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')); "
        "print(int(peak.split()[1]) >> 10, *report.counts)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    peak, *found = done.stdout.split()
    assert int(peak) < 150, done.stdout
    assert set(found) == {"codes.all-zero", "global-scale.zero", "producer.zero-block"}


def test_every_finding_is_documented() -> None:
    """docs/lint.md has each id that stands in the code."""
    root = Path(__file__).parent.parent
    code = "\n".join(path.read_text(encoding="utf-8") for path in (root / "conformance" / "lint").glob("*.py"))
    given = set(re.findall(r'"((?:[a-z0-9]+-)*[a-z0-9]+\.[a-z0-9.-]*[a-z0-9])",?$', code, re.MULTILINE))
    given |= set(re.findall(r'(?:fault|note|severity)\(\s*"([a-z0-9-]+\.[a-z0-9.-]+)"', code))
    assert len(given) > 30
    guide = (root / "docs" / "lint.md").read_text(encoding="utf-8")
    assert sorted(name for name in given if f"`{name}`" not in guide) == []


def test_originals_of_any_size(tmp_path: Path) -> None:
    """Weights whose squares are no float32, and some that are no numbers."""
    for size in (1e25, 1e-25):
        x = (weight().astype(np.float32) * np.float32(size)).astype(np.float32)
        arrays = checkpoints.oracle_checkpoint({NAME: x}, "compressed-tensors", arithmetic="te")
        x[3, 5], x[4, 5] = np.nan, np.inf
        report = linted(tmp_path, arrays, original=save(tmp_path / "original.safetensors", {NAME: x}))
        assert report.tensors[0].original is not None
        assert 0.08 < report.tensors[0].original["relative_error"] < 0.12, str(report)


def test_damaged_headers_cost_a_sentence_at_most(sound: Arrays, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", sound)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good)
        for place in rng.integers(0, 500, rng.integers(1, 4)):
            damaged[place] = rng.choice(list(b'0123456789{}[]",:_x'))
        path.write_bytes(damaged)
        report = lint(path)
        assert report.exit_code in (0, 1, 2) and "\n" not in " ".join(report.errors)
        json.dumps(report.to_json())


@pytest.mark.parametrize("seed", range(40))
def test_arrays_of_any_shape_and_type_are_judged(seed: int, tmp_path: Path) -> None:
    """Whatever lies under the names of a tensor, there is a report."""
    rng = np.random.default_rng(seed)
    types = [np.uint8, np.uint8, ml_dtypes.float8_e4m3fn, np.float32, BF16, ml_dtypes.float8_e5m2, np.int32]
    arrays: Arrays = {}
    for suffix in ("", "_scale", "_scale_2", "_packed", "_global_scale"):
        shape = tuple(rng.choice([0, 1, 2, 8, 16, 64, 128], rng.integers(0, 4)).tolist())
        dtype = np.dtype(types[rng.integers(len(types))])
        data = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype)
        if rng.random() < 0.8:
            arrays[f"w.weight{suffix}"] = data.reshape(shape)
    report = linted(tmp_path, arrays)
    assert report.exit_code in (1, 2) and json.dumps(report.to_json()) and str(report)

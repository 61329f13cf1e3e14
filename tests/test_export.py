"""Dumps of live objects: the bytes arrive as they were, and the dump is judged by the right arithmetic."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import check
from nvfp4hw.backends import compressed_tensors, jax_nn, modelopt, te_jax, te_reference, torchao
from nvfp4hw.export import to_dump
from nvfp4ref import layout
from nvfp4ref.dump import Dump, DumpError, load_dump, save_dump

Array = np.ndarray[Any, Any]

SHAPE = (48, 96)


@functools.cache
def x_of(dtype: Any = ml_dtypes.bfloat16, shape: tuple[int, int] = SHAPE) -> Array:
    """Blocks of widely different sizes, so that a wrong arithmetic or layout shows."""
    rng = np.random.default_rng(11)
    sizes = np.repeat(2.0 ** rng.uniform(-12, 3, (shape[0], shape[1] // 16)), 16, axis=1)
    return (rng.standard_normal(shape) * sizes).astype(dtype)


def available(module: Any) -> Any:
    """The backend of that module, with the package's real functions; skips where it is not installed."""
    backend = module.BACKEND()
    reason = backend.availability()
    if reason is not None and reason.startswith("not installed"):
        pytest.skip(f"{backend.name}: {reason}")
    assert reason is None
    return backend


def tensor(x: Array) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)


def assert_conforms(dump: Dump, *, arithmetic: str, tmp_path: Any) -> None:
    """The dump says which arithmetic made it, conforms to it, and survives a file."""
    assert dump.resolve_arithmetic().name == arithmetic
    save_dump(tmp_path / "dump.npz", dump)
    loaded = load_dump(tmp_path / "dump.npz")
    assert isinstance(loaded, Dump)
    report = check(loaded)
    assert report.verdict == "conforms", str(report)


# ---- nvfp4ref and its like ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_own_tensor(block: tuple[int, int], tmp_path: Any) -> None:
    q = nv.quantize(x_of(), block=block)
    dump = to_dump(q, x_of())
    assert dump.block == block and dump.x_dtype == "bfloat16"
    np.testing.assert_array_equal(dump.packed, q.packed)
    assert_conforms(dump, arithmetic="te", tmp_path=tmp_path)


def test_own_row_scaled(tmp_path: Any) -> None:
    q = nv.quantize(x_of(), arithmetic=nv.arithmetic("te", row_scaled=True))
    dump = to_dump(q, x_of())
    assert dump.amax is not None and dump.amax.shape == (SHAPE[0],)
    assert_conforms(dump, arithmetic="te", tmp_path=tmp_path)


def test_object_with_the_same_fields(tmp_path: Any) -> None:
    q = nv.quantize(x_of())
    found = SimpleNamespace(packed=q.packed, scales=q.scales, amax=q.amax)
    assert_conforms(to_dump(found, x_of()), arithmetic="te", tmp_path=tmp_path)


def test_three_dimensions() -> None:
    x = x_of().reshape(3, 16, 96)
    assert to_dump(nv.quantize(x), x).shape == SHAPE


def test_dump_is_itself() -> None:
    dump = to_dump(nv.quantize(x_of()))
    assert to_dump(dump) is dump


# ---- Transformer Engine ------------------------------------------------------------------------------------


def te_tensor(swizzled: bool = False, **how: Any) -> Any:
    """An object with the attributes of Transformer Engine's NVFP4Tensor, filled by the oracle.

    The real class needs a GPU.  Its scales are padded, and the padding is not zero.
    """
    torch = pytest.importorskip("torch")
    arithmetic = nv.arithmetic("te", **how.pop("fields", {}))
    settings: Any = {"block": how.pop("block", (1, 16)), "arithmetic": arithmetic}
    row = nv.quantize(x_of(), **settings)
    rht = nv.RHT() if how.get("with_rht") else None
    col = nv.quantize(x_of(), axis=0, rht=rht, **settings) if how.pop("columnwise", True) else None

    def padded(scales: Array) -> Any:
        full = np.full(layout.padded_shape(*scales.shape), 0x7F, np.uint8)
        full[: scales.shape[0], : scales.shape[1]] = scales
        return torch.from_numpy(layout.swizzle(scales) if swizzled else full)

    def flat(amax: Any) -> Any:
        return torch.from_numpy(np.array(amax, np.float32).reshape(-1))

    return SimpleNamespace(
        _rowwise_data=torch.from_numpy(row.packed.copy()),
        _rowwise_scale_inv=padded(row.scales),
        _amax_rowwise=flat(row.amax),
        _columnwise_data=None if col is None else torch.from_numpy(col.packed.copy()),
        _columnwise_scale_inv=None if col is None else padded(col.scales),
        _amax_columnwise=None if col is None else flat(col.amax),
        _dtype=torch.bfloat16,
        _with_gemm_swizzled_scales=swizzled,
        _row_scaled_nvfp4=bool(how.pop("row_scaled", False)),
        _nvfp4_use_4over6=bool(how.pop("use_4over6", False)),
        _nvfp4_e4m3_max=how.pop("e4m3_max", 448),
        _quantizer=SimpleNamespace(**how),
    )


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("two_d", [False, True])
def test_te_tensor(swizzled: bool, two_d: bool, tmp_path: Any) -> None:
    found = te_tensor(swizzled, block=(16, 16) if two_d else (1, 16), with_2d_quantization=two_d)
    dump = to_dump(found, x_of())
    assert dump.scale_layout == ("swizzled" if swizzled else "compact")
    assert dump.scale_kind == "padded" and dump.packed_t is not None
    assert_conforms(dump, arithmetic="te", tmp_path=tmp_path)


def test_te_tensor_with_transform(tmp_path: Any) -> None:
    found = te_tensor(with_rht=True, rht_matrix_random_sign_mask_t=0xD7E8)
    dump = to_dump(found, x_of())
    assert dump.transform() is None and dump.transform(columnwise=True) == nv.RHT()
    assert_conforms(dump, arithmetic="te", tmp_path=tmp_path)


def test_te_tensor_without_signs() -> None:
    found = te_tensor(with_rht=True, rht_matrix_random_sign_mask_t=0)
    assert to_dump(found).transform(columnwise=True) == nv.RHT(sign_mask=0)


def test_te_tensor_four_over_six(tmp_path: Any) -> None:
    found = te_tensor(
        fields={"four_over_six": "MSE", "e4m3_max": 256},
        use_4over6=True,
        e4m3_max=256,
        nvfp4_4over6_err_mode="MSE",
    )
    dump = to_dump(found, x_of())
    ar = dump.resolve_arithmetic()
    assert (ar.four_over_six, ar.e4m3_max) == ("MSE", 256)
    assert_conforms(dump, arithmetic="te", tmp_path=tmp_path)


def test_te_tensor_row_scaled(tmp_path: Any) -> None:
    dump = to_dump(te_tensor(fields={"row_scaled": True}, row_scaled=True, columnwise=False), x_of())
    assert dump.row_scaled and dump.packed_t is None
    assert_conforms(dump, arithmetic="te", tmp_path=tmp_path)


def test_te_tensor_stochastic_and_without_input() -> None:
    dump = to_dump(te_tensor(stochastic_rounding=True))
    assert (dump.rounding, dump.x, dump.x_dtype) == ("stochastic", None, "bfloat16")


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
def test_te_reference_tensor(tile: tuple[int, int], tmp_path: Any) -> None:
    available(te_reference)
    module = te_reference.reference()
    quantizer = module.NVFP4QuantizerRef(
        dtype=module.reference_utils.Fp4Formats.E2M1, rowwise=True, columnwise=True, quant_tile_shape=tile
    )
    dump = to_dump(quantizer.quantize(tensor(x_of())), x_of())
    assert dump.block == tile and dump.producer["name"] == "transformer-engine"
    assert_conforms(dump, arithmetic="te-reference", tmp_path=tmp_path)


def te_jax_result(directions: str, two_d: bool, jit: bool) -> Any:
    """A live ScaledTensor1x or 2x."""
    available(te_jax)
    import jax

    te = te_jax._quantizer_module()
    layouts = {"row": "ROWWISE", "col": "COLWISE", "both": "ROWWISE_COLWISE"}
    quantizer = te.NVFP4Quantizer(
        q_dtype=jax.numpy.float4_e2m1fn,
        scaling_mode=te.ScalingMode["NVFP4_2D_SCALING" if two_d else "NVFP4_1D_SCALING"],
        q_layout=te.QuantizeLayout[layouts[directions]],
    )
    run = jax.jit(quantizer.quantize) if jit else quantizer.quantize
    return run(jax.numpy.asarray(x_of()))


@pytest.mark.parametrize("directions", ["row", "col", "both"])
@pytest.mark.parametrize("two_d", [False, True])
def test_te_jax_tensor(directions: str, two_d: bool, tmp_path: Any) -> None:
    dump = to_dump(te_jax_result(directions, two_d, jit=True), x_of())
    assert (dump.packed is not None, dump.packed_t is not None) == (directions != "col", directions != "row")
    assert dump.block == ((16, 16) if two_d else (1, 16)) and dump.x_dtype == "bfloat16"
    assert_conforms(dump, arithmetic="te-jax", tmp_path=tmp_path)


# ---- torchao -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, (128, 64), (256, 128)])
def test_torchao(swizzled: bool, shape: tuple[int, int], tmp_path: Any) -> None:
    to_nvfp4, amax_to_scale = available(torchao)._objects()
    x = x_of(shape=shape)
    weight = tensor(x)
    found = to_nvfp4(weight, per_tensor_scale=amax_to_scale(weight.abs().max()), is_swizzled_scales=swizzled)
    dump = to_dump(found, x)
    assert (dump.amax, dump.global_scale_form) == (None, "decode")
    assert dump.scale_layout == ("swizzled" if swizzled else "compact")
    assert_conforms(dump, arithmetic="torchao", tmp_path=tmp_path)
    transposed = to_dump(found.t(), x)
    np.testing.assert_array_equal(transposed.packed, dump.packed)
    np.testing.assert_array_equal(transposed.scales, dump.scales)


def test_torchao_one_level(tmp_path: Any) -> None:
    to_nvfp4, _ = available(torchao)._objects()
    dump = to_dump(to_nvfp4(tensor(x_of())), x_of())
    assert dump.global_scale is None and dump.resolve_arithmetic().global_scale == "none"
    assert_conforms(dump, arithmetic="torchao", tmp_path=tmp_path)


def test_torchao_experts_are_refused() -> None:
    torch = pytest.importorskip("torch")
    to_nvfp4, _ = available(torchao)._objects()
    experts = tensor(x_of()).reshape(3, 16, 96)
    found = to_nvfp4(experts, per_tensor_scale=torch.ones(3, 1, 1))
    with pytest.raises(ValueError, match="3 per-tensor scales, one an expert"):
        to_dump(found)


# ---- ModelOpt, compressed-tensors --------------------------------------------------------------------------


def test_modelopt(tmp_path: Any) -> None:
    quantize, _ = available(modelopt)._objects()
    found = quantize(tensor(x_of()), 16)
    dump = to_dump(found, x_of())
    assert dump.global_scale_form == "decode"
    assert_conforms(dump, arithmetic="modelopt", tmp_path=tmp_path)
    data, scales, whole = found
    checkpoint = {"weight": data._quantized_data, "weight_scale": scales, "weight_scale_2": whole}
    exported = to_dump(checkpoint, x_of())
    np.testing.assert_array_equal(exported.packed, dump.packed)
    assert to_dump(found).x_dtype == "bfloat16"
    with pytest.raises(TypeError, match="without its scales"):
        to_dump(data)


def test_compressed_tensors(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    generate_gparam, calculate_qparams, scheme_of, compress = available(compressed_tensors)._objects()
    scheme, weight = scheme_of("NVFP4A16", ["Linear"]), tensor(x_of())
    whole = generate_gparam(*torch.aminmax(weight))
    blocks = weight.unflatten(-1, (-1, 16))
    extremes = torch.amin(blocks, -1), torch.amax(blocks, -1)
    scale, _ = calculate_qparams(*extremes, scheme.weights, global_scale=whole)
    found = compress({"weight": weight, "weight_scale": scale, "weight_global_scale": whole}, scheme)
    dump = to_dump(found, x_of())
    assert dump.global_scale_form == "encode"
    assert_conforms(dump, arithmetic="compressed-tensors", tmp_path=tmp_path)


# ---- JAX ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_level", [False, True])
def test_jax_tuple(two_level: bool, tmp_path: Any) -> None:
    jitted = jax_nn._jitted(*available(jax_nn)._objects())
    import jax

    x = jax.numpy.asarray(x_of())
    amax = jax.numpy.max(jax.numpy.abs(x)).astype(jax.numpy.float32).reshape(1)
    found = jitted(x, amax / 2688 if two_level else jax.numpy.ones(1, jax.numpy.float32))
    dump = to_dump((*found, amax) if two_level else found, x)
    assert (dump.amax is not None) is two_level
    assert_conforms(dump, arithmetic="jax-nn", tmp_path=tmp_path)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "named"),
    [
        (3, "builtins.int"),
        (None, "builtins.NoneType"),
        (np.zeros((16, 16), np.float32), "numpy.ndarray"),
        ({}, r"a dictionary with keys \(none\)"),
        ({"weight": 1, "scale": 2}, "a dictionary with keys scale, weight"),
        ((), "a tuple of nothing"),
        ((np.zeros((1, 16)), 2.0), "a tuple of ndarray, float"),
        ((np.zeros((1, 16)), np.zeros((1, 1))), "a tuple of ndarray, ndarray"),
    ],
)
def test_unknown_objects(obj: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"cannot make a dump of {named}; known are an nvfp4ref tensor"):
        to_dump(obj)


def test_input_of_another_shape() -> None:
    with pytest.raises(DumpError):
        to_dump(nv.quantize(x_of()), x_of()[:16])


def test_input_that_is_no_array() -> None:
    with pytest.raises(TypeError, match="expected an array"):
        to_dump(nv.quantize(x_of()), "x")

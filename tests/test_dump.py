"""Dumps: both formats keep every bit, equal content gives equal bytes, and bad input costs one sentence."""

from __future__ import annotations

import ast
import dataclasses
import io
import itertools
import json
import os
import pickle
import random
import stat
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvfp4ref import container
from nvfp4ref.arithmetic import arithmetic
from nvfp4ref.dump import (
    Dump,
    DumpError,
    from_tensor,
    iter_dumps,
    load_dump,
    load_dumps,
    load_tensor,
    save_dump,
)
from nvfp4ref.hadamard import RHT
from nvfp4ref.quantize import dequantize, quantize

FORMATS = (".npz", ".safetensors")
META = {"format": "nvfp4-dump", "version": 1}
ROWS, COLS = 32, 64
NAN_PAYLOADS = np.array([0x7F800001, 0x7FC12345, 0xFFFFFFFF, 0x7FBFFFFF, 0xFF800000, 0x80000000], np.uint32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def bits(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bit patterns of a dtype, NaN payloads among them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def arrays(rows: int = ROWS, cols: int = COLS, x_dtype: Any = np.float32, both: bool = False) -> dict[str, Any]:
    """The arrays of a plausible dump; the values mean nothing."""
    found = {
        "x": bits(x_dtype, (rows, cols)),
        "packed": bits(np.uint8, (rows, cols // 2), 1),
        "scales": bits(np.uint8, (rows, cols // 16), 2),
        "amax": np.array([3.5], np.float32),
    }
    columnwise = {
        "packed_t": bits(np.uint8, (cols, rows // 2), 3),
        "scales_t": bits(np.uint8, (cols, rows // 16), 4),
        "amax_t": np.array([2.25], np.float32),
    }
    return {**found, **columnwise} if both else found


def gemm() -> Dump:
    a = Dump(**arrays(16, 32))
    b = Dump(**arrays(48, 32), block=(16, 16), arithmetic="te-2.14")
    d = bits(ml_dtypes.bfloat16, (16, 48))
    return Dump(a=a, b=b, d=d, bias=bits(ml_dtypes.bfloat16, (48,)), alpha=np.array([0.5], np.float32))


def only_columnwise() -> Dump:
    return Dump(**{name: array for name, array in arrays(32, 8, both=True).items() if name[-2:] == "_t"})


def read_one(path: Path) -> Dump:
    dump = load_dump(path)
    assert isinstance(dump, Dump)
    return dump


def assert_same(found: Dump, expected: Dump) -> None:
    """Equal to the last bit, dtypes and meta included."""
    assert found.meta() == expected.meta()
    for mine, other in ((found.arrays(), expected.arrays()), (dict(found.extra), dict(expected.extra))):
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].dtype == other[name].dtype, name
            assert mine[name].shape == other[name].shape, name
            assert mine[name].tobytes() == other[name].tobytes(), name
    assert found.operands().keys() == expected.operands().keys()
    for name, operand in found.operands().items():
        assert_same(operand, expected.operands()[name])


# -- round trips -------------------------------------------------------------------------------------

EVERY_META = {
    "rounding": "stochastic",
    "rht": {"size": 32},
    "rht_t": {"size": 16, "sign_mask": 0xD7E8},
    "scale_layout": "swizzled",
    "global_scale_form": "decode",
    "arithmetic": {"name": "te", "four_over_six": "MAE", "e4m3_max": 256},
    "rng": {"seed": 2**64 - 1, "offset": 7, "kernel": "2d", "both": True},
    "rng_t": {"seed": 0},
    "producer": {"name": "unit test", "version": "1 – β", "device": None},
    "extra_meta": {"comment": "kept", "nested": {"list": [1, 2.5, None]}},
}
ROUND_TRIPS: dict[str, Callable[[], Dump]] = {
    "float32": lambda: Dump(**arrays()),
    "float16": lambda: Dump(**arrays(x_dtype=np.float16)),
    "bfloat16": lambda: Dump(**arrays(x_dtype=ml_dtypes.bfloat16)),
    "both directions": lambda: Dump(**arrays(both=True), block=(16, 16)),
    "columnwise only": lambda: only_columnwise(),
    "without x": lambda: Dump(packed=arrays()["packed"], scales=arrays()["scales"], x_dtype="bfloat16"),
    "NaN payloads": lambda: Dump(**{**arrays(6, 16), "amax": NAN_PAYLOADS.view(np.float32)}),
    "every field": lambda: Dump(
        **arrays(both=True),
        **EVERY_META,
        global_scale=bits(np.float32, (1,), 5),
        global_scale_t=bits(np.float32, (COLS,), 6),
        rbits=bits(np.uint32, (ROWS, COLS // 4), 7),
        rbits_t=bits(np.float32, (COLS, ROWS), 8),
        extra={"more": bits(np.int64, (3, 0, 2), 9), "flag": np.array(True), "half": bits(np.float16, (5,))},
    ),
    "odd scales": lambda: Dump(**{**arrays(), "scales": bits(np.uint8, (2, 2, 32))}),
    "gemm": gemm,
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_round_trip_keeps_every_bit(case: str, suffix: str, tmp_path: Path) -> None:
    dump = ROUND_TRIPS[case]()
    save_dump(tmp_path / f"d{suffix}", dump)
    assert_same(read_one(tmp_path / f"d{suffix}"), dump)
    assert os.listdir(tmp_path) == [f"d{suffix}"]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_same_content_same_bytes(case: str, suffix: str, tmp_path: Path) -> None:
    dump = ROUND_TRIPS[case]()
    reordered = {key: dict(reversed(value.items())) for key, value in dump.meta().items() if isinstance(value, dict)}
    again = dataclasses.replace(dump, **{key: value for key, value in reordered.items() if key in EVERY_META})
    paths = [tmp_path / f"{n}{suffix}" for n in range(2)]
    save_dump(paths[0], dump)
    save_dump(str(paths[1]).encode().decode(), again)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_files_are_what_other_readers_expect(tmp_path: Path) -> None:
    """numpy.load and the safetensors package, as independent witnesses of both writers."""
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    from safetensors import safe_open

    dump = ROUND_TRIPS["bfloat16"]()
    assert dump.x is not None
    for suffix in FORMATS:
        save_dump(tmp_path / f"d{suffix}", dump)
    with np.load(tmp_path / "d.npz", allow_pickle=False) as npz:
        found = {name: npz[name] for name in npz.files}
    assert json.loads(found.pop("meta").item()) == dump.meta()
    with safe_open(tmp_path / "d.safetensors", "np") as file:
        assert json.loads(file.metadata()["meta"]) == dump.meta()
    for read in (found, safetensors_numpy.load_file(tmp_path / "d.safetensors")):
        assert read["x"].dtype == np.uint16
        expected = {**dump.arrays(), "x": dump.x.view(np.uint16)}
        assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in read.items()} == {
            name: (a.dtype, a.shape, a.tobytes()) for name, a in expected.items()
        }


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    plain = arrays()
    np.savez(tmp_path / "a.npz", **plain, meta=json.dumps(META))
    np.savez_compressed(tmp_path / "b.npz", **plain, meta=np.frombuffer(json.dumps(META).encode(), np.uint8))
    np.savez(tmp_path / "c.npz", **plain, meta=np.array(json.dumps(META).encode()))
    safetensors_numpy.save_file(plain, tmp_path / "d.safetensors", {"meta": json.dumps(META)})
    scattered = {"format": "nvfp4-dump", "version": "1", "block": "[1, 16]", "rounding": "nearest-even"}
    safetensors_numpy.save_file(plain, tmp_path / "e.safetensors", scattered)
    for path in sorted(tmp_path.iterdir()):
        assert_same(read_one(path), Dump(**plain))


def test_documented_defaults(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "d.npz",
        **arrays(x_dtype=np.float16),
        meta=json.dumps({**META, "rng": None, "block": None}),
    )
    dump = read_one(tmp_path / "d.npz")
    assert (dump.x_dtype, dump.block, dump.rounding, dump.rht, dump.rht_t) == (
        "float16",
        (1, 16),
        "nearest-even",
        False,
        False,
    )
    assert (dump.scale_layout, dump.arithmetic, dump.rng, dump.rng_t) == ("compact", None, None, None)
    assert (dump.global_scale_form, dump.producer, dump.extra_meta) == (None, {}, {})
    assert dump.resolve_arithmetic() == arithmetic("te")


def test_fortran_order_and_big_endian_are_converted(tmp_path: Path) -> None:
    plain = arrays()
    strange = {name: np.asfortranarray(array.astype(array.dtype.newbyteorder(">"))) for name, array in plain.items()}
    assert_same(Dump(**strange), Dump(**plain))
    np.savez(tmp_path / "d.npz", **strange, meta=json.dumps(META))
    found = read_one(tmp_path / "d.npz")
    assert_same(found, Dump(**plain))
    assert all(array.flags.c_contiguous and array.dtype.isnative for array in found.arrays().values())
    save_dump(tmp_path / "e.safetensors", **strange)
    assert_same(read_one(tmp_path / "e.safetensors"), Dump(**plain))


def test_one_element_arrays_may_be_0d(tmp_path: Path) -> None:
    save_dump(tmp_path / "d.npz", **{**arrays(), "amax": np.float32(3.5)})
    amax = read_one(tmp_path / "d.npz").amax
    assert amax is not None and amax.shape == (1,) and amax[0] == 3.5


def raw_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], meta: Any = META) -> Path:
    """A .safetensors written by hand, for dtypes that NumPy has not."""
    header: dict[str, Any] = {"__metadata__": {"meta": json.dumps(meta)}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def test_native_safetensors_dtypes(tmp_path: Path) -> None:
    plain = arrays(x_dtype=ml_dtypes.bfloat16)
    tensors = {
        "x": ("BF16", [ROWS, COLS], plain["x"].tobytes()),
        "packed": ("F4", [ROWS, COLS], plain["packed"].tobytes()),
        "scales": ("F8_E4M3", [ROWS, COLS // 16], plain["scales"].tobytes()),
        "amax": ("F32", [], plain["amax"].tobytes()),
    }
    assert_same(read_one(raw_safetensors(tmp_path / "d.safetensors", tensors)), Dump(**plain))
    assert Dump(**{**plain, "scales": plain["scales"].view(ml_dtypes.float8_e4m3fn)}).scales is not None


def test_arrays_are_described_without_their_data(tmp_path: Path) -> None:
    x = bits(ml_dtypes.bfloat16, (64, 4096))
    content = {"x": ("BF16", [64, 4096], x.tobytes()), "packed": ("F4", [2, 32], bytes(range(32)))}
    content |= {"scales": ("F8_E4M3", [2, 2], b"abcd"), "e": ("F8_E8M0", [1], b"e")}
    raw_safetensors(tmp_path / "d.safetensors", content)
    np.savez(tmp_path / "d.npz", x=x.view(np.uint16), e=np.zeros((3, 0), ">f4"))
    tracemalloc.start()
    try:
        with container.open_archive(tmp_path / "d.safetensors") as archive:
            described = {name: archive.describe(name) for name in archive.names}
            fp4, fp8 = archive.read("packed"), archive.read("scales")
        with container.open_archive(tmp_path / "d.npz") as archive:
            also = {name: archive.describe(name) for name in archive.names}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert described == {name: (dtype, tuple(shape)) for name, (dtype, shape, _) in content.items()}
    assert also == {"x": ("uint16", (64, 4096)), "e": ("float32", (3, 0))}
    assert (fp4.dtype, fp4.shape, fp4.tobytes()) == (np.uint8, (2, 16), bytes(range(32)))
    assert (fp8.dtype, fp8.shape, fp8.tobytes()) == (ml_dtypes.float8_e4m3fn, (2, 2), b"abcd")
    assert peak < x.nbytes / 2
    for suffix in FORMATS:
        with container.open_archive(tmp_path / f"d{suffix}") as archive:
            for ask in (archive.describe, archive.read):
                with pytest.raises(DumpError, match="^'y': "):
                    ask("y")


def test_bfloat16_that_numpy_saved_as_void(tmp_path: Path) -> None:
    plain = arrays(x_dtype=ml_dtypes.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.savez(tmp_path / "d.npz", **plain, meta=json.dumps({**META, "x_dtype": "bfloat16"}))
    assert_same(read_one(tmp_path / "d.npz"), Dump(**plain))


# -- several tensors, GEMMs ---------------------------------------------------------------------------


def test_named_tensors(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    dumps = {
        "layers.0.w": Dump(**arrays()),
        "a": Dump(**arrays(16, 16)),
        "b": Dump(**arrays(16, 32), block=(16, 16)),
        "": Dump(**arrays(both=True)),
        "β": gemm(),
    }
    save_dump(path, dumps)
    found = load_dump(path)
    assert isinstance(found, dict) and found.keys() == dumps.keys()
    for name, dump in dumps.items():
        assert_same(found[name], dump)
    assert {name for name, _ in iter_dumps(path)} == dumps.keys()


def test_one_prefix_is_still_a_dict(tmp_path: Path) -> None:
    save_dump(tmp_path / "d.safetensors", {"w": Dump(**arrays())})
    assert isinstance(load_dump(tmp_path / "d.safetensors"), dict)
    save_dump(tmp_path / "d.safetensors", {"": Dump(**arrays())})
    assert isinstance(load_dump(tmp_path / "d.safetensors"), Dump)
    assert load_dumps(tmp_path / "d.safetensors").keys() == {""}


def test_all_meta_is_one_text(tmp_path: Path) -> None:
    """Of several the safetensors library writes the order changes from run to run."""
    from safetensors import safe_open

    plain, product = Dump(**arrays(), producer={"name": "p"}), gemm()
    (a, b) = (operand.meta() for operand in product.operands().values())
    for content, expected in (
        (plain, plain.meta()),
        ({"w": plain}, {**META, "tensors": {"w": plain.meta()}}),
        (product, {**product.meta(), "tensors": {"a": a, "b": b}}),
        (
            {"": plain, "g": product},
            {**plain.meta(), "tensors": {"g": product.meta(), "g.a": a, "g.b": b}},
        ),
    ):
        save_dump(tmp_path / "d.safetensors", content)
        with safe_open(tmp_path / "d.safetensors", "np") as file:
            assert list(file.metadata()) == ["meta"]
            assert json.loads(file.metadata()["meta"]) == expected


def test_a_common_meta_serves_every_tensor(tmp_path: Path) -> None:
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    tensors = {f"{name}.{key}": array for name in ("u", "v") for key, array in arrays().items()}
    meta = {"meta": json.dumps({**META, "block": [16, 16]}), "v.meta": json.dumps(META)}
    safetensors_numpy.save_file(tensors, tmp_path / "d.safetensors", meta)
    assert {name: dump.block for name, dump in load_dumps(tmp_path / "d.safetensors").items()} == {
        "u": (16, 16),
        "v": (1, 16),
    }


def test_operands_take_the_meta_of_their_gemm(tmp_path: Path) -> None:
    operands = {f"{name}.{key}": array for name in "ab" for key, array in arrays(16, 32).items()}
    np.savez(
        tmp_path / "d.npz",
        **operands,
        d=np.zeros((16, 16), np.float32),
        meta=json.dumps({**META, "rht": True}),
    )
    dump = read_one(tmp_path / "d.npz")
    assert dump.shape is None and dump.scale_kind is None
    assert dump.a is not None and dump.a.rht is True and dump.b is not None and dump.b.shape == (16, 32)


def test_dumps_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    save_dump(path, {f"w{n}": Dump(**arrays(256, 4096)) for n in range(8)})
    tracemalloc.start()
    try:
        for _, dump in iter_dumps(path):
            del dump
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * path.stat().st_size / 8


# -- meaning -----------------------------------------------------------------------------------------


def test_tensors_there_and_back(tmp_path: Path) -> None:
    x = rng().standard_normal((48, 80)).astype(ml_dtypes.bfloat16)
    q, q_t = quantize(x), quantize(x, axis=0)
    for suffix in FORMATS:
        save_dump(tmp_path / f"d{suffix}", q, x=x, columnwise=q_t, rht=False)
        dump = read_one(tmp_path / f"d{suffix}")
        assert dump.shape == x.shape and dump.scale_kind == dump.scale_kind_t == "compact"
        for found, expected in ((dump.rowwise(), q), (dump.columnwise(), q_t)):
            assert np.array_equal(found.packed, expected.packed) and np.array_equal(found.scales, expected.scales)
            assert np.array_equal(dequantize(found), dequantize(expected))


def test_leading_dimensions_are_flattened() -> None:
    x = rng().standard_normal((2, 8, 32)).astype(np.float32)
    dump = from_tensor(quantize(x), x)
    assert dump.shape == (16, 32)


def test_arithmetic_of_a_tensor_survives(tmp_path: Path) -> None:
    x = rng().standard_normal((16, 64)).astype(np.float32)
    for ar in (arithmetic("te-2.14"), arithmetic("te", four_over_six="MAE", e4m3_max=256), arithmetic("te")):
        save_dump(tmp_path / "d.npz", quantize(x, arithmetic=ar), x=x)
        assert read_one(tmp_path / "d.npz").resolve_arithmetic() == ar
    nameless = dataclasses.replace(arithmetic("te", block_scale="prescaled"), name="mine")
    assert Dump(**arrays(), arithmetic=nameless).arithmetic == {"name": "te", "block_scale": "prescaled"}


def test_given_arithmetic_beats_meta_beats_te() -> None:
    dump = Dump(**arrays(), arithmetic="te-2.14")
    assert dump.resolve_arithmetic("te-fast-math").name == "te-fast-math"
    assert dump.resolve_arithmetic().name == "te-2.14"
    assert Dump(**arrays()).resolve_arithmetic().name == "te"
    assert Dump(**arrays()).arithmetic is None
    for wrong in ("no such preset", {"name": "te", "no_such_field": 1}, {"name": "te", "e4m3_max": 3}):
        with pytest.raises(DumpError, match="arithmetic in meta"):
            Dump(**arrays(), arithmetic=wrong).resolve_arithmetic()


def test_row_scaled_is_told_by_the_amax(tmp_path: Path) -> None:
    x = rng().standard_normal((16, 64)).astype(np.float32)
    ar = arithmetic("te", row_scaled=True)
    q = quantize(x, arithmetic=ar)
    dump = Dump(x=x, packed=q.packed, scales=q.scales, amax=q.amax)
    assert dump.row_scaled and dump.resolve_arithmetic() == ar and dump.resolve_arithmetic("te") == ar
    assert np.array_equal(dump.rowwise().amax, q.amax)
    assert from_tensor(q, x).row_scaled and not Dump(**arrays()).row_scaled


def test_transform() -> None:
    assert Dump(**arrays()).transform() is None
    assert Dump(**arrays(), rht=True).transform() == RHT()
    assert Dump(**arrays(), rht_t=RHT(size=32)).transform(columnwise=True) == RHT(size=32)
    assert Dump(**arrays(), rht={"sign_mask": 3}).transform() == RHT(sign_mask=3)
    with pytest.raises(DumpError, match="transform in meta"):
        Dump(**arrays(), rht={"size": 7}).transform()


@pytest.mark.parametrize(
    ("shape", "layout", "kind"),
    [
        ((32, 4), "compact", "compact"),
        ((128, 4), "compact", "padded"),
        ((128, 4), "swizzled", "padded"),
        ((32, 4), "swizzled", "compact"),
        ((4, 32), "compact", "other"),
        ((128,), "compact", "other"),
        ((0,), "swizzled", "other"),
    ],
)
def test_scale_kind(shape: tuple[int, ...], layout: str, kind: str) -> None:
    dump = Dump(**{**arrays(), "scales": bits(np.uint8, shape)}, scale_layout=layout)
    assert dump.scale_kind == kind and dump.scale_kind_t is None
    if kind == "other" or (layout, kind) == ("swizzled", "compact"):
        with pytest.raises(DumpError, match="fit no"):
            dump.rowwise()
    else:
        assert dump.rowwise().scales.shape == (32, 4)


def test_scale_kind_where_compact_and_padded_are_one_shape() -> None:
    plain = arrays(128, 64)
    assert Dump(**plain).scale_kind == "compact"
    assert Dump(**plain, scale_layout="swizzled").scale_kind == "padded"


def test_a_tensor_needs_all_its_arrays() -> None:
    with pytest.raises(DumpError, match="no packed_t"):
        Dump(**arrays()).columnwise()
    output = {name: arrays()[name] for name in ("packed", "scales")}
    with pytest.raises(DumpError, match="has no amax, which a tensor needs"):
        Dump(**output).rowwise()
    with pytest.raises(DumpError, match="has no amax, .* no global_scale tells"):
        Dump(**output, global_scale=np.ones(1, np.float32), global_scale_form="encode").rowwise()
    with pytest.raises(DumpError, match="differ in block"):
        x = np.ones((16, 16), np.float32)
        from_tensor(quantize(x), columnwise=quantize(x, axis=0, block=(16, 16)))
    with pytest.raises(DumpError, match="no output"):
        from_tensor(None)


def test_repr_shows_no_values() -> None:
    assert repr(gemm()).startswith("<Dump d bfloat16(16, 48), bias") and len(repr(gemm())) < 2000


def test_save_takes_meta_as_object_or_text(tmp_path: Path) -> None:
    wanted = {"rounding": "stochastic", "producer": {"name": "p"}, "rng": None}
    for meta in (wanted, {**META, **wanted}, json.dumps(wanted), json.dumps(wanted).encode()):
        save_dump(tmp_path / "d.npz", **arrays(), meta=meta)
        dump = read_one(tmp_path / "d.npz")
        assert dump.rounding == "stochastic" and dump.producer == {"name": "p"}
    save_dump(tmp_path / "e.npz", dump, rounding="nearest-even", rht_t=True)
    assert read_one(tmp_path / "e.npz").rounding == "nearest-even"


def test_global_scale_form_may_be_a_text_of_its_own(tmp_path: Path) -> None:
    scale = {"global_scale": np.array([2.0], np.float32)}
    np.savez(tmp_path / "d.npz", **arrays(), **scale, meta=json.dumps(META), global_scale_form="decode")
    assert read_one(tmp_path / "d.npz").global_scale_form == "decode"
    meta = json.dumps({**META, "global_scale_form": "encode"})
    np.savez(tmp_path / "d.npz", **arrays(), **scale, meta=meta, global_scale_form="decode")
    with pytest.raises(DumpError, match="'decode', but meta says 'encode'"):
        load_dump(tmp_path / "d.npz")


# -- content that is no dump --------------------------------------------------------------------------

WRONG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"packed": None, "scales": None, "amax": None}, "no output"),
    "no scales": ({"scales": None}, "packed without scales"),
    "no packed": ({"packed": None}, "without packed"),
    "packed_t alone": ({"packed_t": bits(np.uint8, (COLS, ROWS // 2))}, "packed_t without scales_t"),
    "amax_t alone": ({"amax_t": np.ones(1, np.float32)}, "amax_t without packed_t"),
    "x float64": ({"x": np.zeros((ROWS, COLS))}, "x is float64, expected float32 or float16 or bfloat16"),
    "x objects": ({"x": np.full((ROWS, COLS), None)}, "x is object"),
    "x ragged": ({"x": [[1.0], [1.0, 2.0]]}, "x is not an array"),
    "x is text": ({"x": "text"}, "x is <U4"),
    "x bits undeclared": ({"x": bits(np.uint16, (ROWS, COLS))}, "x_dtype must be 'bfloat16'"),
    "x bits as float16": ({"x": bits(np.uint16, (ROWS, COLS)), "x_dtype": "float16"}, "x is uint16"),
    "x float32 as bfloat16": ({"x_dtype": "bfloat16"}, "x is float32, but x_dtype is 'bfloat16'"),
    "x 1-d": ({"x": np.zeros(ROWS * COLS, np.float32)}, "x has the shape"),
    "x 3-d": ({"x": np.zeros((1, ROWS, COLS), np.float32)}, "x has the shape"),
    "x of another shape": ({"x": np.zeros((COLS, ROWS), np.float32)}, "contradictory shapes"),
    "packed 0-d": ({"packed": np.uint8(3)}, "packed has the shape"),
    "packed 1-d": ({"packed": bits(np.uint8, (64,))}, "packed has the shape"),
    "packed empty": ({"x": None, "packed": np.zeros((0, 32), np.uint8)}, "neither of them 0"),
    "packed int64": ({"packed": np.zeros((ROWS, COLS // 2), np.int64)}, "packed is int64, expected uint8"),
    "packed int8": ({"packed": np.zeros((ROWS, COLS // 2), np.int8)}, r"\.view\(np\.uint8\)"),
    "C not of 16": (
        {"x": None, "packed": bits(np.uint8, (32, 12)), "scales": bits(np.uint8, (32, 2))},
        "C = 24",
    ),
    "R not of 16": (
        {**arrays(16, 24, both=True), "packed": None, "scales": None, "amax": None, "block": (16, 16)},
        "C = 24",
    ),
    "R not of 16 columnwise": (
        {
            "x": None,
            "packed": None,
            "scales": None,
            "amax": None,
            "packed_t": bits(np.uint8, (8, 4)),
            "scales_t": [0],
        }
        | {"scales_t": bits(np.uint8, (8, 1))},
        "R = 8",
    ),
    "scales float32": (
        {"scales": np.zeros((ROWS, COLS // 16), np.float32)},
        "scales is float32, expected uint8",
    ),
    "scales e5m2": ({"scales": np.zeros((ROWS, 4), ml_dtypes.float8_e5m2)}, "scales is float8_e5m2"),
    "amax float64": ({"amax": np.ones(1)}, "amax is float64, expected float32"),
    "amax of another length": (
        {"amax": np.ones(5, np.float32)},
        r"amax has the shape \(5,\), expected \(1,\) or",
    ),
    "amax 2-d": ({"amax": np.ones((1, 1), np.float32)}, "amax has the shape"),
    "global_scale without form": (
        {"global_scale": np.ones(1, np.float32)},
        "global_scale needs global_scale_form",
    ),
    "rbits int": ({"rbits": np.zeros((ROWS, 16), np.int32), "rounding": "stochastic"}, "rbits is int32"),
    "rbits shape": (
        {"rbits": np.zeros((ROWS, 15), np.uint32), "rounding": "stochastic"},
        "rbits has the shape",
    ),
    "rbits uniforms": (
        {"rbits": np.zeros((ROWS, 16), np.float32), "rounding": "stochastic"},
        r"expected \(32, 64\)",
    ),
    "rbits nearest": ({"rbits": np.zeros((ROWS, 16), np.uint32)}, "with rounding 'nearest-even'"),
    "x_dtype": ({"x_dtype": "float64"}, "x_dtype is 'float64', expected 'float32' or"),
    "block 2": ({"block": (2, 16)}, "block is"),
    "block text": ({"block": "16x16"}, "block is '16x16'"),
    "block bool": ({"block": [True, 16]}, "block is"),
    "block float": ({"block": [1, 16.0, 3]}, "block is"),
    "rounding": ({"rounding": "up"}, "rounding is 'up', expected 'nearest-even' or 'stochastic'"),
    "rht number": ({"rht": 1}, "rht is 1"),
    "rht text": ({"rht_t": "yes"}, "rht_t is 'yes'"),
    "rht unknown field": ({"rht": {"sise": 16}}, "expected an object of the fields size"),
    "rht wrong type": ({"rht": {"size": "16"}}, "rht has a size"),
    "scale_layout": ({"scale_layout": "padded"}, "scale_layout is 'padded'"),
    "global_scale_form": ({"global_scale_form": "both"}, "global_scale_form is 'both'"),
    "arithmetic number": ({"arithmetic": 3}, "arithmetic is 3"),
    "arithmetic empty": ({"arithmetic": ""}, "arithmetic is ''"),
    "arithmetic nameless": ({"arithmetic": {"e4m3_max": 256}}, "expected a preset's name"),
    "arithmetic unwritable": (
        {"arithmetic": {"name": "te", "headroom": np.float32(1)}},
        "cannot be written as JSON",
    ),
    "rng seed": ({"rng": {"seed": 2**64}}, "rng has a seed"),
    "rng no seed": ({"rng": {"offset": 0}}, "rng has no seed"),
    "rng both": ({"rng_t": {"seed": 1, "both": 1}}, "rng_t has a both"),
    "producer": ({"producer": "me"}, "producer is 'me', expected an object"),
    "producer NaN": ({"producer": {"x": float("nan")}}, "producer cannot be written as JSON"),
    "extra slip": ({"extra": {"rbitz": np.zeros(1)}}, "did you mean 'rbits'"),
    "extra name": ({"extra": {"a.b": np.zeros(1)}}, "is no name"),
    "extra known": ({"extra": {"x": np.zeros(1)}}, "is no name"),
    "extra text": ({"extra": {"note": np.array("text")}}, "expected plain numbers"),
    "extra_meta slip": ({"extra_meta": {"roundin": 1}}, "did you mean 'rounding'"),
    "extra_meta known": ({"extra_meta": {"block": [1, 16]}}, "is no extra key"),
    "extra_meta list": ({"extra_meta": [1]}, "expected an object"),
    "d alone": ({"d": np.zeros((2, 2), np.float32)}, "d without a, b"),
    "alpha alone": ({"alpha": np.zeros(1, np.float32)}, "alpha without a, b, d"),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_wrong_content(case: str, tmp_path: Path) -> None:
    fields, message = WRONG_FIELDS[case]
    for suffix in FORMATS:
        with pytest.raises(DumpError, match=message) as caught:
            save_dump(tmp_path / f"d{suffix}", **{**arrays(), **fields})
        assert str(caught.value).startswith(f"{tmp_path}/d{suffix}: ") and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


WRONG_GEMMS: dict[str, tuple[dict[str, Any], str]] = {
    "no b": ({"b": None}, "a without b"),
    "no d": ({"d": None}, "without d"),
    "a is an array": ({"a": np.zeros(3)}, "operand a is ndarray, expected a Dump"),
    "a is a GEMM": ({"a": gemm()}, "operand a must be a tensor"),
    "K differs": ({"a": Dump(**arrays(16, 64))}, "differ in K"),
    "d shape": ({"d": np.zeros((48, 16), np.float32), "d_dtype": ""}, r"d has the shape \(48, 16\)"),
    "d dtype": ({"d": np.zeros((16, 48), np.float32)}, "d is float32, but d_dtype is 'bfloat16'"),
    "bias shape": ({"bias": np.zeros(16, np.float32)}, r"bias has the shape \(16,\), expected \(48,\)"),
    "alpha shape": ({"alpha": np.zeros(2, np.float32)}, "alpha has the shape"),
    "c bits": (
        {"d": np.zeros((16, 48), np.float32), "d_dtype": "", "c": bits(np.uint16, (16, 48))},
        "c is uint16",
    ),
}


@pytest.mark.parametrize("case", WRONG_GEMMS)
def test_wrong_gemm(case: str) -> None:
    fields, message = WRONG_GEMMS[case]
    with pytest.raises(DumpError, match=message):
        dataclasses.replace(gemm(), **fields)


def test_what_save_refuses(tmp_path: Path) -> None:
    dump = Dump(**arrays())
    for wrong in (3, {}, {"w": 3}):
        with pytest.raises(DumpError, match="expected a Dump, an NVFP4Tensor or a dict"):
            save_dump(tmp_path / "d.npz", wrong)  # type: ignore[arg-type]
    with pytest.raises(DumpError, match="an .npz holds one tensor without a name; 'w'"):
        save_dump(tmp_path / "d.npz", {"w": dump})
    with pytest.raises(DumpError, match="stored as 'a'"):
        save_dump(tmp_path / "d.safetensors", {"": gemm(), "a": dump})
    with pytest.raises(DumpError, match="stored as 'g.b'"):
        save_dump(tmp_path / "d.safetensors", {"g": gemm(), "g.b": only_columnwise()})
    with pytest.raises(DumpError, match="cannot be written"):
        save_dump(tmp_path / "d.safetensors", {"\ud800": dump})
    with pytest.raises(DumpError, match='cannot be written: Unknown dtype "complex128"'):
        save_dump(tmp_path / "d.safetensors", dump, extra={"z": np.zeros(2, np.complex128)})
    with pytest.raises(TypeError, match="scale"):
        save_dump(tmp_path / "d.npz", dump, scale=3)
    for path in ("d.pt", "d", "d.npz.gz", "d.npy"):
        with pytest.raises(DumpError, match="expected .npz or .safetensors"):
            save_dump(tmp_path / path, dump)
    assert not list(tmp_path.iterdir())


# -- files that are none ------------------------------------------------------------------------------


def write_npz(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")
        for name, data in members.items():
            archive.writestr(name.removesuffix("!"), data)  # '!' makes a second member of the same name
    return path


def npy(array: np.ndarray, pickled: bool = False) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=pickled)
    return stream.getvalue()


def npy_claiming(shape: str, data: bytes = b"\0" * 64, descr: str = "'|u1'", version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (len(text) + 10) % 64) + b"\n"
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def members(**changed: bytes | None) -> dict[str, bytes]:
    """The members of a valid .npz, some of them replaced or left out."""
    found = {name: npy(array) for name, array in arrays().items()} | {"meta": npy(np.array(json.dumps(META)))}
    return {f"{name}.npy": data for name, data in {**found, **changed}.items() if data is not None}


def meta_npz(text: Any) -> dict[str, bytes]:
    return members(meta=npy(np.array(text if isinstance(text, (str, bytes)) else json.dumps(text))))


class Pickled:
    """Loading this would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.abort, ())


BAD_NPZ: dict[str, tuple[dict[str, bytes], str]] = {
    "no meta": (members(meta=None), "no meta that says"),
    "no members": ({}, "no meta that says"),
    "meta not JSON": (meta_npz("{format: nvfp4}"), "meta is not valid JSON"),
    "meta list": (meta_npz([1]), "meta is JSON \\[1\\], expected an object"),
    "meta NaN": (meta_npz('{"format": NaN}'), "NaN is no JSON number"),
    "meta twice": (
        meta_npz('{"format": "nvfp4-dump", "version": 1, "version": 1}'),
        "'version' stands there twice",
    ),
    "meta deep": (meta_npz("[" * 100_000), "nested too deeply|not valid JSON"),
    "meta huge number": (meta_npz('{"a": ' + "9" * 5000 + "}"), "meta is not valid JSON"),
    "meta empty": (meta_npz(""), "meta is not valid JSON"),
    "meta not UTF-8": (members(meta=npy(np.array([0xFF, 0xFE], np.uint8))), "'meta': is not UTF-8 text"),
    "meta not UTF-8 bytes": (meta_npz(b"\xff\xfe"), "'meta': is not UTF-8 text"),
    "meta number": (members(meta=npy(np.array(3.0))), "'meta': is float64 \\(\\), expected text"),
    "meta two texts": (members(meta=npy(np.array(["a", "b"]))), "expected text"),
    "meta impossible code point": (members(meta=npy_claiming("()", b"\xff\xff\xff\x7f", "'<U1'")), "meta"),
    "no format": (meta_npz({"version": 1}), "meta's format is missing, expected 'nvfp4-dump'"),
    "other format": (meta_npz({**META, "format": "gguf"}), "meta's format is 'gguf'"),
    "no version": (meta_npz({"format": "nvfp4-dump"}), "meta's version is missing, expected 1"),
    "version 2": (meta_npz({**META, "version": 2}), "meta's version is 2, expected 1"),
    "version true": (meta_npz({**META, "version": True}), "meta's version is True"),
    "version text": (meta_npz({**META, "version": "1"}), "meta's version is '1'"),
    "bad field": (meta_npz({**META, "rounding": "down"}), "rounding is 'down'"),
    "endless value": (
        meta_npz({**META, "rounding": "n" * 10**6}),
        r"^.{0,500}rounding is 'nnn.{0,200}$",
    ),
    "endless name": (members(**{"n" * 10**4: b""}), "^.{0,500}$"),
    "slip in meta": (meta_npz({**META, "blocks": [16, 16]}), "did you mean 'block'"),
    "slip in key": (members(scale=npy(np.zeros(3, np.uint8))), "unknown key 'scale'; did you mean 'scales'"),
    "pickled": (members(x=npy(np.array([Pickled()]), pickled=True)), "'x': .*pickled Python objects"),
    "pickled extra": (members(note=npy(np.array([{}]), pickled=True)), "pickled Python objects"),
    "structured": (members(x=npy(np.zeros(3, "u1,u2"))), "expected plain numbers or text"),
    "date": (members(x=npy(np.zeros(3, "M8[s]"))), "expected plain numbers or text"),
    "not .npy": ({**members(), "readme.txt": b"hello"}, "member 'readme.txt' is not an .npy"),
    "folder": ({**members(), "folder/": b""}, "is not an .npy"),
    "raw bytes": (members(x=b"hello"), "'x': is no .npy, or damaged"),
    "empty member": (members(x=b""), "'x': is no .npy, or damaged"),
    "half a header": (members(x=npy(np.zeros(3))[:40]), "'x': is no .npy, or damaged"),
    "short data": (members(x=npy(np.zeros((ROWS, COLS), np.float32))[:-1]), "'x': claims 8192 bytes"),
    "long data": (members(x=npy(np.zeros((ROWS, COLS), np.float32)) + b"0"), "'x': claims 8192 bytes"),
    "100 GB": (members(packed=npy_claiming("(100000, 1000000)")), "'packed': claims 100000000000 bytes"),
    "100 GB version 2": (
        members(packed=npy_claiming("(100000, 1000000)", version=2)),
        "claims 100000000000 bytes",
    ),
    "beyond 64 bits": (members(packed=npy_claiming(f"({2**70}, {2**70})")), "'packed': claims"),
    "zero times beyond": (members(packed=npy_claiming(f"(0, {2**70})", b"")), "'packed': is no .npy"),
    "negative": (members(packed=npy_claiming("(-8, -8)")), "claims the shape"),
    "shape of text": (members(packed=npy_claiming("('a',)")), "'packed': is no .npy"),
    "shape of bool": (members(packed=npy_claiming("(True, 64)")), "'packed': is no .npy"),
    "many dimensions": (
        members(packed=npy_claiming("(" + "1, " * 70 + ")", b"0")),
        "'packed': is no .npy",
    ),
    "no dtype": (members(packed=npy_claiming("(64,)", descr="'zz'")), "'packed': is no .npy"),
    "empty dtype": (members(packed=npy_claiming("(64,)", b"", "'|V0'")), "expected plain numbers"),
    "code for a header": (
        members(packed=npy_claiming("(__import__('os').abort(),)")),
        "'packed': is no .npy",
    ),
    "version 3": (members(packed=npy_claiming("(64,)", version=3)), "is .npy version 3.0"),
    "header of 4 GB": (members(packed=b"\x93NUMPY\x02\0\xff\xff\xff\xff{}"), "'packed': is no .npy"),
    "same member twice": ({**members(), "x.npy!": members()["x.npy"]}, "member 'x' is there twice"),
    "same array twice": ({**members(), ".x.npy": members()["x.npy"]}, "'.x' and 'x' name the same array"),
    "named tensor": (
        {f"w.{k}": v for k, v in members().items()},
        "an .npz holds one tensor without a name; 'w'",
    ),
    "operands without d": (
        {f"{side}.{key}": data for side in "ab" for key, data in members().items()}
        | {"meta.npy": members()["meta.npy"]},
        "an .npz holds one tensor",
    ),
}


@pytest.mark.parametrize("case", BAD_NPZ)
@pytest.mark.filterwarnings("error")
def test_bad_npz(case: str, tmp_path: Path) -> None:
    content, message = BAD_NPZ[case]
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = write_npz(tmp_path / "d.npz", content, compression)
        assert_small_refusal(load_dump, path, message)


def assert_small_refusal(load: Callable[[Path], Any], path: Path, message: str) -> None:
    """One sentence that starts with the path, and little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DumpError, match=message) as caught:
            load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert peak < 16 << 20


def patched(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def central(data: bytearray) -> int:
    return data.rindex(b"PK\x01\x02")


def test_zip_that_lies_about_sizes(tmp_path: Path) -> None:
    big = (0x7FFF0000).to_bytes(4, "little")
    for compression, offsets, message in (
        (zipfile.ZIP_STORED, (24,), "claims 2147418112 bytes from"),
        (zipfile.ZIP_STORED, (20, 24), "the members claim .* bytes in a file of"),
        (zipfile.ZIP_DEFLATED, (24,), "claims 2147418112 bytes from"),
        (zipfile.ZIP_DEFLATED, (20, 24), "the members claim"),
    ):
        path = write_npz(tmp_path / "d.npz", members(), compression)

        def change(data: bytearray, offsets: tuple[int, ...] = offsets) -> None:
            for offset in offsets:
                data[central(data) + offset : central(data) + offset + 4] = big

        assert_small_refusal(load_dump, patched(path, change), message)


def test_zip_bomb(tmp_path: Path) -> None:
    """A member that really expands a thousandfold, to more than the free allowance."""
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("packed.npy", "w") as member:
            member.write(npy_claiming("(300, 1048576)", b""))
            for _ in range(300):
                member.write(bytes(1 << 20))
        for name, data in members(packed=None).items():
            archive.writestr(name, data)
    assert_small_refusal(load_dump, path, "would expand to")


def test_other_zip_faults(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "d.npz", members(), zipfile.ZIP_LZMA)
    assert_small_refusal(load_dump, path, "neither stored nor deflated")

    def encrypt(data: bytearray) -> None:
        data[central(data) + 8] |= 1

    assert_small_refusal(load_dump, patched(write_npz(path, members()), encrypt), "is encrypted")

    def flip_content(data: bytearray) -> None:
        data[data.index(b"\x93NUMPY") + 200] ^= 1

    assert_small_refusal(
        load_dump,
        patched(write_npz(path, members()), flip_content),
        "'x': is no .npy, or damaged or cut short: Bad CRC",
    )

    def bad_name(data: bytearray) -> None:
        place = central(data)
        data[place + 9] |= 8  # the name is UTF-8 …
        data[place + 46] = 0xFF  # … but is not

    assert_small_refusal(load_dump, patched(write_npz(path, members()), bad_name), "is no .npz, or damaged")
    data = write_npz(path, members()).read_bytes()
    for stop in range(1, len(data), 499):
        path.write_bytes(data[:stop])
        assert_small_refusal(load_dump, path, "is no .npz, or damaged")


def safetensors_bytes(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


TEXTS = {"__metadata__": {"meta": json.dumps(META)}}


def one_entry(body: bytes = b"1234", **entry_fields: Any) -> bytes:
    return safetensors_bytes({**TEXTS, "x": entry(**entry_fields)}, body)


#: files that the safetensors library refuses; its words are its own affair
BROKEN_SAFETENSORS: dict[str, bytes] = {
    "five bytes": b"\x01\0\0\0\0",
    "header past the end": safetensors_bytes({}, length=3),
    "header of 2^63": safetensors_bytes({}, length=2**63),
    "header of 90 MB": safetensors_bytes({}, length=90 << 20),
    "a zip": zipfile.ZIP_STORED.to_bytes(1, "little") + b"PK\x03\x04" * 9,
    "not JSON": safetensors_bytes(b"{]"),
    "not UTF-8": safetensors_bytes(b'{"\xff": 1}'),
    "a list": safetensors_bytes([]),
    "twice": safetensors_bytes(b'{"x": {}, "x": {}}'),
    "deep": safetensors_bytes(b'{"x":' * 100_000),
    "metadata list": safetensors_bytes({"__metadata__": []}),
    "metadata number": safetensors_bytes({"__metadata__": {"meta": 3}}),
    "metadata twice": safetensors_bytes(b'{"__metadata__": {}, "__metadata__": {}}'),
    "entry number": safetensors_bytes({**TEXTS, "x": 3}, b"1234"),
    "entry empty": safetensors_bytes({**TEXTS, "x": {}}, b"1234"),
    "dtype number": one_entry(dtype=3),
    "dtype unknown": one_entry(dtype="F3"),
    "shape text": one_entry(shape="4"),
    "shape negative": one_entry(shape=[-2, -2]),
    "shape float": one_entry(shape=[4.0]),
    "shape bool": one_entry(shape=[True]),
    "shape of 100 GB": one_entry(shape=[10**11]),
    "shape 0 times 2^70": one_entry(b"", shape=[0, 2**70], offsets=[0, 0]),
    "F4 of half a byte": one_entry(dtype="F4", shape=[3, 3]),
    "offsets three": one_entry(offsets=[0, 4, 4]),
    "offsets of 100 GB": one_entry(shape=[10**11], offsets=[0, 10**11]),
    "offsets past the end": one_entry(offsets=[0, 5]),
    "offsets backwards": one_entry(offsets=[4, 0]),
    "offsets with a gap": one_entry(b"12345", offsets=[1, 5]),
    "overlap": safetensors_bytes({**TEXTS, "x": entry(), "y": entry(offsets=[2, 6])}, b"123456"),
    "bytes left over": one_entry(b"12345"),
}

#: well-formed files whose content is wrong
WRONG_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "no meta": (safetensors_bytes({"packed": entry()}, b"1234"), "no meta that says"),
    "nothing": (safetensors_bytes({}), "no meta that says"),
    "only meta": (safetensors_bytes(TEXTS), "no output"),
    "odd F4": (one_entry(b"123", dtype="F4", shape=[2, 3], offsets=[0, 3]), "'x': is F4 .* or an even F4"),
    "F8_E8M0": (one_entry(dtype="F8_E8M0"), r"'x': is F8_E8M0 \(4,\), expected"),
    "shape 0 times 2^62": (
        one_entry(b"", dtype="F32", shape=[0, 2**62], offsets=[0, 0]),
        "'x': cannot be read|no output",
    ),
    "same array twice": (
        safetensors_bytes({**TEXTS, "x": entry(), ".x": entry(offsets=[4, 8])}, b"12345678"),
        "name the same array",
    ),
    "fault in a named tensor": (
        safetensors_bytes({**TEXTS, "w.packed": entry(shape=[1, 4])}, b"1234"),
        "tensor 'w': packed without scales",
    ),
    "a fault in an operand": (
        safetensors_bytes({**TEXTS, "d": entry("F32", [1, 1]), "a.packed": entry("U8", [1, 4], [4, 8])}, b"12345678"),
        "tensor 'a': packed without scales",
    ),
    "meta of an absent tensor": (
        safetensors_bytes({"__metadata__": {"meta": json.dumps({**META, "tensors": {"w": META}})}}),
        "meta speaks of tensors that are not there: 'w'",
    ),
    "tensors is a list": (
        safetensors_bytes({"__metadata__": {"meta": json.dumps({**META, "tensors": []})}}),
        "tensors is .*, expected an object",
    ),
    "meta of a tensor is a number": (
        safetensors_bytes(
            {"__metadata__": {"meta": json.dumps({**META, "tensors": {"w": 3}})}, "w.x": entry()}, b"1234"
        ),
        "tensor 'w': meta is 3, expected an object",
    ),
    "meta of a tensor without format": (
        safetensors_bytes(
            {"__metadata__": {"meta": json.dumps({**META, "tensors": {"w": {}}})}, "w.x": entry()}, b"1234"
        ),
        "tensor 'w': meta's format is missing",
    ),
    "scattered meta": (
        safetensors_bytes({"__metadata__": {"format": "nvfp4-dump", "version": "two"}}),
        "meta's version is 'two'",
    ),
    "format of another": (safetensors_bytes({"__metadata__": {"format": "pt"}}), "meta's format is 'pt'"),
}
BAD_SAFETENSORS = WRONG_SAFETENSORS | {
    name: (content, "is no .safetensors, or damaged or cut short: .") for name, content in BROKEN_SAFETENSORS.items()
}


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_bad_safetensors(case: str, tmp_path: Path) -> None:
    content, message = BAD_SAFETENSORS[case]
    path = tmp_path / "d.safetensors"
    path.write_bytes(content)
    assert_small_refusal(load_dump, path, message)


def test_lying_headers_take_no_memory_at_all(tmp_path: Path) -> None:
    """What the safetensors library allocates is not Python's to trace: the peak of a whole process."""
    for name, content in BROKEN_SAFETENSORS.items():
        (tmp_path / f"{name.replace('^', '')}.safetensors").write_bytes(content)
    script = """
import pathlib, resource, sys
from nvfp4ref.dump import DumpError, load_dump
import safetensors.numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in pathlib.Path(sys.argv[1]).iterdir():
    try:
        load_dump(path)
    except DumpError:
        continue
    sys.exit(f"{path} was read")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 16 << 10  # ru_maxrss is in KiB


@pytest.mark.parametrize("load", [load_dump, load_tensor])
def test_paths_that_are_no_files(load: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "empty.npz").touch()
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    for name, message in (
        ("missing.npz", "cannot be opened: no such file or directory"),
        ("missing/d.npz", "cannot be opened: no such file or directory"),
        ("empty.npz/d.npz", "cannot be opened: not a directory"),
        ("folder.npz", "is a directory, expected a file"),
        ("empty.npz", "is empty"),
        ("loop.npz", "cannot be opened: too many levels of symbolic links"),
        ("pipe.npz", "is not a regular file"),
        ("d.pt", "the suffix is '.pt', expected"),
        ("d", "the name has no suffix, expected"),
        ("a\0b.npz", "cannot be opened: .*embedded null"),
        ("\udcff.npz", "cannot be opened: no such file"),
        ("n" * 300 + ".npz", "cannot be opened: file name too long"),
    ):
        assert_small_refusal(load, tmp_path / name, message)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    save_dump(tmp_path / "d.npz", **arrays())
    (tmp_path / "d.npz").chmod(0)
    with pytest.raises(DumpError, match="cannot be opened: permission denied"):
        load_dump(tmp_path / "d.npz")


def test_a_system_error_becomes_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests run as root: whatever the system refuses is told in its words."""
    save_dump(tmp_path / "d.npz", **arrays())

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(container.os, "stat", refuse)
    with pytest.raises(DumpError, match="d.npz: cannot be opened: permission denied"):
        load_dump(tmp_path / "d.npz")


def test_no_memory_becomes_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dump(tmp_path / "d.safetensors", **arrays())

    def refuse(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(container, "native", refuse)
    with pytest.raises(DumpError, match="cannot be read: not enough memory"):
        load_dump(tmp_path / "d.safetensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    save_dump(path, {f"w{n}": Dump(**arrays()) for n in range(3)})
    dumps = iter_dumps(path)
    next(dumps)
    os.truncate(path, 2000)
    with pytest.raises(DumpError, match="cannot be read: Could not read tensor"):
        list(dumps)


def test_an_f8_tensor_of_a_file_that_shrinks(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "d.safetensors", {"w": ("F8_E4M3", [4096], bytes(4096))})
    for stop in (2000, 20):
        raw_safetensors(path, {"w": ("F8_E4M3", [4096], bytes(4096))})
        with container.open_archive(path) as archive:
            os.truncate(path, stop)
            with pytest.raises(DumpError, match="'w': cannot be read"):
                archive.read("w")


# -- fuzzing ------------------------------------------------------------------------------------------


def small_files() -> dict[str, bytes]:
    """Valid files of a few hundred bytes, so that every byte is hit."""
    plain = {**arrays(16, 16, both=True), "x": bits(np.float16, (16, 16))}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for suffix, name in itertools.product(FORMATS, ("stored", "gemm")):
            path = Path(folder, f"{name}{suffix}")
            save_dump(path, Dump(**plain) if name == "stored" else gemm())
            found[path.name] = path.read_bytes()
    stream = io.BytesIO()
    np.savez_compressed(stream, **plain, meta=json.dumps(META))
    found["deflated.npz"] = stream.getvalue()
    return found


SMALL = small_files()


def damage(data: bytes, source: random.Random) -> bytes:
    """A few bytes flipped, cut, doubled, moved or replaced."""
    damaged = bytearray(data)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(damaged) + 1)
        match source.randrange(5):
            case 0 if place < len(damaged):
                damaged[place] ^= 1 << source.randrange(8)
            case 1 if place < len(damaged):
                damaged[place] = source.choice([0, 0x7F, 0xFF, 0x22, 0x30, 0x39])
            case 2:
                del damaged[place : place + source.choice([1, 2, 8, 64, 10**6])]
            case 3:
                damaged[place:place] = damaged[place : place + source.choice([1, 8, 64])]
            case _:
                damaged[place : place + 4] = source.randbytes(4)
    return bytes(damaged)


def load_or_refuse(load: Callable[[Path], Any], path: Path) -> None:
    """A valid result or a DumpError; any other exception fails the test."""
    try:
        found = load(path)
    except DumpError as error:
        assert "\n" not in str(error)
        return
    if load is load_dumps:
        for dump in found.values():
            assert isinstance(dump, Dump)
            dump.meta(), repr(dump), dump.scale_kind, dump.scale_kind_t, dump.row_scaled


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(SMALL)), seed=st.integers(0, 2**32))
def test_damaged_files_give_a_dump_or_an_error(name: str, seed: int, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(damage(SMALL[name], random.Random(seed)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_or_refuse(load_dumps, path)
        load_or_refuse(lambda p: load_tensor(p, name="x"), path)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_truncation_is_an_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(SMALL[name])
    for stop in reversed(range(0, len(SMALL[name]), 3)):
        os.truncate(path, stop)
        with pytest.raises(DumpError):
            load_dumps(path)


@pytest.mark.parametrize("name", [name for name in sorted(SMALL) if name.endswith(".safetensors")])
def test_every_header_byte(name: str, tmp_path: Path) -> None:
    """Each byte of the header, one at a time, turned into others that mean something in JSON."""
    data, path = SMALL[name], tmp_path / name
    length = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for place, byte in itertools.product(range(0, length, 3), b'"0}'):
            os.pwrite(file.fileno(), bytes([byte]), place)
            load_or_refuse(load_dumps, path)
            os.pwrite(file.fileno(), data[place : place + 1], place)


def test_deflated_data_that_is_damaged(tmp_path: Path) -> None:
    """zlib's own errors, or the checksum's: never data that differ."""
    data, path = SMALL["deflated.npz"], tmp_path / "d.npz"
    intact = np.load(io.BytesIO(data))["x"].tobytes()
    for place in range(0, len(data), 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            dump = load_dump(path)
        except DumpError:
            continue
        assert isinstance(dump, Dump) and (dump.x is None or dump.x.tobytes() == intact)


# -- all or nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_interrupted_write_leaves_the_old_file(
    suffix: str, failure: BaseException, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"d{suffix}"
    save_dump(path, **arrays())
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(container.os, moment, fail)
    expected = DumpError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_dump(path, **arrays(16, 16))
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match='cannot be written: Unknown dtype "complex128"'):
        container.write_archive(tmp_path / "d.safetensors", {"z": np.zeros(2, np.complex128)})
    with pytest.raises(DumpError, match="cannot be written"):
        container.write_archive(tmp_path / "d.npz", {"z": np.array([None])})
    assert not list(tmp_path.iterdir())


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").touch()
    for name, message in (
        ("folder.npz", "is a directory or device, expected a file"),
        ("missing/d.npz", "cannot be written: no such file or directory"),
        ("file/d.npz", "cannot be written: not a directory"),
        ("a\0b.npz", "cannot be written: "),
    ):
        with pytest.raises(DumpError, match=message):
            save_dump(tmp_path / name, **arrays())
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.npz"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_new_files_follow_the_umask_and_symlinks(suffix: str, tmp_path: Path) -> None:
    link, real = tmp_path / f"link{suffix}", tmp_path / f"real{suffix}"
    link.symlink_to(real)
    old = os.umask(0o027)
    try:
        save_dump(link, **arrays())
    finally:
        os.umask(old)
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


SAVED: dict[str, np.ndarray] = {
    "float32": bits(np.float32, (3, 5)),
    "bfloat16": bits(ml_dtypes.bfloat16, (4, 6)),
    "bfloat16 transposed": bits(ml_dtypes.bfloat16, (4, 6)).T,
    "bfloat16 0-d": bits(ml_dtypes.bfloat16, ()),
    "float32 strided": bits(np.float32, (6, 8))[::2, 1::3],
    "big-endian": bits(np.float32, (3, 4)).astype(">f4"),
    "codes": bits(np.uint8, (2, 3, 4)),
    "empty": np.zeros((0, 16), np.float16),
}


@pytest.mark.parametrize("suffix", [".npy", *FORMATS])
@pytest.mark.parametrize("case", SAVED)
def test_save_tensor(case: str, suffix: str, tmp_path: Path) -> None:
    array, paths = SAVED[case], [tmp_path / f"{n}{suffix}" for n in range(2)]
    for path in paths:
        container.save_tensor(path, array)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    if suffix == ".npy":
        found = np.load(paths[0], allow_pickle=False)
    else:
        with container.open_archive(paths[0]) as archive:
            assert archive.names == ["x"]
            found = archive.read("x")
    if suffix != ".safetensors" and array.dtype == ml_dtypes.bfloat16:
        assert found.dtype == np.uint16
        found = found.view(ml_dtypes.bfloat16)
    assert found.dtype.name == array.dtype.name and found.shape == array.shape
    assert container.native(found).tobytes() == container.native(array).tobytes()
    if array.dtype.kind != "u":
        expected = container.native(array)
        assert load_tensor(paths[0], array.dtype.name).tobytes() == expected.tobytes()


def test_save_tensor_refuses(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    for name, array, message in (
        ("x.txt", np.zeros(1), "expected .npy, .npz or .safetensors"),
        ("x.npy", np.array([None]), "x.npy: cannot be written: "),
        ("x.npz", np.array([None]), "x.npz: cannot be written: "),
        ("x.safetensors", np.array([None]), "x.safetensors: cannot be written: Unknown dtype"),
        ("missing/x.npy", np.zeros(1), "cannot be written: no such file or directory"),
        ("folder.npy", np.zeros(1), "is a directory or device"),
    ):
        with pytest.raises(DumpError, match=message) as caught:
            container.save_tensor(tmp_path / name, array)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert os.listdir(tmp_path) == ["folder.npy"]


# -- plain tensors ------------------------------------------------------------------------------------


def test_load_tensor_formats(tmp_path: Path) -> None:
    for dtype in (np.float32, np.float16):
        x = bits(dtype, (5, 7))
        np.save(tmp_path / "x.npy", np.asfortranarray(x))
        np.savez(tmp_path / "x.npz", weight=x.astype(x.dtype.newbyteorder(">")))
        container.write_archive(tmp_path / "x.safetensors", {"weight": x})
        for suffix in (".npy", ".npz", ".safetensors"):
            found = load_tensor(tmp_path / f"x{suffix}", np.dtype(dtype).name)
            assert found.dtype == dtype and found.flags.c_contiguous and found.tobytes() == x.tobytes()


def test_load_tensor_bfloat16(tmp_path: Path) -> None:
    x = bits(ml_dtypes.bfloat16, (4, 6))
    np.save(tmp_path / "bits.npy", x.view(np.uint16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.save(tmp_path / "void.npy", x)
    container.write_archive(tmp_path / "x.safetensors", {"w": x})
    for path in sorted(tmp_path.iterdir()):
        found = load_tensor(path, "bfloat16")
        assert found.dtype == ml_dtypes.bfloat16 and found.tobytes() == x.tobytes()
    assert load_tensor(tmp_path / "x.safetensors").dtype == ml_dtypes.bfloat16
    with pytest.raises(DumpError, match="is uint16, .* say dtype 'bfloat16'"):
        load_tensor(tmp_path / "bits.npy")


def test_load_tensor_converts_where_asked(tmp_path: Path) -> None:
    x = np.array([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1e30, -0.0, np.inf, np.nan]], np.float32)
    np.save(tmp_path / "x.npy", x)
    found = load_tensor(tmp_path / "x.npy", "bfloat16").astype(np.float32)
    assert np.array_equal(found[0, :4], [1.0, 1.0, 1 + 2**-6, 1 + 2**-7])
    assert np.signbit(found[0, 5]) and np.isinf(found[0, 6]) and np.isnan(found[0, 7])
    assert np.isinf(load_tensor(tmp_path / "x.npy", "float16")[0, 4])
    np.save(tmp_path / "x.npy", x.astype(np.float64))
    assert load_tensor(tmp_path / "x.npy").tobytes() == x.tobytes()
    for inexact in (0.1, 1e300, 1e-60):
        np.save(tmp_path / "x.npy", np.array([[inexact]]))
        with pytest.raises(DumpError, match="float64 input must be exact in float32"):
            load_tensor(tmp_path / "x.npy")


def test_load_tensor_by_name(tmp_path: Path) -> None:
    many = {f"w{n}": np.full((2, 2), n, np.float32) for n in range(15)}
    np.savez(tmp_path / "x.npz", **many)
    container.write_archive(tmp_path / "x.safetensors", many)
    for suffix in FORMATS:
        path = tmp_path / f"x{suffix}"
        assert load_tensor(path, name="w3")[0, 0] == 3
        with pytest.raises(DumpError, match="holds 15 arrays, say which by name: 'w0', .* and 3 more"):
            load_tensor(path)
        with pytest.raises(DumpError, match="holds no array 'w99', but 'w0'"):
            load_tensor(path, name="w99")
    np.save(tmp_path / "x.npy", many["w0"])
    with pytest.raises(DumpError, match="holds one array without a name; leave out 'w0'"):
        load_tensor(tmp_path / "x.npy", name="w0")


def test_load_tensor_refuses(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for content, message in (
        (npy(np.array([{}]), pickled=True), "pickled Python objects"),
        (pickle.dumps(np.zeros(3)), "is no .npy, or damaged"),
        (npy_claiming("(100000, 1000000)"), "claims 100000000000 bytes"),
        (npy(np.zeros(3, np.int64)), "is int64, expected float32 or float16 or bfloat16"),
        (npy(np.zeros(3, np.complex64)), "is complex64"),
        (npy(np.array("text")), "is <U4"),
        (npy(np.zeros(3))[:-1], "claims 24 bytes"),
    ):
        path.write_bytes(content)
        assert_small_refusal(load_tensor, path, message)
    np.save(path, np.zeros(3, np.float32))
    with pytest.raises(DumpError, match="dtype is 'int8', expected 'float32' or"):
        load_tensor(path, "int8")
    with pytest.raises(DumpError, match="expected .npy, .npz or .safetensors"):
        load_tensor(tmp_path / "x.txt")
    raw_safetensors(tmp_path / "x.safetensors", {"w": ("F8_E8M0", [2], b"ab"), "v": ("F32", [1], b"1234")})
    assert load_tensor(tmp_path / "x.safetensors", name="v").shape == (1,)
    with pytest.raises(DumpError, match="'w': is F8_E8M0"):
        load_tensor(tmp_path / "x.safetensors", name="w")


# -- the module itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["dump", "dump_meta", "container"])
def test_importing_needs_only_numpy_and_ml_dtypes(module: str) -> None:
    script = f"import sys, nvfp4ref.{module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "safetensors" not in found.stdout.split()
    tree = ast.parse(Path(container.__file__).with_name(f"{module}.py").read_text())
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.level == 0)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert names - set(sys.stdlib_module_names) <= {"numpy", "ml_dtypes", "safetensors"}


def test_without_the_safetensors_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.safetensors"
    save_dump(path, **arrays())
    before = path.read_bytes()
    calls = (
        lambda: load_dump(path),
        lambda: load_tensor(path, name="x"),
        lambda: save_dump(path, **arrays(16, 16)),
    )
    for call in calls:
        with monkeypatch.context() as patch, pytest.raises(DumpError) as caught:
            patch.setitem(sys.modules, "safetensors", None)
            call()
        assert str(caught.value) == f"{path}: needs the safetensors package: pip install 'nvfp4ref[safetensors]'"
        with (
            monkeypatch.context() as patch,
            pytest.raises(DumpError, match="0.8 or newer and finds 0.7.0: pip"),
        ):
            patch.setattr("safetensors.__version__", "0.7.0")
            call()
    save_dump(tmp_path / "d.npz", **arrays())
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["d.npz", "d.safetensors"]


def test_deflate_never_expands_more_than_assumed() -> None:
    for size in (1 << 10, 1 << 16, 1 << 22):
        raw = zlib.compressobj(9, wbits=-15)
        packed = raw.compress(bytes(size)) + raw.flush()
        assert size <= container._DEFLATE_MAX * len(packed)

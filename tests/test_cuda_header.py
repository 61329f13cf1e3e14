"""NVIDIA's host conversions: the oracle's codecs against them, and how they are found, compiled and kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, Array, around, bits, same_bits

from nvfp4hw.backends import Backend, Case, cuda_header, load
from nvfp4ref import e2m1, e4m3, e8m0

_reason = cuda_header.CudaHeader().availability()
needs_header = pytest.mark.skipif(_reason is not None, reason=str(_reason))

#: every upper half of a float32 with the low halves that matter: 327 680 patterns, all ties among them
_LOW = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint32)
SWEEP = ((np.arange(2**16, dtype=np.uint32)[:, None] << np.uint32(16)) | _LOW).view(np.float32)
#: ±0, ±Inf, NaNs of both signs and kinds
SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF],
    np.uint32,
).view(np.float32)


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


def u8(*values: int) -> Array:
    return np.array(values, np.uint8)


# ---- the codecs --------------------------------------------------------------------------------------------


@needs_header
def test_special_values_have_the_documented_codes() -> None:
    x = f32(0, -0.0, -1e-30, 0.25, -0.25, 0.75, 5, 5.0000005, -np.inf)
    assert cuda_header.encode_e2m1(x).tolist() == [0, 8, 8, 0, 8, 2, 6, 7, 15]
    assert cuda_header.encode_e2m1(SPECIAL).tolist() == [0, 8, 7, 15, 7, 7, 7, 7]
    assert cuda_header.encode_e4m3(SPECIAL).tolist() == [0, 0x80, 0x7E, 0xFE, 0x7F, 0x7F, 0x7F, 0x7F]


@needs_header
@pytest.mark.parametrize("x", [SWEEP, FLOAT16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_the_oracle_encodes_as_the_header_does(x: Array) -> None:
    same_bits(e2m1.encode(x), cuda_header.encode_e2m1(x))
    same_bits(e4m3.encode(x), cuda_header.encode_e4m3(x))


@needs_header
def test_the_oracle_agrees_at_every_boundary() -> None:
    magnitudes = np.unique(np.abs(e4m3.decode(np.arange(127, dtype=np.uint8))))
    near = around(np.concatenate([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2, e2m1.MIDPOINTS]), 3)
    same_bits(e2m1.encode(near), cuda_header.encode_e2m1(near))
    same_bits(e4m3.encode(near), cuda_header.encode_e4m3(near))


@needs_header
def test_the_oracle_decodes_as_the_header_does() -> None:
    codes, all_bytes = np.arange(16, dtype=np.uint8), np.arange(256, dtype=np.uint8)
    same_bits(e2m1.decode(codes), cuda_header.decode_e2m1(codes).astype(np.float32))
    header = cuda_header.decode_e4m3(all_bytes)
    finite = ~np.isnan(header)
    same_bits(e4m3.decode(all_bytes)[finite], header[finite].astype(np.float32))
    assert bits(header)[~finite].tolist() == [0x7FFF, 0x7FFF]
    assert np.isnan(e4m3.decode(all_bytes)).tolist() == (~finite).tolist()


@needs_header
def test_the_even_element_of_a_pair_is_the_low_nibble() -> None:
    assert cuda_header.pack_e2m1(f32(1, -6)).tolist() == [0xF2]
    x = SWEEP.reshape(4, -1)
    same_bits(e2m1.pack(e2m1.encode(x)), cuda_header.pack_e2m1(x))


@needs_header
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize("overflow", ["saturate", "nan"])
def test_the_oracle_encodes_e8m0_as_the_header_does(rounding: str, overflow: str) -> None:
    powers = around(np.ldexp(np.float32(1), np.arange(-149, 128)), 2)
    for x in (SWEEP, SPECIAL, powers):
        found = e8m0.encode(x, rounding, overflow=overflow)
        same_bits(found, cuda_header.encode_e8m0(x, rounding, overflow=overflow))


@needs_header
def test_the_oracle_decodes_e8m0_as_the_header_does() -> None:
    all_bytes = np.arange(256, dtype=np.uint8)
    header = cuda_header.decode_e8m0(all_bytes)
    same_bits(e8m0.decode(all_bytes[:255]), header[:255].astype(np.float32))
    assert bits(header)[255] == 0x7FFF


@needs_header
@pytest.mark.parametrize("start", [0, 0x3E7FFF00, 0x7F7FFF00, 0xFFFFFE00])
def test_a_range_is_the_conversion_of_its_patterns(start: int) -> None:
    x = np.arange(start, start + 512, dtype=np.int64).astype(np.uint32).view(np.float32)
    out = np.empty(512, np.uint8)
    assert cuda_header.codes_of_range(start, 512, out) is out
    same_bits(out, cuda_header.encode_e2m1(x))
    same_bits(cuda_header.bytes_of_range(start, 512), cuda_header.encode_e4m3(x))


@needs_header
def test_ranges_run_in_threads() -> None:
    size = 1 << 16
    out = np.empty((4, size), np.uint8)
    starts = [0x3F000000 + i * size for i in range(4)]
    work = [
        threading.Thread(target=cuda_header.codes_of_range, args=(start, size, part))
        for start, part in zip(starts, out, strict=True)
    ]
    for one in work:
        one.start()
    for one in work:
        one.join()
    same_bits(out.reshape(-1), cuda_header.codes_of_range(starts[0], 4 * size))


@needs_header
def test_shapes_strides_and_empty_arrays_are_kept() -> None:
    x = np.arange(-12, 12, dtype=np.float32).reshape(4, 6)
    same_bits(cuda_header.encode_e2m1(x.T[::2]), cuda_header.encode_e2m1(x).T[::2])
    assert cuda_header.encode_e4m3(np.float32(1)).shape == ()
    assert cuda_header.encode_e2m1(np.empty((0, 3), np.float32)).shape == (0, 3)
    assert cuda_header.codes_of_range(1 << 32, 0).shape == (0,)


@needs_header
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="the header converts float32, float16, bfloat16; got float64"):
        cuda_header.encode_e2m1([1.0])
    with pytest.raises(TypeError, match="got int64"):
        cuda_header.encode_e4m3(np.array([1]))
    with pytest.raises(TypeError, match="codes are uint8; got int64"):
        cuda_header.decode_e4m3(np.array([1]))
    with pytest.raises(ValueError, match=r"codes are 0\.\.15; got 16"):
        cuda_header.decode_e2m1(u8(16))
    with pytest.raises(ValueError, match=r"even last axis; got shape \(3,\)"):
        cuda_header.pack_e2m1(f32(1, 2, 3))
    with pytest.raises(ValueError, match="rounding is 'floor' or 'ceil'; got 'up'"):
        cuda_header.encode_e8m0(f32(1), "up")
    with pytest.raises(ValueError, match="overflow is 'saturate' or 'nan'; got 'inf'"):
        cuda_header.encode_e8m0(f32(1), overflow="inf")
    with pytest.raises(ValueError, match=r"got 2 from 4294967295"):
        cuda_header.codes_of_range((1 << 32) - 1, 2)
    with pytest.raises(ValueError, match=r"writable uint8 array of shape \(4,\)"):
        cuda_header.codes_of_range(0, 4, np.empty(8, np.uint8)[::2])


# ---- the backend -------------------------------------------------------------------------------------------


@needs_header
def test_the_backend_answers_every_kind_it_lists() -> None:
    backend = load("cuda-header")
    assert isinstance(backend, Backend) and backend.availability() is None and backend.cases("full") is None
    assert backend.preset == "te" and "(" in backend.version()
    x, codes = f32(1, -2), u8(1, 2)
    cases: dict[str, tuple[Array, dict[str, list[float]]]] = {
        "e2m1": (x, {"codes": [2, 12]}),
        "e2m1-pairs": (x, {"packed": [0xC2]}),
        "e2m1-decode": (codes, {"values": [0.5, 1.0]}),
        "e4m3": (x, {"bytes": [0x38, 0xC0]}),
        "e4m3-decode": (codes, {"values": [2.0**-9, 2.0**-8]}),
        "e8m0-floor": (x * np.float32(1.5), {"bytes": [127, 128]}),
        "e8m0-ceil": (x * np.float32(1.5), {"bytes": [128, 129]}),
        "e8m0-decode": (u8(127, 128), {"values": [1.0, 2.0]}),
    }
    for kind, (argument, expected) in cases.items():
        case = Case(kind, "codec", argument, kind=kind)
        assert case.needs <= backend.features
        assert {name: array.tolist() for name, array in backend.quantize(case).items()} == expected


def test_the_backend_refuses_what_is_no_conversion() -> None:
    case = Case("normal", "normal", np.ones((16, 16), np.float32))
    backend = cuda_header.CudaHeader()
    assert not case.needs <= backend.features
    with pytest.raises(ValueError, match="case normal asks for 'quantize'"):
        backend.quantize(case)


# ---- headers, compiler, cache ------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder and nothing compiled yet; what the test compiled is forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cuda_header.library.cache_clear()
    yield tmp_path / "cache" / "nvfp4ref"
    cuda_header.library.cache_clear()


linux = pytest.mark.skipif(sys.platform != "linux", reason="the cache folder of XDG_CACHE_HOME is Linux's")


@pytest.fixture
def without_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_header, "_WHEELS", ())
    monkeypatch.setattr(cuda_header, "_toolkits", lambda: iter(()))


def test_missing_headers_name_the_command(fresh: Path, without_wheels: None) -> None:
    reason = cuda_header.CudaHeader().availability()
    assert reason is not None and "pip install 'nvfp4ref[cuda-headers]'" in reason and "CUDA_HOME" in reason
    with pytest.raises(RuntimeError, match="cuda_fp4.h and cuda_fp8.h are not installed"):
        cuda_header.encode_e2m1(f32(1))


def test_an_incomplete_toolkit_names_the_missing_file(
    fresh: Path, without_wheels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp4.h").touch()
    monkeypatch.setattr(cuda_header, "_toolkits", lambda: iter([tmp_path]))
    missing = "cuda_fp8.h, crt/host_defines.h"
    expected = f"the system's CUDA toolkit, in {tmp_path}, lacks {missing}: {cuda_header.INSTALL}"
    assert cuda_header.CudaHeader().availability() == expected


@needs_header
def test_a_missing_compiler_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    expected = "the C++ compiler that CXX names, 'no-such-compiler -O2', is not on the PATH"
    assert cuda_header.CudaHeader().availability() == expected
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    reason = cuda_header.CudaHeader().availability()
    assert reason == "there is no C++ compiler: install g++, or name a compiler in CXX"


@needs_header
def test_the_compilers_first_error_is_shown(
    fresh: Path, without_wheels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "toolkit"
    (root / "include" / "crt").mkdir(parents=True)
    for name in ("cuda_fp8.h", "crt/host_defines.h"):
        (root / "include" / name).touch()
    (root / "include" / "cuda_fp4.h").write_text("#error this toolkit is broken\n")
    (root / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    monkeypatch.setattr(cuda_header, "_toolkits", lambda: iter([root]))
    reason = cuda_header.CudaHeader().availability()
    assert reason is not None and len(reason.splitlines()) == 1
    assert f"cannot compile the system's CUDA toolkit 12.8 of {root}" in reason and "this toolkit is broken" in reason


@needs_header
def test_a_compiler_that_does_not_run_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    reason = cuda_header.CudaHeader().availability()
    assert reason is not None and f"the C++ compiler {broken} does not run" in reason


@needs_header
def test_a_toolkit_serves_as_well_as_the_wheels(
    fresh: Path, without_wheels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    folders = cuda_header.find_headers().folders
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_header, "_WHEELS", ())
    root = tmp_path / "toolkit"
    root.mkdir()
    (root / "include").symlink_to(folders[0])
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert cuda_header.CudaHeader().availability() is None
    version = cuda_header.CudaHeader().version()  # goes into recordings, which name no path
    assert version.startswith("the system's CUDA toolkit") and str(tmp_path) not in version
    same_bits(cuda_header.encode_e2m1(BFLOAT16), e2m1.encode(BFLOAT16))


@linux
@needs_header
def test_the_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_header.encode_e2m1(f32(6)).tolist() == [7]
    (made,) = fresh.iterdir()
    assert made.suffix == ".so" and fresh.stat().st_mode & 0o077 == 0
    cuda_header.library.cache_clear()
    monkeypatch.setattr(cuda_header, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cuda_header.encode_e2m1(f32(6)).tolist() == [7]
    assert list(fresh.iterdir()) == [made]


@linux
@needs_header
def test_a_file_that_is_no_library_is_passed_over(fresh: Path) -> None:
    cuda_header.library()
    (made,) = fresh.iterdir()
    cuda_header.library.cache_clear()
    made.unlink()  # the loaded file stays mapped; a new one takes its name
    made.write_bytes(b"not a library")
    assert cuda_header.encode_e2m1(f32(6)).tolist() == [7]


@linux
@needs_header
@pytest.mark.parametrize("mode", [0o777, 0o500])
def test_a_shared_or_unwritable_cache_is_not_used(fresh: Path, mode: int) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(mode)
    unusable = mode == 0o777 or os.getuid() != 0  # root may write anywhere
    assert cuda_header.encode_e2m1(f32(6)).tolist() == [7]
    assert (list(fresh.iterdir()) == []) is unusable
    fresh.chmod(0o700)


@linux
@needs_header
def test_another_command_makes_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_header.library()
    monkeypatch.setenv("CXX", " ".join([*cuda_header.find_compiler(), "-O1"]))
    cuda_header.library.cache_clear()
    same_bits(cuda_header.encode_e4m3(BFLOAT16), e4m3.encode(BFLOAT16))
    assert len(list(fresh.iterdir())) == 2


@needs_header
def test_the_version_names_headers_and_compiler() -> None:
    compiler = cuda_header.find_compiler()
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    version = cuda_header.CudaHeader().version()
    assert version == f"{cuda_header.find_headers().version} ({done.stdout.splitlines()[0]})"
    assert not any("fast" in flag for flag in cuda_header._FLAGS)

"""Backend ``cuda-header``: NVIDIA's own host conversions of ``cuda_fp4.h`` and ``cuda_fp8.h``.

The headers come from the wheels ``nvidia-cuda-runtime`` and ``nvidia-cuda-crt`` or from a local CUDA toolkit.
``cuda_header.cpp`` wraps them in array loops; it is compiled once with the C++ compiler at hand ($CXX, else
g++), kept in the user's cache directory and called through ctypes, which releases the GIL.

The functions here are the codecs themselves: float32, float16 or bfloat16 in, codes out, one rounding, no
more.  float16 and bfloat16 go through NVIDIA's functions for those types, not through float32.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4hw import cache
from nvfp4hw.backends.base import Case, Outputs

Array = np.ndarray[Any, Any]

INSTALL = "pip install 'nvfp4ref[cuda-headers]'"
_SOURCE = Path(__file__).with_name("cuda_header.cpp")
# No -ffast-math and no contraction: the headers compute in double and must be compiled as they are written.
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared")
#: ``nv/target`` belongs to another package (nvidia-cuda-cccl); the conversions need it only to choose between
#: device and host code.  Without that package this line chooses: a plain C++ compiler makes host code only.
_HOST_ONLY = "#define NV_IF_ELSE_TARGET(condition, device, host) host\n"
#: Wheels that together hold the headers, newest layout first.
_WHEELS = (
    ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl"),
    ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12"),
)
#: Files that must be found, relative to some include folder; the last one is optional.
_NEEDED = ("cuda_fp4.h", "cuda_fp8.h", "crt/host_defines.h")
_OPTIONAL = "nv/target"


# ---- what is there to compile with -------------------------------------------------------------------------


@dataclass(frozen=True)
class Headers:
    """Include folders that hold the headers, and what they are called.

    ``version`` is written into recordings and has no path; ``where`` is for the messages that people get.
    """

    folders: tuple[Path, ...]
    version: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.version}, in {self.where}," if self.where else self.version

    def find(self, name: str) -> Path | None:
        return next((folder / name for folder in self.folders if (folder / name).is_file()), None)

    @property
    def missing(self) -> list[str]:
        return [name for name in _NEEDED if self.find(name) is None]


def find_headers() -> Headers:
    """The headers of the wheels, else of a local toolkit.

    Toolkits are looked for in $CUDA_HOME, $CUDA_PATH, beside nvcc and in /usr/local/cuda.
    Raises RuntimeError, naming the missing file and the command that installs it.
    """
    incomplete: Headers | None = None
    for headers in (*map(_wheel_headers, _WHEELS), *map(_toolkit_headers, _toolkits())):
        if headers is None:
            continue
        if not headers.missing:
            return headers
        incomplete = incomplete or headers
    if incomplete is not None:
        raise RuntimeError(f"{incomplete} lacks {', '.join(incomplete.missing)}: {INSTALL}")
    raise RuntimeError(
        "NVIDIA's cuda_fp4.h and cuda_fp8.h are not installed: "
        f"{INSTALL}, or set CUDA_HOME to a CUDA toolkit of version 12.8 or newer"
    )


def _wheel_headers(packages: tuple[str, ...]) -> Headers | None:
    """The include folders of installed wheels, whatever layout they have; None without ``cuda_fp4.h``."""
    folders: list[Path] = []
    version = ""
    for package in packages:
        try:
            wheel = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        for file in wheel.files or ():
            for name in (*_NEEDED, _OPTIONAL):
                if file.as_posix().endswith(f"include/{name}"):
                    folders.append(Path(str(wheel.locate_file(file))).parents[name.count("/")])
                    version = version or f"{package} {wheel.version}"
    headers = Headers(tuple(dict.fromkeys(folders)), version)
    return headers if headers.find("cuda_fp4.h") else None


def _toolkits() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            yield Path(value)
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parents[1]
    yield Path("/usr/local/cuda")


def _toolkit_headers(root: Path) -> Headers | None:
    folders = (root / "include", *sorted(root.glob("targets/*/include")))
    headers = Headers((*folders, *(folder / "cccl" for folder in folders)), "the system's CUDA toolkit", str(root))
    if headers.find("cuda_fp4.h") is None:
        return None
    runtime = headers.find("cuda_runtime_api.h")
    text = runtime.read_text("utf-8", "replace") if runtime else ""
    if number := re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text):
        major, minor = divmod(int(number[1]), 1000)
        return replace(headers, version=f"{headers.version} {major}.{minor // 10}")
    return headers


def find_compiler() -> tuple[str, ...]:
    """The command that compiles C++: $CXX, else g++, c++ or clang++.

    Raises RuntimeError when there is none.
    """
    if given := os.environ.get("CXX"):
        command = tuple(shlex.split(given))
        if command and shutil.which(command[0]):
            return command
        raise RuntimeError(f"the C++ compiler that CXX names, {given!r}, is not on the PATH")
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise RuntimeError("there is no C++ compiler: install g++, or name a compiler in CXX")


def _compiler_version(compiler: tuple[str, ...]) -> str:
    return (_run([*compiler, "--version"]).stdout.splitlines() or [Path(compiler[0]).name])[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A compiler's run, whatever its exit status.  RuntimeError when it does not run at all."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the C++ compiler {command[0]} does not run: {error}") from error


# ---- compiling and caching ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """The compiled conversions and what they were made from."""

    functions: ctypes.CDLL
    version: str

    def call(self, name: str, source: Array, result: Array) -> Array:
        """One C loop over ``result.size`` outputs; both arrays contiguous and of the function's types."""
        function = getattr(self.functions, name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function.restype = None
        function(source.ctypes.data, result.ctypes.data, result.size)
        return result

    def call_patterns(self, name: str, first: int, result: Array) -> Array:
        """One C loop over the float32 bit patterns that start at ``first``."""
        function = getattr(self.functions, name)
        function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64)
        function.restype = None
        function(first, result.ctypes.data, result.size)
        return result


@functools.cache
def library() -> Library:
    """The conversions, compiled now or taken from the cache.

    Raises RuntimeError, in one sentence, when the headers or a compiler are missing or the compiler fails.
    """
    headers, compiler = find_headers(), find_compiler()
    compiler_version = _compiler_version(compiler)
    name = f"cuda_header-{_fingerprint(headers, (*compiler, compiler_version))}.so"
    for folder in (cache.user_folder(), None):
        try:
            path = (folder or cache.temporary_folder()) / name
            if not path.is_file():
                _compile(headers, compiler, path)
            return Library(ctypes.CDLL(str(path)), f"{headers.version} ({compiler_version})")
        except OSError as error:  # an unwritable or noexec cache, or a file there that is no library
            reason = error
    raise RuntimeError(f"the compiled CUDA conversions cannot be loaded: {reason}")


def _fingerprint(headers: Headers, compiler: tuple[str, ...]) -> str:
    """A name for one combination of source, headers, compiler and machine."""
    digest = hashlib.sha256(_SOURCE.read_bytes())
    for name in ("cuda_fp4.h", "cuda_fp4.hpp", "cuda_fp8.h", "cuda_fp8.hpp", _OPTIONAL):
        path = headers.find(name)
        digest.update(path.read_bytes() if path else _HOST_ONLY.encode())
    digest.update("\0".join((*compiler, *_FLAGS, platform.machine(), sys.platform)).encode())
    return digest.hexdigest()[:20]


def _compile(headers: Headers, compiler: tuple[str, ...], path: Path) -> None:
    """Compile to ``path``, which appears complete or not at all.  RuntimeError with the first error."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as build:
        fallback, made = Path(build) / "include", Path(build) / path.name
        (fallback / _OPTIONAL).parent.mkdir(parents=True)
        (fallback / _OPTIONAL).write_text(_HOST_ONLY, "utf-8")
        includes = [part for folder in (*headers.folders, fallback) for part in ("-isystem", str(folder))]
        done = _run([*compiler, *_FLAGS, *includes, str(_SOURCE), "-o", str(made)])
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise RuntimeError(
                f"{shlex.join(compiler)} cannot compile {headers.version} of {headers.where or 'PyPI'}: {first}"
            )
        os.replace(made, path)


# ---- the conversions ---------------------------------------------------------------------------------------

_SUFFIX = {
    np.dtype(np.float32): ("float", np.float32),
    np.dtype(np.float16): ("half", np.uint16),
    np.dtype(ml_dtypes.bfloat16): ("bfloat16", np.uint16),
}


def _floats(x: Any, allowed: Iterable[Any]) -> tuple[Array, str]:
    """A contiguous array as NVIDIA's functions take it, and the word for its type in their names."""
    array = np.asarray(x)
    if array.dtype not in [np.dtype(dtype) for dtype in allowed]:
        names = ", ".join(np.dtype(dtype).name for dtype in allowed)
        raise TypeError(f"the header converts {names}; got {array.dtype}")
    word, carrier = _SUFFIX[array.dtype]
    return np.ascontiguousarray(array).reshape(array.shape).view(carrier), word


def _bytes(codes: Any, largest: int) -> Array:
    array = np.asarray(codes)
    if array.dtype != np.uint8:
        raise TypeError(f"codes are uint8; got {array.dtype}")
    if array.size and int(array.max()) > largest:
        raise ValueError(f"codes are 0..{largest}; got {int(array.max())}")
    return np.ascontiguousarray(array).reshape(array.shape)


def encode_e2m1(x: Any) -> Array:
    """E2M1 codes 0..15 (uint8, x's shape) of float32, float16 or bfloat16: ``__nv_cvt_*_to_fp4``, nearest."""
    source, word = _floats(x, _SUFFIX)
    return library().call(f"e2m1_of_{word}", source, np.empty(source.shape, np.uint8))


def pack_e2m1(x: Any) -> Array:
    """Packed E2M1 of float32 (…, 2n): uint8 (…, n), by ``__nv_cvt_float2_to_fp4x2``.

    Raises ValueError when the last axis is odd or absent.
    """
    source, _ = _floats(x, (np.float32,))
    if source.ndim == 0 or source.shape[-1] % 2:
        raise ValueError(f"pairs need an even last axis; got shape {source.shape}")
    result = np.empty((*source.shape[:-1], source.shape[-1] // 2), np.uint8)
    return library().call("e2m1_pairs_of_float", source, result)


def decode_e2m1(codes: Any) -> Array:
    """float16 values of E2M1 codes 0..15: ``__nv_cvt_fp4_to_halfraw``."""
    source = _bytes(codes, 15)
    return library().call("half_of_e2m1", source, np.empty(source.shape, np.float16))


def encode_e4m3(x: Any) -> Array:
    """E4M3 bytes (uint8, x's shape) of float32, float16 or bfloat16: ``__nv_cvt_*_to_fp8``, saturating."""
    source, word = _floats(x, _SUFFIX)
    return library().call(f"e4m3_of_{word}", source, np.empty(source.shape, np.uint8))


def decode_e4m3(codes: Any) -> Array:
    """float16 values of E4M3 bytes: ``__nv_cvt_fp8_to_halfraw`` (both NaN bytes give 0x7FFF)."""
    source = _bytes(codes, 255)
    return library().call("half_of_e4m3", source, np.empty(source.shape, np.float16))


def encode_e8m0(x: Any, rounding: str = "floor", *, overflow: str = "saturate") -> Array:
    """UE8M0 bytes of float32, sign ignored: ``__nv_cvt_float_to_e8m0``.

    Args:
        rounding: "floor" (toward zero) or "ceil" (toward positive infinity).
        overflow: "saturate" (0xFE) or "nan" (0xFF), for Inf and what exceeds 2^127.
    """
    if rounding not in ("floor", "ceil"):
        raise ValueError(f"rounding is 'floor' or 'ceil'; got {rounding!r}")
    if overflow not in ("saturate", "nan"):
        raise ValueError(f"overflow is 'saturate' or 'nan'; got {overflow!r}")
    source, _ = _floats(x, (np.float32,))
    return library().call(f"e8m0_{rounding}_{overflow}", source, np.empty(source.shape, np.uint8))


def decode_e8m0(codes: Any) -> Array:
    """bfloat16 values of UE8M0 bytes: ``__nv_cvt_e8m0_to_bf16raw`` (0xFF gives 0x7FFF)."""
    source = _bytes(codes, 255)
    return library().call("bfloat16_of_e8m0", source, np.empty(source.shape, ml_dtypes.bfloat16))


def codes_of_range(start: int, count: int, out: Array | None = None) -> Array:
    """E2M1 codes of the float32 bit patterns start … start + count − 1, for sweeps over all of them.

    Args:
        out: uint8 (count,), contiguous, to write into; made when absent.
    Raises:
        ValueError: the range leaves 0..2^32, or ``out`` does not fit it.
    """
    return _of_range("e2m1_of_patterns", start, count, out)


def bytes_of_range(start: int, count: int, out: Array | None = None) -> Array:
    """E4M3 bytes of a range of float32 bit patterns; as :func:`codes_of_range`."""
    return _of_range("e4m3_of_patterns", start, count, out)


def _of_range(name: str, start: int, count: int, out: Array | None) -> Array:
    if start < 0 or count < 0 or start + count > 1 << 32:
        raise ValueError(f"float32 bit patterns are 0..2^32 - 1; got {count} from {start}")
    result = np.empty(count, np.uint8) if out is None else out
    if result.dtype != np.uint8 or result.shape != (count,) or not result.flags.carray:
        raise ValueError(f"out is a contiguous, writable uint8 array of shape ({count},)")
    return library().call_patterns(name, start % (1 << 32), result)


# ---- the backend -------------------------------------------------------------------------------------------

#: kind of case -> (name of its output, conversion)
_KINDS: dict[str, tuple[str, Callable[[Any], Array]]] = {
    "e2m1": ("codes", encode_e2m1),
    "e2m1-pairs": ("packed", pack_e2m1),
    "e2m1-decode": ("values", decode_e2m1),
    "e4m3": ("bytes", encode_e4m3),
    "e4m3-decode": ("values", decode_e4m3),
    "e8m0-floor": ("bytes", functools.partial(encode_e8m0, rounding="floor")),
    "e8m0-ceil": ("bytes", functools.partial(encode_e8m0, rounding="ceil")),
    "e8m0-decode": ("values", decode_e8m0),
}


class CudaHeader:
    """NVIDIA's software conversions as a backend: codecs only, no block quantizer exists in the headers."""

    name = "cuda-header"
    preset = "te"
    features = frozenset({*_KINDS, "float32", "float16", "bfloat16", "uint8"})

    def availability(self) -> str | None:
        """None, or what is missing: headers, compiler, or the compiler's first error."""
        try:
            library()
        except RuntimeError as error:
            return str(error)
        return None

    def version(self) -> str:
        """The headers' package or the system's toolkit, its version, and the compiler's own first line; no path."""
        return library().version

    def cases(self, suite: str) -> Iterable[Case] | None:
        """None: it is given the suite's cases."""
        return None

    def quantize(self, case: Case) -> Outputs:
        """The conversion that the case's kind names.  ValueError for a kind that is no codec."""
        if case.kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise ValueError(f"cuda-header only converts ({known}); case {case.id} asks for {case.kind!r}")
        name, convert = _KINDS[case.kind]
        return {name: convert(case.x)}


BACKEND = CudaHeader

"""nvfp4ref: what a correct NVFP4 quantizer must produce, bit for bit."""

from . import e2m1, e4m3, e8m0, fp8, hadamard, layout, linear, mxfp4, partial_cast, recipe, tensorcore
from .arithmetic import PRESETS, Arithmetic, arithmetic
from .dump import Dump, DumpError, from_tensor, iter_dumps, load_dump, load_dumps, load_tensor, save_dump
from .gemm import matmul
from .hadamard import RHT
from .quantize import dequantize, quantize
from .streams import Philox
from .tensor import NVFP4Tensor, Steps

__version__ = "0.1.0"

#: Version of docs/spec.md and of the vectors: a change of any expected bit is a new one, with an entry in CHANGELOG.md.
SPEC_VERSION = "1.0"

__all__ = [
    "PRESETS",
    "RHT",
    "SPEC_VERSION",
    "Arithmetic",
    "Dump",
    "DumpError",
    "NVFP4Tensor",
    "Philox",
    "Steps",
    "arithmetic",
    "dequantize",
    "e2m1",
    "e4m3",
    "e8m0",
    "fp8",
    "from_tensor",
    "hadamard",
    "iter_dumps",
    "layout",
    "linear",
    "load_dump",
    "load_dumps",
    "load_tensor",
    "matmul",
    "mxfp4",
    "partial_cast",
    "quantize",
    "recipe",
    "save_dump",
    "tensorcore",
]

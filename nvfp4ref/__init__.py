"""nvfp4ref: what a correct NVFP4 quantizer must produce, bit for bit."""

from . import arrays, blocks, e2m1, e4m3, e8m0, hadamard, layout
from .arithmetic import PRESETS, Arithmetic, arithmetic
from .hadamard import RHT
from .quantize import dequantize, quantize
from .tensor import NVFP4Tensor

__version__ = "0.1.0"

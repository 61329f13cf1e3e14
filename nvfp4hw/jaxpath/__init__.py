"""The oracle's numbers in JAX: quantize, dequantize and matmul of NVFP4 for CPU and GPU, and layers that train."""

from nvfp4hw.jaxpath.gemm import matmul
from nvfp4hw.jaxpath.linear import call_key, linear
from nvfp4hw.jaxpath.quantize import dequantize, fake_quantize, quantize, quantize_both
from nvfp4hw.jaxpath.tensor import NVFP4Array

__all__ = [
    "NVFP4Array",
    "call_key",
    "dequantize",
    "fake_quantize",
    "linear",
    "matmul",
    "quantize",
    "quantize_both",
]

"""ModelOpt under the plug-in:  pytest --nvfp4-quantizer modelopt_kernel:quantize"""

import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from conformance.pytest_plugin import nvfp4_quantizer


@nvfp4_quantizer(arithmetic="modelopt", arrays="torch", features={"float32", "bfloat16", "float16", "1x16", "row"})
def quantize(x):
    codes, scales, whole = NVFP4QTensor.quantize(x, 16)
    positive = scales.view(torch.uint8) & 0x7F  # the sign of a NaN scale is torch's, and changes with the vector width
    return codes, positive.view(scales.dtype), whole

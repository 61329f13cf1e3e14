"""torchao under the plug-in:  pytest --nvfp4-quantizer torchao_kernel:quantize"""

from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from conformance.pytest_plugin import nvfp4_quantizer


@nvfp4_quantizer(arithmetic="torchao", arrays="torch", features={"float32", "bfloat16", "1x16", "row"})
def quantize(x):
    if x.isnan().any():
        raise NotImplementedError("NaN: torch's maximum keeps its sign or not, as the vector width has it")
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max().float()))

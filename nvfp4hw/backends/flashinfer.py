"""Backend ``flashinfer``: ``flashinfer.nvfp4_quantize`` with the CUDA kernel, compiled when first called.

    nvfp4_quantize(x, S, sfLayout=SfLayout.layout_128x4, nvfp4_4over6=None, backend="cuda")

S is the global scale 2688/amax in float32, which the caller computes; here it is that of Transformer Engine's
rule, so that what is compared is the kernel.  The kernel has two arithmetics.  The default multiplies by
approximate reciprocals (``rcp.approx.ftz``), which no rule describes on every GPU; with
``FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1``, read at every call and set here, it is Transformer Engine's.
"""

from __future__ import annotations

import nvfp4ref as nv
from nvfp4hw.backends import _gpu, _package
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref.scaling import global_scale


class FlashInfer(_gpu.TorchBackend):
    """bfloat16 and float16, 1x16, rowwise.

    Its 4over6 is left out: it forms the candidate errors with the global decode scale, which is not Transformer
    Engine's expression and not bit for bit the same.
    """

    name = "flashinfer"
    preset = "te"
    features = frozenset(("quantize", "bfloat16", "float16", "1x16", "row", "given-amax"))
    distributions = ("flashinfer-python", "torch")
    versions = ("0.7", "1")
    uses = ("flashinfer:nvfp4_quantize", "flashinfer:SfLayout")
    install = "pip install flashinfer-python where torch has CUDA, with nvcc on PATH"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        quantize, layout = self._objects()
        amax = _package.amax(case)
        x = _gpu.to_gpu(_package.matrix(case.x))
        scale = global_scale(amax.reshape(1), nv.arithmetic(self.preset)).encode
        with _gpu.environment(FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH="1"):
            packed, scales = quantize(
                x, _gpu.to_gpu(scale), sfLayout=layout.layout_128x4, nvfp4_4over6=None, backend="cuda"
            )
        rows, columns = x.shape
        return {
            "packed": _package.to_bytes(packed).reshape(rows, columns // 2),
            "scales": nv.layout.unswizzle(_package.to_bytes(scales), rows, columns // 16),
            "amax": _package.reported_amax(case, amax),
        }


BACKEND = FlashInfer

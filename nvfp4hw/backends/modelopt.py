"""Backend ``modelopt``: ``NVFP4QTensor.quantize`` of NVIDIA ModelOpt, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Case, Outputs

_CLASS = "modelopt.torch.quantization.qtensor.nvfp4_tensor:NVFP4QTensor"


class ModelOpt(_package.PackageBackend):
    """ModelOpt's dynamic path: global scale, block scales and codes from the tensor alone.

    A given amax goes in as a calibrated quantizer's ``_amax`` does.  The sign of a NaN scale is not the
    package's but torch's, and changes with position and vector width: it is returned as 0x7F.
    """

    name = "modelopt"
    preset = "modelopt"
    features = frozenset(("quantize", "float32", "bfloat16", "float16", "1x16", "row", "given-amax"))
    distributions = ("nvidia-modelopt", "torch")
    uses = (f"{_CLASS}.quantize", f"{_CLASS}.get_weights_scaling_factor_2_from_quantizer")
    install = "pip install 'nvfp4ref[peers]'"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        quantize, global_scale_of = self._objects()
        amax = _package.amax(case)
        given = None
        if case.amax is not None:
            given = global_scale_of(SimpleNamespace(_amax=_package.to_torch(amax)))
        x = _package.to_torch(_package.matrix(case.x))
        found, scales, _ = quantize(x, 16, weights_scaling_factor_2=given)
        return {
            "packed": _package.to_bytes(found._quantized_data),
            "scales": _package.to_scale_bytes(scales),
            "amax": _package.reported_amax(case, amax),
        }


BACKEND = ModelOpt

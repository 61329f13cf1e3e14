"""Backend ``torchao``: ``NVFP4Tensor.to_nvfp4`` with a per-tensor scale (two-level), on the CPU."""

from __future__ import annotations

from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Case, Outputs

_MODULE = "torchao.prototype.mx_formats.nvfp4_tensor"


class Torchao(_package.PackageBackend):
    """torchao's eager quantizer.  float16 is refused by the package.

    The per-tensor scale is ``per_tensor_amax_to_scale(amax)``, as its own workflows make it.
    """

    name = "torchao"
    preset = "torchao"
    features = frozenset(("quantize", "float32", "bfloat16", "1x16", "row", "given-amax"))
    distributions = ("torchao", "torch")
    uses = (f"{_MODULE}:NVFP4Tensor.to_nvfp4", f"{_MODULE}:per_tensor_amax_to_scale")
    install = "pip install 'nvfp4ref[peers]'"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        to_nvfp4, amax_to_scale = self._objects()
        amax = _package.amax(case)
        x = _package.to_torch(_package.matrix(case.x))
        found = to_nvfp4(x, per_tensor_scale=amax_to_scale(_package.to_torch(amax)))
        return {
            "packed": _package.to_bytes(found.qdata),
            "scales": _package.to_bytes(found.scale),
            "amax": _package.reported_amax(case, amax),
        }


BACKEND = Torchao

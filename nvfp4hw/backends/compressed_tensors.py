"""Backend ``compressed-tensors``: the format's own three steps for NVFP4 weights, on the CPU."""

from __future__ import annotations

from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Case, Outputs


class CompressedTensors(_package.PackageBackend):
    """``generate_gparam``, ``calculate_qparams`` and ``NVFP4PackedCompressor.compress``, in that order.

    Minimum and maximum stay in the dtype of the weight, and so do the first roundings: bfloat16 and float16
    weights have other scales than the same values in float32.  The sign of a NaN scale is torch's, and
    changes with position and vector width: it is returned as 0x7F.
    """

    name = "compressed-tensors"
    preset = "compressed-tensors"
    features = frozenset(("quantize", "float32", "bfloat16", "float16", "1x16", "row"))
    distributions = ("compressed-tensors", "torch")
    uses = (
        "compressed_tensors.quantization.utils:generate_gparam",
        "compressed_tensors.quantization.utils:calculate_qparams",
        "compressed_tensors.quantization.quant_scheme:preset_name_to_scheme",
        "compressed_tensors.compressors.nvfp4:NVFP4PackedCompressor.compress",
    )
    install = "pip install 'nvfp4ref[peers]'"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        import torch

        generate_gparam, calculate_qparams, scheme_of, compress = self._objects()
        scheme = scheme_of("NVFP4A16", ["Linear"])
        weight = _package.to_torch(_package.matrix(case.x))
        blocks = weight.unflatten(-1, (-1, 16))
        global_scale = generate_gparam(*torch.aminmax(weight))
        scale, _ = calculate_qparams(
            torch.amin(blocks, -1), torch.amax(blocks, -1), scheme.weights, global_scale=global_scale
        )
        found = compress(
            {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, scheme
        )
        return {
            "packed": _package.to_bytes(found["weight_packed"]),
            "scales": _package.to_scale_bytes(found["weight_scale"]),
            "amax": _package.reported_amax(case, _package.amax(case)),
        }


BACKEND = CompressedTensors

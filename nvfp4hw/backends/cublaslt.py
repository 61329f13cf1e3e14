"""Backend ``cublaslt``: cuBLASLt's NVFP4 matmul, called as PyTorch calls it.

    torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=…)

a (M, K/2) and b (N, K/2) are packed codes viewed as ``float4_e2m1fn_x2``, the scales ``float8_e4m3fn`` in the
128x4 swizzle, padded and flat.  There is no tensor scale: what is compared is the accumulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends import _gpu
from nvfp4hw.backends.base import Case, Outputs
from nvfp4hw.backends.live_cases import gemm_cases


class CuBLASLt(_gpu.TorchBackend):
    """a·bᵀ of given operands, in float32 and bfloat16, against the accumulator model of Blackwell."""

    name = "cublaslt"
    preset = "te"
    features = frozenset(("gemm", "uint8"))
    distributions = ("torch",)
    versions = ("2.8", "3")
    uses = ("torch:_scaled_mm", "torch:float4_e2m1fn_x2", "torch:float8_e4m3fn")
    install = "install a CUDA build of torch, 2.8 or later"

    def version(self) -> str:
        """torch, cuBLASLt's own version, and the device."""
        import torch

        return f"{super().version()}, CUDA {torch.version.cuda}"

    def cases(self, suite: str) -> Iterable[Case]:
        """Products without tensor scales; every suite has all of them."""
        return gemm_cases("none")

    def quantize(self, case: Case) -> Outputs:
        """d of one case.  Raises RuntimeError when there is no such GPU or torch."""
        scaled_mm, fp4, fp8 = self._objects()
        import torch

        def operand(name: str) -> tuple[Any, Any]:
            scales = nv.layout.swizzle(case.data[f"{name}_scales"])
            codes = _gpu.to_gpu(np.ascontiguousarray(case.data[f"{name}_packed"]))
            return codes.view(fp4), _gpu.to_gpu(scales.reshape(-1)).view(fp8)

        (a, scale_a), (b, scale_b) = operand("a"), operand("b")
        out = scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=getattr(torch, case.data["out_dtype"]))
        return {"d": _gpu.to_numpy(out)}


BACKEND = CuBLASLt

"""Backends of torchao: its eager quantizer on the CPU and on a GPU, the Triton kernel of MSLK, its training kernels.

====================  ========================================================================================
``torchao``           ``NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(amax))`` on the CPU
``torchao-gpu``       the same call on a GPU
``torchao-mslk``      the same with ``is_swizzled_scales=True, use_triton_kernel=True``: the kernel is mslk's
``torchao-training``  ``triton_weight_quantize_2d`` (16x16) and ``triton_rht_quantize_row_col`` (1x16, transform)
====================  ========================================================================================
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends import _gpu, _package
from nvfp4hw.backends.base import Case, Outputs, Refused

_MODULE = "torchao.prototype.mx_formats.nvfp4_tensor"
_TRAINING = "torchao.prototype.moe_training.nvfp4_training"
_USES = (f"{_MODULE}:NVFP4Tensor.to_nvfp4", f"{_MODULE}:per_tensor_amax_to_scale")
_TRAINING_TILE = 128


class Torchao(_package.PackageBackend):
    """torchao's eager quantizer.  float16 is refused by the package.

    The per-tensor scale is ``per_tensor_amax_to_scale(amax)``, as its own workflows make it.
    """

    name = "torchao"
    preset = "torchao"
    features = frozenset(("quantize", "float32", "bfloat16", "1x16", "row", "given-amax"))
    distributions = ("torchao", "torch")
    uses = _USES
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


class TorchaoGpu(_gpu.TorchBackend):
    """The eager quantizer on a GPU: every operation a kernel of torch's, so any GPU will do.

    There torch computes a quotient by a Python number as a product with its reciprocal: g = fl(A·fl(1/2688)),
    s = fl(fl(a·fl(1/6))/g).  Measured on an H200 with torch 2.11.0, every byte.
    """

    name = "torchao-gpu"
    preset = "torchao-gpu"
    features = Torchao.features
    distributions: ClassVar[tuple[str, ...]] = ("torchao", "torch")
    uses: ClassVar[tuple[str, ...]] = _USES
    least = (7, 0)
    install = "pip install torchao==0.18.0 where torch has CUDA"
    _options: ClassVar[dict[str, Any]] = {}

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        to_nvfp4, amax_to_scale = self._objects()[:2]
        amax = _package.amax(case)
        x = _gpu.to_gpu(_package.matrix(case.x))
        found = to_nvfp4(x, per_tensor_scale=amax_to_scale(_gpu.to_gpu(amax)), **self._options)
        scales = _package.to_bytes(found.scale)
        if found.is_swizzled_scales:
            scales = nv.layout.unswizzle(scales, len(x), x.shape[1] // 16)
        return {
            "packed": _package.to_bytes(found.qdata).reshape(len(x), -1),
            "scales": scales,
            "amax": _package.reported_amax(case, amax),
        }


class TorchaoMslk(TorchaoGpu):
    """The Triton kernel that torchao's inference workflow calls, of the package mslk; bfloat16."""

    name = "torchao-mslk"
    preset = "torchao"
    features = TorchaoGpu.features - {"float32"}
    requirements = ("mslk",)
    least = (10, 0)
    uses: ClassVar[tuple[str, ...]] = (*_USES, "mslk.quantize.triton.fp4_quantize:triton_quantize_nvfp4")
    install = "pip install torchao==0.18.0 mslk where torch has CUDA"
    _options = {"is_swizzled_scales": True, "use_triton_kernel": True}


class TorchaoTraining(_gpu.TorchBackend):
    """The kernels of ``NVFP4TrainingConfig``: weights in 16x16 tiles; activations with the transform columnwise.

    What they compute, by the source of torchao 0.18.0, is ``computes``.  Declared is ``te-2.14``, the nearest preset,
    and on a GPU that can run them they are expected to depart from it in two ways:

    * s = fl(fl(a/6)·S) is limited to 2^-6 … 448, 2^-6 being the smallest normal E4M3: no scale byte is below 0x08.
      Wherever te-2.14 has a smaller one, zero blocks included, 0x08 is stored, and the codes follow from it.
    * S, 1/S, a/6 and the encode scale are divided by Triton's ``/``, the approximate div.full.f32 (DIV-APPROXIMATE;
      whether a Blackwell GPU has the table of an H200 is open), which moves single scales and codes beside midpoints.

    What NaN gives in a clamp is Triton's choice; of finite input the source leaves nothing else open.
    """

    name = "torchao-training"
    preset = "te-2.14"
    computes: ClassVar[nv.Arithmetic] = nv.arithmetic(
        "te-2.14", block_scale_max="e4m3-max", scale_floor=2.0**-6, division="rcp-approx"
    )
    features = frozenset(("quantize", "bfloat16", "1x16", "16x16", "row", "col", "rht", "given-amax"))
    distributions = ("torchao", "torch", "triton")
    uses = (
        f"{_TRAINING}.quantize_2d_triton:triton_weight_quantize_2d",
        f"{_TRAINING}.hadamard_quantize_row_col_triton:triton_rht_quantize_row_col",
    )
    install = "pip install torchao==0.18.0 where torch has CUDA, 2.10 or later, and Triton"

    def quantize(self, case: Case) -> Outputs:
        """packed and scales of the directions asked for; the kernels are given both amaxes, and report none.

        Raises Refused for a shape or call that the kernels do not have.
        """
        weight, activation = self._objects()
        rows, columns = case.x.shape
        if rows % _TRAINING_TILE or columns % _TRAINING_TILE:
            raise Refused(f"the kernels take dimensions in multiples of {_TRAINING_TILE}; got {case.x.shape}")
        if case.block == (1, 16) and case.rht_t is None and case.directions != "row":
            raise Refused("the 1x16 kernel transforms its columnwise output always")
        x = _gpu.to_gpu(_package.matrix(case.x))
        amax = _gpu.to_gpu(_package.amax(case).reshape(1))
        if case.block == (16, 16):
            packed, scales, packed_t, scales_t = weight(x, amax)
        else:
            signs = case.rht_t.sign_mask if case.rht_t is not None else 0
            vector = [-1 if signs >> bit & 1 else 1 for bit in range(16)]
            packed_t, scales_t, packed, scales = activation(x, self._transformed_amax(case), amax, vector)
        found = {
            "packed": _package.to_bytes(packed),
            "scales": nv.layout.unswizzle(_package.to_bytes(scales), rows, columns // 16),
            "packed_t": _package.to_bytes(packed_t),
            "scales_t": nv.layout.unswizzle(_package.to_bytes(scales_t), columns, rows // 16),
        }
        sides = {"row": ("",), "col": ("_t",), "both": ("", "_t")}[case.directions]
        return {name + side: found[name + side] for side in sides for name in ("packed", "scales")}

    def _transformed_amax(self, case: Case) -> Any:
        """Amax of the transformed tensor, which a caller of the kernel computes."""
        if case.amax_t is not None:
            return _gpu.to_gpu(np.array(case.amax_t, np.float32).reshape(1))
        transform = case.rht_t if case.rht_t is not None else nv.RHT(sign_mask=0)
        transformed = nv.hadamard.transform(case.x, transform, axis=0).astype(np.float32)
        return _gpu.to_gpu(np.abs(transformed).max().reshape(1))


BACKEND = Torchao

"""Backend ``qwantize``: the plain quantizer of its PyTorch reference, on the CPU.

    scales, values = nvfp4_naive(x.unflatten(-1, (-1, 16)))

The file that computes is the installed wheel's.  Only the package's ``__init__`` files are passed by: they
import Triton kernels, for which a CPU has no use.
"""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref import e2m1


class Qwantize(_package.PackageBackend):
    """Its plain method; the others search for the scale with the least error.  It has no tensor scale and no amax.

    It returns values of the codebook, each of which is one code; a NaN element becomes 0.
    """

    name = "qwantize"
    preset = "qwantize"
    features = frozenset(("quantize", "float32", "bfloat16", "float16", "1x16", "row", "col"))
    distributions = ("qwantize", "torch")
    versions = ("0.1.0", "0.1.2")
    install = "pip install torch, then pip install --no-deps qwantize==0.1.1: only its GPU kernels use Triton"

    @classmethod
    def _import(cls) -> tuple[Any, ...]:
        return (_reference().nvfp4_naive,)

    def quantize(self, case: Case) -> Outputs:
        """packed and scales of the directions asked for.  Raises RuntimeError when the package is not available."""
        (naive,) = self._objects()
        x = _package.to_torch(_package.matrix(case.x))
        outputs: Outputs = {}
        for suffix, direction, axis in (("", "row", 1), ("_t", "col", 0)):
            if case.directions not in (direction, "both"):
                continue
            with _package.quiet():  # torch remarks on the speed of what is not contiguous
                scales, values = naive(x.unflatten(axis, (-1, 16)), dim=axis + 1)
            values = values.flatten(axis, axis + 1)
            if suffix:
                scales, values = scales.T, values.T
            codes = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            outputs[f"packed{suffix}"] = e2m1.pack(codes)
            outputs[f"scales{suffix}"] = _package.to_scale_bytes(_to_e4m3(scales))
        return outputs


def _to_e4m3(scales: Any) -> Any:
    """float32 that are E4M3 values already, as E4M3."""
    import torch

    return scales.to(torch.float8_e4m3fn)


@functools.cache
def _reference() -> ModuleType:
    """The installed ``qwantize/nvfp4/reference.py``."""
    path = str(metadata.distribution("qwantize").locate_file("qwantize/nvfp4/reference.py"))
    spec = importlib.util.spec_from_file_location("nvfp4hw_qwantize_reference", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BACKEND = Qwantize

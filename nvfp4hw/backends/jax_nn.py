"""Backends ``jax-nn`` and ``jax-nn-gpu``: JAX's own nvfp4 quantize, under ``jax.nn.scaled_dot_general``, jitted.

jax.jit(lambda x, g: quantize(x, get_scaled_dot_general_config("nvfp4", g)))(x, amax / 2688)
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nvfp4hw.backends import _gpu, _package
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref import e2m1

_QUANTIZE = "jax._src.cudnn.scaled_matmul_stablehlo:quantize"
_CONFIG = "jax.nn:get_scaled_dot_general_config"


class JaxNN(_package.PackageBackend):
    """The quantizer with the two-level configuration: its global scale is amax/2688, divided outside the jit.

    Inside a jit of the caller's own XLA would turn that division into a product with 1/2688.  A NaN in a
    tensor of 4096 elements or more reaches the block scale or not as XLA's reduction kernel has it.
    """

    name = "jax-nn"
    preset = "jax-nn"
    features = frozenset(("quantize", "float32", "bfloat16", "float16", "1x16", "row", "given-amax"))
    distributions = ("jax", "jaxlib")
    versions = ("0.10.2", "0.13")  # until 0.10.0 XLA on a CPU kept the divisions
    uses = (_QUANTIZE, _CONFIG)
    install = "pip install 'nvfp4ref[jax]'"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        jitted = _jitted(*self._objects())
        import jax

        amax = _package.amax(case)
        with jax.default_device(self._device()):
            global_scale = jax.numpy.asarray(amax.reshape(1)) / 2688
            codes, scales = jitted(jax.numpy.asarray(_package.matrix(case.x)), global_scale)
        return {
            "packed": e2m1.pack(np.asarray(codes).view(np.uint8)),
            "scales": np.asarray(scales).view(np.uint8),
            "amax": _package.reported_amax(case, amax),
        }

    @staticmethod
    def _device() -> Any:
        import jax

        return jax.devices("cpu")[0]


class JaxNNGpu(JaxNN):
    """The same on a GPU, where XLA keeps subnormals and computes a quotient x/y as x·rcp.approx(y).

    With g = fl(A·fl(1/2688)), z = x/g and s = clip(fl(max|z|·fl(1/6)), 0, 448), the element is x/fl(g·d), one
    division.  Measured on an H200 with jax 0.11.2, every byte; the preset has that GPU's table of reciprocals, which
    are off by an ulp for 13 % of all mantissas, and another generation may have another.
    """

    name = "jax-nn-gpu"
    preset = "jax-nn-gpu"
    device = "cuda"
    install = "pip install 'jax[cuda13]'"

    def availability(self) -> str | None:
        """None, or what is missing: the package, the call, or the GPU."""
        return super().availability() or _gpu.reason(_gpu.jax_gpu)

    def version(self) -> str:
        """Versions of the packages, and the device."""
        return f"{super().version()} on {_gpu.jax_gpu().device_kind}"

    @staticmethod
    def _device() -> Any:
        return _gpu.jax_gpu()


@functools.cache
def _jitted(quantize: Any, config: Any) -> Any:
    import jax

    return jax.jit(lambda x, global_scale: quantize(x, config("nvfp4", global_scale)))


BACKEND = JaxNN

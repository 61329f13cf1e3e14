"""Backend ``jax-nn``: JAX's own nvfp4 quantize, under ``jax.nn.scaled_dot_general``, jitted, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nvfp4hw.backends import _package
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
    uses = (_QUANTIZE, _CONFIG)
    install = "pip install 'nvfp4ref[jax]'"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of one case.  Raises RuntimeError when the package is not available."""
        jitted = _jitted(*self._objects())
        import jax

        amax = _package.amax(case)
        with jax.default_device(jax.devices("cpu")[0]):
            global_scale = jax.numpy.asarray(amax.reshape(1)) / 2688
            codes, scales = jitted(jax.numpy.asarray(_package.matrix(case.x)), global_scale)
        return {
            "packed": e2m1.pack(np.asarray(codes).view(np.uint8)),
            "scales": np.asarray(scales).view(np.uint8),
            "amax": _package.reported_amax(case, amax),
        }


@functools.cache
def _jitted(quantize: Any, config: Any) -> Any:
    import jax

    return jax.jit(lambda x, global_scale: quantize(x, config("nvfp4", global_scale)))


BACKEND = JaxNN

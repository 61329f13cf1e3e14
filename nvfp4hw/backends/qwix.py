"""Backend ``qwix``: Google's quantization library for JAX, jitted, on the CPU.

    jax.jit(lambda x: qwix.quantize(x, "nvfp4", channelwise_axes=[0], tiled_axes={1: 16}))(x)
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref import e2m1


class Qwix(_package.PackageBackend):
    """The public ``quantize`` with tiles of 16, or of 16x16, elements; it has no tensor scale and no amax.

    Earlier versions do not know the type "nvfp4".  Eager calls give the same bytes.  float16 is left out: XLA
    then rounds the constant 1/6 and each 1/d to float16, which no field of ``Arithmetic`` says.  A NaN in a
    float32 tensor of 4096 elements or more reaches the block scale or not as XLA's reduction kernel has it.
    """

    name = "qwix"
    preset = "qwix"
    features = frozenset(("quantize", "float32", "bfloat16", "1x16", "16x16", "row", "col"))
    distributions = ("qwix", "jax", "jaxlib")
    versions = ("0.1.8", "0.1.9")
    uses = ("qwix:quantize",)
    install = "pip install 'nvfp4ref[peers]'"

    def quantize(self, case: Case) -> Outputs:
        """packed and scales of the directions asked for.  Raises RuntimeError when the package is not available."""
        (quantize,) = self._objects()
        import jax

        x = _package.matrix(case.x)
        outputs: Outputs = {}
        for suffix, direction, tile in (("", "row", (1, 16)), ("_t", "col", (16, 1))):
            if case.directions not in (direction, "both"):
                continue
            tile = case.block if case.block == (16, 16) else tile
            with jax.default_device(jax.devices("cpu")[0]):
                codes, scales = map(np.asarray, _jitted(quantize, tile)(jax.numpy.asarray(x)))
            codes, scales = codes.view(np.uint8), scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            if suffix:
                codes, scales = codes.T, scales.T
            outputs[f"packed{suffix}"] = e2m1.pack(codes)
            outputs[f"scales{suffix}"] = np.repeat(scales, 16, axis=0) if tile == (16, 16) else scales.copy()
        return outputs


@functools.cache
def _jitted(quantize: Any, tile: tuple[int, int]) -> Any:
    """x → (codes, scales) with one scale a tile, the scales in x's dtype; compiled."""
    import jax

    channels = [axis for axis in (0, 1) if tile[axis] == 1]
    tiled = {axis: 16 for axis in (0, 1) if tile[axis] == 16}

    def call(x: Any) -> tuple[Any, Any]:
        found = quantize(x, "nvfp4", channelwise_axes=channels, tiled_axes=tiled)
        return found.qvalue, found.scale

    return jax.jit(call)


BACKEND = Qwix

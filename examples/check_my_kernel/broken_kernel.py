"""A kernel with a fault, to see what the plug-in says:  pytest --nvfp4-quantizer broken_kernel:quantize

It multiplies by S/d, where Transformer Engine multiplies by the reciprocal of d times 1/S: one rounding in another
place.
"""

import ml_dtypes
import numpy as np

from conformance.pytest_plugin import nvfp4_quantizer


@nvfp4_quantizer(features={"bfloat16", "float32", "1x16", "row"})
def quantize(x):
    return kernel(x)


def kernel(x):
    largest = np.finfo(np.float32).max
    x = x.astype(np.float32).reshape(len(x), -1, 16)
    with np.errstate(all="ignore"):
        a = np.abs(np.where(np.isnan(x), 0, x)).max(axis=2, keepdims=True)
        amax = a.max()
        scale = min(np.float32(2688) / amax, largest) if 0 < amax < np.inf else np.float32(1)
        d = np.minimum(a * (scale * np.float32(1 / 6)), 448).astype(ml_dtypes.float8_e4m3fn)
        e = np.minimum(scale / d.astype(np.float32), largest)  # the fault
        y = np.where(np.isnan(x), 6, x * e).clip(-6, 6)
    codes = y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(x), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, d[..., 0], amax

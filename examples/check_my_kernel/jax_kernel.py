"""A kernel in JAX under the plug-in:  pytest --nvfp4-quantizer jax_kernel:quantize --nvfp4-xfails xfails.txt

It computes what Transformer Engine does.  XLA on a CPU flushes subnormal numbers to zero, so cases with tiny numbers
differ; xfails.txt lists them.
"""

import jax
import jax.numpy as jnp

from conformance.pytest_plugin import nvfp4_quantizer

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@nvfp4_quantizer(arrays="jax", features={"bfloat16", "float32", "1x16", "row"})
def quantize(x):
    return kernel(x)


@jax.jit
def kernel(x):
    largest = jnp.finfo(jnp.float32).max
    x = x.astype(jnp.float32).reshape(x.shape[0], -1, 16)
    a = jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x)), axis=2, keepdims=True)
    amax = jnp.max(a)
    scale = jnp.where((amax == 0) | jnp.isinf(amax), 1, jnp.minimum(2688 / amax, largest))
    d = jnp.minimum(a * (scale * jnp.float32(1 / 6)), 448).astype(jnp.float8_e4m3fn)
    e = jnp.minimum(1 / (d.astype(jnp.float32) * (1 / scale)), largest)
    y = jnp.where(jnp.isnan(x), 6, x * e)
    code = jnp.signbit(y).astype(jnp.uint8) << 3
    for number, midpoint in enumerate(MIDPOINTS):  # a tie goes to the even code
        code += (jnp.abs(y) >= midpoint if number % 2 else jnp.abs(y) > midpoint).astype(jnp.uint8)
    code = code.reshape(x.shape[0], -1)
    return code[:, ::2] | code[:, 1::2] << 4, d[..., 0], amax

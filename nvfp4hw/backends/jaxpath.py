"""Backend ``jaxpath``: this project's own JAX path, eager, on the default device, held to the oracle like any other."""

from __future__ import annotations

from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends import _package
from nvfp4hw.backends.base import Case, Outputs

_SIDE = 256
_OWN_SHAPE = ("shape", "rows", "hadamard", "stochastic")  # families that are asked as they are


class JaxPath(_package.PackageBackend):
    """``nvfp4hw.jaxpath.quantize``, every option of it, and its two conversions.

    XLA compiles anew for each shape, so cases that are not about shapes are quantized in the corner of a matrix of
    zeros, which change neither amax nor a block beside them; what is returned is that corner.
    """

    name = "jaxpath"
    preset = "te"
    features = frozenset(
        (
            *("quantize", "e2m1", "e4m3", "float32", "bfloat16", "float16", "1x16", "16x16", "row", "col"),
            *("rht", "given-amax", "stochastic", "uniforms"),
            *("row_scaled", "four_over_six", "four_over_six_fast_error", "e4m3_max", "headroom"),
        )
    )
    distributions = ("jax", "jaxlib")
    uses = ("nvfp4hw.jaxpath:quantize", "nvfp4hw.jaxpath.bits:to_e4m3", "nvfp4hw.jaxpath.elements:encode")
    install = "pip install 'nvfp4ref[jax]'"

    def version(self) -> str:
        """Versions of the packages, and the device."""
        import jax

        return f"{super().version()} on {jax.devices()[0].device_kind}"

    def quantize(self, case: Case) -> Outputs:
        """The outputs of the directions asked for, or the codes or bytes of a bare conversion."""
        quantize, to_e4m3, encode = self._objects()
        import jax
        import jax.numpy as jnp

        if case.kind != "quantize":
            name, convert = {"e2m1": ("codes", encode), "e4m3": ("bytes", to_e4m3)}[case.kind]
            return {name: np.asarray(jax.jit(convert)(case.x.astype(np.float32).view(np.uint32)))}
        x = _package.matrix(case.x)
        rows, columns = x.shape
        if case.family not in _OWN_SHAPE and max(x.shape) <= _SIDE:
            x = np.pad(x, [(0, _SIDE - n) for n in x.shape])
        how: dict[str, Any] = {"block": case.block, "arithmetic": nv.arithmetic("te", **case.fields)}
        if case.rounding == "stochastic":
            how["rounding"] = "stochastic"
        outputs: Outputs = {}
        for direction, suffix, axis, rht, amax in (
            ("row", "", -1, None, case.amax),
            ("col", "_t", 0, case.rht_t, case.amax_t),
        ):
            if case.directions not in (direction, "both"):
                continue
            rbits = case.data[f"rng{suffix}"] if case.rounding == "stochastic" else None
            q = quantize(jnp.asarray(x), axis=axis, rht=rht, amax=amax, rbits=rbits, **how)
            height, length = (rows, columns) if axis == -1 else (columns, rows)
            outputs[f"packed{suffix}"] = np.asarray(q.packed)[:height, : length // 2]
            outputs[f"scales{suffix}"] = np.asarray(q.scales)[:height, : length // 16]
            outputs[f"amax{suffix}"] = np.asarray(q.amax)[:height] if q.amax.ndim else np.asarray(q.amax)
        return outputs


BACKEND = JaxPath

"""Backend ``te-jax``: the pure-JAX ``NVFP4Quantizer`` of Transformer Engine, as shipped, jitted, on the CPU.

Every file that computes is the installed wheel's.  Stood in for are the ``__init__`` files that load compiled
code, the compiled module ``transformer_engine_jax`` (two enums, ``DType`` and three functions, none of which
the quantizer computes with) and, where flax is absent, its ``FrozenDict``.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
from types import ModuleType
from typing import Any

import numpy as np

from nvfp4hw.backends import _package, _te_package
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref import e2m1

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_MODES = (
    "NO_SCALING",
    "DELAYED_TENSOR_SCALING",
    "MXFP8_1D_SCALING",
    "CURRENT_TENSOR_SCALING",
    "NVFP4_1D_SCALING",
    "NVFP4_2D_SCALING",
)
_LAYOUTS = {"row": "ROWWISE", "col": "COLWISE", "both": "ROWWISE_COLWISE"}  # directions of a case -> its name


class TransformerEngineJax(_package.PackageBackend):
    """``NVFP4Quantizer.quantize`` for 1x16 and 16x16 blocks, rowwise, columnwise or both in one jit.

    Without the Hadamard transform and without stochastic rounding.  Two things depend on which reduction XLA
    picks, by dtype and size: a subnormal amax is reported as it is or as 0, so it is left out; and in a
    float32 tensor of 4096 elements or more NaN reaches the amax or not.
    """

    name = "te-jax"
    preset = "te-jax"
    features = frozenset(("quantize", "float32", "bfloat16", "float16", "1x16", "16x16", "row", "col"))
    distributions = ("transformer-engine", "jax", "jaxlib")
    requirements = ("pydantic", "packaging")
    install = "pip install 'nvfp4ref[te-jax]'"

    @classmethod
    def _import(cls) -> tuple[Any, ...]:
        return (_quantizer_module(),)

    def quantize(self, case: Case) -> Outputs:
        """The outputs of the directions asked for.  Raises RuntimeError when the package is not available."""
        self._objects()
        import jax

        run = _jitted(case.block, case.directions)
        with jax.default_device(jax.devices("cpu")[0]):
            sides = run(jax.numpy.asarray(_package.matrix(case.x)))
        outputs: Outputs = {}
        for suffix, (codes, scales, amax) in sides.items():
            outputs[f"packed{suffix}"] = e2m1.pack(np.asarray(codes).view(np.uint8))
            outputs[f"scales{suffix}"] = np.asarray(scales).view(np.uint8)
            if not 0 < _package.amax(case) < _SMALLEST_NORMAL:
                outputs[f"amax{suffix}"] = _package.reported_amax(case, amax)
        return outputs


@functools.cache
def _jitted(block: tuple[int, int], directions: str) -> Any:
    """x → {suffix of the output: (codes, scales, amax)}, compiled."""
    import jax

    te = _quantizer_module()
    mode = "NVFP4_1D_SCALING" if block == (1, 16) else "NVFP4_2D_SCALING"
    quantizer = te.NVFP4Quantizer(
        q_dtype=jax.numpy.float4_e2m1fn,
        scaling_mode=te.ScalingMode[mode],
        q_layout=te.QuantizeLayout[_LAYOUTS[directions]],
        data_layout="NT",
    )

    def run(x: Any) -> dict[str, tuple[Any, Any, Any]]:
        found = quantizer.quantize(x)
        sides = {"row": {"": found}, "col": {"_t": found}}.get(directions)
        sides = sides or {"": found.rowwise_tensor, "_t": found.colwise_tensor}
        return {suffix: (side.data, side.scale_inv, side.amax) for suffix, side in sides.items()}

    return jax.jit(run)


# ---- the package, with its compiled extension stood in for -------------------------------------------------


@functools.cache
def _quantizer_module() -> Any:
    """Transformer Engine's ``jax/quantize/quantizer.py``, the real one."""
    return _te_package.import_file("jax.quantize.quantizer", ("common", "jax"), _stand_ins())


def _stand_ins() -> dict[str, ModuleType]:
    extension = _te_package.module(
        "transformer_engine_jax",
        JAXX_Scaling_Mode=enum.IntEnum("JAXX_Scaling_Mode", _MODES, start=0),
        JAXX_Quantize_Layout=enum.IntEnum("JAXX_Quantize_Layout", list(_LAYOUTS.values()), start=0),
        DType=enum.IntEnum("DType", "kByte"),
        get_cublasLt_version=lambda: 0,
        get_cuda_version=lambda: 0,
        get_device_compute_capability=lambda gpu_id: 0,
    )
    modules = [extension]
    if importlib.util.find_spec("flax") is None:
        frozen_dict = _te_package.module("flax.core.frozen_dict", FrozenDict=dict)
        modules += [_te_package.module("flax"), _te_package.module("flax.core"), frozen_dict]
    return {module.__name__: module for module in modules}


BACKEND = TransformerEngineJax

"""Backends of Transformer Engine's JAX side: its pure-JAX quantizer, on the CPU and on a GPU, and its CUDA kernels.

===============  =============================================================================================
``te-jax``       ``NVFP4Quantizer(…).quantize(x)``, the pure-JAX path, jitted, on the CPU
``te-jax-gpu``   the same on a GPU, without the compiled extension
``te-jax-cuda``  ``transformer_engine.jax.cpp_extensions.quantize(x, quantizer)``, jitted: the custom call of
                 ``transformer_engine_jax``, which has to be built
===============  =============================================================================================

Of the first two every file that computes is the installed wheel's.  Stood in for are the ``__init__`` files that
load compiled code, the compiled module ``transformer_engine_jax`` (two enums, ``DType`` and three functions, none of
which the quantizer computes with) and, where flax is absent, its ``FrozenDict``.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
from types import ModuleType
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends import _gpu, _package, _te_package
from nvfp4hw.backends.base import Case, Outputs, Refused
from nvfp4ref import e2m1
from nvfp4ref.streams import dispatch

_SIGN_MASK = 0xD7E8
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
        with jax.default_device(self._device()):
            sides = run(jax.numpy.asarray(_package.matrix(case.x)))
        outputs: Outputs = {}
        for suffix, (codes, scales, amax) in sides.items():
            outputs[f"packed{suffix}"] = e2m1.pack(np.asarray(codes).view(np.uint8))
            outputs[f"scales{suffix}"] = np.asarray(scales).view(np.uint8)
            if self._keeps_subnormals or not 0 < _package.amax(case) < _SMALLEST_NORMAL:
                outputs[f"amax{suffix}"] = _package.reported_amax(case, amax)
        return outputs

    _keeps_subnormals = False

    @staticmethod
    def _device() -> Any:
        import jax

        return jax.devices("cpu")[0]


class TransformerEngineJaxGpu(TransformerEngineJax):
    """The pure-JAX quantizer on a GPU, where XLA keeps E4M3 and float32 subnormals and divides approximately.

    x/y is x·rcp.approx(y) in S, in 1/S and in e, the block scale is a·(S·(1/6)), NaN spreads through the amax and
    becomes code 8, and the scales of 16x16 tiles are tiled over the rows.  Measured on an H200 with jax 0.11.2, every
    byte; the preset has that GPU's table, and another generation may have another.
    """

    name = "te-jax-gpu"
    preset = "te-jax-gpu"
    device = "cuda"
    install = "pip install --no-deps transformer-engine==2.20.2; pip install 'jax[cuda13]' pydantic packaging"
    _keeps_subnormals = True

    def availability(self) -> str | None:
        """None, or what is missing: a package, the GPU, or the call."""
        return self._lacking() or _gpu.reason(_gpu.jax_gpu) or super().availability()

    def version(self) -> str:
        """Versions of the packages, and the device."""
        return f"{super().version()} on {_gpu.jax_gpu().device_kind}"

    @staticmethod
    def _device() -> Any:
        return _gpu.jax_gpu()


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


# ---- the custom calls --------------------------------------------------------------------------------------


class TransformerEngineJaxCuda(_package.PackageBackend):
    """``cpp_extensions.quantize``: rowwise, both directions, and the transform columnwise, nearest or stochastic.

    A columnwise output alone, without the transform, goes to the pure-JAX quantizer inside the package; it is
    refused here.  The state of a stochastic call is four uint32: seed and offset, low word first.
    """

    name = "te-jax-cuda"
    preset = "te"
    device = "cuda"
    features = frozenset(
        ("quantize", "float32", "bfloat16", "float16", "1x16", "16x16", "row", "col", "rht", "stochastic")
    )
    distributions = ("transformer-engine", "jax", "jaxlib")
    requirements = ("transformer-engine-jax",)
    versions = ("2.15", "3")
    uses = (
        "transformer_engine.jax.cpp_extensions:quantize",
        "transformer_engine.jax.quantize:QuantizerFactory",
        "transformer_engine.jax.quantize:ScalingMode",
        "transformer_engine.jax.quantize:QuantizeLayout",
    )
    install = "pip install --no-build-isolation 'transformer-engine[jax]' where jax has CUDA"

    def availability(self) -> str | None:
        """None, or what is missing: a package, the GPU, or the call."""
        missing = self._lacking() or _gpu.reason(_gpu.jax_gpu)
        if missing is not None:
            return missing
        capability = str(getattr(_gpu.jax_gpu(), "compute_capability", "0"))
        if float(capability) < 10:
            return f"its kernels need sm_100 or newer, and this GPU is sm_{capability.replace('.', '')}"
        return super().availability()

    def version(self) -> str:
        """Versions of the packages, and the device."""
        return f"{super().version()} on {_gpu.jax_gpu().device_kind}"

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of the directions asked for.

        Raises Refused for what does not reach the CUDA kernels, RuntimeError when the package is not available.
        """
        run, factory, modes, layouts = self._objects()
        import jax

        rht, stochastic = case.rht_t is not None, case.rounding == "stochastic"
        rows, columns = case.x.shape
        if case.directions == "col" and not rht:
            raise Refused("a columnwise output alone is made by the pure-JAX quantizer, not by a kernel")
        fused = rows % 64 == 0 and columns % 128 == 0 and case.x.dtype.name == "bfloat16"
        if rht and (not fused or case.rht_t.sign_mask != _SIGN_MASK):
            raise Refused(
                f"the transform takes bfloat16 with rows in multiples of 64 and columns of 128, and the sign mask "
                f"{_SIGN_MASK:#x}; got {case.x.dtype.name} {case.x.shape} and {case.rht_t}"
            )
        state = jax.numpy.asarray(_state_of(case)) if stochastic else None
        quantizer = factory.create(
            q_dtype=jax.numpy.float4_e2m1fn,
            scaling_mode=getattr(modes, "NVFP4_1D_SCALING" if case.block == (1, 16) else "NVFP4_2D_SCALING"),
            q_layout=getattr(layouts, _LAYOUTS[case.directions]),
            use_rht=rht,
            stochastic_rounding_rng_state=state,
        )
        found = jax.jit(lambda x: run(x, quantizer=quantizer))(jax.numpy.asarray(_package.matrix(case.x)))
        sides = {"row": {"": found}, "col": {"_t": found}}.get(case.directions)
        outputs: Outputs = {}
        for suffix, one in (sides or {"": found.rowwise_tensor, "_t": found.colwise_tensor}).items():
            shape = (rows, columns) if not suffix else (columns, rows)
            scales = np.asarray(one.scale_inv).view(np.uint8)
            outputs[f"packed{suffix}"] = e2m1.pack(np.asarray(one.data).view(np.uint8).reshape(shape))
            outputs[f"scales{suffix}"] = np.ascontiguousarray(scales[: shape[0], : shape[1] // 16])
            outputs[f"amax{suffix}"] = np.asarray(one.amax, np.float32).reshape(())
        return outputs


def _state_of(case: Case) -> Any:
    """(1, 4) uint32 from the generator that the case expects.

    Raises Refused when its words are not those that the custom call draws: with the transform the two directions are
    launches of their own, both from this state.
    """
    both, rht = case.directions == "both", case.rht_t is not None
    states = set()
    for name, axis in {"row": (("rng", -1),), "col": (("rng_t", 0),)}.get(case.directions, (("rng", -1), ("rng_t", 0))):
        philox = case.data.get(name)
        if not isinstance(philox, nv.Philox):
            raise Refused("a custom call takes no random numbers: it draws 32-bit words")
        drawn = dispatch(case.x.shape, axis, dtype=case.x.dtype.name, block=case.block, both=both and not rht)
        if rht and axis == 0:
            drawn = "fused-rht-columnwise"
        if philox.both != (both and not rht) or philox.kernel not in ((drawn,) if rht else ("auto", drawn)):
            raise Refused(
                f"the custom call quantizes this tensor with its kernel {drawn!r}; the case asks for {philox}"
            )
        states.add((philox.seed, philox.offset))
    (seed, offset) = states.pop()
    if states:
        raise Refused("one custom call has one seed and offset")
    return np.array([[seed & 0xFFFFFFFF, seed >> 32, offset & 0xFFFFFFFF, offset >> 32]], np.uint32)


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

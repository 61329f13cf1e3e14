"""Backend ``te-reference``: the quantizer in Transformer Engine's ``reference_nvfp4.py``, run on the CPU.

The file, its base classes and its recipes are those of the installed package ``transformer-engine`` (the
pure-Python wheel is enough).  Stood in for are only the things that need the compiled extension: ``__init__``
files, the enums of ``transformer_engine_torch`` and ``pytorch.tensor.utils.is_custom``, none of which the
quantizer computes with.  The stand-ins leave ``sys.modules`` again once the file is imported.

Two choices make its outputs the same on every CPU:

* oneDNN is off while it runs.  The Hadamard transform is a bfloat16 matrix product, which oneDNN adds up as
  the CPU at hand does, flushing subnormals on some.  torch's own loop adds in float32, in four lanes.
* The sign of an E4M3 NaN and the payload of a NaN amax are torch's, and change with vector width and tensor
  size.  They are returned as 0x7F and 0x7FFFFFFF.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4hw.backends import _package, _te_package
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref.fp32 import canonical_nan

Array = np.ndarray[Any, Any]

_EXTENSION = "transformer_engine_torch"
_UTILS = "transformer_engine.pytorch.tensor.utils"
_DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
_SIGN_MASK = 0xD7E8  # the only sign vector the reference has, beside none
#: Arithmetic field -> the quantizer's own argument, for the fields that a case may switch on.
_FIELDS = {
    "four_over_six": "nvfp4_4over6_err_mode",
    "four_over_six_fast_error": "nvfp4_4over6_err_use_fast_math",
    "e4m3_max": "nvfp4_e4m3_max",
    "row_scaled": "row_scaled_nvfp4",
}


@functools.cache
def reference() -> Any:
    """Transformer Engine's module ``reference_nvfp4``, the real one."""
    forward = [f"GEMM{number}_{role}" for number in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")]
    backward = [f"GRAD_{role}{number}" for number in (1, 2, 3) for role in ("OUTPUT", "INPUT")]
    extension = _te_package.module(
        _EXTENSION,
        DType=enum.IntEnum("DType", _DTYPES, start=0),
        FP8FwdTensors=enum.IntEnum("FP8FwdTensors", forward, start=0),
        FP8BwdTensors=enum.IntEnum("FP8BwdTensors", backward, start=0),
    )
    utils = _te_package.module(_UTILS, is_custom=lambda tensor=None: bool(getattr(tensor, "custom", False)))
    return _te_package.import_file(
        "pytorch.custom_recipes.reference_nvfp4",
        ("common", "pytorch", "pytorch.tensor", "pytorch.custom_recipes"),
        {_EXTENSION: extension, _UTILS: utils},
    )


@contextmanager
def _portable_matmul() -> Iterator[None]:
    """torch without oneDNN: its own loop, whose order of additions does not depend on the CPU."""
    import torch

    onednn: Any = torch.backends.mkldnn  # its annotations are those of the descriptor, not of the value
    before = onednn.enabled
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = before


class TransformerEngineReference(_package.PackageBackend):
    """``NVFP4QuantizerRef`` as a backend: 1x16, 16x16, RHT, row-scaled, 4over6, both directions."""

    name = "te-reference"
    preset = "te-reference"
    features = frozenset(
        ("quantize", "float32", "float16", "bfloat16", "1x16", "16x16", "row", "col", "rht", "given-amax")
    ) | frozenset(_FIELDS)
    distributions = ("transformer-engine", "torch")
    requirements = ("pydantic", "packaging")
    install = "pip install 'nvfp4ref[te]'"

    @classmethod
    def _import(cls) -> tuple[Any, ...]:
        return (reference(),)

    def quantize(self, case: Case) -> Outputs:
        """``NVFP4QuantizerRef.quantize`` for one case.

        Where the case gives an amax, the blocks are quantized by the same class's
        ``_quantize_blockwise_reference``, the function that takes it.

        Raises ValueError for what the reference cannot be asked, RuntimeError when it is not available.
        """
        _refuse_foreign(case)
        row, col = case.directions in ("row", "both"), case.directions in ("col", "both")
        row_scaled = bool(case.fields.get("row_scaled"))
        (module,) = self._objects()
        # the reference row-scales only where it has rows to return
        quantizer = _quantizer(module, case, rowwise=row or row_scaled, columnwise=col)
        x = _package.to_torch(_package.matrix(case.x))
        outputs: Outputs = {}
        with _portable_matmul():
            found = quantizer.quantize(x)
            if row:
                side = found.data, found.scale, canonical_nan(found.global_amax_row.numpy())
                if case.amax is not None:
                    side = _given(quantizer, x, case.amax)
                outputs |= _outputs(side, "", row_scaled)
            if col:
                side = found.data_t, found.scale_t, canonical_nan(found.global_amax_col.numpy())
                if case.amax_t is not None:
                    side = _given(quantizer, quantizer._apply_rht(x.t().contiguous()), case.amax_t)
                outputs |= _outputs(side, "_t", row_scaled)
        return outputs


def _refuse_foreign(case: Case) -> None:
    """ValueError for a case outside what the reference can be asked."""

    def refuse(reason: str) -> None:
        raise ValueError(f"te-reference cannot run case {case.id}: {reason}")

    if case.kind != "quantize" or case.rounding != "nearest-even":
        refuse(f"it quantizes to nearest; asked for {case.kind!r}, {case.rounding!r}")
    if unknown := sorted(set(case.fields) - set(_FIELDS)):
        refuse(f"it has no setting for {', '.join(unknown)}")
    if case.fields.get("e4m3_max", 448) != 448 and not case.fields.get("four_over_six"):
        refuse("it uses e4m3_max 256 only with 4over6")
    if case.rht_t is None:
        return
    transform = case.rht_t
    if transform.size != 16 or not transform.normalised or transform.sign_mask not in (0, _SIGN_MASK):
        refuse(f"it transforms 16 elements, normalised, sign mask 0 or {_SIGN_MASK:#x}; not {transform}")
    if case.x.dtype != ml_dtypes.bfloat16 or transform.round_to != "bfloat16":
        refuse("its transform stays in the input's dtype, and the kernels' is bfloat16")


def _quantizer(module: Any, case: Case, *, rowwise: bool, columnwise: bool) -> Any:
    settings = {_FIELDS[name]: value for name, value in case.fields.items() if value is not None}
    return module.NVFP4QuantizerRef(
        dtype=module.reference_utils.Fp4Formats.E2M1,
        rowwise=rowwise,
        columnwise=columnwise,
        quant_tile_shape=case.block,
        nvfp4_use_4over6=bool(case.fields.get("four_over_six")),
        with_rht=case.rht_t is not None,
        with_random_sign_mask=case.rht_t is not None and case.rht_t.sign_mask != 0,
        **settings,
    )


def _given(quantizer: Any, x: Any, amax: Any) -> tuple[Any, Any, Array]:
    """Data, scales and amax when the amax is given: the function that ``quantize`` calls with its own."""
    import torch

    given = np.array(amax, np.float32).reshape(-1)
    data, scale = quantizer._quantize_blockwise_reference(
        x,
        torch.from_numpy(given),
        quantizer.quant_tile_shape[1],
        quantizer.quant_tile_shape[0],
        pow_2_scales=False,
        row_scaled_nvfp4=quantizer.row_scaled_nvfp4,
        nvfp4_use_4over6=quantizer.nvfp4_use_4over6,
        nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
        nvfp4_4over6_err_mode=quantizer.nvfp4_4over6_err_mode,
        nvfp4_4over6_err_use_fast_math=quantizer.nvfp4_4over6_err_use_fast_math,
        eps=0.0,
    )
    return data, scale, given


def _outputs(side: tuple[Any, Any, Array], suffix: str, row_scaled: bool) -> Outputs:
    data, scale, amax = side
    return {
        f"packed{suffix}": _package.to_bytes(data),
        f"scales{suffix}": _package.to_scale_bytes(scale),
        f"amax{suffix}": amax if row_scaled else amax.reshape(()),
    }


BACKEND = TransformerEngineReference

"""Backend ``te-torch``: Transformer Engine's PyTorch ``NVFP4Quantizer`` and the kernels of its compiled library.

    quantizer = transformer_engine.pytorch.NVFP4Quantizer(rowwise=…, columnwise=…, …)
    tensor = quantizer.make_empty(shape, dtype=…, device="cuda")      every byte is then set to 0xA5
    quantizer.update_quantized(x, tensor)                             transformer_engine_torch.quantize
    transformer_engine_torch.nvfp4_quantize_with_amax(x, quantizer, amax, amax_t)        where a case gives amaxes

1x16 and 16x16 blocks, both directions, the Hadamard transform on the columnwise output, stochastic rounding,
row-scaled amaxes and 4over6 are arguments of the quantizer.  Stochastic calls draw from torch's CUDA generator,
whose seed and offset are set before each to those of the case.

On Blackwell everything runs.  Below compute capability 10.0 the same package quantizes in part, and what it does
not do it says by an exception, or by a line that the kernel prints, or by leaving its output alone: that becomes
:class:`~nvfp4hw.backends.base.Refused`, or, where the scales are right and only the codes are not computed,
an answer without codes, whose reason ``refused`` keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends import _gpu, _package
from nvfp4hw.backends.base import Case, Outputs, Refused
from nvfp4hw.rng import OFFSET_STEP
from nvfp4ref.streams import dispatch

Array = np.ndarray[Any, Any]

#: Elements of a tensor up to which a kernel is run that computes no codes and prints a line a thread to say so.
LOUD = 1 << 16
UNWRITTEN = 0xA5  # what outputs are filled with beforehand
SIGN_MASK = 0xD7E8  # the only sign vector that the quantizer has, beside none
#: Arithmetic field of a case -> the quantizer's argument that has to exist.
_FIELDS = {
    "row_scaled": "row_scaled_nvfp4",
    "four_over_six": "nvfp4_use_4over6",
    "four_over_six_fast_error": "nvfp4_use_4over6",
    "e4m3_max": "nvfp4_e4m3_max",
}
_SIDES = {
    "": ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
    "_t": ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
}


class TransformerEngine(_gpu.TorchBackend):
    """What both backends of the package share: the calls around a kernel, and what its words are worth."""

    preset = "te"
    distributions = ("transformer-engine", "torch")
    requirements = ("transformer-engine-torch",)
    versions = ("2.15", "3")
    least = (9, 0)  # what Hopper's build does not do, it says itself
    install = (
        "pip install --no-build-isolation 'transformer-engine[pytorch]' where torch has CUDA: docs/te-on-hopper.md"
    )

    def __init__(self) -> None:
        #: case id -> which outputs were left out of its answer, and why
        self.refused: dict[str, str] = {}

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Of the device; (10, 0) where there is none, so that a list of features says what the backend can."""
        try:
            return _gpu.torch_capability()
        except (ImportError, RuntimeError):
            return 10, 0

    @property
    def stochastic_rule(self) -> str:
        """The rule by which this device rounds stochastically."""
        return "sm100" if self.capability in _gpu.STOCHASTIC_CONVERSION else "te-fallback"

    def _too_loud(self, case: Case) -> bool:
        """Whether a nearest-even kernel would print for minutes, which those of an older device do."""
        return self.capability < (10, 0) and case.x.size > LOUD

    @contextmanager
    def _running(self, **variables: str) -> Iterator[list[str]]:
        """Around the package's kernels: its environment, its exceptions and what its kernels print."""
        import torch

        variables = {"NVTE_USE_FAST_MATH": "0", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "0", **variables}
        old = self.capability < (10, 0)
        with _gpu.environment(**variables), torch.no_grad():
            if not old:
                yield []
                _gpu.synchronize()
                return
            try:
                with _gpu.printed() as lines:
                    yield lines
                    _gpu.synchronize()
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                if isinstance(error, Refused):
                    raise
                words = " ".join(str(error).split())
                raise Refused(f"Transformer Engine on {_gpu.said(self.capability)}: {words}") from error

    def _written(self, case: Case, outputs: Outputs, lines: list[str]) -> Outputs:
        """The outputs that the kernels computed.

        Raises Refused when one of them was left alone.  Codes that a kernel did not compute, and said so, are
        left out: they are zeros.
        """
        if not lines:
            return outputs
        said = f"the kernel prints on {_gpu.said(self.capability)}: {'; '.join(lines)}"
        alone = [name for name, array in outputs.items() if _unwritten(array)]
        if alone:
            raise Refused(f"{said}; it leaves {', '.join(alone)} alone")
        zeros = [name for name, array in outputs.items() if name.startswith("packed") and not array.any()]
        if zeros:
            self.refused[case.id] = f"{', '.join(zeros)}: every byte 0; {said}"
        return {name: array for name, array in outputs.items() if name not in zeros}


def _unwritten(array: Array) -> bool:
    """Whether an output still is what it was filled with."""
    return bool(array.size) and bool((np.ascontiguousarray(array).reshape(-1).view(np.uint8) == UNWRITTEN).all())


def arguments(case: Case) -> dict[str, Any]:
    """The quantizer's arguments for a case; those that it leaves at their default are left out."""
    found: dict[str, Any] = {
        "rowwise": case.directions in ("row", "both"),
        "columnwise": case.directions in ("col", "both"),
    }
    if case.block == (16, 16):
        found["with_2d_quantization"] = True
    if case.rounding == "stochastic":
        found["stochastic_rounding"] = True
    if case.rht_t is not None:
        found |= {"with_rht": True, "with_post_rht_amax": True}
        found["with_random_sign_mask"] = case.rht_t.sign_mask != 0
    if case.fields.get("row_scaled"):
        found["row_scaled_nvfp4"] = True
    if case.fields.get("four_over_six"):
        found |= {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": case.fields["four_over_six"]}
        found["nvfp4_e4m3_max"] = case.fields.get("e4m3_max", 448)
    return found


def launch_of(case: Case, fused: bool) -> tuple[int, int]:
    """Seed and offset that the generator has to have before the call, from the words that the case expects.

    Raises Refused when the words are not those that the package draws for this tensor.
    """
    both, rht = case.directions == "both", case.rht_t is not None
    launches = set()
    for state, axis in _states(case).items():
        philox = case.data.get(state)
        if not isinstance(philox, nv.Philox):
            raise Refused("the quantizer takes no random numbers: it draws 32-bit words from torch's generator")
        how = {"dtype": case.x.dtype.name, "block": case.block}
        drawn = dispatch(case.x.shape, axis, both=both, rht=rht, **how)
        if rht and (not fused or drawn != "fused-rht"):  # two launches, each of one direction
            drawn = "unfused-rht" if axis == 0 else dispatch(case.x.shape, axis, **how)
        together = both and (not rht or drawn == "fused-rht")
        if philox.kernel not in ("auto", drawn):
            raise Refused(
                f"the package quantizes this tensor with its kernel {drawn!r}; the case asks for {philox.kernel!r}"
            )
        if philox.both != together and not (rht and philox.kernel == "auto"):
            raise Refused(
                f"the launch makes {'both outputs' if together else 'one output'}; the case asks for {philox}"
            )
        launches.add((philox.seed, philox.offset - (OFFSET_STEP if drawn == "unfused-rht" else 0)))
    launch = launches.pop()
    if launches or launch[1] < 0:
        raise Refused(
            f"one call has one seed and offset, and an unfused transform draws its columnwise output {OFFSET_STEP} on; "
            f"the case asks for {launch} and {launches}"
        )
    return launch


def _states(case: Case) -> dict[str, int]:
    """Where a case keeps the generator of each direction that it asks for, and that direction's axis."""
    return {"row": {"rng": -1}, "col": {"rng_t": 0}, "both": {"rng": -1, "rng_t": 0}}[case.directions]


def seed(launch: tuple[int, int]) -> None:
    """Set torch's CUDA generator to a seed and an offset."""
    generator = _gpu.generator()
    generator.manual_seed(launch[0])
    generator.set_offset(launch[1])


def side(tensor: Any, suffix: str, shape: tuple[int, int], row_scaled: bool = False) -> Outputs:
    """Codes, trimmed scales and amax of one direction; shape is that of x."""
    data, scales, amax = (getattr(tensor, name) for name in _SIDES[suffix])
    rows, columns = shape if not suffix else shape[::-1]
    found = _package.to_bytes(scales)
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        compact = nv.layout.unswizzle(found, rows, columns // 16)
    else:
        compact = np.ascontiguousarray(found[:rows, : columns // 16])
    value = _gpu.to_numpy(amax)
    return {
        f"packed{suffix}": _package.to_bytes(data).reshape(rows, columns // 2),
        f"scales{suffix}": compact,
        f"amax{suffix}": value if row_scaled else value.reshape(()),
    }


class TransformerEngineTorch(TransformerEngine):
    """``NVFP4Quantizer`` on the cases of the suite."""

    name = "te-torch"
    uses = (
        "transformer_engine.pytorch:NVFP4Quantizer",
        "transformer_engine_torch:nvfp4_quantize_with_amax",
    )

    @cached_property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        """What this version's quantizer has arguments for; stochastic rounding where the device has its rule."""
        found = {"quantize", "float32", "float16", "bfloat16", "1x16", "16x16", "row", "col", "rht", "given-amax"}
        if self.stochastic_rule == "sm100":
            found.add("stochastic")
        try:
            known = set(inspect.signature(self._objects()[0].__init__).parameters)
        except RuntimeError:
            known = set(_FIELDS.values())
        return frozenset(found | {field for field, argument in _FIELDS.items() if argument in known})

    def quantize(self, case: Case) -> Outputs:
        """packed, scales and amax of the directions asked for.

        Raises Refused for what the package, or its build for this device, does not do; RuntimeError when the
        package is not available.
        """
        quantizer_class, with_amax = self._objects()
        _refuse_foreign(case)
        if case.rounding != "stochastic" and self._too_loud(case):
            raise Refused(
                f"{_gpu.said(self.capability)} has no nearest-even conversion, and its kernels print that once a thread"
            )
        x = _gpu.to_gpu(_package.matrix(case.x))
        with self._running(**_variables(case)) as lines:
            quantizer = quantizer_class(**arguments(case))
            if case.rounding == "stochastic":
                seed(launch_of(case, fused=(10, 0) <= self.capability <= (11, 0)))
            if case.amax is not None or case.amax_t is not None:
                row, column = (_given(amax) for amax in (case.amax, case.amax_t))
                tensor = with_amax(x, quantizer, row, column)
            else:
                tensor = quantizer.make_empty(tuple(x.shape), dtype=x.dtype, device=_gpu.DEVICE)
                _fill(tensor)
                quantizer.update_quantized(x, tensor)
        outputs: Outputs = {}
        for suffix in {"row": ("",), "col": ("_t",), "both": ("", "_t")}[case.directions]:
            outputs |= side(tensor, suffix, case.x.shape, bool(case.fields.get("row_scaled")))
        return self._written(case, outputs, lines)


def _variables(case: Case) -> dict[str, str]:
    fast = case.fields.get("four_over_six_fast_error")
    return {"NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "1"} if fast else {}


def _given(amax: Any) -> Any:
    return _gpu.to_gpu(np.array(0 if amax is None else amax, np.float32).reshape(1))


def _fill(tensor: Any) -> None:
    """Every byte of a tensor's outputs, so that what a kernel does not write can be told."""
    import torch

    for names in _SIDES.values():
        for name in names:
            output = getattr(tensor, name)
            if output is not None:
                output.view(torch.uint8).fill_(UNWRITTEN)


def _refuse_foreign(case: Case) -> None:
    """Refused for what the package's own checks refuse on every device."""
    if any(n % 16 for n in case.x.shape):
        raise Refused(
            f"Transformer Engine quantizes matrices whose two dimensions are multiples of 16; got {case.x.shape}"
        )
    transform = case.rht_t
    if transform is not None:
        if transform.size != 16 or not transform.normalised or transform.sign_mask not in (0, SIGN_MASK):
            raise Refused(
                f"the quantizer transforms 16 elements with the sign mask {SIGN_MASK:#x} or none; not {transform}"
            )
        if case.x.dtype.name != "bfloat16":
            raise Refused(f"the quantizer transforms bfloat16 only; got {case.x.dtype.name}")
    if (case.amax is not None or case.amax_t is not None) and case.fields.get("row_scaled"):
        raise Refused("the quantizer takes one amax for a tensor, not one for each row")


BACKEND = TransformerEngineTorch

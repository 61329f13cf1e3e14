"""Backend ``te-vectors``: Transformer Engine's own kernels, run once on an H200 and replayed here.

Two recordings: ``te-kernels-h200`` (the kernels of 2.20.0.dev0 compiled for sm_90a, Hopper's missing
instructions replaced by NVIDIA's header) and ``te-binary-h200`` (the shipped 2.20.2 package, nothing
replaced).  The repository has both whole in ``vectors/``; the wheel carries a subset in ``nvfp4hw/vectors``.
Each recorded call becomes one or more :class:`~nvfp4hw.backends.base.Case`; ``quantize`` returns what the
kernel wrote, cut to the region it owns.

Outputs beside the usual ones, all as bit patterns: ``scaled`` (the float32 handed to the conversion),
``err46`` (R, C/16, 2), ``deq_f32`` / ``deq_bf16`` / ``deq_f16``, ``rht_t`` (bfloat16 of the transform),
``scales_swizzled``, ``sums`` (raw tensor-core accumulators) and the outputs of the recipe kernels.

Stochastic calls are replayed from the generator's state; both recordings have the 8-bit rule of Transformer
Engine's software fallback (``stochastic="te-fallback"``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref import partial_cast
from nvfp4ref.fp32 import SIXTH

Array = np.ndarray[Any, Any]
#: One replayed call: the case, and the function that reads its recorded outputs.
Replay = tuple[Case, Callable[[], Outputs]]

#: Recorded outputs that are not replayed, and why; every other recorded array is compared.
NOT_REPLAYED = {
    "rcp_ulp": "a measurement of rcp.approx.ftz, not a rule",
    "bias": "a column sum beside the quantizer, no part of NVFP4",
    "noop": "outputs of a call that was told to write nothing",
    "rn.* codes": "all zero: this GPU does not compute nearest-even codes, and says so on its console only",
}

_DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "b": ml_dtypes.bfloat16,
    "h": np.float16,
    "f": np.float32,
}
#: Low halves of the E4M3 probe.  Only the first, zero, is documented; every other half gives the same six
#: columns, because all E4M3 midpoints are float32 values with a zero low half.
_E4M3_LOW_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


class _Arrays:
    """The arrays of one folder, read when first asked for."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Array]] = {}

    def get(self, file: str, key: str) -> Array:
        if file not in self._files:
            with (self._folder / f"{file}.npz").open("rb") as stream, np.load(stream) as arrays:
                self._files[file] = {name: arrays[name] for name in arrays.files}
        return self._files[file][key]


def _index(folder: Any) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    return index


def _float32(bits: str | int) -> np.float32:
    """The float32 with the given bit pattern (hexadecimal text or integer)."""
    value = int(bits, 16) if isinstance(bits, str) else int(bits)
    return np.uint32(value).view(np.float32)


def _trim(scales: Array, rows: int, columns: int) -> Array:
    return scales[:rows, : columns // 16]


# ---- te-kernels-h200 ---------------------------------------------------------------------------------------


def _kernel_input(arrays: _Arrays, call: Mapping[str, Any]) -> Array:
    bits = arrays.get("inputs", call["input"])
    return bits.view(_DTYPES[call["dtype"]]).reshape(call["shape"])


def _four_over_six(flags: Mapping[str, str]) -> dict[str, Any]:
    mode = {"1": "MAE", "2": "MSE"}.get(flags.get("4o6", "0"))
    if mode is None:
        return {}
    return {
        "four_over_six": mode,
        "four_over_six_fast_error": flags.get("efast", "0") == "1",
        "e4m3_max": int(flags.get("e4m3", "448")),
    }


def _kernel_amaxes(call: Mapping[str, Any]) -> tuple[Any, Any]:
    """The amax values given in place of the true one, for the rowwise and the columnwise output."""
    flags = call["flags"]
    if "amax" not in flags:
        return None, None
    row = _float32(flags["amax"])
    one_for_both = call["kernel"].startswith("block_scaled_1d") or "amaxc" not in flags
    return row, row if one_for_both else _float32(flags["amaxc"])


#: Family of the recording -> the kernel whose random words it used.
_KERNELS = {"tuned": "tuned-1d", "twod": "2d", "vb": "vector-blockwise"}


def _kernel_states(call: Mapping[str, Any]) -> dict[str, nv.Philox]:
    """The generators of both directions."""
    flags, family = call["flags"], call["family"]
    seed, offset = int(flags["seed"], 0), int(flags["off"], 0)
    if family == "rht":  # two launches of a rowwise kernel, the second one on the transform
        columnwise = nv.Philox(int(flags["seedc"], 0), int(flags["offc"], 0), "unfused-rht")
        return {"rng": nv.Philox(seed, offset, "tuned-1d"), "rng_t": columnwise}
    philox = nv.Philox(seed, offset, _KERNELS[family], both=flags["dir"] == "both")
    # a rowwise call records the columnwise amax all the same; the tuned kernel makes that output only beside the other
    return {"rng": philox, "rng_t": replace(philox, both=True) if family == "tuned" else philox}


def _kernel_quantize(name: str, call: Mapping[str, Any], arrays: _Arrays) -> Replay:
    flags, family = call["flags"], call["family"]
    x = _kernel_input(arrays, call)
    amax, amax_t = _kernel_amaxes(call)
    fields: dict[str, Any] = _four_over_six(flags)
    if flags.get("rowsc") == "1":
        fields["row_scaled"] = True
    rht_t = nv.RHT(sign_mask=int(flags["mask"])) if flags.get("op") == "rht" else None
    stochastic = flags.get("sr") == "1"
    if stochastic:
        fields["stochastic"] = "te-fallback"
    fast = flags.get("fast") == "1" and family in ("tuned", "rht")
    case = Case(
        id=f"te-kernels/{name}",
        family=f"te-kernels/{family}",
        x=x,
        rounding="stochastic" if stochastic else "nearest-even",
        data=_kernel_states(call) if stochastic else {},
        block=(16, 16) if flags.get("q2d") == "1" else (1, 16),
        directions=flags["dir"],
        rht_t=rht_t,
        amax=amax,
        amax_t=amax_t,
        fields=fields,
        arithmetic="te-fast-math" if fast else None,
        hunts=f"bits of {call['kernel']}",
    )
    return case, lambda: _kernel_outputs(call, arrays)


def _kernel_outputs(call: Mapping[str, Any], arrays: _Arrays) -> Outputs:
    rows, columns = call["shape"]
    recorded = {name: arrays.get(call["family"], key) for name, key in call["outputs"].items()}
    out: Outputs = {}
    swizzled = call["flags"].get("swz") == "1"
    for name, array in recorded.items():
        if name in ("q", "qt", "q_rht"):
            out["packed" if name == "q" else "packed_t"] = array
        elif name in ("s", "st", "s_rht"):
            side, shape = ("scales", (rows, columns)) if name == "s" else ("scales_t", (columns, rows))
            if swizzled:
                out["scales_swizzled" + side[6:]] = array
            else:
                out[side] = _trim(array, *shape)
        elif name == "amax":
            out.update(_kernel_amax_outputs(call, array))
        elif name in ("s_swz", "st_swz"):
            out["scales_swizzled" if name == "s_swz" else "scales_swizzled_t"] = array
        elif name in ("amax_rows", "amax_cols"):
            out["amax" if name == "amax_rows" else "amax_t"] = array
        else:
            out[name] = array
    return out


def _kernel_amax_outputs(call: Mapping[str, Any], pair: Array) -> Outputs:
    """Both amaxes; of a given pair only those that the kernel read: the vector-blockwise one reads the first."""
    if "amaxc" in call["flags"] and call["kernel"].startswith("block_scaled_1d"):
        return {"amax": pair[0]}
    return {"amax": pair[0], "amax_t": pair[1]}


def _kernel_amax_only(name: str, call: Mapping[str, Any], arrays: _Arrays) -> Replay:
    case = Case(
        id=f"te-kernels/{name}",
        family="te-kernels/amax",
        x=_kernel_input(arrays, call),
        kind="amax",
        hunts="amax that is not max(abs(x)) with NaN ignored",
    )
    return case, lambda: {"amax": arrays.get("amax", call["outputs"]["amax"]).reshape(())}


def _kernel_sums(name: str, call: Mapping[str, Any], arrays: _Arrays) -> Replay:
    x = _kernel_input(arrays, call)
    tiles = x.reshape(-1, 16, 16)
    if call["flags"]["tr"] == "1":
        tiles = tiles.transpose(0, 2, 1)
    case = Case(
        id=f"te-kernels/{name}",
        family="te-kernels/probe",
        x=np.ascontiguousarray(tiles).reshape(-1, 16),
        kind="hadamard-sums",
        rht_t=nv.RHT(sign_mask=int(call["flags"]["mask"])),
        hunts="a sum of 16 products that is not the tensor core's",
    )
    return case, lambda: {"sums": arrays.get("probe", call["outputs"]["acc"]).reshape(-1, 16)}


def _kernel_e4m3(name: str, call: Mapping[str, Any], arrays: _Arrays) -> Replay:
    upper = np.arange(65536, dtype=np.uint32)[:, None] << np.uint32(16)
    bits = upper | np.array(_E4M3_LOW_HALVES, np.uint32)
    case = Case(
        id=f"te-kernels/{name}",
        family="te-kernels/probe",
        x=bits.view(np.float32).reshape(-1),
        kind="e4m3",
        hunts="an E4M3 conversion that is not the hardware's",
    )
    return case, lambda: {"bytes": arrays.get("probe", call["outputs"]["e4m3"]).reshape(-1)}


def _kernel_recipe(name: str, call: Mapping[str, Any], arrays: _Arrays) -> Replay:
    rows, columns = call["shape"]
    flags = call["flags"]
    start = int(flags.get("start", "0"))
    case = Case(
        id=f"te-kernels/{name}",
        family="te-kernels/recipe",
        x=_kernel_input(arrays, call),
        kind="recipe",
        block=(16, 16),
        data={
            "amax": _float32(flags["amax"]),
            "start": start,
            "length": int(flags.get("len", str(rows * columns))),
        },
        hunts="bits of the partial-cast helpers for sharded weights",
    )

    def outputs() -> Outputs:
        out = {o: arrays.get("recipe", key) for o, key in call["outputs"].items()}
        for scales in ("fused_target_scale", "expand_scale"):
            out[scales] = _trim(out[scales], rows, columns)
        out["scale_transpose"] = _trim(out["scale_transpose"], columns, rows)
        return out

    return case, outputs


def _kernel_replays(folder: Any) -> Iterator[Replay]:
    arrays = _Arrays(folder)
    for name, call in _index(folder)["cases"].items():
        operation = call["flags"].get("op", "quantize")
        if operation == "probe_rcp":
            continue
        make = {
            "quantize": _kernel_quantize,
            "rht": _kernel_quantize,
            "amaxonly": _kernel_amax_only,
            "probe_rht": _kernel_sums,
            "probe_e4m3": _kernel_e4m3,
            "recipe": _kernel_recipe,
        }[operation]
        yield make(name, call, arrays)


# ---- te-binary-h200 ----------------------------------------------------------------------------------------


class _Binary:
    """The recording of the shipped package: its index and its arrays by ``case|output``."""

    def __init__(self, folder: Any) -> None:
        self.index = _index(folder)
        self._keys: dict[str, str] = self.index["arrays"]
        self._arrays = _Arrays(folder)

    def get(self, name: str) -> Array:
        return self._arrays.get("arrays", self._keys[name])

    def has(self, name: str) -> bool:
        return name in self._keys

    def input(self, name: str) -> Array:
        dtype = _DTYPES[name.removeprefix("g:")[0]]
        return self.get(f"in|{name}").view(dtype)

    @cached_property
    def block_amaxes(self) -> Array:
        """The block amaxes given to the scale kernel, which the recording left out: (568, 16) float32.

        Six calls with six tensor amaxes had the same input.  For each element a float32 near one of the six
        quotients, or one of the special values known from the other recipe call, must give all six recorded
        scales; nearly always only one does.  If none did, the first candidate would show the difference.
        """
        names = [name for name in self.index["cases"] if name.startswith("recipe.block.")]
        amaxes = np.array([_float32(self.index["cases"][name]["global_amax"]) for name in names], np.float32)
        scales = np.stack([self.get(f"{name}|per_block").view(np.float32).reshape(-1) for name in names])
        with np.errstate(all="ignore"):
            quotients = scales / (partial_cast.global_scale(amaxes) * SIXTH)[:, None]
        near = quotients.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)[:, None]
        known = self.get("recipe.global_scale|global_amax").view(np.float32)[:15, None]
        candidates = np.concatenate(
            [near.reshape(-1, scales.shape[1]).view(np.float32), known.repeat(scales.shape[1], 1)]
        )
        fits = np.ones(candidates.shape, bool)
        for amax, scale in zip(amaxes, scales, strict=True):
            fits &= partial_cast.block_scale(candidates, amax).view(np.uint32) == scale.view(np.uint32)
        return np.take_along_axis(candidates, fits.argmax(0)[None], 0).reshape(568, 16)


def _binary_quantize(name: str, call: Mapping[str, Any], binary: _Binary) -> Replay | None:
    if call.get("noop") == 1:
        return None
    arguments = call.get("args", {})
    x = binary.input(call["input"])
    sides = [side for side in ("", "_t") if binary.has(f"{name}|s{side[1:]}")]
    rht_t = None
    if arguments.get("with_rht"):
        rht_t = nv.RHT(sign_mask=0xD7E8 if arguments.get("with_random_sign_mask", True) else 0)
    given: list[Any] = [_float32(bits) for bits in call.get("amax_in", ())] or [None, None]
    stochastic = bool(call.get("sr") or arguments.get("stochastic_rounding"))
    fields: dict[str, Any] = {"row_scaled": True} if call.get("rowsc") else {}
    if stochastic:
        fields["stochastic"] = "te-fallback"
    case = Case(
        id=f"te-binary/{name}",
        family=f"te-binary/{call['stage']}",
        x=x,
        block=(16, 16) if call.get("q2d") or arguments.get("with_2d_quantization") else (1, 16),
        directions="both" if len(sides) == 2 else {"": "row", "_t": "col"}[sides[0]],
        rounding="stochastic" if stochastic else "nearest-even",
        rht_t=rht_t,
        amax=given[0],
        amax_t=given[1],
        fields=fields,
        data=_binary_states(call, both=len(sides) == 2, rht=rht_t is not None) if stochastic else {},
        hunts=f"bits of {call['api']}",
    )
    swizzled = bool(call.get("swizzled") or call.get("swz"))
    return case, lambda: _binary_outputs(name, binary, x.shape, sides, swizzled, codes=stochastic)


def _binary_states(call: Mapping[str, Any], both: bool, rht: bool) -> dict[str, nv.Philox]:
    """The generators of both directions; the unfused transform draws a second state, 1024 calls on."""
    seed, offset = int(call.get("seed", "0"), 0), int(call.get("offset", "0"), 0)
    if rht:
        return {"rng": nv.Philox(seed, offset), "rng_t": nv.Philox(seed, offset + 1024, "unfused-rht")}
    philox = nv.Philox(seed, offset, both=both)
    return {"rng": philox, "rng_t": philox}


def _binary_outputs(
    name: str,
    binary: _Binary,
    shape: tuple[int, ...],
    sides: list[str],
    swizzled: bool = False,
    codes: bool = True,
) -> Outputs:
    """Codes, scales and amaxes; the nearest-even codes are all zero on this GPU and were not kept."""
    out: Outputs = {}
    for side in sides:
        rows, columns = shape if not side else shape[::-1]
        scales = binary.get(f"{name}|s{side[1:]}")
        if swizzled:
            # padding that the kernel left alone is not its output: undo the layout, keep the owned region
            scales = nv.layout.unswizzle(scales, rows, columns // 16)
        out[f"scales{side}"] = _trim(scales, rows, columns)
        if codes:
            out[f"packed{side}"] = binary.get(f"{name}|q{side[1:]}")
        if binary.has(f"{name}|amax{side}"):
            amax = binary.get(f"{name}|amax{side}").view(np.float32)
            out[f"amax{side}"] = amax.reshape(()) if amax.size == 1 else amax
    return out


def _stochastic_rowwise(ident: str, call: Mapping[str, Any], x: Array, offset: int, both: bool) -> Case:
    """A stochastic rowwise case of the package that is no plain call."""
    philox = nv.Philox(int(call["seed"], 0), offset, both=both)
    return Case(
        id=f"te-binary/{ident}",
        family=f"te-binary/{call['stage']}",
        x=x,
        rounding="stochastic",
        fields={"stochastic": "te-fallback"},
        data={"rng": philox, "rng_t": philox},
        hunts=f"random words of {call['api']}",
    )


def _binary_two_in_a_row(name: str, call: Mapping[str, Any], binary: _Binary) -> Iterator[Replay]:
    x = binary.input(call["input"])
    for output, offset in (("q", call["offset"]), ("q2", call["offset_mid"])):
        case = _stochastic_rowwise(f"{name}.{output}", call, x, int(offset), both=True)
        yield case, lambda output=output: {"packed": binary.get(f"{name}|{output}")}  # type: ignore[misc]


def _binary_graph(name: str, call: Mapping[str, Any], binary: _Binary) -> Iterator[Replay]:
    x = binary.input(call["input"])
    for replay, offset in enumerate(call["offsets"]):
        case = _stochastic_rowwise(f"{name}.{replay}", call, x, int(offset), both=True)
        yield (
            case,
            lambda replay=replay: {  # type: ignore[misc]
                "packed": binary.get(f"{name}|q{replay}"),
                "scales": _trim(binary.get(f"{name}|s{replay}"), *x.shape),
            },
        )


def _binary_hadamard(name: str, call: Mapping[str, Any], binary: _Binary) -> Replay:
    case = Case(
        id=f"te-binary/{name}",
        family="te-binary/rht",
        x=binary.input(call["input"]),
        kind="hadamard",
        rht_t=nv.RHT(sign_mask=call["mask"]),
        hunts="a transform that is not the tensor core's",
    )
    return case, lambda: {"rht_t": binary.get(f"{name}|rht_t")}


def _dequantize_case(name: str, data: Mapping[str, Any], output: str) -> Case:
    return Case(
        id=f"te-binary/{name}",
        family="te-binary/deq",
        x=data["packed"],
        kind="dequantize",
        fields={"e4m3_max": 256} if data.get("e4m3_max") == 256 else {},
        data=data,
        hunts=f"order of the products in dequantize, {output}",
    )


def _binary_dequantize(binary: _Binary) -> Iterator[Replay]:
    """Dequantize of given codes, scales and amax, including the calls that only ``arrays`` lists."""
    amaxes = {
        name.split(".")[1]: call["amax"]
        for name, call in binary.index["cases"].items()
        if name.startswith("deq.") and "amax" in call
    }
    names = {key.split("|")[0] for key in binary.index["arrays"] if key.startswith("deq.") and "|" in key}
    for name in sorted(names):
        parts = name.split(".")
        if parts[1] == "rt":
            yield from _binary_round_trip(name, binary)
            continue
        maximum = 256 if "e256" in parts else 448
        amax = (
            binary.get(f"{name}|amax").view(np.float32)
            if binary.has(f"{name}|amax")
            else _float32(amaxes[parts[1]]).reshape(1)
        )
        kind = parts[2] if parts[2] in ("f32", "bf16", "f16") else "f32"
        scales = binary.get("deq.scales")  # one buffer: each call read it in the layout that it was told
        data = {
            "packed": binary.get("deq.codes"),
            "scales": nv.layout.unswizzle(scales, 128, 2) if "swz1" in parts else _trim(scales, 128, 32),
            "amax": amax if amax.size > 1 else amax.reshape(()),
            "e4m3_max": maximum,
        }
        yield (
            _dequantize_case(name, data, kind),
            lambda name=name, kind=kind: {f"deq_{kind}": binary.get(f"{name}|y")},  # type: ignore[misc]
        )


def _binary_round_trip(name: str, binary: _Binary) -> Iterator[Replay]:
    """Quantize with stochastic rounding, then dequantize: the scales against x, the values against the
    codes."""
    data = {
        "packed": binary.get(f"{name}|q"),
        "scales": binary.get(f"{name}|s"),
        "amax": binary.get(f"{name}|amax").view(np.float32).reshape(()),
    }
    outputs = {"deq_f32": "y32", "deq_f16": "y16", "deq_bf16": "yb"}
    yield (
        _dequantize_case(name, data, "all three dtypes"),
        lambda: {ours: binary.get(f"{name}|{theirs}") for ours, theirs in outputs.items()},
    )
    call = binary.index["cases"].get(name)
    if call is None or not binary.has(f"in|{call['input']}"):
        return
    x = binary.input(call["input"])
    case = _stochastic_rowwise(f"{name}.quantize", call, x, int(call["offset"]), both=True)
    yield case, lambda: _binary_outputs(name, binary, x.shape, [""])


def _binary_recipe(name: str, call: Mapping[str, Any], binary: _Binary) -> Replay:
    def get(output: str) -> Array:
        array = binary.get(f"{name}|{output}")
        return array.view(np.float32) if array.dtype == np.uint32 else array

    hunts = "bits of the partial-cast helpers for sharded weights"
    kind, family, ident = "recipe", "te-binary/recipe", f"te-binary/{name}"
    if name == "recipe.global_scale":
        case = Case(id=ident, family=family, kind=kind, x=get("global_amax"), data={}, hunts=hunts)
        return case, lambda: {"global_scales": get("global_scale")}
    if name.startswith("recipe.block."):
        block_amax = binary.block_amaxes
        data = {"amax": _float32(call["global_amax"]), "block_amax": block_amax}
        case = Case(id=ident, family=family, kind=kind, x=block_amax, data=data, hunts=hunts)
        return case, lambda: {
            "per_block_scale": get("per_block"),
            "scale_bytes": get("fp8_first_rows"),
            "amax": get("target_amax").reshape(()),
        }
    x = binary.input(call["input"])
    data = {"start": call["start"], "length": call["len"]}
    case = Case(id=ident, family=family, kind=kind, x=x, block=(16, 16), data=data, hunts=hunts)
    return case, lambda: {
        "block_amax": get("full"),
        "partial_block_amax": get("part"),
        "tensor_amax": get("amax").reshape(()),
    }


def _binary_swizzle(name: str, binary: _Binary) -> Replay:
    """The separate swizzle kernel: scales with padding in, zeroed padding out."""
    rows, columns = (int(n) for n in name.split(".")[1].split("x"))
    scales = _trim(binary.get(f"{name}|s"), rows, columns)
    case = Case(
        id=f"te-binary/{name}",
        family="te-binary/misc",
        x=scales,
        kind="swizzle",
        hunts="the 128x4 scale layout",
    )
    return case, lambda: {"scales_swizzled": binary.get(f"{name}|s_swz")}


def _binary_replays(folder: Any) -> Iterator[Replay]:
    binary = _Binary(folder)
    yield from _binary_dequantize(binary)
    for name, call in binary.index["cases"].items():
        replay: Replay | None = None
        if name == "graph":
            yield from _binary_graph(name, call, binary)
        elif name == "api.two_in_a_row":
            yield from _binary_two_in_a_row(name, call, binary)
        elif name.startswith("deq.") or name == "te.Linear":
            continue  # yielded above; a training run without recorded bits
        elif call["api"] == "nvte_hadamard_transform":
            replay = _binary_hadamard(name, call, binary)
        elif name.startswith("recipe."):
            replay = _binary_recipe(name, call, binary)
        elif name.startswith("swizzle."):
            replay = _binary_swizzle(name, binary)
        else:
            replay = _binary_quantize(name, call, binary)
        if replay is not None:
            yield replay


# ---- the backend -------------------------------------------------------------------------------------------


def embedded_vectors() -> Any:
    """The folder of the subset that the package carries."""
    return resources.files("nvfp4hw").joinpath("vectors")


def repository_vectors() -> Path | None:
    """The folder of the whole recordings when this package lies in its repository, else None."""
    folder = Path(__file__).resolve().parents[2] / "vectors"
    return folder if (folder / "te-kernels-h200" / "index.json").is_file() else None


class TEVectors:
    """Replay of the recorded kernels: the embedded subset for "quick", else the whole where it is present."""

    name = "te-vectors"
    preset = "te"
    features = frozenset(
        ("quantize", "amax", "hadamard", "hadamard-sums", "dequantize", "swizzle", "recipe", "e4m3")
        + ("float32", "float16", "bfloat16", "uint8", "1x16", "16x16", "row", "col", "rht", "given-amax")
        + ("stochastic", "row_scaled", "four_over_six", "four_over_six_fast_error", "e4m3_max")
    )

    def __init__(self, folder: Any = None) -> None:
        self._folder = folder
        self._recorded: dict[str, Callable[[], Outputs]] = {}

    def folder(self, suite: str) -> Any:
        """The folder a suite reads."""
        if self._folder is not None:
            return self._folder
        return embedded_vectors() if suite == "quick" else repository_vectors() or embedded_vectors()

    def availability(self) -> str | None:
        if self.folder("quick").joinpath("te-kernels-h200", "index.json").is_file():
            return None
        return "the recorded vectors are not in this installation: reinstall nvfp4ref"

    def version(self) -> str:
        return "Transformer Engine 2.20.0.dev0 kernels and 2.20.2 package, recorded on an H200 (sm_90)"

    def cases(self, suite: str) -> Iterable[Case]:
        folder = self.folder(suite)
        self._recorded = {}
        for replays in (
            _kernel_replays(folder.joinpath("te-kernels-h200")),
            _binary_replays(folder.joinpath("te-binary-h200")),
        ):
            for case, outputs in replays:
                self._recorded[case.id] = outputs
                yield case

    def quantize(self, case: Case) -> Outputs:
        return self._recorded[case.id]()


BACKEND = TEVectors

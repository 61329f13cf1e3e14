"""Checkpoints: which tensors of a file, a folder or an index are NVFP4, and where their bytes lie.

Nothing but headers is read here.  A tensor is known by the names, types and shapes of its arrays:

    ModelOpt            P.weight U8, P.weight_scale F8_E4M3, P.weight_scale_2 F32 (amax/2688), P.input_scale
    ModelOpt experts    P.X, P.X_weight_scale, P.X_weight_scale_2, P.X_input_scale
    ComfyUI             as ModelOpt beside P.comfy_quant; scales swizzled, even element in the high nibble
    compressed-tensors  P.weight_packed, P.weight_scale, P.weight_global_scale (2688/amax), P.input_global_scale
    torchao             P._weight_qdata, P._weight_scale, P._weight_per_tensor_scale (amax/2688)
    Transformer Engine  N.rowwise_data, N.rowwise_scale_inv, N.amax_rowwise, and columnwise; `_` before them too
    dumps               N.packed, N.scales, N.amax, and …_t; with the meta of a dump its global_scale too
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4ref import layout
from nvfp4ref.container import DumpError, PathLike, blame, foreign, open_archive, shown
from nvfp4ref.dump import Dump, iter_dumps

Array = np.ndarray[Any, Any]

_FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_CODES = ("U8", "I8", "F4")
_SCALES = ("F8_E4M3", "U8", "I8")
_COLUMNWISE = " (columnwise)"
_INDEX = ".safetensors.index.json"
_KNOWN = ".safetensors, .npz, a folder of .safetensors files, or model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """An array at rest: its data are read when asked for.

    dtype is the safetensors name (U8, F8_E4M3, F32, …).  ``held`` has the data of an array that was in memory
    anyway.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int = 0
    held: Array | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it is a plain floating-point array, which the original of a tensor is."""
        return self.dtype in _FLOATS

    def bytes(self, start: int, stop: int) -> Array:
        """uint8 (stop - start,): that range of its bytes.  Raises DumpError when the file is shorter."""
        if self.held is not None:
            return np.ascontiguousarray(self.held).reshape(-1).view(np.uint8)[start:stop]
        with blame(self.path), blame(shown(self.name)), foreign("cannot be read"), open(self.path, "rb") as file:
            file.seek(self.offset + start)
            found = np.fromfile(file, np.uint8, stop - start)
            if found.size != stop - start:
                raise DumpError("is cut short: the file changed while it was read")
            return found

    def strip(self, first: int, shape: tuple[int, int], start: int, stop: int) -> Array:
        """uint8 (height, stop - start): columns of a (height, width) matrix of bytes that begins at byte `first`.

        One row at a time, so that no more than the result is held.  Raises DumpError as ``bytes`` does.
        """
        height, width = shape
        if (start, stop) == (0, width) or self.held is not None:
            return self.bytes(first, first + height * width).reshape(shape)[:, start:stop]
        strip = np.empty((height, stop - start), np.uint8)
        with blame(self.path), blame(shown(self.name)), foreign("cannot be read"), open(self.path, "rb") as file:
            for index, row in enumerate(strip):
                file.seek(self.offset + first + index * width + start)
                if file.readinto(row.data) != row.size:
                    raise DumpError("is cut short: the file changed while it was read")
        return strip

    def values(self, start: int = 0, stop: int | None = None) -> Array:
        """Elements start to stop of the flat array, in the type they are stored in (a float type)."""
        dtype = np.dtype(_FLOATS[self.dtype])
        stop = self.size if stop is None else stop
        return self.bytes(start * dtype.itemsize, stop * dtype.itemsize).view(dtype)


@dataclass(frozen=True)
class Family:
    """A way to store NVFP4 tensors: names as suffixes of a stem, and conventions.

    form: what the array beside the scales is: "decode" (amax/2688), "encode" (2688/amax) or "amax".
    layout: order of the scales: "compact", "padded" (compact too is good then) or "swizzled".
    """

    name: str
    packed: str
    scales: str
    whole: str
    form: str
    inputs: str = ""  # of the activations; a suffix of the stem, or of its parent when it starts with a dot
    layout: str = "compact"
    packing: str = "low-nibble-first"
    one_level: bool = False  # a tensor may do without a global scale
    weights: bool = True  # holds weights, whose size is known roughly


_TE = ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")
_TE_T = ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")


def _any_tensor(name: str, before: str, parts: Sequence[str]) -> Family:
    """A family that keeps the amax and pads its scales, and whose tensors may be anything."""
    packed, scales, amax = (before + part for part in parts)
    return Family(name, packed, scales, amax, "amax", layout="padded", weights=False)


MODELOPT = Family("modelopt", "", "_scale", "_scale_2", "decode", ".input_scale")
_MODELOPT_EXPERTS = Family("modelopt", "", "_weight_scale", "_weight_scale_2", "decode", "_input_scale")
COMFYUI = Family(
    "comfyui", "", "_scale", "_scale_2", "decode", ".input_scale", layout="swizzled", packing="high-nibble-first"
)
COMPRESSED_TENSORS = Family("compressed-tensors", "_packed", "_scale", "_global_scale", "encode", ".input_global_scale")
TORCHAO = Family("torchao", "_qdata", "_scale", "_per_tensor_scale", "decode", "_act_per_tensor_scale", one_level=True)

#: in this order: a name belongs to the first family that takes it
FAMILIES: tuple[Family, ...] = (
    COMPRESSED_TENSORS,
    TORCHAO,
    *(_any_tensor("transformer-engine", f".{mark}", names) for names in (_TE, _TE_T) for mark in ("", "_")),
    *(_any_tensor("dump", ".", tuple(f"{name}{t}" for name in ("packed", "scales", "amax"))) for t in ("", "_t")),
    _MODELOPT_EXPERTS,
    MODELOPT,
)


@dataclass(frozen=True)
class Quantized:
    """One NVFP4 tensor of a checkpoint; an array that should be there and is not, is None.

    name: as the model knows it.  block: what the file declares, None when it says nothing.
    """

    name: str
    family: Family
    packed: Stored | None
    scales: Stored | None
    whole: Stored | None
    inputs: Stored | None = None
    layout: str = "compact"
    block: tuple[int, int] | None = None
    dump: Dump | None = field(default=None, repr=False, compare=False)
    suffix: str = ""  # "_t" for the columnwise output of a dump
    prescaled: bool = False  # a pre_quant_scale lies beside it: the weight was scaled before (AWQ)

    @property
    def has_scale_bytes(self) -> bool:
        """Whether there are block scales of a type that E4M3 bytes may have."""
        return self.scales is not None and self.scales.dtype in _SCALES

    @property
    def origin(self) -> str:
        """Name of the array that it was made from."""
        return self.name.removesuffix(_COLUMNWISE)

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(one.size for one in (self.packed, self.scales) if one is not None)


@dataclass
class Checkpoint:
    """What was found under a path.

    quantized: the NVFP4 tensors in the order of their bytes; dumps: files of dumps, read when iterated.
    others: arrays that belong to none.  missing: names that the index lists and no file has.
    errors: sentences about what could not be read.
    """

    path: Path
    quantized: list[Quantized]
    dumps: list[Path]
    others: list[Stored]
    missing: list[str]
    errors: list[str]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes to read in all, roughly for dumps."""
        return sum(one.nbytes for one in self.quantized) + sum(path.stat().st_size for path in self.dumps)

    def tensors(self) -> Iterator[Quantized]:
        """Every NVFP4 tensor; a dump that cannot be read goes to ``errors``."""
        yield from self.quantized
        for path in self.dumps:
            try:
                for name, dump in iter_dumps(path):
                    yield from _from_dump(name, dump, path)
            except DumpError as error:
                self.errors.append(str(error))


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Look into a .safetensors or .npz file, a folder of them, or a Hugging Face index.

    Raises DumpError, in one sentence, when there is nothing to look into; single files of several that cannot
    be read are among the result's errors.
    """
    given = Path(os.fsdecode(path))
    with blame(given), foreign("cannot be opened"):
        if given.is_dir():
            files, listed, notes = _in_folder(given)
        elif given.name.endswith(".json"):
            files, listed, notes = (*_in_index(given), [])
        elif given.exists() and given.suffix.lower() not in (".safetensors", ".npz"):
            raise DumpError(f"the suffix is {given.suffix!r}, expected {_KNOWN}")
        else:
            os.stat(given)
            files, listed, notes = [given], None, []
    return _collected(given, files, listed, notes)


# ---- which files -------------------------------------------------------------------------------------------


def _in_folder(folder: Path) -> tuple[list[Path], dict[str, str] | None, list[str]]:
    """The files of a folder, what its index lists if it has one, and what was left out."""
    there = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".safetensors")
    indexes = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX))
    if len(indexes) > 1:
        names = ", ".join(path.name for path in indexes)
        raise DumpError(f"has {len(indexes)} indexes, {names}: name the one that is meant")
    if indexes:
        files, listed = _in_index(indexes[0])
        extra = [path.name for path in there if path not in files]
        return files, listed, [f"{indexes[0].name} does not list {name}: not read" for name in extra]
    files = there or sorted(path for path in folder.iterdir() if path.suffix.lower() == ".npz")
    if not files:
        below = sorted({path.parent.relative_to(folder).as_posix() for path in folder.glob("*/*.safetensors")})
        hint = f"; there are some in {', '.join(below[:5])}: name one of these" if below else ""
        raise DumpError(f"has no .safetensors file{hint}")
    return files, None, []


def _in_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that an index names, and its map from tensor to file name."""
    with foreign("is no index"):
        index = json.loads(path.read_text(encoding="utf-8"))
    listed = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise DumpError("is no index: it needs a weight_map from tensor names to file names")
    for name in set(listed.values()):
        parts = PurePosixPath(name.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or ":" in name:
            raise DumpError(f"names the file {shown(name)}, which is outside its folder")
    return [path.parent / name for name in sorted(set(listed.values()))], listed


def _collected(path: Path, files: list[Path], listed: dict[str, str] | None, notes: list[str]) -> Checkpoint:
    """The contents of files that can be read, grouped to tensors."""
    arrays: dict[str, Stored] = {}
    texts: dict[str, str] = {}
    dumps: list[Path] = []
    errors: list[str] = []
    for file in files:
        try:
            with blame(file):
                if file.suffix.lower() == ".npz":
                    with open_archive(file):
                        dumps.append(file)
                    continue
                found, said = _header(file)
        except DumpError as error:
            errors.append(str(error))
            continue
        if _is_dump(said):
            dumps.append(file)
            continue
        twice = [name for name in found if name in arrays]
        if twice:
            errors.append(f"{file}: {shown(twice[0])} is in {arrays[twice[0]].path.name} too; keep one of them")
        arrays |= {name: one for name, one in found.items() if name not in arrays}
        texts |= said
    missing = [name for name in listed or () if name not in arrays] if not errors else []
    quantized, others = group(arrays, texts)
    return Checkpoint(path, quantized, dumps, others, missing, errors, notes)


def _header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Every array of a .safetensors file, and the texts of its metadata."""
    with open_archive(path):  # the library checks every claim of the header, and says what is wrong
        pass
    with foreign("is no .safetensors, or damaged or cut short"), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    texts = header.pop("__metadata__", None) or {}
    return {
        name: Stored(name, one["dtype"], tuple(one["shape"]), path, 8 + length + one["data_offsets"][0])
        for name, one in header.items()
    }, texts


def _is_dump(texts: Mapping[str, str]) -> bool:
    """Whether the metadata of a .safetensors file is that of dumps."""
    return texts.get("format") == "nvfp4-dump" or "nvfp4-dump" in texts.get("meta", "")


# ---- which arrays make a tensor ----------------------------------------------------------------------------


def group(arrays: Mapping[str, Stored], texts: Mapping[str, str]) -> tuple[list[Quantized], list[Stored]]:
    """NVFP4 tensors in the order of their bytes, and the arrays that belong to none."""
    found: list[Quantized] = []
    taken: set[str] = set()
    for family in FAMILIES:
        for stem in _stems(arrays, family):
            parts = {role: arrays.get(stem + getattr(family, role)) for role in ("packed", "scales", "whole")}
            if any(part is not None and part.name in taken for part in parts.values()) or not _is_nvfp4(**parts):
                continue
            one = _quantized(stem, family, parts, arrays, texts)
            found.append(one)
            taken |= {part.name for part in (*parts.values(), one.inputs) if part is not None}
    others = [one for name, one in arrays.items() if name not in taken]
    return sorted(found, key=_place), others


def _place(one: Quantized) -> tuple[str, int]:
    first = next(part for part in (one.packed, one.scales, one.whole) if part is not None)
    return str(first.path), first.offset


def _stems(arrays: Iterable[str], family: Family) -> list[str]:
    """What may stand before the family's suffixes, from the names that end in one of them."""
    suffixes = [suffix for suffix in (family.packed, family.scales, family.whole) if suffix]
    stems = (name.removesuffix(suffix) for name in arrays for suffix in suffixes if name.endswith(suffix))
    return list(dict.fromkeys(stems))


def _is_nvfp4(packed: Stored | None, scales: Stored | None, whole: Stored | None) -> bool:
    """Whether arrays of these types are an NVFP4 tensor, or would be one if they were all there and right."""
    if packed is None:
        return scales is not None and whole is not None and scales.dtype == "F8_E4M3"
    if scales is None:
        return whole is not None and packed.dtype in _CODES
    if packed.is_float:
        return whole is not None and scales.dtype == "F8_E4M3"
    if packed.dtype not in _CODES or scales.dtype == "F8_E8M0":
        return False
    return scales.dtype == "F8_E4M3" or (whole is not None and _is_one_in_16(packed, scales))


def _is_one_in_16(packed: Stored, scales: Stored) -> bool:
    """Whether there is about one scale for 16 codes, padding allowed: MXFP4 has one for 32."""
    if packed.size == 0 or len(packed.shape) < 2:
        return False
    columns = packed.shape[-1] // (16 if packed.dtype == "F4" else 8)
    rows = math.prod(packed.shape[:-1])
    return rows * columns <= scales.size <= math.prod(layout.padded_shape(rows, columns))


def _quantized(
    stem: str,
    family: Family,
    parts: Mapping[str, Stored | None],
    arrays: Mapping[str, Stored],
    texts: Mapping[str, str],
) -> Quantized:
    parent = stem.rpartition(".")[0]
    name = stem
    if family is TORCHAO:
        name = f"{parent}.{stem.rpartition('.')[2].removeprefix('_')}".lstrip(".")
    if family is MODELOPT and _is_comfyui(parent, arrays, texts):
        family = COMFYUI
    inputs = arrays.get((parent if family.inputs.startswith(".") else stem) + family.inputs) if family.inputs else None
    order = "swizzled" if family is TORCHAO and _torchao_swizzled(texts.get(name)) else family.layout
    suffix = "_t" if family.packed.endswith(("_t", "columnwise_data")) else ""
    return Quantized(
        name + (_COLUMNWISE if suffix else ""),
        family,
        parts["packed"],
        parts["scales"],
        parts["whole"],
        inputs=inputs,
        layout=order,
        suffix=suffix,
        prescaled=f"{parent}.pre_quant_scale" in arrays,
    )


def _is_comfyui(parent: str, arrays: Mapping[str, Stored], texts: Mapping[str, str]) -> bool:
    return f"{parent}.comfy_quant" in arrays or json.dumps(parent) in texts.get("_quantization_metadata", "")


def _torchao_swizzled(text: str | None) -> bool:
    """What the metadata of a flattened NVFP4Tensor says."""
    try:
        return json.loads(text or "{}").get("_data", {}).get("is_swizzled_scales") is True
    except (ValueError, AttributeError):
        return False


def _from_dump(name: str, dump: Dump, path: Path) -> Iterator[Quantized]:
    """The outputs of a dump, of a GEMM those of its operands."""
    for side, operand in dump.operands().items():
        yield from _from_dump(f"{name}.{side}" if name else side, operand, path)
    for suffix in ("", "_t"):
        packed, scales = (getattr(dump, key + suffix) for key in ("packed", "scales"))
        if packed is None:
            continue
        amax, recorded = (getattr(dump, key + suffix) for key in ("amax", "global_scale"))
        form = "amax" if recorded is None else str(dump.global_scale_form)
        whole = amax if recorded is None else recorded
        label = (name or path.name) + (_COLUMNWISE if suffix else "")
        yield Quantized(
            label,
            Family("dump", "packed", "scales", "whole", form, layout="padded", weights=False),
            _held("packed" + suffix, packed, "U8", path),
            _held("scales" + suffix, scales, "U8", path),
            None if whole is None else _held("whole" + suffix, whole, "F32", path),
            layout="swizzled" if dump.scale_layout == "swizzled" else "padded",
            block=dump.block,
            dump=dump,
            suffix=suffix,
        )


def _held(name: str, array: Array, dtype: str, path: Path) -> Stored:
    return Stored(name, dtype, array.shape, path, held=array)

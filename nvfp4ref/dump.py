"""Dumps: how a quantizer's output travels, one .npz or .safetensors file a tensor.

    dump = load_dump("w.npz")
    save_dump("w.safetensors", dump)
    save_dump("w.npz", x=x, packed=packed, scales=scales, amax=amax, block=(16, 16))

A file holds the arrays of :class:`Dump` under their names and its other fields as one JSON text, `meta`.
In an .npz `meta` is a 0-d unicode array or UTF-8 bytes in a uint8 array; in a .safetensors it is the entry
`meta` of `__metadata__`, or `__metadata__` has the fields one by one.  A field left out, or null, has the
default of the class; only `format` ("nvfp4-dump") and `version` (1) must be there.

**Names.**  A key is `field` or `name.field`, cut at its last dot: `layers.0.w.packed` belongs to the tensor
`layers.0.w`.  Only a .safetensors file holds named tensors.  `a.…` and `b.…` beside a `d` are the operands of
that GEMM; without a `d` they are two tensors that are named a and b.

The meta of a named tensor or operand stands under its name in the object `tensors` of the file's meta, which
is how it is written, or else in a text `name.meta`; one that has none goes by its GEMM's, else by the file's.

**Unknown keys**, of arrays or of meta, are kept as they are, unless one is so near to a known name that it
must be a slip: that is an error, for what it meant to say would otherwise go unheard.

Every failure is a :class:`DumpError`, a ValueError of one clear sentence.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .arithmetic import Arithmetic, arithmetic
from .arrays import from_torch, narrow
from .container import (
    Archive,
    Array,
    DumpError,
    PathLike,
    blame,
    check_suffix,
    foreign,
    load_npy,
    native,
    open_archive,
    shown,
    write_archive,
)
from .dump_meta import (
    FLOATS,
    FORMAT,
    META,
    TENSORS,
    extra_meta,
    json_object,
    one_of,
    parse_object,
    refuse_slip,
)
from .hadamard import RHT
from .layout import padded_shape
from .tensor import NVFP4Tensor, rows_of

__all__ = [
    "Dump",
    "DumpError",
    "from_tensor",
    "iter_dumps",
    "load_dump",
    "load_dumps",
    "load_tensor",
    "save_dump",
]

#: array -> the dtypes it may have
_DTYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("x", "d", "c", "bias"), FLOATS),
    **dict.fromkeys(("packed", "scales", "packed_t", "scales_t"), ("uint8",)),
    **dict.fromkeys(("amax", "global_scale", "amax_t", "global_scale_t", "alpha", "beta"), ("float32",)),
    **dict.fromkeys(("rbits", "rbits_t"), ("uint32", "float32")),
}

#: array -> the meta field that says whether its uint16 are bfloat16
_DECLARED = {"x": "x_dtype", "d": "d_dtype", "c": "d_dtype", "bias": "d_dtype"}

#: array -> what it is worth nothing without
_NEEDS: dict[str, set[str]] = {
    "packed": {"scales"},
    "packed_t": {"scales_t"},
    **dict.fromkeys(("scales", "amax", "global_scale", "rbits"), {"packed"}),
    **dict.fromkeys(("scales_t", "amax_t", "global_scale_t", "rbits_t"), {"packed_t"}),
    **dict.fromkeys(("a", "b", "d", "c", "bias", "alpha", "beta"), {"a", "b", "d"}),
}

#: scale_layout, scale_kind -> the layout that NVFP4Tensor.from_arrays knows
_LAYOUTS: dict[tuple[str, str | None], str] = {
    ("compact", "compact"): "compact",
    ("compact", "padded"): "padded",
    ("swizzled", "padded"): "swizzled",
}

_OPERANDS = ("a", "b")
_TEXTS = ("meta", "global_scale_form")  # keys that are texts, not arrays


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Dump:
    """One tensor as a quantizer left it, or one GEMM of two such tensors.  R, C: rows and columns of x.

    Building one checks it: dtypes, shapes against each other, and every meta field; DumpError otherwise.
    Arrays are kept in C order and native byte order.  bfloat16 is an ml_dtypes.bfloat16 array here and
    uint16 bit patterns in a file; either may be given.  Scales of a shape that is neither compact nor
    padded are kept: see `scale_kind`.
    """

    # -- arrays --------------------------------------------------------------------------------------
    x: Array | None = None  # float32, float16 or bfloat16 (R, C): the input
    packed: Array | None = None  # uint8 (R, C/2): two codes a byte
    scales: Array | None = None  # uint8: (R, C/16), or (⌈R/128⌉·128, ⌈C/64⌉·4), or whatever was found
    amax: Array | None = None  # float32 (1,), or (R,) when row-scaled: the value the producer used
    global_scale: Array | None = None  # float32 (1,) or (R,); see global_scale_form
    packed_t: Array | None = None  # the columnwise output, shapes of xᵀ: (C, R/2)
    scales_t: Array | None = None  # (C, R/16) or padded
    amax_t: Array | None = None  # (1,) or (C,)
    global_scale_t: Array | None = None  # (1,) or (C,)
    rbits: Array | None = None  # uint32 (R, C/4) words, or float32 (R, C) uniforms
    rbits_t: Array | None = None  # uint32 (C, R/4), or float32 (C, R)

    # -- a GEMM: d = alpha·a·bᵀ + beta·c + bias, by the operands' rowwise outputs (M, K) and (N, K) ----
    a: Dump | None = None
    b: Dump | None = None
    d: Array | None = None  # float32, float16 or bfloat16 (M, N)
    c: Array | None = None  # (M, N)
    bias: Array | None = None  # (N,)
    alpha: Array | None = None  # float32 (1,)
    beta: Array | None = None  # float32 (1,)

    extra: Mapping[str, Array] = field(default_factory=dict)  # arrays of other names, as found

    # -- meta ----------------------------------------------------------------------------------------
    x_dtype: str = ""  # default: the dtype of x, float32 without x
    d_dtype: str = ""  # default: the dtype of d; bit patterns in c and bias go by it too
    block: tuple[int, int] = (1, 16)  # or (16, 16)
    rounding: str = "nearest-even"  # or "stochastic"
    rht: bool | dict[str, Any] = False  # of the rowwise output; True, or the fields of nvfp4ref.RHT
    rht_t: bool | dict[str, Any] = False  # of the columnwise output
    scale_layout: str = "compact"  # or "swizzled"; padded is told by the shape
    global_scale_form: str | None = None  # "encode" (2688/amax) or "decode" (amax/2688)
    arithmetic: str | dict[str, Any] | None = None  # a preset or {"name": preset, field: value, …}
    rng: dict[str, Any] | None = None  # the fields of nvfp4ref.Philox, seed at least
    rng_t: dict[str, Any] | None = None
    producer: dict[str, Any] = field(default_factory=dict)  # name, version, device, …
    extra_meta: dict[str, Any] = field(default_factory=dict)  # other keys of meta, as found

    def __post_init__(self) -> None:
        for name, parse in META.items():
            self._set(name, parse(name, getattr(self, name)))
        for name in _DTYPES:
            self._set(name, _array(name, getattr(self, name), getattr(self, _DECLARED.get(name, ""), "")))
        self._set("extra", {name: _extra(name, array) for name, array in self.extra.items()})
        self._set("extra_meta", extra_meta(self.extra_meta))
        self._set("x_dtype", self.x_dtype or ("float32" if self.x is None else self.x.dtype.name))
        self._set("d_dtype", self.d_dtype or ("" if self.d is None else self.d.dtype.name))
        _check_presence(self)
        if self.shape:
            _check_tensor(self, *self.shape)
        if self.d is not None:
            _check_gemm(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        arrays = [f"{name} {array.dtype}{array.shape}" for name, array in self.arrays().items()]
        operands = [f"{name} {operand!r}" for name, operand in self.operands().items()]
        return f"<Dump {', '.join(arrays + operands)}; {json.dumps(self.meta())}>"

    # -- views ---------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by name, without the operands' and the extra ones."""
        return {name: array for name in _DTYPES if (array := getattr(self, name)) is not None}

    def operands(self) -> dict[str, Dump]:
        """The operands a and b of a GEMM; empty without one."""
        return {name: operand for name in _OPERANDS if (operand := getattr(self, name)) is not None}

    def meta(self) -> dict[str, Any]:
        """The JSON object of the file: every field that says something, defaults written out."""
        fields = {name: getattr(self, name) for name in META}
        said = {name: value for name, value in fields.items() if value not in (None, "")}
        return {**FORMAT, **said, "block": list(self.block), **self.extra_meta}

    @property
    def shape(self) -> tuple[int, int] | None:
        """(R, C) of x, known from any output; None for a GEMM that holds no tensor of its own."""
        return None if self.packed is None and self.packed_t is None else _common_shape(self)

    @property
    def scale_kind(self) -> str | None:
        """'compact', 'padded' or 'other' by the shape of `scales`; None without scales.

        Where compact and padded are the same shape, 'padded' if meta says swizzled.
        """
        return self._scale_kind("")

    @property
    def scale_kind_t(self) -> str | None:
        """The same for `scales_t`."""
        return self._scale_kind("_t")

    def _scale_kind(self, side: str) -> str | None:
        scales = getattr(self, "scales" + side)
        if scales is None or self.shape is None:
            return None
        rows, cols = self.shape[::-1] if side else self.shape
        kinds = {"compact": (rows, cols // 16), "padded": padded_shape(rows, cols // 16)}
        found = [kind for kind, shape in kinds.items() if shape == scales.shape] or ["other"]
        return found[-1 if self.scale_layout == "swizzled" else 0]

    @property
    def row_scaled(self) -> bool:
        """Whether there is one amax a row: the arithmetic says so, or the amax has more than one value."""
        named = isinstance(self.arithmetic, dict) and self.arithmetic.get("row_scaled") is True
        return named or any(amax is not None and amax.size > 1 for amax in (self.amax, self.amax_t))

    # -- meaning -------------------------------------------------------------------------------------

    def resolve_arithmetic(self, given: str | Arithmetic | None = None) -> Arithmetic:
        """The arithmetic to judge by: `given`, else meta's, else 'te'; row-scaled if the dump is.

        Raises DumpError when meta names an unknown preset or field, ValueError when `given` does.
        """
        changes = {"row_scaled": True} if self.row_scaled else {}
        if given is not None:
            return arithmetic(given, **changes)
        said = self.arithmetic if isinstance(self.arithmetic, dict) else {"name": self.arithmetic or "te"}
        fields = {name: value for name, value in said.items() if name != "name"}
        with foreign("the arithmetic in meta"):
            return arithmetic(said["name"], **{**fields, **changes})

    def transform(self, columnwise: bool = False) -> RHT | None:
        """The random Hadamard transform that meta declares for one output, None for none.

        Raises DumpError when its fields make no RHT.
        """
        said = self.rht_t if columnwise else self.rht
        if said is False:
            return None
        with foreign("the transform in meta"):
            return RHT(**said) if isinstance(said, dict) else RHT()

    def rowwise(self, arithmetic: str | Arithmetic | None = None) -> NVFP4Tensor:
        """The rowwise output as an NVFP4Tensor.  Raises DumpError when it is not all there."""
        return self._tensor("", arithmetic)

    def columnwise(self, arithmetic: str | Arithmetic | None = None) -> NVFP4Tensor:
        """The columnwise output as an NVFP4Tensor.  Raises DumpError when it is not all there."""
        return self._tensor("_t", arithmetic)

    def _tensor(self, side: str, given: str | Arithmetic | None) -> NVFP4Tensor:
        packed, scales, amax = (getattr(self, name + side) for name in ("packed", "scales", "amax"))
        if packed is None:
            raise DumpError(f"has no packed{side}, which a tensor needs")
        if amax is None:
            raise DumpError(f"has no amax{side}, which a tensor needs and no global_scale tells exactly")
        layout = _LAYOUTS.get((self.scale_layout, self._scale_kind(side)))
        if layout is None:
            problem = f"fit no {self.scale_layout} layout of {packed.shape} codes"
            raise DumpError(f"scales{side} {scales.shape} {problem}")
        ar = self.resolve_arithmetic(given)
        return NVFP4Tensor.from_arrays(packed, scales, amax, block=self.block, layout=layout, arithmetic=ar)


# -- the checks of one array -------------------------------------------------------------------------


def _array(name: str, value: Any, declared: str) -> Array | None:
    """The array in C order and native byte order, its dtype one of those allowed."""
    if value is None:
        return None
    with foreign(f"{name} is not an array"):
        array = native(np.asarray(from_torch(value)))
    array = _bfloat16(array, declared)
    if name.startswith("scales") and array.dtype == ml_dtypes.float8_e4m3fn:
        array = array.view(np.uint8)
    if array.dtype.name not in _DTYPES[name]:
        raise DumpError(f"{name} is {array.dtype}, expected {' or '.join(_DTYPES[name])}{_hint(name, array)}")
    if name in ("x", "d") and declared not in ("", array.dtype.name):
        raise DumpError(f"{name} is {array.dtype}, but {name}_dtype is {declared!r}")
    return array.reshape(1) if array.ndim == 0 and _DTYPES[name] == ("float32",) else array


def _is_bits(array: Array) -> bool:
    """Whether an array is 16-bit patterns: uint16, or the void that NumPy makes of a saved bfloat16."""
    return array.dtype.name in ("uint16", "void16")


def _bfloat16(array: Array, declared: str | None) -> Array:
    """bfloat16 from its bit patterns, where they are declared to be that."""
    return array.view(ml_dtypes.bfloat16) if _is_bits(array) and declared == "bfloat16" else array


def _hint(name: str, array: Array) -> str:
    """What to do about a wrong dtype, where it can be known."""
    if _is_bits(array) and name in _DECLARED:
        return f"; for bfloat16 bit patterns {_DECLARED[name]} must be 'bfloat16'"
    return "; give the bytes as they are, .view(np.uint8)" if array.itemsize == 1 else ""


def _extra(name: str, value: Any) -> Array:
    """An array outside the format: any plain numbers."""
    if not re.fullmatch(r"[\w -]+", name) or name in (*_DTYPES, *_OPERANDS, *_TEXTS):
        raise DumpError(f"{shown(name)} is no name for an extra array")
    refuse_slip(name, (*_DTYPES, *_TEXTS))
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise DumpError(f"extra array {shown(name)} is {array.dtype}, expected plain numbers")
    return native(array)


# -- the checks of arrays against each other ---------------------------------------------------------


def _check_presence(dump: Dump) -> None:
    """What must come together."""
    present = {*dump.arrays(), *dump.operands()}
    found = ", ".join(sorted(present | {*dump.extra})) or "nothing"
    if present <= {"x"}:
        raise DumpError(f"no output: packed and scales, or packed_t and scales_t, are needed; found {found}")
    for name, needs in _NEEDS.items():
        if name in present and not needs <= present:
            raise DumpError(f"{name} without {', '.join(sorted(needs - present))}; found {found}")
    if present & {"global_scale", "global_scale_t"} and dump.global_scale_form is None:
        raise DumpError("global_scale needs global_scale_form: 'encode' (2688/amax) or 'decode' (amax/2688)")
    if present & {"rbits", "rbits_t"} and dump.rounding != "stochastic":
        raise DumpError(f"random words (rbits) with rounding {dump.rounding!r}, expected 'stochastic'")


def _common_shape(dump: Dump) -> tuple[int, int]:
    """(R, C), on which x, packed and packed_t must agree."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in ("x", "packed", "packed_t"):
        array = getattr(dump, name)
        if array is None:
            continue
        if array.ndim != 2 or array.size == 0:
            raise DumpError(f"{name} has the shape {array.shape}, expected two dimensions, neither of them 0")
        rows, cols = array.shape
        shapes[name] = {"x": (rows, cols), "packed": (rows, 2 * cols), "packed_t": (2 * cols, rows)}[name]
    if len(set(shapes.values())) > 1:
        claims = ", ".join(f"{name} belongs to an x of {shape}" for name, shape in shapes.items())
        raise DumpError(f"contradictory shapes: {claims}")
    return next(iter(shapes.values()))


def _check_tensor(dump: Dump, rows: int, cols: int) -> None:
    """The blocked axes divide into blocks, and everything else has a shape that follows from (R, C)."""
    square = dump.block == (16, 16)
    for axis, size, blocked in (("C", cols, dump.packed is not None), ("R", rows, dump.packed_t is not None)):
        if (blocked or square) and size % 16:
            raise DumpError(f"x is ({rows}, {cols}), and {axis} = {size} is blocked but no multiple of 16")
    for side, r, c in (("", rows, cols), ("_t", cols, rows)):
        _check_shape(dump, f"amax{side}", [(1,), (r,)], f"x of ({rows}, {cols})")
        _check_shape(dump, f"global_scale{side}", [(1,), (r,)], f"x of ({rows}, {cols})")
        rbits = getattr(dump, f"rbits{side}")
        words = rbits is not None and rbits.dtype == np.uint32
        _check_shape(dump, f"rbits{side}", [(r, c // 4 if words else c)], f"x of ({rows}, {cols})")


def _check_gemm(dump: Dump) -> None:
    """d, c, bias, alpha and beta against the rowwise outputs of a and b."""
    (m, k), (n, k_b) = (_operand_shape(name, operand) for name, operand in dump.operands().items())
    if k != k_b:
        raise DumpError(f"operands a ({m}, {k}) and b ({n}, {k_b}) differ in K")
    for name, shape in {"d": (m, n), "c": (m, n), "bias": (n,), "alpha": (1,), "beta": (1,)}.items():
        _check_shape(dump, name, [shape], f"a ({m}, {k}) and b ({n}, {k})")


def _check_shape(dump: Dump, name: str, allowed: list[tuple[int, ...]], source: str) -> None:
    array = getattr(dump, name)
    if array is not None and array.shape not in allowed:
        shapes = " or ".join(map(str, dict.fromkeys(allowed)))
        raise DumpError(f"{name} has the shape {array.shape}, expected {shapes} for {source}")


def _operand_shape(name: str, operand: Any) -> tuple[int, int]:
    if not isinstance(operand, Dump):
        raise DumpError(f"operand {name} is {type(operand).__name__}, expected a Dump")
    if operand.packed is None or operand.d is not None:
        raise DumpError(f"operand {name} must be a tensor with a rowwise output, packed and scales")
    return _common_shape(operand)


# -- reading -----------------------------------------------------------------------------------------

_Groups = dict[str, dict[str, str]]  # tensor -> field -> the key in the file


def load_dump(path: PathLike) -> Dump | dict[str, Dump]:
    """The dump in a file; a dict of dumps if the keys have `name.` prefixes, even for a single name.

    Raises DumpError when the file cannot be read, or is no dump, or contradicts itself.
    """
    dumps = load_dumps(path)
    return dumps[""] if list(dumps) == [""] else dumps


def load_dumps(path: PathLike) -> dict[str, Dump]:
    """Every dump in a file by name, '' for the one without; raises as load_dump does."""
    return dict(iter_dumps(path))


def iter_dumps(path: PathLike) -> Iterator[tuple[str, Dump]]:
    """The same one after the other: one tensor of a large file is in memory at a time."""
    with blame(path), open_archive(path) as archive:
        groups = _groups(archive.names)
        names = [name for name in groups if not _is_operand(name, groups)]
        _check_names(path, names)
        metas = _file_metas(archive, groups)
        for name in names:
            yield name, _read(archive, groups, name, metas)


def _check_names(path: PathLike, names: Iterable[str]) -> None:
    if check_suffix(path, ".npz", ".safetensors") == ".npz" and list(names) != [""]:
        raise DumpError(f"an .npz holds one tensor without a name; {_listed(names)} need a .safetensors file")


def _groups(keys: list[str]) -> _Groups:
    """The arrays of each tensor; see "Names" at the head of this file."""
    groups: _Groups = {}
    for key in keys:
        name, _, array = key.rpartition(".")
        if array in _TEXTS:
            continue
        fields = groups.setdefault(name, {})
        if array in fields:
            raise DumpError(f"{shown(key)} and {shown(fields[array])} name the same array")
        fields[array] = key
    return groups or {"": {}}


def _is_operand(name: str, groups: _Groups) -> bool:
    parent, _, last = name.rpartition(".")
    return last in _OPERANDS and "d" in groups.get(parent, {})


def _file_metas(archive: Archive, groups: _Groups) -> dict[str, Any]:
    """What the file's meta says, under the name '', and what it says of single tensors, under theirs."""
    common = _own_meta(archive, "")
    if common is None:
        return {}
    tensors = json_object(TENSORS, common.pop(TENSORS, {}))
    absent = [name for name in tensors if not name or name not in groups]
    if absent:
        raise DumpError(f"meta speaks of tensors that are not there: {_listed(absent)}")
    return {"": common, **tensors}


def _read(archive: Archive, groups: _Groups, name: str, metas: Mapping[str, Any]) -> Dump:
    """One dump, with its operands; `metas` as from `_file_metas`, '' serving tensors that have none."""
    with blame(f"tensor {shown(name)}") if name else nullcontext():
        candidates = (metas.get(name), _own_meta(archive, name), metas.get(""))
        meta = next((one for one in candidates if one is not None), None)
        if meta is None:
            raise DumpError(f"no meta that says {json.dumps(FORMAT)}; found {_listed(archive.names)}")
        fields = _meta_fields(meta, archive.text(_key(name, "global_scale_form")))
        arrays: dict[str, Any] = {array: archive.read(key) for array, key in groups[name].items()}
        fields["extra"] = {array: arrays.pop(array) for array in list(arrays) if array not in _DTYPES}
        for operand in _OPERANDS:
            child = _key(name, operand)
            if "d" in groups[name] and child in groups:
                fields[operand] = _read(archive, groups, child, {**metas, "": meta})
        return Dump(**fields, **arrays)


def _own_meta(archive: Archive, name: str) -> dict[str, Any] | None:
    """The meta that a file has for one tensor: one JSON text, or a text a field, each JSON or a bare word."""
    text = archive.text(_key(name, "meta"))
    if text is not None:
        return parse_object(text, "meta")
    if archive.text(_key(name, "format")) is None:
        return None
    texts = {key: archive.text(_key(name, key)) for key in (*FORMAT, *META)}
    return {key: _json_or_word(text) for key, text in texts.items() if text is not None}


def _json_or_word(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _meta_fields(meta: Any, form: str | None = None) -> dict[str, Any]:
    """A meta object as fields of Dump; null is as good as absent.  `form`: a global_scale_form beside it."""
    found = json_object("meta", meta)
    for key, value in FORMAT.items():
        one_of(value)(f"meta's {key}", found.pop(key, None))
    if form is not None and found.setdefault("global_scale_form", form) != form:
        said = shown(found["global_scale_form"])
        raise DumpError(f"global_scale_form is {shown(form)}, but meta says {said}")
    known = {key: found.pop(key) for key in META if key in found}
    return {key: value for key, value in known.items() if value is not None} | {"extra_meta": found}


def _key(name: str, array: str) -> str:
    return f"{name}.{array}" if name else array


def _listed(names: Iterable[str]) -> str:
    """The first few names."""
    names = list(names)
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (", ".join(map(shown, names[:12])) or "nothing") + more


# -- writing -----------------------------------------------------------------------------------------


def save_dump(path: PathLike, dump: Dump | NVFP4Tensor | Mapping[str, Dump] | None = None, /, **fields: Any) -> None:
    """Write a dump to an .npz or .safetensors file, by the suffix of `path`.

    Args:
        path: where; the file appears complete or not at all, and an old one stays until then.
        dump: a Dump, an NVFP4Tensor, or several dumps by name (.safetensors only).
        fields: fields of Dump; all of them if `dump` is left out, else those to add or replace.  `meta` may
            hold the meta fields as one object or JSON text.  With a tensor, those of `from_tensor`.

    The same content gives the same bytes.  Raises DumpError when the content is no valid dump or the file
    cannot be written.
    """
    with blame(path):
        dumps = _dumps(dump, **fields)
        _check_names(path, dumps)
        arrays: dict[str, Array] = {}
        metas: dict[str, Any] = {}
        for name, one in _with_operands(dumps):
            if name in metas:
                raise DumpError(f"two tensors would both be stored as {shown(name)}; rename one")
            metas[name] = one.meta()
            for key, array in {**one.arrays(), **one.extra}.items():
                bits = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
                arrays[_key(name, key)] = bits
        meta = {**metas.pop("", FORMAT), **({TENSORS: metas} if metas else {})}
        write_archive(path, arrays, json.dumps(meta, sort_keys=True, allow_nan=False))


def _with_operands(dumps: Mapping[str, Dump]) -> Iterator[tuple[str, Dump]]:
    for name, dump in dumps.items():
        yield name, dump
        for side, operand in dump.operands().items():
            yield _key(name, side), operand


def _dumps(dump: Any, /, meta: Any = None, **fields: Any) -> dict[str, Dump]:
    """What save_dump was given, as dumps by name."""
    if meta is not None:
        said = json_object("meta", meta) if isinstance(meta, Mapping) else parse_object(meta, "meta")
        fields |= _meta_fields({**FORMAT, **said})
    match dump:
        case None:
            return {"": Dump(**fields)}
        case Dump():
            return {"": dataclasses.replace(dump, **fields)}
        case NVFP4Tensor():
            return {"": from_tensor(dump, **fields)}
        case Mapping() if dump and not fields and all(isinstance(one, Dump) for one in dump.values()):
            return {str(name): one for name, one in dump.items()}
    raise DumpError(f"got {type(dump).__name__}, expected a Dump, an NVFP4Tensor or a dict of Dump by name")


def from_tensor(q: NVFP4Tensor | None, x: Any = None, *, columnwise: NVFP4Tensor | None = None, **fields: Any) -> Dump:
    """The dump of a rowwise tensor, a columnwise one (made with axis=0), or both, of the input x.

    More than two dimensions are flattened to (R, C) as quantize does.  Block and arithmetic are the tensors';
    `fields` are any other fields of Dump.  Raises DumpError when the two were made differently.
    """
    outputs = {side: tensor for side, tensor in (("", q), ("_t", columnwise)) if tensor is not None}
    made = {(tensor.block, tensor.arithmetic) for tensor in outputs.values()}
    if len(made) > 1:
        raise DumpError("the rowwise and the columnwise tensor differ in block or arithmetic")
    for block, ar in made:
        fields = {"block": block, "arithmetic": ar, **fields}
    for side, tensor in outputs.items():
        fields |= {"packed" + side: rows_of(tensor.packed), "scales" + side: rows_of(tensor.scales)}
        fields["amax" + side] = tensor.amax
    if x is not None:
        with foreign("x is not an array"):
            array = np.asarray(from_torch(x))
        fields["x"] = rows_of(array) if array.ndim > 2 else array
    return Dump(**fields)


# -- plain tensors -----------------------------------------------------------------------------------


def load_tensor(path: PathLike, dtype: str | None = None, name: str | None = None) -> Array:
    """The input of a quantizer from an .npy, .npz or .safetensors file: float32, float16 or bfloat16.

    Args:
        path: the file.
        dtype: what to return, "float32", "float16" or "bfloat16".  uint16 with "bfloat16" is bit patterns;
            anything else is rounded to nearest even where it does not fit.  None: as stored, float64 as
            float32 if that is exact.
        name: which array of a file that holds several.

    Raises DumpError.
    """
    with blame(path):
        one_of(None, *FLOATS)("dtype", dtype)
        if check_suffix(path, ".npy", ".npz", ".safetensors") == ".npy":
            if name is not None:
                raise DumpError(f"an .npy holds one array without a name; leave out {shown(name)}")
            return _as_float(load_npy(path), dtype)
        with open_archive(path) as archive:
            return _as_float(archive.read(_pick(archive.names, name)), dtype)


def _pick(names: list[str], name: str | None) -> str:
    if name is None and len(names) == 1:
        return names[0]
    if name is None:
        raise DumpError(f"holds {len(names)} arrays, say which by name: {_listed(names)}")
    if name not in names:
        raise DumpError(f"holds no array {shown(name)}, but {_listed(names)}")
    return name


def _as_float(array: Array, dtype: str | None) -> Array:
    """The array in one of the input dtypes."""
    array = _bfloat16(array, dtype)
    if array.dtype == np.float64:
        with foreign("cannot be read"):
            array = narrow(array)
    if array.dtype.name not in FLOATS:
        bits = "; for bfloat16 bit patterns say dtype 'bfloat16'" if _is_bits(array) else ""
        raise DumpError(f"is {array.dtype}, expected {' or '.join(FLOATS)}{bits}")
    if dtype in (None, array.dtype.name):
        return array
    with np.errstate(all="ignore"):
        return array.astype(np.float32).astype(dtype)

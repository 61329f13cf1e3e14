"""A set of vectors: operands, what the specification makes of them, and what a fault would make of them instead.

Sets of rows come from ``operations.py``; the others are whole arrays: a tensor and its quantization, the random
words of a kernel, scales and how they are stored, a matrix multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance import plant
from conformance.deviations import DEVIATIONS
from conformance.expect import Expectation
from conformance.layouts import LAYOUTS
from conformance.model import ARITHMETIC
from conformance.vectors import operands
from conformance.vectors.fields import Array, bits, different_rows, type_of
from conformance.vectors.operations import OPERATIONS, Operands, Settings
from conformance.vectors.random import Random
from nvfp4hw.backends.base import Case
from nvfp4ref import gemm, layout, partial_cast
from nvfp4ref.fp32 import widen

Named = dict[str, tuple[str, Array]]  # name -> (type, array)
Faulty = Callable[[Settings], "Named | None"]


@dataclass(frozen=True)
class Set:
    """One operation on some operands.

    Attributes:
        name: unique in its group.
        operation: which one; docs/vectors.md says what each does.
        what: which operands these are, as a clause.
        operands, results: arrays by name, in order.
        faulty: the results under settings, None where they do not apply.
        rows: every array has one row for each row of the others.
        parameters: what else the operation depends on, plain values.
        space: number of operands there are, as text; "" where it is not counted.
        exhaustive: whether these are all.
    """

    name: str
    operation: str
    what: str
    operands: Named
    results: Named
    faulty: Faulty
    rows: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    space: str = ""
    exhaustive: bool = False

    @property
    def count(self) -> int:
        """Rows of a set of rows; one for a set of whole arrays."""
        return len(next(iter(self.results.values()))[1]) if self.rows else 1

    def changed(self, settings: Settings) -> tuple[int, int] | None:
        """(results that settings change, index of the first), None where they do not apply.

        A result is a row, or in a set of whole arrays a value of one of them, counted through all of them.
        """
        found = self.faulty(settings)
        if found is None:
            return None
        if self.rows:
            unequal = different_rows([a for _, a in found.values()], [a for _, a in self.results.values()])
        else:
            unequal = np.concatenate([_unequal(found.get(name), one) for name, (_, one) in self.results.items()])
        return int(unequal.sum()), int(unequal.argmax())


def _unequal(found: tuple[str, Array] | None, expected: Array) -> Array:
    """Which values differ; all of them where the shapes do."""
    if found is None or found[1].shape != expected.shape:
        return np.ones(expected.size, bool)
    return (bits(found[1]) != bits(expected)).reshape(-1)


# ---- rows --------------------------------------------------------------------------------------------------


def of_rows(operation: str, given: Operands, what: str, name: str = "") -> Set:
    """The set of an operation's answers."""
    one = OPERATIONS[operation]
    known = _named(one.operands, given)
    digits = 4 * sum(item.digits for item in one.operands)

    def faulty(settings: Settings) -> Named | None:
        results = one.faulty(given, settings)
        return None if results is None else _named(one.results, results)

    count = len(given[0])
    return Set(
        name or operation,
        operation,
        what,
        known,
        _named(one.results, one.answer(given)),
        faulty,
        True,
        space=f"2^{digits}",
        exhaustive=digits < 63 and count == 1 << digits and len(operands.distinct(given)[0]) == count,
    )


def _named(items: tuple[Any, ...], arrays: Operands) -> Named:
    return {item.name: (item.type, array) for item, array in zip(items, arrays, strict=True)}


# ---- tensors -----------------------------------------------------------------------------------------------

_TYPES = {"packed": "u8", "scales": "e4m3", "amax": "f32", "rbits": "u32"}


def of_case(case: Case, arithmetic: str = "te") -> Set:
    """A tensor of the suite and its quantization.  ``amax`` is among the operands where it is given."""
    expected = Expectation(case, arithmetic)
    given: Named = {"x": (type_of(case.x), case.x)}
    for suffix in plant.suffixes(case):
        amax = getattr(case, "amax" + suffix)
        if amax is not None:
            given["amax" + suffix] = ("f32", np.asarray(amax, np.float32).reshape(1))
        if case.rounding == "stochastic":
            words = _random_numbers(case, suffix)
            given["rbits" + suffix] = (type_of(words), words)
    return Set(
        case.id,
        "tensor",
        case.hunts,
        given,
        _outputs(case, lambda name: expected.output(name), given),
        lambda settings: _or_none(lambda: _of_faulty_case(case, settings, given)),
        parameters=_how(case, expected.arithmetic),
    )


def _or_none(make: Callable[[], Named | None]) -> Named | None:
    """What is made, None where the settings do not go with the case."""
    try:
        return make()
    except (ValueError, TypeError):
        return None


def _random_numbers(case: Case, suffix: str) -> Array:
    state = case.data["rng" + suffix]
    if not isinstance(state, nv.Philox):
        return np.asarray(state)
    return state.words(case.x.shape, 0 if suffix else -1, block=case.block, dtype=case.x.dtype.name)


def _outputs(case: Case, output: Callable[[str], Any], given: Named) -> Named:
    found: Named = {}
    for suffix in plant.suffixes(case):
        for name in ("packed", "scales", "amax"):
            if name + suffix not in given:
                array = np.asarray(output(name + suffix))
                found[name + suffix] = (_TYPES[name], array.reshape(1) if array.ndim == 0 else array)
    return found


def _of_faulty_case(case: Case, settings: Settings, given: Named) -> Named | None:
    """What a quantizer with a fault makes of a case."""
    if "against" in settings:
        dump = plant.against(DEVIATIONS[settings["against"]], case)
        if dump is None:
            return None
        expected = Expectation(case, dump.resolve_arithmetic())
        return _outputs(case, expected.output, given)
    if case.fields and set(settings) & set(case.fields):  # the case's own field is what is changed
        changed = Expectation(case, nv.arithmetic("te"))
        changed.arithmetic = nv.arithmetic("te", **{**case.fields, **settings})
        return _outputs(case, changed.output, given)
    dump = plant.planted(dict(settings), case)
    return None if dump is None else _outputs(case, lambda name: getattr(dump, name), given)


def _how(case: Case, arithmetic: nv.Arithmetic) -> dict[str, Any]:
    """How a case is quantized, as plain values; what is not said is as in the specification's section 2."""
    how: dict[str, Any] = {"block": list(case.block), "directions": case.directions, "rounding": case.rounding}
    if case.rht_t is not None:
        rht = case.rht_t
        how["rht_t"] = {"size": rht.size, "sign_mask": rht.sign_mask, "round_to": rht.round_to}
    how["arithmetic"] = {"name": arithmetic.name, **arithmetic.fields()}
    for suffix in ("", "_t"):
        state = case.data.get("rng" + suffix)
        if isinstance(state, nv.Philox):
            how["rng" + suffix] = _state(state)
    return how


def _state(state: nv.Philox) -> dict[str, Any]:
    """Seeds have 64 bits, which not every reader of JSON keeps: hexadecimal."""
    return {"seed": f"0x{state.seed:016X}", "offset": state.offset, "kernel": state.kernel, "both": state.both}


def of_tiles(mode: str, maximum: int, axis: int) -> Set:
    """4over6 of a column of 16x16 tiles, some of which 4 suits and some 6, with both errors of each tile."""
    random, tiles = Random(13, maximum), 12
    grid = np.array([1, 0.75, 0.5, 0.375, 0.25, 0.125, 0, 0.7], np.float32)
    x = random.signed(random.choice(grid, tiles * 256)).reshape(tiles, 16, 16)
    x *= np.ldexp(np.float32(1), random.integers(tiles, -3, 2))[:, None, None]
    noise = random.uniforms(tiles * 256).reshape(tiles, 16, 16) - np.float32(0.5)
    x += noise * np.float32(0.125) * (np.arange(tiles) % 4)[:, None, None].astype(np.float32)
    matrix = x.reshape(tiles * 16, 16) if axis == -1 else np.ascontiguousarray(x.reshape(tiles * 16, 16).T)

    def quantize(settings: Settings) -> Named | None:
        fields = {"four_over_six": mode, "e4m3_max": maximum, **settings}
        if not set(fields) <= ARITHMETIC:
            return None
        q = nv.quantize(matrix, block=(16, 16), axis=axis, arithmetic=nv.arithmetic("te", **fields))
        nothing = np.zeros(q.scales.shape, np.float32)
        errors = [nothing if one is None else one for one in (q.steps.err4, q.steps.err6)]
        return {
            "packed": ("u8", q.packed),
            "scales": ("e4m3", q.scales),
            "amax": ("f32", q.amax.reshape(1)),
            **{name: ("f32", one[::16].copy()) for name, one in zip(("error4", "error6"), errors, strict=True)},
        }

    right = quantize({})
    assert right is not None
    direction = "columnwise" if axis == 0 else "rowwise"
    return Set(
        f"tiles.{mode}-{maximum}.{direction}",
        "four-over-six-tiles",
        f"16x16 tiles, {direction}: some that 4 suits, some that 6 suits",
        {"x": ("f32", matrix)},
        right,
        quantize,
        parameters={"block": [16, 16], "axis": axis, "four_over_six": mode, "e4m3_max": maximum},
    )


# ---- random words ------------------------------------------------------------------------------------------

SEED, OFFSET = 0x123456789ABCDEF0, 7


def of_stream(kernel: str, shape: tuple[int, int], axis: int, both: bool, block: tuple[int, int] = (1, 16)) -> Set:
    """The words of one launch of a kernel."""

    def words(settings: Settings) -> Named | None:
        if not set(settings) <= {"words", "rounds", "both"}:
            return None
        kind, *rest = settings.get("words", ("advanced", 0))
        if kind != "advanced":
            return None
        state = nv.Philox(SEED, OFFSET + rest[0], kernel, rounds=settings.get("rounds", 10))
        try:
            found = state.words(shape, axis, settings.get("both", both), block=block)
        except ValueError:
            return None
        return {"words": ("u32", found)}

    right = words({})
    assert right is not None
    direction = "columnwise" if axis == 0 else "rowwise"
    return Set(
        f"{kernel}.{shape[0]}x{shape[1]}.{direction}{'.both' if both else ''}",
        "random-words",
        f"x of {shape[0]}x{shape[1]}, the {direction} words" + (", both directions in one launch" if both else ""),
        {},
        right,
        words,
        parameters={
            "shape": list(shape),
            "axis": axis,
            "block": list(block),
            "dtype": "bfloat16",
            "rng": _state(nv.Philox(SEED, OFFSET, kernel, both)),
        },
    )


# ---- layout ------------------------------------------------------------------------------------------------


def _scales(rows: int, columns: int) -> Array:
    return Random(9, rows, columns).bytes(rows, columns).reshape(rows, columns) & np.uint8(0x7F)


def of_layout(operation: str, rows: int, columns: int) -> Set:
    """Compact scales and how they are stored: "swizzle" or "pad"."""
    scales = _scales(rows, columns)
    right = layout.swizzle(scales) if operation == "swizzle" else layout.pad(scales)

    def faulty(settings: Settings) -> Named | None:
        if set(settings) != {"scales"}:
            return None
        stored = scales if settings["scales"] == "compact" else LAYOUTS[settings["scales"]].store(scales)
        fits = all(n <= whole for n, whole in zip(stored.shape, right.shape, strict=True))
        return {"stored": ("e4m3", layout.pad(stored) if fits else stored)}

    return Set(
        f"{operation}.{rows}x{columns}",
        operation,
        f"scales of {rows} rows and {columns} block columns; padding is zero here and is not compared",
        {"scales": ("e4m3", scales)},
        {"stored": ("e4m3", right)},
        faulty,
    )


def of_transpose(case: Case) -> Set:
    """The codes and scales of a tensor of 16x16 blocks, and those of its transpose."""
    q = nv.quantize(case.x, block=(16, 16), amax=case.amax)
    packed, scales = layout.transpose_packed(q.packed), layout.transpose_tile_scales(q.scales)

    def faulty(settings: Settings) -> Named | None:
        if "nibbles" in settings:  # bytes transposed, the nibbles left where they were
            return {"packed_t": ("u8", np.resize(q.packed.T, packed.shape)), "scales_t": ("e4m3", scales)}
        if settings.get("scales") == "transposed":
            return {"packed_t": ("u8", packed), "scales_t": ("e4m3", np.ascontiguousarray(q.scales.T))}
        return None

    return Set(
        f"transpose.{case.id}",
        "transpose",
        "codes and scales of 16x16 blocks",
        {"packed": ("u8", q.packed), "scales": ("e4m3", q.scales)},
        {"packed_t": ("u8", packed), "scales_t": ("e4m3", scales)},
        faulty,
    )


def of_piece(start: int, length: int) -> Set:
    """A piece of a flattened 32x32 matrix, cast into codes that hold something else already."""
    shape, random = (32, 32), Random(10, start)
    x = random.floats(length, 124, 130)
    tiles = np.array([[384, 12.5], [0.01, 448]], np.float32)
    scale = np.float32(1293.4736)
    kept = Random(10, 10_000).bytes(32, 16)

    def cast(settings: Settings) -> Named | None:
        if not set(settings) <= {"whole-bytes", "start"}:
            return None
        at = settings.get("start", start)
        if at + length > shape[0] * shape[1]:
            return None
        out = partial_cast.partial_cast(x, tiles, scale, shape, at, kept)
        if "whole-bytes" in settings:  # a nibble beside the piece is cleared
            alone = partial_cast.partial_cast(x, tiles, scale, shape, at)
            touched = np.zeros(shape[0] * shape[1], bool)
            touched[at : at + length] = True
            out = np.where(touched.reshape(-1, 2).any(axis=1).reshape(out.shape), alone, kept)
        return {"packed": ("u8", out)}

    right = cast({})
    assert right is not None
    return Set(
        f"piece.{start}+{length}",
        "partial-cast-piece",
        f"{length} elements from element {start} on of a matrix of 32x32",
        {
            "x": ("f32", x),
            "tile_scales": ("f32", tiles),
            "scale": ("f32", np.asarray(scale).reshape(1)),
            "kept": ("u8", kept),
        },
        right,
        cast,
        parameters={"shape": list(shape), "start": start},
    )


# ---- matrix multiplication ---------------------------------------------------------------------------------


def _operand(rows: int, k: int, key: int, amax: float) -> nv.NVFP4Tensor:
    random = Random(11, rows, k, key)
    packed = random.bytes(rows, k // 2).reshape(rows, k // 2)
    scales = random.integers(rows * (k // 16), 0x20, 0x7F).astype(np.uint8).reshape(rows, k // 16)
    return nv.NVFP4Tensor.from_arrays(packed, scales, np.float32(amax))


def of_accumulator(what: str, shape: tuple[int, int, int], split_k: int = 1) -> Set:
    """The float32 accumulators of a matmul (M, N, K), before any factor."""
    a, b = _operands(shape)

    def accumulate(settings: Settings) -> Named | None:
        if not set(settings) <= {"model", "split_k"}:
            return None
        return {"d": ("f32", gemm.accumulate(a, b, **{"split_k": split_k, **settings}))}

    name = "accumulate" + (f".split{split_k}" if split_k > 1 else "")
    return _matmul_set(name, "accumulate", what, _stored(a, b), accumulate, shape, {"split_k": split_k})


def of_matmul(name: str, what: str, shape: tuple[int, int, int], bias: bool = False, **how: Any) -> Set:
    """A matmul (M, N, K) with its factor and epilogue; ``how`` are arguments of nvfp4ref.matmul, plain values."""
    (a, b), (m, n, _) = _operands(shape), shape
    added: Named = {}
    if "beta" in how:
        added["c"] = ("f32", Random(11, 2).moderate(m * n).reshape(m, n))
    if bias:
        added["bias"] = ("f32", Random(11, 3).moderate(n))
    sources = {key: array for key, (_, array) in added.items()}

    def multiply(settings: Settings) -> Named | None:
        if not set(settings) <= {"model", "split_k", "alpha_form", "rounded-before-bias"}:
            return None
        given = {**how, **settings, **sources}
        if given.pop("rounded-before-bias", False):  # the output type reached before the bias is added
            late = given.pop("bias")
            d = gemm.matmul(a, b, **given)
            return {"d": (type_of(d), (widen(d) + late).astype(d.dtype))}
        d = gemm.matmul(a, b, **given)
        return {"d": (type_of(d), d)}

    return _matmul_set(name, "matmul", what, {**_stored(a, b), **added}, multiply, shape, how)


def _operands(shape: tuple[int, int, int]) -> tuple[nv.NVFP4Tensor, nv.NVFP4Tensor]:
    m, n, k = shape
    return _operand(m, k, 0, 2.078125), _operand(n, k, 1, 2.03125)


def _stored(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor) -> Named:
    found: Named = {}
    for label, q in (("a", a), ("b", b)):
        found |= {f"{label}.packed": ("u8", q.packed), f"{label}.scales": ("e4m3", q.scales)}
        found[f"{label}.amax"] = ("f32", q.amax.reshape(1))
    return found


def _matmul_set(
    name: str,
    operation: str,
    what: str,
    given: Named,
    multiply: Faulty,
    shape: tuple[int, int, int],
    how: Mapping[str, Any],
) -> Set:
    right = multiply({})
    assert right is not None
    said = {key: np.dtype(value).name if key == "out_dtype" else value for key, value in how.items()}
    m, n, k = shape
    return Set(name, operation, what, given, right, multiply, parameters={"m": m, "n": n, "k": k, **said})

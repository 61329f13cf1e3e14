"""Inputs that tell candidates apart: where a dump cannot decide between explanations, another one can.

Blocks are built to sit on the boundaries of both roundings, for one tensor amax after the other, and every candidate
quantizes them.  What is returned has been run through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, get_args, get_type_hints

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance.diagnose import Diagnosis
from conformance.model import Model
from conformance.observed import Array, Evidence, Piece
from conformance.side import Side
from nvfp4ref import scaling
from nvfp4ref.dump import Dump

F = np.float32
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": F}
_COLUMNS = 128


@dataclass(frozen=True)
class Suggestion:
    """An input for the quantizer in question.

    Attributes:
        x: (R, 128) of the input's dtype, R a multiple of 16.
        candidates: the candidates by name, in the order of ``apart``.
        apart: pairs of names that give different outputs on x.
        later: pairs that x leaves alike and another input separates: ask again with the dump of x.
        alike: pairs that no input tried separates.
    """

    x: Array
    candidates: tuple[str, ...]
    apart: tuple[tuple[str, str], ...]
    later: tuple[tuple[str, str], ...]
    alike: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"quantize this {self.x.dtype} tensor of shape {self.x.shape} and check its dump:"]
        lines += [f"  it separates {a} from {b}" for a, b in self.apart]
        lines += [f"  another one will separate {a} from {b}" for a, b in self.later]
        lines += [f"  no input was found that separates {a} from {b}" for a, b in self.alike]
        return "\n".join(lines)


def suggest_input(dump: Dump, found: Diagnosis) -> Suggestion | None:
    """An input that separates the explanations of an ambiguous diagnosis; None when there is nothing to separate.

    Args:
        dump: what was diagnosed; its block shape, transform, type and declarations are kept.
        found: of conformance.diagnose.diagnosis(dump).
    """
    suffix = next((suffix for suffix, some in found.solutions.items() if len(some) > 1), None)
    if suffix is None:
        return None
    models = {" with ".join(one.ids): one.model for one in found.solutions[suffix]}
    return separate(models, dump, suffix) if len(models) > 1 else None


def separate(models: dict[str, Model], like: Dump, suffix: str = "") -> Suggestion:
    """The input, of those known here, on which most pairs of models differ."""
    pairs = list(combinations(models, 2))
    best: tuple[Array, list[tuple[str, str]]] | None = None
    anywhere: set[tuple[str, str]] = set()
    for x in _pools(like.x_dtype):
        apart = _apart(models, like, suffix, x, pairs)
        anywhere.update(apart)
        if best is None or len(apart) > len(best[1]):
            best = (x, apart)
        if len(apart) == len(pairs):
            break
    assert best is not None
    x, apart = best
    later = tuple(pair for pair in pairs if pair in anywhere and pair not in apart)
    return Suggestion(x, tuple(models), tuple(apart), later, tuple(pair for pair in pairs if pair not in anywhere))


# ---- running candidates ------------------------------------------------------------------------------------


def _outcome(model: Model, like: Dump, suffix: str, x: Array) -> tuple[Array, Array] | None:
    """Scale bytes (rows, blocks) and codes (16, rows, blocks) that a model gives for x; None: it cannot."""
    rows, columns = x.shape if not suffix else x.shape[::-1]
    empty = {"packed" + suffix: np.zeros((rows, columns // 2), np.uint8)}
    empty |= {"scales" + suffix: np.zeros((rows, columns // 16), np.uint8)}
    outputs = ("packed", "scales", "amax", "global_scale", "rbits")
    blank: dict[str, Any] = dict.fromkeys([*outputs, *(f"{name}_t" for name in outputs)])
    fields = blank | empty | {"x": x, "x_dtype": "", "global_scale_form": None, "scale_layout": "compact", "extra": {}}
    dump = replace(like, **fields)
    evidence = Evidence(Side(dump, suffix, dump.resolve_arithmetic()))
    model = replace(model, scales=None)
    if isinstance(model.amax, float) or not evidence.applicable(model):
        return None
    piece = Piece(evidence, (slice(None), slice(None)))
    byte = piece.bytes(model)
    return byte, piece.codes(model, byte)


def _different(a: tuple[Array, Array] | None, b: tuple[Array, Array] | None) -> Array | None:
    """Which blocks of two outcomes differ."""
    if a is None or b is None:
        return None
    different: Array = (a[0] != b[0]) | (a[1] != b[1]).any(0)
    return different


def _apart(
    models: dict[str, Model], like: Dump, suffix: str, x: Array, pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    outcomes = {name: _outcome(model, like, suffix, x) for name, model in models.items()}
    found = []
    for a, b in pairs:
        blocks = _different(outcomes[a], outcomes[b])
        if blocks is not None and blocks.any():
            found.append((a, b))
    return found


# ---- pools of blocks ---------------------------------------------------------------------------------------

_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F)
#: Tensor amaxes: exact quotients and thirds, where bfloat16 meets ties, then every other mantissa.
_AMAXES = (1.9493563175201416, 560.0, 896.0, 384.0, 21.0, 2688.0, 1000.0, 3.140625, 0.333984375)


def _pools(dtype: str) -> Iterator[Array]:
    """Tensors (R, 128) of one amax each, their first element, full of blocks on the boundaries of both roundings."""
    amaxes = [*_AMAXES, *(float(m) / 16 for m in range(129, 256, 6))]
    for number, amax in enumerate(amaxes):
        yield pool(dtype, amax, number)


def pool(dtype: str, amax: float, seed: int = 0) -> Array:
    """Blocks for one tensor amax: ties of the elements for every scale, ties of the scale, and random ones."""
    random = np.random.Generator(np.random.PCG64(seed))
    unit = F(amax) / F(2688)
    d = nv.e4m3.VALUES[1:0x7F]
    parts = [
        _tie_blocks(d, unit, random, dtype),
        _scale_blocks(d, unit, random, dtype),
        _random_blocks(amax, random),
        _zero_blocks(amax),
    ]
    blocks = np.concatenate(parts).astype(F)
    np.clip(blocks, -F(amax), F(amax), out=blocks)
    blocks = np.concatenate([np.full((1, 16), F(amax) / F(3), F), blocks])
    blocks[0, 0] = amax
    per_row = _COLUMNS // 16
    rows = -(-len(blocks) // (16 * per_row)) * 16 + 16
    rest = _random_blocks(amax, random)[: rows * per_row - len(blocks)]  # whole rows of plain data at the end
    with np.errstate(over="ignore"):
        return np.concatenate([blocks, rest]).reshape(rows, _COLUMNS).astype(_DTYPES[dtype])


def _cast(x: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(_DTYPES[dtype]).astype(F)


def _tie_blocks(d: Array, unit: Any, random: Any, dtype: str) -> Array:
    """[a, 7 ties, 7 negative ties, −0]: scaled elements at the E2M1 midpoints, or an ulp of the type beside."""
    found = []
    for offset in (0, 0, -1, 1):
        ties = _MIDPOINTS[None, :] * (d * unit)[:, None]
        ties = _moved(_cast(ties, dtype), offset, dtype)
        a = F(6) * d * unit
        found.append(np.concatenate([a[:, None], ties, -ties, np.full((len(d), 1), -0.0, F)], 1))
    random.shuffle(found[1])
    return np.concatenate(found)


def _moved(x: Array, steps: int, dtype: str) -> Array:
    """Moved by steps of the type away from zero."""
    kind = _DTYPES[dtype]
    unsigned = np.dtype(f"u{np.dtype(kind).itemsize}")
    bits = x.astype(kind).view(unsigned)
    return np.where(bits != 0, bits + unsigned.type(steps % 2 ** (8 * unsigned.itemsize)), bits).view(kind).astype(F)


def _scale_blocks(d: Array, unit: Any, random: Any, dtype: str) -> Array:
    """Block amaxes at the midpoints of E4M3 and beside them, over a ramp of elements."""
    middle = (d[1:].astype(np.float64) + d[:-1]) / 2
    steps = (np.arange(16, 0, -1) / 16).astype(F) * np.where(np.arange(16) % 2, F(-1), F(1))
    found = []
    for offset in (0, -1, 1, -2, 2):
        a = _moved(_cast((6 * middle * float(unit)).astype(F), dtype), offset, dtype)
        found.append(a[:, None] * steps)
    wide = (np.arange(128, 256)[:, None] * 2.0 ** np.arange(-27, -8)).astype(F).reshape(-1)
    some = wide if dtype != "float32" else (wide * random.uniform(0.5, 1, wide.shape)).astype(F)
    amax = _cast(F(2688) * unit, dtype)
    some = _cast(some * F(2.0) ** np.ceil(np.log2(amax) + 1).astype(F), dtype)
    some = some[some <= amax]
    found.append(some[_orders_differ(some, amax)][:, None] * steps)
    return np.concatenate(found)


def _orders_differ(a: Array, amax: Any) -> Array:
    """Block amaxes to which not all orders of the block scale's operations give one byte."""
    bytes_of = []
    for form in ("quotient", "reciprocal-form", "reciprocal-then-multiply"):
        for order in get_args(get_type_hints(nv.Arithmetic)["block_scale"]):
            ar = nv.arithmetic("te", global_scale=form, block_scale=order)
            scale = scaling.global_scale(np.asarray(amax), ar)
            value = scaling.prescaled(a, scale, ar) if order in scaling.PRESCALED else a
            bytes_of.append(nv.e4m3.encode(scaling.block_scale(value, scale, ar)))
    different: Array = np.logical_or.reduce([one != bytes_of[0] for one in bytes_of[1:]])
    return different


def _random_blocks(amax: float, random: Any) -> Array:
    """Normal blocks over twenty binades below the amax, mostly negative ones among them."""
    scale = F(amax) * F(2.0) ** -random.uniform(2, 20, (768, 1)).astype(F)
    blocks = random.standard_normal((768, 16)).astype(F) * scale
    blocks[::7] = -np.abs(blocks[::7])
    return np.asarray(blocks, F)


def _zero_blocks(amax: float) -> Array:
    """Zeros of both signs, and blocks so small that their scale is zero or subnormal."""
    blocks = np.zeros((32, 16), F)
    blocks[1::4] = -0.0
    small = F(amax) * F(2.0) ** -(18 + np.arange(8, dtype=F))
    blocks[2::4] = small[:, None] * np.where(np.arange(16) % 3, F(1), F(-0.4))
    return blocks


def probe(dtype: str = "float32") -> Array:
    """The suite's tensor for naming a deviation: known orders of operations differ on it as far as the type lets."""
    return pool(dtype, _PROBE_AMAX[dtype], 1)


#: Found by trying: for the float32 one, 7 block scales, 6 encode scales and 3 global scales give 14 different dumps.
_PROBE_AMAX = {"float32": 1.9493563175201416, "bfloat16": 560.0, "float16": 560.0}

"""Which stage of a quantization departs first, when an output differs from what the oracle expects.

Two ways, in this order.  *One changed step*: some other layout, block shape, transform or single field of the
arithmetic that explains every byte names its stage with certainty.  *Shape of the difference*: where no
single change does, the first output that differs, and how, narrows the stage down.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

import nvfp4ref as nv
from conformance.count import Array, Count
from conformance.side import Job, Quantized, Side, quantized, slabs

STAGES = (
    "amax",
    "global-scale",
    "block-scale",
    "encode-scale",
    "rounding",
    "packing",
    "layout",
    "transform",
    "random-bits",
    "unknown",
)

#: Fields of Arithmetic by the stage that they belong to, in the order of the stages.
FIELDS: dict[str, tuple[str, ...]] = {
    "transform": ("rht_sum",),
    "global-scale": ("global_scale", "global_guard", "global_type", "e4m3_max", "headroom"),
    "block-scale": (
        "block_scale",
        "sixth_type",
        "amax_nan",
        "block_amax",
        "amax_group",
        "block_scale_max",
        "block_scale_nan",
        "scale_rounding",
        "scale_overflow",
        "scale_floor",
        "zero_block_scale",
        "four_over_six",
        "four_over_six_fast_error",
        "four_over_six_sum",
    ),
    "encode-scale": (
        "encode_scale",
        "encode_max",
        "encode_nan",
        "encode_ulp",
        "reciprocal_of_zero",
        "zero_scale_elements",
        "flush_subnormals",
    ),
    "rounding": ("element_rounding", "element_via", "saturate", "negative_zero", "nan_code"),
    "packing": ("packing",),
    "layout": ("tile_scales",),
    "random-bits": ("stochastic",),
}
#: Fields that are no single change: the name, what a dump declares, and what only settles another field.
SETTLED = frozenset(
    ("name", "row_scaled", "zero_block_rule", "scale_nan_byte", "scale_invalid_byte")
    + ("nan_code_bfloat16", "nan_block_codes")
)
#: Values to try where the type of a field does not list them.
_VALUES: dict[str, tuple[Any, ...]] = {
    "headroom": (16 / 17,),
    "scale_floor": (2.0**-6, 2.0**-9),
    "zero_block_scale": (0x38, 0x20),
    "nan_code": tuple(range(16)),
}

#: About so many groups of 16 rows with a difference are tried before all rows.
_SAMPLE_GROUPS = 8


@dataclass(frozen=True)
class Finding:
    """The stage that departs first, and one sentence about it that a person can act on.

    ``changes`` are the single changes, as (stage, in words), that explain every byte of the direction.
    """

    stage: str
    sentence: str
    changes: tuple[tuple[str, str], ...] = ()


def find(side: Side, counts: dict[str, Count]) -> Finding | None:
    """The first stage of one direction that departs; None when nothing differs.

    Args:
        side: the direction, with x.
        counts: its outputs by name without suffix: "amax", "global_scale", "scales", "packed".
    """
    differs = {name for name, count in counts.items() if count.different}
    if not differs:
        return None
    before = differs & {"amax", "global_scale"}
    exact = _one_changed_step(side, "packed" in counts) if differs - before else None
    if exact is not None and (exact.stage == "transform" or not before):
        return exact
    return _amax_or_global_scale(side, counts) if before else _by_shape(side, counts)


def _amax_or_global_scale(side: Side, counts: dict[str, Count]) -> Finding:
    amax = counts.get("amax")
    if amax is not None and amax.different:
        return Finding(
            "amax",
            f"the recorded amax{side.suffix} {amax.found} is not max(abs(x)), {amax.expected}; "
            "scales and codes were judged with the recorded one: check what it was reduced over, and when",
        )
    count = counts["global_scale"]
    return Finding(
        "global-scale",
        f"the recorded global_scale{side.suffix} {count.found} is not {count.expected}, which "
        f"{'2688/amax' if side.dump.global_scale_form == 'encode' else 'its reciprocal form'} gives under "
        f"{side.arithmetic.name!r}; the rest was judged with the recorded one: check its operations",
    )


# ---- one changed step --------------------------------------------------------------------------------------


def _one_changed_step(side: Side, judge_codes: bool) -> Finding | None:
    """The first single change, in the order of the stages, that explains every code and scale byte."""
    expected = side.expected
    codes_agree = not judge_codes or _equal(side.found("packed"), expected.packed)
    for reading, scales in side.readings().items():
        if reading != side.dump.scale_layout and codes_agree and _equal(scales, expected.scales):
            return Finding("layout", _layout_sentence(side, reading))
    declared = side.declared_scales
    if declared is None:
        return None
    found = _Found(side.found("packed"), declared, expected, judge_codes)
    return explained([(stage, what) for stage, what, job in _changes(side) if found.explained_by(job)])


def explained(changes: Sequence[tuple[str, str]]) -> Finding | None:
    """The finding of changed steps that each explain every byte, given as (stage, in words); None without any."""
    if not changes:
        return None
    others = "".join(f"; so does, on this data, that {what}" for _, what in changes[1:3])
    sentence = f"one changed step explains every byte: {changes[0][1]}{others}"
    return Finding(changes[0][0], sentence, tuple(changes))


def _layout_sentence(side: Side, reading: str) -> str:
    declared = side.dump.scale_layout
    return (
        f"every code and scale byte is right, but scales{side.suffix} are {reading} where the dump declares "
        f"{declared}: store them {declared}, or declare what they are"
    )


class _Found:
    """What was found, in pieces of rows: those that differ first, for they refuse most candidates."""

    def __init__(self, packed: Array, scales: Array, expected: Quantized, judge_codes: bool) -> None:
        self.packed, self.scales, self.judge_codes = packed, scales, judge_codes
        unequal = (scales != expected.scales).any(axis=1)
        if judge_codes:
            unequal |= (packed != expected.packed).any(axis=1)
        groups = np.unique(np.flatnonzero(unequal) // 16)
        few = groups[:: max(1, len(groups) // _SAMPLE_GROUPS)]
        self._sample = [slice(16 * group, min(16 * group + 16, len(scales))) for group in few]

    def explained_by(self, job: Job) -> bool:
        """Whether a job gives exactly what was found."""
        if job.arithmetic.tile_scales == "tiled":  # a row's scales depend on all the others
            return self._holds(job, slice(None))
        pieces = [*self._sample, *slabs(*self.scales.shape)]
        return all(self._holds(job.part(piece, slice(None)), piece) for piece in pieces)

    def _holds(self, job: Job, piece: slice) -> bool:
        found = quantized(job)
        if not _equal(found.scales, self.scales[piece]):
            return False
        return not self.judge_codes or _equal(found.packed, self.packed[piece])


def _changes(side: Side) -> Iterator[tuple[str, str, Job]]:
    """Every single change: stage, what is changed in words, and the job that has it."""
    yield from _transform_changes(side)
    for stage, names in FIELDS.items():
        if stage == "block-scale":
            yield from _block_changes(side)
        for name in names:
            yield from _field_changes(side, stage, name)
    if side.dump.rounding != "nearest-even":
        yield (
            "random-bits",
            "elements are rounded to nearest where stochastic is declared",
            side.nearest().job(),
        )


def _field_changes(side: Side, stage: str, name: str) -> Iterator[tuple[str, str, Job]]:
    current = getattr(side.arithmetic, name)
    for value in _values(name):
        if value == current and type(value) is type(current):
            continue
        try:
            job = side.job(replace(side.arithmetic, **{name: value}))
        except (ValueError, TypeError):  # a combination that no quantizer has; other random numbers needed
            continue
        yield stage, f"{name} is {value!r} where {current!r} is declared", job


def _values(name: str) -> tuple[Any, ...]:
    """The values of a field: those of its type, or those listed above."""
    if name in _VALUES:
        return _VALUES[name]
    return _literals(get_type_hints(nv.Arithmetic)[name])


def _literals(annotation: Any) -> tuple[Any, ...]:
    if annotation is bool:
        return (False, True)
    if annotation is type(None):
        return (None,)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(value for part in get_args(annotation) for value in _literals(part))
    return ()


def _block_changes(side: Side) -> Iterator[tuple[str, str, Job]]:
    declared = side.dump.block
    other = (16, 16) if declared == (1, 16) else (1, 16)
    if all(n % 16 == 0 for n in side.shape):
        yield (
            "block-scale",
            f"blocks are {other[0]}x{other[1]} where {declared[0]}x{declared[1]} is declared",
            side.job(block=other),
        )


def _transform_changes(side: Side) -> Iterator[tuple[str, str, Job]]:
    """The declared transform left out or built wrongly, or the usual one where none is declared."""
    declared = side.rht
    candidates: dict[str, nv.RHT | None]
    if declared is None:
        candidates = {"a Hadamard transform was applied where none is declared": nv.RHT()}
    else:
        candidates = {
            "the declared Hadamard transform was not applied": None,
            "the Hadamard transform has no signs": replace(declared, sign_mask=0),
            "the Hadamard transform is not normalised as declared": replace(
                declared, normalised=not declared.normalised
            ),
            "the Hadamard transform is not rounded as declared": replace(
                declared, round_to="float32" if declared.round_to == "bfloat16" else "bfloat16"
            ),
        }
    for what, rht in candidates.items():
        try:
            yield "transform", what, side.job(rht=rht)
        except ValueError:  # the shape or dtype cannot be transformed
            continue


def _equal(found: Array, expected: Array) -> bool:
    return found.shape == expected.shape and bool((found == expected).all())


# ---- the shape of the difference ---------------------------------------------------------------------------


def _by_shape(side: Side, counts: dict[str, Count]) -> Finding:
    """The stage when no single change explains all: by the first output that differs, and by how it does."""
    scales = side.declared_scales
    if scales is None:
        return Finding(
            "layout",
            f"scales{side.suffix} of shape {side.found('scales').shape} are no known layout of "
            f"{side.shape[0]}x{side.shape[1] // 16} blocks: store (R, K/16), or that padded to 128 and 4",
        )
    if counts["scales"].different:
        return _scales_by_shape(side, scales, counts["scales"])
    return _codes_by_shape(side, counts["packed"])


def _scales_by_shape(side: Side, scales: Array, count: Count) -> Finding:
    expected = side.expected.scales
    if count.different > 16 and np.array_equal(np.sort(scales, axis=None), np.sort(expected, axis=None)):
        return Finding(
            "layout",
            f"scales{side.suffix} hold the expected bytes in another order: check how they are laid out",
        )
    steps = scales.astype(int) - expected.astype(int)
    one = int(np.count_nonzero(abs(steps) == 1))
    return Finding(
        "block-scale",
        f"{count.different:,} of {count.compared:,} block scales{side.suffix} differ, {one:,} by one E4M3 step: "
        "check the order of the scale's operations, its rounding, and which elements form a block",
    )


def _codes_by_shape(side: Side, count: Count) -> Finding:
    """Scales agree and codes do not: packing, the encode scale, or the rounding of the element."""
    if side.dump.rounding != "nearest-even":
        return Finding(
            "random-bits",
            f"scales{side.suffix} agree and {count.different:,} codes do not: "
            "check which random word feeds which element",
        )
    found, expected = (nv.e2m1.unpack(p) for p in (side.found("packed"), side.expected.packed))
    swapped = found.reshape(*found.shape[:-1], -1, 2)[..., ::-1].reshape(found.shape)
    if np.count_nonzero(swapped != expected) * 8 < count.different:
        return Finding(
            "packing",
            f"codes{side.suffix} agree once the nibbles are swapped: the even element belongs in the low one",
        )
    where = found != expected
    scaled = side.steps.scaled[where]
    found, expected = found[where], expected[where]
    distance = np.abs(_position(found) - _position(expected))
    if (distance > 1).any():
        far = int(np.count_nonzero(distance > 1))
        return Finding(
            "unknown",
            f"scales{side.suffix} agree, but {far:,} of {count.different:,} codes are more than one step away: "
            "check which elements a block and its scale belong to",
        )
    ties = np.isin(np.abs(scaled), _MIDPOINTS)
    if ties.all() or not _near_midpoint(scaled).all():
        what = f"{count.different:,} codes{side.suffix} differ by one step, "
        what += "all of them ties" if ties.all() else "not only beside ties"
        return Finding("rounding", f"{what}: check the element's rounding")
    return Finding(
        "encode-scale",
        f"{count.different:,} codes{side.suffix} differ by one step, all of them next to a midpoint: "
        "the scaled element is off by a few ulp, so check how the encode scale is formed and applied",
    )


_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def _near_midpoint(scaled: Array) -> Array:
    """Whether each lies within 2^-7, relative, of a midpoint: as far as a bfloat16 coefficient moves it."""
    magnitude = np.abs(scaled)[..., None]
    near = np.abs(magnitude - _MIDPOINTS) <= _MIDPOINTS * np.float32(2.0**-7)
    return np.asarray(near.any(-1))


def _position(codes: Array) -> Array:
    """Place of each code on the grid −6 … 6; both zeros are 0."""
    index = (codes & 7).astype(np.int8)
    return np.where(codes & 8, -index, index)

"""What ``assert_nvfp4_equal`` does: any producer's output as a dump, the verdict, and a message to work from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance.compare import CONFORMS, DIFFERS, NOT_JUDGED, Report, check
from conformance.count import count_amax
from conformance.deviations import STAGES
from conformance.explain import Explainer, Step
from conformance.side import Side
from nvfp4hw.export import to_dump
from nvfp4ref import arrays, e2m1
from nvfp4ref.dump import Dump, DumpError
from nvfp4ref.tensor import rows_of

Array = np.ndarray[Any, Any]

_OF_THE_TENSOR = ("amax", "global", "stored")  # steps that are the same for all of its elements
ELEMENTS = 5  # shown of those that differ
_HOW = ("block", "axis", "rounding", "rbits", "rht", "amax", "arithmetic", "threads", "scale_layout")
_OUTPUTS = ("packed", "scales", "amax", "global_scale")


#: Says of the first stage that departs whether a failure there is to be diagnosed, or why not.
InFull = Callable[[str], str | None]


def assert_equal(found: Any, x: Any, how: Mapping[str, Any], in_full: InFull | None = None) -> None:
    """Raise AssertionError with the diagnosis when ``found`` is not what the oracle makes of ``x``.

    So it does for arrays that are no output of that x.  TypeError or ValueError for what cannot be judged at all.
    """
    __tracebackhide__ = True
    try:
        dump = as_dump(found, x, how)
    except DumpError as reason:
        raise AssertionError(f"this is no NVFP4 output of that x: {reason}") from None
    report, text = judged(dump, how.get("amax"), in_full)
    if report.verdict == NOT_JUDGED:
        raise ValueError(f"this cannot be judged: {report.error}")
    if report.verdict == DIFFERS:
        raise AssertionError(text)


def judged(dump: Dump, given_amax: Any = None, in_full: InFull | None = None) -> tuple[Report, str]:
    """The verdict, and the message of a difference: the diagnosis, or the counts and why they are not diagnosed."""
    if in_full is not None:
        report = judge(dump, given_amax, diagnose=False)
        if report.verdict != DIFFERS:
            return report, ""
        why_not = in_full(report.stage or "unknown")
        if why_not is not None:
            return report, f"{report}\n\n{why_not}"
    report = judge(dump, given_amax)
    return report, message(report, dump, given_amax is not None) if report.verdict == DIFFERS else ""


# ---- as a dump ---------------------------------------------------------------------------------------------


def as_dump(found: Any, x: Any, how: Mapping[str, Any]) -> Dump:
    """A producer's output with its input, declared as it was quantized.

    Args:
        found: a Dump, an NVFP4Tensor, (packed, scales) or (packed, scales, amax) or a mapping of those names, NumPy,
            torch or JAX arrays; or a live object of a package that ``nvfp4hw.export.to_dump`` knows.
        x: the input that was quantized.
        how: arguments of nvfp4ref.quantize; and ``scale_layout``, "compact" or "swizzled".
    Raises:
        TypeError: an unknown argument or object.  ValueError: arrays that do not fit together or do not fit x.
    """
    unknown = sorted(set(how) - set(_HOW))
    if unknown:
        raise TypeError(f"there is no argument {unknown[0]!r}; how it was quantized is said by {', '.join(_HOW)}")
    dump = _outputs(found)
    suffix = "_t" if how.get("axis", -1) == 0 else ""
    changes: dict[str, Any] = {"x": rows_of(arrays.narrow(arrays.as_array(x))), "x_dtype": ""}
    if suffix and dump.packed is not None and dump.packed_t is None:  # an output of the transpose, without that name
        for name in _OUTPUTS:
            changes |= {name: None, name + "_t": getattr(dump, name)}
    changes |= {name: how[name] for name in ("block", "rounding", "scale_layout") if name in how}
    if how.get("arithmetic") is not None:
        changes["arithmetic"] = how["arithmetic"]
    if how.get("rht") is not None:
        changes["rht" + suffix] = how["rht"]
    if how.get("rbits") is not None:
        name = "rng" if isinstance(how["rbits"], nv.Philox) else "rbits"
        changes[name + suffix] = how["rbits"]
    if how.get("amax") is not None and dump.amax is None and changes.get("amax" + suffix) is None:
        changes["amax" + suffix] = np.asarray(how["amax"], np.float32).reshape(-1)
    return replace(dump, **changes)


def _outputs(found: Any) -> Dump:
    """The object's own arrays, with what it says about itself."""
    if isinstance(found, Mapping) and {"packed", "scales"} <= set(found):
        unknown = sorted(set(found) - {"packed", "scales", "amax", "global_scale", "global_scale_form"})
        if unknown:
            raise TypeError(f"a dictionary of outputs has packed, scales and amax; got {unknown[0]!r} too")
        return _plain(found["packed"], found["scales"], found.get("amax"))
    if isinstance(found, np.ndarray):
        raise TypeError(f"one array of {found.dtype} is no NVFP4 output: give (packed, scales, amax)")
    if isinstance(found, (tuple, list)) and len(found) in (2, 3) and not hasattr(found[0], "_quantized_data"):
        return _plain(*found)
    return to_dump(found)


def _plain(packed: Any, scales: Any, amax: Any = None) -> Dump:
    """Arrays of an unknown producer, which declares nothing; codes may be one a byte where their type says so."""
    given = (packed, scales) if amax is None else (packed, scales, np.asarray(arrays.from_torch(amax), np.float32))
    dump = to_dump(tuple(arrays.from_torch(one) for one in given))
    return replace(dump, arithmetic=None, producer={})


# ---- the verdict -------------------------------------------------------------------------------------------

_WRONG_AMAX = "global-scale.wrong-amax"


def judge(dump: Dump, given_amax: Any = None, *, diagnose: bool = True) -> Report:
    """``check``; an amax that was given is compared with what was given, not with max(abs(x))."""
    report = check(dump, diagnose=diagnose)
    if given_amax is None:
        return report
    outputs = dict(report.outputs)
    wanted = np.asarray(given_amax, np.float32).reshape(-1)
    amaxes = [name for name in ("amax", "amax_t") if name in outputs]
    outputs |= {name: count_amax(getattr(dump, name), wanted) for name in amaxes}
    if any(outputs[name].different for name in amaxes):
        sentence = "the amax that was given is not the one that was used"
        return replace(report, verdict=DIFFERS, outputs=outputs, stage="amax", sentences=(sentence,), deviations=())
    if not any(one.different for one in outputs.values()):
        verdict = NOT_JUDGED if report.error else CONFORMS
        return replace(report, verdict=verdict, outputs=outputs, stage=None, sentences=(), deviations=())
    named = tuple(
        replace(one, together=tuple(ident for ident in one.together if ident != _WRONG_AMAX))
        for one in report.deviations
        if one.id != _WRONG_AMAX
    )
    by_shape = None if diagnose or report.stage == "amax" else report.stage
    stage = min((one.stage for one in named), key=STAGES.index, default=by_shape)
    return replace(report, outputs=outputs, stage=stage, sentences=tuple(map(str, named)), deviations=named)


# ---- the message -------------------------------------------------------------------------------------------


def message(report: Report, dump: Dump, given_amax: bool = False) -> str:
    """What differs, what is known to give such a difference, and every intermediate of a few elements."""
    lines = [str(report)]
    for suffix in ("", "_t"):
        if any(report.outputs.get(name + suffix) and report.outputs[name + suffix].different for name in _OUTPUTS):
            lines += ["", *_elements(Side(dump, suffix, dump.resolve_arithmetic()), given_amax)]
            break
    return "\n".join(lines)


def _elements(side: Side, given_amax: bool) -> list[str]:
    """The table of elements; one sentence where the outputs do not allow it."""
    try:
        places, what = _places(side)
        explained = [Explainer(side, *place).explanation().steps for place in places]
        if given_amax:  # which is compared with nothing
            explained = [tuple(map(_given, steps)) for steps in explained]
    except ValueError as reason:
        return [f"no element can be followed: {reason}"]
    first = f"{what}, {side.direction} [row, column]; found only where it differs"
    return [first, *_table([f"[{row}, {column}]" for row, column in places], explained)]


def _given(step: Step) -> Step:
    """An amax that was given, as one that cannot be wrong."""
    return Step("amax A, given", step.found) if step.name.startswith("amax A (") else step


def _places(side: Side) -> tuple[list[tuple[int, int]], str]:
    """A few elements that differ, of different blocks first, and what they are."""
    found, expected = side.found("packed"), side.expected.packed
    scales = side.declared_scales
    if found.shape == expected.shape:
        differing = np.argwhere(e2m1.unpack(found ^ expected))
        if len(differing):
            _, first = np.unique(differing[:, 0] * side.shape[1] + differing[:, 1] // 16, return_index=True)
            order = np.concatenate([first, np.setdiff1d(np.arange(min(len(differing), ELEMENTS)), first)])
            chosen = differing[order[:ELEMENTS]]
            return [(int(r), int(c)) for r, c in chosen], f"{len(chosen)} of the elements whose code differs"
    if scales is not None and scales.shape == side.expected.scales.shape:
        blocks = np.argwhere(scales != side.expected.scales)[:ELEMENTS]
        if len(blocks):
            return [(int(r), 16 * int(c)) for r, c in blocks], "first elements of blocks whose scale byte differs"
    return [(0, column) for column in range(ELEMENTS)], "the first elements"


def _table(titles: Sequence[str], explained: Sequence[Sequence[Step]]) -> list[str]:
    """A column an element, a row a step, the bits below the value; what all elements share stands once, above."""
    rows: list[tuple[str, list[str]]] = [("", list(titles))]
    shared = []
    for steps in zip(*explained, strict=True):
        name = steps[0].name.removesuffix(" (a tie)").partition(", element ")[0]
        values = [step.expected + (" tie" if step.name.endswith(" (a tie)") else "") for step in steps]
        wrong = [not step.agrees for step in steps]
        if len(steps) > 1 and len(set(values)) == 1 and not any(wrong) and name.startswith(_OF_THE_TENSOR):
            shared.append(f"{name} {values[0]}")
            continue
        rows += _cells(f"{name}, expected" if any(wrong) else name, values)
        if any(wrong):
            rows += _cells("found", [step.found if not step.agrees else "" for step in steps])
    width = [max(len(cells[column]) for _, cells in rows) for column in range(len(titles))]
    margin = max(len(name) for name, _ in rows)
    table = [
        "  ".join([f"  {name:<{margin}}", *(cell.ljust(n) for cell, n in zip(cells, width, strict=True))]).rstrip()
        for name, cells in rows
    ]
    return [f"  {line}" for line in shared] + table


def _cells(name: str, values: list[str]) -> list[tuple[str, list[str]]]:
    """A row of values, and one of their bits where they have any: "1.5 (0x3FC00000)"."""
    upper, lower = [], []
    for value in values:
        number, _, bits = value.partition(" (")
        pattern, _, rest = bits.partition(")")
        upper.append(number + rest)
        lower.append(pattern)
    rows = [(name, upper)]
    return [*rows, ("", lower)] if any(lower) else rows

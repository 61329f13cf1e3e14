"""explain(): every intermediate of one element.  diff(): what separates two producers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance.compare import Report, check
from conformance.count import Count, bits, count, count_codes
from conformance.side import Side
from nvfp4ref import e2m1
from nvfp4ref.dump import Dump
from nvfp4ref.fp32 import widen

# ---- explain -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One intermediate: its name, the expected value, and the found one where the dump records it."""

    name: str
    expected: str
    found: str = ""
    agrees: bool = True


@dataclass(frozen=True)
class Explanation:
    """The steps of one element in the order of the arithmetic."""

    title: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        rows = [("", "expected", "found"), *((step.name, step.expected, step.found) for step in self.steps)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [self.title]
        for row, step in zip(rows, (None, *self.steps), strict=True):
            mark = "  <-- differs" if step is not None and not step.agrees else ""
            lines.append(f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}{mark}".rstrip())
        return "\n".join(lines)


def explain(
    dump: Dump,
    row: int,
    column: int,
    columnwise: bool = False,
    arithmetic: str | nv.Arithmetic | None = None,
) -> Explanation:
    """Every intermediate of one element of the result, [row, column] of (R, C), or of (C, R) when columnwise.

    Raises:
        ValueError: the dump has no such output, no input x or no such element.
    """
    suffix = "_t" if columnwise else ""
    if getattr(dump, "packed" + suffix) is None:
        if dump.d is not None:
            raise ValueError("the dump holds a GEMM, and explain takes an element of a quantized tensor")
        raise ValueError(f"the dump has no {'columnwise' if columnwise else 'rowwise'} output to explain")
    if dump.x is None:
        raise ValueError(
            "the dump has no input x, so there is nothing to explain its output by: save x with it"
        )
    side = Side(dump, suffix, dump.resolve_arithmetic(arithmetic))
    rows, columns = side.shape
    if not (0 <= row < rows and 0 <= column < columns):
        raise ValueError(
            f"element [{row}, {column}] is outside the {side.direction} output of shape {side.shape}"
        )
    return Explainer(side, row, column).explanation()


class Explainer:
    """Reads one element out of the oracle's intermediates and out of the dump."""

    def __init__(self, side: Side, row: int, column: int) -> None:
        self.side, self.row, self.column = side, row, column
        self.place, self.block = (row, column), (row, column // 16)

    def explanation(self) -> Explanation:
        side, steps = self.side, self.side.steps
        tie = " (a tie)" if abs(float(steps.scaled[self.place])) in _MIDPOINTS else ""
        lines = [
            Step(
                "x" if side.rht is None else "x after the Hadamard transform",
                _number(widen(side.values[self.row : self.row + 1, self.column])[0]),
            ),
            self._amax(),
            *self._global_scale(),
            Step("block amax a", _number(steps.block_amax[self.block])),
            *self._errors(),
            Step("block scale before E4M3", _number(steps.block_scale[self.block])),
            self._scale_byte(),
            Step("encode scale e", _number(steps.encode_scale[self.block])),
            Step("scaled element" + tie, _number(steps.scaled[self.place])),
            *self._random(),
            self._code(),
            self._value(),
        ]
        first, top = self.column - self.column % 16, self.row - self.row % 16
        tile = f"rows {top}..{top + 15}, " if side.dump.block == (16, 16) else ""
        title = (
            f"element [{self.row}, {self.column}] of the {side.direction} output, "
            f"block of {tile}columns {first}..{first + 15}, arithmetic {side.arithmetic.name}"
        )
        return Explanation(title, tuple(lines))

    def _of_row(self, value: Any) -> Any:
        value = np.asarray(value).reshape(-1)
        return value[self.row if value.size > 1 else 0]

    def _amax(self) -> Step:
        recorded = self.side.found("amax")
        expected = self._of_row(self.side.true_amax)
        if recorded is None:
            return Step("amax A", _number(expected))
        found = self._of_row(recorded)
        return Step(
            "amax A (the recorded one is used)",
            _number(expected),
            _number(found),
            bool(bits(found) == bits(expected)),
        )

    def _global_scale(self) -> list[Step]:
        steps = [Step("global scale S", _number(self._of_row(self.side.steps.global_scale)))]
        recorded = self.side.found("global_scale")
        if recorded is not None:
            expected, found = self._of_row(self.side.expected_global_scale), self._of_row(recorded)
            name = f"stored global scale, {self.side.dump.global_scale_form} form"
            steps.append(Step(name, _number(expected), _number(found), bool(bits(found) == bits(expected))))
        return steps

    def _errors(self) -> list[Step]:
        steps = self.side.steps
        if steps.err4 is None or steps.err6 is None:
            return []
        return [
            Step("error of mapping to 4", _number(steps.err4[self.block])),
            Step("error of mapping to 6", _number(steps.err6[self.block])),
        ]

    def _scale_byte(self) -> Step:
        expected = self.side.expected.scales[self.block]
        scales = self.side.declared_scales
        if scales is None:
            return Step("block scale, E4M3", _e4m3(expected), "(unknown layout)", False)
        found = scales[self.block]
        return Step("block scale, E4M3", _e4m3(expected), _e4m3(found), bool(found == expected))

    def _random(self) -> list[Step]:
        words = self.side.words
        if words is None:
            return []
        place = (self.row, self.column * words.shape[1] // self.side.shape[1])
        if words.dtype != np.uint32:
            return [Step("random number", str(words[place]))]
        word = Step("random word", f"0x{int(words[place]):08X}")
        return [word, *self._carry(words[place])] if self.side.arithmetic.stochastic == "sm100" else [word]

    def _carry(self, word: Any) -> list[Step]:
        """The 16 bits that this element sees of its word, the fraction of its grid step, and whether they carry."""
        field = int(e2m1.sm100_fields(np.array([word], np.uint32))[self.column % 4][0])
        magnitude = np.abs(self.side.steps.scaled[self.row : self.row + 1, self.column])
        fraction = int(e2m1.grid_position(magnitude)[0]) & 0xFFFF
        total = fraction + field
        outcome = "carries: away from zero" if total >= 0x10000 else "does not carry: toward zero"
        return [
            Step(f"its bits, element {self.column % 4} of 4", f"0x{field:04X}"),
            Step("fraction of the grid step", f"0x{fraction:04X} / 0x10000"),
            Step("fraction + bits", f"0x{total:05X}, {outcome}"),
        ]

    def _code(self) -> Step:
        expected, found = self._codes()
        return Step("code, E2M1", _e2m1(expected), _e2m1(found), expected == found)

    def _codes(self) -> tuple[int, int]:
        byte, shift = (self.row, self.column // 2), 4 * (self.column % 2)
        expected, found = self.side.expected.packed[byte], self.side.found("packed")[byte]
        return int(expected) >> shift & 15, int(found) >> shift & 15

    def _value(self) -> Step:
        expected, found = self._codes()
        amax = self._of_row(self.side.amax)
        scales = self.side.declared_scales
        scale = None if scales is None else scales[self.block]
        return Step(
            "dequantized",
            _number(self._dequantized(expected, self.side.expected.scales[self.block], amax)),
            "" if scale is None else _number(self._dequantized(found, scale, amax)),
        )

    def _dequantized(self, code: int, scale: Any, amax: Any) -> Any:
        packed = np.full((1, 8), code * 17, np.uint8)
        arithmetic = replace(self.side.arithmetic, packing="low-nibble-first", row_scaled=False)
        q = nv.NVFP4Tensor.from_arrays(
            packed, np.full((1, 1), scale, np.uint8), np.float32(amax), arithmetic=arithmetic
        )
        return nv.dequantize(q)[0, 0]


_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _number(value: Any) -> str:
    """A float32 with its bit pattern."""
    value = np.float32(value)
    return f"{value!s} (0x{int(value.view(np.uint32)):08X})"


def _e4m3(byte: Any) -> str:
    return f"{nv.e4m3.decode(np.array([byte], np.uint8))[0]!s} (0x{int(byte):02X})"


def _e2m1(code: int) -> str:
    return f"{nv.e2m1.decode(np.array([code], np.uint8))[0]!s} (0x{code:X})"


# ---- diff --------------------------------------------------------------------------------------------------

#: Outputs in the order in which they follow from each other, and the stage of a first difference.
_ORDER = (
    ("amax", "amax"),
    ("global_scale", "global-scale"),
    ("scales", "block-scale"),
    ("packed", "encode-scale or rounding"),
)


@dataclass(frozen=True)
class Difference:
    """Two dumps of one tensor held against each other, and each against the oracle where x is known.

    Attributes:
        outputs: counts by output name; "found" is A's, "expected" B's.
        stage: the first output that separates them, None when they are equal.
        a, b: the reports of the two, None where neither dump has x.
        notes: what was declared differently, or is in one dump only.
    """

    outputs: dict[str, Count]
    stage: str | None
    a: Report | None
    b: Report | None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 the same bytes, 1 not."""
        return int(self.stage is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "outputs": {name: count.to_json() for name, count in self.outputs.items()},
            "stage": self.stage,
            "notes": list(self.notes),
            "a": None if self.a is None else self.a.to_json(),
            "b": None if self.b is None else self.b.to_json(),
        }

    def __str__(self) -> str:
        lines = ["A and B are equal" if self.stage is None else f"A and B differ, first at {self.stage}"]
        width = max(map(len, self.outputs), default=0)
        for name, one in self.outputs.items():
            said = str(one).replace("found", "A").replace("expected", "B")
            lines.append(f"  {name:<{width}}  {said}")
        lines += [f"  {note}" for note in self.notes]
        for name, report in (("A", self.a), ("B", self.b)):
            if report is not None:
                lines += [
                    f"{name} {line}" if i == 0 else line for i, line in enumerate(str(report).splitlines())
                ]
        return "\n".join(lines)


def diff(a: Dump, b: Dump, arithmetic: str | nv.Arithmetic | None = None) -> Difference:
    """Compare two producers' dumps of the same tensor.

    Args:
        a, b: dumps of one shape; an x that only one of them has serves for both.
        arithmetic: what to judge both by; default: what each declares.
    Raises:
        ValueError: shapes or inputs differ, so they are not of the same tensor.
    """
    _same_tensor(a, b)
    outputs: dict[str, Count] = {}
    notes = [f"{name}: A declares {mine!r}, B {theirs!r}" for name, mine, theirs in _declarations(a, b)]
    first: str | None = None
    for suffix in ("", "_t"):
        for name, stage in _ORDER:
            found, other = getattr(a, name + suffix), getattr(b, name + suffix)
            if found is None and other is None:
                continue
            if found is None or other is None:
                notes.append(f"{name + suffix} is in {'B' if found is None else 'A'} only")
                continue
            outputs[name + suffix] = _count(a, b, name, suffix)
            if outputs[name + suffix].different and first is None:
                first = stage
    if not outputs:
        raise ValueError("the dumps have no output in common: one is rowwise, the other columnwise")
    x = a.x if a.x is not None else b.x
    if x is None:
        return Difference(outputs, first, None, None, tuple(notes))
    a, b = (replace(dump, x=x, x_dtype="") for dump in (a, b))
    if first is not None:
        # what each is by the other's arithmetic says what separates them, even when both conform to their own
        apart = [check(b, a.resolve_arithmetic(arithmetic)), check(a, b.resolve_arithmetic(arithmetic))]
        first = next((report.stage for report in apart if report.stage is not None), first)
        notes += [f"B by A's arithmetic: {sentence}" for sentence in apart[0].sentences]
    return Difference(outputs, first, check(a, arithmetic), check(b, arithmetic), tuple(notes))


def _same_tensor(a: Dump, b: Dump) -> None:
    if a.shape is None or b.shape is None:
        raise ValueError("diff takes dumps of quantized tensors; one of these holds a GEMM")
    if a.shape != b.shape:
        raise ValueError(f"the dumps are of different tensors: A is of shape {a.shape}, B of {b.shape}")
    if a.x is not None and b.x is not None:
        inputs = count(*(np.asarray(dump.x) for dump in (a, b)))
        if inputs.different:
            raise ValueError(
                f"the dumps are of different tensors: their inputs x differ in {inputs.different:,} elements"
            )


def _declarations(a: Dump, b: Dump) -> list[tuple[str, Any, Any]]:
    names = ("block", "rounding", "rht", "rht_t", "global_scale_form", "arithmetic")
    return [(n, getattr(a, n), getattr(b, n)) for n in names if getattr(a, n) != getattr(b, n)]


def _count(a: Dump, b: Dump, name: str, suffix: str) -> Count:
    if name == "packed":
        return count_codes(getattr(a, name + suffix), getattr(b, name + suffix))
    if name != "scales":
        return count(getattr(a, name + suffix), getattr(b, name + suffix))
    compact = [Side(dump, suffix, dump.resolve_arithmetic()).declared_scales for dump in (a, b)]
    stored = [getattr(dump, name + suffix) for dump in (a, b)]
    return count(*(raw if read is None else read for read, raw in zip(compact, stored, strict=True)))

"""The verifier of the pipe: every answer held against the specification, and the stream against what was asked.

Nothing that a device does ends in a hang or a traceback: lines that are malformed, lost, doubled or out of order, and
a stream that stops, are counted and shown with their line numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conformance.deviations import DEVIATIONS
from conformance.vectors.fields import Array, different_rows
from conformance.vectors.groups import GROUPS
from conformance.vectors.operations import Operation, Settings
from conformance.vectors.pipe import DECLINED, Batch, Plan
from conformance.vectors.source import LONGEST, Stalled, TooLong
from nvfp4ref.container import agreed, counted

EXAMPLES = 3  # shown of each kind
KEPT = 2048  # answers of an operation that deviations are tried on, of right ones and of wrong ones
PATIENCE = 100  # malformed lines after which a device is not listened to any more
LATE = 1 << 16  # lines passed over that may still come


class _Item(NamedTuple):
    """One line of the stream as it should come back."""

    number: int
    rule: str
    operation: Operation
    request: str
    results: str


@dataclass
class Example:
    """A wrong answer: where it stands in the device's output, what was asked, found and expected."""

    line: int
    number: int
    rule: str
    operands: list[str]
    found: list[str]
    expected: list[str]


@dataclass
class Tally:
    """One operation's answers."""

    operation: Operation
    right: int = 0
    wrong: int = 0
    declined: int = 0
    rules: dict[str, int] = field(default_factory=dict)  # rule -> wrong answers
    examples: list[Example] = field(default_factory=list)
    kept: list[Example] = field(default_factory=list, repr=False)
    agreeing: list[_Item] = field(default_factory=list, repr=False)

    @property
    def judged(self) -> int:
        """Answers that were compared."""
        return self.right + self.wrong

    @property
    def deviations(self) -> list[str]:
        """Known faults, each of which gives exactly the answers found: ids, or words where there is no id."""
        return list(dict.fromkeys(_explanations(self))) if self.kept else []


@dataclass
class Outcome:
    """What a stream of answers is worth.

    Attributes:
        plan: what was asked; None when not even that is known.
        tallies: by operation.
        faults: what is wrong with the stream itself, a sentence each with the line's number.
        counts: of those, by kind.
        read_to_the_end: the device closed its output; otherwise it was not listened to any more.
    """

    plan: Plan | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    read_to_the_end: bool = False

    @property
    def judged(self) -> int:
        """Answers compared."""
        return sum(one.judged for one in self.tallies.values())

    @property
    def wrong(self) -> int:
        """Answers that differ."""
        return sum(one.wrong for one in self.tallies.values())

    @property
    def exit_code(self) -> int:
        """0: every answer right; 1: some wrong; 2: a stream that is not whole, or that answers nothing."""
        if self.faults or not self.judged:
            return 2
        return 1 if self.wrong else 0

    def fault(self, kind: str, sentence: str) -> None:
        """Count a fault of the stream; the first ones of a kind are kept in words."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= EXAMPLES:
            self.faults.append(sentence)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "exit_code": self.exit_code,
            "stream": None if self.plan is None else self.plan.header,
            "judged": self.judged,
            "wrong": self.wrong,
            "faults": self.faults,
            "fault_counts": self.counts,
            "operations": {
                name: {
                    "right": one.right,
                    "wrong": one.wrong,
                    "declined": one.declined,
                    "rules": one.rules,
                    "deviations": one.deviations,
                    "examples": [vars(example) for example in one.examples],
                }
                for name, one in self.tallies.items()
            },
        }

    def __str__(self) -> str:
        lines: list[str] = []
        width = max(map(len, self.tallies), default=0)
        for name, one in self.tallies.items():
            lines += _tally_lines(name.ljust(width), one)
        lines += self.faults
        lines += [f"{n:,} {kind} in all" for kind, n in self.counts.items() if n > EXAMPLES]
        right = sum(not one.wrong for one in self.tallies.values() if one.judged)
        judged = sum(bool(one.judged) for one in self.tallies.values())
        verdict = {0: "right", 1: "WRONG", 2: "NOT JUDGED" if not self.judged else "NOT WHOLE"}[self.exit_code]
        lines.append(
            f"{verdict}: {right} of {counted(judged, 'operation')} right, "
            f"{self.wrong:,} of {counted(self.judged, 'answer')} {agreed(self.wrong, 'differs', 'differ')}"
            + (f"; the stream is not whole: {counted(sum(self.counts.values()), 'fault')}" if self.faults else "")
        )
        return "\n".join(lines)


def _tally_lines(label: str, one: Tally) -> Iterator[str]:
    differ = f"{one.wrong:,} {agreed(one.wrong, 'differs', 'differ')}" if one.wrong else "all right"
    parts = [f"{counted(one.judged, 'answer')}, {differ}"] if one.judged else []
    parts += [f"{one.declined:,} declined"] if one.declined else []
    yield f"{label}  {'; '.join(parts)}"
    names = [item.name for item in one.operation.operands]
    explanations = one.deviations if one.wrong else []
    for example in one.examples[: 1 if explanations else EXAMPLES]:
        operands = " ".join(f"{name}={_short(text)}" for name, text in zip(names, example.operands, strict=True))
        found, expected = (" ".join(map(_short, texts)) for texts in (example.found, example.expected))
        yield f"  line {example.line} ({example.rule}): {operands}"
        yield f"    found {found}, expected {expected}"
    if one.wrong:
        for ident in explanations[:3]:
            known = DEVIATIONS.get(ident)
            fix = "" if known is None else f": {known.what}; {known.fix} (docs/deviations.md#{known.anchor})"
            yield f"  {ident} explains every difference{fix}"
        if not explanations:
            yield f"  no known deviation explains them; rules: {', '.join(one.rules)}"


# ---- explaining --------------------------------------------------------------------------------------------


def _explanations(tally: Tally) -> Iterator[str]:
    """Faults under which the operation answers as the device did, on the answers that were kept, right ones too."""
    operation = tally.operation
    texts = [one.operands for one in tally.kept] + [one.request.split()[2:] for one in tally.agreeing]
    found = [one.found for one in tally.kept] + [one.results.split() for one in tally.agreeing]
    operands = _columns(operation.operands, texts)
    results = _columns(operation.results, found)
    for label, settings in _known(operation, tally.rules):
        answers = operation.faulty(operands, settings)
        if answers is not None and not different_rows(results, answers).any():
            yield label


def _columns(fields: tuple[Any, ...], rows: list[list[str]]) -> tuple[Array, ...]:
    return tuple(item.array(column) for item, column in zip(fields, zip(*rows, strict=True), strict=True))


def _known(operation: Operation, rules: Iterable[str]) -> Iterator[tuple[str, Settings]]:
    """(name, settings) of every fault that an operation can have: known deviations, then those of its groups."""
    for ident, entry in DEVIATIONS.items():
        for change in entry.changes:
            if set(change) <= operation.settings:
                yield ident, change
    for rule in rules:
        for what, settings in GROUPS[rule].faults.items():
            if set(settings) <= operation.settings:
                yield what, settings


# ---- reading -----------------------------------------------------------------------------------------------


class Verifier:
    """Takes the lines of a device one after the other; ``outcome`` grows with them."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.accepted = 0  # lines that were answers, and the header
        self._line = 0  # of the device's output
        self._last = 0  # line of the last answer
        self._ended = False
        self._batches: Iterator[Batch] = iter(())
        self._items: list[_Item] = []
        self._full: list[bytes] = []
        self._at = 0
        self._late: dict[int, _Item] = {}
        self._lost = 0  # passed over, and no longer kept
        self._total = 0

    def read(self, source: Iterable[bytes], timeout: float | None = None) -> Outcome:
        """Read to the end of the stream, or to where reading on makes no sense."""
        try:
            for line in source:
                self._line += 1
                if self._at < len(self._full) and line == self._full[self._at]:  # nearly always
                    self._right(self._items[self._at])
                    self._at += 1
                elif not self._other(line):
                    return self.outcome
                if self._at == len(self._items):
                    self._advance()
        except Stalled:
            self._stop(f"no answer for {timeout:g} s after {self._where()}: the device hangs, or is too slow")
            return self.outcome
        except TooLong:
            self._stop(f"line {self._line + 1}: longer than {LONGEST:,} characters")
            return self.outcome
        except OSError as error:
            self._stop(f"the stream cannot be read after {self._where()}: {error.strerror or error}")
            return self.outcome
        self._finish()
        return self.outcome

    def _where(self) -> str:
        return f"line {self._last}" if self._last else "the start"

    def _stop(self, sentence: str) -> None:
        self.outcome.fault("stop", sentence)

    def _malformed(self, why: str) -> bool:
        """Count a malformed line; False when there have been enough."""
        self.outcome.fault("malformed lines", f"line {self._line}: {why}")
        if self.outcome.counts["malformed lines"] < PATIENCE:
            return True
        self._stop(f"line {self._line}: the {PATIENCE}th malformed line; the rest was not read")
        return False

    def _advance(self) -> None:
        """The next lines to expect."""
        self._items, self._full, self._at = [], [], 0
        batch = next(self._batches, None)
        if batch is not None:
            pairs = enumerate(zip(batch.requests(), batch.results(), strict=True), batch.first)
            self._items = [_Item(n, batch.rule, batch.operation, request, result) for n, (request, result) in pairs]
            self._full = [f"{item.request} {item.results}".encode() for item in self._items]

    def _next_number(self) -> int:
        return self._items[self._at].number if self._items else self._total + 1

    # ---- one line ------------------------------------------------------------------------------------------

    def _other(self, raw: bytes) -> bool:
        """A line that is not simply the right answer; False: read no further."""
        try:
            line = raw.decode("ascii").strip()
        except UnicodeDecodeError:
            return self._malformed("holds bytes that are no ASCII text")
        if self.outcome.plan is None:
            return self._header(line)
        if not line:
            return True
        if line.startswith("#"):
            return self._comment(line)
        words = line.split()
        if not words[0].isdigit() or len(words[0]) > 18:
            return self._malformed(f"{_shown(line)} begins with no line number")
        number = int(words[0])
        if not 1 <= number <= self._total:
            return self._malformed(f"the number {number} is none of 1..{self._total}")
        if self._ended:
            return self._malformed(f"{_shown(line)} stands behind the end")
        return self._numbered(number, words)

    def _header(self, line: str) -> bool:
        if not line.startswith("# nvfp4-pipe"):
            return self._malformed(f"{_shown(line)} stands before the line '# nvfp4-pipe …' that begins the stream")
        try:
            self.outcome.plan = Plan.of_header(line)
        except ValueError as reason:
            self._stop(f"line {self._line}: {reason}")
            return False
        self._total, self._batches = self.outcome.plan.total, self.outcome.plan.batches()
        self.accepted += 1
        self._advance()
        return True

    def _comment(self, line: str) -> bool:
        words = line.split()
        if words[:2] == ["#", "end"]:
            self._ended, self._full = True, []
            if words[2:] != [str(self._total)]:
                return self._malformed(f"{_shown(line)} is not '# end {self._total}'")
        return True

    def _numbered(self, number: int, words: list[str]) -> bool:
        following = self._next_number()
        if number < following:
            item = self._late.pop(number, None)
            if item is None:
                self.outcome.fault("doubled lines", f"line {self._line}: number {number} for the second time")
                return True
            self.outcome.fault("lines out of order", f"line {self._line}: number {number} comes after {following - 1}")
            return self._judge(item, words)
        while self._next_number() < number:
            self._late[self._next_number()] = self._items[self._at]
            if len(self._late) > LATE:
                self._lost += 1
                self._late.pop(next(iter(self._late)))
            self._step()
        item = self._items[self._at]
        self._step()
        return self._judge(item, words)

    def _step(self) -> None:
        self._at += 1
        if self._at == len(self._items):
            self._advance()

    def _judge(self, item: _Item, words: list[str]) -> bool:
        request = item.request.split()
        name, asked = request[1], request[2:]
        if words[1:2] != [name]:
            return self._malformed(f"number {item.number} asks for {name}, not {_shown(' '.join(words[1:2]))}")
        given = [word.upper() for word in words[2 : 2 + len(asked)]]
        if given != asked:
            pairs = zip(item.operation.operands, asked, [*given, *[""] * len(asked)], strict=False)
            operand, was, found = next((one.name, a, b) for one, a, b in pairs if a != b)
            return self._malformed(
                f"operand {operand} of number {item.number} is {was}, and came back as {found or 'nothing'}"
            )
        results = words[2 + len(asked) :]
        if results == [DECLINED]:
            self._tally(item).declined += 1
            self._accept()
            return True
        if len(results) != len(item.operation.results):
            wanted = " ".join(map(str, item.operation.results))
            return self._malformed(f"{name} has the results {wanted}; {len(results)} came")
        for one, text in zip(item.operation.results, results, strict=True):
            try:
                one.check_text(text)
            except ValueError as reason:
                return self._malformed(f"result {reason}")
        found_results = [text.upper() for text in results]
        if found_results == item.results.split():
            self._right(item)
        else:
            self._wrong(item, asked, found_results)
        return True

    def _tally(self, item: _Item) -> Tally:
        name = item.operation.name
        if name not in self.outcome.tallies:
            self.outcome.tallies[name] = Tally(item.operation)
        return self.outcome.tallies[name]

    def _accept(self) -> None:
        self.accepted += 1
        self._last = self._line

    def _right(self, item: _Item) -> None:
        tally = self._tally(item)
        tally.right += 1
        if len(tally.agreeing) < KEPT:
            tally.agreeing.append(item)
        self._accept()

    def _wrong(self, item: _Item, operands: list[str], found: list[str]) -> None:
        tally = self._tally(item)
        tally.wrong += 1
        tally.rules[item.rule] = tally.rules.get(item.rule, 0) + 1
        example = Example(self._line, item.number, item.rule, operands, found, item.results.split())
        if len(tally.examples) < EXAMPLES:
            tally.examples.append(example)
        if len(tally.kept) < KEPT:
            tally.kept.append(example)
        self._accept()

    # ---- the end -------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.outcome.read_to_the_end = True
        if self.outcome.plan is None:
            lines = f"{counted(self._line, 'line')} came" if self._line else "nothing came"
            self._stop(f"the stream has no beginning: {lines}, and no line '# nvfp4-pipe …'")
            return
        following = self._next_number()
        behind = self._total + 1 - following
        missing = self._lost + len(self._late) + behind
        if not self._ended:
            self._stop(
                f"the output ends after {self._where()}, before the line '# end {self._total}': the device stopped, "
                f"{behind:,} of {counted(self._total, 'answer')} did not come"
            )
        if missing and (self._ended or missing > behind):
            first = next(iter(self._late), following)
            self.outcome.fault(
                "missing answers",
                f"{missing:,} of {counted(self._total, 'answer')} {agreed(missing, 'is', 'are')} missing, "
                f"first number {first}",
            )


def _short(text: str) -> str:
    """Digits that a line of a terminal can bear; --json has them all."""
    return text if len(text) <= 40 else f"{text[:36]}…"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")

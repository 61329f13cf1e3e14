"""The line protocol: what a stream asks, as text.  docs/pipe.md has the grammar.

    # nvfp4-pipe 1 spec=1.0 seed=0 count=all rules=E2M1-RNE
    1 e2m1 3E800000                       the generator's
    1 e2m1 3E800000 0                     the device's: the same line, its results behind
    # end 1

A stream is a function of its header alone, so that whoever reads an answer knows what was asked.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

import nvfp4ref as nv
from conformance.vectors import FORMAT_VERSION
from conformance.vectors.fields import Array
from conformance.vectors.groups import Rows, chosen
from conformance.vectors.operations import OPERATIONS, Operands, Operation, Settings
from conformance.vectors.random import Random
from nvfp4ref.container import counted

NAME = "nvfp4-pipe"
CHUNK = 4096  # lines of one operation that follow one another, and that are answered together
DECLINED = "-"  # the result of a device that does not do this operation
_HEADER = re.compile(
    rf"# {NAME} (?P<version>\d+) spec=(?P<spec>\S+) seed=(?P<seed>\d+) count=(?P<count>all|\d+) rules=(?P<rules>\S+)"
)


@dataclass(frozen=True)
class Batch:
    """Consecutive lines that ask for one operation under one rule."""

    rule: str
    operation: Operation
    first: int  # number of its first line, from 1
    operands: Operands

    @property
    def size(self) -> int:
        """How many lines."""
        return len(self.operands[0])

    def requests(self) -> list[str]:
        """The generator's lines."""
        columns = [field.texts(one) for field, one in zip(self.operation.operands, self.operands, strict=True)]
        name = self.operation.name
        return [f"{n} {name} {' '.join(row)}" for n, row in enumerate(zip(*columns, strict=True), self.first)]

    def results(self, settings: Settings | None = None) -> list[str]:
        """What belongs behind each line; under settings that this operation knows, what a faulty device has there."""
        found = self.operation.faulty(self.operands, settings) if settings else None
        answers = self.operation.answer(self.operands) if found is None else found
        columns = [field.texts(one) for field, one in zip(self.operation.results, answers, strict=True)]
        return [" ".join(row) for row in zip(*columns, strict=True)]


class _Part:
    """One group's rows of one operation: constructed first, then random."""

    def __init__(self, rule: str, rows: Rows, seed: int) -> None:
        self.rule, self.operation = rule, OPERATIONS[rows.operation]
        self._make, self._key = rows.make, (seed, zlib.crc32(f"{rule} {rows.operation}".encode()))

    @cached_property
    def constructed(self) -> Operands:
        return self._make("small")

    def rows(self, start: int, stop: int, quota: int) -> Operands:
        """Rows start … stop−1 of ``quota`` in all; fewer than the constructed ones are spread over those."""
        known = len(self.constructed[0])
        if quota < known:
            return tuple(one[[i * known // quota for i in range(start, stop)]] for one in self.constructed)
        if start < known:
            return tuple(one[start : min(stop, known)] for one in self.constructed)
        number = (start - known) // CHUNK
        made = self.operation.random(Random(*self._key, number), CHUNK)
        inside = (start - known) % CHUNK
        return tuple(one[inside : inside + stop - start] for one in made)


@dataclass(frozen=True)
class Plan:
    """What a stream asks.

    Args:
        rules: ids of docs/spec.md; None: all that have rows.
        count: lines in all; None: every constructed row once.
        seed: of the random rows behind the constructed ones.
    Raises:
        ValueError: a rule that has no rows, a count below 1.
    """

    rules: tuple[str, ...] | None = None
    count: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        groups = chosen(self.rules)
        for group in groups:
            if self.rules is not None and not group.rows:
                raise ValueError(
                    f"{group.rule} is about whole tensors: its vectors are exported, not asked by the line"
                )
        if self.count is not None and self.count < 1:
            raise ValueError(f"count is 1 or more; got {self.count}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed has 64 bits; got {self.seed}")

    @property
    def header(self) -> str:
        """The first line."""
        count = "all" if self.count is None else self.count
        rules = "all" if self.rules is None else ",".join(self.rules)
        return f"# {NAME} {FORMAT_VERSION} spec={nv.SPEC_VERSION} seed={self.seed} count={count} rules={rules}"

    @classmethod
    def of_header(cls, line: str) -> Plan:
        """The plan of a first line.  Raises ValueError when it is none, or of another version."""
        match = _HEADER.fullmatch(line)
        if match is None:
            raise ValueError(f"the stream begins with {line[:60]!r}, and not with the generator's line '# {NAME} …'")
        if int(match["version"]) != FORMAT_VERSION or match["spec"] != nv.SPEC_VERSION:
            raise ValueError(
                f"the stream is of protocol {match['version']}, specification {match['spec']}; "
                f"this is protocol {FORMAT_VERSION}, specification {nv.SPEC_VERSION}"
            )
        rules = None if match["rules"] == "all" else tuple(match["rules"].split(","))
        return cls(rules, None if match["count"] == "all" else int(match["count"]), int(match["seed"]))

    @cached_property
    def _parts(self) -> list[_Part]:
        return [_Part(group.rule, rows, self.seed) for group in chosen(self.rules) for rows in group.rows]

    @cached_property
    def _quotas(self) -> list[int]:
        """Lines of each part."""
        if self.count is None:
            return [len(part.constructed[0]) for part in self._parts]
        share, rest = divmod(self.count, len(self._parts))
        return [share + (number < rest) for number in range(len(self._parts))]

    @property
    def total(self) -> int:
        """Lines in all."""
        return sum(self._quotas)

    @property
    def operations(self) -> list[str]:
        """The operations asked for, in the order of their first line."""
        return list(dict.fromkeys(part.operation.name for part, n in zip(self._parts, self._quotas, strict=True) if n))

    def batches(self) -> Iterator[Batch]:
        """The lines: the parts take turns, so that a stream that is cut short has asked everything."""
        first, at = 1, [0] * len(self._parts)
        while any(done < quota for done, quota in zip(at, self._quotas, strict=True)):
            for number, (part, quota) in enumerate(zip(self._parts, self._quotas, strict=True)):
                stop = min(at[number] + CHUNK, quota)
                while at[number] < stop:
                    operands = part.rows(at[number], stop, quota)
                    yield Batch(part.rule, part.operation, first, operands)
                    at[number] += len(operands[0])
                    first += len(operands[0])


def generate(plan: Plan, out: BinaryIO) -> None:
    """Write the stream.  Raises BrokenPipeError when the reader has gone."""
    out.write(f"{plan.header}\n".encode())
    for batch in plan.batches():
        out.write(("\n".join(batch.requests()) + "\n").encode())
        out.flush()
    out.write(f"# end {plan.total}\n".encode())
    out.flush()


# ---- the specification as a device -------------------------------------------------------------------------


def answer(lines: Sequence[str], forms: Sequence[Settings] = (), first: int = 1) -> list[str]:
    """Answers of a device that follows the specification, or has one planted fault.

    Args:
        lines: the generator's, comments among them.
        forms: settings of a fault; an operation answers by the first that it knows.
        first: number of the first of these lines in its stream, for messages.
    Raises:
        ValueError: a line that asks nothing, with its number.
    """
    out: list[str] = []
    start = 0
    while start < len(lines):
        words = lines[start].split()
        if not words or words[0].startswith("#"):
            out.append(lines[start])
            start += 1
            continue
        if len(words) < 2 or words[1] not in OPERATIONS:
            raise ValueError(f"line {first + start}: {lines[start][:60]!r} asks for no operation that there is")
        stop = start + 1
        while stop < len(lines) and lines[stop].split()[1:2] == words[1:2]:
            stop += 1
        out += _answered(lines[start:stop], OPERATIONS[words[1]], forms, first + start)
        start = stop
    return out


def _answered(lines: Sequence[str], operation: Operation, forms: Sequence[Settings], first: int) -> list[str]:
    operands = _operands(lines, operation, first)
    batch = Batch("", operation, 0, operands)
    known = next((form for form in forms if operation.faulty(operands, form) is not None), None)
    return [f"{line.rstrip()} {result}" for line, result in zip(lines, batch.results(known), strict=True)]


def _operands(lines: Sequence[str], operation: Operation, first: int) -> Operands:
    fields = operation.operands
    rows = [line.split()[2:] for line in lines]
    for number, row in enumerate(rows, first):
        if len(row) != len(fields):
            raise ValueError(f"line {number}: {operation.name} takes {counted(len(fields), 'operand')}; got {len(row)}")
        for field, text in zip(fields, row, strict=True):
            try:
                field.check_text(text)
            except ValueError as reason:
                raise ValueError(f"line {number}: {reason}") from None
    arrays: list[Array] = [field.array(column) for field, column in zip(fields, zip(*rows, strict=True), strict=True)]
    return tuple(arrays)

"""The rules of the specification as rows of a report: what was counted for each here, and the evidence behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance import ledger
from conformance.compare import Report
from conformance.count import Count
from nvfp4hw.backends.base import Case
from nvfp4ref.dump import Dump

CONFORMS, IN_DOUBT, NOT_TESTED = "conforms", "in doubt", "not tested"

#: Counts of the items that rest on a rule, by rule and by backend (or "" where there is none).
Counts = dict[str, dict[str, Count]]
_NONE = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Row:
    """One rule.

    Attributes:
        verdict: "conforms", "in doubt", or "not tested" where nothing here rests on it.
        counts: by backend.
        witness: the strongest of the ledger, None without any.
        others: the names of the others; against: of those that found a difference.
        open: what is still to be settled on a Blackwell GPU.
    """

    id: str
    counts: Mapping[str, Count]
    witness: Mapping[str, Any] | None
    others: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    open: tuple[str, ...] = ()

    @property
    def total(self) -> Count:
        """Over all backends."""
        return sum(self.counts.values(), Count(0, 0))

    @property
    def verdict(self) -> str:
        """A difference in an output speaks against one of the rules that it rests on, so each of them is in doubt."""
        if not self.total.compared:
            return NOT_TESTED
        return IN_DOUBT if self.total.different else CONFORMS


def rows(counts: Counts) -> list[Row]:
    """Every rule that the ledger or this report knows; those with differences first, then those tested."""
    book = ledger.load()
    strongest = ledger.strongest(book)
    found = [_row(rule, counts.get(rule, {}), book, strongest) for rule in dict.fromkeys((*strongest, *counts))]
    order = (IN_DOUBT, CONFORMS, NOT_TESTED)
    return sorted(found, key=lambda row: order.index(row.verdict))


def _row(rule: str, counts: Mapping[str, Count], book: ledger.Ledger, strongest: dict[str, Any]) -> Row:
    about = [witness for witness in book["witnesses"] if rule in witness["rules"]]
    others = tuple(one["name"] for one in about if one is not strongest.get(rule))
    against = tuple(one["name"] for one in about if one["different"])
    asked = tuple(one["question"] for one in book["open"] if rule in one["rules"])
    return Row(rule, counts, strongest.get(rule), others, against, asked)


def add(counts: Counts, backend: str, case: Case, outputs: Mapping[str, tuple[Any, Count]], preset: str) -> None:
    """Add the outputs of a case, array and count by name, to the counts of the rules that they rest on."""
    from conformance.capture.rules import rules_of

    for name, (array, count) in outputs.items():
        given = np.asarray(array)
        if given.dtype != np.uint8:  # an answer of another kind says nothing of the special values that rules ask for
            given = _NONE
        for rule in rules_of(case, name, given, preset):
            by_backend = counts.setdefault(rule, {})
            by_backend[backend] = by_backend.get(backend, Count(0, 0)) + count


def add_dump(counts: Counts, report: Report, dump: Dump, arithmetic: str | nv.Arithmetic | None = None) -> None:
    """The same of a checked dump."""
    if dump.x is None or dump.d is not None:
        return
    resolved = dump.resolve_arithmetic(arithmetic)
    case = Case(
        "",
        "",
        dump.x,
        block=dump.block,
        rounding=dump.rounding,
        rht_t=dump.transform(columnwise=True),
        fields=resolved.fields(),
        arithmetic=resolved.name,
    )
    outputs = {name: (getattr(dump, name), count) for name, count in report.outputs.items()}
    add(counts, "", case, outputs, resolved.name)

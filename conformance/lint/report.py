"""What lint found: findings, tensors, the report and its two forms."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nvfp4ref.container import counted

CLEAN, FAULTS, NOT_JUDGED = "clean", "faults", "not-judged"
FAULT, NOTE = "fault", "note"

_LISTED = 5  # tensors printed for each id; the JSON has all


@dataclass(frozen=True)
class Finding:
    """One thing that was seen.

    id: of a deviation (docs/deviations.md) or of a fault of checkpoints (docs/lint.md).
    severity: "fault" decides the verdict; a "note" is for the reader.
    sentence: what was seen, what it means, what to do.
    count, total: how many of how many blocks, codes, experts …; 0, 0 where nothing is counted.
    """

    id: str
    severity: str
    sentence: str
    count: int = 0
    total: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "id": self.id,
            "severity": self.severity,
            "sentence": self.sentence,
            "count": self.count,
            "total": self.total,
        }


def fault(name: str, sentence: str, count: int = 0, total: int = 0) -> Finding:
    """A finding that decides the verdict."""
    return Finding(name, FAULT, sentence, count, total)


def note(name: str, sentence: str, count: int = 0, total: int = 0) -> Finding:
    """A finding for the reader."""
    return Finding(name, NOTE, sentence, count, total)


@dataclass(frozen=True)
class TensorReport:
    """One NVFP4 tensor: shape is that of the values, order how its scales are read and whether that was seen.

    fingerprint: the bytes that tell producers apart.  original: the comparison with the original weights.
    """

    name: str
    family: str
    shape: tuple[int, ...] | None = None
    findings: tuple[Finding, ...] = ()
    order: str | None = None
    order_seen: bool = False
    fingerprint: dict[str, Any] = field(default_factory=dict)
    original: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "family": self.family,
            "shape": self.shape and list(self.shape),
            "findings": [one.to_json() for one in self.findings],
            "scale_order": self.order,
            "scale_order_seen": self.order_seen,
            "fingerprint": self.fingerprint,
            "original": self.original,
        }


@dataclass(frozen=True)
class Other:
    """An array that belongs to no NVFP4 tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LintReport:
    """The verdict on a checkpoint.

    Attributes:
        path: what was given.
        tensors: its NVFP4 tensors.
        findings: what concerns the checkpoint as a whole.
        others: arrays that are not NVFP4.
        errors: sentences about what could not be read; none when all was.
    """

    path: str
    tensors: tuple[TensorReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    others: tuple[Other, ...] = ()
    errors: tuple[str, ...] = ()

    def all_findings(self) -> Iterator[tuple[str, Finding]]:
        """Every finding with its tensor's name, "" for those of the checkpoint."""
        yield from (("", one) for one in self.findings)
        yield from ((tensor.name, one) for tensor in self.tensors for one in tensor.findings)

    @property
    def verdict(self) -> str:
        """ "not-judged" when something could not be read, "faults" when a finding is one, else "clean"."""
        if self.errors:
            return NOT_JUDGED
        return FAULTS if any(one.severity == FAULT for _, one in self.all_findings()) else CLEAN

    @property
    def exit_code(self) -> int:
        """0 clean, 1 faults, 2 not judged."""
        return {CLEAN: 0, FAULTS: 1, NOT_JUDGED: 2}[self.verdict]

    @property
    def counts(self) -> dict[str, int]:
        """Tensors by finding, as ``{id: tensors}``; the most frequent first."""
        return dict(Counter(one.id for _, one in self.all_findings()).most_common())

    @property
    def families(self) -> dict[str, int]:
        """Tensors by the way they are stored."""
        return dict(Counter(one.family for one in self.tensors).most_common())

    def to_json(self) -> dict[str, Any]:
        """The object of ``nvfp4 lint --json``."""
        return {
            "verdict": self.verdict,
            "error": "; ".join(self.errors) or None,
            "path": self.path,
            "families": self.families,
            "counts": self.counts,
            "findings": [one.to_json() for one in self.findings],
            "tensors": [one.to_json() for one in self.tensors],
            "not_nvfp4": [{"name": one.name, "dtype": one.dtype, "shape": list(one.shape)} for one in self.others],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.path}: {self._headline()}"
        for severity in (FAULT, NOTE):
            groups: dict[str, list[tuple[str, Finding]]] = defaultdict(list)
            for name, one in self.all_findings():
                if one.severity == severity:
                    groups[one.id].append((name, one))
            for name, found in groups.items():
                yield from _grouped(severity, name, found)
        if self.others:
            types = ", ".join(f"{n} {dtype}" for dtype, n in Counter(one.dtype for one in self.others).most_common())
            arrays = counted(len(self.others), "array")
            yield f"  not NVFP4: {arrays} ({types}), {_names(one.name for one in self.others)}"

    def _headline(self) -> str:
        families = ", ".join(f"{n:,} {family}" for family, n in self.families.items()) or "none"
        wrong = sum(any(one.severity == FAULT for one in tensor.findings) for tensor in self.tensors)
        tensors = f"NVFP4 tensors: {families}"
        if self.verdict == NOT_JUDGED:
            return f"not judged as a whole; {tensors}; faults in {wrong:,}"
        return f"faults in {wrong:,}; {tensors}" if self.verdict == FAULTS else f"no fault found; {tensors}"


def _grouped(severity: str, name: str, found: list[tuple[str, Finding]]) -> Iterator[str]:
    for tensor, one in found[:_LISTED]:
        yield f"  {severity} {name}: {tensor + ': ' if tensor else ''}{one.sentence}"
    if len(found) > _LISTED:
        yield f"  {severity} {name}: and {len(found) - _LISTED:,} more, {_names(n for n, _ in found[_LISTED:])}"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_LISTED]) + (" …" if len(listed) > _LISTED else "")


def merged(experts: list[tuple[int | None, list[Finding]]]) -> list[Finding]:
    """Findings of a tensor's matrices, those of several experts as one."""
    if len(experts) == 1 and experts[0][0] is None:
        return experts[0][1]
    groups: dict[tuple[str, str], list[tuple[int | None, Finding]]] = defaultdict(list)
    for index, found in experts:
        for one in found:
            groups[one.severity, one.id].append((index, one))
    merged_findings = []
    for group in groups.values():
        index, first = group[0]
        where = f"expert {index}" if len(group) == 1 else f"{len(group)} of {len(experts)} experts, first in {index}"
        count, total = sum(one.count for _, one in group), sum(one.total for _, one in group)
        merged_findings.append(replace(first, sentence=f"in {where}: {first.sentence}", count=count, total=total))
    return merged_findings

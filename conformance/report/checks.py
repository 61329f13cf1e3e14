"""Checked dumps, gathered for a report of all of them."""

from __future__ import annotations

import nvfp4ref as nv
from conformance.compare import CONFORMS, NOT_JUDGED, Report
from conformance.report import rules
from conformance.report.junit import checks_as_junit
from conformance.report.places import PICKED
from conformance.report.tensor import Tensor, tensor
from nvfp4ref.dump import Dump

_DETAILED = 24  # tensors that differ and are shown in full


class Checks:
    """What ``nvfp4 check`` found, dump by dump; a dump itself is not kept.

    Args:
        arithmetic: what all of them were held against; None: what each declares.
    """

    def __init__(self, arithmetic: str | nv.Arithmetic | None = None) -> None:
        self.arithmetic = arithmetic
        self.reports: list[tuple[str, str, Report]] = []
        self.tensors: list[Tensor] = []
        self.counts: rules.Counts = {}
        self.omitted = 0  # tensors that differ and are listed only

    def add(self, path: str, name: str, report: Report, dump: Dump | None = None) -> None:
        """One verdict.

        Args:
            path, name: the file, and the tensor in it ("" for its only one).
            report: from ``check`` by the same arithmetic.
            dump: None when it could not be read.
        """
        self.reports.append((path, name, report))
        detailed = sum(bool(one.directions) for one in self.tensors) < _DETAILED
        self.omitted += not detailed and report.verdict not in (CONFORMS, NOT_JUDGED)
        label = f"{path}: {name}" if name else path
        self.tensors.append(tensor(label, report, dump, self.arithmetic, PICKED if detailed else 0))
        if dump is not None and report.outputs:
            rules.add_dump(self.counts, report, dump, self.arithmetic)

    @property
    def exit_code(self) -> int:
        """The worst of all: 2 not judged, 1 differs, 0 conforms; 2 when there is none."""
        return max((report.exit_code for _, _, report in self.reports), default=2)

    def as_junit(self) -> str:
        """JUnit XML: a suite a file, a test a tensor."""
        return checks_as_junit(self.reports)

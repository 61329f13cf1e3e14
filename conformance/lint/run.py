"""lint(): every NVFP4 tensor of a checkpoint, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from conformance.checkpoint import Checkpoint, Quantized, open_checkpoint
from conformance.lint import inputs, judge, originals, parts, producers, whole
from conformance.lint.facts import Facts, choose_order, fingerprint
from conformance.lint.matrix import Matrix, matrices
from conformance.lint.measure import measure
from conformance.lint.report import Finding, LintReport, Other, TensorReport, fault, merged, note
from nvfp4ref.container import DumpError, PathLike, counted

Progress = Callable[[str, int, int], None]

_MIB = 1 << 20


def lint(path: PathLike, *, original: PathLike | None = None, progress: Progress | None = None) -> LintReport:
    """Look for faults in a checkpoint that show without its input, or against the original weights.

    Args:
        path: a .safetensors or .npz file, a folder of .safetensors files, or a Hugging Face index.
        original: the same with the weights before quantization, under the same names (F32, BF16, F16).
        progress: called with (tensor, MiB done, MiB in all).
    Returns:
        the report; what cannot be read is among its errors, nothing is raised for it.

    Memory does not grow with the checkpoint: a few MiB of codes are in hand at a time.
    """
    try:
        checkpoint = open_checkpoint(path)
        source = None if original is None else originals.open_original(original)
    except DumpError as error:
        return LintReport(str(path), errors=(str(error),))
    run = _Run(checkpoint, source, progress or (lambda name, done, total: None))
    return run.report()


class _Run:
    """One pass over a checkpoint: the tensors so far, and what is compared between them."""

    def __init__(self, checkpoint: Checkpoint, source: originals.Original | None, progress: Progress) -> None:
        self.checkpoint, self.source, self.progress = checkpoint, source, progress
        self.tensors: list[TensorReport] = []
        self.ranges: list[whole.Range] = []
        self.input_scales: list[inputs.InputScale] = []
        self.errors: list[str] = []
        self.done, self.total = 0, max(checkpoint.nbytes, 1)

    def report(self) -> LintReport:
        """Lint everything."""
        checkpoint = self.checkpoint
        for one in checkpoint.tensors():
            self._tensor(one)
        self.progress("", self.total // _MIB, self.total // _MIB)
        self._add(inputs.check_together(self.input_scales))
        self._add(whole.unused_ranges(self.ranges))
        errors = [*checkpoint.errors, *self.errors]
        if not self.tensors and not errors:
            errors.append(_no_tensor(checkpoint))
        return LintReport(
            str(checkpoint.path),
            tuple(self.tensors),
            tuple(self._of_the_whole()),
            tuple(Other(one.name, one.dtype, one.shape) for one in checkpoint.others),
            tuple(errors),
        )

    def _of_the_whole(self) -> Iterator[Finding]:
        names = self.checkpoint.missing
        if names:
            listed = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            yield fault(
                "checkpoint.missing-tensor",
                f"the index lists {counted(len(names), 'tensor')} that no file has: {listed}",
                len(names),
                len(names),
            )
        yield from (note("checkpoint.not-read", sentence) for sentence in self.checkpoint.notes)
        yield from producers.check([one.fingerprint for one in self.tensors])

    def _add(self, found: Iterator[tuple[int, Finding]]) -> None:
        for index, one in found:
            tensor = self.tensors[index]
            self.tensors[index] = replace(tensor, findings=(*tensor.findings, one))

    def _tensor(self, one: Quantized) -> None:
        index, before = len(self.tensors), self.done
        self.tensors.append(TensorReport(one.name, one.family.name))
        try:
            self.tensors[index] = self._linted(index, one)
        except DumpError as error:  # the file went bad under our hands
            self.errors.append(str(error))
        self.done = before + one.nbytes

    def _linted(self, index: int, one: Quantized) -> TensorReport:
        report = TensorReport(one.name, one.family.name, findings=tuple(parts.check(one)))
        self.input_scales.append(inputs.record(index, one))
        report = replace(report, findings=(*report.findings, *inputs.check_alone(one)))
        if one.packed is None or one.packed.is_float:
            return report
        try:
            found = matrices(one)
        except ValueError as error:
            return replace(report, findings=(*report.findings, fault("packing.shape", str(error))))
        facts = [self._facts(part) for part in found]
        report = _with_facts(report, one, facts)
        self.ranges.extend(whole.ranges(index, one, facts))
        return originals.compared(report, one, facts, self.source)

    def _facts(self, matrix: Matrix) -> Facts:
        measured = measure(matrix, lambda done: self._advance(matrix.quantized.name, done))
        order, seen = choose_order(matrix, measured)
        return Facts(matrix, measured, order, seen)

    def _advance(self, name: str, done: int) -> None:
        self.done += done
        self.progress(name, min(self.done, self.total) // _MIB, self.total // _MIB)


def _with_facts(report: TensorReport, one: Quantized, facts: list[Facts]) -> TensorReport:
    """The report with what the bytes of all matrices say."""
    found = merged([(each.matrix.expert, list(judge.check(each))) for each in facts])
    found += whole.check(one, facts)
    first = facts[0]
    experts = () if first.matrix.expert is None else (len(facts),)
    return replace(
        report,
        shape=(*experts, first.matrix.rows, 16 * first.matrix.columns),
        findings=(*report.findings, *found),
        order=first.order,
        order_seen=all(each.seen for each in facts),
        fingerprint=fingerprint(facts),
    )


def _no_tensor(checkpoint: Checkpoint) -> str:
    names = ", ".join(f"{one.name} {one.dtype}" for one in checkpoint.others[:3])
    return (
        f"{checkpoint.path}: holds no NVFP4 tensor that is known, but {counted(len(checkpoint.others), 'other array')}"
        f"{f' ({names} …)' if names else ''}"
    )

"""``nvfp4 lint``: faults of checkpoints that show without the input; see docs/lint.md.

Data flow: matrix → words → measure → facts → judge, whole, inputs, originals → report; run goes through a
checkpoint, command prints.
"""

from conformance.lint.command import add_arguments, main_lint
from conformance.lint.report import Finding, LintReport, TensorReport
from conformance.lint.run import lint

__all__ = ["Finding", "LintReport", "TensorReport", "add_arguments", "lint", "main_lint"]

"""The conformance suite: holds quantizers' outputs against the oracle ``nvfp4ref``.

from conformance import check
report = check(nvfp4ref.load_dump("dump.npz"))
print(report)
"""

from conformance.compare import Report, check
from conformance.diagnose import Deviation, diagnose
from conformance.explain import diff, explain

__all__ = ["Deviation", "Report", "check", "diagnose", "diff", "explain"]

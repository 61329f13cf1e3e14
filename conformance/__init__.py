"""The conformance suite: holds quantizers' outputs against the oracle ``nvfp4ref``.

from conformance import check
report = check(nvfp4ref.load_dump("dump.npz"))
print(report)

These names are imported when they are asked for: pytest loads this package in every run, for its plug-in.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.compare import Report, check
    from conformance.diagnose import Deviation, diagnose
    from conformance.explain import diff, explain

__all__ = ["Deviation", "Report", "check", "diagnose", "diff", "explain"]

_WHERE = {
    "Deviation": "diagnose",
    "Report": "compare",
    "check": "compare",
    "diagnose": "diagnose",
    "diff": "explain",
    "explain": "explain",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """``diagnose`` and ``explain`` are functions, whoever imports the modules of the same names."""
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

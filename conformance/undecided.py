"""undecided(): which known deviations an input hides, so that "conforms" says nothing about them.

Ordinary random data holds few ties and few blocks on a boundary of E4M3; a quantizer with another order of operations
often writes the same bytes for it.
"""

from __future__ import annotations

import nvfp4ref as nv
from conformance import suggest
from conformance.observed import Array, Evidence
from conformance.search import hidden
from conformance.side import Side
from nvfp4ref.dump import Dump


def undecided(dump: Dump, arithmetic: str | nv.Arithmetic | None = None) -> list[str]:
    """Ids of the deviations that would have given every byte of this dump too, in the order of the stages.

    Args:
        dump: one that conforms, with x.
        arithmetic: as for ``check``.
    Returns:
        Those that apply to a direction of the dump and that no direction shows, each in its usual form.
    """
    resolved = dump.resolve_arithmetic(arithmetic)
    sides = [Side(dump, suffix, resolved) for suffix in ("", "_t") if getattr(dump, "packed" + suffix) is not None]
    found = [hidden(Evidence(side)) for side in sides]
    every = dict.fromkeys(ident for one in found for ident in one)
    return [ident for ident in every if all(one.get(ident, True) for one in found)]


def revealing(dump: Dump) -> Array:
    """A tensor (R, 128) of the dump's dtype on which known deviations show as far as its type lets them."""
    return suggest.probe(dump.x_dtype)

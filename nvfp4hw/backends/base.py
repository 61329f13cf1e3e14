"""What a backend is: one real quantizer behind a small protocol.

A backend never judges.  It runs somebody else's software on a :class:`Case` and returns the bytes
that came out; ``conformance`` compares them with the oracle under the arithmetic the backend declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


class Refused(RuntimeError):
    """The package or its device does not do what a case asks, and says so: no answer, and no failure either."""


#: The arrays a backend may return.  Shapes for an input x of shape (R, C), always compact and trimmed:
#: packed (R, C/2), scales (R, C/16), amax () or (R,); ``*_t`` the same for the columnwise output, whose
#: shapes are those of x transposed; codes and bytes are one-dimensional results of the codec kinds.
Outputs = dict[str, np.ndarray[Any, Any]]


#: Stochastic rules that take a float32 uniform for each element, not bits of a word.
UNIFORM_RULES = ("ideal", "te-jax")


@dataclass(frozen=True)
class Case:
    """One question put to a quantizer.

    ``kind`` is "quantize", or "e2m1" / "e4m3" for a bare conversion of the float32 array ``x``
    (outputs ``codes`` / ``bytes``), or "dequantize", "hadamard" … for recorded kernels that do only that.
    """

    id: str
    family: str
    x: np.ndarray[Any, Any]
    kind: str = "quantize"
    block: tuple[int, int] = (1, 16)
    directions: str = "row"  # "row", "col" or "both"
    rounding: str = "nearest-even"
    rht_t: Any = None  # an nvfp4ref.RHT for the columnwise output, or None
    amax: Any = None  # value given in place of max(abs(x)), or None
    amax_t: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # Arithmetic fields the case switches on
    data: Mapping[str, Any] = field(default_factory=dict)  # further inputs of a recorded one-step kernel
    arithmetic: str | None = None  # a preset that beats the backend's (recordings of another path)
    hunts: str = ""  # which fault this case is there to find

    @property
    def needs(self) -> frozenset[str]:
        """The features a backend must have to run this case (names as in ``Backend.features``)."""
        needs = {self.kind, str(np.dtype(self.x.dtype).name)}
        if self.kind == "quantize":
            needs.add(f"{self.block[0]}x{self.block[1]}")
            needs |= {"row": {"row"}, "col": {"col"}, "both": {"row", "col"}}[self.directions]
            needs |= {name for name, value in self.fields.items() if value}
            if self.rht_t is not None:
                needs.add("rht")
            if self.amax is not None or self.amax_t is not None:
                needs.add("given-amax")
            if self.rounding == "stochastic":
                needs.add("stochastic")
                if self.fields.get("stochastic") in UNIFORM_RULES:
                    needs.add("uniforms")
        return frozenset(needs)


@runtime_checkable
class Backend(Protocol):
    """The protocol.  Third parties register instances or classes under the entry-point group ``nvfp4.backends``."""

    name: str
    preset: str  # the Arithmetic preset it declares to follow
    features: frozenset[str]  # every name of Case.needs it can serve

    def availability(self) -> str | None:
        """None when it can run here; otherwise why not and the command that would change that."""

    def version(self) -> str:
        """Package name and version really read, e.g. "torchao 0.15.0 (torch 2.13.0+cpu)"."""

    def cases(self, suite: str) -> Iterable[Case] | None:
        """The backend's own cases (recordings replayed), or None to be given the suite's."""

    def quantize(self, case: Case) -> Outputs:
        """Run the real quantizer on one case.  Raises Refused for what the package or the device does not do."""

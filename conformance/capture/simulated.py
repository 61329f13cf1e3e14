"""A simulated device: the oracle behind the protocols of a backend and a probe, with or without a planted fault.

The backend ``simulated`` is right, ``simulated.ID`` has the deviation ID of docs/deviations.md; the probe
``simulated.NAME`` is right, ``simulated.NAME.FAULT`` has a fault of nvfp4hw.probes.simulation.  For rehearsals and
for the tests of capture and replay; what they give is evidence of nothing, and the ledger refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable

from conformance.expect import Expectation
from nvfp4hw import backends, probes
from nvfp4hw.backends.base import Backend, Case, Outputs

_NAME = "simulated"
_OUTPUTS = ("packed", "scales", "amax")
_CODECS = {"e2m1": "codes", "e4m3": "bytes", "e2m1-pairs": "packed"}


def is_simulated(name: str) -> bool:
    """Whether a backend or probe of that name is simulated."""
    return name.split(".")[0] == _NAME


class Simulated:
    """A backend that answers what the oracle, or one with a known deviation, gives."""

    preset = "te"
    device = "cuda"  # of which it plays the part
    features = frozenset(
        ("quantize", "float32", "float16", "bfloat16", "1x16", "16x16", "row", "col", "rht", "given-amax", "row_scaled")
        + ("four_over_six", "four_over_six_fast_error", "e4m3_max", "stochastic", *_CODECS)
    )

    def __init__(self, name: str) -> None:
        from conformance.deviations import DEVIATIONS

        self.name = name
        fault = name.partition(".")[2]
        if fault and fault not in DEVIATIONS:
            raise ValueError(f"there is no deviation {fault!r} to simulate; docs/deviations.md lists them")
        self._entry = DEVIATIONS[fault] if fault else None

    def availability(self) -> str | None:
        return None

    def version(self) -> str:
        return f"simulated Blackwell{f' with {self._entry.id}' if self._entry else ''}"

    def cases(self, suite: str) -> Iterable[Case] | None:
        return None

    def quantize(self, case: Case) -> Outputs:
        expected = Expectation(case, self.preset)
        if case.kind != "quantize":
            return {_CODECS[case.kind]: expected.output(_CODECS[case.kind])}
        suffixes = {"row": ("",), "col": ("_t",), "both": ("", "_t")}[case.directions]
        names = [name + suffix for suffix in suffixes for name in _OUTPUTS]
        return {name: expected.output(name) for name in names} | self._faulty(case, names)

    def _faulty(self, case: Case, names: list[str]) -> Outputs:
        """The outputs that the planted fault changes; none where it does not apply."""
        from conformance.plant import planted_entry

        if self._entry is None or not self._entry.changes:
            return {}
        dump = planted_entry(self._entry, self._entry.changes[0], case)
        return {} if dump is None else {name: getattr(dump, name) for name in names}


def load_backend(name: str) -> Backend:
    """The backend of that name, simulated or real.  Raises ValueError for a name that nobody registered."""
    return Simulated(name) if is_simulated(name) else backends.load(name)


def load_probe(name: str) -> probes.Probe:
    """The probe of that name, simulated or real.  Raises ValueError for a name or a fault that there is not."""
    if not is_simulated(name):
        return probes.load(name)
    probe, _, fault = name.removeprefix(f"{_NAME}.").partition(".")
    return probes.simulated({probe: fault})[probe]


def probe_names() -> list[str]:
    """Names of the simulated probes, without a fault."""
    return [f"{_NAME}.{name}" for name in probes.names()]

"""Probes: small CUDA programs that ask the hardware one question each, and the oracle's check of what they found.

    probe = nvfp4hw.probes.load("rn-e4m3")
    if (reason := probe.availability()) is None:
        result = probe.run()                       # compile, run, check: a ProbeResult
    later = probe.verify(result.record, result.arrays)    # anywhere, without a GPU

``python -m nvfp4hw.probes`` does the same from a shell.  docs/probes.md says what each probe asks.
"""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4hw.probes.base import BadRecord, Launcher, Probe, ProbeError, ProbeResult, seal
from nvfp4hw.probes.conversions import Fp4Header, RnE2m1, RnE4m3
from nvfp4hw.probes.hadamard import Hadamard, HadamardTcgen05
from nvfp4hw.probes.mma import MmaSm100, MmaSm120
from nvfp4hw.probes.reciprocal import Reciprocal
from nvfp4hw.probes.stochastic import RsE2m1, RsE4m3, RsModel
from nvfp4hw.probes.toolchain import Toolchain

__all__ = ["BadRecord", "Launcher", "Probe", "ProbeError", "ProbeResult", "load", "names", "seal", "simulated"]

_PROBES: dict[str, type[Probe]] = {
    probe.name: probe
    for probe in (
        RnE2m1,
        RnE4m3,
        Fp4Header,
        RsE2m1,
        RsE4m3,
        RsModel,
        Reciprocal,
        Hadamard,
        HadamardTcgen05,
        MmaSm120,
        MmaSm100,
    )
}


def names() -> list[str]:
    """Names of every probe."""
    return list(_PROBES)


def load(name: str, launcher: Launcher | None = None) -> Probe:
    """The probe of that name, on the GPU of this machine unless a launcher is given.

    Raises ValueError for a name that no probe has.
    """
    if name not in _PROBES:
        raise ValueError(f"there is no probe {name!r}; the probes are {', '.join(names())}")
    return _PROBES[name](launcher or Toolchain())


def simulated(
    faults: Mapping[str, str] | None = None,
    *,
    device: str = "Blackwell",
    architecture: str = "",
    limit: float | None = None,
) -> dict[str, Probe]:
    """Every probe on a simulated GPU: programs that the oracle plays, in processes of their own.

    Args:
        faults: probe name -> the fault planted in its program; :func:`nvfp4hw.probes.simulation.faults_of` lists them.
        device: the name in the records, which begin with "simulated".
        architecture: for instance "sm_100a": probes of other targets are not available.  Default: all are.
        limit: seconds that each program may take, instead of the probe's own limit.
    Raises:
        ValueError: a name that no probe has, or a fault that it cannot have.
    """
    from nvfp4hw.probes.simulation import Simulation, faults_of

    faults = faults or {}
    if unknown := set(faults) - set(_PROBES):
        raise ValueError(f"there is no probe {sorted(unknown)[0]!r}; the probes are {', '.join(names())}")
    made = {}
    for name, kind in _PROBES.items():
        elsewhere = architecture and architecture not in kind.architectures
        reason = f"the simulated {device} is {architecture}; this needs {', '.join(kind.architectures)}"
        fault = faults.get(name, "")
        probe = kind(Simulation(fault, device, reason if elsewhere else None))
        if fault and fault not in faults_of(probe):
            raise ValueError(f"fault {fault!r} of probe {name} is not one of {', '.join(faults_of(probe))}")
        if limit is not None:
            probe.limit = limit
        made[name] = probe
    return made

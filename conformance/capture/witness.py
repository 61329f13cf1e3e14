"""Evidence from bundles: what a recording is a witness of, and the ledger with it.

A witness claims what was recorded and judged again here, no more: only software and probes that this project
knows, only rules whose outputs were compared, by the device that was there.  What is simulated, and what other
packages registered, never is one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import conformance
from conformance import ledger, run
from conformance.capture.bundle import BundleError
from conformance.capture.replay import RECORDINGS, Replay, UnitResult
from conformance.count import Count
from nvfp4ref.container import agreed, counted, replacing

_IMPLEMENTATION, _NVIDIA = "another implementation run", "NVIDIA's own software run"
BLACKWELL = "Blackwell run recorded by this suite"
#: Backends whose arithmetic is NVIDIA's compiled code; the other built-in ones are implementations beside it.
_NVIDIA_BACKENDS = ("cuda-header", "te-torch", "te-torch-kernels", "te-jax-cuda", "cublaslt")
#: Probes that ask no instruction but run software, wherever they run.
_SOFTWARE_PROBES = {"fp4-header": _NVIDIA, "rs-model": _IMPLEMENTATION}
_BLACKWELL_FROM = 10  # compute capability


def witnesses(found: Replay, file: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The ledger entries of a bundle, and why the rest of it is no evidence.

    Args:
        found: a sealed bundle, judged.
        file: its name in conformance/evidence/bundles.
    Raises:
        BundleError: the bundle is not sealed.
    """
    if found.bundle.root is None:
        raise BundleError(f"{found.bundle.path}: is not sealed, so it is no evidence: let its capture end first")
    entries, refused = [], []
    for one in found.units:
        reason = _no_witness(one)
        if reason is None:
            entries.append(_entry(found, one, file))
        elif one.status != run.NOT_RUN:
            refused.append(f"{one.unit.name}: no evidence: {reason}")
    return entries, refused


def _no_witness(one: UnitResult) -> str | None:
    from nvfp4hw import backends, probes

    info = one.unit.info
    known = probes.names() if one.unit.kind == "probe" else backends.built_in()
    if info.get("simulated") or one.unit.name not in known:
        return "it is simulated" if info.get("simulated") else "it is of another package"
    if one.unit.name == "jaxpath":
        return "it is this project's own"
    if one.unit.name in RECORDINGS:
        return "it is a recording replayed"
    if one.unjudged:
        return "not all of it could be judged"
    return None if one.rules else "nothing was compared"


def _entry(found: Replay, one: UnitResult, file: str) -> dict[str, Any]:
    header, result = found.bundle.header, one.result
    total = sum(result.totals().values(), Count(0, 0))
    compared = f"{counted(total.compared, 'item')} in "
    compared += counted(len(result.cases), "case") if one.unit.kind == "backend" else "one probe"
    if failed := sum(case.error is not None for case in result.cases):
        compared += f", {failed} of which failed"
    if missing := len(one.missing):
        compared += f"; {counted(missing, 'case')} {agreed(missing, 'was', 'were')} not recorded"
    return {
        "name": f"{Path(file).stem}: {one.unit.name}",
        "kind": _kind(one, header),
        "what": f"{one.unit.name}: {result.version}",
        "device": _device(one, header),
        "date": str(header["date"]),
        "compared": compared,
        "different": total.different,
        "rules": list(one.rules),
        "inputs": {rule: count.compared for rule, count in one.rules.items()},
        "bundle": {"file": file, "root": found.bundle.root},
    }


def _capability(header: dict[str, Any]) -> int:
    """The lowest major compute capability of the devices that were there; 0 without one."""
    return min((int(str(one["compute_capability"]).split(".")[0]) for one in header.get("gpus") or []), default=0)


def _kind(one: UnitResult, header: dict[str, Any]) -> str:
    if one.unit.kind == "probe" and one.unit.name in _SOFTWARE_PROBES:
        return _SOFTWARE_PROBES[one.unit.name]
    if one.unit.info.get("device") == "cuda" and _capability(header) >= _BLACKWELL_FROM:
        return BLACKWELL
    return _NVIDIA if one.unit.kind == "probe" or one.unit.name in _NVIDIA_BACKENDS else _IMPLEMENTATION


def _device(one: UnitResult, header: dict[str, Any]) -> str:
    if one.unit.info.get("device") != "cuda":
        return f"{header['environment']['machine']} CPU"
    names = dict.fromkeys(f"{gpu['name']}, driver {gpu['driver']}" for gpu in header["gpus"])
    return "; ".join(names)


def update(found: Replay) -> list[str]:
    """Make a bundle evidence: a copy beside the ledger, its witnesses in it, docs/evidence.md anew.  What was done.

    Raises BundleError: there is nothing in it that is evidence, or this is no clone of the repository.
    """
    root = Path(conformance.__file__).parents[1]
    path, page = root / "conformance" / "evidence" / "ledger.json", root / "docs" / "evidence.md"
    if not page.exists():
        raise BundleError(
            "the ledger is kept in the repository: run this in a clone of it that is installed with pip install -e ."
        )
    file = Path(found.bundle.path).name
    entries, said = witnesses(found, file)
    if not entries:
        raise BundleError(f"{found.bundle.path}: nothing in it is evidence: {'; '.join(said) or 'nothing ran'}")
    kept = path.parent / "bundles" / file
    if kept.resolve() != Path(found.bundle.path).resolve():
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(found.bundle.path, kept)
    whole = ledger.load()
    others = [one for one in whole["witnesses"] if one.get("bundle", {}).get("file") != file]
    whole["witnesses"] = [*others, *entries]
    for target, text in ((path, ledger.as_json(whole)), (page, ledger.render(whole))):
        with replacing(target) as stream:
            stream.write(text.encode())
    names = ", ".join(one["name"] for one in entries)
    return [*said, f"evidence of {counted(len(entries), 'witness', 'witnesses')} ({names}): {path}, {page}, {kept}"]

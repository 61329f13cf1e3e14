"""The JAX path as a backend of the suite: it is there, and its faults are seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cases, run
from nvfp4hw import backends
from nvfp4hw.backends.base import Case

jax = pytest.importorskip("jax")

from nvfp4hw import jaxpath  # noqa: E402
from nvfp4hw.backends.jaxpath import JaxPath  # noqa: E402

QUICK = {case.id: case for case in cases.cases("quick")}


def case_of(family: str, **wanted: Any) -> Case:
    """The first case of a family with those attributes."""
    for case in QUICK.values():
        if case.family == family and all(getattr(case, name) == value for name, value in wanted.items()):
            return case
    raise KeyError(family, wanted)


def test_it_is_registered_and_serves_every_case_of_its_kinds() -> None:
    backend = backends.load("jaxpath")
    assert isinstance(backend, JaxPath) and backend.availability() is None and backend.cases("quick") is None
    assert (
        backend.version() == f"jax {jax.__version__} (jaxlib {jax.lib.__version__}) on {jax.devices()[0].device_kind}"
    )
    asked = [case for case in QUICK.values() if case.kind in ("quantize", "e2m1", "e4m3")]
    assert len(asked) > 300 and all(case.needs <= backend.features for case in asked)


CASES = (
    case_of("zero", directions="both", block=(1, 16)),
    case_of("rows", directions="row"),
    case_of("tile", block=(16, 16)),
    Case("words", "stochastic", QUICK[case_of("tile").id].x, rounding="stochastic", data={"rng": nv.Philox(3, 4)}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_fault_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the zeros that a small tensor is filled up with, but in the last place of what is returned."""
    right = run.run_case(JaxPath(), case)
    assert right.status == run.CONFORMS and {"packed", "scales", "amax"} <= right.outputs.keys()
    assert all(count.compared for count in right.outputs.values())

    def faulty(x: Any, *, axis: int = -1, **how: Any) -> Any:
        q = jaxpath.quantize(x, axis=axis, **how)
        rows, columns = case.x.shape if axis == -1 else case.x.shape[::-1]
        return type(q)(q.packed.at[rows - 1, columns // 2 - 1].add(np.uint8(16)), q.scales, q.amax, q.block)

    monkeypatch.setattr(JaxPath, "_objects", classmethod(lambda cls: (faulty, None, None)))
    wrong = run.run_case(JaxPath(), case)
    assert wrong.status == run.DEPARTS and wrong.error is None
    assert {name for name, count in wrong.outputs.items() if count.different} == {
        name for name in right.outputs if name.startswith("packed")
    }

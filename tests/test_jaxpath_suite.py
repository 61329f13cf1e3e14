"""The JAX path on the suite's cases: every code, scale and amax is the oracle's, eager and jitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cases
from nvfp4hw.backends.base import Case

jax = pytest.importorskip("jax")
from nvfp4hw import jaxpath  # noqa: E402

SIDES = {"row": ("",), "col": ("_t",), "both": ("", "_t")}
QUANTIZE = [case for case in cases.cases("quick") if case.kind == "quantize"]


def chosen() -> list[Case]:
    """Two cases of each family and dtype, and every one with a transform, random numbers or 4over6 of small size."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in QUANTIZE:
        key = (case.family, case.x.dtype.name, case.block, case.rht_t is not None, bool(case.fields), case.rounding)
        found.setdefault(key, []).append(case)
    return [case for some in found.values() for case in some[:1]]


def how(case: Case, suffix: str) -> dict[str, Any]:
    given: dict[str, Any] = {
        "block": case.block,
        "axis": 0 if suffix else -1,
        "arithmetic": nv.arithmetic("te", **case.fields),
        "amax": case.amax_t if suffix else case.amax,
        "rht": case.rht_t if suffix else None,
    }
    if case.rounding == "stochastic":
        given |= {"rounding": "stochastic", "rbits": case.data["rng" + suffix]}
    return given


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.id)
def test_every_bit_is_the_oracles(case: Case) -> None:
    for suffix in SIDES[case.directions]:
        given = how(case, suffix)
        expected, found = nv.quantize(case.x, **given), jaxpath.quantize(case.x, **given)
        for name in ("packed", "scales"):
            assert np.array_equal(np.asarray(getattr(found, name)), getattr(expected, name)), name + suffix
        amax = np.asarray(found.amax, np.float32).reshape(-1)
        assert np.array_equal(amax, expected.amax.reshape(-1), equal_nan=True)


def test_jit_and_eager_agree_with_the_oracle() -> None:
    x = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
    expected = nv.quantize(x)
    jitted = jax.jit(lambda x: jaxpath.quantize(x).packed)(x)
    with jax.disable_jit():
        eager = jaxpath.quantize(x).packed
    assert np.array_equal(np.asarray(jitted), expected.packed)
    assert np.array_equal(np.asarray(eager), expected.packed)


def test_what_it_lacks_is_refused_in_words() -> None:
    with pytest.raises((TypeError, ValueError), match="division"):
        jaxpath.quantize(np.ones((16, 16), np.float32), arithmetic="te-jax-gpu")

"""The leg that holds every JAX quantizer to the oracle on the operands of the three GEMMs: what it says, and that it
sees faults."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv

jax = pytest.importorskip("jax")

from nvfp4hw.backends import jax_nn, te_jax  # noqa: E402
from nvfp4hw.backends.base import Case, Outputs, Refused  # noqa: E402
from nvfp4hw.jaxpath import leg  # noqa: E402
from nvfp4ref.recipe import recipe  # noqa: E402

Array = np.ndarray[Any, Any]
OPERANDS = {"fprop x", "fprop w", "dgrad dy", "dgrad w", "wgrad dy", "wgrad x"}
TENSORS = {
    "x": leg.layer()["x"][:64, :128],
    "w": leg.layer()["w"][:128, :128],
    "dy": leg.layer()["dy"][:64, :128],
}


def rows(found: list[leg.Found], name: str = "") -> dict[str, leg.Row]:
    return {one.operand: one for one in found if isinstance(one, leg.Row) and one.implementation.startswith(name)}


def results(found: list[leg.Found]) -> list[leg.Result]:
    return [one for one in found if isinstance(one, leg.Result)]


@pytest.mark.parametrize("name", leg.ALL)
def test_ours(name: str) -> None:
    found = list(leg._ours(recipe(name), TENSORS))
    assert rows(found).keys() == OPERANDS and len(results(found)) == 3
    assert all(one.right for one in found) and all(row.te == (0, 0) for row in rows(found).values())


@pytest.mark.parametrize("name", sorted(nv.recipe.RECIPES))
def test_the_recipes_of_all_cover_every_one(name: str) -> None:
    given = [list(leg.operands(recipe(each))) for each in leg.ALL]
    assert list(leg.operands(recipe(name))) in given


def test_transformer_engine() -> None:
    if te_jax.TransformerEngineJax().availability() is not None:
        pytest.skip("Transformer Engine is not installed")
    found = list(leg._transformer_engine(recipe("te"), TENSORS))
    assert rows(found).keys() == OPERANDS and all(one.right for one in found)
    assert all(row.te.scales for row in rows(found).values())
    codes = {name: row.te.codes for name, row in rows(found).items()}
    assert codes.pop("dgrad dy") is codes.pop("wgrad dy") is None and all(codes.values())


def test_jax_nn() -> None:
    found = list(leg._jax_nn(recipe("te"), TENSORS))
    assert rows(found).keys() == OPERANDS and all(one.right for one in found)
    te = {name: row.te for name, row in rows(found).items()}
    assert te["dgrad dy"] == (None, 0) and str(te["dgrad dy"]) == "scales equal"
    assert str(te["wgrad dy"]).startswith("- codes ") and te["fprop w"].codes
    if jax.__version_info__ >= (0, 11):
        assert [result.gemm for result in results(found)] == ["fprop"]
    else:
        (missing,) = (one for one in found if isinstance(one, leg.NotRun))
        assert missing.implementation == "jax-nn fprop" and "scaled_matmul" in missing.reason


# -- the custom calls, played by the oracle --------------------------------------------------------------------


class Played:
    """A backend of the custom calls; ``fault`` changes what it answers."""

    name, fault = "te-jax-cuda", ""

    def availability(self) -> str | None:
        return None

    def quantize(self, case: Case) -> Outputs:
        if self.fault == "refused" and case.rounding == "stochastic":
            raise Refused("no random numbers today")
        outputs: Outputs = {}
        for axis, suffix, rht in ((-1, "", None), (0, "_t", case.rht_t)):
            how: dict[str, Any] = {"axis": axis, "block": case.block, "rht": rht, "rounding": case.rounding}
            q = nv.quantize(case.x, rbits=case.data.get(f"rng{suffix}"), **how)
            packed = q.packed.copy()
            packed[0, 0] ^= np.uint8(self.fault == f"packed{suffix}")
            outputs |= {f"packed{suffix}": packed, f"scales{suffix}": q.scales}
        return outputs


@pytest.mark.parametrize("name", ["te", "te_nvfp4_no_rht"])
def test_custom_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(te_jax, "TransformerEngineJaxCuda", Played)
    found = list(leg._custom_calls(recipe(name), TENSORS))
    assert rows(found).keys() == OPERANDS and all(one.right for one in found)
    for fault, axis in (("packed", -1), ("packed_t", 0)):
        monkeypatch.setattr(Played, "fault", fault)
        wrong = {name for name, row in rows(list(leg._custom_calls(recipe(name), TENSORS))).items() if not row.right}
        assert wrong == {each for each, operand in leg.operands(recipe(name)) if operand.axis == axis}
    monkeypatch.setattr(Played, "fault", "refused")
    missing = [one for one in leg._custom_calls(recipe(name), TENSORS) if isinstance(one, leg.NotRun)]
    assert [one.reason for one in missing] == [f"{each}: no random numbers today" for each in ("dgrad dy", "wgrad dy")]


def test_the_cases_are_those_that_the_custom_calls_take() -> None:
    """Their words are what the backend accepts: it refuses any other kernel's."""
    for name in ("te", "te_nvfp4_no_rht"):
        for tensor, x in leg.layer().items():
            case = leg._case(tensor, x, recipe(name))
            if case.rounding == "stochastic":
                assert te_jax._state_of(case).tolist() == [[1, 0, 8, 0]]


# -- faults are seen -------------------------------------------------------------------------------------------


def flipped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The last bit of the first code changed."""

    def run(*args: Any, **options: Any) -> Any:
        q = function(*args, **options)
        packed = np.array(q.packed)
        packed[0, 0] ^= 1
        return type(q)(jax.numpy.asarray(packed), q.scales, q.amax, q.block, q.arithmetic)

    return run


def off(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    return lambda *args: function(*args) + by


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["leg", "--recipe", "te"])
    monkeypatch.setattr(leg, "layer", lambda: TENSORS)
    monkeypatch.setattr(te_jax.TransformerEngineJax, "availability", lambda self: "not installed: it")
    monkeypatch.setattr(jax_nn.JaxNN, "availability", lambda self: "no such version")
    right, quantize, matmul = leg.jaxpath, leg.jaxpath.quantize, leg.jaxpath.matmul
    for status, ours in (
        (0, right),
        (1, SimpleNamespace(quantize=flipped(quantize), matmul=matmul)),
        (1, SimpleNamespace(quantize=quantize, matmul=off(matmul, 1e-2))),
        (1, SimpleNamespace(quantize=quantize, matmul=off(matmul, float("nan")))),
    ):
        monkeypatch.setattr(leg, "jaxpath", ours)
        assert leg.main() == status
        text = capsys.readouterr().out
        assert "recipe te\n" in text and "not run: te-jax: not installed: it\nnot run: te-jax-cuda: " in text
        assert ("beyond it" in text or " 1 codes" in text) == bool(status), text


@pytest.mark.parametrize("name", ["te-jax", "jax-nn"])
def test_a_wrong_byte_of_the_others_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def wrong(found: tuple[Any, Any]) -> tuple[Array, Array]:
        codes, scales = (np.array(np.asarray(a).view(np.uint8)) for a in found)
        scales[0, 0] ^= 1
        return codes, scales

    if name == "te-jax":
        if te_jax.TransformerEngineJax().availability() is not None:
            pytest.skip("Transformer Engine is not installed")
        right = leg._of_quantizer
        monkeypatch.setattr(leg, "_of_quantizer", lambda *how: lambda x: wrong(right(*how)(x)))
        found = list(leg._transformer_engine(recipe("te_nvfp4_no_rht"), TENSORS))
    else:
        jitted = jax_nn._jitted
        monkeypatch.setattr(jax_nn, "_jitted", lambda *how: lambda x, scale: wrong(jitted(*how)(x, scale)))
        found = list(leg._jax_nn(recipe("te"), TENSORS))
    assert len(rows(found)) == 6 and all(row.own == (0, 1) and not row.right for row in rows(found).values())

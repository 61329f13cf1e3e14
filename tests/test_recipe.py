"""Who gets what: every operand of every recipe, the environment's switches, and what Transformer Engine refuses."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import nvfp4ref as nv
from nvfp4ref.recipe import GEMMS, RECIPES, SCOPES, Operand, Recipe, recipe

pytestmark = pytest.mark.filterwarnings("error")

TE = nv.arithmetic("te")
RHT = nv.RHT()
NEAREST, STOCHASTIC = "nearest-even", "stochastic"


def brief(operand: Operand) -> tuple[Any, ...]:
    """(tensor, axis, block, rounding, RHT?) as the table of the recipe has them."""
    assert operand.rht in (None, RHT)
    return operand.tensor, operand.axis, operand.block, operand.rounding, operand.rht is not None


#: (gemm, RHT?, SR?, 2-D?) -> operands: Transformer Engine's table
def table(gemm: str, rht: bool, sr: bool, two_d: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    weight, gradient = (16, 16) if two_d else (1, 16), STOCHASTIC if sr else NEAREST
    return {
        "fprop": (("x", -1, (1, 16), NEAREST, False), ("w", -1, weight, NEAREST, False)),
        "dgrad": (("dy", -1, (1, 16), gradient, False), ("w", 0, weight, NEAREST, False)),
        "wgrad": (("dy", 0, (1, 16), gradient, rht), ("x", 0, (1, 16), NEAREST, rht)),
    }[gemm]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(("rht", "sr", "two_d"), list(product([True, False], repeat=3)))
def test_every_operand_under_every_switch(gemm: str, rht: bool, sr: bool, two_d: bool) -> None:
    """RECIPE-FPROP, RECIPE-DGRAD, RECIPE-WGRAD"""
    chosen = recipe("te", disable_rht=not rht, disable_stochastic_rounding=not sr, disable_2d_quantization=not two_d)
    operands = chosen.operands(gemm)
    assert tuple(map(brief, operands)) == table(gemm, rht, sr, two_d)
    assert all(operand.arithmetic == TE for operand in operands)
    assert [operand.paired_with_rht for operand in operands] == [operand.tensor == "dy" and rht for operand in operands]


@pytest.mark.parametrize("name", RECIPES)
def test_presets(name: str) -> None:
    """Each preset's operands are those of Transformer Engine's with its own switches"""
    chosen = recipe(name)
    assert chosen.name == name and chosen == RECIPES[name]
    without_rht = ("te_nvfp4_no_rht", "four-over-six", "row-scaled")
    for gemm in GEMMS:
        assert tuple(map(brief, chosen.operands(gemm))) == table(gemm, name not in without_rht, True, True)
        if name not in ("four-over-six", "row-scaled"):  # whose arithmetic is below
            assert all(operand.arithmetic == TE for operand in chosen.operands(gemm))


def test_four_over_six() -> None:
    """4over6 on every forward tensor and on no gradient, MAE, 256, and so no transform"""
    six = nv.arithmetic("te", four_over_six="MAE", e4m3_max=256)
    for gemm in GEMMS:
        operands = recipe("four-over-six").operands(gemm)
        assert tuple(map(brief, operands)) == table(gemm, False, True, True)
        assert [o.arithmetic for o in operands] == [TE if o.tensor == "dy" else six for o in operands]


@pytest.mark.parametrize(("scope", "use_256"), list(product(SCOPES, repeat=2)))
def test_four_over_six_scopes(scope: str, use_256: str) -> None:
    chosen = recipe(
        disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_e4m3_use_256=use_256, nvfp4_4over6_err_mode="MSE"
    )
    kinds = {"x": "activations", "w": "weights"}
    for operand in (o for gemm in GEMMS for o in chosen.operands(gemm)):
        kind = kinds.get(operand.tensor)
        if kind is None or scope not in (kind, "all"):
            assert operand.arithmetic == TE
        else:
            limit = 256 if use_256 in (kind, "all") else 448
            assert operand.arithmetic == nv.arithmetic("te", four_over_six="MSE", e4m3_max=limit)


def test_four_over_six_weights_go_with_the_transform() -> None:
    operands = [o for gemm in GEMMS for o in recipe(nvfp4_4over6="weights").operands(gemm)]
    assert {o.tensor for o in operands if o.arithmetic.four_over_six} == {"w"}
    assert {(o.tensor, o.axis) for o in operands if o.rht} == {("dy", 0), ("x", 0)}


def test_row_scaled() -> None:
    """Activations only, in both directions"""
    for gemm in GEMMS:
        operands = recipe("row-scaled").operands(gemm)
        assert tuple(map(brief, operands)) == table(gemm, False, True, True)
        assert [o.arithmetic.row_scaled for o in operands] == [o.tensor == "x" for o in operands]
    both = recipe("row-scaled", nvfp4_4over6="all")
    assert both.operands("fprop")[0].arithmetic == nv.arithmetic(
        "te", four_over_six="MAE", e4m3_max=256, row_scaled=True
    )
    with pytest.raises(ValueError, match="row-scaled 4over6 has no columnwise output, which wgrad needs"):
        both.operands("wgrad")


def test_the_base_arithmetic_reaches_every_operand() -> None:
    base = nv.arithmetic("te-reference")
    assert {o.arithmetic for gemm in GEMMS for o in recipe(arithmetic=base).operands(gemm)} == {base}


def test_options_are_keyword_arguments_of_quantize() -> None:
    operand = recipe().operands("wgrad")[1]
    assert operand.options() == {"axis": 0, "block": (1, 16), "rounding": NEAREST, "rht": RHT, "arithmetic": TE}


# -- which layers ----------------------------------------------------------------------------------------------


def test_layers() -> None:
    """RECIPE-LAYERS: of 62 blocks the first two and the last eight stay, 16 % of the linears"""
    paper = [recipe("paper").quantizes("mlp", block, 62) for block in range(62)]
    assert paper == [False] * 2 + [True] * 52 + [False] * 8
    for name in ("te", "te_nvfp4", "te_nvfp4_no_rht", "four-over-six", "row-scaled"):
        assert all(recipe(name).quantizes(kind, block, 4) for kind in ("attention", "mlp") for block in range(4))
    assert [recipe("mlp-only").quantizes(kind, 0, 32) for kind in ("mlp", "attention")] == [True, False]
    assert not recipe("te").quantizes("logits", 0, 2)
    assert not any(recipe("paper").quantizes("mlp", block, 10) for block in range(10))
    for block in (-1, 4):
        with pytest.raises(ValueError, match=rf"block is 0..3; got {block}"):
            recipe().quantizes("mlp", block, 4)


# -- the environment -------------------------------------------------------------------------------------------

SWITCHES = {
    "NVTE_NVFP4_DISABLE_RHT": "disable_rht",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "disable_stochastic_rounding",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "disable_2d_quantization",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "row_scaled_activation",
}
WORDS = {
    "NVTE_NVFP4_4OVER6": ("nvfp4_4over6", ("none", "weights")),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("nvfp4_4over6_e4m3_use_256", SCOPES),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("nvfp4_4over6_err_mode", ("MAE", "MSE")),
    "NVTE_BACKWARD_OVERRIDE": ("backward_override", ("high_precision", "dequantized")),
}


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Recipe.from_environment({}) == recipe()
    for variable, name in SWITCHES.items():
        more = {} if variable != "NVTE_NVFP4_ROW_SCALED_ACTIVATION" else {"NVTE_NVFP4_DISABLE_RHT": "1"}
        assert getattr(Recipe.from_environment({variable: "1", **more}), name) is True
        for off in ("0", "", "true"):  # only "1" switches, as in Transformer Engine
            assert getattr(Recipe.from_environment({variable: off}), name) is False
    for variable, (name, values) in WORDS.items():
        for value in values:
            assert getattr(Recipe.from_environment({variable: value}), name) == value
    assert Recipe.from_environment({"NVTE_NVFP4_4OVER6_ERR_MODE": "mse"}).nvfp4_4over6_err_mode == "MSE"
    assert Recipe.from_environment({"NVTE_BACKWARD_OVERRIDE": ""}).backward_override is None
    assert Recipe.from_environment({}, name="mine", disable_rht=True) == Recipe(name="mine", disable_rht=True)
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert Recipe.from_environment().disable_rht


def test_environment_of_nonsense() -> None:
    with pytest.raises(ValueError, match="nvfp4_4over6 is one of none, weights, activations, all; got 'yes'"):
        Recipe.from_environment({"NVTE_NVFP4_4OVER6": "yes"})


# -- refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nvfp4_4over6": "activations"}, ValueError, "4over6 on activations does not go with the Hadamard"),
        ({"nvfp4_4over6": "all"}, ValueError, "set disable_rht=True"),
        ({"row_scaled_activation": True}, ValueError, "row-scaled activations do not go with the Hadamard"),
        ({"nvfp4_4over6": "gradients"}, ValueError, "nvfp4_4over6 is one of none, weights, activations, all"),
        ({"nvfp4_4over6_e4m3_use_256": "no"}, ValueError, "nvfp4_4over6_e4m3_use_256 is one of"),
        ({"nvfp4_4over6_err_mode": "mae"}, ValueError, "nvfp4_4over6_err_mode is MAE or MSE; got 'mae'"),
        ({"backward_override": "bf16"}, ValueError, "backward_override is None, 'high_precision' or 'dequantized'"),
        ({"first_high_precision": -1}, ValueError, "are not negative"),
        ({"last_high_precision": -1}, ValueError, "are not negative"),
        ({"name": "x"}, TypeError, "Recipe has no field name; its fields are arithmetic, "),
        ({"rht": False, "sr": False}, TypeError, "Recipe has no field rht, sr"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        recipe("te", **changes)
    assert "\n" not in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'nvfp4'; the recipes are te, paper, te_nvfp4, "):
        recipe("nvfp4")
    with pytest.raises(ValueError, match="gemm is one of fprop, dgrad, wgrad; got 'forward'"):
        recipe().operands("forward")


def test_a_recipe_can_start_from_a_recipe() -> None:
    assert recipe(recipe("paper"), disable_rht=True) == replace(recipe("paper"), disable_rht=True)


# -- Transformer Engine's own ----------------------------------------------------------------------------------


def te_recipes(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Any:
    """The installed package's recipe file, read anew under an environment: it reads the variables when imported."""
    pytest.importorskip("pydantic")
    found = importlib.util.find_spec("transformer_engine")
    if found is None or not found.submodule_search_locations:
        pytest.skip("transformer-engine is not installed")
    for variable in (*SWITCHES, *WORDS):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    path = Path(found.submodule_search_locations[0]) / "common" / "recipe" / "__init__.py"
    spec = importlib.util.spec_from_file_location("te_recipe_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    *({variable: "1"} for variable in SWITCHES),
    *({variable: value} for variable, (_, values) in WORDS.items() for value in values),
    {"NVTE_NVFP4_DISABLE_RHT": "true", "NVTE_NVFP4_4OVER6_ERR_MODE": "mse"},
    dict.fromkeys(SWITCHES, "1"),
]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=str)
def test_switches_are_transformer_engines(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Same fields, same environment names, same defaults, same quantization of the three kinds of tensor"""
    theirs = te_recipes(monkeypatch, environment).NVFP4BlockScaling()
    if theirs.row_scaled_activation and not theirs.disable_rht:
        # their recipe is only a holder of switches: its quantizer is what refuses
        with pytest.raises(ValueError, match="row-scaled"):
            Recipe.from_environment(environment)
        return
    mine = Recipe.from_environment(environment)
    for name in (*SWITCHES.values(), *(name for name, _ in WORDS.values())):
        assert getattr(mine, name) == getattr(theirs, name), name
    params = {"x": theirs.fp4_quant_fwd_inp, "w": theirs.fp4_quant_fwd_weight, "dy": theirs.fp4_quant_bwd_grad}
    for operand in (o for gemm in GEMMS for o in mine.operands(gemm)):
        wanted = params[operand.tensor]
        assert (operand.rht is not None) == (wanted.random_hadamard_transform and operand.axis == 0)
        assert (operand.rounding == STOCHASTIC) == wanted.stochastic_rounding
        assert (operand.block == (16, 16)) == wanted.fp4_2d_quantization


WRONG = [{"nvfp4_4over6": "x"}, {"nvfp4_4over6_err_mode": "L2"}, {"backward_override": "x"}]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_what_their_recipe_refuses_is_refused(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = te_recipes(monkeypatch, {})
    with pytest.raises((AssertionError, ValueError)):
        module.NVFP4BlockScaling(**changes)
    with pytest.raises(ValueError):
        recipe("te", **changes)

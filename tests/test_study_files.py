"""Studies of files: what lies under a path, parts and workers, going on after an interruption, all that is broken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import save
from inputs import random

from nvfp4ref import study
from nvfp4ref.container import DumpError
from nvfp4ref.study import files, pieces, sources, tables

F32 = np.float32
BF16 = ml_dtypes.bfloat16
X = random(48, 64, 1)
FAST = ("nvfp4", "fp8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def figures(found: study.Study) -> dict[str, dict[str, dict[str, float]]]:
    return {one.source.name: one.figures for one in found.measured}


def status(found: study.Study) -> dict[str, tuple[str, str]]:
    return {one.source.name: (one.status, one.note) for one in found.results}


def same(a: Any, b: Any) -> None:
    """Equal to the last bit, NaN where the other has it."""
    assert json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


# -- what is found ---------------------------------------------------------------------------------------------------

TENSORS: dict[str, Any] = {
    "layers.0.plain.weight": X,
    "layers.0.half.weight": X.astype(np.float16),
    "layers.1.brain.weight": X.astype(BF16),
    "layers.1.odd.weight": X[:33, :41],
    "layers.2.experts": X.reshape(3, 16, 64),
    "layers.2.conv": X.reshape(48, 16, 2, 2),
    "norm.bias": X[0],
    "scalar": F32(3),
    "empty": np.zeros((0, 16), F32),
    "ids": np.arange(64).reshape(4, 16),
    "mask": np.zeros((4, 16), np.uint8),
}


def test_every_kind_of_tensor_is_measured_or_says_why_not(here: Path) -> None:
    save(here / "model.safetensors", {name: np.asarray(x) for name, x in TENSORS.items()})
    found = study.study_files("model.safetensors", FAST)
    assert found.complete and list(status(found)) == list(TENSORS)
    assert status(found) == {
        "layers.0.plain.weight": ("measured", "64 columns of zeros added to whole blocks, not counted"),
        "layers.0.half.weight": ("measured", "64 columns of zeros added to whole blocks, not counted"),
        "layers.1.brain.weight": ("measured", "64 columns of zeros added to whole blocks, not counted"),
        "layers.1.odd.weight": ("measured", "87 columns of zeros added to whole blocks, not counted"),
        "layers.2.experts": ("measured", "64 columns of zeros added to whole blocks, not counted"),
        "layers.2.conv": ("measured", "64 columns of zeros added to whole blocks, not counted"),
        "norm.bias": (
            "skipped",
            "a vector or scalar, which stays in high precision (reshape it to (1, -1) to measure it)",
        ),
        "scalar": (
            "skipped",
            "a vector or scalar, which stays in high precision (reshape it to (1, -1) to measure it)",
        ),
        "empty": ("skipped", "no element"),
        "ids": ("skipped", "I64, not float64, float32, float16 or bfloat16"),
        "mask": ("skipped", "U8, not float64, float32, float16 or bfloat16"),
    }
    for name in ("layers.0.plain.weight", "layers.1.brain.weight", "layers.1.odd.weight"):
        expected = study.measure(TENSORS[name], FAST)
        for format_, one in expected.items():
            assert figures(found)[name][format_] == pytest.approx(one.figures, rel=1e-12, nan_ok=True)
    flat = study.measure(X.reshape(48, 64), "nvfp4")["nvfp4"].figures
    for name in ("layers.2.experts", "layers.2.conv"):  # leading dimensions are rows; small kernels are joined
        assert figures(found)[name]["nvfp4"] == pytest.approx(flat, rel=1e-12, nan_ok=True)
    assert list(found.layers) == ["layers.0", "layers.1", "layers.2"]
    assert found.layer_figures()["layers.0"]["fp8"]["relative_mse"] < 0.001


def test_layers() -> None:
    names = {
        "model.layers.31.mlp.experts.7.up_proj.weight": "model.layers.31",
        "encoder.block.0.layer.1.weight": "encoder.block.0",
        "h_3_attn": "h_3",
        "lm_head.weight": "lm_head",
        "conv2d": "conv2d",
        "0.weight": "0",
    }
    assert {name: files.layer_of(name) for name in names} == names


def test_numpy_files(here: Path) -> None:
    np.save("plain.npy", X)
    np.save("fortran.npy", np.asfortranarray(X))
    np.save("big-endian.npy", X.astype(">f4"))
    np.save("double.npy", X.astype(np.float64) / 3)
    np.save("brain.npy", X.astype(BF16))  # NumPy stores it as |V2
    np.save("bits.npy", X.astype(BF16).view(np.uint16))
    np.save("pickled.npy", np.array([{}], object), allow_pickle=True)
    np.save("cube.npy", np.asfortranarray(X.reshape(3, 16, 64)))
    found = study.study_files(here, ["nvfp4"])
    one = study.measure(X)["nvfp4"].relative_mse
    by_name = {name: of["nvfp4"]["relative_mse"] for name, of in figures(found).items()}
    assert by_name["plain"] == by_name["fortran"] == by_name["big-endian"] == pytest.approx(one, rel=1e-12)
    assert by_name["brain"] == pytest.approx(study.measure(X.astype(BF16))["nvfp4"].relative_mse, rel=1e-12)
    notes = status(found)
    assert notes["double"] == ("measured", "float64 rounded to float32")
    assert notes["bits"] == ("skipped", "uint16, not floating point (bit patterns of bfloat16? say so)")
    assert notes["pickled"][0] == "skipped" and "object" in notes["pickled"][1]
    assert notes["cube"] == ("skipped", "more than two dimensions stored by columns: save it in C order")
    again = study.study_files("bits.npy", ["nvfp4"], bits="bfloat16")
    assert figures(again)["bits"]["nvfp4"]["relative_mse"] == by_name["brain"]


def test_npz_stored_and_compressed(here: Path) -> None:
    np.savez("stored.npz", a=X, n=np.arange(3))
    np.savez_compressed("packed.npz", a=X, b=X.astype(BF16).view(np.uint16))
    stored, packed = study.study_files("stored.npz", FAST), study.study_files("packed.npz", FAST, folder=here)
    same(figures(stored)["a"], figures(packed)["a"])
    assert status(stored)["n"][0] == "skipped" and status(packed)["b"][0] == "skipped"
    assert not list(here.glob(".nvfp4-study-*"))  # what was unpacked is gone
    assert study.study_files("packed.npz", FAST, folder=here).resumed == 1


def test_folders_and_indexes(here: Path) -> None:
    save(here / "a.safetensors", {"x.0": X})
    save(here / "b.safetensors", {"y.0": X, "y.1": X[:16]})
    assert list(figures(study.study_files(here, FAST))) == ["x.0", "y.0", "y.1"]
    index = {"weight_map": {"y.0": "b.safetensors", "y.1": "b.safetensors", "z": "b.safetensors"}}
    Path("model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for path in (here, "model.safetensors.index.json"):
        found = study.study_files(path, FAST)
        assert list(figures(found)) == ["y.0", "y.1"]
        assert "lists 1 tensor that no file has: z" in found.errors[0] and not found.complete
    found = study.study_files(["a.safetensors", "b.safetensors"], FAST, only=["*.0"], exclude=["x*"])
    assert list(figures(found)) == ["y.0"] and status(found)["x.0"] == ("skipped", "not chosen")


# -- what is broken --------------------------------------------------------------------------------------------------


def test_a_broken_shard_and_the_others(here: Path) -> None:
    for name in "abc":
        save(here / f"{name}.safetensors", {f"{name}.0": X})
    whole = Path("b.safetensors").read_bytes()
    Path("b.safetensors").write_bytes(whole[: len(whole) // 2])
    Path("c.npy").write_bytes(b"no array")
    np.save("e.npy", X)
    os.truncate("e.npy", 1000)
    index = {"weight_map": {f"{name}.0": f"{name}.safetensors" for name in "abcd"}}
    Path("model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    found = study.study_files(["model.safetensors.index.json", "c.npy", "e.npy", "missing.npz"], FAST)
    assert list(figures(found)) == ["a.0", "c.0"]
    words = [
        "b.safetensors: is no .safetensors",
        "d.safetensors: cannot be opened",
        "c.npy: is no .npy",
        "e.npy: claims float32 (48, 64)",
    ]
    words.append("missing.npz: cannot be opened")
    assert len(found.errors) == len(words)
    assert all(word in error for word, error in zip(words, found.errors, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_text("{}", encoding="utf-8"), "x.json: is no index: it needs a weight_map"),
        (lambda p: p.write_text('{"weight_map": {"a": "../b"}}', encoding="utf-8"), "which is outside its folder"),
        (lambda p: p.write_text("[", encoding="utf-8"), "x.json: is no index"),
    ],
)
def test_a_broken_index(here: Path, make: Any, message: str) -> None:
    make(here / "x.json")
    found = study.study_files("x.json", FAST)
    assert not found.results and message in found.errors[0]


def test_nothing_to_study(here: Path) -> None:
    (here / "empty").mkdir()
    Path("notes.txt").write_text("", encoding="utf-8")
    found = study.study_files(["empty", "notes.txt"], FAST)
    assert "has no .safetensors, .npz or .npy file" in found.errors[0]
    assert "the suffix is '.txt', expected .safetensors" in found.errors[1]
    save(here / "none.safetensors", {})
    with pytest.raises(ValueError, match=r"no tensor under none\.safetensors"):
        study.study_files("none.safetensors", FAST)


def test_a_file_that_is_cut_while_it_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(here / "a.safetensors", {"a": X, "b": X, "c": X})
    find = sources.find

    def then_cut(*arguments: Any) -> sources.Found:
        found = find(*arguments)
        os.truncate("a.safetensors", os.path.getsize("a.safetensors") - X.nbytes - 1)
        return found

    monkeypatch.setattr(sources, "find", then_cut)
    found = study.study_files("a.safetensors", FAST)
    assert [one.status for one in found.results] == ["measured", "failed", "failed"]
    assert "is cut short: the file changed while it was read" in found.results[1].note and not found.complete


def test_a_tensor_that_fails_in_the_second_pass(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: one sentence, and the rest goes on."""
    save(here / "a.safetensors", {name: X + F32(i) for i, name in enumerate("abcd")})
    errors = iter([MemoryError(), RuntimeError("first line\nsecond")])
    measure = pieces.measure_part

    def fails(tensor: pieces.Tensor, *rest: Any) -> Any:
        if tensor.name in "bc":
            raise next(errors)
        return measure(tensor, *rest)

    monkeypatch.setattr(pieces, "measure_part", fails)
    found = study.study_files("a.safetensors", FAST)
    assert status(found)["b"] == ("failed", "not enough memory")
    assert status(found)["c"] == ("failed", "RuntimeError: first line")
    assert list(figures(found)) == ["a", "d"]


def test_numbers_that_are_not_finite(here: Path) -> None:
    bad = X.copy()
    bad[0, :3], bad[1, 0] = np.nan, np.inf
    save(here / "a.safetensors", {"bad": bad, "good": X})
    found = study.study_files("a.safetensors", FAST, folder=here)
    assert "3 NaN and 1 Inf are left out of the error" in status(found)["bad"][1]
    assert "nvfp4 makes 3,068 finite elements NaN or Inf" in status(found)["bad"][1]
    assert found.complete and math.isfinite(figures(found)["good"]["nvfp4"]["gain"])
    again = study.study_files("a.safetensors", FAST, folder=here)
    assert again.resumed == 2
    same(figures(again), figures(found))


def test_reading_a_part(here: Path) -> None:
    np.save("x.npy", X)
    np.save("t.npy", np.asfortranarray(X))
    for name in ("x.npy", "t.npy"):
        (one,) = sources.find([name], here).tensors
        assert np.array_equal(one.read(slice(5, 17), slice(0, 64)), X[5:17])
        assert np.array_equal(one.read(slice(5, 17), slice(3, 50)), X[5:17, 3:50])
    Path("x.npy").unlink()
    (one,) = sources.find(["t.npy"], here).tensors
    Path("t.npy").unlink()
    with pytest.raises(DumpError, match=r"t\.npy: 't': cannot be read"):
        one.read(slice(0, 1), slice(0, 64))


# -- workers, memory, and going on -----------------------------------------------------------------------------------


def checkpoint(path: Path) -> list[str]:
    shapes = {"layers.0.a": (300, 200), "layers.0.b": (64, 3000), "layers.1.a": (1000, 128), "layers.1.b": (16, 16)}
    save(path, {name: random(*shape, i).astype(BF16) for i, (name, shape) in enumerate(shapes.items())})
    return list(shapes)


CHOSEN = ("nvfp4", "nvfp4+sr", "nvfp4+rht", "nvfp4+row-scaled", "mxfp4")


def test_workers_change_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(here / "a.safetensors")
    alone = study.study_files("a.safetensors", CHOSEN, workers=1)
    steps: list[tuple[str, int, int]] = []
    pair = study.study_files("a.safetensors", CHOSEN, workers=2, progress=lambda *step: steps.append(step))
    same(figures(alone), figures(pair))
    same({k: v.to_json() for k, v in alone.totals.items()}, {k: v.to_json() for k, v in pair.totals.items()})
    total = sum(one.source.size for one in alone.measured) * (1 + len(CHOSEN))
    assert steps[-1] == ("", total, total) and [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)


def test_how_many_workers() -> None:
    many = 10**12
    cores = files._workers(None, 10**6, 10**6, many)
    assert cores == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    assert files._workers(64, 1024, 10**6, many) == 7 and files._workers(64, 100, 10**6, many) == 1
    assert files._workers(8, 10**6, 3, many) == 3 and files._workers(8, 10**6, 0, 0) == 1
    assert files._workers(None, 10**6, 10**6, 10**6) == 1 and files._workers(2, 10**6, 10**6, 10**6) == 2


def test_an_interrupted_study_goes_on(here: Path) -> None:
    names = checkpoint(here / "a.safetensors")
    whole = study.study_files("a.safetensors", CHOSEN)

    def interrupted(name: str, done: int, total: int) -> None:
        if name == names[2] and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.study_files("a.safetensors", CHOSEN, folder=here / "out", progress=interrupted)
    again = study.study_files("a.safetensors", CHOSEN, folder=here / "out")
    assert 0 < again.resumed < 4
    same(figures(again), figures(whole))
    same({k: v.to_json() for k, v in again.totals.items()}, {k: v.to_json() for k, v in whole.totals.items()})
    same(again.shape.to_json(), whole.shape.to_json())
    assert study.study_files("a.safetensors", CHOSEN, folder=here / "out").resumed == 4
    assert study.study_files("a.safetensors", CHOSEN[:2], folder=here / "out").resumed == 4  # fewer formats
    assert study.study_files("a.safetensors", CHOSEN, folder=here / "out", fresh=True).resumed == 0


def test_a_journal_that_cannot_be_written(here: Path) -> None:
    save(here / "a.safetensors", {"x": X, "y": X})
    Path("out").write_text("a file", encoding="utf-8")
    found = study.study_files("a.safetensors", FAST, folder="out")
    assert len(found.measured) == 2 and not found.complete
    assert len(found.errors) == 1 and "the study cannot be resumed" in found.errors[0]
    gone = sources.Source("x", "gone.npy", (16, 16), "float32")
    assert not files._Journal(here, found, fresh=False).has(gone)


def test_what_makes_a_journal_useless(here: Path) -> None:
    save(here / "a.safetensors", {"x": X})
    out = here / "out"

    def resumed(formats: Any = ("nvfp4", "nvfp4+sr"), **how: Any) -> int:
        return study.study_files("a.safetensors", formats, folder=out, **how).resumed

    assert resumed() == 0 and resumed() == 1
    assert resumed(seed=1) == 0 and resumed(["nvfp4"], seed=2) == 1  # only stochastic formats have a seed
    assert resumed(["nvfp4", "mxfp4"]) == 0
    assert resumed([study.Format("another name", stochastic=True), "te"]) == 1  # a format is what it does
    journal = out / files.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:1])[:-40])  # torn
    assert resumed() == 0 and resumed() == 1
    assert len(journal.read_bytes().splitlines()) == 2
    journal.write_bytes(b'{"study": 0, "key": "k", "formats": {}}\n[]\nno json\n')
    assert resumed() == 0
    os.utime("a.safetensors", ns=(1, 1))  # another file, as far as can be told
    assert resumed() == 0


def test_a_journal_of_another_file_at_the_same_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path as typed says nothing, nor do size and time: what was measured is one file."""
    for folder, seed in (("a", 1), ("b", 2)):
        (here / folder).mkdir()
        np.save(here / folder / "x.npy", random(16, 64, seed))
        os.utime(here / folder / "x.npy", ns=(1, 1))
    monkeypatch.chdir(here / "a")
    first = study.study_files("x.npy", FAST, folder=here / "out")
    monkeypatch.chdir(here / "b")
    second = study.study_files("x.npy", FAST, folder=here / "out")
    assert second.resumed == 0 and figures(second) != figures(first)
    assert study.study_files(here / "a" / "x.npy", FAST, folder=here / "out").resumed == 1  # however it is written
    os.replace(here / "b" / "x.npy", here / "a" / "x.npy")
    assert study.study_files(here / "a" / "x.npy", FAST, folder=here / "out").resumed == 0


def test_a_journal_of_other_source(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", X)
    study.study_files("x.npy", FAST, folder="out")
    assert study.study_files("x.npy", FAST, folder="out").resumed == 1
    monkeypatch.setattr(files, "source_hash", lambda: "of a later arithmetic")
    assert study.study_files("x.npy", FAST, folder="out").resumed == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("shape"),
        lambda entry: entry["shape"]["moments"].pop("16"),
        lambda entry: entry["shape"]["ranges"].__setitem__(0, 3),
        lambda entry: next(iter(entry["formats"].values())).pop("sums"),
        lambda entry: next(iter(entry["formats"].values()))["sums"].pop("e2"),
        lambda entry: next(iter(entry["formats"].values()))["sums"].update(codes=[7, 0, [1]]),
        lambda entry: next(iter(entry["formats"].values()))["sums"].update(n="many"),
        lambda entry: next(iter(entry["formats"].values()))["figures"].pop("gain"),
        lambda entry: entry.update(formats=[]),
        lambda entry: entry.update(key=["x"]),
    ],
)
def test_an_entry_of_another_layout_counts_as_none(here: Path, damage: Any) -> None:
    np.save("x.npy", X)
    whole = study.study_files("x.npy", FAST, folder="out")
    journal = here / "out" / files.JOURNAL
    entry = json.loads(journal.read_bytes())
    damage(entry)
    journal.write_text(json.dumps(entry) + "\n", encoding="utf-8", newline="\n")
    found = study.study_files("x.npy", FAST, folder="out")
    assert found.resumed == 0
    same(figures(found), figures(whole))


def test_a_tensor_whose_figures_fail(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what goes wrong after measuring is one tensor's failure."""
    save(here / "a.safetensors", {"a": X, "b": X + F32(1), "c": X})
    record = pieces.record

    def fails(found: Any, *rest: Any) -> Any:
        if found.facts.sum > 1000:
            raise OverflowError("too large")
        return record(found, *rest)

    monkeypatch.setattr(pieces, "record", fails)
    found = study.study_files("a.safetensors", FAST, folder=here)
    assert [one.status for one in found.results] == ["measured", "failed", "measured"]
    assert found.results[1].note == "OverflowError: too large"


@pytest.mark.parametrize("scale", [1e25, 1e37, 1e-30, 1e-44])
def test_a_tensor_of_any_magnitude(here: Path, scale: float) -> None:
    with np.errstate(all="ignore"):
        huge = {
            "a": X,
            "b": X * F32(scale),
            "c": (X * F32(scale)).astype(BF16),
            "d": np.full((16, 64), 65504, np.float16),
        }
    save(here / "a.safetensors", huge)
    found = study.study_files("a.safetensors", CHOSEN, folder=here)
    assert found.complete and len(found.measured) == 4
    again = study.study_files("a.safetensors", CHOSEN, folder=here)
    assert again.resumed == 4
    same(figures(again), figures(found))
    same({k: v.to_json() for k, v in again.totals.items()}, {k: v.to_json() for k, v in found.totals.items()})


def test_a_file_that_changes_after_it_was_opened_is_not_resumed(here: Path) -> None:
    np.save("x.npy", X)

    def touched(*_: Any) -> None:
        os.utime("x.npy", ns=(5, 5))

    study.study_files("x.npy", FAST, folder="out", progress=touched)
    assert study.study_files("x.npy", FAST, folder="out").resumed == 0


def test_equal_names_of_two_files_are_kept_apart(here: Path) -> None:
    for name, noise in (("one", 0.0), ("two", 3.0)):
        save(here / f"{name}.safetensors", {"h.0.w": X + F32(noise), f"h.1.{name}": X})
    save(here / "three.safetensors", {"h.2.w": X})
    found = study.study_files(["one.safetensors", "two.safetensors", "three.safetensors"], FAST)
    names = {one.name: one.error for one in tables.ranking(found, by="tensor")}
    assert len(names) == 5 and names["one.safetensors: h.0.w"] != names["two.safetensors: h.0.w"]
    assert list(found.layers) == [
        *(f"{file}.safetensors: h.{layer}" for file in ("one", "two") for layer in (0, 1)),
        "h.2",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal that Windows has not")
def test_what_a_killed_study_unpacked_is_removed_by_the_next(here: Path) -> None:
    np.savez_compressed("x.npz", a=X)
    program = """
        import signal, sys
        from nvfp4ref import study
        def stop(*_):
            print("there", flush=True)
            signal.pause()
        study.study_files("x.npz", ["fp8"], folder="out", progress=stop)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        (held,) = (one for one in (here / "out").glob(".nvfp4-study-*") if one.is_dir())
        study.study_files("x.npz", FAST, folder="out")
        assert list(held.iterdir())  # another study is at work there
        process.kill()
    assert held.is_dir()
    study.study_files("x.npz", FAST, folder="out")
    assert not list((here / "out").glob(".nvfp4-study-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="sets a limit that Windows has not")
def test_a_full_disk(here: Path) -> None:
    """Files may have 12 KB: the journal, the page and the larger tables fail, the others are there, nothing is torn."""
    checkpoint(here / "a.safetensors")
    (here / "out").mkdir()
    (here / "out" / "report.html").write_text("the old one", encoding="utf-8")
    program = """
        import resource, sys
        from nvfp4ref import study
        from nvfp4ref.study import figures, page
        figures.PICTURES = figures.PICTURES[:1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
        found = study.study_files("a.safetensors", ["nvfp4", "nvfp4+sr", "mxfp4"], folder="out")
        assert len(found.measured) == 4 and not found.complete
        written = page.write(found, "out")
        print(*found.errors, *written.errors, sep="\\n")
    """
    pytest.importorskip("matplotlib")
    pytest.importorskip("pyarrow")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, check=True
    )
    lines = done.stdout.splitlines()
    assert "study.jsonl: cannot be written: file too large; the study cannot be resumed" in lines[0]
    assert any("report.html: cannot be written: file too large" in line for line in lines)
    assert (here / "out" / "report.html").read_text(encoding="utf-8") == "the old one"
    assert (here / "out" / "layers.csv").stat().st_size > 1000
    assert not [one for one in (here / "out").rglob("*") if one.suffix == ".tmp"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no peak memory to ask for")
def test_memory_does_not_grow_with_the_tensor(here: Path) -> None:
    """Four times the tensor, 24 MB more on disk, a few MB more in memory."""
    program = """
        import sys
        from nvfp4ref import study
        found = study.study_files(sys.argv[1], ["fp8"])
        assert found.complete
        # a child's ru_maxrss begins with its parent's
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print(int(status["VmHWM"].split()[0]) / 2**10)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    peaks = []
    for rows in (512, 2048):
        with open("x.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": (rows, 8192)})
            file.truncate(file.tell() + rows * 8192 * 2)  # zeros that take no place
        command = [sys.executable, "-c", textwrap.dedent(program), "x.npy"]
        peaks.append(float(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout))
    assert peaks[1] - peaks[0] < 10, peaks
    assert peaks[1] < 200


def test_a_worker_that_is_killed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(here / "a.safetensors")

    def dies(*arguments: Any) -> Any:
        raise files.BrokenProcessPool

    monkeypatch.setattr(files, "_measure", dies)
    found = study.study_files("a.safetensors", FAST)
    assert "a worker process was ended from outside" in found.errors[0]
    assert {one.status for one in found.results} == {"failed"} and found.results[0].note == "not measured"


def test_a_very_wide_row(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a part: columns are split, at whole blocks."""
    x = random(2, 300_000, 3)
    np.save("x.npy", x)
    monkeypatch.setattr(pieces, "PART", 1 << 18)
    monkeypatch.setattr(pieces.Tensor.parts, "__defaults__", (1 << 18,))
    assert len(list(pieces.Tensor("x", (2, 300_000), study.several(FAST)).parts())) > 1
    found = study.study_files("x.npy", FAST)
    expected = study.measure(x, FAST)
    for name, one in expected.items():
        assert figures(found)["x"][name] == pytest.approx(one.figures, rel=1e-9, nan_ok=True)

"""The command line: what each command does, its exit code, and one sentence for everything that goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cli, run
from conformance.cases import _cast, _normal
from nvfp4ref.dump import load_dump, load_tensor, save_dump

Array = np.ndarray[Any, Any]
X = _normal(11, (64, 128))
BF16 = _cast(X, "bf16")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the inputs."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("bits.npy", BF16.view(np.uint16))
    return tmp_path


def nvfp4(*arguments: str, exit_code: int = 0) -> None:
    assert cli.main([str(argument) for argument in arguments]) == exit_code


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a request that cannot be met; nothing else is said, and nothing written."""
    before = sorted(os.listdir())
    nvfp4(*arguments, exit_code=2)
    out, err = capsys.readouterr()
    assert sorted(os.listdir()) == before
    assert out == "" and err.startswith("nvfp4: ") and err.count("\n") == 1 and "Traceback" not in err
    return err.removeprefix("nvfp4: ").strip()


# ---- what the commands do ----------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("--version")
    assert capsys.readouterr().out == f"nvfp4ref {nv.__version__}\n"


@pytest.mark.parametrize(
    "command", ["", "quantize", "dequantize", "check", "explain", "diff", "conformance", "conformance run"]
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4(*command.split(), "--help")
    assert "usage: nvfp4" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["q.npz", "q.safetensors"])
def test_quantize_and_check(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("quantize", "bits.npy", "-o", out, "--dtype", "bfloat16", "--both", "--rht", "--threads", "2")
    dump = load_dump(out)
    assert isinstance(dump, nv.Dump) and dump.rht_t is True and dump.producer["name"] == "nvfp4ref"
    expected = nv.quantize(BF16, axis=0, rht=nv.RHT())
    np.testing.assert_array_equal(dump.packed_t, expected.packed)
    capsys.readouterr()
    nvfp4("check", out)
    text = capsys.readouterr().out
    assert text.startswith(f"{out}: conforms to te") and "packed_t  8,192 compared, all equal" in text


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (["--block", "16x16"], {"block": (16, 16)}),
        (["--columnwise"], {"axis": 0}),
        (["--amax", "9"], {"amax": np.float32(9)}),
        (["--amax", "nan"], {"amax": np.float32("nan")}),
        (["--row-scaled"], {"arithmetic": nv.arithmetic("te", row_scaled=True)}),
        (["--arithmetic", "te-2.14"], {"arithmetic": "te-2.14"}),
        (["--arithmetic", "four-over-six", "--columnwise"], {"arithmetic": "four-over-six", "axis": 0}),
    ],
)
def test_options_of_quantize(options: list[str], how: dict[str, Any]) -> None:
    nvfp4("quantize", "x.npy", "-o", "q.npz", *options)
    dump = load_dump("q.npz")
    assert isinstance(dump, nv.Dump)
    expected = nv.quantize(X, **how)
    side = "_t" if how.get("axis") == 0 else ""
    np.testing.assert_array_equal(getattr(dump, "packed" + side), expected.packed)
    np.testing.assert_array_equal(getattr(dump, "scales" + side), expected.scales)
    nvfp4("check", "q.npz", exit_code=int("amax" in how))


@pytest.mark.parametrize(
    "options",
    [[], ["--columnwise"], ["--both"], ["--both", "--rht"], ["--both", "--rht", "--kernel", "unfused-rht"]],
)
def test_stochastic_quantize_conforms_to_what_it_declares(options: list[str]) -> None:
    given = ["--stochastic", "--seed", "0x4d2", "--offset", "7", "--dtype", "bfloat16"]
    nvfp4("quantize", "bits.npy", "-o", "q.npz", *given, *options)
    dump = load_dump("q.npz")
    assert isinstance(dump, nv.Dump) and dump.rounding == "stochastic"
    nvfp4("check", "q.npz")
    if not options:
        words = nv.Philox(1234, 7)
        np.testing.assert_array_equal(dump.packed, nv.quantize(BF16, rounding="stochastic", rbits=words).packed)


def test_more_dimensions_become_rows() -> None:
    np.save("x3.npy", X.reshape(4, 16, 128))
    nvfp4("quantize", "x3.npy", "-o", "q.npz")
    nvfp4("check", "q.npz")


@pytest.mark.parametrize("out", ["y.npy", "y.npz", "y.safetensors"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_dequantize(out: str, dtype: str | None) -> None:
    nvfp4("quantize", "x.npy", "-o", "q.npz")
    nvfp4("dequantize", "q.npz", "-o", out, *(["--dtype", dtype] if dtype else []))
    found = load_tensor(out, dtype)
    wanted: Any = {None: np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    np.testing.assert_array_equal(found.astype(np.float32), nv.dequantize(nv.quantize(X), wanted).astype(np.float32))


def test_dequantize_takes_the_columnwise_output_where_it_is_alone() -> None:
    nvfp4("quantize", "x.npy", "-o", "q.npz", "--columnwise")
    nvfp4("dequantize", "q.npz", "-o", "y.npy")
    np.testing.assert_array_equal(np.load("y.npy"), nv.dequantize(nv.quantize(X, axis=0)))


def faulty(path: str = "bad.npz", **fields: Any) -> None:
    fields = fields or {"element_rounding": "truncate"}
    dump = nv.from_tensor(nv.quantize(X, arithmetic=nv.arithmetic("te", **fields)), X, arithmetic=None)
    save_dump(path, dump)


def test_check_of_a_dump_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    faulty()
    nvfp4("check", "bad.npz", exit_code=1)
    out = capsys.readouterr().out
    assert "differs from te, first at rounding" in out and "element_rounding is 'truncate'" in out


def test_check_takes_the_worst_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("quantize", "x.npy", "-o", "good.npz")
    faulty()
    nvfp4("check", "good.npz", "bad.npz", exit_code=1)
    nvfp4("check", "good.npz", "missing.npz", "bad.npz", exit_code=2)
    out, err = capsys.readouterr()
    assert err == "nvfp4: missing.npz: cannot be opened: no such file or directory\n"
    assert "bad.npz: differs" in out, "what can be judged is judged"


def test_check_json_of_one_and_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("quantize", "x.npy", "-o", "good.npz")
    nvfp4("check", "--json", "good.npz")
    one = json.loads(capsys.readouterr().out)
    assert one["verdict"] == "conforms" and set(one) == {
        "verdict",
        "error",
        "outputs",
        "deviations",
        "ambiguous",
        "stage",
    }
    nvfp4("check", "--json", "good.npz", "missing.npz", exit_code=2)
    several = json.loads(capsys.readouterr().out)
    assert set(several) == {"dumps"} and [d["verdict"] for d in several["dumps"]] == [
        "conforms",
        "not-judged",
    ]
    assert "no such file" in several["dumps"][1]["error"]


def test_check_of_a_file_of_several_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    save_dump(
        "w.safetensors",
        {"a.weight": nv.from_tensor(nv.quantize(X), X), "b.weight": nv.from_tensor(nv.quantize(BF16), BF16)},
    )
    nvfp4("check", "w.safetensors")
    out = capsys.readouterr().out
    assert "w.safetensors: a.weight: conforms" in out and "w.safetensors: b.weight: conforms" in out
    for command in (["explain", "w.safetensors", "0", "0"], ["dequantize", "w.safetensors", "-o", "y.npy"]):
        assert "holds 2 tensors" in refused(capsys, *command)


def test_check_against_another_arithmetic() -> None:
    faulty(element_rounding="truncate")
    nvfp4("check", "bad.npz", "--arithmetic", "te-2.14", exit_code=1)
    nvfp4("quantize", "bits.npy", "-o", "q.npz", "--dtype", "bfloat16", "--arithmetic", "te-fast-math")
    nvfp4("check", "q.npz")
    nvfp4("check", "q.npz", "--arithmetic", "te", exit_code=1)


def test_check_without_input_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    q = nv.quantize(X)
    save_dump("q.npz", packed=q.packed, scales=q.scales, amax=q.amax)
    assert "no input x" in refused(capsys, "check", "q.npz")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("quantize", "x.npy", "-o", "q.npz", "--both")
    nvfp4("explain", "q.npz", "3", "17")
    out = capsys.readouterr().out
    assert "element [3, 17] of the rowwise output" in out and "encode scale e" in out
    nvfp4("explain", "q.npz", "100", "17", "--columnwise")
    assert "columnwise" in capsys.readouterr().out


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("quantize", "x.npy", "-o", "a.npz")
    nvfp4("diff", "a.npz", "a.npz")
    assert "equal" in capsys.readouterr().out
    faulty("b.npz", negative_zero="drop")
    nvfp4("diff", "a.npz", "b.npz", exit_code=1)
    assert "first at rounding" in capsys.readouterr().out
    nvfp4("diff", "a.npz", "b.npz", "--json", exit_code=1)
    assert json.loads(capsys.readouterr().out)["stage"] == "rounding"


# ---- conformance -------------------------------------------------------------------------------------------


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("conformance", "backends")
    out = capsys.readouterr().out
    assert "te-vectors" in out and "preset te" in out
    nvfp4("conformance", "backends", "--json")
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["backends"]}
    assert found["te-vectors"]["available"] and "rht" in found["te-vectors"]["features"]


def test_run_writes_its_reports(capsys: pytest.CaptureFixture[str]) -> None:
    nvfp4("conformance", "run", "--backend", "te-vectors", "--json", "r.json", "--junit", "r.xml")
    out, err = capsys.readouterr()
    assert "te-vectors  conforms to te" in out and err == "", "progress is for terminals"
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert report["suite"] == "quick" and report["exit_code"] == 0
    assert Path("r.xml").read_text(encoding="utf-8").startswith("<?xml")


def test_a_departing_backend_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run.BackendResult("bad", "te", cases=[run.CaseResult("c", "f", "h", {}, {}, error="boom")])
    monkeypatch.setattr(run, "run", lambda *_: run.SuiteResult("quick", [result]))
    nvfp4("conformance", "run", exit_code=1)
    assert "FAILED" in capsys.readouterr().out


def test_progress_is_written_to_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    nvfp4("conformance", "run", "--backend", "te-vectors")
    out, err = capsys.readouterr()
    assert "te-vectors: 1 of" in err and "\r" not in out and err.endswith("\r\x1b[K")


# ---- what is refused ---------------------------------------------------------------------------------------


def test_wrong_options_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([], "COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["quantize", "x.npy"], "-o/--output"),
        (["quantize", "x.npy", "-o", "q.npz", "--block", "8x8"], "expected 1x16 or 16x16"),
        (["quantize", "x.npy", "-o", "q.npz", "--both", "--columnwise"], "not allowed with"),
        (["quantize", "x.npy", "-o", "q.npz", "--rht"], "columnwise output"),
        (["quantize", "x.npy", "-o", "q.npz", "--rht", "--both"], "bfloat16"),
        (["quantize", "x.npy", "-o", "q.npz", "--threads", "0"], "positive number"),
        (["quantize", "x.npy", "-o", "q.npz", "--amax", "big"], "no number"),
        (["quantize", "x.npy", "-o", "q.npz", "--amax", "1e39"], "largest float32"),
        (["quantize", "x.npy", "-o", "q.npz", "--amax", "2", "--row-scaled"], "one a row"),
        (["quantize", "x.npy", "-o", "q.npz", "--arithmetic", "foo"], "unknown arithmetic 'foo'"),
        (["quantize", "x.npy", "-o", "q.npz", "--dtype", "int8"], "invalid choice"),
        (["quantize", "x.npy", "-o", "q.npz", "--stochastic"], "needs --seed"),
        (
            ["quantize", "x.npy", "-o", "q.npz", "--seed", "3"],
            "--seed belongs to --stochastic: add it, or leave --seed out",
        ),
        (["quantize", "x.npy", "-o", "q.npz", "--stochastic", "--seed", str(2**64)], "64 bits"),
        (
            ["quantize", "x.npy", "-o", "q.npz", "--stochastic", "--seed", "1", "--kernel", "magic"],
            "invalid choice",
        ),
        (
            ["quantize", "x.npy", "-o", "q.npz", "--stochastic", "--seed", "1", "--kernel", "tuned-1d"],
            "takes bfloat16",
        ),
        (["check"], "DUMP"),
        (["check", "q.npz", "--arithmetic", "foo"], "unknown arithmetic"),
        (["explain", "q.npz", "-1", "0"], ""),
        (["explain", "q.npz", "one", "0"], "no index"),
        (["conformance"], "ACTION"),
        (["conformance", "run", "--suite", "thorough"], "invalid choice"),
        (["conformance", "run", "--backend", "nobody"], "there is no backend 'nobody'"),
        (["conformance", "run", "--json", "nowhere/r.json"], "cannot be written"),
        (["conformance", "run", "--junit", "."], "cannot be written"),
    ):
        assert said in refused(capsys, *arguments), arguments


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "integers": (np.arange(256).reshape(16, 16), "int64"),
    "complex": (np.ones((16, 16), np.complex64), "complex64"),
    "scalar": (np.float32(3), "shape ()"),
    "vector": (np.ones(16, np.float32), "(16,)"),
    "empty": (np.zeros((0, 16), np.float32), "(0, 16)"),
    "no-columns": (np.zeros((16, 0), np.float32), "(16, 0)"),
    "unaligned": (np.ones((3, 17), np.float32), "multiple of 16"),
    "float64": (np.full((16, 16), 0.1), "float64"),
    "bits": (BF16.view(np.uint16), "bfloat16"),
    "text": (np.array(["a", "b"]), "<U1"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_cannot_be_quantized(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    array, said = BAD_ARRAYS[name]
    np.save("bad.npy", array)
    assert said in refused(capsys, "quantize", "bad.npy", "-o", "q.npz")


def test_object_arrays_are_never_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("bad.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "pickled" in refused(capsys, "quantize", "bad.npy", "-o", "q.npz")
    np.savez("bad.npz", x=np.array([{}], dtype=object), allow_pickle=True)
    assert "pickled" in refused(capsys, "quantize", "bad.npz", "-o", "q.npz")


def test_unaligned_rows_are_refused_columnwise(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("bad.npy", np.ones((17, 32), np.float32))
    nvfp4("quantize", "bad.npy", "-o", "q.npz")
    os.remove("q.npz")
    for option in ("--columnwise", "--both"):
        assert "17 rows" in refused(capsys, "quantize", "bad.npy", "-o", "q.npz", option)
    np.save("x3.npy", X.reshape(4, 16, 128))
    assert "matrix" in refused(capsys, "quantize", "x3.npy", "-o", "q.npz", "--both")


def damaged(content: bytes, name: str) -> str:
    Path(name).write_bytes(content)
    return name


def damage() -> dict[str, str]:
    """Files that are no dumps, by what is wrong with them."""
    q = nv.quantize(X)
    save_dump("good.npz", nv.from_tensor(q, X))
    save_dump("good.safetensors", nv.from_tensor(q, X))
    npz, tensors = Path("good.npz").read_bytes(), Path("good.safetensors").read_bytes()
    length = int.from_bytes(tensors[:8], "little")
    header = json.loads(tensors[8 : 8 + length])
    header["x"]["shape"] = [1 << 20, 1 << 15]
    lying = json.dumps(header).encode()
    found = {
        "truncated npz": damaged(npz[: len(npz) // 2], "a.npz"),
        "truncated safetensors": damaged(tensors[:-10], "b.safetensors"),
        "lying header": damaged(len(lying).to_bytes(8, "little") + lying + tensors[8 + length :], "c.safetensors"),
        "huge header": damaged((1 << 40).to_bytes(8, "little") + b"{}", "d.safetensors"),
        "not utf-8": damaged((8).to_bytes(8, "little") + b"\xff\xfe{}    ", "e.safetensors"),
        "no zip": damaged(b"this is no archive" * 10, "f.npz"),
        "empty file": damaged(b"", "g.npz"),
        "other suffix": damaged(npz, "h.txt"),
    }
    np.savez("i.npz", packed=q.packed, scales=q.scales)
    found["no meta"] = "i.npz"
    np.savez("j.npz", packed=q.packed, scales=q.scales, meta=np.array('{"format": "nvfp4-dump", "version": 2}'))
    found["other version"] = "j.npz"
    np.savez(
        "k.npz",
        packed=q.packed,
        scales=q.scales,
        x=X[:32],
        meta=np.array('{"format": "nvfp4-dump", "version": 1}'),
    )
    found["contradictory"] = "k.npz"
    np.savez("l.npz", packed=q.packed, meta=np.array('{"format": "nvfp4-dump", "version": 1}'))
    found["no scales"] = "l.npz"
    np.savez("m.npz", x=np.array([{}], dtype=object), allow_pickle=True)
    found["pickle"] = "m.npz"
    claimed = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    claimed += b"{'descr': '<f4', 'fortran_order': False, 'shape': (160000, 160000), }".ljust(117) + b"\n"
    with zipfile.ZipFile("n.npz", "w") as archive:
        archive.writestr("x.npy", claimed)
    found["100 GB claimed"] = "n.npz"
    os.mkdir("o.npz")
    found["a directory"] = "o.npz"
    found["missing"] = "p.npz"
    return found


def test_files_that_are_no_dumps(capsys: pytest.CaptureFixture[str]) -> None:
    for what, path in damage().items():
        commands = [["check"], ["check", "--json"], ["explain"], ["dequantize"], ["diff"]]
        for command in commands:
            more = {"explain": ["0", "0"], "dequantize": ["-o", "y.npy"], "diff": ["good.npz"]}.get(command[0], [])
            nvfp4(*command, path, *more, exit_code=2)
            out, err = capsys.readouterr()
            assert err.startswith(f"nvfp4: {path}: ") and err.count("\n") == 1 and len(err) < 400, (what, err)
            assert not os.path.exists("y.npy")
            if command[-1] == "--json":
                assert json.loads(out)["verdict"] == "not-judged"
            else:
                assert out == "", what


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may read and write everything")
def test_paths_without_permission(capsys: pytest.CaptureFixture[str]) -> None:
    os.chmod("x.npy", 0)
    assert "permission denied" in refused(capsys, "quantize", "x.npy", "-o", "q.npz")


def test_outputs_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir("taken.npz")
    for out in ("nowhere/q.npz", "taken.npz", "q.txt", "q"):
        refused(capsys, "quantize", "x.npy", "-o", out)
    nvfp4("quantize", "x.npy", "-o", "q.npz")
    os.mkdir("taken.npy")
    for out in ("nowhere/y.npy", "taken.npy", "y.txt"):
        refused(capsys, "dequantize", "q.npz", "-o", out)


def test_an_old_file_survives_a_failed_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvfp4("quantize", "x.npy", "-o", "q.npz")
    nvfp4("dequantize", "q.npz", "-o", "y.npy")
    before = Path("y.npy").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    assert "no space left" in refused(capsys, "dequantize", "q.npz", "-o", "y.npy")
    assert Path("y.npy").read_bytes() == before


def test_running_out_of_memory_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(nv, "quantize", exhausted)
    assert "memory" in refused(capsys, "quantize", "x.npy", "-o", "q.npz").lower()


# ---- interrupted -------------------------------------------------------------------------------------------


def test_an_interrupt_is_130_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    nvfp4("conformance", "run", exit_code=130)
    assert capsys.readouterr() == ("", "")


def command(*arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    root = Path(cli.__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-m", "conformance.cli", *arguments], env=environment, stderr=subprocess.PIPE, **how
    )


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_in_a_real_run() -> None:
    process = command("conformance", "run", "--suite", "full", "--json", "r.json", stdout=subprocess.PIPE)
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"") and not Path("r.json").exists()


@pytest.mark.skipif(os.name == "nt", reason="pipes")
def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = command("conformance", "run", "--backend", "te-vectors", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGPIPE and err == b""


def test_the_console_script_is_main() -> None:
    with command("--version", stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.startswith(b"nvfp4ref ")

"""What people read: numbers and their nouns, commands that can be pasted, help pages, reasons of a refusal."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cli
from conformance.compare import check
from conformance.count import Count
from conformance.report import text
from conformance.terminal import refuse_unwritable
from nvfp4ref.container import agreed, counted

ROOT = Path(__file__).parents[1]

# ---- plurals -----------------------------------------------------------------------------------------------


def test_one_is_no_plural() -> None:
    assert [counted(n, "case") for n in (0, 1, 2, 1024)] == ["0 cases", "1 case", "2 cases", "1,024 cases"]
    assert counted(1, "witness", "witnesses") == "1 witness" and counted(2, "witness", "witnesses") == "2 witnesses"
    assert [agreed(n, "differs", "differ") for n in (0, 1, 2)] == ["differ", "differs", "differ"]


def test_one_difference_differs() -> None:
    x = np.linspace(-3, 3, 512, dtype=np.float32).reshape(16, 32)
    q = nv.quantize(x)
    packed = q.packed.copy()
    packed[3, 5] ^= 1
    said = str(check(nv.from_tensor(nv.NVFP4Tensor.from_arrays(packed, q.scales, q.amax), x, arithmetic="te")))
    assert "packed  1 of 512 differs, first at [3, 10]" in said and "all scales agree and 1 code does not" in said
    assert str(Count(512, 2, [0, 0], "1", "2")).startswith("2 of 512 differ, first")


def test_one_of_one_item_in_the_report_of_a_run() -> None:
    assert text.differing(Count(1, 1)) == "1 of 1 item differs" and text.differing(Count(9, 0)) == "0 of 9 items differ"
    assert text.conforming(1, 1) == "1 of 1 backend that ran conforms to the preset it declares"
    assert text.conforming(1, 2) == "1 of 2 backends that ran conform to the preset they declare"


# ---- commands ----------------------------------------------------------------------------------------------


def shipped() -> Iterator[Path]:
    """The text files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for name in listed.splitlines():
        if name.endswith((".py", ".md", ".j2", ".html", ".yml", ".ipynb")) and (ROOT / name).is_file():
            yield ROOT / name


def test_brackets_of_an_extra_are_quoted() -> None:
    """zsh takes bare ones for a pattern, and says "no matches found"."""
    files = list(shipped())
    if not files:
        pytest.skip("not a clone of the repository")
    bare = re.compile(r"pip install (?:--?[\w-]+ )*[\w.-]+\[|(?<!pip )install [\w-]+\[")
    found = [f"{path.relative_to(ROOT)}: {m[0]}" for path in files for m in bare.finditer(path.read_text("utf-8"))]
    assert found == []


# ---- the command line --------------------------------------------------------------------------------------

COMMANDS = [
    *("quantize", "dequantize", "check", "lint", "explain", "diff", "study"),
    *(f"conformance {name}" for name in ("run", "backends", "capture", "replay")),
    *(f"vectors {name}" for name in ("export", "lint", "list", "generate", "verify", "run", "answer")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_page_says_what_everything_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command does, and a word on each argument."""
    assert cli.main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    head, _, rest = said.partition("\n\n")
    assert head.startswith(f"usage: nvfp4 {command}") and re.match(r"[A-Z][^:]*[.;:,]", rest)
    entries = re.split(r"\n  (?=\S)", rest.partition("options:\n")[2] or rest)[0:]
    positional = re.search(r"positional arguments:\n(.*?)\n\noptions", rest, re.DOTALL)
    entries += re.split(r"\n  (?=\S)", f"\n{positional[1]}")[1:] if positional else []
    bare = [one for one in entries if not re.search(r"\S\s{2,}\S", one.strip())]
    assert bare == []


def test_a_reason_is_one(tmp_path: Path) -> None:
    for path, says in (
        (str(tmp_path), "cannot be written: it is a folder"),
        (str(tmp_path / "no" / "r"), f"cannot be written: there is no folder {tmp_path / 'no'}"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            refuse_unwritable(path)


def test_one_array_of_several_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "two.npz", str(tmp_path / "q.npz")
    np.savez(path, a=np.zeros((16, 16), np.float32), b=np.ones((16, 32), np.float32))
    assert cli.main(["quantize", str(path), "-o", out]) == 2
    assert "holds 2 arrays, say which by name: 'a', 'b'" in capsys.readouterr().err
    assert cli.main(["quantize", str(path), "--name", "b", "-o", out]) == 0
    dump = nv.load_dump(out)
    assert isinstance(dump, nv.Dump) and dump.x is not None and dump.x.shape == (16, 32)

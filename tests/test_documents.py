"""README and guides: the examples print what they say, the links lead somewhere, the tables are complete."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv

ROOT = Path(__file__).parent.parent
DOCUMENTS = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SPEC = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_readme_example_prints_what_it_says() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks(README, "python")[0], {})
    assert printed.getvalue() == blocks(README, "text")[0]


def test_readme_dump_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conformance = pytest.importorskip("conformance")
    monkeypatch.chdir(tmp_path)
    x = np.linspace(-3, 3, 512, dtype=np.float32).reshape(16, 32).astype(ml_dtypes.bfloat16)
    q = nv.quantize(x)
    given = {"nv": nv, "x": x, "packed": q.packed, "scales": q.scales, "amax": q.amax}
    exec(blocks(README, "python")[1], given)
    assert conformance.check(nv.load_dump("mine.npz")).verdict == "conforms"


def test_a_dump_written_by_numpy_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.linspace(-3, 3, 512, dtype=np.float32).reshape(16, 32).astype(ml_dtypes.bfloat16)
    q = nv.quantize(x)
    guide = blocks((ROOT / "docs" / "dumps.md").read_text(encoding="utf-8"), "python")[0]
    exec(guide, {"x_bits": x.view(np.uint16), "packed": q.packed, "scales": q.scales, "amax": q.amax})
    found: Any = nv.load_dump("mine.npz")
    assert (found.x.view(np.uint16) == x.view(np.uint16)).all()
    assert json.dumps(found.meta()["block"]) == "[1, 16]"
    assert (found.rowwise().packed == q.packed).all()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        document = path.parent / file if file else path
        assert document.exists(), f"{path.name} links to {target}"
        there = document.read_text(encoding="utf-8")
        headings = re.findall(r"^#+ +(.*)$", there, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        anchors += re.findall(r'<a (?:id|name)="([^"]+)"', there)
        assert not anchor or anchor in anchors, f"{path.name} links to {target}"


@pytest.mark.parametrize("text", [README, SPEC], ids=["README.md", "spec.md"])
def test_every_preset_is_in_the_table(text: str) -> None:
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert not [name for name in nv.PRESETS if f"`{name}`" not in table]

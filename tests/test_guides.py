"""The guides: every block of code runs, in the order of its section, and prints what the page says that it prints."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from nvfp4hw import backends

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = ("quickstart", "check-my-kernel", "read-a-report", "write-a-backend", "jax")

pytest.importorskip("jinja2")


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of every block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def sections(guide: str) -> dict[str, list[tuple[str, str]]]:
    """The blocks of every section of a guide."""
    text = (DOCS / f"{guide}.md").read_text(encoding="utf-8")
    found = re.findall(r"^#+ ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return {title: blocks(part) for title, part in found}


def missing(some: list[tuple[str, str]]) -> str | None:
    """A package or program that the blocks need and that is not here."""
    code = "".join(text for language, text in some if language == "python")
    for name in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    shell = "".join(text for language, text in some if language == "sh")
    for program in ("g++", "printf"):
        if re.search(rf"^{re.escape(program)} ", shell, re.MULTILINE) and shutil.which(program) is None:
            return f"there is no {program}"
    return None


def said(expected: str, printed: str) -> None:
    """What was printed is what the page says; … stands for the rest of a line, alone for any lines."""
    lines = expected.rstrip("\n").split("\n")
    parts = ["(?:.*\n)*?.*" if line.strip() == "…" else re.escape(line).replace("…", ".*") for line in lines]
    pattern = "\n".join(parts)
    assert re.fullmatch(pattern, printed.rstrip("\n")), f"the page says\n{expected}\nand it printed\n{printed}"


def shell(code: str) -> str:
    """Run the lines of a shell block; a comment says which exit code other than 0 is right."""
    printed = io.StringIO()
    for line in code.splitlines():
        command, _, comment = line.partition("   # exit ")
        words = shlex.split(command)
        if words[0] == "pip":
            continue  # it is installed, or this would not run
        if words[0] == "nvfp4":
            with contextlib.redirect_stdout(printed):
                code_found = cli.main(words[1:])
        else:
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
            code_found = done.returncode
            assert not done.stderr, done.stderr
            printed.write(done.stdout)
        assert code_found == int(comment or 0), f"{command}: exit {code_found}\n{printed.getvalue()}"
    return printed.getvalue()


def run(language: str, code: str, namespace: dict[str, Any], printed: str) -> str:
    """Run one block; what it printed, or what was printed before it."""
    if language == "python":
        caught = io.StringIO()
        with contextlib.redirect_stdout(caught):
            exec(compile(code, "guide", "exec"), namespace)
        return caught.getvalue()
    if language == "sh":
        return shell(code)
    if language == "text":
        said(code, printed)
    elif language == "cpp":
        name = code.split("\n", 1)[0].removeprefix("// ").split(":")[0]
        Path(name).write_text(code, encoding="utf-8")
    elif language == "toml":
        assert list(tomllib.loads(code)["project"]["entry-points"]) == [backends.ENTRY_POINT_GROUP]
    else:
        raise AssertionError(f"a block of {language}, which nothing here runs")
    return printed


@pytest.mark.parametrize("guide", GUIDES)
def test_every_block_runs(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "guide"}
    left_out = []
    for title, some in sections(guide).items():
        reason = missing(some)
        if reason is not None:
            left_out.append(f"{title}: {reason}")
            continue
        printed = ""
        for language, code in some:
            printed = run(language, code, namespace, printed)
        for name in [name for name in namespace if name.startswith("test_")]:
            namespace.pop(name)()
    if left_out:
        pytest.skip("; ".join(left_out))  # of these sections; the others have passed


def test_every_page_is_in_the_navigation_once() -> None:
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    listed = re.findall(r"^/(\S+)$", conf.navigation(), re.MULTILINE)
    pages = [path.relative_to(DOCS.parent).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    assert len(listed) == len(set(listed)) and set(pages) - {"docs/index"} <= set(listed)
    assert {"README", "CONTRIBUTING", "CHANGELOG", "docs/spec", "docs/quickstart"} <= set(listed)


def test_guides_speak_of_every_kind_of_block() -> None:
    found = {language for guide in GUIDES for some in sections(guide).values() for language, _ in some}
    assert found == {"python", "sh", "text", "cpp", "toml"}

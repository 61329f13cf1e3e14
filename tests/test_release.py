"""What is built for a release: a wheel with every file of the packages, an sdist that builds the same wheel."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nvfp4ref as nv

ROOT = Path(__file__).parent.parent
PACKAGES = ("nvfp4ref", "nvfp4hw", "conformance")


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("dist")
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([sys.executable, *command, "-w", str(folder), "."], cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = _tracked()
    assert tracked <= names, f"not packaged: {sorted(tracked - names)[:9]}"
    assert {name.split("/")[0] for name in names} == set(PACKAGES)


def test_the_wheel_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(name).decode()
    assert f"Version: {nv.__version__}" in text and "License-Expression: Apache-2.0" in text
    plain = [line for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M) if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in plain) == ["ml_dtypes", "numpy"]


def test_the_sdist_has_what_the_wheel_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert _tracked() | {"setup.cfg", "pyproject.toml", "LICENSE", "README.md"} <= names


def test_all_has_every_extra() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = set(config["options.extras_require"])
    (listed,) = re.findall(r"nvfp4ref\[(.*)\]", config["options.extras_require"]["all"])
    assert set(listed.split(",")) == extras - {"all"}


def test_text_files_open_as_utf8_with_unix_newlines() -> None:
    for name in _tracked():
        if Path(name).suffix in (".py", ".json", ".cpp", ".cu", ".cuh", ".typed", ".j2"):
            assert b"\r" not in (ROOT / name).read_bytes(), name


def test_text_is_read_and_written_with_an_encoding() -> None:
    """Elsewhere the default is not UTF-8."""
    for name in sorted(_tracked()):
        if not name.endswith(".py"):
            continue
        for call in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr in ("read_text", "write_text") and ast.unparse(call.func.value) != "reports":
                given = {keyword.arg for keyword in call.keywords}
                given |= {"encoding"} if len(call.args) > (call.func.attr == "write_text") else set()
                assert "encoding" in given, f"{name}:{call.lineno}: {ast.unparse(call)}"


def test_the_specification_and_the_package_name_one_version() -> None:
    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    assert f"Version {nv.SPEC_VERSION}." in text.split("## 1.")[0]

"""The workflow and the container for other people's Blackwell runners: valid, safe, and as the guide says."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.capture import command

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github" / "workflows" / "blackwell.yml").read_text("utf-8")
CONTAINER = (ROOT / "ci" / "blackwell" / "Containerfile").read_text("utf-8")
GUIDE = (ROOT / "docs" / "blackwell-ci.md").read_text("utf-8")


@pytest.fixture
def workflow() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow["jobs"]["conformance"]["steps"]
    return found


def test_it_is_valid(tmp_path: Path) -> None:
    """By GitHub's own schema."""
    pytest.importorskip("check_jsonschema")
    path = str(ROOT / ".github" / "workflows" / "blackwell.yml")
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", path],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_of_a_stranger_runs_on_the_machine(workflow: dict[Any, Any]) -> None:
    triggers = workflow.get("on", workflow.get(True))  # YAML 1.1 reads on as true
    assert set(triggers) == {"workflow_dispatch", "schedule"} and workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["conformance"]["if"] == "vars.BLACKWELL_RUNNER != ''"
    assert not re.search(r"run: .*\$\{\{", WORKFLOW)  # expressions reach a shell as variables only


def test_a_failing_conformance_fails_the_job_and_is_kept(workflow: dict[Any, Any]) -> None:
    by_name = {step.get("name"): step for step in steps(workflow)}
    assert not any("continue-on-error" in step for step in steps(workflow))
    assert "set -o pipefail" in by_name["Record and judge"]["run"]
    upload = by_name["Keep bundle and report"]
    assert (
        upload["if"] == "always()"
        and upload["with"]["path"] == "out/"
        and "/out/" in by_name["Record and judge"]["run"]
    )
    assert by_name["Show the report"]["if"] == "always()"


def test_the_capture_that_it_runs_is_one(workflow: dict[Any, Any]) -> None:
    text = next(step["run"] for step in steps(workflow) if step.get("name") == "Record and judge")
    arguments = shlex.split(text.partition("nvfp4-conformance ")[2].replace("\\\n", " ").partition("2>&1")[0])
    entry = re.search(r"^ENTRYPOINT \[(.*)\]$", CONTAINER, re.MULTILINE)
    assert entry is not None and entry[1] == '"nvfp4", "conformance", "capture"'
    parser = argparse.ArgumentParser()
    command.add_capture(parser.add_subparsers())
    options = parser.parse_args(["capture", *(part.replace("$SUITE", "full") for part in arguments)])
    assert options.output == "/out/blackwell.nvfp4" and options.suite == "full" and options.junit and options.json


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")
@pytest.mark.parametrize("code", [0, 1])
def test_the_step_ends_as_the_capture_does(workflow: dict[Any, Any], tmp_path: Path, code: int) -> None:
    """The step's script with a docker that writes a report and ends with a code."""
    text = next(step["run"] for step in steps(workflow) if step.get("name") == "Record and judge")
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho the report\nexit {code}\n", encoding="utf-8")
    docker.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SUITE": "quick"}
    done = subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert (tmp_path / "out" / "report.txt").read_text(encoding="utf-8") == "the report\n"


def test_the_guide_names_what_there_is() -> None:
    for name in re.findall(r"vars\.([A-Z_]+)", WORKFLOW):
        assert f"`{name}`" in GUIDE
    assert "ci/blackwell/Containerfile" in GUIDE and "ci/blackwell/Containerfile" in WORKFLOW
    base = re.search(r"^ARG BASE=(\S+)$", CONTAINER, re.MULTILINE)
    assert base is not None and f"`{base[1]}`" in GUIDE and f'["{base[1]}"]' in WORKFLOW
    assert (ROOT / "ci" / "blackwell" / "Containerfile.dockerignore").is_file()


@pytest.mark.parametrize("text", [WORKFLOW, CONTAINER, GUIDE], ids=["workflow", "container", "guide"])
def test_no_registry_is_named(text: str) -> None:
    """Images are named as a user types them; whose registry they come from is the user's to say."""
    assert not re.search(r"\b[a-z0-9-]+\.(io|com|org|net|dev)\b", text)

"""The published JSON schemas of the reports, ``conformance/schema/NAME.json``."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

NAMES = ("check", "conformance", "replay")


def schema(name: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a report.

    Args:
        name: "check" of ``nvfp4 check --json``, "conformance" of ``nvfp4 conformance run --json``, "replay" of
            ``nvfp4 conformance replay --json``.
    Raises:
        ValueError: another name.
    """
    if name not in NAMES:
        raise ValueError(f"there are schemas of {', '.join(NAMES)}; got {name!r}")
    text = files("conformance").joinpath("schema", f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found

"""Reports as files: each is written completely or not at all."""

from __future__ import annotations

import json
from typing import Any

from nvfp4ref.container import blame, foreign, replacing


def write_json(path: str, value: Any) -> None:
    """Write a JSON file, completely or not at all.  Raises ValueError."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a UTF-8 text file, completely or not at all.  Raises ValueError."""
    with blame(path), foreign("cannot be written"), replacing(path) as file:
        file.write(text.encode())

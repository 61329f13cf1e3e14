"""What the scripts of these pages share: writing a page's numbers between markers, its JSON, its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvfp4ref.study import figures

FOLDER = Path(__file__).parent


def fill(page: str, blocks: dict[str, str]) -> None:
    """Replace what stands between ``<!-- NAME: … -->`` and ``<!-- end -->`` in a page, for each name."""
    path = FOLDER / page
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        pattern = rf"(<!-- {name}:[^\n]*-->\n).*?(\n<!-- end -->)"
        text, count = re.subn(pattern, lambda m, block=block: f"{m[1]}{block.strip()}{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{page} has {count} places for {name}")
    path.write_text(text, encoding="utf-8", newline="\n")


def between(page: str, name: str) -> str:
    """What stands there."""
    found = re.search(
        rf"<!-- {name}:[^\n]*-->\n(.*?)\n<!-- end -->", (FOLDER / page).read_text(encoding="utf-8"), re.DOTALL
    )
    if found is None:
        raise SystemExit(f"{page} has no place for {name}")
    return found[1]


def save(name: str, found: Any) -> None:
    """Write the numbers behind a page."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def load(name: str) -> Any:
    """Read them."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def draw(name: str, work: Callable[[], Any]) -> None:
    """Draw a figure and write it as figures/NAME.svg."""
    with figures.style():
        figure = work()
    path = FOLDER / "figures" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(figures.svg(figure), encoding="utf-8", newline="\n")
    (path.parent / f"{name}.png").unlink(missing_ok=True)

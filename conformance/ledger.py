"""The evidence ledger: which independent witness agreed with each rule, over how much, and what is still open.

    python -m conformance.ledger > docs/evidence.md
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def load() -> dict[str, Any]:
    """The ledger as it stands in conformance/evidence/ledger.json."""
    text = files("conformance").joinpath("evidence", "ledger.json").read_text(encoding="utf-8")
    ledger: dict[str, Any] = json.loads(text)
    return ledger


def strongest(ledger: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rule id -> the witness of the strongest kind."""
    rank = {kind: number for number, kind in enumerate(ledger["kinds"])}
    best: dict[str, dict[str, Any]] = {}
    for witness in ledger["witnesses"]:
        for rule in witness["rules"]:
            if rule not in best or rank[witness["kind"]] > rank[best[rule]["kind"]]:
                best[rule] = witness
    return best


def render(ledger: dict[str, Any]) -> str:
    """docs/evidence.md."""
    lines = [
        "# Evidence",
        "",
        "Generated from `conformance/evidence/ledger.json` by `python -m conformance.ledger`; do not edit.",
        "**Nothing here was run on a Blackwell GPU.** Kinds of evidence, weakest first: "
        + "; ".join(ledger["kinds"])
        + ".",
        "",
        "## Witnesses",
        "",
        "| witness | kind | what | device | compared | differences | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for w in ledger["witnesses"]:
        cells = (w["name"], w["kind"], w["what"], w["device"], w["compared"], str(w["different"]), w["date"])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Rules", "", "| rule | strongest witness | all |", "|---|---|---|"]
    for rule, witness in strongest(ledger).items():
        names = [w["name"] for w in ledger["witnesses"] if rule in w["rules"]]
        link = f"[{rule}](spec.md#{rule.lower()})"
        lines.append(f"| {link} | {witness['kind']} | {', '.join(names)} |")
    lines += ["", "## Open until a Blackwell run", "", "| rules | question | settled by |", "|---|---|---|"]
    lines += [f"| {', '.join(o['rules'])} | {o['question']} | {o['probe']} |" for o in ledger["open"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(load()), end="")

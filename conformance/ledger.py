"""The evidence ledger: which independent witness agreed with each rule, over how much, and what is still open.

    python -m conformance.ledger > docs/evidence.md

A witness is written by hand, or made of a bundle by ``nvfp4 conformance replay FILE --update-ledger``
(conformance/capture/witness.py); the latter says which, and its counts by rule are those of the replay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

Ledger = dict[str, Any]
Witness = dict[str, Any]


def load() -> Ledger:
    """The ledger as it stands in conformance/evidence/ledger.json."""
    text = resources.files("conformance").joinpath("evidence", "ledger.json").read_text(encoding="utf-8")
    ledger: Ledger = json.loads(text)
    return ledger


def as_json(ledger: Ledger) -> str:
    """The text of the file: a line a field, so that a change shows as one."""
    witnesses = [
        "    {\n" + ",\n".join(f"      {_plain(key)}: {_plain(value)}" for key, value in witness.items()) + "\n    }"
        for witness in ledger["witnesses"]
    ]
    lists = {
        "kinds": [f"    {_plain(kind)}" for kind in ledger["kinds"]],
        "witnesses": witnesses,
        "open": [f"    {_plain(one)}" for one in ledger["open"]],
    }
    return (
        "{\n" + ",\n".join(f'  "{name}": [\n' + ",\n".join(items) + "\n  ]" for name, items in lists.items()) + "\n}\n"
    )


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def strongest(ledger: Ledger) -> dict[str, Witness]:
    """Rule id -> the witness of the strongest kind."""
    rank = {kind: number for number, kind in enumerate(ledger["kinds"])}
    best: dict[str, Witness] = {}
    for witness in ledger["witnesses"]:
        for rule in witness["rules"]:
            if rule not in best or rank[witness["kind"]] > rank[best[rule]["kind"]]:
                best[rule] = witness
    return best


def of_blackwell(ledger: Ledger) -> list[Witness]:
    """The witnesses of the strongest kind there is: this suite's own recordings of a Blackwell GPU."""
    return [witness for witness in ledger["witnesses"] if witness["kind"] == ledger["kinds"][-1]]


def render(ledger: Ledger) -> str:
    """docs/evidence.md."""
    parts = (_head(ledger), _witnesses(ledger), _rules(ledger), _open(ledger))
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(ledger: Ledger) -> list[str]:
    recorded = of_blackwell(ledger)
    devices = ", ".join(dict.fromkeys(witness["device"] for witness in recorded))
    blackwell = f"Blackwell runs: {devices}." if recorded else "**Nothing here was run on a Blackwell GPU.**"
    return [
        "# Evidence",
        "",
        "Generated from `conformance/evidence/ledger.json` by `python -m conformance.ledger`; do not edit.",
        f"{blackwell} Kinds of evidence, weakest first: {'; '.join(ledger['kinds'])}.",
    ]


def _witnesses(ledger: Ledger) -> list[str]:
    rows = [
        (w["name"], w["kind"], w["what"], w["device"], w["compared"], str(w["different"]), w["date"])
        for w in ledger["witnesses"]
    ]
    lines = _table("Witnesses", ("witness", "kind", "what", "device", "compared", "differences", "date"), rows)
    bundles = {w["bundle"]["file"]: w["bundle"]["root"] for w in ledger["witnesses"] if "bundle" in w}
    if bundles:
        files = [(f"`conformance/evidence/bundles/{file}`", f"`{root}`") for file, root in bundles.items()]
        lines += _table("Bundles", ("replay it with `nvfp4 conformance replay`", "root hash"), files)
    return lines


def _rules(ledger: Ledger) -> list[str]:
    asked: dict[str, list[str]] = {}
    for number, one in enumerate(ledger["open"], 1):
        if _answer(ledger, one) is None:
            for rule in one["rules"]:
                asked.setdefault(rule, []).append(f"[{number}](#open-until-a-blackwell-run)")
    rows = []
    for rule, witness in strongest(ledger).items():
        others = [w["name"] for w in ledger["witnesses"] if rule in w["rules"] and w is not witness]
        against = [w["name"] for w in ledger["witnesses"] if rule in w["rules"] and w["different"]]
        differs = f"; **differs in {', '.join(against)}**" if against else ""
        strong = f"{witness['name']}: {witness['kind']}{differs}"
        link = f"[{rule}](spec.md#{rule.lower()})"
        where = f"{witness['device']}, {witness['date']}"
        more = (", ".join(others), ", ".join(asked.get(rule, [])))
        rows.append((link, strong, _inputs(witness, rule), where, *more))
    return _table("Rules", ("rule", "strongest witness", "inputs", "device, date", "others", "open"), rows)


def _inputs(witness: Witness, rule: str) -> str:
    """How much was compared for a rule: items by rule where they were counted, else the witness's own words."""
    inputs = witness.get("inputs", "")
    if isinstance(inputs, dict):
        return f"{inputs[rule]:,}" if rule in inputs else ""
    return str(inputs)


def _open(ledger: Ledger) -> list[str]:
    rows = []
    for number, one in enumerate(ledger["open"], 1):
        probes = ", ".join(f"`{name}`" for name in one.get("probes", ()))
        settled = f"{one['probe']}{f' ({probes})' if probes else ''}"
        rows.append((str(number), ", ".join(one["rules"]), one["question"], settled, _answer(ledger, one) or "open"))
    return _table("Open until a Blackwell run", ("", "rules", "question", "settled by", "state"), rows)


def _answer(ledger: Ledger, one: dict[str, Any]) -> str | None:
    """What Blackwell runs say to an open question, once each of its probes has run on its rules; None before."""
    names = one.get("probes", [])
    found = {name: [w for w in of_blackwell(ledger) if w["name"].endswith(f": {name}")] for name in names}
    some = [witness for group in found.values() for witness in group]
    if not names or not all(found.values()) or not set(one["rules"]) <= {rule for w in some for rule in w["rules"]}:
        return None
    verdict = "differs" if any(witness["different"] for witness in some) else "as the rule says"
    return f"{verdict}: {', '.join(witness['name'] for witness in some)}"


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["", f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    print(render(load()), end="")

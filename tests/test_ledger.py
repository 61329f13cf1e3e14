"""The evidence ledger speaks of every rule of the specification, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from conformance import ledger

ROOT = Path(__file__).parents[1]
RULES = set(re.findall(r"^### ([A-Z][A-Z0-9-]+)$", (ROOT / "docs" / "spec.md").read_text("utf-8"), re.MULTILINE))


def test_every_rule_has_a_witness_and_every_witness_a_rule() -> None:
    named = {rule for witness in ledger.load()["witnesses"] for rule in witness["rules"]}
    assert named == RULES
    assert {rule for one in ledger.load()["open"] for rule in one["rules"]} <= RULES


def test_kinds_are_known_and_no_witness_claims_blackwell() -> None:
    found = ledger.load()
    assert {witness["kind"] for witness in found["witnesses"]} <= set(found["kinds"])
    assert all(witness["kind"] != found["kinds"][-1] for witness in found["witnesses"])
    assert all(witness["different"] == 0 for witness in found["witnesses"])


def test_the_strongest_witness_wins() -> None:
    best = ledger.strongest(ledger.load())
    assert best["E2M1-RNE"]["name"] == "probes-h200" and best["E2M1-RNE"]["inputs"]["E2M1-RNE"] == 3 << 32
    assert best["SR-SM100"]["name"] == "b200-cvt-rs"


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    assert page == ledger.render(ledger.load()), "run python -m conformance.ledger > docs/evidence.md"

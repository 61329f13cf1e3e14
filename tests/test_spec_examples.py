"""docs/spec.md holds: every rule has a running example and a witness, and every id in the code is a rule."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv

ROOT = Path(__file__).parent.parent
SPEC = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
FORMATS = ("e2m1", "e4m3", "e8m0", "mxfp4", "fp8")
MODULES = (*FORMATS, "layout", "partial_cast", "philox", "streams", "tensorcore", "gemm", "recipe")
RULE = r"[A-Z0-9]+(?:-[A-Z0-9]+)+"


class Part(NamedTuple):
    """What stands below one heading: a rule when the heading is an id."""

    id: str
    text: str

    @property
    def examples(self) -> list[str]:
        return re.findall(r"^```example\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)


_headings = re.split(r"^#{2,3} +(.*)$", SPEC, flags=re.MULTILINE)
PARTS = [Part(*pair) for pair in zip(_headings[1::2], _headings[2::2], strict=True)]
RULES = [part for part in PARTS if re.fullmatch(r"[A-Z0-9-]+", part.id)]


def _array(dtype: Any, carrier: Any) -> Any:
    return lambda *bits: np.array(bits, carrier).view(dtype)


f32 = _array(np.float32, np.uint32)
f16 = _array(np.float16, np.uint16)
bf16 = _array(ml_dtypes.bfloat16, np.uint16)
u8 = _array(np.uint8, np.uint8)


def row(*bits: int) -> Any:
    """One 1x16 block of bfloat16, +0 after the patterns given."""
    return bf16(*bits, *[0] * (16 - len(bits))).reshape(1, 16)


def namespace() -> dict[str, Any]:
    names: dict[str, Any] = {"nv": nv, "np": np, "ml_dtypes": ml_dtypes, "row": row}
    names |= {"f32": f32, "f16": f16, "bf16": bf16, "u8": u8}
    names |= {module: import_module(f"nvfp4ref.{module}") for module in MODULES}
    setup = re.search(r"^```example setup\n(.*?)^```", SPEC, re.DOTALL | re.MULTILINE)
    assert setup is not None
    exec(setup[1], names)
    return names


def show(value: Any) -> str:
    """Type and bit patterns, as an example would write them."""
    array = np.asarray(value)
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}").ravel()
    return f"{array.dtype}({', '.join(f'0x{int(b):0{2 * array.itemsize}X}' for b in bits)})"


def run(example: str) -> list[str]:
    """Run the lines of an example; say for each `=>` line that does not hold what it gave instead."""
    names, wrong = namespace(), []
    for line in example.splitlines():
        call, arrow, result = line.partition(" => ")
        if not arrow:
            exec(line, names)
            continue
        with np.errstate(all="ignore"):
            found, expected = show(eval(call, names)), show(eval(result, names))
        if found != expected:
            wrong.append(f"{call}\n    gives    {found}\n    expected {expected}")
    return wrong


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.id)
def test_example_holds(part: Part) -> None:
    wrong = [message for example in part.examples for message in run(example)]
    assert not wrong, f"{part.id} of docs/spec.md:\n" + "\n".join(wrong)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rule_is_complete(rule: Part) -> None:
    assert any(" => " in example for example in rule.examples), f"{rule.id} has no example"
    assert "Witness:" in rule.text, f"{rule.id} names no witness"


def test_ids_are_unique() -> None:
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))
    assert len(ids) > 50


def mentions(text: str, families: set[str]) -> set[str]:
    """Words that look like an id of one of the families of rules, a family named with a star apart."""
    return {word for word in re.findall(rf"\b{RULE}\b(?!-\*)", text) if word.partition("-")[0] in families}


def test_the_document_refers_to_rules_that_exist() -> None:
    ids = {rule.id for rule in RULES}
    families = {rule.id.partition("-")[0] for rule in RULES}
    assert mentions(SPEC, families) <= ids


@pytest.mark.parametrize("package", ["nvfp4ref", "nvfp4hw", "conformance"])
def test_the_code_names_rules_that_exist(package: str) -> None:
    ids = {rule.id for rule in RULES}
    families = {rule.id.partition("-")[0] for rule in RULES}
    for path in sorted((ROOT / package).rglob("*.py")):
        unknown = mentions(path.read_text(encoding="utf-8"), families) - ids
        prefixes = {word for word in unknown if any(rule.startswith(word + "-") for rule in ids)}
        assert not unknown - prefixes, f"{path.relative_to(ROOT)} names rules that docs/spec.md does not have"


def test_a_wrong_example_is_found() -> None:
    """The checker bites: a wrong bit, a wrong type and a wrong count are all reported."""
    assert run("e2m1.encode(f32(0x3E800000)) => u8(0)") == []
    for wrong in ("u8(1)", "np.uint16(0)", "u8(0, 0)"):
        assert len(run(f"e2m1.encode(f32(0x3E800000)) => {wrong}")) == 1

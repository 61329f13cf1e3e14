"""Exported vectors driven into a design, row by row: for cocotb, and for anything with the same handles.

It needs the standard library only.  ``check`` sets ``handle.value`` and reads it, and waits by a coroutine that it is
given, so it is tested without a simulator.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

WIDTHS = {"u16": 2, "f16": 2, "bf16": 2, "u32": 4, "f32": 4, "u64": 8}  # bytes of a value; the other types have one
DIGITS = {"e2m1": 4}  # bits of a value in a word, where they are not those of its bytes


def rows(folder: Path, rule: str, operation: str) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """(operands, results) of every row of a rule's sets of one operation, as words by name.

    Several values of a row make one word, the first in its lowest bits.
    """
    group = json.loads((folder / f"{rule}.json").read_text(encoding="utf-8"))
    data = (folder / group["data"]).read_bytes()
    for one in group["sets"]:
        if one["rows"] and one["operation"] == operation:
            for row in range(one["results"]):
                words: dict[str, dict[str, int]] = {"operand": {}, "result": {}}
                for array in one["arrays"]:
                    words[array["role"]][array["name"]] = _word(array, data, row)
                yield words["operand"], words["result"]


def _word(array: dict[str, Any], data: bytes, row: int) -> int:
    width = WIDTHS.get(array["type"], 1)
    count = array["shape"][1] if len(array["shape"]) > 1 else 1
    start = array["offset"] + row * count * width
    bits = DIGITS.get(array["type"], 8 * width)
    word = 0
    for i in range(count):
        value = int.from_bytes(data[start + i * width : start + (i + 1) * width], "little")
        word |= value << (bits * i)
    return word


async def check(dut: Any, settle: Callable[[], Awaitable[Any]], folder: Path, operation: str, *rules: str) -> int:
    """Drive the operands of each row, wait, compare the results; the number of rows.

    Args:
        dut: has a handle for each operand and each result, of their names.
        settle: makes what is awaited between driving and reading, a Timer or a clock edge.
    Raises:
        AssertionError: names the rule, the row, the operands in hexadecimal, found and expected.
    """
    done = 0
    for rule in rules:
        for row, (operands, results) in enumerate(rows(folder, rule, operation)):
            for name, word in operands.items():
                getattr(dut, name).value = word
            await settle()
            for name, expected in results.items():
                found = int(getattr(dut, name).value)
                asked = ", ".join(f"{key}={word:X}" for key, word in operands.items())
                assert found == expected, f"{rule} row {row}: {asked}: {name} is {found:X}, expected {expected:X}"
            done += 1
    assert done, f"{folder} has no rows of {operation} under {', '.join(rules)}"
    return done

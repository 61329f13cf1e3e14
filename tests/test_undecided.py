"""What a dump that conforms cannot exclude: held against planting the very deviation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import check
from conformance.cli import main
from conformance.deviations import DEVIATIONS
from conformance.undecided import revealing, undecided
from nvfp4ref.dump import Dump, from_tensor, load_tensor, save_dump

NORMAL = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
TE = nv.arithmetic("te")
#: Those that change te in its own stages.
PLANTED: list[str] = [
    ident
    for ident, entry in DEVIATIONS.items()
    if entry.changes and entry.stage in ("global-scale", "block-scale", "encode-scale", "rounding")
    if all(getattr(TE, key, value) != value for key, value in entry.changes[0].items())
    if not any(key.startswith("four_over_six_") for key in entry.changes[0])
]


def dump_of(x: np.ndarray[Any, Any], fields: dict[str, Any] | None = None, both: bool = False) -> Dump:
    arithmetic = nv.arithmetic("te", **(fields or {}))
    columnwise = nv.quantize(x, axis=0, arithmetic=arithmetic) if both else None
    return from_tensor(nv.quantize(x, arithmetic=arithmetic), x, columnwise=columnwise)


@pytest.mark.parametrize("x", [NORMAL, revealing(dump_of(NORMAL))], ids=["normal", "revealing"])
def test_a_deviation_is_undecided_exactly_where_planting_it_changes_no_byte(x: np.ndarray[Any, Any]) -> None:
    found = undecided(dump_of(x))
    for ident in PLANTED:
        try:
            dump = dump_of(x, dict(DEVIATIONS[ident].changes[0]))
        except ValueError:  # fields that only another goes with
            continue
        assert (ident in found) == (check(dump, "te").verdict == "conforms"), ident


def test_normal_data_hides_what_the_revealing_input_shows() -> None:
    ordinary, revealed = (set(undecided(dump_of(x))) for x in (NORMAL, revealing(dump_of(NORMAL))))
    assert {"block-scale.divide-by-6", "element.ties-away"} <= ordinary - revealed


def test_what_one_direction_shows_is_decided() -> None:
    x = revealing(dump_of(NORMAL))[:128]
    both = set(undecided(dump_of(x, both=True)))
    assert both <= set(undecided(dump_of(x)))
    assert not any(ident.startswith(("random.", "hadamard.")) for ident in both)


def test_the_command_says_what_is_undecided_and_writes_what_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, better = tmp_path / "mine.npz", tmp_path / "better.npy"
    save_dump(path, dump_of(NORMAL))
    assert main(["check", str(path), "--undecided", "--suggest-input", str(better)]) == 0
    said = capsys.readouterr()
    assert "block-scale.divide-by-6" in said.out and "would have given the same bytes" in said.out
    assert str(better) in said.err
    x = load_tensor(str(better), "bfloat16")
    assert "block-scale.divide-by-6" not in undecided(dump_of(x))


def test_nothing_is_asked_of_a_gemm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q = nv.quantize(NORMAL)
    operand = dump_of(NORMAL)
    save_dump(tmp_path / "gemm.npz", Dump(a=operand, b=operand, d=nv.matmul(q, q)))
    assert main(["check", str(tmp_path / "gemm.npz"), "--undecided"]) == 0
    assert "GEMM" in capsys.readouterr().out

"""The probes without a GPU: their contract, records that are verified, and every planted fault caught."""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4hw import probes
from nvfp4hw.probes import __main__ as command
from nvfp4hw.probes import hadamard, mma, reciprocal, runs, simulation, stochastic, storage, toolchain
from nvfp4hw.probes.base import BadRecord, Output, ProbeError, ProbeResult, seal
from nvfp4ref import e2m1, e4m3, tensorcore

ROOT = Path(__file__).parents[1]
NAMES = probes.names()


@functools.cache
def passing(name: str) -> ProbeResult:
    """A simulated run without a fault."""
    return probes.simulated()[name].run()


def changed(result: ProbeResult, record: dict[str, Any] | None = None, **arrays: Any) -> ProbeResult:
    """What verify says of a record with something changed and sealed again, so that the seal does not tell."""
    everything = {**result.arrays, **arrays}
    text = {**result.record, **(record or {})}
    text["seal"] = seal(text, everything)
    return probes.load(result.name).verify(text, everything)


@pytest.fixture(autouse=True)
def _forget_the_machine() -> Iterator[None]:
    """Compilers and devices that a test made up are not remembered after it."""
    yield
    for cached in (toolchain.find_nvcc, toolchain.nvcc_version, _FIND_DEVICE):
        cached.cache_clear()


_FIND_DEVICE = toolchain.find_device  # some tests put another in its place


# ---- the contract ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_says_what_it_is(name: str) -> None:
    probe = probes.load(name)
    assert probe.name == name
    assert probe.what.endswith("?")
    assert probe.architectures and all(target.startswith("sm_") for target in probe.architectures)
    assert (Path(probes.__file__).parent / probe.source).is_file()
    specification = (ROOT / "docs" / "spec.md").read_text("utf-8")
    for rule in probe.rules:
        assert f"### {rule}\n" in specification
    reason = probe.availability()
    assert reason is None or reason


def test_every_open_question_that_a_probe_can_settle_has_one() -> None:
    """The evidence ledger names rules whose proof is a Blackwell run; those of conversions and MMA words are here."""
    held = {rule for name in NAMES for rule in probes.load(name).rules}
    assert {"E2M1-RNE", "E2M1-NAN", "E2M1-ZERO", "E4M3-NAN", "SR-SM100", "SR-E4M3", "RHT-SUM", "MMA-WINDOW"} <= held
    assert "FUSED-RHT-FAST-MATH" in held
    blackwell = {name for name in NAMES if {"sm_100a", "sm_120a"} & set(probes.load(name).architectures)}
    assert set(NAMES) - blackwell == {"fp4-header"}  # built for sm_100 and sm_120, without the instruction


def test_unknown_names_and_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no probe 'rn-e3m2'; the probes are rn-e2m1, "):
        probes.load("rn-e3m2")
    with pytest.raises(ValueError, match="there is no probe 'rn-e3m2'"):
        probes.simulated({"rn-e3m2": "crash"})
    with pytest.raises(ValueError, match="fault 'sticky' of probe rn-e2m1 is not one of crash, "):
        probes.simulated({"rn-e2m1": "sticky"})


def test_a_simulated_gpu_has_the_probes_of_its_target() -> None:
    there = {name for name, probe in probes.simulated(architecture="sm_120a").items() if probe.availability() is None}
    assert there == {"rn-e2m1", "rn-e4m3", "rs-model", "rcp", "rht", "mma-sm120"}
    reason = probes.simulated(architecture="sm_120a", device="RTX 5090")["rs-e2m1"].availability()
    assert reason == "the simulated RTX 5090 is sm_120a; this needs sm_100a, sm_103a"


# ---- runs without a fault ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_on_a_simulated_gpu_passes(name: str) -> None:
    result = passing(name)
    assert (result.status, result.different, result.first) == ("pass", 0, [])
    assert result.name == name and result.device == "simulated Blackwell" and result.seconds > 0
    assert str(result).startswith(f"PASS {name}: ")
    again = probes.load(name).verify(json.loads(json.dumps(result.record)), result.arrays)
    assert (again.status, again.compared, again.record) == ("pass", result.compared, result.record)


def test_the_whole_input_space_is_counted() -> None:
    words, fields = 66, 1 << 16
    assert passing("rn-e2m1").compared == passing("rn-e4m3").compared == 2 << 32
    assert passing("fp4-header").compared == 3 << 32
    assert passing("rs-e2m1").compared == (4 * words << 32) + 7 * 4 * 2 * fields
    assert passing("rs-e4m3").compared == (4 * words << 32) + 126 * 4 * 2 * fields
    assert passing("rcp").compared == (1 << 32) + (1 << 23)
    assert hadamard.DIGESTED * hadamard.CHUNK > 10**8


def test_records_say_what_special_values_become() -> None:
    special = passing("rn-e4m3").record["special"]
    assert special == {
        "+0": ["0x0"],
        "-0": ["0x80"],
        "smallest subnormal": ["0x0"],
        "-smallest subnormal": ["0x80"],
        "+Inf": ["0x7e"],
        "-Inf": ["0xfe"],
        "+NaN": ["0x7f"],
        "-NaN": ["0x7f"],
    }
    assert passing("rs-e2m1").record["sweeps"]["e2m1_patterns"]["special"]["-NaN"] == ["0x7"]


def test_the_mma_record_names_the_models_that_explain_it() -> None:
    record = passing("mma-sm100").record
    assert record["explained_by"] == ["blackwell"]
    assert all(sum(counts.values()) > 100 for model, counts in record["models"].items() if model != "blackwell")
    assert record["published_different"] == 0
    assert record["open_questions"]["D1-merge-K4-vs-K16"]["found"] == "0x36000000"
    assert "window39-k4" not in record["open_questions"]["D1-merge-K4-vs-K16"]["models"]


def test_a_record_on_disk(tmp_path: Path) -> None:
    result = passing("rht")
    path = tmp_path / "rht.npz"
    storage.save(path, result)
    assert os.listdir(tmp_path) == ["rht.npz"]
    record, arrays = storage.load(path)
    assert record == result.record and probes.load("rht").verify(record, arrays).status == "pass"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="is no record of a probe"):
        storage.load(path)


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every flipped bit and cut of a file is a sentence, or a record that is told to be changed."""
    whole = (Path(probes.__file__).parent / "records" / "h200-fp4-header.npz").read_bytes()
    path, dice = tmp_path / "damaged.npz", np.random.default_rng(1)
    codes = []
    for attempt in range(300):
        data = bytearray(whole[: dice.integers(len(whole))] if attempt % 3 == 2 else whole)
        if data:
            data[dice.integers(len(data))] ^= 1 << dice.integers(8)
        path.write_bytes(data)
        codes.append(command.main(["verify", str(path)]))
    deep = np.frombuffer(b"[" * 100_000, np.uint8)
    np.savez(path, record=deep)
    assert command.main(["verify", str(path)]) == 2
    assert codes.count(2) > 200 and "Traceback" not in capsys.readouterr().out


# ---- records that lie --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_any_changed_byte_of_an_array_fails(name: str) -> None:
    result = passing(name)
    rng = np.random.default_rng(5)
    for key, array in result.arrays.items():
        for _ in range(4):
            data = bytearray(array.tobytes())
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            forged = np.frombuffer(bytes(data), array.dtype).reshape(array.shape)
            found = changed(result, **{key: forged})
            assert found.status == "fail" and found.first, key


@pytest.mark.parametrize("name", NAMES)
def test_any_changed_fact_fails(name: str) -> None:
    result = passing(name)
    told_by_the_system = {"device", "architecture", "seconds", "output", "fault"}
    for key in set(result.record) - told_by_the_system - {"seal"}:
        value = result.record[key]
        others = [value + 1, float(value), bool(value)] if type(value) is int else [None]
        for other in others:
            found = changed(result, {key: other})
            assert found.status == "fail" and found.first, key
    for key in result.record:  # the seal covers the rest
        found = probes.load(name).verify({**result.record, key: "changed"}, result.arrays)
        assert found.status == "fail" and found.first, key


def test_a_record_of_something_else_is_no_traceback() -> None:
    result = passing("rn-e2m1")
    probe = probes.load("rn-e2m1")
    for record, arrays in (
        ({}, {}),
        (result.record, {}),
        (result.record, {"words": np.zeros(3)}),
        (passing("rn-e4m3").record, passing("rn-e4m3").arrays),
        ({**result.record, "format": 2}, result.arrays),
        ({**result.record, "extra": {1, 2}}, result.arrays),
        (result.record, {**result.arrays, "runs_code": result.arrays["runs_code"].astype(np.uint8)}),
        (result.record, {**result.arrays, "runs_code": result.arrays["runs_code"][:-1]}),
        (result.record, {**result.arrays, "runs_code": result.arrays["runs_code"][None]}),
    ):
        found = probe.verify(record, arrays)
        assert found.status == "fail" and found.first[0]["what"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rules": ["E4M3-RNE", "MMA-GROUP"]}, "the record's rules"),
        ({"device_first": ["operand a"]}, "the device found"),
        ({"device_first": 5}, "the device's counterexamples"),
        ({"device_verdict": "FAIL", "device_first": 5}, "the device's counterexamples"),
        ({"compared": float(3 << 32)}, "the record's compared"),
        ({"different": False}, "the record's different"),
        ({"device_different": 0.0}, "the device found"),
        ({"source": "0" * 64}, "the program was not fp4_header.cu"),
        ({"source": None}, "the program was not fp4_header.cu"),
        ({"architecture": "sm_100a"}, "its target"),
        ({"architecture": "simulated"}, "its target"),
        ({"device": "simulated Blackwell"}, "a simulated device has no target"),
    ],
)
def test_a_resealed_record_with_another_fact_fails(changes: dict[str, Any], says: str) -> None:
    """Of a real run, whose arrays are right."""
    record, arrays = storage.load(Path(probes.__file__).parent / "records" / "h200-fp4-header.npz")
    found = changed(ProbeResult("fp4-header", "pass", 0, 0, [], record, arrays, "", 0.0), changes)
    assert found.status == "fail" and found.first[0]["what"] == says, found.first


def test_a_transform_of_a_real_device_has_every_chunk_and_every_rounding() -> None:
    record, arrays = storage.load(Path(probes.__file__).parent / "records" / "h200-rht.npz")
    few = len(hadamard.KINDS)
    result = ProbeResult("rht", "pass", 0, 0, [], record, arrays, "", 0.0)
    claims = {"digested": few, "compared": few * hadamard.CHUNK, "architecture": "simulated"}
    found = changed(result, claims, digests=arrays["digests"][:few])
    assert found.status == "fail" and "has digests of 8 chunks; expected 128" in found.first[0]["what"]
    simulated = passing("rht")
    for rounded in (1, False, None):
        found = changed(simulated, {"device_rounded_different": rounded})
        assert found.status == "fail" and found.first[0]["what"] == "sums that the device rounded otherwise"


def test_odd_values_never_raise_and_can_be_printed() -> None:
    result = passing("rn-e4m3")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for key in (*result.record, "unheard of"):
        values: list[Any] = [5, -1.5, float("nan"), "\ud800\x1b[31m", ["\ud800"], {"a": []}, None, deep]
        for value in values:
            record = {**result.record, key: value}
            found = probes.load("rn-e4m3").verify(record, result.arrays)
            assert found.status == "fail" and found.seconds >= 0
            str(found).encode()
            assert "\x1b" not in str(found)


def test_what_the_device_counted_is_not_forgotten() -> None:
    result = passing("rht")
    found = changed(result, {"device_different": 3, "device_verdict": "FAIL", "device_first": ["chunk 7 vector 3"]})
    assert (found.status, found.different) == ("fail", 3)
    assert {"what": "the device found", "found": "chunk 7 vector 3"} in found.first


# ---- planted faults ----------------------------------------------------------------------------------------

#: probe -> fault -> how many outputs must differ; None: some
HARDWARE = {
    "rn-e2m1": {
        "nan-zero": 2 * 2 * (2**23 - 1),
        "minus-zero": 2,
        "ties-away": 2 * 2 * 4,
        "one-threshold": 1,
        "second-operand": 2**32,
    },
    "rn-e4m3": {"nan-zero": 2 * 2 * (2**23 - 1), "minus-zero": 2, "ties-away": 2 * 2 * 63, "one-threshold": 1},
    "fp4-header": {"ties-away": 3 * 2 * 4},
    "rs-e2m1": {
        "operands-reversed": None,
        "no-bit-reversal": None,
        "sticky": None,
        "nan-zero": 4 * 66 * 2 * (2**23 - 1),
        "one-threshold": 1,
    },
    "rs-e4m3": {"sticky": None},
    "rcp": {"two-ulp": 1, "unpredicted": 1},
    "rht": dict.fromkeys(simulation.HADAMARD_FAULTS),
    "mma-sm120": dict.fromkeys(("window39-k4", "window39-k16", "shifted-scales")),
    "mma-sm100": dict.fromkeys(("blackwell-snapshot", "fp32", "dropped-product", "swapped-rows")),
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in HARDWARE for fault in HARDWARE[name]])
def test_a_planted_fault_of_the_hardware_is_caught(name: str, fault: str) -> None:
    result = probes.simulated({name: fault})[name].run()
    assert result.status == "fail" and 1 <= len(result.first) <= 8
    json.dumps(result.first, allow_nan=False)
    count = HARDWARE[name][fault]
    assert result.different == count if count is not None else result.different > 0
    assert probes.load(name).verify(result.record, result.arrays).first == result.first
    if fault in mma.MODELS:
        assert result.record["explained_by"] == [fault]
    if fault in ("dropped-product", "swapped-rows", "shifted-scales") and name.startswith("mma"):
        assert "operands or scales are not where" in result.first[0]["what"]


def test_a_counterexample_says_where_it_is() -> None:
    first = probes.simulated({"rn-e2m1": "ties-away"})["rn-e2m1"].run().first[0]
    assert first == {
        "operand": "a",
        "x": "0x3E800000",
        "value": "0.25",
        "found": "0x1",
        "expected": "0x0",
        "points": 1,
    }
    word = probes.simulated({"rs-e2m1": "sticky"})["rs-e2m1"].run().first[0]
    assert set(word) == {"sweep", "word", "element", "x", "value", "found", "expected", "points"}


PROGRAM = {
    "crash": "the probe's program was stopped by SIGSEGV",
    "hang": "the probe's program did not end within 0.7 s",
    "garbage": "the probe's program announced no readable file: '../../elsewhere 12'",
    "silent": "the probe's output has 0 lines 'verdict'; expected one",
    "short-file": "the probe's file runs.bin has 204 bytes; it announced 408",
    "error": "ended with status 3: cannot run: the sweep: an illegal memory access was encountered",
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("fault", PROGRAM)
def test_a_program_that_comes_to_no_result_is_an_error_in_words(fault: str) -> None:
    limit = 0.7 if fault == "hang" else None
    with pytest.raises(ProbeError) as caught:
        probes.simulated({"rn-e2m1": fault}, limit=limit)["rn-e2m1"].run()
    assert PROGRAM[fault] in str(caught.value)


def test_a_program_that_says_pass_about_wrong_outputs_fails() -> None:
    result = probes.simulated({"rn-e2m1": "lie"})["rn-e2m1"].run()
    assert result.record["device_verdict"] == "PASS" and result.status == "fail" and result.different > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 lines 'verdict'"),
        ("verdict PASS\nverdict PASS", "2 lines 'verdict'"),
        ("verdict MAYBE", "said 'MAYBE' and ended with status 0"),
        ("verdict FAIL", "said 'FAIL' and ended with status 0"),
        ("file a.bin 3\nverdict PASS", "left no file a.bin"),
        ("file a.bin many\nverdict PASS", "announced no readable file"),
    ],
)
def test_strange_output_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        toolchain.execute([sys.executable, "-c", f"print({text!r})"], {}, 30, {})


def test_strange_lines_and_files_are_refused() -> None:
    output = Output({"compared": ["many"], "sweep": ["runs.bin 2 0 10 1"]}, {"runs.bin": b"1234"}, {})
    with pytest.raises(ProbeError, match="line 'compared' does not hold 1 integer: 'many'"):
        output.integers("compared")
    with pytest.raises(ProbeError, match="wrote no file table.bin"):
        output.array("table.bin", np.int8)
    with pytest.raises(ProbeError, match="has 4 bytes; expected 0"):
        runs.read_runs(output, "runs.bin")
    with pytest.raises(ProbeError, match="no line about its sweep other.bin"):
        runs.read_runs(output, "other.bin")
    with pytest.raises(ProbeError, match="found 5,000,000 runs and wrote 0"):
        runs.read_runs(Output({"sweep": ["runs.bin 2 0 10 5000000"]}, {"runs.bin": b""}, {}), "runs.bin")
    with pytest.raises(ProbeError, match="does not start"):
        toolchain.execute([str(ROOT / "no-such-program")], {}, 5, {})


# ---- run lengths -------------------------------------------------------------------------------------------

curves_and_points = st.integers(1, 3).flatmap(
    lambda curves: st.integers(1, 12).flatmap(
        lambda points: st.tuples(
            *[st.lists(st.lists(st.integers(0, 2), min_size=points, max_size=points), min_size=curves, max_size=curves)]
            * 2
        )
    )
)


@given(curves_and_points)
def test_comparing_runs_is_comparing_points(pair: tuple[list[list[int]], list[list[int]]]) -> None:
    found, expected = (np.array(codes, np.uint8) for codes in pair)
    mine, theirs = runs.dense_runs(found), runs.dense_runs(expected)
    mine.check()
    count, first = runs.compare(mine, theirs, lambda curve, point: {"at": (curve, point)})
    differ = np.argwhere(found != expected)
    assert count == len(differ)
    assert bool(first) == bool(count)
    if count:
        assert first[0]["at"] == tuple(differ[0])
    again = runs.read_runs(
        Output(
            {"sweep": [f"runs.bin {mine.curves} 0 {mine.count} {len(mine.start)}"]},
            {"runs.bin": runs.write_runs(mine)},
            {},
        ),
        "runs.bin",
    )
    assert runs.compare(again, mine, lambda curve, point: {}) == (0, [])


def test_runs_that_are_none_are_refused() -> None:
    def made(curve: list[int], start: list[int], code: list[int]) -> runs.Runs:
        parts = (np.array(curve, np.uint16), np.array(start, np.uint32), np.array(code, np.uint16))
        return runs.Runs(*parts, 2, 0, 100)

    made([0, 0, 1], [0, 7, 0], [1, 2, 2]).check()
    for curve, start, code, message in (
        ([], [], [], "not in order"),
        ([0, 1, 0], [0, 0, 7], [1, 2, 2], "not in order"),
        ([0, 0, 1], [0, 0, 0], [1, 2, 2], "not in order"),
        ([0, 0], [0, 7], [1, 2], "not those of 2 curves"),
        ([0, 1], [0, 1], [1, 2], "do not cover points"),
        ([0, 0, 1], [0, 100, 0], [1, 2, 2], "do not cover points"),
        ([0, 0, 1], [0, 7, 0], [1, 1, 2], "have one code"),
    ):
        with pytest.raises(BadRecord, match=message):
            made(curve, start, code).check()


@pytest.mark.parametrize("form", ["e2m1", "e4m3"])
def test_the_oracles_runs_are_its_codes(form: str) -> None:
    """At every start, one before it, and at random places, the runs are what the oracle encodes."""
    found = probes.conversions.expected_runs(form, 1)
    rng = np.random.default_rng(3)
    points = np.concatenate([found.start, found.start - np.uint32(1), rng.integers(0, 2**32, 200000, np.uint32)])
    encode = e2m1.encode if form == "e2m1" else e4m3.encode
    with np.errstate(invalid="ignore"):
        ours = encode(points.view(np.float32))
    assert np.array_equal(found.code[np.searchsorted(found.start, points, side="right") - 1], ours)


@pytest.mark.parametrize("rule", [stochastic.E2M1, stochastic.E4M3, stochastic.FALLBACK], ids=lambda rule: rule.name)
def test_the_oracles_stochastic_runs_are_its_codes(rule: stochastic.Rule) -> None:
    found = stochastic.expected_patterns(rule)
    rng = np.random.default_rng(4)
    n = 200000
    x = rng.integers(0, 2**32, (n, 4), np.uint32)
    x[: n // 2] = x[: n // 2] & 0x80FFFFFF | rng.integers(0x3A, 0x44, (n // 2, 4), np.uint32) << np.uint32(24)
    which = rng.integers(0, stochastic.WORDS, n)
    ours = rule.encode(x.view(np.float32), stochastic.words()[which])
    places = (4 * which[:, None] + np.arange(4)).astype(np.uint64) << np.uint64(32) | x
    theirs = found.code[np.searchsorted(found.place, places.reshape(-1), side="right") - 1].reshape(n, 4)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("rule", [stochastic.E2M1, stochastic.E4M3], ids=lambda rule: rule.name)
def test_every_field_has_its_threshold(rule: stochastic.Rule) -> None:
    """At the threshold the oracle goes up, one ulp below it does not, for all 2^16 fields, codes and elements."""
    found = stochastic.expected_thresholds(rule)
    code, _, below = (index.reshape(-1) for index in np.indices((rule.last, 4, 2)))
    assert np.array_equal(found.start, np.zeros(8 * rule.last))
    assert np.array_equal(found.code, (code + 1 - below) | (code & 1) * rule.sign)
    i = np.arange(1 << 16, dtype=np.uint32)
    fields = rule.fields(rule.words(i, i[::-1].copy()))
    assert all(np.array_equal(np.sort(fields[:, element]), i) for element in range(4))


# ---- the words of the MMA ----------------------------------------------------------------------------------


def test_the_packed_words_are_those_of_the_vectors() -> None:
    def codes(text: Any) -> list[int]:
        return [int(digit, 16) for digit in text] if isinstance(text, str) else text

    words, at = mma.words(), 0
    for file, label in (("b200-published", "published"), ("open-questions", ""), ("model-words", "model")):
        cases = json.loads((ROOT / "vectors" / "mma" / f"{file}.json").read_text("utf-8"))["cases"]
        here = slice(at, at + len(cases))
        for field in ("a", "b", "sa", "sb", "c"):
            theirs = np.array([codes(case[field]) for case in cases], np.uint32)
            assert np.array_equal(getattr(words, field)[here], theirs)
        names = [f"{label} {i}" if label else case["name"] for i, case in enumerate(cases)]
        assert words.name[here].tolist() == names
        if label == "published":
            assert words.d[here].tolist() == [case["d"] for case in cases]
        at += len(cases)
    assert at == len(words.c) == 4 + 32 + 1200


def test_layout_words_are_the_same_under_every_model() -> None:
    for model in mma.MODELS:
        assert np.array_equal(mma.predicted(model)[: mma.LAYOUT_TILES], mma.predicted("blackwell")[: mma.LAYOUT_TILES])
    assert len(np.unique(mma.predicted("blackwell")[: mma.LAYOUT_TILES])) > 3000  # no two rows or columns look alike


def test_every_place_of_a_tile_is_its_word() -> None:
    everything, d = mma.tiles(), mma.predicted("blackwell")
    rng = np.random.default_rng(6)
    for t, m, n in zip(rng.integers(0, 57, 60), rng.integers(0, 128, 60), rng.integers(0, 32, 60), strict=True):
        word = (
            everything.a[t, m],
            everything.b[t, n],
            everything.c[t, m, n].view(np.float32),
            everything.sa[t, m],
            everything.sb[t, n],
        )
        a, b, c, sa, sb = (np.asarray(part)[None] for part in word)
        assert tensorcore.mma_words(a, b, c, sa, sb).view(np.uint32)[0] == d[t, m, n]
    assert len(everything.file()) == 57 * 22144


def test_one_changed_sum_changes_the_digest() -> None:
    total = hadamard.sums(hadamard.vectors(3))
    ours = hadamard.digest(total)
    assert ours == hadamard.expected(3)[0]
    total.view(np.uint32)[77, 5] ^= 1
    assert hadamard.digest(total) != ours


def test_the_recorded_reciprocal_table_is_known() -> None:
    with np.load(ROOT / "vectors" / "te-kernels-h200" / "rcp.npz") as file:
        assert reciprocal.table_digest(file["rcp_ulp"]) == reciprocal.HOPPER


def test_another_table_on_hopper_fails_and_elsewhere_is_recorded() -> None:
    result = passing("rcp")
    assert result.record["table_is_hopper"] is False and result.status == "pass"
    found = changed(result, {"architecture": "sm_90a"})
    assert found.status == "fail" and "not the one recorded on an H200" in found.first[0]["what"]
    digests = np.load(ROOT / "vectors" / "te-kernels-h200" / "rcp.npz")["rcp_ulp"]
    assert "table" in changed(result, table=digests).first[0]["what"]


# ---- the recorded run on an H200 ---------------------------------------------------------------------------

RECORDS = sorted((Path(probes.__file__).parent / "records").glob("*.npz"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_recorded_run_on_an_h200_is_verified(path: Path) -> None:
    record, arrays = storage.load(path)
    result = probes.load(record["probe"]).verify(record, arrays)
    assert (result.status, result.different) == ("pass", 0)
    assert result.device == "NVIDIA H200 (sm_90a)" and 0 < result.seconds < 60
    if result.name == "rht":
        assert result.compared > 10**8
        for chunk in (0, 77, 127):
            digests = arrays["digests"].copy()
            digests[chunk] ^= np.uint64(1)
            assert changed(result, digests=digests).status == "fail"
    if result.name == "rcp":
        assert record["table_is_hopper"] is True


def test_everything_that_hopper_has_was_run() -> None:
    there = {storage.load(path)[0]["probe"] for path in RECORDS}
    assert there == {name for name in NAMES if "sm_90a" in probes.load(name).architectures}


# ---- building and running ----------------------------------------------------------------------------------


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nvcc."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda *_, **__: None)
    toolchain.find_nvcc.cache_clear()


def a_device(monkeypatch: pytest.MonkeyPatch, number: int = 100, name: str = "NVIDIA B200") -> None:
    monkeypatch.setattr(toolchain, "find_device", lambda: toolchain.Device(name, number, "610.12 (CUDA 13.2)"))


def test_availability_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch, 90, "NVIDIA H200")
    assert probes.load("rs-e2m1").availability() == "NVIDIA H200 is sm_90; this needs sm_100a, sm_103a"
    absent(monkeypatch)
    reason = probes.load("rn-e4m3").availability()
    assert reason == "there is no nvcc: install the CUDA toolkit, 12.9 or newer, or set CUDA_HOME to it"
    assert probes.load("rn-e4m3").version() == ""
    with pytest.raises(ProbeError, match="there is no nvcc"):
        probes.load("rn-e4m3").run()


def test_no_device_is_a_reason_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_ASK", "import sys; sys.exit('cuInit returned 999')")
    toolchain.find_device.cache_clear()
    assert probes.load("rcp").availability() == "there is no CUDA device: cuInit returned 999"
    monkeypatch.setattr(toolchain, "_ASK", 'print(\'{"name": "B", "number": 103, "driver": "CUDA 13.0"}\')')
    assert toolchain.find_device().number == 103
    toolchain.find_device.cache_clear()


@pytest.mark.parametrize(
    ("name", "number", "target"),
    [
        ("rn-e4m3", 90, "sm_90a"),
        ("rn-e4m3", 89, "sm_89"),
        ("fp4-header", 100, "sm_100"),
        ("rs-e2m1", 103, "sm_103a"),
        ("rs-e2m1", 120, ""),
        ("mma-sm120", 121, "sm_121a"),
    ],
)
def test_a_probe_is_built_for_the_device(name: str, number: int, target: str) -> None:
    assert toolchain.target_for(probes.load(name), toolchain.Device("", number, "")) == target


FAKE = """#!{python}
import os, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Cuda compilation tools, release 13.0, V13.0.88")
elif "broken" in {mode!r}:
    sys.exit("rn_e2m1.cu(7): error: identifier is undefined")
else:
    out = arguments[arguments.index("-o") + 1]
    with open(out, "w") as file:
        file.write('''{program}''')
    os.chmod(out, 0o755)
"""
PROGRAM_TEXT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from nvfp4hw.probes.simulation import main
sys.exit(main(["rn-e2m1", {fault!r}, *sys.argv[1:]]))
"""


def fake_nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str = "", mode: str = "") -> None:
    """An nvcc whose programs are played by the oracle."""
    program = PROGRAM_TEXT.format(python=sys.executable, root=str(ROOT), fault=fault)
    (folder / "bin").mkdir(exist_ok=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(FAKE.format(python=sys.executable, mode=mode, program=program), "utf-8")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for cached in (toolchain.find_nvcc, toolchain.nvcc_version):
        cached.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="the fake compiler is a script")
def test_a_probe_from_source_to_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch)
    fake_nvcc(tmp_path, monkeypatch)
    seen: list[tuple[str, int, int]] = []
    probe = probes.load("rn-e2m1")
    assert probe.availability() is None
    assert probe.version() == "nvcc 13.0.88, driver 610.12 (CUDA 13.2), NVIDIA B200 (sm_100)"
    result = probe.run(lambda *event: seen.append(event))
    assert result.status == "pass" and result.device == "NVIDIA B200 (sm_100a)"
    assert result.record["nvcc"] == "13.0.88" and result.record["source"] == toolchain.fingerprint("rn_e2m1.cu")
    assert [event[1:] for event in seen] == [(0, 2), (1, 2), (2, 2)]
    kept = list((tmp_path / "cache" / "nvfp4ref").iterdir())
    assert len(kept) == 1 and kept[0].name.startswith("rn_e2m1-sm_100a-")
    fake_nvcc(tmp_path, monkeypatch, mode="broken")
    assert probe.run().status == "pass"  # the program of the cache
    kept[0].unlink()
    with pytest.raises(ProbeError, match=r"cannot compile rn_e2m1.cu for sm_100a: rn_e2m1.cu\(7\): error: identifier"):
        probe.run()
    assert not list((tmp_path / "cache" / "nvfp4ref").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the fake compiler is a script")
def test_the_command_runs_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_device(monkeypatch)
    fake_nvcc(tmp_path, monkeypatch)
    out = tmp_path / "out"
    assert command.main(["run", "rn-e2m1", "mma-sm120", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PASS rn-e2m1: 8,589,934,592 compared, 0 different (NVIDIA B200 (sm_100a)) in ")
    assert "not run mma-sm120: NVIDIA B200 is sm_100; this needs sm_120a, sm_121a\n" in printed
    assert os.listdir(out) == ["rn-e2m1.npz"]
    assert command.main(["verify", str(out / "rn-e2m1.npz")]) == 0
    assert command.main(["verify", str(out / "absent.npz"), str(out / "rn-e2m1.npz")]) == 2
    assert "no result" in capsys.readouterr().out

    fake_nvcc(tmp_path, monkeypatch, fault="minus-zero")
    next((tmp_path / "cache" / "nvfp4ref").iterdir()).unlink()
    assert command.main(["run", "rn-e2m1", "-o", str(out)]) == 1
    assert "operand a, x 0x80000000, value -0.0, found 0x0, expected 0x8" in capsys.readouterr().out
    fake_nvcc(tmp_path, monkeypatch, fault="crash")
    next((tmp_path / "cache" / "nvfp4ref").iterdir()).unlink()
    assert command.main(["run", "rn-e2m1"]) == 2
    assert capsys.readouterr().out == "no result rn-e2m1: the probe's program was stopped by SIGSEGV\n"


def test_without_a_gpu_everything_is_listed_as_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "_ASK", "raise SystemExit('the driver sees no device')")
    toolchain.find_device.cache_clear()
    assert command.main(["run", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"not run {name}: there is no CUDA device: the driver sees no device" for name in NAMES]
    assert command.main(["list"]) == 0
    assert all(f"{name}: " in capsys.readouterr().out or name for name in NAMES)
    with pytest.raises(SystemExit):
        command.main(["run", "rn-e3m2"])
    assert "there is no probe 'rn-e3m2'" in capsys.readouterr().err


def test_what_cannot_be_compiled_or_written_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("years of work", encoding="utf-8")
    for arguments, says in (
        (["compile", "--target", "sm_42"], "no probe that was asked is for 'sm_42'; they are for sm_100, sm_100a, "),
        (["compile", "rs-e2m1", "--target", "sm_120a"], "is for 'sm_120a'; they are for sm_100a, sm_103a"),
        (["compile", "rs-e2m1", "--target", "sm_100a", "--target", "nonsense"], "is for 'nonsense'"),
        (["run", "rcp", "-o", str(tmp_path / "file")], "no records can be written there: file exists"),
        (["run", "rcp", "-o", str(tmp_path / "file" / "q")], "no records can be written there: not a directory"),
    ):
        assert command.main(arguments) == 2
        said = capsys.readouterr()
        assert says in said.err and said.err.count("\n") == 1 and said.out == ""
    with pytest.raises(SystemExit, match="2"):
        command.main(["run", "rcp", "-o", ""])
    assert "the name of the folder is empty" in capsys.readouterr().err
    assert (tmp_path / "file").read_text(encoding="utf-8") == "years of work"

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    simulated = probes.simulated()["rn-e4m3"]
    monkeypatch.setattr(probes, "load", lambda name: simulated)
    monkeypatch.setattr(storage, "save", full)
    assert command.main(["run", "rn-e4m3", "-o", str(tmp_path / "out")]) == 2
    assert "rn-e4m3.npz: cannot be written: no space left on device" in capsys.readouterr().err


def test_the_guide_lists_every_probe_and_its_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "probes.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (?:none|`)", guide, re.MULTILINE)
    assert rows == NAMES
    for path in RECORDS:
        record = storage.load(path)[0]
        assert f"| `{record['probe']}` | {record['compared']:,} " in guide
    exec(re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)[0], {})
    assert capsys.readouterr().out.endswith("fail 33554428 0x7F800001\n")

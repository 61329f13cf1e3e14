"""Recording: whatever a backend or the machine does, what was recorded stays, and the bundle says what is missing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import capture_fakes
import numpy as np
import pytest

from conformance import run
from conformance.capture import bundle as bundles
from conformance.capture import machine, record
from conformance.capture.bundle import BundleError, open_bundle, partial
from conformance.capture.record import Asked
from conformance.capture.replay import Replay, UnitResult, replay
from conformance.cli import main

posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes are installed, and there is no GPU."""
    site = tmp_path / "site"
    capture_fakes.install(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(machine, "gpus", lambda: ([], "no GPU in a test"))


def recorded(path: Path, *names: str, timeout: float = 60, suite: str = "quick") -> tuple[Replay, list[str]]:
    """A capture of fakes, judged, and what was said meanwhile."""
    said: list[str] = []
    record.capture(path, Asked(suite, names, []), timeout, None, said.append)
    return replay(path), said


def only(found: Replay) -> UnitResult:
    (one,) = found.units
    return one


def answered(one: UnitResult) -> list[str]:
    return [case.id for case in one.result.cases if case.error is None]


ALL = [f"fake/{n}" for n in range(capture_fakes.CASES)]
BUT_ONE = [ident for ident in ALL if ident != "fake/3"]


# ---- backends that misbehave -------------------------------------------------------------------------------


def test_a_right_backend_conforms_to_the_byte(tmp_path: Path) -> None:
    found, said = recorded(tmp_path / "b", "fake-good")
    one = only(found)
    assert found.exit_code == 0 and one.status == run.CONFORMS and answered(one) == ALL and said == []
    assert one.result.totals()["packed"].compared == capture_fakes.CASES * 256
    assert not partial(tmp_path / "b").exists()


def test_wrong_codes_are_counted_and_their_bytes_kept(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path / "b", "fake-wrong")
    one = only(found)
    assert found.exit_code == 1 and one.status == run.DEPARTS
    assert one.result.totals()["packed"].different == capture_fakes.CASES * 128
    assert one.rules["E2M1-RNE"].different and not one.rules["SCALE-BLOCK"].different and one.named


@posix
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fake-raises", "RuntimeError: no kernel image is available"),
        ("fake-segfault", "SIGSEGV"),
        ("fake-exits", "exit code 134: terminate called"),
    ],
)
def test_one_bad_case_costs_one_case(tmp_path: Path, name: str, says: str) -> None:
    found, _ = recorded(tmp_path / "b", name)
    one = only(found)
    assert found.exit_code == 1 and one.status == run.FAILED and one.missing == () and one.stopped is None
    assert answered(one) == BUT_ONE
    (bad,) = [case for case in one.result.cases if case.error is not None]
    assert bad.id == "fake/3" and says in (bad.error or "")


@posix
def test_a_hang_is_ended_by_the_time_limit(tmp_path: Path) -> None:
    start = time.monotonic()
    found, said = recorded(tmp_path / "b", "fake-hangs", timeout=3)
    assert time.monotonic() - start < 30
    assert answered(only(found)) == BUT_ONE and found.exit_code == 1
    assert said == ["fake-hangs: no answer within 3 s in fake/3"]


@posix
def test_a_lost_device_gets_a_new_process(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path / "b", "fake-loses-device")
    one = only(found)
    assert answered(one) == BUT_ONE and one.stopped is None
    assert "illegal memory access" in str(next(case.error for case in one.result.cases if case.error))


@posix
def test_one_that_dies_of_every_case_is_given_up(tmp_path: Path) -> None:
    found, said = recorded(tmp_path / "b", "fake-always-dies", "fake-good")
    dead, good = found.units
    assert dead.status == run.FAILED and "4 times" in str(dead.stopped) and len(dead.missing) == 4
    assert [case.error is None for case in dead.result.cases] == [False] * 4 and len(said) == 4
    assert good.status == run.CONFORMS


@posix
def test_one_that_dies_when_asked_fails_and_costs_no_other(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path / "b", "fake-dies-when-asked", "fake-good")
    dead, good = found.units
    assert (
        dead.status == run.FAILED and "SIGSEGV" in str(dead.stopped) and "asked whether it can run" in str(dead.stopped)
    )
    assert good.status == run.CONFORMS and found.exit_code == 1


@posix
def test_one_that_dies_at_exit_has_answered(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path / "b", "fake-dies-at-exit")
    assert only(found).status == run.CONFORMS and "everything was answered" in only(found).unit.end["reason"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fake-absent", "pip install fake"),
        ("fake-wrong-driver", "ImportError: libcuda.so.1: version `R999' not found"),
        ("fake-unimportable", "No module named 'capture_fakes_not_there'"),
        ("fake-none", "no Backend"),
    ],
)
def test_what_cannot_run_is_not_run_with_the_reason(tmp_path: Path, name: str, says: str) -> None:
    found, _ = recorded(tmp_path / "b", name)
    assert only(found).status == run.NOT_RUN and says in str(only(found).result.reason)
    assert found.exit_code == 2 and found.compared == 0  # nothing conforms where nothing was compared
    beside, _ = recorded(tmp_path / "b", "fake-good")
    assert [one.status for one in beside.units] == [run.NOT_RUN, run.CONFORMS] and beside.exit_code == 0


def test_garbage_on_the_streams_is_no_protocol(tmp_path: Path) -> None:
    found, said = recorded(tmp_path / "b", "fake-garbage")
    assert found.exit_code == 0 and answered(only(found)) == ALL and said == []


def test_odd_outputs_are_errors_or_differences_of_their_case(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path / "b", "fake-odd")
    cases = {case.id: case for case in only(found).result.cases}
    assert cases["fake/0"].error == "the backend returned no output"
    assert "dtype object cannot be recorded" in str(cases["fake/1"].error)
    assert cases["fake/2"].outputs["packed"].different and not cases["fake/2"].outputs["amax"].different
    assert "'vibes'" in str(cases["fake/3"].error)
    assert [cases[ident].status for ident in ALL[4:]] == [run.CONFORMS] * 4


# ---- stops -------------------------------------------------------------------------------------------------

_CAPTURE = """
import sys
from conformance.capture import machine, record
machine.gpus = lambda: ([], "no GPU in a test")
record.capture(sys.argv[1], record.Asked("quick", sys.argv[2:], []), 60)
"""


def start_capture(path: Path, *names: str, **options: object) -> subprocess.Popen[str]:
    """A capture in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(one) for one in sys.path)}
    command = [sys.executable, "-c", _CAPTURE, str(path), *names]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


def wait_for_records(path: Path, name: str, number: int) -> None:
    lines = partial(path) / "backends" / name / "records.jsonl"
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if lines.exists() and lines.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.01)
    raise AssertionError(f"{number} records did not come")


def children(folder: Path) -> list[int]:
    """Processes that record into a folder."""
    found = []
    for one in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if one.name.isdigit():
            try:
                if str(folder).encode() in (one / "cmdline").read_bytes():
                    found.append(int(one.name))
            except OSError:
                continue
    return found


@posix
def test_killed_at_any_moment_it_is_readable_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL of the parent, three times at random moments; then the same command to the end."""
    path, moments = tmp_path / "b", random.Random(3)
    seen = 0
    for _ in range(3):
        process = start_capture(path, "fake-slow", "fake-good")
        time.sleep(moments.uniform(0.3, 1.6))
        process.kill()
        process.communicate()
        limit = time.monotonic() + 10
        while children(partial(path)) and time.monotonic() < limit:
            time.sleep(0.02)
        assert children(partial(path)) == []  # the child went with its parent
        if (partial(path) / "bundle.json").exists():
            found = replay(path)
            slow = next(one for one in found.units if one.unit.name == "fake-slow")
            assert len(slow.result.cases) >= seen and found.bundle.root is None
            assert found.exit_code == int(any(one.stopped for one in found.units))
            assert not any(count.different for count in slow.result.totals().values())
            seen = len(slow.result.cases)
    found, _ = recorded(path, "fake-slow", "fake-good")
    assert [answered(one) for one in found.units] == [ALL, ALL] and found.exit_code == 0


@posix
def test_what_is_missing_after_a_kill_is_said(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_capture(path, "fake-slow", "fake-good")
    wait_for_records(path, "fake-slow", 2)
    process.kill()
    process.communicate()
    slow, good = replay(path).units
    assert slow.status == run.FAILED and slow.stopped == "the recording was stopped in it"
    assert [*answered(slow), *slow.missing] == ALL and len(answered(slow)) >= 2
    assert good.stopped == "the recording was stopped before it" and good.status == run.FAILED


@posix
def test_the_child_alone_killed_costs_one_case(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_capture(path, "fake-slow")
    wait_for_records(path, "fake-slow", 2)
    (pid,) = (pid for pid in children(partial(path) / "backends") if pid != process.pid)
    os.kill(pid, signal.SIGKILL)
    assert process.communicate(timeout=60) is not None and process.returncode == 0
    one = only(replay(path))
    assert len(answered(one)) == capture_fakes.CASES - 1 and one.missing == ()
    assert "SIGKILL" in str(next(case.error for case in one.result.cases if case.error))


@posix
def test_two_captures_do_not_write_one_bundle(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_capture(path, "fake-slow")
    wait_for_records(path, "fake-slow", 1)
    with pytest.raises(BundleError, match="still writes here"):
        record.capture(path, Asked("quick", ["fake-good"], []))
    process.communicate(timeout=60)
    assert answered(only(replay(path))) == ALL


@posix
@pytest.mark.parametrize("full", ["bundle.json", "backends/fake-good/records.jsonl"])
def test_a_full_disk_loses_nothing_that_was_there(tmp_path: Path, full: str) -> None:
    """Files may not grow to the size of the header, or of the records."""
    import resource

    if not hasattr(resource, "prlimit"):
        pytest.skip("only Linux limits another process")
    path = tmp_path / "b"
    recorded(tmp_path / "whole", "fake-good")
    sizes = {name: len(data) for name, data in open_bundle(tmp_path / "whole").members._data.items()}  # type: ignore[attr-defined]
    size = sizes[full] - 100  # the numbers of seconds are not all as long
    assert size > sizes["bundle.json"] or full == "bundle.json"
    process = start_capture(path, "fake-good")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))  # before it has started to write
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "cannot be written: file too large" in said.strip().splitlines()[-1], said
    assert not path.exists()
    before = 0 if full == "bundle.json" else len(answered(only(replay(path))))
    assert before == (0 if full == "bundle.json" else capture_fakes.CASES - 1), said
    found, _ = recorded(path, "fake-good")
    assert answered(only(found)) == ALL and not list(tmp_path.glob("**/.*.tmp"))


def test_a_disk_that_is_full_at_the_end_keeps_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    path = tmp_path / "b"
    with monkeypatch.context() as patch:
        patch.setattr(bundles.shutil, "copyfileobj", full)
        with pytest.raises(
            BundleError, match="no space left on device; what was recorded is in .*b.partial: run the same"
        ):
            recorded(path, "fake-good")
    assert not path.exists() and answered(only(replay(path))) == ALL
    assert recorded(path, "fake-good")[0].exit_code == 0


def test_half_a_line_and_loose_bytes_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "b"
    recorded(path, "fake-good")
    bundles.unpack(open_bundle(path), partial(path))
    folder = partial(path) / "backends" / "fake-good"
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:-9])
    (folder / "arrays.bin").write_bytes((folder / "arrays.bin").read_bytes()[:-1] + b"loose")
    (folder / "end.json").unlink()
    path.unlink()
    assert answered(only(replay(path))) == ALL[:5]
    found, _ = recorded(path, "fake-good")
    assert found.exit_code == 0 and answered(only(found)) == ALL


# ---- going on ----------------------------------------------------------------------------------------------


def test_what_is_recorded_is_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "b"
    first, _ = recorded(path, "fake-good")
    again, said = recorded(path, "fake-good", "fake-absent")
    good = {one.unit.name: one for one in again.units}["fake-good"]
    assert [r.seconds for r in good.unit.records.values()] == [r.seconds for r in only(first).unit.records.values()]
    assert [one.unit.name for one in again.units] == ["fake-good", "fake-absent"] and said == []


def test_another_version_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b"
    recorded(path, "fake-good")
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    found, said = recorded(path, "fake-good")
    assert said == ["fake-good: recorded with fake 1.0, and here is now fake 2.0: give another -o to record that"]
    assert only(found).result.version == "fake 1.0" and answered(only(found)) == ALL


def test_another_machine_or_suite_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b"
    recorded(path, "fake-good")
    with pytest.raises(BundleError, match="suite was quick and is full: give another -o"):
        recorded(path, "fake-good", suite="full")
    gpu = {"name": "NVIDIA B200", "compute_capability": "10.0", "driver": "580.1"}
    monkeypatch.setattr(machine, "gpus", lambda: ([gpu], None))
    with pytest.raises(BundleError, match="gpus was none and is NVIDIA B200 10.0 580.1"):
        recorded(path, "fake-good")
    assert replay(path).exit_code == 0 and not partial(path).exists()


def test_a_file_that_is_no_bundle_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("years of work", encoding="utf-8")
    with pytest.raises(BundleError, match="is no bundle"):
        recorded(path, "fake-good")
    assert path.read_text(encoding="utf-8") == "years of work" and not partial(path).exists()


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "b"
    partial(path).mkdir()
    (partial(path) / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(BundleError, match="holds 'thesis.tex' and is no recording, .* move it away, or give another"):
        recorded(path, "fake-good")
    assert [one.name for one in partial(path).iterdir()] == ["thesis.tex"] and not path.exists()


def test_what_lies_beside_a_recording_stays(tmp_path: Path) -> None:
    path = tmp_path / "b"
    recorded(path, "fake-good")
    bundles.unpack(open_bundle(path), partial(path))
    (partial(path) / "thesis.tex").write_text("years of work", encoding="utf-8")
    recorded(path, "fake-good")
    assert [one.name for one in partial(path).iterdir()] == ["thesis.tex"]


def test_another_python_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b"
    recorded(path, "fake-good")
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.99.1")
    with pytest.raises(BundleError, match=r"environment was 3\.\d+\.\d+ .* and is 3\.99\.1 .*: give another -o"):
        recorded(path, "fake-good")
    assert replay(path).exit_code == 0


def damaged(path: Path, name: str, ident: str) -> None:
    """The folder of an unfinished recording with a bit of an output turned."""
    bundles.unpack(open_bundle(path), partial(path))
    path.unlink()
    unit = next(one for one in open_bundle(partial(path)).units if one.name == name)
    arrays = partial(path) / "backends" / name / "arrays.bin"
    data = bytearray(arrays.read_bytes())
    data[int(unit.records[ident].outputs["packed"].at or 0)] ^= 1
    arrays.write_bytes(data)


def test_what_was_damaged_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "b"
    before, _ = recorded(path, "fake-good")
    damaged(path, "fake-good", "fake/2")
    found, _ = recorded(path, "fake-good")
    assert found.exit_code == 0 and sorted(answered(only(found))) == ALL
    seconds = {ident: record.seconds for ident, record in only(before).unit.records.items()}
    again = {ident: record.seconds for ident, record in only(found).unit.records.items()}
    assert {ident for ident in ALL if seconds[ident] == again[ident]} >= set(ALL) - {"fake/2"}


def test_what_was_damaged_and_is_not_asked_is_not_sealed(tmp_path: Path) -> None:
    path = tmp_path / "b"
    recorded(path, "fake-good")
    damaged(path, "fake-good", "fake/2")
    with pytest.raises(BundleError, match="not those that were recorded; run .* with --backend fake-good as well"):
        recorded(path, "fake-wrong")
    assert not path.exists() and partial(path).is_dir()
    found, _ = recorded(path, "fake-good")
    assert {one.unit.name: one.status for one in found.units} == {"fake-good": run.CONFORMS, "fake-wrong": run.DEPARTS}


def test_names_that_are_no_folder_are_refused(tmp_path: Path) -> None:
    for name in ("../up", "a/b", "", ".hidden", "c:d"):
        with pytest.raises(ValueError, match="characters other than"):
            record.capture(tmp_path / "b", Asked("quick", [name], []))
    assert [one.name for one in tmp_path.iterdir()] == ["site"]


# ---- size --------------------------------------------------------------------------------------------------


def test_above_the_budget_right_answers_leave_their_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.capture import child
    from conformance.capture.journal import Writer

    monkeypatch.setattr(child, "RIGHT_BYTES", 500)
    for name in ("fake-good", "fake-wrong"):
        unit = Writer(tmp_path / name)
        assert child.record_backend(unit, name, "quick") == 0
        kept = {key for one in unit.recorded.values() for key, ref in one.outputs.items() if ref.at is not None}
        small = (tmp_path / name / "arrays.bin").stat().st_size
        assert small < 1500 + 128 * capture_fakes.CASES * (name == "fake-wrong")
        whole = {key for key, ref in unit.recorded["fake/7"].outputs.items() if ref.at is not None}
        assert whole == ({"packed"} if name == "fake-wrong" else set()) and "packed" in kept


# ---- the machine -------------------------------------------------------------------------------------------


def test_the_machine_is_described_without_names_of_hosts_or_people() -> None:
    facts = json.dumps(machine.facts())
    assert os.uname().nodename not in facts and str(Path.home()) not in facts
    assert len(machine.oracle()["sha256"]) == 64


@posix
@pytest.mark.parametrize(
    ("script", "devices", "says"),
    [
        ("echo 'NVIDIA B200, 10.0, 580.95'; echo 'NVIDIA B200, 10.0, 580.95'", 2, None),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", 0, "version mismatch"),
        ("echo 'No devices were found'; exit 0", 0, "No devices were found"),
    ],
)
def test_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, devices: int, says: str | None
) -> None:
    monkeypatch.undo()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found, reason = machine.gpus()
    assert len(found) == devices and (says or "") in (reason or "") and (reason is None) == bool(devices)
    if devices:
        assert machine.described({"gpus": found}) == "2 × NVIDIA B200 (compute capability 10.0, driver 580.95)"


def test_without_the_tool_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus()[0] == [] and "not on PATH" in str(machine.gpus()[1])


def test_arrays_go_round_to_the_byte(tmp_path: Path) -> None:
    from conformance.capture.journal import Writer

    arrays = {
        "nan": np.array([0x7F800001, 0xFFC00000], np.uint32).view(np.float32),
        "scalar": np.float32(2),
        "empty": np.zeros((0, 3), np.uint8),
        "strided": np.arange(12, dtype=np.uint16).reshape(3, 4)[:, ::2],
    }
    unit = Writer(tmp_path / "backends" / "one")
    unit.add(bundles.Record("a"), arrays)
    (tmp_path / "bundle.json").write_text(
        json.dumps({"format": "nvfp4-bundle", "version": 1, "asked": {"backends": ["one"], "probes": []}}),
        encoding="utf-8",
    )
    (found,) = open_bundle(tmp_path).units
    for name, array in arrays.items():
        read = found.array(found.records["a"].outputs[name])
        assert read.tobytes() == np.asarray(array).tobytes() and read.shape == np.asarray(array).shape


def test_a_machine_on_which_nothing_runs_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report lists what did not run, and why; only the replay of such a bundle has nothing to say."""
    path = str(tmp_path / "b.nvfp4")
    assert main(["conformance", "capture", "-o", path, "--backend", "te-torch", "--no-probes"]) == 0
    assert "te-torch" in capsys.readouterr().out
    assert main(["conformance", "replay", path]) == 2

"""The pipe: what is asked, what is answered, and everything that a device can do wrong."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_vectors_export import compiled

import nvfp4ref as nv
from conformance.deviations import DEVIATIONS
from conformance.vectors import source
from conformance.vectors.device import run
from conformance.vectors.groups import GROUPS
from conformance.vectors.operations import OPERATIONS
from conformance.vectors.pipe import CHUNK, Plan, answer, generate
from conformance.vectors.verify import PATIENCE, Outcome, Verifier

pytestmark = pytest.mark.filterwarnings("error")

ROOT = Path(__file__).parent.parent
E2M1 = Plan(("E2M1-RNE",))  # 276 lines
DOCUMENT = (ROOT / "docs" / "pipe.md").read_text(encoding="utf-8")


def requests(plan: Plan) -> list[str]:
    out = io.BytesIO()
    generate(plan, out)
    return out.getvalue().decode().splitlines()


def answers(plan: Plan, *forms: Any) -> list[str]:
    return answer(requests(plan), forms)


def verified(lines: Iterable[str | bytes]) -> Outcome:
    raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
    return Verifier().read(raw)


# ---- what is asked -----------------------------------------------------------------------------------------


def test_every_operation_is_asked_and_answered() -> None:
    plan = Plan(count=3000, seed=7)
    outcome = verified(answers(plan))
    assert outcome.exit_code == 0 and outcome.judged == 3000
    asked = {part.operation for group in GROUPS.values() for part in group.rows}
    assert set(outcome.tallies) == asked == set(OPERATIONS) == set(plan.operations)


def test_the_constructed_lines_come_once_each() -> None:
    lines = requests(E2M1)
    assert lines[0] == f"# nvfp4-pipe 1 spec={nv.SPEC_VERSION} seed=0 count=all rules=E2M1-RNE"
    assert lines[-1] == "# end 276" and len(lines) == 278 and len(set(lines)) == 278
    assert [int(line.split()[0]) for line in lines[1:-1]] == list(range(1, 277))


def test_random_lines_follow_the_constructed_ones() -> None:
    lines = requests(Plan(("E2M1-RNE",), 2 * CHUNK + 500, 5))[1:-1]
    assert [line.split()[2] for line in lines[:276]] == [line.split()[2] for line in requests(E2M1)[1:-1]]
    random = [line.split()[2] for line in lines[276:]]
    assert len(set(random)) > CHUNK
    other = [line.split()[2] for line in requests(Plan(("E2M1-RNE",), 2 * CHUNK + 500, 6))[277:-1]]
    assert random != other and len(random) == len(other)


def test_a_stream_is_a_function_of_its_header() -> None:
    for plan in (Plan(("MMA-ROUND", "E2M1-NAN"), 50, 3), Plan(None, 100, 2**64 - 1), E2M1):
        again = Plan.of_header(plan.header)
        assert requests(again) == requests(plan)


def test_few_lines_are_spread_over_the_rules_and_their_rows() -> None:
    lines = requests(Plan(("E2M1-RNE", "E4M3-RNE"), 11))[1:-1]
    assert [line.split()[1] for line in lines].count("e2m1") == 6
    constructed = [line.split()[2] for line in requests(E2M1)[1:-1]]
    positions = [constructed.index(line.split()[2]) for line in lines if line.split()[1] == "e2m1"]
    assert positions == [i * 276 // 6 for i in range(6)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((("NO-RULE",),), "no rule 'NO-RULE'"),
        ((("BLOCK-16X16",),), "BLOCK-16X16 is about whole tensors"),
        ((("DISPATCH",),), "DISPATCH has no vectors"),
        ((None, 0), "count is 1 or more"),
        ((None, 1, 2**64), "seed has 64 bits"),
    ],
)
def test_a_plan_that_is_none(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Plan(*arguments)


def test_both_sides_are_fast() -> None:
    """A million lines a minute each, of every operation in turn, by the processor's time."""
    plan = Plan(count=20_000, seed=1)
    start = time.process_time()
    lines = requests(plan)
    generated = time.process_time()
    answered = [line.encode() for line in answer(lines)]
    begun = time.process_time()
    assert Verifier().read(answered).exit_code == 0
    for seconds in (generated - start, time.process_time() - begun):
        assert seconds < 60 * 20_000 / 1_000_000


# ---- right answers in other clothes ------------------------------------------------------------------------


def test_lower_case_and_spaces_and_line_ends_are_no_faults() -> None:
    lines = answers(Plan(("SCALE-ENCODE",), 40))
    dressed = [lines[0] + "\r"]
    dressed += [line if line.startswith("#") else "  " + "   ".join(line.lower().split()) + " \r" for line in lines[1:]]
    dressed[3:3] = ["", "   ", "# a comment of the device's own"]
    assert verified(dressed).exit_code == 0


def test_no_newline_at_the_end_is_no_fault() -> None:
    data = "\n".join(answers(E2M1)).encode()
    pieces = [data[i : i + 1000] for i in range(0, len(data), 1000)] + [b""]
    verifier = Verifier()
    chunks = iter(pieces)
    assert verifier.read(source.Source(lambda n: next(chunks), None, lambda: verifier.accepted)).exit_code == 0


def test_a_device_may_decline() -> None:
    plan = Plan(("E2M1-RNE", "E4M3-RNE"), 100)
    lines = [f"{line.rsplit(' ', 1)[0]} -" if " e4m3 " in line else line for line in answers(plan)]
    outcome = verified(lines)
    assert outcome.exit_code == 0 and outcome.judged == 50
    assert "50 declined" in str(outcome) and "right: 1 of 1 operation right" in str(outcome)


def test_declining_everything_is_not_right() -> None:
    lines = [line if line[0] == "#" else f"{line.rsplit(' ', 1)[0]} -" for line in answers(E2M1)]
    outcome = verified(lines)
    assert outcome.exit_code == 2 and "NOT JUDGED" in str(outcome)


# ---- wrong answers -----------------------------------------------------------------------------------------


def test_a_wrong_answer_is_shown_with_its_line() -> None:
    lines = answers(E2M1)
    lines[20] = f"{lines[20].rsplit(' ', 1)[0]} F"
    outcome = verified(lines)
    assert outcome.exit_code == 1 and outcome.wrong == 1
    text = str(outcome)
    assert "e2m1  276 answers, 1 differ" in text
    assert f"line 21 (E2M1-RNE): x={lines[20].split()[2]}" in text
    assert f"found F, expected {answers(E2M1)[20].split()[3]}" in text
    assert "no known deviation explains them" in text
    (example,) = outcome.to_json()["operations"]["e2m1"]["examples"]
    assert (example["line"], example["number"], example["found"]) == (21, 20, ["F"])


NAMED = [
    ("element.ties-away", "E2M1-RNE"),
    ("element.negative-zero-dropped", "E2M1-ZERO"),
    ("block-scale.half-up", "E4M3-RNE"),
    ("block-scale.divide-by-6", "SCALE-BLOCK"),
    ("global-scale.reciprocal-form", "SCALE-GLOBAL"),
    ("encode-scale.quotient", "SCALE-ENCODE"),
    ("encode-scale.two-multiplications", "ELEMENT-SCALE"),
    ("packing.split-half", "E2M1-PACK"),
    ("hadamard.signs-on-output", "RHT-MATRIX"),
    ("random.no-bit-reversal", "SR-SM100"),
]


@pytest.mark.parametrize(("ident", "rule"), NAMED)
def test_a_known_deviation_is_named(ident: str, rule: str) -> None:
    plan = Plan((rule,))
    outcome = verified(answers(plan, *DEVIATIONS[ident].changes))
    assert outcome.exit_code == 1
    wrong = [one for one in outcome.tallies.values() if one.wrong]
    assert wrong and all(ident in one.deviations for one in wrong)
    assert f"{ident} explains every difference" in str(outcome)


def test_a_fault_without_an_id_is_named_in_words() -> None:
    outcome = verified(answers(Plan(("MMA-WINDOW",)), {"model": "exact"}))
    assert "the exact sum, rounded once to nearest explains every difference" in str(outcome)


# ---- streams that are not whole ----------------------------------------------------------------------------

Edit = Callable[[list[str]], Sequence[str | bytes]]


def moved(lines: list[str]) -> list[str]:
    return [*lines[:10], *lines[11:15], lines[10], *lines[15:]]


BROKEN: dict[str, tuple[Edit, list[str]]] = {
    "dropped": (
        lambda a: a[:10] + a[11:],
        ["1 of 276 answers is missing, first number 10", "NOT WHOLE"],
    ),
    "dropped-many": (lambda a: a[:10] + a[60:], ["50 of 276 answers are missing, first number 10"]),
    "last-dropped": (lambda a: a[:-2] + a[-1:], ["1 of 276 answers is missing, first number 276"]),
    "doubled": (lambda a: [*a[:11], a[10], *a[11:]], ["line 12: number 10 for the second time"]),
    "moved": (moved, ["line 15: number 10 comes after 14", "0 of 276 answers differ"]),
    "cut": (lambda a: a[:100], ["the output ends after line 100, before the line '# end 276'", "177 of 276 answers"]),
    "cut-in-a-line": (lambda a: [*a[:100], a[100][:9]], ["line 101: operand x of number 100", "the device stopped"]),
    "no-end": (lambda a: a[:-1], ["ends after line 277, before the line '# end 276'", "0 of 276 answers did not come"]),
    "wrong-end": (lambda a: [*a[:-1], "# end 275"], ["line 278: '# end 275' is not '# end 276'"]),
    "behind-the-end": (lambda a: [*a, a[5]], ["line 279: ", "stands behind the end"]),
    "end-too-early": (lambda a: [*a[:50], a[-1], *a[50:-1]], ["line 52: ", "stands behind the end"]),
    "no-header-but-few": (lambda a: a[1:9], ["the stream has no beginning: 8 lines came"]),
    "empty": (lambda a: [], ["nothing came, and no line '# nvfp4-pipe"]),
    "only-the-header": (lambda a: a[:1], ["276 of 276 answers did not come"]),
    "banner": (lambda a: ["VCD info: dumpfile", *a], ["line 1: 'VCD info: dumpfile' stands before the line"]),
    "no-header": (lambda a: a[1:], ["line 1: '1 e2m1 ", "stands before the line '# nvfp4-pipe"]),
    "other-version": (
        lambda a: [a[0].replace("pipe 1 spec=", "pipe 1 spec=9"), *a[1:]],
        ["specification 9", f"specification {nv.SPEC_VERSION}"],
    ),
    "header-altered": (lambda a: [a[0] + " x", *a[1:]], ["line 1: the stream begins with"]),
    "garbage": (lambda a: [*a[:10], "Segmentation fault", *a[10:]], ["line 11: 'Segmentation fault' begins with no"]),
    "bytes": (lambda a: [*a[:10], b"\xff\xfe\x00", *a[10:]], ["line 11: holds bytes that are no ASCII text"]),
    "number": (lambda a: [*a[:10], "99999 e2m1 0 0", *a[10:]], ["line 11: the number 99999 is none of 1..276"]),
    "huge-number": (lambda a: [*a[:10], "9" * 5000 + " e2m1 0 0", *a[10:]], ["line 11: '999", "no line number"]),
    "zero": (lambda a: [*a[:10], "0 e2m1 0 0", *a[10:]], ["line 11: the number 0 is none of"]),
    "operation": (lambda a: [*a[:10], a[10].replace("e2m1", "e4m3"), *a[11:]], ["line 11: number 10 asks for e2m1"]),
    "operand": (
        lambda a: [*a[:10], "10 e2m1 00000000 0", *a[11:]],
        ["line 11: operand x of number 10 is", "came back as 00000000"],
    ),
    "leading-zeros": (lambda a: [*a[:10], "10 e2m1 0 0", *a[11:]], ["line 11: operand x of number 10", "back as 0"]),
    "no-result": (lambda a: [*a[:10], a[10].rsplit(" ", 1)[0], *a[11:]], ["results code:e2m1; 0 came"]),
    "two-results": (lambda a: [*a[:10], a[10] + " 0", *a[11:]], ["results code:e2m1; 2 came"]),
    "long-result": (lambda a: [*a[:10], a[10] + "0", *a[11:]], ["result code:e2m1 has 1 hexadecimal digits"]),
    "no-digits": (lambda a: [*a[:10], a[10][:-1] + "x", *a[11:]], ["line 11: result code:e2m1", "got 'x'"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream_is_reported_with_its_line(name: str) -> None:
    edit, sentences = BROKEN[name]
    outcome = verified(edit(answers(E2M1)))
    assert outcome.exit_code == 2
    for sentence in sentences:
        assert sentence in str(outcome), str(outcome)


def test_broken_and_wrong_says_both() -> None:
    lines = answers(E2M1, *DEVIATIONS["element.truncate"].changes)
    outcome = verified([*lines[:10], *lines[11:]])
    assert outcome.exit_code == 2 and outcome.wrong > 50
    assert "element.truncate explains every difference" in str(outcome)


def test_a_flood_of_garbage_is_not_read_to_the_end() -> None:
    read = 0

    def endless() -> Iterable[bytes]:
        nonlocal read
        yield E2M1.header.encode()
        while True:
            read += 1
            yield b"garbage"

    outcome = Verifier().read(endless())
    assert outcome.exit_code == 2 and read == PATIENCE
    assert f"{PATIENCE} malformed lines in all" in str(outcome) and "the rest was not read" in str(outcome)
    assert len(str(outcome).splitlines()) < 12


def test_lines_far_out_of_order_are_missing_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been passed over is remembered, but not without a limit."""
    monkeypatch.setattr("conformance.vectors.verify.LATE", 10)
    lines = answers(E2M1)
    outcome = verified([lines[0], *lines[101:-1], *lines[96:101], lines[-1]])
    assert outcome.counts == {"lines out of order": 5, "missing answers": 1}
    assert "95 of 276 answers are missing" in str(outcome)


def test_an_outcome_is_json() -> None:
    lines = answers(E2M1, *DEVIATIONS["element.ties-away"].changes)
    value = json.loads(json.dumps(verified(lines[:-1]).to_json()))
    assert value["exit_code"] == 2 and value["stream"] == E2M1.header and value["fault_counts"] == {"stop": 1}
    assert value["operations"]["e2m1"]["deviations"] == ["element.ties-away"]
    assert value["operations"]["e2m1"]["rules"] == {"E2M1-RNE": value["wrong"]}


# ---- devices -----------------------------------------------------------------------------------------------

RIGHT = """
import sys
def say(text):
    sys.stdout.write(text + "\\n"); sys.stdout.flush()
points = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
import struct
def e2m1(bits):
    x = struct.unpack(">f", bytes.fromhex(bits))[0]
    if x != x: return 7
    m = abs(x)
    code = sum(m >= p if i % 2 else m > p for i, p in enumerate(points))
    return code | int(bits[0], 16) & 8
def answer(line):
    words = line.split()
    return line if line.startswith("#") else f"{line} {e2m1(words[2]):X}"
for n, line in enumerate(map(str.rstrip, sys.stdin)):
    {before}
    say(answer(line))
"""


def device(tmp_path: Path, before: str = "pass") -> list[str]:
    """A device in Python that is right, except for what it does before an answer."""
    path = tmp_path / "device.py"
    path.write_text(RIGHT.replace("{before}", before), encoding="utf-8")
    return [sys.executable, str(path)]


def test_a_right_device(tmp_path: Path) -> None:
    outcome = run(device(tmp_path), E2M1, 20)
    assert outcome.exit_code == 0, str(outcome)


MISBEHAVING = {
    "dies": ("if n == 9: sys.exit(3)", ["ends after line 9,", "the device ended with exit status 3"]),
    "raises": ("if n == 9: raise RuntimeError('out of cheese')", ["RuntimeError: out of cheese", "exit status 1"]),
    "killed": (
        "if n == 9: import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        ["ends after line 9,", "signal 9 (SIGKILL)"],
    ),
    "hangs": ("if n == 9: import time; time.sleep(60)", ["no answer for 1 s after line 9: the device hangs"]),
    "hangs-at-once": ("if n == 0: import time; time.sleep(60)", ["no answer for 1 s after the start"]),
    "talks-on": ("\n    while n == 9: say('# still thinking')", ["no answer for 1 s after line 9"]),
    "floods": ("\n    while n == 9: say('?')", ["the 100th malformed line"]),
    "one-long-line": ("\n    while n == 9: sys.stdout.write('x' * 4096)", ["line 10: longer than 65,536 characters"]),
    "closes-and-stays": (
        "if n == 277: import os, time; say(answer(line)); os.close(1); time.sleep(60)",
        ["did not end after its output"],
    ),
    "fails-at-the-end": ("if n == 277: say(answer(line)); sys.exit(5)", ["the device ended with exit status 5"]),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_device_that_misbehaves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "killed" and sys.platform == "win32":
        pytest.skip("Windows has no such signal")
    monkeypatch.setattr("conformance.vectors.device.GRACE", 0.5)
    before, sentences = MISBEHAVING[name]
    start = time.monotonic()
    outcome = run(device(tmp_path, before), E2M1, 1 if "no answer" in sentences[0] else 20)
    assert time.monotonic() - start < 15
    assert outcome.exit_code == 2
    for sentence in sentences:
        assert sentence in str(outcome), str(outcome)


def test_a_device_that_does_not_read(tmp_path: Path) -> None:
    """More is written than a pipe holds, and nobody takes it: the time limit ends that too."""
    path = tmp_path / "deaf.py"
    path.write_text("import time; time.sleep(60)", encoding="utf-8")
    outcome = run([sys.executable, str(path)], Plan(("E4M3-RNE",), 50_000), 1)
    assert outcome.exit_code == 2 and "no answer for 1 s after the start" in str(outcome)


def test_a_slow_device_is_waited_for(tmp_path: Path) -> None:
    """The limit is for one answer, not for all of them."""
    slow = device(tmp_path, "import time; time.sleep(0.15)")
    outcome = run(slow, Plan(("E2M1-RNE",), 12), 1.5)
    assert outcome.exit_code == 0, str(outcome)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no-such-program: cannot be started: no such file"):
        run([str(tmp_path / "no-such-program")], E2M1)


def test_the_c_device(tmp_path: Path) -> None:
    """The C program answers thirteen operations right and declines the others."""
    outcome = run([str(compiled("dut.c", folder=tmp_path))], Plan(count=20_000, seed=3), 60)
    assert outcome.exit_code == 0, str(outcome)
    answered = [name for name, one in outcome.tallies.items() if one.judged]
    assert len(answered) == 13 and {"quantize", "block", "e2m1", "e4m3", "encode-scale"} <= set(answered)
    assert all(one.declined or one.judged for one in outcome.tallies.values())


# ---- the command, through a real pipe ----------------------------------------------------------------------

COMMAND = """
import argparse, sys
from conformance.vectors.command import add
parser = argparse.ArgumentParser(prog="nvfp4")
add(parser.add_subparsers(required=True))
options = parser.parse_args(["vectors", *sys.argv[1:]])
try:
    sys.exit(options.run(options))
except ValueError as error:
    sys.exit(f"nvfp4: {error}")
"""


def nvfp4(*arguments: str) -> list[str]:
    return [sys.executable, "-c", COMMAND, *arguments]


def piped(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """The last command's exit code and output, the others before it in a pipe."""
    before: Any = None
    started = []
    for command in commands[:-1]:
        process = subprocess.Popen(command, stdin=before, stdout=subprocess.PIPE, cwd=ROOT)
        started.append(process)
        before = process.stdout
    last = subprocess.run(commands[-1], stdin=before, capture_output=True, text=True, cwd=ROOT, timeout=60)
    for process in started:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(60)
    return last


def test_a_pipe_of_three_programs(tmp_path: Path) -> None:
    generator = nvfp4("generate", "--rule", "E2M1-RNE", "--count", "5000", "--seed", "3")
    ran = piped(generator, device(tmp_path), nvfp4("verify"))
    assert ran.returncode == 0, ran.stdout
    assert "e2m1  5,000 answers, all right" in ran.stdout and not ran.stderr


def test_the_specification_as_a_device() -> None:
    generator = nvfp4("generate", "--rule", "E2M1-RNE", "--rule", "PHILOX-ROUNDS")
    assert piped(generator, nvfp4("answer"), nvfp4("verify")).returncode == 0
    ran = piped(generator, nvfp4("answer", "--deviation", "element.truncate"), nvfp4("verify", "--json"))
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["operations"]["e2m1"]["deviations"] == ["element.truncate"]


def test_a_device_that_dies_in_the_pipe(tmp_path: Path) -> None:
    generator = nvfp4("generate", "--rule", "E2M1-RNE", "--count", "50000")
    ran = piped(generator, device(tmp_path, "if n == 100: sys.exit()"), nvfp4("verify"))
    assert ran.returncode == 2 and "the output ends after line 100" in ran.stdout


def test_a_device_that_hangs_in_the_pipe(tmp_path: Path) -> None:
    hangs = device(tmp_path, "if n == 100: import time; time.sleep(6)")
    ran = piped(nvfp4("generate", "--rule", "E2M1-RNE"), hangs, nvfp4("verify", "--timeout", "1"))
    assert ran.returncode == 2 and "no answer for 1 s after line 100" in ran.stdout


def test_the_command_run(tmp_path: Path) -> None:
    ran = piped(nvfp4("run", "--rule", "E2M1-RNE", "--", *device(tmp_path)))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ran = piped(nvfp4("run", "--rule", "E2M1-RNE"))
    assert ran.returncode == 1 and "which device?" in ran.stderr


def test_answers_come_as_soon_as_they_can() -> None:
    """A person who types a line sees its answer."""
    process = subprocess.Popen(nvfp4("answer"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write("1 e2m1 3E800001\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1 e2m1 3E800001 1\n"
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["1 e2m1 0", "2"], "line 2: '2' asks for no operation"),
        (["1 e5m2 00000000"], "line 1: '1 e5m2 00000000' asks for no operation"),
        (["# x", "1 e2m1 0000000"], "line 2: x:f32 has 8 hexadecimal digits"),
        (["1 e2m1"], "line 1: e2m1 takes 1 operand; got 0"),
        (["1 e2m1 00000000", "2 e2m1 00000000 0"], "line 2: e2m1 takes 1 operand; got 2"),
    ],
)
def test_a_request_that_asks_nothing(lines: list[str], sentence: str) -> None:
    lines[0] = lines[0].replace("e2m1 0", "e2m1 00000000", 1) if lines[0] == "1 e2m1 0" else lines[0]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        answer(lines)


# ---- the guide ---------------------------------------------------------------------------------------------


def test_the_guide_has_every_operation() -> None:
    """The table of docs/pipe.md is what the code has; a row may have several operations of the same form."""
    rows = re.findall(r"^\| (`.*?`) \| `(.*?)` \| `(.*?)` \|", DOCUMENT, re.MULTILINE)
    said = {name: (operands, results) for names, operands, results in rows for name in re.findall("`(.+?)`", names)}
    signatures = {
        name: (" ".join(map(str, one.operands)), " ".join(map(str, one.results))) for name, one in OPERATIONS.items()
    }
    assert said == signatures


def test_the_guides_stream_is_right() -> None:
    """Its example is what the generator writes, and the answers beside it are right."""
    asked, answered = re.findall(r"^```text\n(# nvfp4-pipe.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert asked.splitlines() == requests(Plan.of_header(asked.splitlines()[0]))
    assert verified(answered.splitlines()).exit_code == 0


def test_the_guides_report_is_what_is_printed() -> None:
    (report,) = re.findall(r"^```text\n(e2m1  .*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert report.rstrip() == str(verified(answers(E2M1, *DEVIATIONS["element.ties-away"].changes)))

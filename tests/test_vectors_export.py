"""The exported vectors: every rule, every named fault, the same bytes everywhere, and readers in other languages.

``tests/vector-hashes.txt`` pins the bytes of every group under the version of the specification.  A group, once it is
released, changes only with a new version: ``python tests/test_vectors_export.py`` writes the file, and refuses
otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

import nvfp4ref as nv
from conformance.deviations import DEVIATIONS
from conformance.vectors import operands, sets
from conformance.vectors.command import add
from conformance.vectors.export import digests, export
from conformance.vectors.fields import TYPES, bits, different_rows, fields, little_endian
from conformance.vectors.groups import GROUPS, NOT_COVERED, NOT_HUNTED, SIZES, chosen
from conformance.vectors.lint import lint
from conformance.vectors.operations import OPERATIONS
from conformance.vectors.random import Random
from nvfp4ref import hadamard, scalar

pytestmark = pytest.mark.filterwarnings("error")

ROOT = Path(__file__).parent.parent
HASHES = Path(__file__).with_name("vector-hashes.txt")
CLIENTS = ROOT / "clients"
RULES = re.findall(r"^### ([A-Z0-9-]+)$", (ROOT / "docs" / "spec.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "vectors"
    export(folder)
    return folder


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- what is covered ---------------------------------------------------------------------------------------


def test_every_rule_has_vectors_or_a_reason() -> None:
    """A new rule of docs/spec.md gets a group in conformance/vectors/groups.py, or an entry in NOT_COVERED."""
    assert set(RULES) == set(GROUPS) | set(NOT_COVERED)
    assert not set(GROUPS) & set(NOT_COVERED)


def test_every_deviation_is_hunted_or_has_a_reason() -> None:
    """A new deviation is hunted by a group of conformance/vectors/groups.py, or gets an entry in NOT_HUNTED."""
    hunted = {ident for group in GROUPS.values() for ident in group.hunts}
    assert hunted | set(NOT_HUNTED) == set(DEVIATIONS)
    assert not hunted & set(NOT_HUNTED)


@pytest.mark.parametrize("rule", GROUPS)
def test_every_fault_changes_an_expected_bit(rule: str) -> None:
    """Planted, each fault that a group hunts shows in the small set, and no fault means no difference."""
    group = GROUPS[rule]
    small = group.sets("small")
    assert small, "the small set has something of every rule"
    faults = list(group.planted())
    assert faults, "a group hunts something"
    for ident, what, forms in faults:
        changes = [change for form in forms for one in small if (change := one.changed(form)) is not None]
        assert any(n for n, _ in changes), f"{ident or what} changes nothing"
    for one in small:
        if one.rows:
            assert one.changed({}) == (0, 0)


@pytest.fixture(scope="module")
def full() -> dict[str, list[sets.Set]]:
    return {rule: group.sets("full") for rule, group in GROUPS.items()}


def test_the_suite_is_in_the_full_set(full: dict[str, list[sets.Set]]) -> None:
    """Every quantization of the quick suite is among the tensors of some rule."""
    names = {one.name for group in full.values() for one in group if one.operation == "tensor"}
    assert names == set(operands.quick())


def test_names_of_sets_are_unique_in_their_group(full: dict[str, list[sets.Set]]) -> None:
    for rule, group in full.items():
        names = [one.name for one in group]
        assert len(names) == len(set(names)), rule


# ---- the answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    """A row asked alone has the answer that it has among others: batches are nobody's business."""
    operation = OPERATIONS[name]
    given = operation.random(Random(0, 1), 300)
    together = operation.answer(given)
    for row in (0, 7, 64, 299):
        alone = operation.answer(tuple(one[row : row + 1] for one in given))
        assert not different_rows([one[row : row + 1] for one in together], alone).any()


@pytest.mark.parametrize("preset", [name for name in nv.PRESETS if name != "four-over-six"])
def test_blocks_agree_with_the_scalar_model(preset: str) -> None:
    """``quantize`` of every preset against the slow twin that works in exact rationals."""
    operation = OPERATIONS["quantize" if preset == "te" else f"quantize.{preset}"]
    x, amax = (one[::41] for one in operands.peers("small"))
    byte, packed = operation.answer((x, amax)[: len(operation.operands)])[:2]
    for i in range(len(x)):
        codes, scales = scalar.quantize([x[i].tolist()], nv.arithmetic(preset), given_amax=float(amax[i]))
        assert (byte[i], nv.e2m1.unpack(packed[i : i + 1])[0].tolist()) == (scales[0][0], codes[0])


def test_codecs_agree_with_the_scalar_model() -> None:
    te = nv.arithmetic("te")
    for name, encode, kind in (("e2m1", scalar.e2m1_encode, "e2m1"), ("e4m3", scalar.e4m3_encode, "e4m3")):
        for part in ("range", "above", "zero", "nan"):
            (x,) = operands.codec(kind, part)("small")
            x = x[::3]
            assert OPERATIONS[name].answer((x,))[0].tolist() == [encode(float(one), te) for one in x]


def test_the_transform_takes_each_rows_own_mask() -> None:
    x, mask = operands.vectors("small")
    (found,) = OPERATIONS["rht16"].answer((x, mask))
    for one in np.unique(mask)[:12]:
        rows = mask == one
        expected = hadamard.transform(x[rows], nv.RHT(sign_mask=int(one)))
        np.testing.assert_array_equal(bits(found[rows]), bits(expected))


def test_a_word_of_philox_is_that_of_the_stream() -> None:
    """PHILOX-COUNTER: the carry of the offset, and which word of which call."""
    given = (np.array([1], np.uint64), np.array([2**64 - 1], np.uint64), np.array([5], np.uint64))
    assert OPERATIONS["philox-word"].answer((*given, np.array([4], np.uint32)))[0] == [0x5642B3EB]


def test_mma_rows_tell_the_models_apart() -> None:
    """MMA-WINDOW: its words refute every model but the specification's."""
    words = operands.words("window")("small")
    right = OPERATIONS["mma"].answer(words)
    for model in nv.tensorcore.MODELS:
        found = OPERATIONS["mma"].answer(words, {"model": model})
        assert different_rows(found, right).any() == (model not in ("blackwell",)), model


def test_operands_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x:f32\*16 is float32"):
        OPERATIONS["block"].answer((np.zeros((2, 8), np.float32), np.zeros(2, np.float32)))


# ---- text and bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_text_comes_back(kind: str, count: int) -> None:
    (field,) = fields(f"v:{kind}" + (f"*{count}" if count > 1 else ""))
    dtype = np.dtype(TYPES[kind].dtype)
    raw = Random(3, count).words64(5 * count).view(np.uint8)[: 5 * count * dtype.itemsize]
    array = (raw & np.uint8(15) if kind == "e2m1" else raw).view(dtype).reshape((5,) if count == 1 else (5, count))
    texts = field.texts(array)
    assert all(len(text) == field.digits for text in texts)
    assert (bits(field.array([text.lower() for text in texts])) == bits(array)).all()
    assert len(little_endian(array)) == array.nbytes


@pytest.mark.parametrize("text", ["", "3E80000", "3E8000001", "3E80000G", "0x3E8000", "+3E80000", "3E800\u066100"])
def test_text_that_is_no_float(text: str) -> None:
    with pytest.raises(ValueError, match="8 hexadecimal digits"):
        fields("x:f32")[0].array([text])


# ---- files -------------------------------------------------------------------------------------------------


def test_the_small_set_is_small(exported: Path) -> None:
    assert sum(path.stat().st_size for path in exported.iterdir()) < 5_000_000


def test_an_export_is_what_the_schema_says(exported: Path) -> None:
    schema = load(exported / "schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    documents = [path for path in exported.glob("*.json") if path.name != "schema.json"]
    assert len(documents) == len(GROUPS) + 1
    for path in documents:
        validator.validate(load(path))
    index = load(exported / "index.json")
    broken = {**index, "groups": [{**index["groups"][0], "sha256": "0"}]}
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(broken)


def test_an_export_is_the_same_every_time(exported: Path, tmp_path: Path) -> None:
    """Also when it replaces an earlier one, and when another set stood there before."""
    again = tmp_path / "again"
    export(again, rules=["E2M1-RNE", "MMA-ROUND"])
    assert {path.name for path in again.glob("*.bin")} == {"E2M1-RNE.bin", "MMA-ROUND.bin"}
    export(again)
    for path in exported.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    assert len(list(again.iterdir())) == len(list(exported.iterdir()))
    assert not [path for path in tmp_path.iterdir() if path.name != "again"], "nothing is left beside it"


@pytest.mark.parametrize("size", SIZES)
def test_no_expected_bit_changes_without_a_new_version(size: str) -> None:
    """A changed or added result is a new SPEC_VERSION and a changelog entry; then write the file anew, see above."""
    pinned = [line.split() for line in HASHES.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert {version for version, *_ in pinned} == {nv.SPEC_VERSION}, "the hashes are of another version"
    expected = {rule: digest for _, of, rule, digest in pinned if of == size}
    found = dict(digests(chosen(), size))
    assert found.keys() == expected.keys()
    assert not [rule for rule in found if found[rule] != expected[rule]], "these rules have other vectors now"


def test_the_index_agrees_with_the_pinned_hashes(exported: Path) -> None:
    pinned = HASHES.read_text(encoding="utf-8")
    for entry in load(exported / "index.json")["groups"]:
        assert f"{nv.SPEC_VERSION} small {entry['rule']} {entry['data_sha256']}" in pinned
        assert hashlib.sha256((exported / entry["data"]).read_bytes()).hexdigest() == entry["data_sha256"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"size": "huge"}, "size is one of small, full"),
        ({"rules": ["E2M1-RNE", "NO-RULE"]}, "no rule 'NO-RULE'"),
        ({"rules": ["DISPATCH"]}, "DISPATCH has no vectors: which kernel runs"),
    ],
)
def test_an_export_that_is_refused_writes_nothing(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        export(tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds 'notes.txt', which is no part of an export"):
        export(tmp_path / "mine", rules=["E2M1-RNE"])
    (tmp_path / "file").write_text("keep me", encoding="utf-8")
    with pytest.raises(ValueError, match="is no folder"):
        export(tmp_path / "file", rules=["E2M1-RNE"])
    export(tmp_path / "out", rules=["E2M1-RNE"])
    (tmp_path / "out" / "notes.txt").write_text("keep me", encoding="utf-8")
    with pytest.raises(ValueError, match="no part of an export"):
        export(tmp_path / "out")
    assert (tmp_path / "mine" / "notes.txt").exists() and (tmp_path / "out" / "E2M1-RNE.bin").exists()
    site = tmp_path / "site"  # files of such names are no export for that
    site.mkdir()
    for name in ("index.json", "data.json", "data.bin"):
        (site / name).write_text('{"format": "mine", "groups": []}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds 'data.bin', which is no part of an export"):
        export(site, rules=["E2M1-RNE"])
    assert len(list(site.iterdir())) == 3


def test_an_export_says_what_it_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert command("export", folder, "--rule", "E2M1-RNE", "--rule", "E2M1-NAN") == 0
    assert capsys.readouterr().err == ""  # an empty folder
    assert command("export", folder, "--rule", "E2M1-RNE") == 0
    said = (
        f"nvfp4: {folder}: replaces the export that is there, of 2 rules, size small, specification {nv.SPEC_VERSION}"
    )
    assert capsys.readouterr().err.strip() == said
    assert command("lint", folder) == 0 and not (tmp_path / "out" / "E2M1-NAN.bin").exists()


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    export(tmp_path / "out", rules=["E2M1-RNE", "E2M1-NAN"], progress=lambda *said: told.append(said))
    assert told == [("E2M1-RNE", 1, 2), ("E2M1-NAN", 2, 2)]


def part_of(shown: Any, whole: Any) -> bool:
    """Whether everything that a guide shows of a value is so."""
    if isinstance(shown, dict):
        return all(key in whole and part_of(value, whole[key]) for key, value in shown.items())
    if isinstance(shown, list):
        return all(part_of(*pair) for pair in zip(shown, whole, strict=False))
    return bool(shown == whole)


def test_the_guides_group_is_right(exported: Path) -> None:
    guide = (ROOT / "docs" / "vectors.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```json\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert part_of(json.loads(block), load(exported / "E2M1-RNE.json"))


# ---- the linter --------------------------------------------------------------------------------------------


def test_an_export_is_clean(exported: Path) -> None:
    assert lint(exported) == []


def edit(path: Path, change: Any) -> None:
    """Change a JSON file, and the checksum that the index has of it."""
    value = load(path)
    change(value)
    text = (json.dumps(value, indent=1) + "\n").encode()
    path.write_bytes(text)
    checksum(path, "sha256")


def checksum(path: Path, key: str) -> None:
    index = load(path.parent / "index.json")
    for entry in index["groups"]:
        if entry["rule"] == path.stem:
            entry[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    (path.parent / "index.json").write_text(json.dumps(index), encoding="utf-8")


def flip(folder: Path, offset: int, to: int = 0x0F) -> None:
    """Another byte in the data, with the right checksum."""
    path = folder / "E2M1-RNE.bin"
    data = bytearray(path.read_bytes())
    data[offset] = to
    path.write_bytes(bytes(data))
    checksum(path, "data_sha256")


DAMAGES: dict[str, tuple[Any, str]] = {
    "result": (lambda f: flip(f, 1104 + 30), "1 of 276 rows holds another result"),
    "operand": (lambda f: flip(f, 3, 0x50), "1 of 276 rows holds another result"),
    "code": (lambda f: flip(f, 1104, 0x10), "code holds codes above 15"),
    "checksum": (lambda f: (f / "E2M1-RNE.bin").write_bytes(b"\0" * 1380), "its checksum differs"),
    "no-data": (lambda f: (f / "E2M1-RNE.bin").unlink(), "E2M1-RNE.bin cannot be read"),
    "no-group": (lambda f: (f / "E2M1-RNE.json").unlink(), "E2M1-RNE.json: cannot be read"),
    "foreign": (lambda f: (f / "more.bin").write_bytes(b""), "more.bin belongs to no group"),
    "index": (lambda f: (f / "index.txt").write_text("# x\n"), "index.txt: line 2 is not what the groups say"),
    "offset": (
        lambda f: edit(f / "E2M1-RNE.json", lambda g: g["sets"][0]["arrays"][1].update(offset=1120)),
        "begins at 1120, and 1104 is next",
    ),
    "shape": (
        lambda f: edit(f / "E2M1-RNE.json", lambda g: g["sets"][0]["arrays"][0].update(shape=[275])),
        "has 1100 bytes, not 1104",
    ),
    "beyond": (
        lambda f: edit(f / "E2M1-RNE.json", lambda g: g["sets"][0]["arrays"][1].update(shape=[300], bytes=300)),
        "beyond the 1380 bytes there are",
    ),
    "type": (
        lambda f: edit(f / "E2M1-RNE.json", lambda g: g["sets"][0]["arrays"][0].update(type="f64")),
        "unknown type 'f64'",
    ),
    "operation": (lambda f: edit(f / "E2M1-RNE.json", lambda g: g["sets"][0].update(operation="e5m2")), "no operation"),
    "deviation": (
        lambda f: edit(f / "E2M1-RNE.json", lambda g: g["hunts"][0].update(deviation="element.wrong")),
        "hunts 'element.wrong'",
    ),
    "idle-fault": (
        lambda f: edit(f / "E2M1-RNE.json", lambda g: g["hunts"][0].update(changes=0)),
        "which changes no result",
    ),
    "key": (lambda f: edit(f / "E2M1-RNE.json", lambda g: g.pop("sets")), "is not as schema.json says"),
    "names": (lambda f: edit(f / "E2M1-RNE.json", lambda g: g["sets"].append(g["sets"][0])), "the same name"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_linter_finds(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    export(folder, rules=["E2M1-RNE", "E2M1-NAN"])
    change, sentence = DAMAGES[damage]
    change(folder)
    assert any(sentence in found for found in lint(folder)), lint(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not JSON"),
        ("[]", "is no index of vectors"),
        ('{"format": "nvfp4-vectors", "kind": "group"}', "is no index"),
        ('{"format": "nvfp4-vectors", "kind": "index", "version": 2, "spec": "1.0"}', "format version 2"),
        ('{"format": "nvfp4-vectors", "kind": "index", "version": 1, "spec": "0.1"}', "specification 0.1"),
    ],
)
def test_an_index_that_is_none(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        lint(tmp_path)


def test_no_index_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: no such file"):
        lint(tmp_path / "nowhere")


# ---- the command -------------------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add(parser.add_subparsers(required=True))
    options = parser.parse_args(["vectors", *arguments])
    code: int = options.run(options)
    return code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "out")
    assert command("export", folder, "--rule", "E2M1-RNE", "--rule", "SR-SM100") == 0
    assert "2 rules, 932 results" in capsys.readouterr().out
    assert command("lint", folder) == 0
    assert "whole, consistent and right" in capsys.readouterr().out
    (tmp_path / "out" / "SR-SM100.bin").write_bytes(b"")
    assert command("lint", folder) == 1
    assert "1 fault\n" in capsys.readouterr().out
    assert command("list") == 0
    listed = capsys.readouterr().out
    assert "E2M1-RNE" in listed and "x:f32 -> code:e2m1" in listed and "no vectors: which kernel runs" in listed


# ---- readers in other languages ----------------------------------------------------------------------------


def compiled(source: str, *more: str, folder: Path) -> Path:
    """A program of clients/c, compiled as strictly as its Makefile does; skipped without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-ffp-contract=off", "-O1"]
    program = folder / source.removesuffix(".c")
    files = [str(CLIENTS / "c" / name) for name in (source, *more)]
    subprocess.run([compiler, *strict, "-o", str(program), *files, "-lm"], check=True)
    return program


def test_the_c_reader(exported: Path, tmp_path: Path) -> None:
    """A quantizer in C99 agrees with every result of ten sets; a wrong result and missing data are seen."""
    program = compiled("test_vectors.c", "nvfp4_vectors.c", folder=tmp_path)
    ran = subprocess.run([program, exported], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.search(r"specification 1\.0: \d+ results of 10 sets, 0 wrong", ran.stdout)
    folder = tmp_path / "damaged"
    shutil.copytree(exported, folder)
    flip(folder, 1104 + 30)
    ran = subprocess.run([program, folder], capture_output=True, text=True)
    assert ran.returncode == 1 and "E2M1-RNE row 30: found" in ran.stdout
    (folder / "E2M1-RNE.bin").write_bytes(b"short")
    ran = subprocess.run([program, folder], capture_output=True, text=True)
    assert ran.returncode == 2 and "data end before the array of: E2M1-RNE" in ran.stderr
    ran = subprocess.run([program, tmp_path], capture_output=True, text=True)
    assert ran.returncode == 2 and "cannot open index.txt" in ran.stderr


def test_the_c_reader_stays_short() -> None:
    sources = [CLIENTS / "c" / name for name in ("nvfp4_vectors.c", "nvfp4_vectors.h")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) < 150


class Encoder:
    """The handles of e2m1_encoder.v, driven without a simulator: what is set shows when time has passed."""

    def __init__(self, fault: Any = lambda code: code) -> None:
        self.x, self.code = SimpleNamespace(value=0), SimpleNamespace(value=0)
        self._fault = fault

    async def settle(self) -> None:
        x = np.array([self.x.value], np.uint32).view(np.float32)
        self.code.value = self._fault(int(nv.e2m1.encode(x)[0]))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(CLIENTS / "cocotb"))
    yield import_module("nvfp4_bench")
    sys.modules.pop("nvfp4_bench")


def test_the_bench_drives_a_design(exported: Path, bench: Any) -> None:
    rules = ("E2M1-RNE", "E2M1-SATURATE", "E2M1-NAN", "E2M1-ZERO")
    design = Encoder()
    assert asyncio.run(bench.check(design, design.settle, exported, "e2m1", *rules)) == 504
    broken = Encoder(lambda code: code & 7)
    with pytest.raises(AssertionError, match=r"E2M1-RNE row \d+: x=[0-9A-F]+: code is [0-7], expected [0-9A-F]"):
        asyncio.run(bench.check(broken, broken.settle, exported, "e2m1", *rules))
    with pytest.raises(AssertionError, match="has no rows of e4m3"):
        asyncio.run(bench.check(design, design.settle, exported, "e4m3", *rules))


def test_the_bench_makes_words(exported: Path, bench: Any) -> None:
    """Several values of a row are one word, the first lowest, codes of four bits."""
    given, results = next(iter(bench.rows(exported, "E2M1-PACK", "e2m1-pack")))
    (one,) = sets.of_rows("e2m1-pack", operands.code_pairs("small"), "").operands.values()
    codes = one[1][0]
    assert given["codes"] == sum(int(code) << 4 * i for i, code in enumerate(codes)) == results["packed"]


# ---- writing the hashes ------------------------------------------------------------------------------------


def lines() -> Iterator[str]:
    for size in SIZES:
        for rule, digest in digests(chosen(), size):
            yield f"{nv.SPEC_VERSION} {size} {rule} {digest}"


def write_hashes() -> None:
    """Pin the present vectors.  Refuses to change what is pinned under the same version."""
    before = HASHES.read_text(encoding="utf-8").splitlines() if HASHES.exists() else []
    now = list(lines())
    known = {tuple(line.split()[:3]): line for line in before if line[0] != "#"}
    changed = [line for line in now if known.get(tuple(line.split()[:3]), line) != line]
    if changed:
        names = ", ".join(line.split()[2] for line in changed)
        sys.exit(f"these vectors change, so raise nvfp4ref.SPEC_VERSION and say so in CHANGELOG.md first: {names}")
    head = "# version of the specification, size, rule, SHA-256 of the data; written by test_vectors_export.py"
    HASHES.write_text("\n".join([head, *now, ""]), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_hashes()

"""The bundle's format: the same content gives the same members; what is changed, cut, swapped or hostile is refused."""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import cases as suite_cases
from conformance.capture import bundle as bundles
from conformance.capture import child
from conformance.capture.bundle import BundleError, Record, open_bundle, seal, without_folders
from conformance.capture.child import record_backend
from conformance.capture.journal import Writer
from conformance.capture.question import digest
from nvfp4hw.backends.base import Case

HEADER = {
    "format": "nvfp4-bundle",
    "version": 1,
    "suite": "quick",
    "date": "2026-11-30",
    "environment": {},
    "gpus": [],
    "asked": {"backends": ["one", "two"], "probes": []},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of two backends, one record each."""
    found = tmp_path / "recording"
    found.mkdir()
    (found / "bundle.json").write_text(json.dumps(HEADER), encoding="utf-8")
    for number, name in enumerate(HEADER["asked"]["backends"]):  # type: ignore[index]
        unit = Writer(found / "backends" / name)
        unit.write("unit.json", {"name": name, "asked": ["a"]})
        unit.add(Record("a", "q"), {"packed": np.arange(64, dtype=np.uint8) + np.uint8(number)})
        unit.write("end.json", {"state": "complete"})
    return found


@pytest.fixture
def sealed(folder: Path) -> Path:
    seal(folder, folder.with_name("b.nvfp4"))
    return folder.with_name("b.nvfp4")


def rewritten(path: Path, change: Any) -> Path:
    """The bundle with its members changed by a function of {name: content}, checksums of the zip made right."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    change(members)
    target = path.with_name("changed.nvfp4")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target


def refusal(path: Path) -> str:
    """The one sentence with which a bundle is refused."""
    with pytest.raises(BundleError) as caught:
        for unit in open_bundle(path).units:
            for record in unit.records.values():
                for ref in record.outputs.values():
                    unit.array(ref)
            assert unit.info is not None and unit.end is not None
    said = str(caught.value)
    assert said.startswith(str(path)) and "\n" not in said and "Traceback" not in said
    return said


# ---- what is there -----------------------------------------------------------------------------------------


def test_sealing_is_deterministic_and_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    first, second = seal(folder, tmp_path / "1"), seal(folder, tmp_path / "2")
    assert first == second and (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert open_bundle(tmp_path / "1").root == first and open_bundle(folder).root is None
    with zipfile.ZipFile(tmp_path / "1") as archive:
        assert archive.namelist()[0] == "manifest.json" and archive.namelist()[1:] == sorted(archive.namelist()[1:])


def test_a_bundle_can_be_read_with_the_standard_library_and_numpy(sealed: Path) -> None:
    """As docs/capture.md says."""
    with zipfile.ZipFile(sealed) as archive:
        record = json.loads(archive.read("backends/two/records.jsonl").splitlines()[0])
        data = archive.read("backends/two/arrays.bin")
    packed = record["outputs"]["packed"]
    array = np.frombuffer(data, packed["dtype"], int(np.prod(packed["shape"])), packed["at"]).reshape(packed["shape"])
    assert (array == np.arange(1, 65)).all()


def test_units_come_in_the_order_in_which_they_were_asked(sealed: Path) -> None:
    assert [unit.name for unit in open_bundle(sealed).units] == ["one", "two"]


def test_unpacking_and_sealing_again_gives_the_same_bundle(sealed: Path, tmp_path: Path) -> None:
    bundles.unpack(open_bundle(sealed), tmp_path / "again")
    seal(tmp_path / "again", tmp_path / "again.nvfp4")
    assert (tmp_path / "again.nvfp4").read_bytes() == sealed.read_bytes()


# ---- tampering ---------------------------------------------------------------------------------------------


def test_a_changed_member_is_named(sealed: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        members["backends/one/arrays.bin"] = b"\xff" + members["backends/one/arrays.bin"][1:]

    assert "changed: backends/one/arrays.bin" in refusal(rewritten(sealed, change))


def test_swapped_members_are_named(sealed: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        one, two = "backends/one/arrays.bin", "backends/two/arrays.bin"
        members[one], members[two] = members[two], members[one]

    assert "changed: backends/one/arrays.bin, backends/two/arrays.bin" in refusal(rewritten(sealed, change))


def test_missing_and_added_members_are_named(sealed: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        del members["backends/one/end.json"]
        members["backends/three/end.json"] = b"{}"

    said = refusal(rewritten(sealed, change))
    assert "missing: backends/one/end.json" in said and "added: backends/three/end.json" in said


def test_a_manifest_made_right_again_has_another_root(sealed: Path) -> None:
    """Who changes a member and the manifest is found out by the root hash, and by the record's own hashes."""
    root = open_bundle(sealed).root

    def change(members: dict[str, bytes]) -> None:
        import hashlib

        name = "backends/one/arrays.bin"
        members[name] = b"\xff" + members[name][1:]
        manifest = json.loads(members["manifest.json"])
        manifest["members"][name]["sha256"] = hashlib.sha256(members[name]).hexdigest()
        members["manifest.json"] = json.dumps(manifest).encode()

    changed = rewritten(sealed, change)
    assert open_bundle(changed).root != root
    (unit, _) = open_bundle(changed).units
    with pytest.raises(BundleError, match="not those that were recorded"):
        unit.array(unit.records["a"].outputs["packed"])


def test_no_flipped_bit_changes_what_is_read(sealed: Path) -> None:
    """Each flip is refused in a sentence, or is in bytes of the zip that say nothing."""
    right = open_bundle(sealed)
    data, flipped, refused = sealed.read_bytes(), sealed.with_name("flipped.nvfp4"), 0
    dice = random.Random(7)
    for _ in range(400):
        place, bit = dice.randrange(len(data)), dice.randrange(8)
        flipped.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        try:
            found = open_bundle(flipped)
        except BundleError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        assert found.root == right.root
        assert {n: found.members.read(n) for n in found.members.names} == {
            n: right.members.read(n) for n in right.members.names
        }
    assert refused > 200


def test_no_truncation_is_read(sealed: Path) -> None:
    data, cut = sealed.read_bytes(), sealed.with_name("cut.nvfp4")
    for length in (0, 1, 21, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        assert "no bundle" in refusal(cut) or "damaged" in refusal(cut)


def line(**changes: Any) -> bytes:
    """A line of records whose only output is described so."""
    output = {"dtype": "uint8", "shape": [4], "sha256": "", "at": 0, **changes}
    return json.dumps({"id": "a", "question": "", "seconds": 0, "outputs": {"p": output}}).encode() + b"\n"


# ---- hostile and foreign -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "backends/../../up/unit.json", "backends/a\\..\\b/unit.json", "extra.txt"],
)
def test_names_that_no_bundle_has_are_refused(sealed: Path, name: str) -> None:
    assert "which no bundle has" in refusal(rewritten(sealed, lambda members: members.update({name: b"x"})))


def test_a_member_that_is_there_twice_is_refused(sealed: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(sealed, "a") as archive:
        archive.writestr("backends/one/end.json", b"{}")
    assert "holds 'backends/one/end.json' twice" in refusal(sealed)


def test_a_zip_bomb_is_not_inflated(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_LARGEST_INFLATED", 1 << 20)
    said = refusal(rewritten(sealed, lambda members: members.update({"backends/one/arrays.bin": bytes(2 << 20)})))
    assert "would expand to" in said


def test_a_file_of_absurd_size_is_not_read(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_LARGEST_READ", 100)
    assert "no bundle has more than 100" in refusal(sealed)


def test_a_bundle_of_the_future_is_refused_whatever_it_holds(sealed: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps({"format": "nvfp4-bundle", "version": 3, "tree": []}).encode()
        members["new/thing"] = b"x"

    assert "is a bundle of version 3, and this nvfp4ref reads versions 1 and 2" in refusal(rewritten(sealed, change))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("manifest.json", b"[1]", "manifest.json: is no JSON object"),
        ("manifest.json", b'{"format": "zip"}', "gives the format 'zip'"),
        ("manifest.json", b'{"format": "nvfp4-bundle", "version": 1, "members": 3}', "lists no members"),
        ("manifest.json", b'{"format": "nvfp4-bundle", "version": 1, "members": {"a": []}}', "lists no members"),
    ],
)
def test_a_manifest_that_is_none_is_refused(sealed: Path, name: str, content: bytes, says: str) -> None:
    assert says in refusal(rewritten(sealed, lambda members: members.update({name: content})))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bundle.json", b"{}", "gives the format None"),
        ("bundle.json", b'{"format": "nvfp4-bundle", "version": 1}', "does not say what was asked"),
        ("backends/one/unit.json", b"[]x", "is no JSON object"),
        ("backends/one/records.jsonl", b"{}\n", "no record"),
        ("backends/one/records.jsonl", b"\xff\n", "no record"),
        ("backends/one/records.jsonl", line(dtype="object"), "describes an array"),
        ("backends/one/records.jsonl", line(shape=[-1]), "describes an array"),
        ("backends/one/records.jsonl", line(shape="x"), "describes an array"),
        ("backends/one/records.jsonl", line(shape=[99999999999]), "not those that were recorded"),
        ("backends/one/records.jsonl", line(at=-4), "not those that were recorded"),
        ("backends/one/records.jsonl", line(at="4"), "describes an array"),
        ("backends/one/records.jsonl", line() * 2, "twice"),
    ],
)
def test_content_that_makes_no_sense_is_refused_in_a_sentence(
    folder: Path, name: str, content: bytes, says: str
) -> None:
    """Even with hashes made right."""
    (folder / name).write_bytes(content)
    seal(folder, folder.with_name("b"))
    with pytest.raises(BundleError, match=says):
        for unit in open_bundle(folder.with_name("b")).units:
            assert unit.info is not None
            for record in unit.records.values():
                for ref in record.outputs.values():
                    unit.array(ref)


def test_what_is_no_bundle_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read: no such file"):
        open_bundle(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no bundle.json" in refusal(empty)
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme", "x")
    assert "has no manifest.json" in refusal(other)
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    other.write_bytes(buffer.getvalue())
    assert "has no manifest.json" in refusal(other)


# ---- questions ---------------------------------------------------------------------------------------------


def test_the_hash_of_a_question_covers_everything_that_is_asked() -> None:
    import nvfp4ref as nv

    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    base = {"x": x, "kind": "quantize", "block": (1, 16), "directions": "row", "rounding": "nearest-even"}
    changes: list[dict[str, Any]] = [
        {},
        {"x": x.T},
        {"x": x.reshape(8, 32)},
        {"x": x.astype(np.float16)},
        {"x": -x},
        {"kind": "e2m1"},
        {"block": (16, 16)},
        {"directions": "col"},
        {"rounding": "stochastic"},
        {"rht_t": nv.RHT()},
        {"rht_t": nv.RHT(sign_mask=0)},
        {"amax": np.float32(1)},
        {"amax": np.float32(2)},
        {"amax_t": np.float32(1)},
        {"fields": {"row_scaled": True}},
        {"fields": {"e4m3_max": 256}},
        {"data": {"rng": nv.Philox(1, 2)}},
        {"data": {"rng": nv.Philox(1, 3)}},
        {"data": {"rng": x}},
        {"arithmetic": "te-2.14"},
    ]
    hashes = [digest(Case("c", "f", **{**base, **change})) for change in changes]
    assert len(set(hashes)) == len(hashes)
    assert digest(Case("other", "g", hunts="x", **base)) == hashes[0]  # names are no part of a question


def test_the_hashes_of_the_suite_are_the_same_every_time() -> None:
    first, second = ({case.id: digest(case) for case in suite_cases.cases("quick")} for _ in range(2))
    assert first == second and len(set(first.values())) > 0.99 * len(first)


# ---- no path is recorded -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "recorded"),
    [
        ("/home/me/lib/common.cu:206 in create", "…/common.cu:206 in create"),
        ("OSError: '/opt/cuda/lib64/libcudart.so': no such file", "OSError: '…/libcudart.so': no such file"),
        (r"cannot load C:\Users\me\nvcuda.dll", "cannot load …/nvcuda.dll"),
        (os.path.expanduser(f"~{os.sep}x.py, line 3"), "…/x.py, line 3"),
        (
            "sm_100a/sm_103a, 1/2688, see https://example.org/a/b",
            "sm_100a/sm_103a, 1/2688, see https://example.org/a/b",
        ),
    ],
)
def test_of_a_path_the_file_s_name_is_recorded(tmp_path: Path, said: str, recorded: str) -> None:
    assert without_folders(said) == recorded
    unit = Writer(tmp_path / "one")
    unit.add(Record("a", error=said), {})
    unit.add(Record("b", refused=said), {})
    again = Writer(tmp_path / "one").recorded
    assert again["a"].error == recorded == again["b"].refused


def test_versions_and_reasons_are_recorded_without_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Somewhere:
        name, preset, features = "somewhere", "te", frozenset(("quantize",))

        def availability(self) -> str | None:
            return None if self.runs else "/home/me/toolkit lacks /home/me/toolkit/include/cuda_fp4.h"

        def version(self) -> str:
            return "CUDA 13.0 of /home/me/toolkit/bin"

        def cases(self, suite: str) -> list[Case]:
            return []

        runs = False

    monkeypatch.setattr(child.simulated, "load_backend", lambda name: Somewhere())
    for runs in (False, True):
        monkeypatch.setattr(Somewhere, "runs", runs)
        assert record_backend(Writer(tmp_path / "one"), "somewhere", "quick") == 0
        text = (tmp_path / "one" / "unit.json").read_text("utf-8")
        assert "/home" not in text and ("bin" if runs else "cuda_fp4.h") in text

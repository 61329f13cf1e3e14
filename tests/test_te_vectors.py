"""The main acceptance test: every recorded output of Transformer Engine's kernels, bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.run import compare
from nvfp4hw.backends import te_vectors
from nvfp4hw.backends.base import Case, Outputs
from nvfp4hw.backends.te_vectors import TEVectors, embedded_vectors, repository_vectors

WHOLE = repository_vectors()
pytestmark = pytest.mark.skipif(WHOLE is None, reason="the whole recordings are only in the repository")


def replays(folder: Any) -> Iterator[tuple[Case, Outputs]]:
    backend = TEVectors(folder)
    for case in backend.cases("full"):
        yield case, backend.quantize(case)


@pytest.fixture(scope="module")
def whole() -> list[tuple[Case, Outputs]]:
    return list(replays(WHOLE))


def test_no_recorded_output_differs(whole: list[tuple[Case, Outputs]]) -> None:
    compared: Counter[str] = Counter()
    different = []
    for case, found in whole:
        for name, count in compare(case, found, "te").items():
            compared[name] += count.compared
            different += [f"{case.id}: {name}: {count}"] if count.different else []
    assert different == []
    assert compared["packed"] + compared["packed_t"] >= 20_000_000
    assert compared["rbits"] + compared["rbits_t"] == 152_192
    assert compared["scales"] + compared["scales_t"] >= 2_000_000
    assert compared["sums"] == 327_680
    for name in (
        "scaled",
        "err46",
        "deq_f32",
        "deq_bf16",
        "deq_f16",
        "rht_t",
        "scales_swizzled",
        "bytes",
        "amax",
    ):
        assert compared[name] > 0, name


def test_case_ids_are_unique_and_say_what_they_hunt(whole: list[tuple[Case, Outputs]]) -> None:
    ids = [case.id for case, _ in whole]
    assert len(set(ids)) == len(ids) > 1100
    assert all(case.hunts for case, _ in whole)


def test_every_feature_that_a_case_needs_is_declared(whole: list[tuple[Case, Outputs]]) -> None:
    assert {need for case, _ in whole for need in case.needs} == TEVectors.features


# ---- nothing recorded is left out --------------------------------------------------------------------------

#: Recorded name -> names of the outputs that it is compared as.
KERNEL_OUTPUTS = {
    "q": {"packed"},
    "qt": {"packed_t"},
    "q_rht": {"packed_t"},
    "s": {"scales", "scales_swizzled"},
    "st": {"scales_t", "scales_swizzled_t"},
    "s_rht": {"scales_t"},
    "s_swz": {"scales_swizzled"},
    "st_swz": {"scales_swizzled_t"},
    "amax": {"amax"},
    "amax_rows": {"amax"},
    "amax_cols": {"amax_t"},
    "acc": {"sums"},
    "e4m3": {"bytes"},
}


def test_every_output_of_the_kernels_is_compared(whole: list[tuple[Case, Outputs]]) -> None:
    index = json.loads((WHOLE / "te-kernels-h200" / "index.json").read_text())  # type: ignore[operator]
    replayed = {case.id.removeprefix("te-kernels/"): set(found) for case, found in whole}
    for name, call in index["cases"].items():
        if name == "probe.rcp":
            continue
        for output in call["outputs"]:
            assert replayed[name] & KERNEL_OUTPUTS.get(output, {output}), (name, output)


def test_every_array_of_the_package_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set()
    get = te_vectors._Arrays.get

    def recording(self: Any, file: str, key: str) -> Any:
        read.add((str(self._folder), key))
        return get(self, file, key)

    monkeypatch.setattr(te_vectors._Arrays, "get", recording)
    list(replays(WHOLE))
    folder = WHOLE / "te-binary-h200"  # type: ignore[operator]
    index = json.loads((folder / "index.json").read_text())
    keys = {key for where, key in read if where == str(folder)}
    left = {name for name, key in index["arrays"].items() if key not in keys}
    written = {name for name in left if ".noop1|" not in name and not name.endswith("|bias")}
    arrays = np.load(folder / "arrays.npz")
    assert not any(arrays[index["arrays"][name]].any() for name in written), (
        "codes that this GPU does not compute"
    )
    assert all(name.startswith("rn.") and name.endswith(("|q", "|qt")) for name in written)


# ---- the subset in the wheel -------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_embedded_subset_is_small_and_equal_to_the_whole() -> None:
    embedded = Path(str(embedded_vectors()))
    assert folder_bytes(embedded) <= 6_000_000
    for path in sorted(embedded.glob("*/*.npz")):
        mine, theirs = np.load(path), np.load(WHOLE / path.parent.name / path.name)  # type: ignore[operator]
        for name in mine.files:
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name].view(np.uint8), theirs[name].view(np.uint8))


def test_the_embedded_subset_replays_and_represents_every_output(whole: list[tuple[Case, Outputs]]) -> None:
    subset = list(replays(embedded_vectors()))
    assert {name for _, found in subset for name in found} == {name for _, found in whole for name in found}
    assert {case.family for case, _ in subset} == {case.family for case, _ in whole}
    assert {case.kind for case, _ in subset} == {case.kind for case, _ in whole}
    for case, found in subset:
        assert not any(count.different for count in compare(case, found, "te").values()), case.id


def test_the_embedded_subset_is_what_the_tool_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WHOLE))
    import make_embedded  # type: ignore[import-not-found]

    monkeypatch.setattr(make_embedded, "EMBEDDED", tmp_path)
    make_embedded.main()
    embedded = Path(str(embedded_vectors()))
    for made in sorted(tmp_path.glob("*/index.json")):
        assert made.read_text() == (embedded / made.parent.name / "index.json").read_text()


def test_a_wrong_preset_is_seen(whole: list[tuple[Case, Outputs]]) -> None:
    """The comparison bites: each of these would be a plausible reading of the source."""
    for preset in ("te-2.14", "te-reference", "te-fused-rht"):
        different = sum(
            count.different
            for case, found in whole
            if case.kind == "quantize" and case.rounding == "nearest-even" and not case.fields
            for count in compare(case, found, preset).values()
        )
        assert different > 100, preset


def test_without_its_data_it_is_not_available(tmp_path: Path) -> None:
    assert "reinstall" in (TEVectors(tmp_path).availability() or "")
    assert TEVectors().availability() is None

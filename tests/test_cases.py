"""The suite's inputs: stable, unique, the same everywhere, and sharp.

``tests/case-hashes.txt`` pins the bits of every case.  A case is never edited: a changed input gets a new id.  After
adding cases: ``python -m tests.test_cases > tests/case-hashes.txt``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cases
from conformance.count import bits
from nvfp4hw.backends.base import Case

HASHES = Path(__file__).with_name("case-hashes.txt")


def digest(case: Case) -> str:
    """A hash of everything that a case asks."""
    said = [
        case.kind,
        case.block,
        case.directions,
        case.rounding,
        sorted(case.fields.items()),
        case.arithmetic,
    ]
    said += [None if amax is None else int(bits(np.float32(amax))) for amax in (case.amax, case.amax_t)]
    rht = case.rht_t
    said.append(None if rht is None else (rht.size, rht.sign_mask, rht.normalised, rht.round_to))
    said += [case.x.dtype.name, case.x.shape]
    little = bits(case.x).astype(f"<u{case.x.itemsize}")
    return hashlib.sha256(repr(said).encode() + little.tobytes()).hexdigest()[:16]


def lines(suite: str) -> Iterator[str]:
    for case in cases.cases(suite):
        yield f"{digest(case)} {case.id}"


def test_every_case_has_the_bits_that_are_pinned() -> None:
    assert list(lines("full")) == HASHES.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_ids_are_unique_and_every_case_hunts_something(suite: str) -> None:
    found = list(cases.cases(suite))
    assert len({case.id for case in found}) == len(found)
    assert all(case.hunts and case.id.startswith(case.family + "/") for case in found)


def test_quick_is_a_part_of_full_but_for_the_codec_sweeps() -> None:
    quick, full = set(lines("quick")), set(lines("full"))
    assert {line.split(" ", 1)[1] for line in quick - full} == {
        f"codec/{kind}.upper-halves" for kind in ("e2m1", "e4m3", "e8m0-ceil", "e8m0-floor", "e2m1-pairs")
    }


def test_exhaustive_has_the_cases_of_full() -> None:
    assert [case.id for case in cases.cases("exhaustive")] == [case.id for case in cases.cases("full")]


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="quick, full, exhaustive"):
        next(cases.cases("thorough"))


def test_every_family_of_the_plan_is_there() -> None:
    families = {case.family for case in cases.cases("quick")}
    assert families == {
        *(
            "codec",
            "normal",
            "mixed",
            "outlier",
            "sign",
            "zero",
            "e2m1-tie",
            "e4m3-tie",
            "scale-order",
            "allbits",
        ),
        *("threshold", "special", "magnitude", "shape", "rows", "tile", "given-amax", "four-over-six"),
        *("hadamard", "stochastic"),
    }


def test_quick_stays_small() -> None:
    """Sixty seconds on two cores for all backends: few elements, and few shapes for those that compile."""
    found = list(cases.cases("quick"))
    assert len(found) < 400 and sum(case.x.size for case in found) < 5_000_000
    assert len({(case.x.shape, case.x.dtype) for case in found if case.kind == "quantize"}) <= 40


# ---- construction ------------------------------------------------------------------------------------------


def test_casts_are_the_ieee_ones() -> None:
    x = cases._uniform_bits(1, (4096,), (0, 255))
    np.testing.assert_array_equal(
        bits(cases._cast(x, "bf16")) & 0x7FFF > 0x7F80,
        np.isnan(x),
        "a NaN stays one, and nothing else becomes one",
    )
    finite = x[~np.isnan(x)]
    np.testing.assert_array_equal(
        bits(cases._cast(finite, "bf16")), bits(finite.astype(cases._DTYPES["bf16"])), "nearest even"
    )


def test_normal_data_is_normal_enough() -> None:
    x = cases._normal(5, (400, 400)).astype(np.float64)
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01 and 4 < abs(x).max() <= 6


@pytest.mark.parametrize("label", cases._global_scales())
def test_constructed_ties_are_ties(label: str) -> None:
    """At least four in five scaled elements of the middle third lie exactly on an E2M1 midpoint."""
    amax = cases._global_scales()[label]
    blocks = cases._tie_blocks(amax, (0,))
    scaled = nv.quantize(blocks, amax=amax).steps.scaled[:, 1:15]
    on_tie = np.isin(np.abs(scaled), cases.E2M1_MIDPOINTS)
    assert on_tie.mean() > 0.8
    assert on_tie[nv.quantize(blocks, amax=amax).scales[:, 0] < 8].any(), "under subnormal scales too"


@pytest.mark.parametrize("label", cases._global_scales())
def test_constructed_scale_ties_are_ties(label: str) -> None:
    amax = cases._global_scales()[label]
    mult = (np.float32(2688) / amax) * cases.SIXTH
    steps = nv.quantize(cases._ramp(cases.E4M3_MIDPOINTS / mult), amax=amax).steps
    assert np.isin(steps.block_scale[:, 0], cases.E4M3_MIDPOINTS).mean() > 0.8


def test_both_errors_of_4over6_are_equal_in_the_even_blocks() -> None:
    tensor = cases._even_errors()
    q = nv.quantize(tensor.x, arithmetic=nv.arithmetic("te", four_over_six="MAE"))
    equal = q.steps.err4 == q.steps.err6
    assert (equal & (q.steps.block_amax > 0)).sum() >= 10
    assert ((q.steps.err4 > 0) & equal).any(), "not only blocks without any error"


# ---- the cases bite ----------------------------------------------------------------------------------------

PLANTED: list[dict[str, Any]] = [
    {"global_scale": "reciprocal-form"},
    {"global_scale": "reciprocal-then-multiply"},
    {"global_scale": "none"},
    {"global_guard": "reference"},
    {"global_guard": "fused-rht"},
    {"global_guard": "none"},
    {"global_type": "bfloat16"},
    {"e4m3_max": 256},
    {"block_scale": "divide-by-6"},
    {"block_scale": "scale-then-sixth"},
    {"block_scale": "divide-by-product"},
    {"block_scale": "divide-twice"},
    {"block_scale": "prescaled"},
    {"amax_nan": "propagate"},
    {"block_amax": "signed"},
    {"scale_rounding": "up"},
    {"scale_rounding": "truncate"},
    {"scale_rounding": "half-up"},
    {"scale_rounding": "power-of-two"},
    {"scale_overflow": "nan"},
    {"scale_overflow": "nan-above-240"},
    {"scale_floor": 2.0**-6},
    {"scale_floor": 2.0**-9},
    {"zero_block_scale": 0x38},
    {"encode_scale": "quotient"},
    {"encode_scale": "reciprocal-product"},
    {"encode_scale": "divide-by-product"},
    {"encode_scale": "divide-by-quotient"},
    {"encode_scale": "two-multiplications"},
    {"encode_scale": "bfloat16-coefficient"},
    {"encode_scale": "unrounded-block-scale"},
    {"encode_max": "none"},
    {"element_rounding": "ties-away"},
    {"element_rounding": "ties-to-zero"},
    {"element_rounding": "truncate"},
    {"element_via": "bfloat16"},
    {"element_via": "float16"},
    {"saturate": False},
    {"negative_zero": "drop-exact"},
    {"negative_zero": "drop"},
    {"nan_code": 0},
    {"nan_code": 8},
    {"flush_subnormals": True},
    {"packing": "high-nibble-first"},
    {"packing": "split-half"},
]


def name(fault: dict[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in fault.items())


@pytest.fixture(scope="module")
def rowwise() -> list[tuple[Case, nv.NVFP4Tensor]]:
    """The quick cases that any 1x16 quantizer can be asked, with what the oracle says."""
    plain = [
        case
        for case in cases.cases("quick")
        if case.kind == "quantize" and case.directions == "row" and case.block == (1, 16) and not case.fields
    ]
    return [(case, nv.quantize(case.x, amax=case.amax)) for case in plain]


def detecting(
    rowwise: list[tuple[Case, nv.NVFP4Tensor]], fault: dict[str, Any], dtypes: set[str]
) -> list[str]:
    arithmetic = nv.arithmetic("te", **fault)
    found = []
    for case, expected in rowwise:
        if case.x.dtype.name in dtypes:
            q = nv.quantize(case.x, amax=case.amax, arithmetic=arithmetic)
            if (q.packed != expected.packed).any() or (q.scales != expected.scales).any():
                found.append(case.id)
    return found


@pytest.mark.parametrize("fault", PLANTED, ids=name)
def test_a_planted_fault_is_seen_by_quick(
    rowwise: list[tuple[Case, nv.NVFP4Tensor]], fault: dict[str, Any]
) -> None:
    """Through bfloat16 alone and through float32 alone: many quantizers take only one of them."""
    for dtype in ("bfloat16", "float32"):
        assert detecting(rowwise, fault, {dtype}), dtype


def test_the_order_pairs_separate_every_order() -> None:
    """Each other order of the block-scale operations is told from the baseline by the pairs of one tensor."""
    x = next(t.x for t in cases._orders() if t.name == "m188")
    baseline = nv.quantize(x).scales
    for order in ("divide-by-6", "scale-then-sixth", "divide-by-product", "divide-twice", "prescaled"):
        assert (
            nv.quantize(x, arithmetic=nv.arithmetic("te", block_scale=order)).scales != baseline
        ).sum() >= 5


if __name__ == "__main__":
    print("\n".join(lines("full")))

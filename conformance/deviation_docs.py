"""docs/deviations.md, made of the table in deviations.py and of measured costs.

``python -m conformance.deviation_docs`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance import plant, suggest
from conformance.deviations import DEVIATIONS, Entry
from conformance.model import as_text
from conformance.observed import Array, Evidence
from conformance.side import Side
from nvfp4hw.backends.base import Case
from nvfp4ref import blocks
from nvfp4ref.dump import Dump

PATH = Path(__file__).parents[1] / "docs" / "deviations.md"

_HEAD = """# Known deviations

<!-- made by python -m conformance.deviation_docs from conformance/deviations.py: edit that -->

Each section is one place in which a quantizer departs from `te`, the arithmetic of Transformer Engine's kernels ≥ 2.15.
`nvfp4 check` names them; a bug report can link to a section by its id, `docs/deviations.md#block-scale.divide-by-6`.

The baseline: S = min(fl(2688/A), FLT_MAX), 1 if A or S is 0; s = min(fl(a·fl(S·fl(1/6))), FLT_MAX); d = E4M3(s),
saturating, nearest even; e = min(fl(1/fl(d·fl(1/S))), FLT_MAX); y = fl(x·e); code = E2M1(y), nearest even, saturating,
NaN → 7, the sign of zero kept; the even element in the low nibble; scales compact, repeated over the 16 rows of a 2-D
tile. A is the tensor amax, a the block amax, fl one float32 rounding, g = fl(A/2688).

*Cost* is the change of the mean squared error of the dequantized values when a consumer decodes the dump as what it
declares: on normal bfloat16 data, and on the suite's tensor of boundary cases (float32, or bfloat16 where the transform
needs it). A deviation that only moves ties costs nothing on average and breaks bit-exactness all the same; one of
layout or packing makes garbage of the tensor. "—": no output of that tensor changes.
"""

_GEMM = """
# Matrix products

What `nvfp4 check` says of a dump of a GEMM (`a.*`, `b.*`, `d`). The baseline is `nvfp4ref.matmul`: [the guide](gemm.md)
gives every step. Several of these may hold together; their ids are then joined by `+`. On data whose sums are exact in
the tensor core's window (GEMM-EXACT-BOUND) none of the first and third kind changes a bit.

<a id="gemm.model"></a>

## gemm.model.NAME

The words of 64 products were summed by another model than `blackwell`: `blackwell-snapshot` (groups whose products are
all zero raise the window's top too), `window39-k4` and `window39-k16` (a window of 39 bits, in steps of 4 or 16
products), `group64` (one group of 64), `exact` (one rounding of the exact sum), `fp32` (float32 additions in order).

* **Who:** `exact` is what float64 simulations compute, `fp32` what a dequantize-and-multiply reference does; the others
  are published candidates for Blackwell's accumulator.
* **In a dump:** results differ by an ulp or two of the accumulator, most where large groups cancel.
* **Fix:** nothing, where the device is no Blackwell; else compare with the model that its words show, and report them.

<a id="gemm.alpha"></a>

## gemm.alpha.FORM

The two tensor scales were joined in another order: `pytorch` is fl(fl(fl(alpha·A_a)·A_b)·fl(1/(36·max_a·max_b))),
`grouped` the same with 448 built in, `jax` fl(alpha·fl(fl(A_a/2688)·fl(A_b/2688))), `none` alpha alone.

* **Who:** Transformer Engine's PyTorch, grouped and JAX sides; `none`: a consumer that applies the amaxes later.
* **In a dump:** all results are off by one common factor, of one or two ulp; with `none` by amax·amax/7225344.
* **Fix:** declare the framework's order (`alpha_form`), or apply it.

<a id="gemm.split-k"></a>

## gemm.split-k.N

K was cut into N parts, accumulated apart and added in float32.

* **Who:** cuBLASLt's split-K heuristics, for small M·N and large K.
* **In a dump:** results differ by an ulp or two, none where the sums are exact.
* **Fix:** choose an algorithm without split-K where bits must repeat.

<a id="gemm.unfused-c"></a>

## gemm.unfused-c

alpha·accumulator was rounded before beta·c was added, where one fused multiply-add is expected.

* **Who:** epilogues that convert to the output type and then add, as an accumulating weight gradient in two kernels.
* **In a dump:** differences only where c is not zero, mostly of one ulp.
* **Fix:** give c and beta to the GEMM.
"""


@lru_cache(maxsize=1)
def _cases() -> dict[str, list[Case]]:
    """The tensors on which a cost is measured, by column."""
    normal = np.random.Generator(np.random.PCG64(1)).standard_normal((256, 256)).astype(ml_dtypes.bfloat16)
    wide, narrow = suggest.probe("float32"), suggest.probe("bfloat16")
    columns: dict[str, list[Case]] = {}
    for name, x in (("normal data", normal), ("boundary cases", wide)):
        transformed = x if x.dtype == ml_dtypes.bfloat16 else narrow
        columns[name] = [
            Case(name, "cost", x, directions="both"),
            Case(name, "cost", x, block=(16, 16), directions="both"),
            Case(name, "cost", transformed, directions="both", rht_t=nv.RHT()),
            *(case for case in plant.quick() if case.family == "stochastic" and name == "normal data"),
        ]
    return columns


def costs(entry: Entry) -> dict[str, str]:
    """What a deviation costs, by column."""
    found = {name: (_cost(entry, case) for case in cases) for name, cases in _cases().items()}
    return {name: next((cost for cost in some if cost is not None), "—") for name, some in found.items()}


def _cost(entry: Entry, case: Case) -> str | None:
    """The same on one tensor, for the first form of the deviation that changes an output; None: none does."""
    if entry.against:
        return None
    right = plant.conforming(case)
    for change in entry.changes:
        dump = plant.planted_entry(entry, change, case)
        if dump is None or plant.same(dump, right):
            continue
        suffix = next((s for s in plant.suffixes(case) if not _same_side(dump, right, s)), plant.suffixes(case)[0])
        before, after = (_values(one, suffix) for one in (right, dump))
        return None if before is None else _change(before, after, _target(right, suffix))
    return None


def _change(before: Array, after: Array | None, target: Array) -> str:
    """The change of the mean squared error in words."""
    if after is None:
        return "not readable as declared"
    lost = float(np.mean(~np.isfinite(after)))
    if lost:
        return f"{100 * lost:.2g} % of the values NaN"
    errors = [float(np.mean((values.astype(np.float64) - target) ** 2)) for values in (before, after)]
    cost = errors[1] / errors[0] - 1
    if cost > 1:
        return f"error ×{cost + 1:.3g}"
    return f"{100 * cost:+.2g} %" if abs(cost) >= 1e-4 else "below 0.01 %"


def _same_side(a: Dump, b: Dump, suffix: str) -> bool:
    return all(
        np.array_equal(getattr(a, name + suffix), getattr(b, name + suffix)) for name in ("packed", "scales", "amax")
    )


def _values(dump: Dump, suffix: str) -> Array | None:
    """The values a consumer decodes; None for shapes it cannot read."""
    try:
        return nv.dequantize(dump.columnwise() if suffix else dump.rowwise())
    except ValueError:
        return None


def _target(right: Dump, suffix: str) -> Array:
    """What ``te`` quantizes: x, or its transform."""
    evidence = Evidence(Side(right, suffix, right.resolve_arithmetic()))
    parts = [blocks.untile(piece.values(evidence.base)) for piece in evidence.slabs()]
    return np.concatenate(parts).astype(np.float64)


# ---- the page ----------------------------------------------------------------------------------------------


def page() -> str:
    """The whole of docs/deviations.md."""
    return "\n".join([_HEAD, *_index(), *(line for entry in DEVIATIONS.values() for line in _section(entry)), _GEMM])


def _index() -> Iterator[str]:
    yield "| id | stage | what the producer does |"
    yield "|---|---|---|"
    for entry in DEVIATIONS.values():
        yield f"| [{entry.id}](#{entry.anchor}) | {entry.stage} | {entry.what} |"


def _section(entry: Entry) -> Iterator[str]:
    yield ""
    yield f'<a id="{entry.anchor}"></a>'
    yield ""
    yield f"## {entry.id}"
    yield ""
    yield f"{entry.what[:1].upper()}{entry.what[1:]}. Stage: {entry.stage}."
    yield ""
    yield f"* **Arithmetic:** {entry.step}."
    yield f"* **Who:** {entry.seen}."
    yield f"* **In a dump:** {entry.symptom}."
    yield f"* **Cost:** {_cost_text(entry)}."
    yield f"* **Fix:** {entry.fix}."
    forms = [as_text(change) for change in entry.changes[:4]]
    if forms:
        more = " and others" if len(entry.changes) > 4 else ""
        yield f"* **Here:** {', '.join(f'`{form}`' for form in forms)}{more}."


def _cost_text(entry: Entry) -> str:
    if entry.against:
        return "that of the deviation which is declared"
    return ", ".join(f"{cost} on {name}" for name, cost in costs(entry).items())


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")

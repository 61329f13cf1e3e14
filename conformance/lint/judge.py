"""What the bytes of one matrix mean: order and shape, scales, codes.

What a correct quantizer cannot write is a fault: a NaN or negative scale, a block whose scale is normal and
that holds no ±6.  Where the bytes leave it open, nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from conformance.checkpoint import Stored
from conformance.lint.facts import NORMAL, SURE, Facts, is_declared
from conformance.lint.matrix import Array, Matrix
from conformance.lint.producers import ZERO_BLOCK, ZERO_TENSOR
from conformance.lint.report import Finding, fault, note
from nvfp4ref import layout
from nvfp4ref.container import agreed, counted


def check(facts: Facts) -> Iterator[Finding]:
    """Everything that one matrix's bytes say."""
    yield from check_order(facts)
    yield from check_scales(facts)
    yield from check_codes(facts)


def check_order(facts: Facts) -> Iterator[Finding]:
    """The stored order against the one that the family has."""
    matrix, tensor = facts.matrix, facts.tensor
    if matrix.stored is None:
        return
    if not matrix.orders:
        yield _unknown_shape(facts)
        return
    if not matrix.upright:
        if matrix.expert is None:
            yield fault(
                "scales.transposed",
                f"codes and scales are stored as columns, {tensor.packed and tensor.packed.shape}: "
                "store (R, K/2) and (R, K/16)",
            )
        return
    order = str(facts.order)
    if not is_declared(order, tensor):
        yield _wrong_order(facts, order)
    elif order == "compact" and matrix.stored != (matrix.rows, matrix.columns):
        yield fault("scales.shape", f"scales are {_shape(tensor.scales)}: reshape to {_compact(matrix)}")


def _wrong_order(facts: Facts, order: str) -> Finding:
    matrix, tensor = facts.matrix, facts.tensor
    sure = "" if facts.seen or len(matrix.orders) == 1 else " (by their shape; the values do not tell)"
    if order == "swizzled":
        return fault(
            "scales.swizzled",
            f"scales are in the 128x4 order that GEMMs read{sure}, where {tensor.family.name} stores rows: "
            f"a loader gives most blocks another block's scale; unswizzle them to {_compact(matrix)}",
            facts.blocks,
            facts.blocks,
        )
    if order == "padded":
        return fault(
            "scales.padded",
            f"scales are padded to {_shape(tensor.scales)}{sure}: cut them to {_compact(matrix)}",
        )
    if order == "transposed":
        return fault(
            "scales.transposed",
            f"scales are stored as the transpose, {_shape(tensor.scales)}{sure}: store {_compact(matrix)}",
        )
    if order == "one a tile":
        return fault(
            "scales.one-per-tile",
            f"one scale is stored for each 16x16 tile, {_shape(tensor.scales)}: repeat each over its 16 rows",
        )
    return fault(
        "scales.not-swizzled",
        f"scales are rows as they come{sure}, where {tensor.family.name} declares the 128x4 order: swizzle them",
        facts.blocks,
        facts.blocks,
    )


def _unknown_shape(facts: Facts) -> Finding:
    """Scales whose shape fits nothing, with what it looks like."""
    matrix, tensor = facts.matrix, facts.tensor
    rows, columns = matrix.rows, matrix.columns
    stored = matrix.stored
    said = f"scales are {_shape(tensor.scales)} for packed codes {_shape(tensor.packed)}, expected {_compact(matrix)}"
    if stored == (rows, columns // 2) and columns % 2 == 0:
        high = int(facts.measured.codes.sum())
        if _one_code_a_byte(facts):
            return fault(
                "packing.one-code-per-byte", f"{said}: each byte holds one code, not two; pack them", high // 2, high
            )
        return fault("blocks.size-32", f"{said}: there is one scale for 32 elements, where NVFP4 has one for 16")
    if stored == (rows, layout.padded_shape(rows, columns)[1]):
        return fault(
            "scales.padding-columns", f"{said}: columns of padding were left in; cut the rows to {columns} bytes"
        )
    return fault("scales.shape", f"{said}: the shape fits no known order of them")


def _one_code_a_byte(facts: Facts) -> bool:
    """Whether the high nibbles are all 0: half of the codes at least, and all in the first rows."""
    packed = facts.matrix.packed(0, min(facts.matrix.rows, 128))
    return not (packed >> 4).any() and bool(packed.any())


def _shape(stored: Stored | None) -> str:
    return "×".join(map(str, stored.shape)) if stored is not None else "absent"


def _compact(matrix: Matrix) -> str:
    return f"{matrix.rows}×{matrix.columns}"


# ---- scale bytes -----------------------------------------------------------------------------------------------


def check_scales(facts: Facts) -> Iterator[Finding]:
    """Bytes that no scale may be."""
    counts, total = facts.scale_counts, facts.blocks
    nan = int(counts[0x7F] + counts[0xFF])
    if nan and facts.top and facts.top < 0x78 and counts[0x70:0x78].any():
        yield fault(
            "block-scale.nan-above-240",
            f"{nan:,} of {total:,} block scales {agreed(nan, 'is', 'are')} NaN{_first(facts, _is_nan)} "
            "and none is from 256 to 448: E4M3 was taken for a format that ends at 240, as XLA does on the CPU; "
            "quantize again elsewhere",
            nan,
            total,
        )
    elif nan:
        yield fault(
            "block-scale.nan",
            f"{nan:,} of {total:,} block scales {agreed(nan, 'is', 'are')} NaN{_first(facts, _is_nan)}: "
            f"{agreed(nan, 'its', 'their')} elements are NaN; look for NaN or an amax of 0 in what was quantized",
            nan,
            total,
        )
    negative = int(counts[0x81:0xFF].sum())
    if negative:
        yield fault(
            "block-scale.negative",
            f"{negative:,} of {total:,} block scales {agreed(negative, 'is', 'are')} negative"
            f"{_first(facts, _is_negative)}, which no block amax "
            "gives: the bytes are no E4M3 scales, or the signs of elements have gone into them",
            negative,
            total,
        )
    yield from _zero_scales(facts)
    if facts.from_mxfp4:
        yield note("producer.from-mxfp4", "scales are powers of two, one for 32 elements: MXFP4 weights, cast")
    elif facts.powers_of_two:
        yield fault(
            "block-scale.power-of-two",
            "all block scales are powers of two: they were rounded as MXFP4's are, and waste E4M3's three bits",
            total,
            total,
        )
    elif facts.paired:
        yield fault(
            "blocks.size-32",
            "every two neighbouring blocks share their scale: the amax was taken over 32 elements, not 16",
            total,
            total,
        )


def _is_nan(scales: Array, matrix: Matrix, start: int) -> Array:
    return (scales & 0x7F) == 0x7F


def _is_negative(scales: Array, matrix: Matrix, start: int) -> Array:
    return (scales > 0x80) & (scales != 0xFF)


def _is_zero_over_codes(scales: Array, matrix: Matrix, start: int) -> Array:
    magnitudes = matrix.packed(start, start + len(scales)).reshape(*scales.shape, 8) & 0x77
    return np.asarray(((scales & 0x7F) == 0) & magnitudes.any(-1))


def _first(facts: Facts, wrong: Callable[[Array, Matrix, int], Array]) -> str:
    """Where the first of them is, for a sentence."""
    if facts.order is None:
        return ""
    for start, stop in facts.matrix.slabs():
        found = wrong(facts.matrix.scales(facts.order, start, stop), facts.matrix, start)
        if found.any():
            row, column = np.unravel_index(int(found.argmax()), found.shape)
            return f" (first: row {start + int(row)}, block {int(column)})"
    return ""


def _zero_scales(facts: Facts) -> Iterator[Finding]:
    counts, reading = facts.scale_counts, facts.reading
    zeros = int(counts[0] + counts[0x80])
    lost = zeros - int(reading.zero[0] + reading.zero[0x80])
    if facts.order is None or lost <= 0:
        return
    if reading.unsaturated:
        yield fault(
            "block-scale.zero",
            f"{lost:,} of {facts.blocks:,} blocks {agreed(lost, 'has', 'have')} codes other than 0 and a scale of 0"
            f"{_first(facts, _is_zero_over_codes)}: their elements are lost, and no quantizer wrote these codes "
            "for that scale",
            lost,
            facts.blocks,
        )
    else:
        yield note(
            "block-scale.underflow",
            f"{lost:,} of {facts.blocks:,} blocks {agreed(lost, 'has', 'have')} a scale of 0 over codes ±6: "
            "the block was too small for the scale, and reads as 0",
            lost,
            facts.blocks,
        )


# ---- codes -----------------------------------------------------------------------------------------------------


def check_codes(facts: Facts) -> Iterator[Finding]:
    """Codes against the scales they have."""
    if facts.all_zero:
        yield _all_zero(facts)
        return
    yield from _block_maxima(facts)
    yield from _grid(facts)
    yield from _nibbles(facts)
    yield from _tiles(facts)
    yield from _relation(facts)


def _all_zero(facts: Facts) -> Finding:
    measured, total = facts.measured, 16 * facts.blocks
    varied = np.count_nonzero(facts.scale_counts[1:0x7F]) > 1
    if varied:
        why = "the scales vary, so the input was not zero and its elements were never converted"
    elif measured.uniform in ZERO_TENSOR:
        who = ZERO_TENSOR[measured.uniform]
        why = f"bytes 0x{measured.uniform:02X}, what {who} makes of a tensor of zeros: it was never loaded or trained"
    else:
        why = "the tensor was never loaded or trained"
    return fault("codes.all-zero", f"there is no value but zero: {why}", total, total)


def _block_maxima(facts: Facts) -> Iterator[Finding]:
    """Blocks without ±6, and blocks of zeros under a scale that is not for them."""
    if facts.order is None:
        return
    reading, what = facts.reading, "block"
    total, short, low = (int(one[NORMAL].sum()) for one in (facts.scale_counts, reading.short, reading.low))
    zero = reading.zero
    if facts.repeated:
        what, zero = "16x16 tile", reading.tiles_zero
        total, short, low = (int(one[NORMAL].sum()) for one in (reading.tiles, reading.tiles_short, reading.tiles_low))
    misplaced = int(zero.sum() - sum(zero[byte] for byte in ZERO_BLOCK) - zero[0x7F] - zero[0xFF])
    if misplaced and not facts.from_mxfp4:
        yield fault(
            "codes.zero-under-scale",
            f"{misplaced:,} {what}s hold only zeros under a scale that says otherwise: their elements were lost",
            misplaced,
            total,
        )
    if not short or facts.powers_of_two or facts.paired or facts.tiled:
        return  # these leave blocks without one, and are said already
    if (shift := facts.shift) is not None:
        yield fault(
            "packing.shifted",
            f"blocks hold their ±6 only when the packed bytes are read from {shift} on: they were shifted by "
            f"{counted(shift, 'byte')}, {2 * shift} elements",
            short,
            total,
        )
        return
    hold = agreed(short, "holds", "hold")
    said = f"{short:,} of {total:,} {what}s with a normal scale {hold} no ±6, where the largest element becomes one"
    if short > total / 10 and low and total >= 16:
        yield fault(
            "codes.block-maximum",
            f"{said}: codes and scales do not belong together (another tensor, blocks of another size, a shifted "
            "or transposed matrix)",
            short,
            total,
        )
    else:
        yield note(
            "codes.block-maximum",
            f"{said}: 4over6, stochastic rounding, GPTQ or searched scales do so",
            short,
            total,
        )


def _relation(facts: Facts) -> Iterator[Finding]:
    """Scales that have nothing to do with the codes: those of another tensor, or in an order that is not tried."""
    reading, count = facts.reading, int(facts.reading.sums[0])
    if count >= 8192 and abs(reading.correlation) < 0.02 and abs(reading.certainty) < 3.5:
        yield note(
            "scales.unrelated",
            f"over {count:,} blocks, scales and codes show no relation (correlation {reading.correlation:+.3f}; "
            "weights have about -0.6): are they another tensor's, or in another order?",
        )


def _grid(facts: Facts) -> Iterator[Finding]:
    """Values that never occur among those that do."""
    counts = facts.measured.codes[:8] + facts.measured.codes[8:]
    if counts[3] == 0 and (counts[[1, 2, 4, 5]] >= 64).all():
        yield fault(
            "random.grid-without-1.5",
            f"no element of {int(counts.sum()):,} is ±1.5, though ±1 and ±2 occur: the stochastic rounding of "
            "Transformer Engine's JAX part leaves it out",
            0,
            int(counts.sum()),
        )
    if facts.tensor.family.weights and not facts.measured.codes[8:].any() and facts.blocks >= 64:
        yield note("codes.no-negative", "no element is negative: the sign bits may have been lost")


def _nibbles(facts: Facts) -> Iterator[Finding]:
    """Swapped nibbles, where neighbouring elements are alike: in weights they mostly are not."""
    beside = facts.measured.neighbours
    if beside is None:
        return
    declared, other = beside.low_first, beside.high_first
    if facts.tensor.family.packing == "high-nibble-first":
        declared, other = other, declared
    within, now, then = (float(one.mean()) for one in (beside.within, declared, other))
    sure = min(_deviations(declared - beside.within), _deviations(declared - other))
    if sure > SURE and now > 1.5 * within and abs(then - within) < (now - within) / 4:
        names = ["packing.high-nibble-first", "packing.low-nibble-first"]
        yield fault(
            names[facts.tensor.family.packing == "high-nibble-first"],
            f"neighbouring elements are alike within a byte (mean squared difference {within:.3g}), and across bytes "
            f"only if the nibbles of each are exchanged ({then:.3g}, not {now:.3g}): the elements of a byte are stored "
            "in the other order",
        )


def _deviations(differences: Array) -> float:
    """Mean in units of its own standard deviation."""
    spread = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()) / max(spread, 1e-12)


def _tiles(facts: Facts) -> Iterator[Finding]:
    """Scales of 16x16 tiles that do not repeat as they must."""
    reading, rows = facts.reading, facts.matrix.rows
    if facts.tiled:
        yield fault(
            "scales.tiled-not-repeated",
            f"row r of the scales is row r mod {rows // 16}: the rows of 16x16 tiles were laid out as a period "
            "(Transformer Engine's JAX part) and not each repeated 16 times",
            reading.changes,
            rows,
        )
    elif facts.tensor.block == (16, 16) and facts.order is not None and reading.not_repeated:
        yield fault(
            "blocks.1d-for-2d",
            f"16x16 blocks are declared, and {reading.not_repeated:,} of {rows:,} rows of scales differ from the "
            "first of their 16",
            reading.not_repeated,
            rows,
        )

"""Which word feeds which four elements: the streams against the kernels' loops and against recorded words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_philox import slow_call

import nvfp4ref as nv
from nvfp4ref import streams
from nvfp4ref.philox import calls
from nvfp4ref.streams import Philox, dispatch

Shape = tuple[int, int]
VECTORS = Path(__file__).parent.parent / "vectors"
needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason="the recordings are only in the repository")


# ---- the slow twin: every thread of a launch, in the order in which it draws -------------------------------


class Draw(NamedTuple):
    """Word ``n`` of the thread ``sequence`` goes to four elements from (r, c) on, along the row or column."""

    columnwise: bool
    r: int
    c: int
    sequence: int
    n: int


def tiles(shape: Shape, height: int = 128, width: int = 128) -> Iterator[tuple[int, int, int]]:
    """First row, first column and linear number of each thread block's tile."""
    across = -(-shape[1] // width)
    for by in range(-(-shape[0] // height)):
        for bx in range(across):
            yield by * height, bx * width, bx + by * across


def halves_first(t: int) -> tuple[int, int]:
    """The halves of a block in the order in which a thread of the tuned and 2-D kernels stores them."""
    later = t % 32 // 16
    return 8 * (later % 2), 8 * ((1 + later) % 2)


def tuned_1d(shape: Shape, rowwise: bool, columnwise: bool) -> Iterator[Draw]:
    """STREAM-TUNED-1D: 128 threads, four stages of 64x64, rowwise first."""
    for top, left, number in tiles(shape):
        for t in range(128):
            sequence, n = t + 128 * number, 0
            for y, x in ((0, 0), (0, 64), (64, 0), (64, 64)):
                for i in range(2):
                    for half in halves_first(t):
                        for e in range(2):
                            at = top + y + t // 4 + 32 * i, left + x + t % 4 * 16 + half + 4 * e
                            yield Draw(False, *at, sequence, n)
                            n += 1
                for w in range(2 if columnwise else 0):
                    for word in range(4):
                        row = (t % 32 // 2 + t // 32) % 4 * 16 + 4 * word
                        yield Draw(True, top + y + row, left + x + 2 * (t % 32) + w, sequence, n)
                        n += 1


def two_d(shape: Shape, rowwise: bool, columnwise: bool) -> Iterator[Draw]:
    """STREAM-2D: 128 threads, four stages of 32 rows, columnwise first."""
    for top, left, number in tiles(shape):
        for t in range(128):
            sequence, n = t + 128 * number, 0
            for stage in range(4):
                for i in range(2 if columnwise else 0):
                    for word in range(4):
                        yield Draw(True, top + 32 * stage + 16 * i + 4 * word, left + t, sequence, n)
                        n += 1
                for i in range(2 if rowwise else 0):
                    for half in halves_first(t):
                        for e in range(2):
                            at = top + 32 * stage + t // 8 + 16 * i, left + t % 8 * 16 + half + 4 * e
                            yield Draw(False, *at, sequence, n)
                            n += 1


def vector_blockwise(shape: Shape, rowwise: bool, columnwise: bool) -> Iterator[Draw]:
    """STREAM-VECTOR-BLOCKWISE: 256 threads, the rowwise pass and then the transposed one."""
    for top, left, number in tiles(shape):
        for t in range(256):
            sequence, n = t + 256 * number, 0
            for i in range(4 if rowwise else 0):
                for word in range(4):
                    yield Draw(False, top + t // 8 + 32 * i, left + t % 8 * 16 + 4 * word, sequence, n)
                    n += 1
            for pair in (t // 8, t // 8 + 32) if columnwise else ():
                for i in range(2):
                    for word in range(4):
                        yield Draw(True, top + t % 8 * 16 + 4 * word, left + 2 * pair + i, sequence, n)
                        n += 1


def fused_columns(top: int, left: int, base: int, steps: int) -> Iterator[Draw]:
    """Threads 128..255 of the fused kernels: a feature each, eight vectors of 16 tokens a step."""
    for step in range(steps):
        for t in range(128, 256):
            for vector in range(8):
                for word in range(4):
                    at = top + 128 * step + 16 * vector + 4 * word, left + t - 128
                    yield Draw(True, *at, t + 512 * step + base, 4 * vector + word)


def fused_rht(shape: Shape, rowwise: bool, columnwise: bool) -> Iterator[Draw]:
    """STREAM-FUSED-RHT: steps of 128 tokens, up to eight of them a tile; the rows' step is one ahead."""
    steps = -(-min(shape[0], 1024) // 128)
    for top, left, number in tiles(shape, 128 * steps):
        base = number * steps * 512
        yield from fused_columns(top, left, base, steps)
        for step in range(steps):
            for t in range(256, 512):
                u = t - 256
                for vector in range(4):
                    for word in range(4):
                        row = top + 128 * step + u // 32 * 16 + u % 32 // 2
                        at = row, left + u % 2 * 64 + 16 * vector + 4 * word
                        yield Draw(False, *at, t + (step + 1) * 512 + base, 4 * vector + word)


def grouped(shape: Shape, rowwise: bool, columnwise: bool) -> Iterator[Draw]:
    """STREAM-GROUPED: the fused columns; rows by warps of 8x4 threads, in sequences behind those."""
    steps = min(shape[0], 1024) // 128
    behind = -(-shape[1] // 128) * -(-shape[0] // (128 * steps)) * steps * 512
    for top, left, number in tiles(shape, 128 * steps):
        base = number * steps * 512
        yield from fused_columns(top, left, base, steps)
        for step in range(steps):
            for t in range(256, 512):
                warp, lane = (t - 256) // 32, t % 32
                for v in range(4):
                    for word in range(4):
                        row = top + 128 * step + warp * 4 + lane // 8 + 32 * v
                        at = row, left + lane % 8 * 16 + 4 * word
                        yield Draw(False, *at, t + (step + 1) * 512 + base + behind, 4 * v + word)


def fused_columnwise(shape: Shape, rowwise: bool, columnwise: bool) -> Iterator[Draw]:
    """STREAM-FUSED-RHT-COLUMNWISE: 128 threads, a feature each, steps of 64 tokens."""
    rows, columns = shape
    listed = {(8192, 5120): 512, (8192, 2560): 1280, (8192, 512): 256, (8192, 3584): 512}
    size = 512 if rows < 1024 or columns < 1024 else 1024
    for (m, n), tokens in listed.items():
        if shape in ((m, n), (n, m)):
            size = tokens
    steps = min(rows, size) // 64
    for top, left, number in tiles(shape, 64 * steps):
        for step in range(steps):
            for t in range(128):
                sequence = t + 256 * step + number * steps * 256
                for vector in range(4):
                    for word in range(4):
                        at = top + 64 * step + 16 * vector + 4 * word, left + t
                        yield Draw(True, *at, sequence, 4 * vector + word)


TWINS = {
    "tuned-1d": tuned_1d,
    "2d": two_d,
    "vector-blockwise": vector_blockwise,
    "fused-rht": fused_rht,
    "grouped": grouped,
    "fused-rht-columnwise": fused_columnwise,
}


def places(kernel: str, shape: Shape, rowwise: bool, columnwise: bool) -> dict[bool, np.ndarray[Any, Any]]:
    """(columnwise) -> (groups of the result, 3): sequence, call and word number, −1 where nothing draws."""
    found = {
        False: np.full((shape[0], shape[1] // 4, 3), -1),
        True: np.full((shape[1], shape[0] // 4, 3), -1),
    }
    for draw in TWINS[kernel](shape, rowwise, columnwise):
        if draw.r >= shape[0] or draw.c >= shape[1]:
            continue  # drawn for nothing: the tile reaches past the tensor
        at = (draw.c, draw.r // 4) if draw.columnwise else (draw.r, draw.c // 4)
        assert found[draw.columnwise][at][0] == -1, f"{kernel} feeds {at} twice"
        found[draw.columnwise][at] = draw.sequence, draw.n // 4, draw.n % 4
    return found


def words_of(places: np.ndarray[Any, Any], seed: int, offset: int) -> np.ndarray[Any, Any]:
    """The words at places (…, 3)."""
    assert places.min() >= 0, "a group without a word"
    sequence, call, word = np.moveaxis(places, -1, 0).astype(np.uint64)
    return np.take_along_axis(calls(seed, offset, sequence, call), word[..., None].astype(int), -1)[..., 0]


SEED, OFFSET = 0x123456789ABCDEF0, 2**64 - 3  # the offset carries into the sequence at the third call

#: kernel, shape, blocks that it takes
LAUNCHES = [
    ("tuned-1d", (32, 32), (1, 16)),
    ("tuned-1d", (160, 288), (1, 16)),
    ("tuned-1d", (256, 128), (1, 16)),
    ("2d", (32, 32), (16, 16)),
    ("2d", (160, 288), (16, 16)),
    ("2d", (288, 96), (16, 16)),
    ("vector-blockwise", (16, 16), (1, 16)),
    ("vector-blockwise", (144, 80), (1, 16)),
    ("vector-blockwise", (272, 144), (16, 16)),
    ("fused-rht", (64, 128), (1, 16)),
    ("fused-rht", (448, 256), (1, 16)),
    ("fused-rht", (1216, 256), (1, 16)),
    ("grouped", (128, 256), (1, 16)),
    ("grouped", (1280, 256), (1, 16)),
]


@pytest.mark.parametrize("directions", ["row", "column", "both"])
@pytest.mark.parametrize(("kernel", "shape", "block"), LAUNCHES)
def test_every_word_of_a_launch(kernel: str, shape: Shape, block: Shape, directions: str) -> None:
    """STREAM-*: rowwise, columnwise and both, whole tiles and partial ones."""
    if kernel == "tuned-1d" and directions == "column":
        pytest.skip("it makes no columnwise output alone")
    both = directions == "both"
    expected = places(kernel, shape, directions != "column", directions != "row")
    state = Philox(SEED, OFFSET, kernel)
    for axis, wanted in ((-1, directions != "column"), (0, directions != "row")):
        if wanted:
            found = state.words(shape, axis, both, block=block)
            np.testing.assert_array_equal(found, words_of(expected[axis == 0], SEED, OFFSET))


@pytest.mark.parametrize(
    "shape", [(64, 128), (448, 128), (1088, 1024), (256, 8192), (8192, 256), (512, 8192)]
)
def test_every_word_of_the_columnwise_fused_kernel(shape: Shape) -> None:
    """STREAM-FUSED-RHT-COLUMNWISE"""
    expected = places("fused-rht-columnwise", shape, False, True)[True]
    found = Philox(SEED, OFFSET, "fused-rht-columnwise").words(shape, 0)
    np.testing.assert_array_equal(found, words_of(expected, SEED, OFFSET))


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((5120, 8192), 512), ((8192, 5120), 512), ((2560, 8192), 1280), ((8192, 2560), 1280),
        ((512, 8192), 256), ((8192, 512), 256), ((3584, 8192), 512), ((8192, 3584), 512),
        ((8192, 8192), 1024), ((1024, 1024), 1024), ((960, 8192), 512), ((8192, 896), 512), ((320, 2048), 320),
    ],
)  # fmt: skip
def test_the_tiles_of_the_columnwise_fused_kernel(shape: Shape, tokens: int) -> None:
    """STREAM-FUSED-RHT-COLUMNWISE: the listed shapes, either way round; sequences jump where a tile ends."""
    r = np.arange(0, shape[0], 16, np.uint64)
    place = streams.Place(r, np.uint64([130]), shape, False)
    sequence, call, _ = (np.asarray(a, int) for a in streams.KERNELS["fused-rht-columnwise"].column(place))  # type: ignore[misc]
    assert tokens % 64 == 0
    across, step = -(-shape[1] // 128), np.asarray(r, int) // 64
    number = 1 + step // (tokens // 64) * across
    expected = 2 + step % (tokens // 64) * 256 + number * (tokens // 64) * 256
    np.testing.assert_array_equal(sequence, expected)
    np.testing.assert_array_equal(call, np.asarray(r, int) % 64 // 16)


def test_one_word_through_everything_by_hand() -> None:
    """STREAM-TUNED-1D, PHILOX-COUNTER: row 37, elements 84..87 of a tile's second column of tiles."""
    # tile 1, stage (0, 64) which is the second; thread (37 % 32)·4 + (84 − 64) div 16 = 21; its second row, so
    # words 12..15, call 3; lanes 16..31 store elements 8..15 first, and so elements 4..7 last
    expected = slow_call(5, 6, sequence=21 + 128, call=3)[3]
    assert Philox(5, 6, "tuned-1d").words((64, 256))[37, (128 + 84) // 4] == expected


# ---- no word twice -----------------------------------------------------------------------------------------


def identities(kernel: str, shape: Shape, both: bool) -> list[tuple[int, int]]:
    """(sequence, call) of every block of a launch, both sides when it makes both."""
    found: list[tuple[int, int]] = []
    rows, columns = (np.arange(n, dtype=np.uint64) for n in shape)
    sides = {
        "row": (streams.KERNELS[kernel].row, streams.Place(rows[:, None], columns[None, ::16], shape, both)),
        "column": (
            streams.KERNELS[kernel].column,
            streams.Place(rows[None, ::16], columns[:, None], shape, both),
        ),
    }
    for side, (rule, place) in sides.items():
        if rule is not None and (both or side == "row"):
            sequence, call, _ = np.broadcast_arrays(*rule(place))
            found += list(zip(sequence.ravel().tolist(), call.ravel().tolist(), strict=True))
    return found


@pytest.mark.parametrize("kernel", ["tuned-1d", "2d", "vector-blockwise", "fused-rht", "grouped"])
@pytest.mark.parametrize("shape", [(256, 384), (2176, 256)])
def test_no_word_serves_two_blocks_of_a_launch(kernel: str, shape: Shape) -> None:
    """STREAM-*: over both outputs of one launch, and over one output alone."""
    for both in (False, True):
        found = identities(kernel, shape, both)
        assert len(found) == shape[0] * shape[1] // 16 * (1 + both)
        assert len(set(found)) == len(found)


def test_the_swap_is_within_a_block() -> None:
    """STREAM-TUNED-1D, STREAM-2D: half a warp gives its first two words to its block's second half."""
    rows, columns = np.arange(128, dtype=np.uint64)[:, None], np.arange(0, 128, 16, dtype=np.uint64)[None]
    for kernel in ("tuned-1d", "2d"):
        call = streams.KERNELS[kernel].row(streams.Place(rows, columns, (128, 128), False))  # type: ignore[misc]
        swapped = np.broadcast_to(call.swapped, (128, 8))
        assert swapped.sum() == 512 and set(np.unique(swapped)) == {0, 1}


def test_jax_feeds_both_directions_from_one_stream() -> None:
    """STREAM-FUSED-RHT-COLUMNWISE beside STREAM-TUNED-1D, as Transformer Engine's JAX side launches them.

    One state for two launches: the rowwise kernel's threads and the columnwise one's have the same sequences.
    """
    shape = (256, 256)
    rowwise = Philox(1234, 0, "tuned-1d").words(shape, -1, False).reshape(-1, 4)
    columnwise = Philox(1234, 0, "fused-rht-columnwise").words(shape, 0).reshape(-1, 4)
    # the four words of a call, whichever half of the block they go to first
    calls_of = [{frozenset(words) for words in side.tolist()} for side in (rowwise, columnwise)]
    shared = calls_of[0] & calls_of[1]
    assert len(calls_of[0]) == len(calls_of[1]) == 4096
    assert len(shared) == 1024  # a quarter of the blocks
    apart = Philox(1234, 0, "fused-rht")  # PyTorch's launch makes both, and keeps them apart
    row, column = (apart.words(shape, axis, True).reshape(-1, 4) for axis in (-1, 0))
    assert not {frozenset(w) for w in row.tolist()} & {frozenset(w) for w in column.tolist()}


# ---- recorded words ----------------------------------------------------------------------------------------


def recorded(folder: str) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((VECTORS / folder / "index.json").read_text())
    return index


FAMILIES = {"tuned": "tuned-1d", "twod": "2d", "vb": "vector-blockwise"}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@needs_vectors
def test_every_recorded_word() -> None:
    """STREAM-TUNED-1D, STREAM-2D, STREAM-VECTOR-BLOCKWISE, DISPATCH: words dumped by the running kernels."""
    compared = dict.fromkeys(FAMILIES.values(), 0)
    arrays = {family: np.load(VECTORS / "te-kernels-h200" / f"{family}.npz") for family in FAMILIES}
    for name, case in recorded("te-kernels-h200")["cases"].items():
        for axis, output in ((-1, "rbits"), (0, "rbits_t")):
            if output not in case["outputs"]:
                continue
            flags, kernel = case["flags"], FAMILIES[case["family"]]
            words = arrays[case["family"]][case["outputs"][output]]
            how = {
                "both": flags["dir"] == "both",
                "dtype": DTYPES[case["dtype"]],
                "block": (16, 16) if flags.get("q2d") == "1" else (1, 16),
            }
            for named in (kernel, "auto"):
                state = Philox(int(flags["seed"], 0), int(flags["off"], 0), named)
                found = state.words(tuple(case["shape"]), axis, **how)
                assert found.shape == words.shape and found.dtype == np.uint32, name
                assert not np.count_nonzero(found != words), (name, output, named)
            compared[kernel] += words.size
    assert compared == {"tuned-1d": 62_464, "2d": 58_368, "vector-blockwise": 31_360}


# ---- which kernel runs -------------------------------------------------------------------------------------

BF16, F16, F32 = "bfloat16", "float16", "float32"
LINES, TILES = (1, 16), (16, 16)

#: shape, dtype, block, both, rht -> (kernel of the rowwise output, of the columnwise one)
DISPATCHED = [
    ((128, 128), BF16, LINES, False, False, "tuned-1d", "vector-blockwise"),
    ((128, 128), BF16, LINES, True, False, "tuned-1d", "tuned-1d"),
    ((32, 32), BF16, LINES, True, False, "tuned-1d", "tuned-1d"),
    ((128, 128), BF16, TILES, False, False, "2d", "2d"),
    ((96, 160), BF16, TILES, True, False, "2d", "2d"),
    ((144, 128), BF16, LINES, True, False, "vector-blockwise", "vector-blockwise"),
    ((128, 144), BF16, LINES, True, False, "vector-blockwise", "vector-blockwise"),
    ((144, 80), BF16, TILES, True, False, "vector-blockwise", "vector-blockwise"),
    ((128, 128), F16, LINES, True, False, "vector-blockwise", "vector-blockwise"),
    ((128, 128), F32, LINES, False, False, "vector-blockwise", "vector-blockwise"),
    ((128, 128), F32, TILES, True, False, "vector-blockwise", "vector-blockwise"),
    ((128, 128), BF16, LINES, True, True, "fused-rht", "fused-rht"),
    ((64, 128), BF16, LINES, False, True, "fused-rht", "fused-rht"),
    ((96, 128), BF16, LINES, False, True, "tuned-1d", "unfused-rht"),
    ((128, 192), BF16, LINES, False, True, "tuned-1d", "unfused-rht"),
    ((144, 80), BF16, LINES, False, True, "vector-blockwise", "unfused-rht"),
]


@pytest.mark.parametrize(("shape", "dtype", "block", "both", "rht", "row", "column"), DISPATCHED)
def test_dispatch(
    shape: Shape, dtype: str, block: Shape, both: bool, rht: bool, row: str, column: str
) -> None:
    """DISPATCH; and "auto" gives the words of the kernel named."""
    for axis, kernel in ((-1, row), (0, column)):
        assert dispatch(shape, axis, dtype=dtype, block=block, both=both, rht=rht) == kernel
        how = {"dtype": dtype, "block": block}
        auto = Philox(3, 4).words(shape, axis, both, rht=rht, **how)  # type: ignore[arg-type]
        np.testing.assert_array_equal(auto, Philox(3, 4, kernel).words(shape, axis, both, **how))  # type: ignore[arg-type]


def test_unfused_rht_quantizes_the_transpose_rowwise() -> None:
    """STREAM-UNFUSED-RHT"""
    found = Philox(3, 4, "unfused-rht").words((96, 160), 0)
    np.testing.assert_array_equal(found, Philox(3, 4, "tuned-1d").words((160, 96), -1, False))
    found = Philox(3, 4, "unfused-rht", both=True).words((144, 80), 0)
    np.testing.assert_array_equal(found, Philox(3, 4, "vector-blockwise").words((80, 144), -1, False))


def test_both_of_the_call_beats_both_of_the_state() -> None:
    for kernel, block in (("tuned-1d", LINES), ("2d", TILES)):
        one, two = (Philox(3, 4, kernel, both).words((128, 128), block=block) for both in (False, True))
        assert (one != two).mean() > 0.4
        np.testing.assert_array_equal(
            Philox(3, 4, kernel, True).words((128, 128), -1, False, block=block), one
        )
        np.testing.assert_array_equal(
            Philox(3, 4, kernel, False).words((128, 128), -1, True, block=block), two
        )


def test_rounds_and_state_change_the_words() -> None:
    """PHILOX-ROUNDS"""
    base = Philox(3, 4).words((32, 32))
    for other in (
        Philox(3, 5),
        Philox(4, 4),
        Philox(3 + 2**32, 4),
        Philox(3, 4 + 2**32),
        Philox(3, 4, rounds=7),
    ):
        assert (other.words((32, 32)) != base).mean() > 0.99
    expected = calls(3, 4, np.uint64([0]), np.uint64([0]), 7)[0]
    np.testing.assert_array_equal(Philox(3, 4, rounds=7).words((32, 32))[0, :4], expected)


def test_the_state_is_a_value() -> None:
    assert Philox(1, 2) == Philox(1, 2, "auto", False, 10) != Philox(1, 3)
    assert len({Philox(1, 2), Philox(1, 2)}) == 1
    with pytest.raises(AttributeError):
        Philox(1, 2).seed = 3  # type: ignore[misc]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Philox(-1, 0), ValueError, "seed is 64 bits wide"),
        (lambda: Philox(0, 2**64), ValueError, "offset is 64 bits wide.*got 18446744073709551616"),
        (lambda: Philox(0, -1), ValueError, "offset is 64 bits wide.*got -1"),
        (lambda: Philox(0.5, 0), TypeError, "seed is an integer; got float"),
        (lambda: Philox(True, 0), TypeError, "seed is an integer; got bool"),
        (lambda: Philox(0, None), TypeError, "offset is an integer; got NoneType"),
        (
            lambda: Philox(0, 0, "tuned"),
            ValueError,
            "unknown kernel 'tuned'; the kernels are auto, tuned-1d, 2d",
        ),
        (lambda: Philox(0, 0, rounds=0), ValueError, "rounds is an integer from 1 to 32"),
        (lambda: Philox(0, 0, rounds="ten"), ValueError, "rounds is an integer from 1 to 32.*got 'ten'"),
        (lambda: Philox(0, 0).words((16,)), ValueError, r"a matrix \(R, C\); got shape \(16,\)"),
        (lambda: Philox(0, 0).words((4, 16, 16)), ValueError, "a matrix"),
        (lambda: Philox(0, 0).words((0, 16)), ValueError, r"got shape \(0, 16\)"),
        (lambda: Philox(0, 0).words((16, 16), 1), ValueError, "axis is -1 or 0; got 1"),
        (lambda: Philox(0, 0).words((16, 24)), ValueError, r"\(16, 24\) has 24 elements along axis -1"),
        (lambda: Philox(0, 0).words((24, 16), 0), ValueError, r"\(24, 16\) has 24 elements along axis 0"),
        (
            lambda: Philox(0, 0, "tuned-1d").words((48, 64)),
            ValueError,
            "rows in multiples of 32 and columns in",
        ),
        (lambda: Philox(0, 0, "2d").words((32, 48), block=(16, 16)), ValueError, r"'2d' takes.*\(32, 48\)"),
        (
            lambda: Philox(0, 0, "fused-rht").words((64, 64)),
            ValueError,
            "multiples of 64 and columns in mul.* 128",
        ),
        (lambda: Philox(0, 0, "fused-rht").words((96, 128)), ValueError, "multiples of 64"),
        (lambda: Philox(0, 0, "grouped").words((64, 128)), ValueError, "multiples of 128"),
        (
            lambda: Philox(0, 0, "tuned-1d").words((32, 32), dtype="float32"),
            ValueError,
            "takes bfloat16; got float32",
        ),
        (
            lambda: Philox(0, 0, "2d").words((32, 32), dtype="float16", block=(16, 16)),
            ValueError,
            "'vector-blockw",
        ),
        (
            lambda: Philox(0, 0, "tuned-1d").words((32, 32), block=(16, 16)),
            ValueError,
            "'tuned-1d' has no 16x16 blo",
        ),
        (lambda: Philox(0, 0, "2d").words((32, 32)), ValueError, "'2d' has no 1x16 blocks"),
        (
            lambda: Philox(0, 0, "fused-rht").words((64, 128), block=(16, 16)),
            ValueError,
            "has no 16x16 blocks",
        ),
        (lambda: Philox(0, 0, "fused-rht-columnwise").words((64, 128)), ValueError, "columnwise output only"),
        (lambda: Philox(0, 0, "unfused-rht").words((64, 128)), ValueError, "columnwise output; use axis=0"),
    ],
)
def test_refusals_say_what_to_do(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_the_names_are_the_interface() -> None:
    fused = {"fused-rht", "fused-rht-columnwise", "grouped"}
    assert set(streams.NAMES) == {"auto", "tuned-1d", "2d", "vector-blockwise", "unfused-rht"} | fused
    assert nv.Philox is Philox

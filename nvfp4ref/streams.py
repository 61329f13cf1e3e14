"""Which random word feeds which four elements, in every Transformer Engine kernel, and which kernel runs.

In all of them one Philox call serves one block of 16 elements: its four words go to elements 0-3, 4-7, 8-11
and 12-15, or, where half the lanes of a warp start with the second half of their block, to 8-11, 12-15, 0-3,
4-7.  A kernel is therefore a map from a block's place in x to (sequence, call, swapped).
Rules STREAM-TUNED-1D, STREAM-2D, STREAM-VECTOR-BLOCKWISE, STREAM-UNFUSED-RHT, STREAM-FUSED-RHT,
STREAM-FUSED-RHT-COLUMNWISE, STREAM-GROUPED, DISPATCH.

The first four maps were checked against words recorded from the running kernels; the fused and grouped
ones come from the source and await a Blackwell run (docs/evidence.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .philox import U32, U64, calls, require_rounds, require_uint64

TILE = 128


class Place(NamedTuple):
    """Blocks of the result by their place in x (R, C): arrays that broadcast to (rows, blocks) of the result."""

    r: U64  # row of the block's first element in x
    c: U64  # column of it
    shape: tuple[int, int]  # of x
    both: bool  # the launch made both directions

    @property
    def tile(self) -> U64:
        """Linear index of the 128x128 tile."""
        across = np.uint64(-(-self.shape[1] // TILE))
        return self.c // np.uint64(TILE) + self.r // np.uint64(TILE) * across


class Call(NamedTuple):
    """The Philox call that serves a block; ``swapped`` when its first two words go to the block's second half."""

    sequence: U64
    call: U64
    swapped: U64


def _none(a: U64) -> U64:
    return np.zeros_like(a)


def _tuned_1d_row(p: Place) -> Call:
    stage = 2 * (p.r % 128 // 64) + p.c % 128 // 64
    r, c = p.r % 64, p.c % 64
    thread = r % 32 * 4 + c // 16
    return Call(thread + 128 * p.tile, stage * (4 if p.both else 2) + r // 32, thread % 32 // 16)


def _tuned_1d_column(p: Place) -> Call:
    stage = 2 * (p.r % 128 // 64) + p.c % 128 // 64
    r, c = p.r % 64, p.c % 64
    lane = c // 2
    warp = (r // 16 + 64 - lane // 2) % 4
    return Call(32 * warp + lane + 128 * p.tile, 4 * stage + 2 + c % 2, _none(r + c))


def _two_d_row(p: Place) -> Call:
    stage, r, c = p.r % 128 // 32, p.r % 32, p.c % 128
    thread = r % 16 * 8 + c // 16
    first = 2 if p.both else 0
    return Call(thread + 128 * p.tile, stage * (4 if p.both else 2) + first + r // 16, thread % 32 // 16)


def _two_d_column(p: Place) -> Call:
    stage, r, c = p.r % 128 // 32, p.r % 32, p.c % 128
    return Call(c + 128 * p.tile, stage * (4 if p.both else 2) + r // 16, _none(r + c))


def _vector_blockwise_row(p: Place) -> Call:
    r, c = p.r % 128, p.c % 128
    return Call(r % 32 * 8 + c // 16 + 256 * p.tile, r // 32 + _none(c), _none(r + c))


def _vector_blockwise_column(p: Place) -> Call:
    r, c = p.r % 128, p.c % 128
    first = 4 if p.both else 0
    return Call(c % 64 // 2 * 8 + r // 16 + 256 * p.tile, first + c // 64 * 2 + c % 2 + _none(r), _none(r + c))


def _fused(p: Place, steps: int) -> tuple[U64, U64]:
    """(linear index of the tile of 128 features by ``steps``·128 tokens, 128-token step inside it)."""
    across = np.uint64(-(-p.shape[1] // TILE))
    token_step = p.r // TILE
    return p.c // TILE + token_step // steps * across, token_step % steps


def _fused_column(p: Place) -> Call:
    steps = -(-min(p.shape[0], 1024) // TILE)
    linear, step = _fused(p, steps)
    return Call(128 + p.c % 128 + step * 512 + linear * (steps * 512), p.r % 128 // 16 + _none(p.c), _none(p.r + p.c))


def _fused_row(p: Place) -> Call:
    steps = -(-min(p.shape[0], 1024) // TILE)
    linear, step = _fused(p, steps)
    token, feature = p.r % 128, p.c % 128
    thread = 256 + token // 16 * 32 + token % 16 * 2 + feature // 64
    # the kernel advances its step before it forms the sequence
    return Call(thread + (step + 1) * 512 + linear * (steps * 512), feature % 64 // 16 + _none(p.r), _none(p.r + p.c))


def _grouped_row(p: Place) -> Call:
    steps = min(p.shape[0], 1024) // TILE
    linear, step = _fused(p, steps)
    token, feature = p.r % 128, p.c % 128
    thread = 256 + token % 32 // 4 * 32 + token % 4 * 8 + feature // 16
    tiles = -(-p.shape[1] // TILE) * -(-p.shape[0] // (TILE * steps))
    sequence = thread + (step + 1) * 512 + (linear + tiles) * (steps * 512)
    return Call(sequence, token // 32 + _none(p.c), _none(p.r + p.c))


#: (columns, rows) -> tokens a tile, where it is not 1024; a dimension below 1024 gives 512
_COLUMNWISE_TILE = {(8192, 5120): 512, (8192, 2560): 1280, (8192, 512): 256, (8192, 3584): 512}


def _fused_columnwise(p: Place) -> Call:
    rows, columns = p.shape
    default = 512 if min(rows, columns) < 1024 else 1024
    size = _COLUMNWISE_TILE.get((columns, rows), _COLUMNWISE_TILE.get((rows, columns), default))
    steps = max(1, min(rows, size) // 64)
    step = p.r // 64
    linear = p.c // TILE + step // steps * np.uint64(-(-columns // TILE))
    sequence = p.c % 128 + step % steps * 256 + linear * (steps * 256)
    return Call(sequence, p.r % 64 // 16 + _none(p.c), _none(p.r + p.c))


class Kernel(NamedTuple):
    """A kernel's two maps and what it accepts: (multiple of rows, of columns), dtype bfloat16 only, block shapes."""

    row: Callable[[Place], Call] | None
    column: Callable[[Place], Call] | None
    multiples: tuple[int, int]
    bfloat16_only: bool
    blocks: tuple[tuple[int, int], ...]


_BOTH_BLOCKS = ((1, 16), (16, 16))
KERNELS: dict[str, Kernel] = {
    "tuned-1d": Kernel(_tuned_1d_row, _tuned_1d_column, (32, 32), True, ((1, 16),)),
    "2d": Kernel(_two_d_row, _two_d_column, (32, 32), True, ((16, 16),)),
    "vector-blockwise": Kernel(_vector_blockwise_row, _vector_blockwise_column, (1, 16), False, _BOTH_BLOCKS),
    "fused-rht": Kernel(_fused_row, _fused_column, (64, 128), True, ((1, 16),)),
    "fused-rht-columnwise": Kernel(None, _fused_columnwise, (64, 128), True, ((1, 16),)),
    "grouped": Kernel(_grouped_row, _fused_column, (128, 128), True, ((1, 16),)),
}
NAMES = ("auto", *KERNELS, "unfused-rht")


def dispatch(
    shape: tuple[int, int],
    axis: int,
    *,
    dtype: str,
    block: tuple[int, int] = (1, 16),
    both: bool = False,
    rht: bool = False,
) -> str:
    """The kernel that Transformer Engine's PyTorch side launches (rule DISPATCH).

    Args:
        shape: of x; axis: −1 or 0, the output asked about; dtype: "bfloat16", "float16" or "float32".
        both: the same call makes the other output too.
        rht: the columnwise output goes through the Hadamard transform.
    """
    rows, columns = shape
    if rht and dtype == "bfloat16" and rows % 64 == 0 and columns % 128 == 0:
        return "fused-rht"
    if rht and axis == 0:
        return "unfused-rht"
    optimized = dtype == "bfloat16" and rows % 32 == 0 and columns % 32 == 0
    if optimized and block == (16, 16):
        return "2d"
    if optimized and (axis == -1 or both):
        return "tuned-1d"
    return "vector-blockwise"


@dataclass(frozen=True)
class Philox:
    """The random words of one quantization, from the generator's state.

    Args:
        seed, offset: ``rng_state`` of the launch, 64 bits each; the offset counts 128-bit calls.
        kernel: which kernel ran, or "auto" for the one that Transformer Engine dispatches to.
        both: that launch made the rowwise and the columnwise output.
        rounds: of Philox4x32.
    Raises:
        TypeError, ValueError: a seed or offset that is not 64 bits, an unknown kernel, bad rounds.
    """

    seed: int
    offset: int
    kernel: str = "auto"
    both: bool = False
    rounds: int = 10

    def __post_init__(self) -> None:
        require_uint64(self.seed, "seed")
        require_uint64(self.offset, "offset")
        if self.kernel not in NAMES:
            raise ValueError(f"unknown kernel {self.kernel!r}; the kernels are {', '.join(NAMES)}")
        require_rounds(self.rounds)

    def words(
        self,
        shape: tuple[int, int],
        axis: int = -1,
        both: bool | None = None,
        *,
        dtype: str = "bfloat16",
        block: tuple[int, int] = (1, 16),
        rht: bool = False,
    ) -> U32:
        """The words for x of ``shape`` (R, C): uint32 (R, C/4) for axis −1, (C, R/4) for axis 0.

        ``dtype``, ``block`` and ``rht`` matter to "auto" only, and to the check that the kernel takes them.
        Raises ValueError when the kernel does not accept that shape, dtype, block or direction.
        """
        rows, columns = _checked_shape(shape, axis)
        both = self.both if both is None else both
        name = self.kernel
        if name == "auto":
            name = dispatch((rows, columns), axis, dtype=dtype, block=block, both=both, rht=rht)
            both = both and (not rht or name == "fused-rht")  # a transform that is not fused launches each apart
        if name == "unfused-rht":
            # the transform is written out as a [C, R] tensor, which is then quantized rowwise
            if axis != 0:
                raise ValueError("the kernel 'unfused-rht' makes the columnwise output; use axis=0")
            inner = dispatch((columns, rows), -1, dtype=dtype, block=block)
            return replace(self, kernel=inner).words((columns, rows), -1, False, dtype=dtype, block=block)
        if name == "tuned-1d" and axis == 0 and not both:
            raise ValueError(
                "the kernel 'tuned-1d' makes the columnwise output only together with the rowwise one: say both=True; "
                "alone it is made by 'vector-blockwise'"
            )
        return self._words(name, (rows, columns), axis, both, dtype, block)

    def _words(
        self, name: str, shape: tuple[int, int], axis: int, both: bool, dtype: str, block: tuple[int, int]
    ) -> U32:
        kernel = KERNELS[name]
        rule = kernel.row if axis == -1 else kernel.column
        _require_accepted(name, kernel, rule, shape, axis, dtype, block)
        assert rule is not None
        rows, columns = (np.arange(n, dtype=np.uint64) for n in shape)
        if axis == -1:
            place = Place(rows[:, None], columns[None, ::16], shape, both)
        else:
            place = Place(rows[None, ::16], columns[:, None], shape, both)
        found = rule(place)
        words = calls(self.seed, self.offset, found.sequence, found.call, self.rounds)
        swapped = np.broadcast_to(found.swapped, words.shape[:-1]) != 0
        words[swapped] = words[swapped][:, [2, 3, 0, 1]]
        return words.reshape(words.shape[0], -1)


def _checked_shape(shape: tuple[int, int], axis: int) -> tuple[int, int]:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"words are asked for a matrix (R, C); got shape {shape!r}")
    if axis not in (-1, 0):
        raise ValueError(f"axis is -1 or 0; got {axis!r}")
    if shape[axis] % 16:
        raise ValueError(f"shape {tuple(shape)} has {shape[axis]} elements along axis {axis}, not a multiple of 16")
    return int(shape[0]), int(shape[1])


def _require_accepted(
    name: str,
    kernel: Kernel,
    rule: Callable[[Place], Call] | None,
    shape: tuple[int, int],
    axis: int,
    dtype: str,
    block: tuple[int, int],
) -> None:
    if rule is None:
        raise ValueError(f"the kernel {name!r} makes the columnwise output only; use axis=0")
    if shape[0] % kernel.multiples[0] or shape[1] % kernel.multiples[1]:
        raise ValueError(
            f"the kernel {name!r} takes rows in multiples of {kernel.multiples[0]} and columns in multiples of "
            f"{kernel.multiples[1]}; got shape {shape}"
        )
    if kernel.bfloat16_only and dtype != "bfloat16":
        raise ValueError(f"the kernel {name!r} takes bfloat16; got {dtype}: 'vector-blockwise' takes the others")
    if tuple(block) not in kernel.blocks:
        raise ValueError(f"the kernel {name!r} has no {block[0]}x{block[1]} blocks")

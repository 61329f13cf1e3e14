"""One direction of a dump beside the oracle: what was found, and what is expected of it stage by stage.

The amax or global scale that the producer recorded is taken as given, so that a departure in one stage does
not hide those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

import nvfp4ref as nv
from conformance import layouts
from conformance.count import Array, count
from nvfp4ref import hadamard, layout, scaling
from nvfp4ref.dump import Dump
from nvfp4ref.quantize import Job, prepare, quantize_tiles, random_tiles, steps_of
from nvfp4ref.tensor import Steps


class Declared:
    """Stands for what the dump declares."""


DECLARED = Declared()


class Quantized(NamedTuple):
    """Packed codes (R, K/2) and compact scale bytes (R, K/16) of rows of the result."""

    packed: Array
    scales: Array


@dataclass(frozen=True)
class Side:
    """One direction: ``suffix`` "" is the rowwise output, "_t" the columnwise one.  Shapes are the result's.

    ``dump.x`` may be None; then only what was found can be asked for.
    """

    dump: Dump
    suffix: str
    arithmetic: nv.Arithmetic

    @property
    def direction(self) -> str:
        """The direction in a word, for sentences."""
        return "columnwise" if self.suffix else "rowwise"

    # ---- found ---------------------------------------------------------------------------------------------

    def found(self, name: str) -> Any:
        """The recorded array of that name in this direction, or None."""
        return getattr(self.dump, name + self.suffix)

    @property
    def shape(self) -> tuple[int, int]:
        """(R, K) of the result."""
        rows, half = self.found("packed").shape
        return rows, 2 * half

    @property
    def rht(self) -> nv.RHT | None:
        """The transform that the dump declares for this direction."""
        return self.dump.transform(columnwise=bool(self.suffix))

    @property
    def declared_scales(self) -> Array | None:
        """Compact scales (R, K/16) read as the dump declares, None when the stored shape does not allow it."""
        stored, (rows, columns) = self.found("scales"), (self.shape[0], self.shape[1] // 16)
        return layouts.read(stored, rows, columns, self.dump.scale_layout)

    # ---- expected ------------------------------------------------------------------------------------------

    def job(
        self,
        arithmetic: nv.Arithmetic | None = None,
        *,
        rht: nv.RHT | None | Declared = DECLARED,
        block: tuple[int, int] | None = None,
    ) -> Job:
        """What the oracle needs to quantize this direction: as declared, or with something replaced.

        Raises ValueError when a transform does not fit the input, or the random words the rule.
        """
        arithmetic = arithmetic or self.arithmetic
        wanted = self.rht if isinstance(rht, Declared) else rht
        if wanted == self.rht and arithmetic.rht_sum == self.arithmetic.rht_sum:
            (matrix, _, axis), wanted = self._values, None  # transformed once for all
        else:
            matrix, axis = self.x, 0 if self.suffix else -1
        block = block or self.dump.block
        job = prepare(matrix, block, axis, wanted, self.amax, arithmetic)
        if self._replacement is not None:
            job = job._replace(scale=self._replacement)
        if self.words is not None:
            random = random_tiles(self.words, matrix, axis, block, False, arithmetic)
            job = job._replace(random=random)
        return job

    @cached_property
    def true_amax(self) -> Array:
        """max(abs(.)) of the values that are quantized: (1,), or (R,) when row-scaled."""
        return prepare(*self._values, None, None, self.arithmetic).amax.reshape(-1)

    @property
    def x(self) -> Array:
        """The input.  ValueError when the dump has none."""
        if self.dump.x is None:
            raise ValueError("the dump has no input x")
        return self.dump.x

    @cached_property
    def _values(self) -> tuple[Array, tuple[int, int], int]:
        """The values that are quantized, after the declared transform, as ``prepare`` takes them."""
        axis = 0 if self.suffix else -1
        if self.rht is None:
            return self.x, self.dump.block, axis
        return hadamard.transform(self.x, self.rht, axis, self.arithmetic.rht_sum), self.dump.block, -1

    @property
    def amax(self) -> Array:
        """The amax that scales and codes are judged with: the recorded one where there is one."""
        recorded = self.found("amax")
        value = self.true_amax if recorded is None else recorded
        return value if self.arithmetic.row_scaled else value.reshape(())

    @cached_property
    def expected_global_scale(self) -> Array:
        """What the producer should have stored as global scale, in the form and shape of what it stored."""
        scale = prepare(*self._values, None, self.amax, self.arithmetic).scale
        value = scale.encode if self.dump.global_scale_form == "encode" else scale.decode
        return np.asarray(value, np.float32).reshape(-1)

    @cached_property
    def _replacement(self) -> scaling.GlobalScale | None:
        """The recorded global scale where it is not the one that its amax gives, and so replaces that."""
        recorded = self.found("global_scale")
        if recorded is None or not count(recorded, self.expected_global_scale).different:
            return None
        scale = recorded.reshape(-1, 1) if self.arithmetic.row_scaled else recorded.reshape(())
        with np.errstate(all="ignore"):
            return scaling.from_recorded(scale, self.dump.global_scale_form or "encode")

    @cached_property
    def expected(self) -> Quantized:
        """Codes and scales by the declared arithmetic, from the recorded amax or global scale."""
        if self._replacement is not None:
            return quantized(self.job())
        matrix, block, axis = self._values
        rounding = {} if self.words is None else {"rounding": "stochastic", "rbits": self.words}
        how: dict[str, Any] = {
            "block": block,
            "axis": axis,
            "amax": self.amax,
            "arithmetic": self.arithmetic,
            **rounding,
        }
        q = nv.quantize(matrix, **how)
        return Quantized(q.packed, q.scales)

    @cached_property
    def values(self) -> Array:
        """The values that are quantized, (R, K), for reading single elements."""
        matrix, _, axis = self._values
        return matrix if axis == -1 else matrix.T

    @cached_property
    def steps(self) -> Steps:
        """Every intermediate of ``expected``, by nearest-even rounding."""
        return steps_of(self.nearest().job(), transformed=False)

    @cached_property
    def words(self) -> Array | None:
        """The random numbers of this direction, recorded or made from the recorded state; None for nearest-even.

        Raises ValueError when a stochastic dump has neither.
        """
        if self.dump.rounding == "nearest-even":
            return None
        recorded: Array | None = self.found("rbits")
        if recorded is not None:
            return recorded
        state = self.found("rng") or self.dump.rng
        if state is None:
            raise ValueError(f"rounding is stochastic, but the dump has neither rbits{self.suffix} nor rng")
        philox = nv.Philox(**{"offset": 0, **state})
        how = {"dtype": self.x.dtype.name, "block": self.dump.block, "rht": self.dump.rht_t is not False}
        return philox.words(self.x.shape, 0 if self.suffix else -1, **how)

    def nearest(self) -> Side:
        """This direction as if its rounding were nearest-even: for the outputs that do not depend on it."""
        if self.dump.rounding == "nearest-even":
            return self
        dump = replace(self.dump, rounding="nearest-even", rbits=None, rbits_t=None)
        return Side(dump, self.suffix, self.arithmetic)


def slabs(rows: int, columns: int) -> list[slice]:
    """Rows of a (rows, columns) matrix of blocks in pieces of whole 16x16 tiles, about 2^18 elements each."""
    tall = max(16, 2**18 // (16 * columns) // 16 * 16)
    return [slice(start, min(start + tall, rows)) for start in range(0, rows, tall)]


def quantized(job: Job) -> Quantized:
    """Packed codes and stored scales of a job."""
    _, rows, columns = job.tiles.shape
    packed, scales = np.empty((rows, columns * 8), np.uint8), np.empty((rows, columns), np.uint8)
    for slab in slabs(rows, columns):
        codes, scales[slab] = quantize_tiles(job.part(slab, slice(None)))
        layout.pack_tiles(codes, job.arithmetic.packing, packed[slab])
    if job.block == (16, 16) and job.arithmetic.tile_scales == "tiled":
        scales = np.tile(scales[::16], (16, 1))
    return Quantized(packed, scales)

"""What one direction of a dump shows, in pieces: the bytes and codes found, and those a model gives.

A *piece* is a set of blocks laid out as tiles (16, rows, blocks): all of a small tensor, a sample of a large
one, or one slab of its rows.  What models share, such as the block amaxes, is computed once a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance import layouts, words
from conformance.count import count_amax
from conformance.model import Model
from conformance.side import Side
from nvfp4ref import blocks, e2m1, four_over_six, hadamard, scaling
from nvfp4ref.fp32 import bfloat16
from nvfp4ref.quantize import XLA_TREE
from nvfp4ref.scaling import GlobalScale

Array = np.ndarray[Any, Any]
Place = Any  # an index of the (rows, blocks) plane: two slices, or two index arrays that broadcast

SAMPLE = 2**17  # elements of a sample
SLAB = 2**18  # elements of a slab
#: Fields of Arithmetic that the global scale depends on.
_OF_GLOBAL_SCALE = (
    "global_scale",
    "global_guard",
    "global_type",
    "e4m3_max",
    "headroom",
    "reciprocal_of_zero",
    "flush_subnormals",
    "division",
    "row_scaled",
    "amax_nan",
)


@dataclass(frozen=True, eq=False)
class Evidence:
    """One direction of a dump: x as tiles, and what was found; shapes are the result's, R rows and K/16 blocks.

    Args:
        side: the direction, with x.
        across: "declared", or "other": judged as if x had been quantized along its other axis.
        packed, stored: what was found, where it is not what the dump has (the other axis: its transpose).
    """

    side: Side
    across: str = "declared"
    packed_as: Array | None = None
    stored_as: Array | None = None

    # ---- found ---------------------------------------------------------------------------------------------

    @cached_property
    def packed(self) -> Array:
        """uint8 (R, K/2)."""
        found: Array = self.side.found("packed") if self.packed_as is None else self.packed_as
        return found

    @cached_property
    def readings(self) -> dict[str, Array]:
        """Scale bytes (R, K/16) under every layout that the stored ones allow, the declared one first."""
        stored = self.side.found("scales") if self.stored_as is None else self.stored_as
        rows, columns = self.plane
        tiled = self.side.dump.block == (16, 16)
        return layouts.readings(stored, rows, columns, self.declared_scales, tiled)

    @property
    def declared_scales(self) -> str:
        """The layout in which the dump says that its scales are."""
        layout = self.side.dump.scale_layout
        tiled = self.side.arithmetic.tile_scales == "tiled" and self.side.dump.block == (16, 16)
        return "tiled" if tiled and layout == "compact" else layout

    # ---- the input -----------------------------------------------------------------------------------------

    @property
    def axis(self) -> int:
        """Which axis of x is blocked."""
        columnwise = bool(self.side.suffix) != (self.across == "other")
        return 0 if columnwise else -1

    @cached_property
    def tiles(self) -> Array:
        """View of x as tiles (16, R, K/16), in its own dtype."""
        return blocks.tiles(self.side.x, self.axis)

    @property
    def plane(self) -> tuple[int, int]:
        """(R, K/16)."""
        rows, columns = self.tiles.shape[1:]
        return rows, columns

    @property
    def dtype(self) -> str:
        """Of x."""
        return self.side.x.dtype.name

    @cached_property
    def base(self) -> Model:
        """What the dump declares."""
        dump = self.side.dump
        other = dump.transform(columnwise=not self.side.suffix)
        layout = "repeated" if self.declared_scales == "tiled" else self.side.arithmetic.tile_scales
        arithmetic = replace(self.side.arithmetic.for_input(self.dtype), tile_scales=layout)
        words = self.declared_words
        if words is not None:  # a rule that takes the kind of random numbers that the dump has
            uniforms = words.dtype == np.float32
            if uniforms != (e2m1.STOCHASTIC[arithmetic.stochastic][1] == 16):
                arithmetic = replace(arithmetic, stochastic="ideal" if uniforms else "sm100")
        return Model(arithmetic, dump.block, self.side.rht, self.side.rht or other)

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    def _cached(self, key: Any, make: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def input_dtype(self, model: Model) -> str:
        """Type of the values that are quantized: of x, or of its transform."""
        return self.dtype if model.rht is None else model.rht.round_to

    # ---- amax and global scale -----------------------------------------------------------------------------

    def true_amax(self, rht: nv.RHT | None, arithmetic: nv.Arithmetic) -> Array:
        """max(abs(.)) of what is quantized: 0-d, or (R, 1) when row-scaled."""
        nan = "ignore" if arithmetic.amax_nan == "ignore" else "propagate"
        key = ("amax", rht, arithmetic.rht_sum if rht else None, nan, arithmetic.row_scaled)

        def make() -> Array:
            matrix, axis = self.side.x, self.axis
            if rht is not None:
                matrix, axis = hadamard.transform(matrix, rht, axis, arithmetic.rht_sum), -1
            value = blocks.tensor_amax(matrix, {-1: 1, 0: 0}[axis] if arithmetic.row_scaled else None, nan)
            return value.reshape(-1, 1) if arithmetic.row_scaled else value

        found: Array = self._cached(key, make)
        return found

    @cached_property
    def recorded_amax(self) -> Array | None:
        """The recorded amax as 0-d, or (R, 1) when row-scaled."""
        found = self.side.found("amax")
        if found is None:
            return None
        return np.asarray(found).reshape(-1, 1) if self.side.arithmetic.row_scaled else np.asarray(found).reshape(())

    def amax(self, model: Model, arithmetic: nv.Arithmetic) -> Array:
        """The amax that a model's global scale is made of."""
        if model.amax == "before-transform":
            return self.true_amax(None, arithmetic)
        if not isinstance(model.amax, str):
            return np.asarray(model.amax, np.float32)
        found = self.recorded_amax
        return self.true_amax(model.rht, arithmetic) if found is None else found

    def scale(self, model: Model, arithmetic: nv.Arithmetic) -> GlobalScale:
        """S and D of a model; the recorded global scale where that is another value than its own."""
        settled = tuple(getattr(arithmetic, name) for name in _OF_GLOBAL_SCALE)
        key = ("scale", model.rht if self.recorded_amax is None else None, model.amax, model.form, settled)

        def make() -> GlobalScale:
            with np.errstate(all="ignore"):
                scale = scaling.global_scale(self.amax(model, arithmetic), arithmetic)
                recorded = self.side.found("global_scale")
                if recorded is None or model.form == "ignored" or not self._stored_differs(scale, model):
                    return scale
                value = recorded.reshape(-1, 1) if self.side.arithmetic.row_scaled else recorded.reshape(())
                return scaling.from_recorded(value, self.side.dump.global_scale_form or "encode")

        found: GlobalScale = self._cached(key, make)
        return found

    def _stored_differs(self, scale: GlobalScale, model: Model) -> int:
        """How many recorded global scales are not a model's."""
        encode = (self.side.dump.global_scale_form == "encode") != (model.form == "exchanged")
        value = np.asarray(scale.encode if encode else scale.decode, np.float32).reshape(-1)
        return count_amax(self.side.found("global_scale"), value).different

    def stored(self, model: Model) -> dict[str, int]:
        """Differences of a model in the amax and the global scale that the dump records."""
        if model.amax == "recorded-wrong":
            return {}
        found: dict[str, int] = {}
        if self.recorded_amax is not None:
            allowed = [self.true_amax(model.rht, model.of_bytes)]
            if model.amax == "before-transform":
                allowed.append(self.true_amax(None, model.of_bytes))
            elif model.amax != "recorded":
                allowed.append(np.asarray(model.amax, np.float32))
            recorded = self.recorded_amax.reshape(-1)
            found["amax"] = min(count_amax(recorded, one.reshape(-1)).different for one in allowed)
        if self.side.found("global_scale") is not None and model.form != "ignored":
            with np.errstate(all="ignore"):
                scale = scaling.global_scale(self.amax(model, model.of_bytes), model.of_bytes)
            found["global_scale"] = self._stored_differs(scale, model)
        return found

    def applicable(self, model: Model) -> bool:
        """Whether a model can have made this direction: its blocks and transform fit, its words are there."""
        rows, columns = self.plane
        row_scaled = model.arithmetic.row_scaled
        if model.block == (16, 16) and (rows % 16 or row_scaled):
            return False
        if model.rht is not None and (row_scaled or not self._transformable or columns * 16 % model.rht.size):
            return False
        if model.scales not in (None, *self.readings):
            return False
        if model.words == "nearest" and self.side.dump.rounding == "nearest-even":
            return False
        random = self.random(model)
        if isinstance(model.words, tuple) and random is None:
            return False
        return random is None or len(random) == e2m1.STOCHASTIC[model.of_codes.stochastic][1]

    @cached_property
    def _transformable(self) -> bool:
        """Whether x has bfloat16 values only, as the transform needs."""
        x = self.side.x
        if x.dtype == bfloat16:
            return True
        bits = x.astype(np.float32).view(np.uint32)
        return not (bits & np.uint32(0xFFFF)).any()

    def reading(self, model: Model) -> str | None:
        """The layout by which a model reads the stored scales; None when they cannot be read so."""
        name = model.scales or self.declared_scales
        return name if name in self.readings else None

    @cached_property
    def judges_codes(self) -> bool:
        """Whether the codes can be judged: not those of stochastic rounding without its random numbers."""
        return self.side.dump.rounding == "nearest-even" or self.random(self.base) is not None

    # ---- random numbers ------------------------------------------------------------------------------------

    @cached_property
    def declared_words(self) -> Array | None:
        """The random numbers (R, K/4) or (R, K) that the dump declares, None for nearest-even or without any."""
        try:
            return self.side.words
        except ValueError:
            return None

    def random(self, model: Model) -> Array | None:
        """The random numbers of a model as tiles (4 or 16, R, K/16); None: nearest-even."""
        if model.words == "nearest" or self.side.dump.rounding == "nearest-even":
            return None

        def make() -> Array | None:
            array = self.declared_words if model.words == "declared" else words.other(self.side, model.words)
            if array is None:
                return None
            rows, columns = self.plane
            return array.reshape(rows, columns, -1).transpose(2, 0, 1)

        found: Array | None = self._cached(("words", model.words), make)
        return found

    # ---- pieces --------------------------------------------------------------------------------------------

    def slabs(self) -> Iterator[Piece]:
        """All blocks, a slab of whole tile rows at a time."""
        rows, columns = self.plane
        tall = max(16, SLAB // (16 * columns) // 16 * 16)
        for start in range(0, rows, tall):
            yield Piece(self, (slice(start, min(start + tall, rows)), slice(None)))

    def sample(self, differs: Array, budget: int = SAMPLE, seed: int = 0) -> Piece:
        """A piece of about ``budget`` elements with differences in it: all blocks of a small tensor.

        ``differs`` (R, K/16) says which blocks differ.  Blocks are taken in aligned groups that no transform
        and no shared amax crosses: 16 rows, and as many neighbours as the transform is long.
        """
        rows, columns = self.plane
        if rows * columns * 16 <= budget:
            return Piece(self, (slice(None), slice(None)))
        height = 16 if rows % 16 == 0 else 1
        rht = self.base.declared_rht
        width = max(2, (rht.size if rht else 16) // 16)
        width = width if columns >= width else 1
        across = columns // width
        some = differs[: rows // height * height, : across * width]
        groups = np.asarray(some.reshape(rows // height, height, across, width).any((1, 3)))
        chosen = _chosen(groups, max(2, budget // (16 * height * width)), seed)
        r = (chosen // across)[None, :] * height + np.arange(height)[:, None]  # (height, groups)
        c = (chosen % across)[:, None] * width + np.arange(width)  # (groups, width)
        return Piece(self, (np.repeat(r, width, axis=1), c.reshape(1, -1)))


def _chosen(groups: Array, number: int, seed: int) -> Array:
    """Flat indices of ``number`` groups, three quarters of them among those that differ, spread evenly."""
    flat = groups.reshape(-1)
    different, equal = np.flatnonzero(flat), np.flatnonzero(~flat)
    most = max(number - number // 4, number - len(equal))
    picked = [_spread(different, most), _spread(equal, number - min(most, len(different)), seed)]
    return np.sort(np.concatenate(picked))


def _spread(items: Array, number: int, seed: int = 0) -> Array:
    if len(items) <= number:
        return items
    return items[(np.arange(number) * len(items) // number + seed) % len(items)]


class Piece:
    """Some blocks of one direction; ``place`` indexes the (rows, blocks) plane."""

    def __init__(self, evidence: Evidence, place: Place) -> None:
        self.evidence, self.place = evidence, place
        self._cache: dict[Any, Any] = {}

    def _cached(self, key: Any, make: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @property
    def indices(self) -> tuple[Array, Array]:
        """Rows and block columns of the piece; they broadcast to its (rows, blocks)."""
        r, c = self.place
        if isinstance(r, slice):
            rows, columns = self.evidence.plane
            return np.arange(rows)[r][:, None], np.arange(columns)[c][None, :]
        return r, c

    # ---- found ---------------------------------------------------------------------------------------------

    def found_bytes(self, reading: str) -> Array:
        """Scale bytes (rows, blocks) as a layout reads them."""
        found: Array = self._cached(("bytes", reading), lambda: self.evidence.readings[reading][self.place])
        return found

    def found_codes(self, packing: str) -> Array:
        """Codes (16, rows, blocks) as a packing reads them."""

        def make() -> Array:
            rows, columns = self.evidence.plane
            packed = self.evidence.packed.reshape(rows, columns, 8)[self.place].transpose(2, 0, 1)
            low, high = packed & np.uint8(15), packed >> np.uint8(4)
            if packing == "split-half":
                return np.concatenate([low, high])
            if packing == "high-nibble-first":
                low, high = high, low
            return np.stack([low, high], axis=1).reshape(16, *packed.shape[1:])

        found: Array = self._cached(("codes", packing), make)
        return found

    # ---- of a model ----------------------------------------------------------------------------------------

    def values(self, model: Model) -> Array:
        """The values that are quantized, float32 tiles (16, rows, blocks); not to be written to."""
        rht, summation = model.rht, model.arithmetic.rht_sum
        key = ("values", rht, summation if rht else None)

        def make() -> Array:
            if rht is None:
                return blocks.working_copy(self.evidence.tiles[(slice(None), *self.place)])
            return _transformed(self.values(replace(model, rht=None)), rht, summation)

        found: Array = self._cached(key, make)
        return found

    def _strided(self) -> Array:
        """Tiles whose blocks take every (K/16)-th element of a row: the fault of a reshape to (rows, 16, K/16)."""
        r, c = self.indices
        columns = self.evidence.plane[1]
        element = np.arange(16)[:, None, None] * columns + c
        return self.evidence.tiles[element % 16, r, element // 16].astype(np.float32)

    def scale(self, model: Model, arithmetic: nv.Arithmetic) -> GlobalScale:
        """S and D, 0-d or as the rows of this piece."""
        scale = self.evidence.scale(model, arithmetic)
        return GlobalScale(*(self._of_rows(value) for value in scale))

    def _of_rows(self, value: Array) -> Array:
        if value.ndim == 0:
            return value
        rows = self.place[0]
        return value[rows] if isinstance(rows, slice) else value[rows, 0]

    def block_amax(self, model: Model) -> Array:
        """a of every block, (rows, blocks)."""
        ar = model.of_bytes
        scale = self.scale(model, ar)
        scaled = None  # what a depends on where elements are scaled before their maximum is taken
        if ar.block_scale in scaling.PRESCALED:
            divided = ar.block_scale == "predivided-times-sixth"
            scaled = (ar.division, divided, (scale.decode if divided else scale.encode).tobytes())
        settled = (model.rht, ar.rht_sum, model.block, ar.block_amax, ar.amax_group, ar.amax_nan, ar.flush_subnormals)
        key = ("a", settled, model.group, scaled)

        def make() -> Array:
            x = self._strided() if model.group == "strided" else self.values(model)
            if scaled:
                x = scaling.prescaled(x, scale, ar)
            elif ar.flush_subnormals:
                x = scaling.flushed(x)
            magnitude = np.abs(x) if ar.block_amax == "abs" else np.maximum(x, np.float32(0))
            nan = "ignore" if ar.amax_nan == "ignore" else "propagate"
            if ar.amax_nan == "xla-cpu" and self.evidence.side.x.size >= XLA_TREE:
                nan = "tree"
            a = blocks.block_amax(magnitude, model.block, nan)
            return blocks.pair_amax(a) if ar.amax_group == 32 else a

        with np.errstate(all="ignore"):
            found: Array = self._cached(key, make)
        return found

    def block_scale(self, model: Model) -> Array:
        """Block scales before their E4M3 rounding, (rows, blocks)."""
        ar = model.of_bytes
        with np.errstate(all="ignore"):
            return scaling.block_scale(self.block_amax(model), self.scale(model, ar), ar)

    def bytes(self, model: Model) -> Array:
        """Scale bytes (rows, blocks) that a model gives."""
        ar = model.of_bytes
        if ar.four_over_six:
            return self._chosen_bytes(model)
        a, scale = self.block_amax(model), self.scale(model, ar)
        with np.errstate(all="ignore"):
            return scaling.round_scale(scaling.block_scale(a, scale, ar), a, scale, ar)

    def _chosen_bytes(self, model: Model) -> Array:
        """Scale bytes by 4over6, kept: both candidates are quantized for them."""
        ar = model.of_bytes
        scale, amax = self.scale(model, ar), self._of_rows(self.evidence.amax(model, ar))

        def make() -> Array:
            with np.errstate(all="ignore"):
                x, a = self.values(model), self.block_amax(model)
                return four_over_six.choose(x, a, amax, scale, model.block, ar)[0].scale

        key = ("4over6", replace(ar, packing="low-nibble-first", stochastic="sm100", encode_scale="quotient"))
        rest = (model.rht, model.block, model.group, scale.encode.tobytes(), scale.decode.tobytes(), amax.tobytes())
        found: Array = self._cached((*key, rest), make)
        return found

    def encode_scale(self, model: Model, byte: Array) -> Array:
        """Encode scales (rows, blocks) that a model gives for scale bytes."""
        ar = model.of_codes
        s = self.block_scale(model) if ar.encode_scale == "unrounded-block-scale" else np.zeros((), np.float32)
        with np.errstate(all="ignore"):
            return scaling.encode_scale(byte, s, self.scale(model, ar), ar)

    def scaled(self, model: Model, byte: Array) -> Array:
        """Scaled elements (16, rows, blocks) that a model gives for scale bytes."""
        ar = model.of_codes
        e = self.encode_scale(model, byte)
        x = self.values(model).copy(order="K")
        with np.errstate(all="ignore"):
            return scaling.scale_elements(x, e, byte, self.scale(model, ar), ar)

    def codes(self, model: Model, byte: Array) -> Array:
        """Codes (16, rows, blocks) that a model gives for scale bytes."""
        ar = model.of_codes
        random = self.evidence.random(model)
        if random is not None:
            random = np.ascontiguousarray(random[(slice(None), *self.place)])
        codes = e2m1.round_elements(self.scaled(model, byte), ar, random)
        if ar.nan_block_codes is not None:
            self._code_nan_blocks(codes, model)
        return codes

    def _code_nan_blocks(self, codes: Array, model: Model) -> None:
        by_tensor, by_block, invalid = model.of_codes.nan_block_codes or (0, 0, 0)
        a, amax = self.block_amax(model), self._of_rows(self.evidence.amax(model, model.of_codes))
        cause = np.where(np.isnan(amax), by_tensor, np.where(np.isnan(a), by_block, invalid))
        np.copyto(codes, cause.astype(np.uint8), where=np.isnan(self.block_scale(model)))

    # ---- found against a model -----------------------------------------------------------------------------

    def wrong_bytes(self, model: Model) -> int:
        """How many scale bytes are not the model's; all when they cannot be read as it stores them."""
        reading = self.evidence.reading(model)
        expected = self.bytes(model)
        return expected.size if reading is None else int(np.count_nonzero(expected != self.found_bytes(reading)))

    def given_bytes(self, model: Model) -> Array:
        """The scale bytes found, as a model reads them; its own when they cannot be read so."""
        reading = self.evidence.reading(model)
        return self.bytes(model) if reading is None else self.found_bytes(reading)

    def wrong_codes(self, model: Model) -> int:
        """How many codes are not those that the model gives for the scale bytes found."""
        if not self.evidence.judges_codes and model.words != "nearest":
            return 0
        byte, found = self.given_bytes(model), self.found_codes(model.of_codes.packing)
        if model.ulp == "one":
            return int(np.count_nonzero(self.codes(model, byte) != found))
        return int(self.wrong_by_block(model, byte, found).sum())

    def wrong_by_block(self, model: Model, byte: Array, found: Array) -> Array:
        """Wrong codes of each block, with e or the float32 beside it, whichever serves the block best."""
        counts = []
        for ulp in (0, -1, 1):
            arithmetic = replace(model.arithmetic, encode_ulp=ulp)
            codes = self.codes(replace(model, arithmetic=arithmetic, ulp="one"), byte)
            counts.append(np.count_nonzero(codes != found, axis=0))
        fewest: Array = np.minimum.reduce(counts)
        return fewest


def _transformed(x: Array, rht: nv.RHT, summation: str) -> Array:
    """Tiles of the transform of tiles: the vectors are the blocks, or whole groups of neighbouring blocks."""
    y = hadamard.transform(blocks.untile(x), rht, -1, summation)
    return blocks.working_copy(blocks.tiles(y))


def transposed_codes(packed: Array) -> Array:
    """Packed codes of the transposed matrix."""
    codes = e2m1.unpack(packed)
    return e2m1.pack(np.ascontiguousarray(codes.T))

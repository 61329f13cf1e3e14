"""Probes of the NVFP4 MMA word, mma.sync on sm_120 and tcgen05 on sm_100: which model of the accumulator it follows.

Tiles of 128 rows of A and 32 columns of B (K = 64), so 128 x 32 words each, from four sources:

* ``layout``: small exact words on which every model agrees; a difference there means that operands or scales do not
  lie where the program put them, and nothing else in the record says anything;
* ``vectors``: the words of vectors/mma (four with published B200 results, 32 constructed to tell models apart, 1200
  evaluated in exact integers), 32 a tile: row m has word m mod 32, column n word n, so that the words themselves lie
  on the diagonal, four times, and every other place is a further word of one's A, scales and C with another's B;
* ``random``: four kinds of seeded words, some of which cancel down to the last bits that the window keeps.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from nvfp4hw.probes.base import SHOWN, Array, Findings, Output, Probe, required
from nvfp4hw.probes.stochastic import hashed
from nvfp4ref import e2m1, tensorcore
from nvfp4ref.fp32 import cut_to_24_bits

ROWS, COLUMNS = 128, 32
#: The models that are held against the hardware; the first is the oracle's default and what PASS means.
MODELS = tuple(tensorcore.MODELS)
LAYOUT_TILES, RANDOM_TILES = 2, 16


@dataclass(frozen=True)
class Words:
    """Words of vectors/mma; codes (n, 64), scale bytes (n, 4), C and D as patterns (n,), D where published."""

    a: Array
    b: Array
    sa: Array
    sb: Array
    c: Array
    d: Array
    name: Array  # "published 0" …, "model 0" …, or the name of an open question

    @property
    def published(self) -> Array:
        here: Array = np.char.startswith(self.name, "published")
        return here

    @property
    def open(self) -> Array:
        here: Array = ~(self.published | np.char.startswith(self.name, "model"))
        return here


@functools.cache
def words() -> Words:
    """The words of vectors/mma, as packed beside this file."""
    data = resources.files(__package__).joinpath("mma_words.npz").read_bytes()
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        fields = {name: file[name] for name in file.files}
    return Words(e2m1.unpack(fields.pop("a")), e2m1.unpack(fields.pop("b")), **fields)


@dataclass(frozen=True)
class Tiles:
    """T tiles: codes a (T, 128, 64), b (T, 32, 64), scales sa (T, 128, 4), sb (T, 32, 4), C patterns c (T, 128, 32)."""

    a: Array
    b: Array
    sa: Array
    sb: Array
    c: Array
    source: tuple[str, ...]

    def file(self) -> bytes:
        """What the program reads: each tile's packed A and B, scales and C."""
        t = len(self.source)
        parts = (e2m1.pack(self.a), e2m1.pack(self.b), self.sa, self.sb, self.c.astype("<u4").view(np.uint8))
        return np.concatenate([part.reshape(t, -1) for part in parts], axis=1).tobytes()


def drawn(seed: int, shape: tuple[int, ...], low: int, high: int) -> Array:
    """Reproducible integers low … high of a shape."""
    place = np.arange(int(np.prod(shape)), dtype=np.uint32) + hashed(np.array([seed], np.uint32))
    return (low + hashed(place) % np.uint32(high - low + 1)).reshape(shape)


@functools.cache
def tiles() -> Tiles:
    """Every tile of the probe, in order: layout, vectors, random."""
    made = [_layout_tile(i) for i in range(LAYOUT_TILES)]
    made += [_vector_tile(first) for first in range(0, len(words().c), COLUMNS)]
    made += [_random_tile(i) for i in range(RANDOM_TILES)]
    vectors = len(made) - LAYOUT_TILES - RANDOM_TILES
    source = ("layout",) * LAYOUT_TILES + ("vectors",) * vectors + ("random",) * RANDOM_TILES
    a, b, sa, sb, c = (np.stack(part) for part in zip(*made, strict=True))
    return Tiles(a, b, sa, sb, c, source)


def _layout_tile(i: int) -> tuple[Array, ...]:
    """Every sum and every partial sum is a multiple of 2^-6 below 2^17: exact in float32 in any order."""
    scales = np.array([0x30, 0x38, 0x3C, 0x40], np.uint8)  # 1/2, 1, 3/2, 2
    seed = 100 * i + 1
    return (
        drawn(seed, (ROWS, 64), 0, 15).astype(np.uint8),
        drawn(seed + 1, (COLUMNS, 64), 0, 15).astype(np.uint8),
        scales[drawn(seed + 2, (ROWS, 4), 0, 3)],
        scales[drawn(seed + 3, (COLUMNS, 4), 0, 3)],
        drawn(seed + 4, (ROWS, COLUMNS), 0, 2000).astype(np.float32).view(np.uint32),
    )


def _vector_tile(first: int) -> tuple[Array, ...]:
    all_words = words()
    here = (first + np.arange(COLUMNS)) % len(all_words.c)  # the last tile is filled up with the first words
    rows = here[np.arange(ROWS) % COLUMNS]
    c = np.broadcast_to(all_words.c[rows][:, None], (ROWS, COLUMNS))
    return all_words.a[rows], all_words.b[here], all_words.sa[rows], all_words.sb[here], np.ascontiguousarray(c)


def _random_tile(i: int) -> tuple[Array, ...]:
    """Kinds 0 … 3: like a quantizer's words; any finite scales and C; built to cancel; any byte and any C."""
    seed, kind = 1000 + 100 * i, i % 4
    a = drawn(seed, (ROWS, 64), 0, 15).astype(np.uint8)
    b = drawn(seed + 1, (COLUMNS, 64), 0, 15).astype(np.uint8)
    low, high = ((0x20, 0x50), (0, 0x7E), (0x78, 0x7E), (0, 0xFF))[kind]
    sa = drawn(seed + 2, (ROWS, 4), low, high).astype(np.uint8)
    sb = drawn(seed + 3, (COLUMNS, 4), low, high).astype(np.uint8)
    c = drawn(seed + 4, (ROWS, COLUMNS), 0, 0xFFFFFFFE).astype(np.uint32)
    if kind < 2:  # the exponent of C across the products' and beyond the window
        c = (c & np.uint32(0x807FFFFF)) | drawn(seed + 6, c.shape, 80, 170).astype(np.uint32) << np.uint32(23)
        c[drawn(seed + 7, c.shape, 0, 3) == 0] = 0
    if kind == 2:  # C cancels three groups of large scale but for a little; the fourth has bits at the window's floor
        a[drawn(seed + 5, a.shape, 0, 7) > 0] &= 8  # most are zero, so that C holds the sum
        sa[:, 0], sb[:, 0] = (1 + s[:, 0] % 7 for s in (sa, sb))
        c = _without_first_group(a, b, sa, sb) ^ np.uint32(1 << 31)
    return a, b, sa, sb, c


def _without_first_group(a: Array, b: Array, sa: Array, sb: Array) -> Array:
    """Patterns of the exact sums of groups 1 … 3 of every row and column, cut to float32."""
    m, n = (index.reshape(-1) for index in np.indices((ROWS, COLUMNS)))
    rest = a[m].copy()
    rest[:, : tensorcore.GROUP] = 0
    word = tensorcore.take_apart(rest, b[n], np.zeros(m.size, np.float32), sa[m], sb[n])
    total = cut_to_24_bits(tensorcore.exact_sum(word)).astype(np.float32)
    return total.view(np.uint32).reshape(ROWS, COLUMNS)


@functools.cache
def predicted(model: str) -> Array:
    """D of every word under a model, patterns (T, 128, 32)."""
    everything = tiles()
    out = np.empty((len(everything.source), ROWS, COLUMNS), np.uint32)
    for t, source in enumerate(everything.source):
        rows = COLUMNS if source == "vectors" else ROWS  # the other rows of a vector tile repeat the first
        m, n = (index.reshape(-1) for index in np.indices((rows, COLUMNS)))
        d = tensorcore.mma_words(
            everything.a[t, m],
            everything.b[t, n],
            everything.c[t, m, n].view(np.float32),
            everything.sa[t, m],
            everything.sb[t, n],
            model=model,
        )
        out[t] = np.tile(d.view(np.uint32).reshape(rows, COLUMNS), (ROWS // rows, 1))
    return out


class MmaProbe(Probe):
    """D of every tile, held against every model."""

    rules = ("MMA-SPECIAL", "MMA-GROUP", "MMA-WINDOW", "MMA-ROUND")

    def inputs(self) -> dict[str, bytes]:
        return {"tiles.bin": tiles().file()}

    def collect(self, output: Output) -> dict[str, Array]:
        return {"words": output.array("words.bin", "<u4", predicted("blackwell").shape).astype(np.uint32)}

    def examine(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Findings:
        required(arrays, {"words": (np.uint32, predicted("blackwell").shape)})
        found = arrays["words"]
        source = np.array(tiles().source)
        models: dict[str, Any] = {}
        for model in MODELS:
            wrong = (found != predicted(model)).sum(axis=(1, 2))
            models[model] = {name: int(wrong[source == name].sum()) for name in ("layout", "vectors", "random")}
        agreeing = [model for model, counts in models.items() if not any(counts.values())]
        facts = {
            "models": models,
            "explained_by": agreeing,
            "published_different": self._published(found),
            "open_questions": self._open(found),
        }
        places = np.argwhere(found != predicted("blackwell"))[:SHOWN]
        first = [self._describe(t, m, n, found) for t, m, n in places.tolist()]
        if models["blackwell"]["layout"]:
            what = "words on which all models agree differ: operands or scales are not where the instruction reads them"
            first.insert(0, {"what": what, "layout words": models["blackwell"]["layout"]})
        return Findings(found.size, sum(models["blackwell"].values()), first[:SHOWN], facts)

    @staticmethod
    def _diagonal(found: Array) -> Array:
        """The words of vectors/mma in their order."""
        at = np.arange(len(words().c))
        diagonal: Array = found[LAYOUT_TILES + at // COLUMNS, at % COLUMNS, at % COLUMNS]
        return diagonal

    def _published(self, found: Array) -> int:
        here = words().published
        return int(np.count_nonzero(self._diagonal(found)[here] != words().d[here]))

    def _open(self, found: Array) -> dict[str, Any]:
        mine = self._diagonal(found)
        theirs = {model: self._diagonal(predicted(model)) for model in MODELS}
        return {
            str(words().name[i]): {
                "found": f"0x{int(mine[i]):08X}",
                "models": [model for model in MODELS if theirs[model][i] == mine[i]],
            }
            for i in np.flatnonzero(words().open)
        }

    @staticmethod
    def _describe(t: int, m: int, n: int, found: Array) -> dict[str, Any]:
        everything = tiles()
        return {
            "source": everything.source[t],
            "tile": t,
            "row": m,
            "column": n,
            "a": e2m1.pack(everything.a[t, m]).tobytes().hex(),
            "b": e2m1.pack(everything.b[t, n]).tobytes().hex(),
            "sa": everything.sa[t, m].tobytes().hex(),
            "sb": everything.sb[t, n].tobytes().hex(),
            "c": f"0x{int(everything.c[t, m, n]):08X}",
            "found": f"0x{int(found[t, m, n]):08X}",
            "expected": f"0x{int(predicted('blackwell')[t, m, n]):08X}",
        }


class MmaSm120(MmaProbe):
    name = "mma-sm120"
    what = "Which model of the accumulator does mma.sync kind::mxf4nvf4 follow, word by word?"
    architectures = ("sm_120a", "sm_121a")
    source = "mma_sm120.cu"
    instruction = r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X "


class MmaSm100(MmaProbe):
    name = "mma-sm100"
    what = "Which model of the accumulator does tcgen05.mma kind::mxf4nvf4 follow, word by word?"
    architectures = ("sm_100a", "sm_103a")
    source = "mma_sm100.cu"
    instruction = r"UTCOMMA\.(4X|BLOCK16) "

"""A study as tables: tensors, layers, histograms and the ranking, as CSV and Parquet."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..container import foreign, replacing
from . import statistics
from .files import Result, Study
from .formats import Format

Row = dict[str, Any]

#: figure -> (what it is, unit), in the order of the tables.  Definitions: docs/studies/README.md
FIGURES: dict[str, tuple[str, str]] = {
    "relative_mse": ("Σe²/Σx²", "1"),
    "snr_db": ("−10·log10 of it", "dB"),
    "cosine": ("⟨y, x⟩/(|x||y|)", "1"),
    "gain": ("⟨y, x⟩/⟨x, x⟩", "1"),
    "shrinkage": ("Σ|y|/Σ|x|", "1"),
    "max_error_of_amax": ("max|e|/max|x|", "1"),
    "rounding_part": ("error of elements neither clipped nor lost to zero, of Σe²", "1"),
    "underflow_part": ("error of elements lost to zero, of Σe²", "1"),
    "clipping_part": ("error of clipped elements, of Σe²", "1"),
    "scale_part": ("what rounding the block scales adds, of Σe²", "1"),
    "scale_only": ("Σx²(rounded/unrounded scale − 1)²/Σx²", "1"),
    "zero_codes": ("codes that are ±0", "1"),
    "largest_codes": ("codes that are ±6", "1"),
    "clipped": ("elements beyond the largest code", "1"),
    "te_underflows_percent": ("Transformer Engine's underflows%", "%"),
    "te_mse": ("Transformer Engine's mse", "x²"),
    "scale_zero": ("block scales that are 0", "1"),
    "scale_subnormal": ("block scales below 2^-6", "1"),
    "scale_utilisation": ("largest block scale of 448", "1"),
    "block_mse_median": ("Σe²/Σx² of blocks, median", "1"),
    "block_mse_p99": ("the same, 99th percentile", "1"),
    "row_mse_min": ("Σe²/Σx² of rows, least", "1"),
    "row_mse_median": ("median", "1"),
    "row_mse_p99": ("99th percentile", "1"),
    "row_mse_max": ("largest", "1"),
    "worst_row": ("the row that has it", "index"),
    "channel_mse_min": ("Σe²/Σx² of channels, least", "1"),
    "channel_mse_median": ("median", "1"),
    "channel_mse_p99": ("99th percentile", "1"),
    "channel_mse_max": ("largest", "1"),
    "worst_channel": ("the channel that has it", "index"),
    "transposed_inconsistency": ("Σ(y by rows − y by columns)²/Σx²", "1"),
    "transposed_differ": ("elements that differ between the two", "1"),
    **{f"mean_of_{b}": (f"Σ(mean of {b} draws − x)²/Σx², of a sample", "1") for b in statistics.DRAWS},
    "bias_power": ("of stochastic rounding, of a sample", "1"),
    "lost": ("elements that are NaN or Inf, or became so", "count"),
    "amax": ("max|x|", "x"),
    "rms": ("root of mean x²", "x"),
    "zeros": ("elements that are 0", "1"),
    "dynamic_range": ("log2 of max|x| over least |x| not 0", "octaves"),
    "block_range_max": ("the same of a block of 16, largest", "octaves"),
    "block_crest_median": ("amax/rms of blocks of 16, median", "1"),
    "kurtosis": ("fourth moment over squared variance", "1"),
    **{f"kurtosis_rht{d}": (f"the same after a Hadamard transform of {d}", "1") for d in statistics.HADAMARD},
    "outliers": (f"elements above {statistics.OUTLIER:g} rms", "1"),
    "outlier_channels": (f"channels above {statistics.OUTLIER_CHANNEL:g} times the median channel's rms", "1"),
    "nan": ("elements that are NaN", "count"),
    "inf": ("elements that are Inf", "count"),
}
_EMPTY = statistics.figures(Format("nvfp4"), statistics.Sums())
_OF_SUMS = tuple(key for key in FIGURES if key in _EMPTY)  # figures that several tensors have together
_ABOUT = ("file", "tensor", "layer", "shape", "dtype", "elements", "status", "note", "format")


def tensor_rows(study: Study) -> Iterator[Row]:
    """One row a tensor and format; a tensor without figures has one row, its format empty."""
    for one in study.results:
        about = _about(one)
        if not one.figures:
            yield about
        for name, found in one.figures.items():
            yield {**about, "format": name, **{key: found.get(key, math.nan) for key in FIGURES}}


def _about(one: Result) -> Row:
    source = one.source
    shape = "x".join(map(str, source.shape))
    values = (source.file, source.name, one.layer, shape, source.kind, source.size, one.status, one.note, "")
    return dict(zip(_ABOUT, values, strict=True))


def layer_rows(study: Study) -> Iterator[Row]:
    """One row a layer and format, the layer's tensors taken together."""
    for layer, formats in study.layer_figures().items():
        for name, found in formats.items():
            elements = study.layers[layer][name].n
            yield {"layer": layer, "elements": elements, "format": name, **{key: found[key] for key in _OF_SUMS}}


def histogram_rows(study: Study) -> Iterator[Row]:
    """Every histogram over all tensors: format, kind, bin's lower and upper edge (or the code), count."""
    for one in study.formats:
        if one.name not in study.totals:
            continue
        for kind, low, high, count in _histograms(one, study.totals[one.name]):
            yield {"format": one.name, "histogram": kind, "low": low, "high": high, "count": count}


def _histograms(one: Format, s: statistics.Sums) -> Iterator[tuple[str, float, float, float]]:
    magnitudes = statistics.magnitude_edges()
    signed = np.concatenate([[-np.inf], statistics.signed_edges(), [np.inf]])
    for kind, counts, edges in (
        ("error/rms", s.signed, signed),
        ("error/value", s.relative, signed),
        ("|error|/rms", s.log_error, magnitudes),
        ("|error/value|", s.log_relative, magnitudes),
        ("|value|/rms", s.mag_n, magnitudes),
        ("squared error by |value|/rms", s.mag_e2, magnitudes),
        ("block relative mse", s.blocks, magnitudes),
    ):
        for i in np.flatnonzero(counts):
            yield kind, float(edges[i]), float(edges[i + 1]), counts[i].item()
    for kind, counts in (("code", s.codes), ("scale byte", s.scales)):
        for i in np.flatnonzero(counts):
            yield kind, float(i), float(i), counts[i].item()


# -- what to keep in high precision ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranked:
    """A layer or tensor by what keeping it in high precision saves.

    error: its Σe²/Σx².  kept: share of all elements that this one and those before it hold; left: what is then left
    of the mean relative error over all elements.
    """

    name: str
    elements: int
    error: float
    kept: float
    left: float


def ranking(study: Study, format_: str | None = None, by: str = "layer") -> list[Ranked]:
    """Layers, or tensors, by the mean relative error of their elements, largest first.

    To first order the loss grows with the mean relative error over the elements that are multiplied, so what keeping
    a layer saves an element is its own relative error.  How sensitive the loss is to a layer is not in it.

    Args:
        format_: its error; the study's first by default.  by: "layer" or "tensor".
    """
    name = format_ or study.formats[0].name
    mass: dict[str, float] = {}
    elements: dict[str, int] = {}
    for one in study.measured:
        key = one.layer if by == "layer" else one.source.label
        error = one.figures[name]["relative_mse"]
        if not math.isfinite(error):
            continue
        mass[key] = mass.get(key, 0.0) + error * one.source.size
        elements[key] = elements.get(key, 0) + one.source.size
    order = sorted(mass, key=lambda key: mass[key] / elements[key], reverse=True)
    whole, everything = sum(mass.values()), sum(elements.values())
    ranked, kept, left = [], 0, whole
    for key in order:
        kept, left = kept + elements[key], left - mass[key]
        share = max(0.0, left / whole) if whole else 0.0
        ranked.append(Ranked(key, elements[key], mass[key] / elements[key], kept / everything, share))
    return ranked


def mean_error(study: Study, format_: str) -> float:
    """Mean over the tensors' elements of the tensor's relative error: what the ranking adds up."""
    rows = ranking(study, format_, "tensor")
    return sum(one.error * one.elements for one in rows) / sum(one.elements for one in rows) if rows else math.nan


# -- files -----------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Iterator[Row], columns: Sequence[str]) -> None:
    """Write a CSV, completely or not at all.  Raises DumpError."""
    with foreign("cannot be written"), replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(_unicode(value)) for key, value in row.items()})
        text.flush()
        text.detach()


def _unicode(value: Any) -> Any:
    """Text that a file can hold: what is no Unicode in the name of a file or tensor as escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _cell(value: Any) -> Any:
    """Nothing for a figure that has no meaning."""
    return "" if isinstance(value, float) and math.isnan(value) else value


def write_parquet(path: Path, rows: Iterator[Row], columns: Sequence[str]) -> None:
    """Write a Parquet file, completely or not at all: text, int64 and float64 columns.  Raises DumpError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {key: pa.string() for key in ("file", "tensor", "layer", "shape", "dtype", "status", "note", "format")}
    kinds["elements"] = pa.int64()
    schema = pa.schema([(key, kinds.get(key, pa.float64())) for key in columns])
    with foreign("cannot be written"), replacing(path) as file, pq.ParquetWriter(file, schema) as writer:
        while group := list(itertools.islice(rows, 10_000)):
            arrays = [pa.array([_null(row.get(one.name)) for row in group], one.type) for one in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _null(value: Any) -> Any:
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else _unicode(value)


TENSOR_COLUMNS = (*_ABOUT, *FIGURES)
LAYER_COLUMNS = ("layer", "elements", "format", *_OF_SUMS)
HISTOGRAM_COLUMNS = ("format", "histogram", "low", "high", "count")

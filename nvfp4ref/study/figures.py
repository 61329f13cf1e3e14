"""The figures of a study, in matplotlib; each is read without colour, by marker, dash and hatch.

Colours are Okabe and Ito's, which people with any colour vision tell apart.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import e2m1, e4m3
from . import statistics, tables
from .files import Study
from .formats import Format
from .statistics import DRAWS, HADAMARD, SIGNED

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "////", "\\\\\\\\", "----", "||||", "xxx", "+++", "//--")
SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text, which can be found and read aloud
    "svg.hashsalt": "nvfp4",  # the same figure gives the same bytes
    "savefig.dpi": 130,
    "figure.constrained_layout.use": True,
}
MOST_BARS = 24  # layers that are drawn as bars; more become lines
LISTED = 15  # rows of the ranking that are drawn

Figure = Any  # matplotlib.figure.Figure, which is imported when it is needed


@dataclass(frozen=True)
class Picture:
    """One figure of a study.

    name: of its files.  title: what it shows.  caption: how to read it.  draw: None when there is nothing to show.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Study], Figure | None]


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for the time of drawing and writing."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        yield


@contextmanager
def _any_letters() -> Iterator[None]:
    """A name in letters that matplotlib's font lacks is no reason for a warning: the .svg has it as text."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def new(width: float = 8.0, height: float = 3.6, **grid: Any) -> tuple[Figure, Any]:
    """A figure of that many inches and its axes, as ``subplots`` gives them."""
    from matplotlib.figure import Figure as Made

    figure = Made(figsize=(width, height))
    return figure, figure.subplots(**grid)


def svg(figure: Figure) -> str:
    """The figure as an <svg> element."""
    text = io.StringIO()
    with style(), _any_letters():
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = text.getvalue()
    return "\n".join(line.rstrip() for line in found[found.index("<svg") :].splitlines()) + "\n"


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    data = io.BytesIO()
    with style(), _any_letters():
        figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def inline(text: str, prefix: str) -> str:
    """An <svg> whose ids cannot meet those of another one on the same page, and which scales with it."""
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    head, rest = text.split(">", 1)
    width = re.search(r' width="([\d.]+pt)"', head)
    style = f' style="max-width: {width[1]}"' if width else ""
    return re.sub(r' (width|height)="[^"]*"', "", head) + style + ">" + rest


# -- pieces ----------------------------------------------------------------------------------------------------------


def line(i: int, every: int | None = None) -> dict[str, Any]:
    """Colour and dash of series i, with markers when ``every`` says how often."""
    marks = {} if every is None else {"marker": MARKERS[i % len(MARKERS)], "markersize": 4, "markevery": every}
    # the first is the widest, so that one below another still shows
    width = max(1.2, 2.6 - 0.25 * i)
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": width, **marks}


def bar(i: int) -> dict[str, Any]:
    """Colour and hatch of series i: a light fill, so that the hatch shows."""
    from matplotlib.colors import to_rgb

    r, g, b = (0.45 * c + 0.55 for c in to_rgb(COLOURS[i % len(COLOURS)]))
    return {"facecolor": (r, g, b), "edgecolor": "#222222", "linewidth": 0.5, "hatch": HATCHES[i % len(HATCHES)]}


def legend_below(figure: Figure, axes: Any, columns: int = 4) -> None:
    """One legend under all axes."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), handlelength=3.2)


def _octaves(axis: Any, low: int, high: int, step: int) -> None:
    """Ticks of a logarithmic axis at powers of two."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator([2.0**k for k in range(low, high + 1, step)]))
    axis.set_major_formatter(FuncFormatter(lambda v, _: rf"$2^{{{round(math.log2(v))}}}$" if v > 0 else ""))
    axis.set_minor_locator(NullLocator())


def _share(counts: Any) -> Any:
    total = counts.sum()
    return 100 * counts / total if total else counts.astype(float)


def _per_octave(counts: Any) -> Any:
    """Share of each bin of magnitudes but the first, over the bin's width in octaves (%)."""
    edges = statistics.magnitude_edges()
    return (_share(counts) / np.diff(np.log2(edges)))[1:]


def _drawn(study: Study) -> list[tuple[int, Format, statistics.Sums]]:
    """(number, format, Sums) of the formats that measured anything."""
    return [(i, one, study.totals[one.name]) for i, one in enumerate(study.formats) if one.name in study.totals]


# -- the figures -----------------------------------------------------------------------------------------------------


def by_layer(study: Study) -> Figure | None:
    """Relative error of every layer in every format."""
    found = study.layer_figures()
    if not found:
        return None
    layers, names = list(found), [one.name for one in study.formats]
    figure, axes = new(max(7.0, min(13.0, 2.0 + 0.11 * len(layers) * len(names))), 4.4)
    for i, one in enumerate(study.formats):
        values = [100 * found[layer][one.name]["relative_mse"] for layer in layers]
        if len(layers) <= MOST_BARS:
            width = 0.84 / len(names)
            places = np.arange(len(layers)) + (i - (len(names) - 1) / 2) * width
            axes.bar(places, values, width, label=one.title, **bar(i))
        else:
            axes.plot(np.arange(len(layers)), values, label=one.title, **line(i, max(1, len(layers) // 12)))
    step = max(1, math.ceil(len(layers) / 40))
    axes.set_xticks(np.arange(0, len(layers), step), [_short(name) for name in layers[::step]], rotation=35, ha="right")
    axes.set_ylabel("relative error power Σe²/Σx² (%)")
    axes.set_xlabel("layer")
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    legend_below(figure, axes)
    return figure


def _short(name: str, most: int = 28) -> str:
    """A name as a label: its end, and its dollar signs as such, which matplotlib takes for formulas."""
    name = name.removesuffix(".weight")
    return (name if len(name) <= most else "…" + name[-most + 1 :]).replace("$", r"\$")


def errors(study: Study) -> Figure | None:
    """Histograms of the error: signed and in octaves, over the tensor's rms and over the value itself."""
    drawn = _drawn(study)
    if not drawn:
        return None
    figure, axes = new(10, 6.4, nrows=2, ncols=2)
    edges, octaves = statistics.signed_edges(), statistics.magnitude_edges()
    for i, one, sums in drawn:
        for ax, counts in ((axes[0, 0], sums.signed), (axes[1, 0], sums.relative)):
            ax.stairs(_share(counts)[1 : SIGNED - 1], edges, label=one.title, **line(i))
        for ax, counts in ((axes[0, 1], sums.log_error), (axes[1, 1], sums.log_relative)):
            ax.stairs(_per_octave(counts), octaves[1:], label=one.title, **line(i))
    for ax, key in ((axes[0, 0], "signed"), (axes[1, 0], "relative")):
        if any(getattr(sums, key)[1 : SIGNED - 1].any() for _, _, sums in drawn):  # of nothing there is no logarithm
            ax.set_yscale("log")
            ax.set_ylim(1e-3, None)
    for ax, what in zip(axes[:, 0], ("error e / rms of the tensor (1)", "error e / value x (1)"), strict=True):
        ax.set_xlabel(what)
        ax.set_xlim(-1, 1)
        ax.set_ylabel("elements per bin of 0.02 (%)")
    for ax, what in zip(axes[:, 1], ("|e| / rms of the tensor (1)", "|e| / |x| (1)"), strict=True):
        ax.set_xlabel(what)
        ax.set_xscale("log", base=2)
        ax.set_xlim(2.0**-14, 4)
        _octaves(ax.xaxis, -14, 2, 2)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("elements per octave (%)")
    legend_below(figure, axes[0, 0])
    return figure


def codes(study: Study) -> Figure | None:
    """How often each E2M1 code is used."""
    drawn = [(i, one, s) for i, one, s in _drawn(study) if one.has_e2m1]
    if not drawn:
        return None
    figure, axes = new(8.5, 4.0)
    values = [f"{'−' if v < 0 else ''}{abs(v):g}" for v in (*(-e2m1.VALUES[7:0:-1]), *e2m1.VALUES[:8])]
    for i, one, sums in drawn:
        counts = sums.codes[:16].copy()
        counts[0] += counts[8]  # −0 is counted with 0
        ordered = np.concatenate([counts[15:8:-1], counts[:8]])
        axes.plot(range(15), _share(ordered), label=one.title, **line(i, 1))
    axes.set_xticks(range(15), values)
    axes.set_xlabel("element code, as its value (0 and −0 together)")
    axes.set_ylabel("elements (%)")
    axes.set_ylim(bottom=0)
    legend_below(figure, axes)
    return figure


def scales(study: Study) -> Figure | None:
    """How often each E4M3 block scale is used."""
    drawn = [(i, one, s) for i, one, s in _drawn(study) if one.family == "nvfp4" and s.scales.any()]
    powers = [(i, one, s) for i, one, s in _drawn(study) if one.family == "mxfp4" and s.scales.any()]
    if not drawn and not powers:
        return None
    count = bool(drawn) + bool(powers)
    figure, grid = new(10, 4.0, ncols=count, squeeze=False, width_ratios=(2.2, 1) if count == 2 else None)
    if drawn:
        axes = grid[0, 0]
        for i, one, sums in drawn:
            axes.stairs(_share(sums.scales)[:127], np.arange(128) - 0.5, label=one.title, **line(i))
        ticks = [0, *range(8, 127, 8), 126]
        labels = [
            f"{e4m3.VALUES[t]:g}" if t in (0, 126) else rf"$2^{{{round(math.log2(e4m3.VALUES[t]))}}}$" for t in ticks
        ]
        ticks, labels = [t for t in ticks if t != 120], [v for t, v in zip(ticks, labels, strict=True) if t != 120]
        axes.set_xticks(ticks, labels)
        axes.axvspan(-0.5, 7.5, facecolor="#eeeeee", edgecolor="none")
        axes.text(
            3.5,
            0.98,
            "zero and\nsubnormal",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
            rotation=90,
        )
        axes.set_xlabel("E4M3 block scale, one bin a code (largest 448)")
        axes.set_ylabel("blocks (%)")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(0.08, 1.0), fontsize=8, handlelength=3)
    if powers:
        axes = grid[0, -1]
        width = 0.8 / len(powers)
        for k, (i, one, sums) in enumerate(powers):
            places = np.flatnonzero(sums.scales)
            offset = (k - (len(powers) - 1) / 2) * width - 127
            axes.bar(places + offset, _share(sums.scales)[places], width, label=one.title, **bar(i))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("E8M0 block scale, log2")
        axes.set_ylabel("blocks (%)")
        axes.legend(loc="upper left", fontsize=8)
    return figure


def by_magnitude(study: Study) -> Figure | None:
    """Error against the magnitude of the element."""
    drawn = _drawn(study)
    if not drawn:
        return None
    figure, axes = new(10, 4.2, ncols=2)
    edges = statistics.magnitude_edges()
    for i, one, sums in drawn:
        there = sums.mag_n >= 20
        with np.errstate(all="ignore"):
            relative = np.where(there, np.sqrt(sums.mag_e2 / sums.mag_x2), np.nan)
        axes[0].plot(np.sqrt(edges[:-1] * edges[1:]), relative, label=one.title, **line(i))
        axes[1].stairs(_per_octave(sums.mag_e2), edges[1:], label=one.title, **line(i))
    elements = _per_octave(drawn[0][2].mag_n)
    axes[1].stairs(elements, edges[1:], fill=True, facecolor="#dddddd", label="share of elements")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("rms error / rms value in the bin (1)")
    axes[1].set_ylabel("share of all squared error per octave (%)")
    axes[1].set_ylim(bottom=0)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xlim(2.0**-12, 16)
        _octaves(ax.xaxis, -12, 4, 2)
        ax.set_xlabel("|x| / rms of the tensor (1)")
    legend_below(figure, axes[1], 5)
    return figure


def parts(study: Study) -> Figure | None:
    """Where the error comes from."""
    drawn = _drawn(study)
    if not drawn:
        return None
    figure, axes = new(8.5, 1.4 + 0.42 * len(drawn))
    found = [statistics.figures(one, sums) for _, one, sums in drawn]
    left = np.zeros(len(drawn))
    for k, (key, label) in enumerate(
        (("rounding_part", "rounding"), ("underflow_part", "lost to zero"), ("clipping_part", "clipped"))
    ):
        width = np.array([100 * f["relative_mse"] * f[key] for f in found])
        axes.barh(range(len(drawn)), width, left=left, height=0.6, label=label, **bar((1, 6, 2)[k]))
        left += width
    ideal = [100 * f["relative_mse"] * (1 - f["scale_part"]) for f in found]
    axes.plot(
        ideal, range(len(drawn)), "D", color="black", markersize=6, mfc="white", label="with block scales not rounded"
    )
    axes.set_yticks(range(len(drawn)), [one.title for _, one, _ in drawn])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("relative error power Σe²/Σx² (%)")
    legend_below(figure, axes)
    return figure


def hadamard(study: Study) -> Figure | None:
    """What a Hadamard transform does to the distribution."""
    there = [next(iter(one.figures.values())) for one in study.measured]
    if not there:
        return None
    figure, axes = new(10, 4.0, ncols=2)
    keys, labels = ["kurtosis", *(f"kurtosis_rht{d}" for d in HADAMARD)], ["none", *map(str, HADAMARD)]
    spread = np.linspace(-0.25, 0.25, len(there)) if len(there) > 1 else np.zeros(1)
    for k, key in enumerate(keys):
        values = np.array([one[key] for one in there])
        axes[0].plot(k + spread, values, MARKERS[k], color=COLOURS[k], markersize=3.5, alpha=0.7)
        if np.isfinite(values).any():
            axes[0].hlines(np.nanmedian(values), k - 0.35, k + 0.35, color="black", linewidth=2)
        crest = _share(study.shape.moments[(1, *HADAMARD)[k]].crest)
        axes[1].stairs(crest, statistics.crest_edges(), label=labels[k], **line(k))
    axes[0].axhline(3, color="#777777", linewidth=0.8)
    axes[0].annotate("normal: 3", (1.0, 3), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=8)
    axes[0].set_yscale("log")
    _plain_log(axes[0].yaxis)
    axes[0].set_xticks(range(len(keys)), labels)
    axes[0].set_xlabel("size of the Hadamard transform (elements)")
    axes[0].set_ylabel("kurtosis of each tensor (1), bar: median")
    axes[1].set_xlim(1, 4)
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlabel("crest amax / rms of blocks of 16 (1), at most 4")
    axes[1].set_ylabel("blocks per 1/16 of crest (%)")
    axes[1].legend(title="size of the transform", fontsize=8, handlelength=3)
    return figure


def _plain_log(axis: Any) -> None:
    """A logarithmic axis labelled with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(NullFormatter())


def blocks(study: Study) -> Figure | None:
    """How the error is spread over blocks."""
    drawn = _drawn(study)
    if not drawn:
        return None
    figure, axes = new(8.5, 4.0)
    for i, one, sums in drawn:
        axes.stairs(_per_octave(sums.blocks), statistics.magnitude_edges()[1:], label=one.title, **line(i))
    axes.set_xscale("log", base=2)
    axes.set_xlim(2.0**-14, 1)
    _octaves(axes.xaxis, -14, 0, 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("relative error power Σe²/Σx² of a block (1)")
    axes.set_ylabel("blocks per octave (%)")
    legend_below(figure, axes)
    return figure


def ranked(study: Study) -> Figure | None:
    """Which layers to keep in high precision, by the first format."""
    rows = tables.ranking(study, by="tensor")
    if not rows:
        return None
    listed = rows[:LISTED]
    figure, axes = new(10, max(3.2, 1.3 + 0.24 * len(listed)), ncols=2, width_ratios=(1.3, 1))
    axes[0].barh(range(len(listed)), [100 * one.error for one in listed], height=0.7, **bar(1))
    axes[0].set_yticks(range(len(listed)), [_short(one.name, 40) for one in listed], fontsize=8)
    axes[0].invert_yaxis()
    axes[0].grid(axis="y", visible=False)
    axes[0].set_xlabel(f"relative error power, {study.formats[0].title} (%)")
    for i, (of, label) in enumerate(((rows, "tensors"), (tables.ranking(study), "layers"))):
        kept, left = ([start, *(100 * v for v in values)] for start, values in _curve(of))
        axes[1].plot(kept, left, label=f"{label}, largest error first", **line(i, max(1, len(of) // 12)))
    axes[1].plot([0, 100], [100, 0], color="#777777", linewidth=0.8, label="in any order")
    axes[1].set_xlabel("elements kept in high precision (%)")
    axes[1].set_ylabel("mean relative error left (%)")
    axes[1].set_xlim(0, 100)
    axes[1].set_ylim(0, 102)
    axes[1].legend(fontsize=8, handlelength=3)
    return figure


def _curve(rows: Sequence[tables.Ranked]) -> tuple[tuple[float, list[float]], tuple[float, list[float]]]:
    return (0.0, [one.kept for one in rows]), (100.0, [one.left for one in rows])


def draws(study: Study) -> Figure | None:
    """The mean of several stochastic draws."""
    drawn = [(i, one, s) for i, one, s in _drawn(study) if s.draws.any()]
    if not drawn:
        return None
    figure, axes = new(6.5, 4.0)
    for i, one, sums in drawn:
        values = sums.draws / sums.draws_x2
        axes.plot(DRAWS, values, label=one.title, **line(i, 1))
        axes.plot(DRAWS, values[0] / np.array(DRAWS), color=COLOURS[i % len(COLOURS)], linewidth=0.7, linestyle=":")
    axes.plot([], [], color="#777777", linewidth=0.7, linestyle=":", label="1/B: no bias")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(DRAWS, [str(b) for b in DRAWS])
    axes.set_xlabel("draws B of which the mean is taken")
    axes.set_ylabel("relative error power of the mean (1)")
    legend_below(figure, axes)
    return figure


PICTURES: Sequence[Picture] = (
    Picture(
        "layers",
        "Error of each layer",
        "Power of the error over power of the values, all tensors of a layer together.",
        by_layer,
    ),
    Picture(
        "parts",
        "Where the error comes from",
        "Elements rounded, lost to zero, and clipped beyond the largest code add up to the bar. The diamond is the "
        "error when block scales are not rounded; none is drawn for stochastic rounding and for float32 scales.",
        parts,
    ),
    Picture(
        "ranking",
        "Which layers to keep in high precision",
        "Left: the tensors with the largest relative error, where an element kept saves most. Right: what is left of "
        "the mean relative error when tensors, or whole layers, are kept in this order. How sensitive the loss is to a "
        "layer is not in it.",
        ranked,
    ),
    Picture(
        "errors",
        "Distribution of the error",
        "Top: in units of each tensor's rms. Bottom: in units of the value; −1 is a value lost to zero. Left: signed. "
        "Right: magnitudes. Errors of exactly zero and beyond the axes are not drawn.",
        errors,
    ),
    Picture(
        "magnitude",
        "Error against magnitude",
        "Left: small values are lost (1), large ones have the error of their format. Right: which values the squared "
        "error comes from; the grey area is where the values are (of the first format).",
        by_magnitude,
    ),
    Picture("codes", "Element codes", "Share of the elements that each code stands for.", codes),
    Picture(
        "scales",
        "Block scales",
        "Share of the blocks that have each scale. Formats that map the largest block to 448 leave the low codes for "
        "blocks that are small beside it.",
        scales,
    ),
    Picture(
        "blocks",
        "Error of single blocks",
        "Each block's own Σe²/Σx². Blocks of zeros are left out.",
        blocks,
    ),
    Picture(
        "hadamard",
        "Before and after a Hadamard transform",
        "Left: kurtosis of every tensor, before and after transforms of 4, 16 and 128. Right: crest of blocks of 16; "
        "a block of one value and zeros has 4, a block of equal magnitudes 1.",
        hadamard,
    ),
    Picture(
        "draws",
        "Bias of stochastic rounding",
        "Without bias the error of the mean of B draws falls as 1/B (dotted); where it levels off is the bias. Of a "
        "sample of each tensor.",
        draws,
    ),
)

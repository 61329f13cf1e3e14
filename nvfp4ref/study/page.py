"""A study's page, one HTML file that needs nothing else, and the files beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..container import DumpError, PathLike, blame, counted, foreign, replacing
from . import figures, tables
from .files import FAILED, SKIPPED, Study
from .sources import printable
from .statistics import figures as figures_of

TENSORS = 300  # rows of the table of tensors on the page
NEEDS = {"matplotlib": "matplotlib", "jinja2": "Jinja2", "pyarrow": "pyarrow"}


@dataclass(frozen=True)
class Table:
    """A table of the page; numbers are shown with four digits.  left: rows that are not shown."""

    head: list[str]
    rows: list[list[Any]]
    texts: bool = False
    left: int = 0


@dataclass(frozen=True)
class Shown:
    """A figure of the page."""

    name: str
    title: str
    caption: str
    svg: Any


@dataclass
class Written:
    """Files that were written, and sentences about those that could not be."""

    files: list[Path] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def missing_packages() -> list[str]:
    """The optional packages that writing a study needs and that are not installed."""
    from importlib.util import find_spec

    return [shown for name, shown in NEEDS.items() if find_spec(name) is None]


def write(study: Study, folder: PathLike, title: str = "Quantization error") -> Written:
    """Write report.html, tensors.csv and .parquet, layers.csv, histograms.csv, and figures/*.png and .svg.

    Each is written completely or not at all; one that cannot be written does not keep the others from it.
    """
    root, done = Path(folder), Written()
    shown: list[Shown] = []

    def put(name: str, work: Callable[[Path], None]) -> None:
        path = root / name
        try:
            with blame(path):
                with foreign("cannot be written"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                work(path)
        except DumpError as error:
            done.errors.append(str(error))
        else:
            done.files.append(path)

    put("tensors.csv", lambda path: tables.write_csv(path, tables.tensor_rows(study), tables.TENSOR_COLUMNS))
    put("tensors.parquet", lambda path: tables.write_parquet(path, tables.tensor_rows(study), tables.TENSOR_COLUMNS))
    put("layers.csv", lambda path: tables.write_csv(path, tables.layer_rows(study), tables.LAYER_COLUMNS))
    put("histograms.csv", lambda path: tables.write_csv(path, tables.histogram_rows(study), tables.HISTOGRAM_COLUMNS))
    for picture in figures.PICTURES:
        try:
            with figures.style():
                drawn = picture.draw(study)
            if drawn is None:
                continue
            svg, png = figures.svg(drawn), figures.png(drawn)
        except Exception as error:  # whatever it is, the report is not lost with one figure
            reason = str(error).strip().partition("\n")[0]
            done.errors.append(f"figure {picture.name!r} cannot be drawn: {type(error).__name__}: {reason}")
            continue
        put(f"figures/{picture.name}.svg", _bytes(svg.encode()))
        put(f"figures/{picture.name}.png", _bytes(png))
        shown.append(Shown(picture.name, picture.title, picture.caption, svg))
    put("report.html", _bytes(html(study, shown, title).encode("utf-8", "backslashreplace")))
    return done


def _bytes(data: bytes) -> Callable[[Path], None]:
    def work(path: Path) -> None:
        with foreign("cannot be written"), replacing(path) as file:
            file.write(data)

    return work


def html(study: Study, shown: list[Shown], title: str) -> str:
    """The page."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["figure"] = digits
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    inline = [Shown(one.name, one.title, one.caption, Markup(_labelled(one))) for one in shown]
    files = sorted({Path(one.source.file).name for one in study.results})
    page: str = template.render(
        title=printable(title),
        version=__version__,
        seed=study.seed,
        measured=f"{len(study.measured):,}",
        count=counted(len(study.results), "tensor"),
        elements=counted(sum(one.source.size for one in study.measured), "element"),
        sources=printable(", ".join(files[:3]))
        + (f" and {counted(len(files) - 3, 'more file')}" if len(files) > 3 else ""),
        wrong=[
            *map(printable, study.errors),
            *(f"{one.source.label}: {printable(one.note)}" for one in study.results if one.status == FAILED),
        ],
        remarks=[printable(one) for one in study.remarks],
        pictures=inline,
        reference=study.formats[0].title,
        formats=_formats(study),
        order=_order(study),
        tensors=_tensors(study),
        others=_others(study),
        meaning=Table(
            ["figure", "unit", "is"], [[key, unit, what] for key, (what, unit) in tables.FIGURES.items()], True
        ),
    )
    return page.lstrip()


def _labelled(one: Shown) -> str:
    """The figure for use inside the page: ids of its own, a name for those who do not see it."""
    return figures.inline(one.svg, one.name).replace("<svg ", f'<svg role="img" aria-label="{one.title}" ', 1)


def digits(value: Any) -> str:
    """A cell: four significant digits, nothing for NaN."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if math.isnan(value):
        return ""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4g}"


def _formats(study: Study) -> Table:
    head = [
        "format",
        "Σe²/Σx² %",
        "SNR dB",
        "mean of tensors %",
        "gain",
        "shrinkage",
        "cosine",
        "zero codes %",
        "±6 codes %",
    ]
    head += ["clipped %", "zero scales %", "subnormal scales %", "448 used %", "by row/by column %"]
    rows = []
    for one in study.formats:
        if one.name in study.totals:
            f = figures_of(one, study.totals[one.name])
            rows.append(
                [
                    one.title,
                    100 * f["relative_mse"],
                    f["snr_db"],
                    100 * tables.mean_error(study, one.name),
                    f["gain"],
                    f["shrinkage"],
                    f["cosine"],
                    *(100 * f[key] for key in ("zero_codes", "largest_codes", "clipped", "scale_zero")),
                    *(100 * f[key] for key in ("scale_subnormal", "scale_utilisation", "transposed_inconsistency")),
                ]
            )
    return Table(head, rows)


def _order(study: Study) -> Table:
    head = ["layer", "rank", "elements", "relative error %", "elements kept so far %", "error left %"]
    return Table(
        head,
        [
            [one.name, i, one.elements, 100 * one.error, 100 * one.kept, 100 * one.left]
            for i, one in enumerate(tables.ranking(study), 1)
        ],
    )


def _tensors(study: Study) -> Table:
    head = ["tensor", "shape", *(one.title for one in study.formats), "kurtosis", "outliers %", "note"]
    rows: list[list[Any]] = [
        [
            one.source.label,
            "×".join(map(str, one.source.shape)),
            *(100 * one.figures[f.name]["relative_mse"] for f in study.formats),
            next(iter(one.figures.values()))["kurtosis"],
            100 * next(iter(one.figures.values()))["outliers"],
            printable(one.note),
        ]
        for one in study.measured
    ]
    if len(rows) > TENSORS:
        rows.sort(key=lambda row: -math.inf if math.isnan(row[2]) else row[2], reverse=True)
    return Table(head, rows[:TENSORS], left=len(rows) - len(rows[:TENSORS]))


def _others(study: Study) -> Table:
    rows = [
        [
            one.source.label,
            "×".join(map(str, one.source.shape)) or "scalar",
            one.source.kind,
            one.status,
            printable(one.note),
        ]
        for one in study.results
        if one.status in (SKIPPED, FAILED)
    ]
    return Table(["tensor", "shape", "dtype", "status", "why"], rows[:TENSORS], True, left=max(0, len(rows) - TENSORS))

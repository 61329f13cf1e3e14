"""The documentation site, made of what GitHub shows as it is: ``make docs``, or

    sphinx-build -W --keep-going -c docs . build/site

The source folder is the whole repository, so that links from a guide to a file beside ``docs`` lead somewhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import nvfp4ref  # noqa: E402

project = "nvfp4ref"
copyright = "the nvfp4ref authors"
version = release = nvfp4ref.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.githubpages"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "examples/**.md", "clients/**.md"]
exclude_patterns = ["**/.*", "**/site-packages", "build", "docs/_*"]

myst_heading_anchors = 6
suppress_warnings = ["myst.header"]  # a page may start its sections at any level

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "code"  # docstrings put code between single backticks, or double ones

html_theme = "furo"
html_title = f"nvfp4ref {version}"
html_extra_path = ["site"]  # an index.html at the top
html_copy_source = False
html_show_sourcelink = False

SAMPLE = "sample-report.html"

#: The navigation.  Pages that are not there yet are left out, and those that nobody put anywhere come last.
SECTIONS = {
    "Start": ["quickstart", "check-my-kernel", "read-a-report", "pytest", "write-a-backend"],
    "Guides": ["dumps", "lint", "replay", "stochastic-rounding", "training", "gemm", "backends", "jax"],
    "Vectors": ["vectors", "pipe"],
    "Blackwell": ["capture", "blackwell-ci", "probes"],
    "Reference": ["spec", "deviations", "detection", "evidence", "api/*"],
    "Studies": ["studies/*"],
    "More": ["**/*"],
    "Project": ["../README", "../CONTRIBUTING", "../CHANGELOG", "../examples/**/*", "../clients/**/*"],
}


def navigation() -> str:
    """The tables of contents of all sections, each page in the first that names it."""
    docs, seen, parts = ROOT / "docs", {"index"}, []
    for title, patterns in SECTIONS.items():
        pages = []
        for pattern in patterns:
            folder = ROOT if pattern.startswith("../") else docs
            found = sorted(folder.glob(f"{pattern.removeprefix('../')}.md"))
            pages += [("/" + path.relative_to(ROOT).with_suffix("").as_posix()) for path in found]
        pages = [page for page in pages if page.removeprefix("/docs/") not in seen]
        seen |= {page.removeprefix("/docs/") for page in pages}
        if pages:
            parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]))
    return "\n\n".join(parts)


def read(app: Any, name: str, source: list[str]) -> None:
    """Before a page is parsed: what GitHub and the site write differently."""
    text = re.sub(r'^<a id="([^"]+)"></a>$', r"(\1)=", source[0], flags=re.MULTILINE)
    text = text.replace("<!-- sample -->", f'<a href="{SAMPLE}">Here is one.</a>')
    source[0] = text.replace("<!-- navigation -->", navigation())


def sample(app: Any, exception: Exception | None) -> None:
    """The report that read-a-report.md shows, made of two tensors: one right, one with two faults."""
    if exception is not None or app.builder.format != "html":
        return
    import ml_dtypes
    import numpy as np

    from conformance import check
    from conformance.report import Checks, write_html

    x = (300 * np.random.default_rng(0).standard_normal((256, 512))).astype(ml_dtypes.bfloat16)
    checks = Checks()
    for name, fields in (("right", {}), ("faulty", {"block_scale": "divide-by-6", "element_rounding": "ties-away"})):
        q = nvfp4ref.quantize(x, arithmetic=nvfp4ref.arithmetic("te", **fields))
        dump = nvfp4ref.Dump(x=x, packed=q.packed, scales=q.scales, amax=q.amax.reshape(1))
        checks.add("sample.safetensors", name, check(dump), dump)
    write_html(str(Path(app.outdir) / "docs" / SAMPLE), checks)


def plain(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as they are meant: |x| is an absolute value and * a product, but in code or before an item."""
    text = re.sub(r"^( +(?:\w+, )*\w+,)\n +(?=\w)", r"\1 ", "\n".join(lines), flags=re.MULTILINE)  # a list of arguments
    parts = re.split(r"(`+[^`]*`+)", text)
    escaped = (part if part[:1] == "`" else re.sub(r"(?<=\S)\*|(?<=\S )\*|\|", r"\\\g<0>", part) for part in parts)
    lines[:] = "".join(escaped).split("\n")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    from pygments.lexers import PythonLexer

    app.add_lexer("example", PythonLexer)  # the examples of the specification
    app.connect("source-read", read)
    app.connect("build-finished", sample)
    app.connect("env-get-outdated", lambda *_: [root_doc])  # it lists the others
    app.connect("autodoc-process-docstring", plain, priority=400)  # before napoleon writes asterisks of its own

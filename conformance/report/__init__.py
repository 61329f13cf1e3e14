"""Reports of ``nvfp4 check``, ``conformance run`` and ``conformance replay``: text, JSON, JUnit XML, an HTML page.

    text.py plain.py junit.py    one form each, of a SuiteResult; files.py writes them
    places.py                    where the codes and scales of a dump differ, and by how much
    tensor.py                    all that a page shows of one checked dump; examples.py its elements
    seen.py                      what a run keeps for its page: counts by rule, the cases most worth showing
    rules.py                     the rules as rows: their counts, and the evidence behind each
    page.py drawing.py           the page, from ``templates``; Jinja2 is needed for it alone
"""

from conformance.report.checks import Checks
from conformance.report.files import write_json, write_text
from conformance.report.junit import as_junit
from conformance.report.page import as_html, require_html, write_html
from conformance.report.plain import as_json
from conformance.report.schemas import schema
from conformance.report.seen import Seen
from conformance.report.text import as_text

__all__ = [
    "Checks",
    "Seen",
    "as_html",
    "as_json",
    "as_junit",
    "as_text",
    "require_html",
    "schema",
    "write_html",
    "write_json",
    "write_text",
]

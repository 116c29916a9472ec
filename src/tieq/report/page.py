"""``report.html``: one file that needs no network, laid out by a template from an export's JSON documents."""

from __future__ import annotations

from tieq.report.documents import Documents
from tieq.report.view import page_view


def report_html(documents: Documents) -> str:
    """The page; the same documents give the same bytes, and everything in them is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tieq.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(page_view(documents))

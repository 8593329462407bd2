"""One static page of tables and charts, with nothing to load from elsewhere."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any

from .plot import CHARTS, NO_MATPLOTLIB, pyplot
from .table import notes_of, rows_of

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { padding: 2px 9px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
thead th { position: sticky; top: 0; background: #fff; }
img { max-width: 100%; margin: 1rem 0; } .wide { overflow-x: auto; } .ours { font-weight: 600; }
"""


def charts(report: dict[str, Any]) -> str:
    """The charts as images within the page."""
    try:
        plt = pyplot()
    except ImportError:
        return f"<p>{escape(NO_MATPLOTLIB)}</p>"
    parts = []
    for chart in CHARTS:
        for name, figure in chart(report):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", bbox_inches="tight")
            plt.close(figure)
            data = base64.b64encode(buffer.getvalue()).decode()
            parts.append(f'<img alt="{escape(name)}" src="data:image/svg+xml;base64,{data}">')
    return "\n".join(parts)


def table(report: dict[str, Any]) -> str:
    """The table of results."""
    header, rows = rows_of(report)
    ours = {i for i, text in enumerate(header) if text.startswith("flash_cuda")}
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = []
    for row in rows:
        classes = [" class=ours" if i in ours else "" for i in range(len(row))]
        fields = [f"<td{c}>{escape(text)}</td>" for c, text in zip(classes, row, strict=True)]
        body.append(f"<tr>{''.join(fields)}</tr>")
    grid = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f"<div class=wide><table>{grid}</table></div>"


def page(reports: list[dict[str, Any]]) -> str:
    """The page of some reports."""
    sections = []
    for report in reports:
        notes = "".join(f"<li>{escape(note)}</li>" for note in notes_of(report))
        facts = report["machine"]
        title = f"{facts['card']}, {facts['date']}: {', '.join(report['suites'])}"
        sections.append(f"<h2>{escape(title)}</h2><ul>{notes}</ul>{charts(report)}{table(report)}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>flash_cuda benchmarks</title>'
        f"<style>{STYLE}</style><h1>flash_cuda benchmarks</h1>{''.join(sections)}</html>\n"
    )

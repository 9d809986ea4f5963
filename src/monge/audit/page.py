"""The report as one HTML page without scripts; its plots are inline SVG."""

import html
import math
from collections.abc import Sequence

from monge.audit.report import Report

_STYLE = """body{font:16px/1.5 sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .75rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}.bar{fill:#4c78a8}.line{fill:none;stroke:#4c78a8;
stroke-width:2}.bound{stroke:#e45756;stroke-width:1.5;stroke-dasharray:5 4}text{font:11px sans-serif;fill:#555}"""
_WIDTH, _HEIGHT, _MARGIN = 640.0, 220.0, 36.0


def page(report: Report, server: str, reference: str) -> str:
    """The page.

    Args:
        report: What was found.
        server: Address of the audited server.
        reference: What it was compared with.
    """
    bound = math.log(1.0 / report.alpha)
    parts = [
        f"<h1>{html.escape(report.verdict.capitalize())}</h1>",
        f"<p>{html.escape(server)} against {html.escape(reference)}: "
        f"{html.escape(report.reason)}.</p>",
        *(f"<p>Note: {html.escape(note)}.</p>" for note in report.notes),
    ]
    if report.num_tokens:
        parts += [
            "<h2>Situations</h2>",
            _table(
                ("situation", "texts", "tokens", "log e-value", "finding"),
                [
                    (one.name, one.num_texts, one.num_tokens, f"{one.log_e:.1f}", one.finding or "")
                    for one in report.situations
                ],
            ),
            "<h2>E-value</h2>",
            f"<p>The audit rejects at {bound:.1f} (alpha {report.alpha:g}).</p>",
            _curve(report.curve, bound),
            "<h2>Quantiles of the tokens</h2>",
            "<p>The dashed line is the expected count.</p>",
            _bars(report.quantiles),
            "<h2>Where the mass moved</h2>",
            _table(
                ("rank of the token", "observed", "expected", "difference"),
                [
                    (
                        _rank(place, len(report.ranks)),
                        observed,
                        f"{expected:.0f}",
                        f"{observed - expected:+.0f}",
                    )
                    for place, (observed, expected) in enumerate(report.ranks)
                ],
            ),
        ]
    title = "monge audit"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _rank(place: int, count: int) -> str:
    return str(place + 1) if place < count - 1 else f"{count} and more"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"


def _curve(points: Sequence[tuple[int, float]], bound: float) -> str:
    finite = [(tokens, min(log_e, 2.0 * bound)) for tokens, log_e in points]
    low, high = (
        min(0.0, *(value for _, value in finite)),
        max(bound * 1.1, *(value for _, value in finite)),
    )
    last = max(1, finite[-1][0])
    path = " ".join(
        f"{_x(tokens / last):.1f},{_y((value - low) / (high - low)):.1f}"
        for tokens, value in finite
    )
    line = f'<polyline class="line" points="{path}"/>'
    labels = _label(_x(0.0), _HEIGHT - 8, "0 tokens") + _label(
        _x(1.0) - 70, _HEIGHT - 8, f"{last} tokens"
    )
    return _svg(line + _bound((bound - low) / (high - low)) + labels)


def _bars(counts: Sequence[int]) -> str:
    highest, width = max(*counts, 1) * 1.1, 1.0 / len(counts)
    bars = "".join(
        f'<rect class="bar" x="{_x(place * width) + 1:.1f}" y="{_y(count / highest):.1f}" '
        f'width="{(_WIDTH - 2 * _MARGIN) * width - 2:.1f}" '
        f'height="{_y(0.0) - _y(count / highest):.1f}"/>'
        for place, count in enumerate(counts)
    )
    labels = _label(_x(0.0), _HEIGHT - 8, "0: most probable") + _label(
        _x(1.0) - 90, _HEIGHT - 8, "1: least probable"
    )
    return _svg(bars + _bound(sum(counts) / len(counts) / highest) + labels)


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img">{content}</svg>'


def _bound(share: float) -> str:
    return f'<line class="bound" x1="{_x(0.0)}" x2="{_x(1.0)}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"/>'


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{html.escape(text)}</text>'


def _x(share: float) -> float:
    return _MARGIN + share * (_WIDTH - 2 * _MARGIN)


def _y(share: float) -> float:
    return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)

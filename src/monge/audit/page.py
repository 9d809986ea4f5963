"""The report as one HTML page without scripts; its plots are inline SVG."""

import math
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from monge.audit.report import Report


def page(report: Report, server: str, reference: str) -> str:
    """Return the page.

    Args:
        report: The audit.
        server: Address of the audited server.
        reference: Name of what it was compared with.
    """
    bound = math.log(1.0 / report.alpha)
    curve = [(tokens, min(log_e, 2.0 * bound)) for tokens, log_e in report.curve]
    values = [log_e for _, log_e in curve]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.render(
        report=report,
        server=server,
        reference=reference,
        bound=bound,
        curve=curve,
        last=max(1, curve[-1][0]) if curve else 1,
        low=min([0.0, *values]),
        high=max([1.1 * bound, *values]),
        highest=1.1 * max([1, *report.quantiles]),
    )

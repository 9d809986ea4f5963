"""A picture of servers under load: throughput and latencies against the number of clients."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

Cell = Mapping[str, Any]
_COLOURS: Final = ("#777777", "#0f7b6c", "#c8762b", "#4878a8", "#7a5195", "#b5a642")
_LATENCIES: Final = (("first_token_s", "first token, ms"), ("per_token_s", "per further token, ms"))
_PERCENTILES: Final = (("p50", "-"), ("p95", "--"), ("p99", ":"))


def write_plot(cells: Sequence[Cell], path: Path) -> Path:
    """Throughput (median and range), and p50, p95 and p99 of the latencies of the last repeat, a colour per arm.

    Args:
        cells: Of the document that `monge.bench.serve.measure` returns.
        path: File to write.
    """
    figure = Figure(figsize=(13.2, 4.2), layout="constrained")
    speed, *panels = figure.subplots(1, 1 + len(_LATENCIES))
    arms = list(dict.fromkeys(cell["arm"] for cell in cells))
    for number, arm in enumerate(arms):
        own, colour = (
            [cell for cell in cells if cell["arm"] == arm],
            _COLOURS[number % len(_COLOURS)],
        )
        clients = [cell["concurrency"] for cell in own]
        medians = [cell["tokens_per_s"]["median"] for cell in own]
        low, high = ([cell["tokens_per_s"][end] for cell in own] for end in ("low", "high"))
        speed.plot(clients, medians, "o-", color=colour, ms=3, lw=1.2, label=arm)
        speed.fill_between(clients, low, high, color=colour, alpha=0.15, lw=0)
        for axes, (name, _) in zip(panels, _LATENCIES, strict=True):
            known = [
                (cell["concurrency"], cell["runs"][-1][name])
                for cell in own
                if cell["runs"][-1][name] is not None
            ]
            for level, style in _PERCENTILES:
                axes.plot(
                    [at for at, _ in known],
                    [1e3 * values[level] for _, values in known],
                    style,
                    color=colour,
                    lw=1.1,
                )
    for axes, title in zip(
        (speed, *panels), ("tokens per second", *(title for _, title in _LATENCIES)), strict=True
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(
            sorted({cell["concurrency"] for cell in cells}),
            labels=sorted({cell["concurrency"] for cell in cells}),
        )
        axes.set_xlabel("clients")
        axes.set_title(title, loc="left", fontsize=10)
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axes.tick_params(which="both", labelsize=8)
    speed.legend(fontsize=8, frameon=False)
    panels[0].text(
        0.02, 0.97, "— p50   - - p95   ··· p99", transform=panels[0].transAxes, va="top", fontsize=8
    )
    figure.savefig(path, dpi=130)
    return path

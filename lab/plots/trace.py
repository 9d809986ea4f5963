"""A picture of requests over their tokens: what was drafted, and what was accepted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

_DRAFTED: Final = "#c8762b"
_ACCEPTED: Final = "#0f7b6c"


def write_trace_plot(requests: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a column per request: drafted depth and accepted tokens.

    Args:
        requests: Each with its `rounds`, as `monge.engine.result.rounds_of` gives them.
        path: File to write.
    """
    figure = Figure(figsize=(max(6.4, 4.2 * len(requests)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(requests), squeeze=False)[0]
    for number, (request, axes) in enumerate(zip(requests, grid, strict=True)):
        rounds = request["rounds"]
        places = [entry["at"] for entry in rounds]
        axes.step(
            places,
            [entry["depth"] for entry in rounds],
            where="post",
            color=_DRAFTED,
            lw=1.0,
            label="drafted depth",
        )
        if any(entry["nodes"] != entry["depth"] for entry in rounds):
            nodes = [entry["nodes"] for entry in rounds]
            axes.step(
                places, nodes, where="post", color=_DRAFTED, lw=0.8, ls=":", label="drafted nodes"
            )
        axes.plot(
            places,
            [entry["accepted"] for entry in rounds],
            ".",
            color=_ACCEPTED,
            ms=4,
            label="accepted",
        )
        axes.set_xlabel("tokens generated")
        axes.set_title(f"prompt {number + 1}", loc="left", fontsize=10)
    grid[0].set_ylabel("tokens a round")
    grid[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    return path

"""A picture of requests over their tokens: what was drafted and accepted, and at what price."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

_DRAFTED: Final = "#c8762b"
_ACCEPTED: Final = "#0f7b6c"
_PRICE: Final = "#4878a8"


def write_trace_plot(requests: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """A column per request: drafted depth and accepted tokens above, the price of a second below where there is one.

    Args:
        requests: Each with its `rounds`, as `monge.engine.trace.rounds_of` gives them.
        path: File to write.
    """
    figure = Figure(figsize=(max(6.4, 4.2 * len(requests)), 5.0), layout="constrained")
    grid = figure.subplots(2, len(requests), squeeze=False, sharex="col", height_ratios=(2, 1))
    for number, request in enumerate(requests):
        rounds, (top, bottom) = request["rounds"], (grid[0][number], grid[1][number])
        places = [entry["at"] for entry in rounds]
        top.step(
            places,
            [entry["depth"] for entry in rounds],
            where="post",
            color=_DRAFTED,
            lw=1.0,
            label="drafted depth",
        )
        if any(entry["nodes"] != entry["depth"] for entry in rounds):
            nodes = [entry["nodes"] for entry in rounds]
            top.step(
                places, nodes, where="post", color=_DRAFTED, lw=0.8, ls=":", label="drafted nodes"
            )
        top.plot(
            places,
            [entry["accepted"] for entry in rounds],
            ".",
            color=_ACCEPTED,
            ms=4,
            label="accepted",
        )
        priced = [(entry["at"], entry["price"]) for entry in rounds if entry["price"] is not None]
        bottom.plot([at for at, _ in priced], [price for _, price in priced], color=_PRICE, lw=1.0)
        if not priced:
            bottom.text(
                0.5,
                0.5,
                "this controller states no price",
                ha="center",
                transform=bottom.transAxes,
                fontsize=8,
            )
        bottom.set_xlabel("tokens generated")
        top.set_title(f"prompt {number + 1}", loc="left", fontsize=10)
    grid[0][0].set_ylabel("tokens a round")
    grid[1][0].set_ylabel("price: tokens per second")
    grid[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    return path

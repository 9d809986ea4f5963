"""Draw block efficiency and speed, survival of drafts, and depths over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOUR: Final = "#0f7b6c"
MARK: Final = "#c8762b"
GREY: Final = "#777777"


def write_plots(replayed: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw all pictures, and return their files."""
    if not replayed:
        return []
    return [
        _comparison(replayed, folder / "configurations.png"),
        _survival(replayed, folder / "survival.png"),
        _depths(replayed, folder / "depths.png"),
    ]


def _comparison(replayed: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw bars with intervals, and what the best fixed depth and the oracle expect."""
    timed = [found for found in replayed if found["tokens_per_s"] is not None]
    names = ["block_efficiency", *(["tokens_per_s"] if len(timed) == len(replayed) else [])]
    figure = Figure(
        figsize=(1.5 + 5.2 * len(names), 1.6 + 0.42 * len(replayed)), layout="constrained"
    )
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    labels = [found["label"] for found in replayed]
    for axes, name in zip(panels, names, strict=True):
        means = [found[name]["mean"] for found in replayed]
        spread = [
            [found[name]["mean"] - found[name]["low"] for found in replayed],
            [found[name]["high"] - found[name]["mean"] for found in replayed],
        ]
        axes.barh(labels, means, xerr=spread, color=COLOUR, error_kw={"capsize": 2, "lw": 1})
        best = [max(depth[name] for depth in found["bounds"]["depths"]) for found in replayed]
        axes.plot(best, labels, "|", color=MARK, ms=14, mew=2, label="best fixed depth")
        if name == "tokens_per_s":
            ideal = [found["bounds"]["oracle"][name] for found in replayed]
            axes.plot(ideal, labels, "|", color=GREY, ms=14, mew=2, label="oracle")
        axes.set_xlabel(f"{name.replace('_', ' ')}: mean, 95% interval over texts")
        axes.tick_params(labelsize=8)
    panels[0].invert_yaxis()
    handles, names_shown = panels[-1].get_legend_handles_labels()
    figure.legend(
        handles, names_shown, fontsize=8, frameon=False, ncols=2, loc="outside lower center"
    )
    return _save(figure, path)


def _survival(replayed: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw P(the first k draft tokens are accepted), averaged over all positions."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, found in enumerate(replayed):
        curve = [1.0, *found["bounds"]["survival"]]
        axes.plot(
            range(len(curve)),
            curve,
            "o-",
            ms=3,
            lw=1.2,
            color=f"C{number % 10}",
            label=found["label"],
        )
    axes.set_xlabel("draft tokens")
    axes.set_ylabel("probability that all of them are accepted")
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(fontsize=7, frameon=False, ncols=2, loc="outside lower center")
    return _save(figure, path)


def _depths(replayed: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the depth and the accepted tokens of every round of the first pass, text after text."""
    figure = Figure(figsize=(9, 0.8 + 1.5 * len(replayed)), layout="constrained")
    rows = figure.subplots(len(replayed), 1, squeeze=False, sharex=True)[:, 0]
    for axes, found in zip(rows, replayed, strict=True):
        start, places, depths, accepted = 0, list[int](), list[int](), list[int]()
        for positions, trace in zip(found["lengths"], found["rounds"], strict=True):
            axes.axvline(start, color="#dddddd", lw=0.8, zorder=0)
            places += [start + written for written, *_ in trace]
            depths += [depth for _, depth, _ in trace]
            accepted += [count for *_, count in trace]
            start += positions
        axes.step(places, depths, where="post", color=COLOUR, lw=1.2, label="depth")
        axes.plot(places, accepted, ".", color=MARK, ms=3, label="accepted")
        axes.set_title(found["label"], loc="left", fontsize=8)
        axes.set_ylim(-0.5, max([1, *depths]) + 0.5)
        axes.tick_params(labelsize=7)
    rows[-1].set_xlabel("tokens written; a line where a text begins")
    handles, names = rows[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, ncols=2, loc="outside upper right")
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path

"""Three pictures of a replay: block efficiency and speed, windows over time, and whether drafts are as good as they think."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOUR: Final = "#0f7b6c"
MARK: Final = "#c8762b"
GREY: Final = "#777777"


def write_plots(replayed: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw what there is to draw; returns the files."""
    if not replayed:
        return []
    return [
        _comparison(replayed, folder / "configurations.png"),
        _survival(replayed, folder / "survival.png"),
        _windows(replayed, folder / "windows.png"),
    ]


def _comparison(replayed: Sequence[dict[str, Any]], path: Path) -> Path:
    """Bars with intervals; beside the speeds, what the best fixed window and the oracle expect."""
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
        best = [max(window[name] for window in found["hindsight"]["windows"]) for found in replayed]
        axes.plot(best, labels, "|", color=MARK, ms=14, mew=2, label="best fixed window")
        if name == "tokens_per_s":
            ideal = [found["hindsight"]["oracle"][name] for found in replayed]
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
    """P(the first k draft tokens are accepted), averaged over all positions."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, found in enumerate(_different(replayed, "survival")):
        curve = [1.0, *found["survival"]]
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


def _windows(replayed: Sequence[dict[str, Any]], path: Path) -> Path:
    """The window and the accepted tokens of every round of the first pass, text after text."""
    figure = Figure(figsize=(9, 0.8 + 1.5 * len(replayed)), layout="constrained")
    rows = figure.subplots(len(replayed), 1, squeeze=False, sharex=True)[:, 0]
    for axes, found in zip(rows, replayed, strict=True):
        start, places, windows, accepted = 0, list[int](), list[int](), list[int]()
        for positions, trace in zip(found["lengths"], found["windows"], strict=True):
            axes.axvline(start, color="#dddddd", lw=0.8, zorder=0)
            places += [start + written for written, *_ in trace]
            windows += [window for _, window, _ in trace]
            accepted += [count for *_, count in trace]
            start += positions
        axes.step(places, windows, where="post", color=COLOUR, lw=1.2, label="window")
        axes.plot(places, accepted, ".", color=MARK, ms=3, label="accepted")
        axes.set_title(found["label"], loc="left", fontsize=8)
        axes.set_ylim(-0.5, max([1, *windows]) + 0.5)
        axes.tick_params(labelsize=7)
    rows[-1].set_xlabel("tokens written; a line where a text begins")
    handles, names = rows[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, ncols=2, loc="outside upper right")
    return _save(figure, path)


def _different(replayed: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The first configuration of every curve: what controllers do does not change it."""
    return [
        found
        for number, found in enumerate(replayed)
        if found[name] not in [one[name] for one in replayed[:number]]
    ]


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path

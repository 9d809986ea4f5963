"""Pictures of acceptance: against the number of candidates, against nodes, and of every rule against its optimum."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lab.acceptance.nodes import OPTIMUM

Record = Mapping[str, Any]
MARKERS: Final = "osD^vP*X<>"
OPTIMA_SHOWN: Final = ("iid", "without_replacement", "greedy", "top")
DASHES: Final = ("-", "--", ":", "-.")


def write_plots(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what there is to draw; returns the files."""
    drawn = (
        [_by_candidates(document["nodes"], folder / "acceptance_by_candidates.png")]
        if document["nodes"]
        else []
    )
    if document["rounds"]:
        drawn.append(_by_nodes(document["rounds"], folder / "block_efficiency_by_nodes.png"))
    return drawn


def rule_figure(rule: str, points: Sequence[tuple[str, float, float]], path: Path) -> Path:
    """Acceptance of a rule against the optimum of its drafting, one point per pair of laws.

    Args:
        rule: Name, for the title.
        points: Drafting, optimum and acceptance.
        path: Where to write; the suffix chooses the format.
    """
    figure = Figure(figsize=(4.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#888888", lw=1)
    for number, drafting in enumerate(dict.fromkeys(point[0] for point in points)):
        xs = [best for way, best, _ in points if way == drafting]
        ys = [value for way, _, value in points if way == drafting]
        axes.scatter(
            xs,
            ys,
            s=14,
            alpha=0.7,
            linewidths=0,
            marker=MARKERS[number % len(MARKERS)],
            label=drafting,
        )
    axes.set_xlabel("optimum for this way of drafting")
    axes.set_ylabel("acceptance")
    axes.set_title(rule, loc="left", fontsize=10)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.set_aspect("equal")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _by_candidates(records: Sequence[Record], path: Path) -> Path:
    """A panel per temperature: rules under the drafting that they are made for, and the optima of the ways of drafting."""
    shown = [
        r
        for r in records
        if r["is_usual"] or (r["rule"] == OPTIMUM and r["drafting"] in OPTIMA_SHOWN)
    ]
    temperatures = list(dict.fromkeys(record["temperature"] for record in shown))
    lines = list(dict.fromkeys((record["rule"], record["drafting"]) for record in shown))
    figure = Figure(figsize=(5.4 * len(temperatures), 5.8), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0].tolist()
    for axes, temperature in zip(panels, temperatures, strict=True):
        for number, (rule, drafting) in enumerate(lines):
            line = [
                r
                for r in shown
                if (r["temperature"], r["rule"], r["drafting"]) == (temperature, rule, drafting)
            ]
            xs = [record["candidates"] for record in line]
            ys = [record["acceptance"]["mean"] for record in line]
            is_best = rule == OPTIMUM
            look: dict[str, Any] = {"ls": "--" if is_best else "-", "lw": 1.0 if is_best else 1.4}
            look |= {"marker": MARKERS[number % len(MARKERS)], "ms": 4, "color": f"C{number % 10}"}
            label = f"optimum, {drafting}" if is_best else f"{rule} ({drafting})"
            axes.plot(xs, ys, label=label, **look)
        _finish(axes, f"T = {temperature:g}", "candidates K")
    panels[0].set_ylabel("acceptance at a node")
    _legend(figure, panels)
    figure.savefig(path, dpi=130)
    return path


def _by_nodes(records: Sequence[Record], path: Path) -> Path:
    """A panel per temperature: of every family and budget the drafting and rule with most tokens a forward."""
    temperatures = list(dict.fromkeys(record["temperature"] for record in records))
    families = list(dict.fromkeys(record["family"] for record in records))
    figure = Figure(figsize=(5.4 * len(temperatures), 5.8), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0].tolist()
    for axes, temperature in zip(panels, temperatures, strict=True):
        here = [record for record in records if record["temperature"] == temperature]
        for number, family in enumerate(families):
            group = [record for record in here if record["family"] == family]
            best = [
                _best(group, budget)
                for budget in dict.fromkeys(record["budget"] for record in group)
            ]
            xs = [record["num_nodes"] for record in best]
            means = [record["block_efficiency"]["mean"] for record in best]
            spread = [
                [
                    m - record["block_efficiency"]["low"]
                    for m, record in zip(means, best, strict=True)
                ],
                [
                    record["block_efficiency"]["high"] - m
                    for m, record in zip(means, best, strict=True)
                ],
            ]
            look: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "ms": 5}
            look |= {"color": f"C{number % 10}", "ls": DASHES[number % len(DASHES)]}
            axes.errorbar(
                xs, means, yerr=spread, lw=1, elinewidth=0.5, capsize=2, label=family, **look
            )
        _finish(axes, f"T = {temperature:g}", "drafted nodes")
    panels[0].set_ylabel("tokens per target forward, best drafting and rule")
    _legend(figure, panels)
    figure.savefig(path, dpi=130)
    return path


def _best(group: Sequence[Record], budget: int) -> Record:
    within = [record for record in group if record["budget"] == budget]
    return max(within, key=lambda record: record["block_efficiency"]["mean"])


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.2)


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    known = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    figure.legend(
        known.values(), known.keys(), fontsize=7, frameon=False, ncols=4, loc="outside lower center"
    )

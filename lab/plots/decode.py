"""Three pictures of a comparison: how fast, where the time of a round goes, and how deep drafts are accepted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from monge.bench.report import STAGES

Record = Mapping[str, Any]
COLOURS: Final = {
    "plain": "#777777",
    "assisted": "#c8762b",
    "prompt_lookup": "#b5a642",
    "monge": "#0f7b6c",
}
STAGE_COLOURS: Final = ("#c8762b", "#0f7b6c", "#7a5195", "#4878a8", "#bbbbbb")
LINES: Final = ("-", "--", ":", "-.")


def write_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw what there is to draw; returns the files."""
    measured = [record for record in records if record["failure"] is None]
    rounds = [
        record
        for record in measured
        if "seconds_per_round" in record and record["batch_size"] == _first_size(measured)
    ]
    drawn = [_speed(measured, folder / "tokens_per_s.png")] if measured else []
    if rounds:
        drawn.append(_round_time(rounds, folder / "round_time.png"))
    if any(record["acceptance_by_depth"] for record in rounds):
        drawn.append(_acceptance(rounds, folder / "acceptance_by_depth.png"))
    return drawn


def _speed(records: Sequence[Record], path: Path) -> Path:
    """Draw medians and ranges of the repeats, in a row per batch size and a column per temperature."""
    sizes, temperatures = _values(records, "batch_size"), _values(records, "temperature")
    names = _values(records, "arm")
    height = 1.2 + (0.27 * len(names) + 0.7) * len(sizes)
    figure = Figure(figsize=(6.2 * len(temperatures), height), layout="constrained")
    grid = figure.subplots(len(sizes), len(temperatures), squeeze=False)
    for row, size in enumerate(sizes):
        for column, temperature in enumerate(temperatures):
            axes = grid[row][column]
            cell = [
                record
                for record in records
                if (record["batch_size"], record["temperature"]) == (size, temperature)
            ]
            medians = [record["tokens_per_s"]["median"] for record in cell]
            spread = [
                [
                    median - record["tokens_per_s"]["low"]
                    for median, record in zip(medians, cell, strict=True)
                ],
                [
                    record["tokens_per_s"]["high"] - median
                    for median, record in zip(medians, cell, strict=True)
                ],
            ]
            colours = [COLOURS[record["family"]] for record in cell]
            labels = [record["arm"] for record in cell]
            axes.barh(labels, medians, xerr=spread, color=colours, error_kw={"capsize": 2, "lw": 1})
            axes.invert_yaxis()
            axes.set_title(f"{_mode(temperature)}, batch {size}", loc="left", fontsize=10)
            axes.set_xlabel("tokens per second: median, range")
            axes.margins(y=0.02)
            axes.tick_params(labelsize=8)
    return _save(figure, path)


def _round_time(records: Sequence[Record], path: Path) -> Path:
    """Milliseconds of a mean round, stage by stage."""
    labels = [f"{record['arm']} ({_mode(record['temperature'])})" for record in records]
    figure = Figure(figsize=(9, 1.6 + 0.25 * len(records)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(records)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        widths = [1e3 * record["seconds_per_round"][stage] for record in records]
        axes.barh(labels, widths, left=left, color=colour, label=stage.removesuffix("_s"))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round")
    axes.set_title(f"Time of a round, batch {records[0]['batch_size']}", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.margins(y=0.02)
    figure.legend(ncols=len(STAGES), fontsize=8, loc="outside lower center", frameon=False)
    return _save(figure, path)


def _acceptance(records: Sequence[Record], path: Path) -> Path:
    """Conditional acceptance at every depth, a panel per temperature."""
    temperatures, names = _values(records, "temperature"), _values(records, "arm")
    figure = Figure(figsize=(6.2 * len(temperatures), 5.6), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        cell = [
            record
            for record in records
            if record["temperature"] == temperature and record["acceptance_by_depth"]
        ]
        for record in cell:
            rates, number = record["acceptance_by_depth"], names.index(record["arm"])
            look = {"color": f"C{number % 10}", "linestyle": LINES[number // 10 % len(LINES)]}
            axes.plot(
                range(1, len(rates) + 1),
                rates,
                **look,
                marker="o",
                ms=3,
                lw=1.2,
                label=record["arm"],
            )
        axes.set_title(_mode(temperature), loc="left", fontsize=10)
        axes.set_xlabel("depth in the draft")
        axes.set_ylim(0, 1.03)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0][0].set_ylabel("accepted at this depth, given that it was reached")
    lines = {line.get_label(): line for axes in panels[0] for line in axes.get_lines()}
    figure.legend(
        lines.values(), lines.keys(), fontsize=7, frameon=False, ncols=3, loc="outside lower center"
    )
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path


def _values(records: Sequence[Record], name: str) -> list[Any]:
    return list(dict.fromkeys(record[name] for record in records))


def _first_size(records: Sequence[Record]) -> int | None:
    return min((record["batch_size"] for record in records), default=None)


def _mode(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"

"""Pictures of `python -m lab.shape`, one a section."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Document = Mapping[str, Any]
_MARKS: Final = "osD^vP*X"


def draw(document: Document, folder: Path) -> dict[str, Path]:
    """Draw every section; returns the files by section."""
    drawn: dict[str, Path] = {}
    for name, picture in PICTURES.items():
        figure = Figure(figsize=(9.2, 3.4), layout="constrained")
        picture(figure, document)
        drawn[name] = folder / f"{name}.png"
        figure.savefig(drawn[name], dpi=120)
    return drawn


def _similarity(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    for mark, (task, rows) in zip(_MARKS, _grouped(document["similarity"], "task").items(), strict=False):
        for axes, key in ((left, "cosine"), (right, "total_variation")):
            lags = [row["lag"] for row in rows]
            middle = [row[key]["p50"] for row in rows]
            axes.plot(lags, middle, marker=mark, label=task)
            axes.fill_between(lags, [row[key]["p5"] for row in rows], [row[key]["p95"] for row in rows], alpha=0.12)
        left.plot(lags, [row["cosine_of_another_text"]["p50"] for row in rows], ":", color="grey", lw=1)
    left.set_ylim(top=1.15)
    _named(left, "cosine of h(t) and h(t+n); dotted: another text's", "lag n", "median, 5-95 %")
    _named(right, "TV of p(t) and p(t+n)", "lag n", "median, 5-95 %")
    left.legend(fontsize=8, ncols=3, loc="upper center")


def _stability(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    points = document["stability"]["points"]
    left.plot([x for x, _ in points], [y for _, y in points], ".", ms=3, color="#0f7b6c")
    left.plot([0, 1], [0, 1], color="grey", lw=1)
    _named(left, "step stability: below the line, always", "bound tanh(osc/4)", "TV of p(t), p(t+1)")
    shares = document["structure"]["share_in_main_directions"]
    right.bar(list(shares), list(shares.values()), color="#4878a8")
    _named(right, "share of |h(t+1) - h(t)|² in main directions of h", "directions", "share")


def _steps(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    for mark, (head, rows) in zip(_MARKS, _grouped(document["steps"], "head").items(), strict=False):
        numbers = [row["step"] for row in rows]
        (line,) = left.plot(numbers, [row["acceptance"] for row in rows], marker=mark, label=head)
        left.plot(numbers, [row["survival"] for row in rows], "--", marker=mark, color=line.get_color(), lw=1)
        right.plot(numbers, [row["error"]["mean"] for row in rows], marker=mark, color=line.get_color(), label=head)
        right.plot(numbers, [row["one_step_error"]["mean"] for row in rows], ":", color=line.get_color())
        if rows[0]["error_bound"] is not None:
            right.plot(numbers, [row["error_bound"]["mean"] for row in rows], "-.", color=line.get_color(), lw=1)
    for key, style in (("ceiling_above", "-"), ("ceiling_below", ":")):
        rows = document["ceiling"]
        left.plot([row["step"] for row in rows], [row[key] for row in rows], style, color="black", lw=1)
    _named(left, "acceptance; dashed: survival; black: blind ceiling", "step n", "probability")
    _named(right, "|e(n)|; dotted: one step from the truth; dash-dotted: bound", "step n", "mean error")
    left.legend(fontsize=8)
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xticks(sorted({row["step"] for row in document["steps"]}))


def _calibration(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="grey", lw=1)
    groups = _grouped(document["calibration"], "head")
    for number, (mark, (head, rows)) in enumerate(zip(_MARKS, groups.items(), strict=False)):
        errors = ", ".join(f"{row['ece']:.3f}" for row in rows)
        for row in rows:
            said, was = [one[0] for one in row["bins"]], [one[1] for one in row["bins"]]
            label = f"{head}: ECE by step {errors}" if row is rows[0] else None
            left.plot(said, was, marker=mark, ms=4, lw=1, color=f"C{number}", alpha=1.0 / row["step"], label=label)
    _named(
        left,
        "reliability of the most probable token; paler: later steps",
        "mass that the head gives it",
        "mass under the target",
    )
    left.legend(fontsize=6)
    for row in document["gates"]:
        gate = row["gate"]
        right.plot([gate["p5"], gate["p95"]], [row["step"]] * 2, color="#7a5195")
        right.plot(gate["p50"], row["step"], "o", color="#7a5195")
    right.set_xlim(0, 1)
    right.set_yticks([row["step"] for row in document["gates"]])
    _named(right, "gates of the trained head: median, 5-95 %", "g", "step")


def _times(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    times = document["times"]
    for axes, table in ((left, times["stages"]), (right, times["drafting"])):
        middle = [entry["p50"] for entry in table.values()]
        axes.barh(list(table), middle, xerr=[[0.0] * len(middle), [entry["p95"] - entry["p50"] for entry in table.values()]])
        axes.invert_yaxis()
    _named(left, "a round by stage", "ms: median, whisker to p95", "")
    _named(right, "one step of drafting", "ms: median, whisker to p95", "")


def _transfer(figure: Figure, document: Document) -> None:
    axes = figure.subplots()
    rows = document["transfer"]
    sources, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("fitted_on", "measured_on"))
    value = {(row["fitted_on"], row["measured_on"]): row for row in rows}
    grid = [[value[source, task]["block_efficiency"] for task in tasks] for source in sources]
    axes.imshow(grid, cmap="YlGn", aspect="auto", alpha=0.6)
    for line, source in enumerate(sources):
        for column, task in enumerate(tasks):
            entry = value[source, task]
            text = f"{entry['block_efficiency']:.2f}  ({entry['relative_to_own']:.0%})"
            axes.text(column, line, text, ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_yticks(range(len(sources)), sources)
    _named(axes, "block efficiency (share of that of the task's own head)", "measured on", "fitted on")


def _ablation(figure: Figure, document: Document) -> None:
    groups = _grouped(document["ablation"], "head")
    for axes, (head, rows) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        for place, row in enumerate(rows):
            gain = row["over_temperature"]
            axes.plot([gain["low"], gain["high"]], [place, place], color="#7a5195")
            axes.plot(gain["mean"], place, "o", color="#7a5195")
        axes.axvline(0.0, color="grey", lw=1)
        axes.set_yticks(range(len(rows)), [row["arm"] for row in rows])
        axes.invert_yaxis()
        _named(axes, head, "block efficiency over one temperature, 95 %", "")


def _sampling(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    for mark, (top_p, rows) in zip(_MARKS, _grouped(document["sampling"], "top_p").items(), strict=False):
        for axes, key in ((left, "block_efficiency"), (right, "tokens_per_s")):
            axes.plot([row["temperature"] for row in rows], [row[key] for row in rows], marker=mark, label=f"top-p {top_p:g}")
    _named(left, "block efficiency", "temperature", "tokens per target forward")
    _named(right, "speed", "temperature", "tokens/s")
    left.legend(fontsize=8)


def _contexts(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    rows = [row for row in document["contexts"] if "skipped" not in row]
    lengths = [row["context"] for row in rows]
    left.plot(lengths, [row["block_efficiency"] for row in rows], marker="o")
    for stage in rows[0]["stages_ms"] if rows else ():
        right.plot(lengths, [row["stages_ms"][stage]["p50"] for row in rows], marker="o", label=stage)
    _named(left, "block efficiency", "tokens in front", "tokens per target forward")
    _named(right, "stages of a round", "tokens in front", "ms, median")
    right.legend(fontsize=8)


def _drafters(figure: Figure, document: Document) -> None:
    left, right = figure.subplots(1, 2)
    groups = _grouped(document["drafters"], "temperature")
    for shift, (temperature, rows) in enumerate(groups.items()):
        places = [place + 0.4 * shift - 0.2 for place in range(len(rows))]
        for axes, key in ((left, "block_efficiency"), (right, "tokens_per_s")):
            axes.barh(places, [row[key] for row in rows], height=0.38, label=f"T = {temperature:g}")
            axes.set_yticks(range(len(rows)), [row["drafter"] for row in rows])
    for axes in (left, right):
        axes.invert_yaxis()
    _named(left, "block efficiency", "tokens per target forward", "")
    _named(right, "speed, one run", "tokens/s", "")
    left.legend(fontsize=8)


PICTURES: Final[Mapping[str, Callable[[Figure, Document], None]]] = {
    "similarity": _similarity,
    "stability": _stability,
    "times": _times,
    "steps": _steps,
    "calibration": _calibration,
    "sampling": _sampling,
    "contexts": _contexts,
    "transfer": _transfer,
    "ablation": _ablation,
    "drafters": _drafters,
}


def _grouped(rows: Sequence[Mapping[str, Any]], key: str) -> dict[Any, list[Mapping[str, Any]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _named(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)

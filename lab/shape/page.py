"""The document of `python -m lab.shape` as one HTML file, pictures included."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "similarity": (
        "How similar are successive hidden states?",
        "Cosine and relative distance of h(t) and h(t+n), total variation and entropic transport distance of the "
        "laws they give, with percentiles, by task and lag. The control is the state of another text at the same "
        "place: likeness that any two states share says nothing about the next step.",
    ),
    "stability": (
        "Does that make steps stable, and what is the structure?",
        "TV(p(t), p(t+1)) is at most tanh(osc/4), osc the range of W(h(t+1) - h(t)). What the cosine alone "
        "promises, with R the largest norm of a state and D the largest distance of two output rows, is beside "
        "it: near 1 it promises nothing.",
    ),
    "times": (
        "Where does a round's time go?",
        "Greedy, one request: stages of a round, and the pieces of one step of drafting, every kind of alignment "
        "included whether the head uses it or not. Trees are built and laws made within the stage 'draft'.",
    ),
    "steps": (
        "What happens as n grows?",
        "Acceptance, its lower bound 1 - tanh(osc/4), survival of a sampled chain, which is also what a step adds "
        "in tokens; errors from predicted states, from true ones (one step), and what the second and the step's "
        "Lipschitz constant allow the first to be. The ceiling is what no drafter beats that sees x(t+1) but "
        "nothing after it; a branched head is not bound by it.",
    ),
    "calibration": (
        "Is it calibrated, and what do the gates do?",
        "Mass that a head gives its most probable token, in ten bins, and the mass that the target gives that token; "
        "ECE is their mean distance. Below, the gates of the trained head: shut below 0.1, open above 0.9.",
    ),
    "sampling": (
        "Temperature and top-p?",
        "The real loop; greedy with a tree of top tokens, sampled with i.i.d. candidates.",
    ),
    "contexts": (
        "Long contexts?",
        "Prompts one after another in front of one greedy completion.",
    ),
    "transfer": (
        "Another task than the one it was fitted on?",
        "A ridge head fitted on the text of one task, measured on held-out text of every task, with its calibration error.",
    ),
    "ablation": (
        "Why transport?",
        "Every alignment against its controls on the same held-out rows. Intervals are paired bootstraps over "
        "rows. Transport is worth something where its interval over one temperature lies above 0.",
    ),
    "drafters": (
        "Against other drafters without a draft model?",
        "Same target, prompts, seed and harness, default settings of each; heads of other kinds (--beside) with SHAPE's own "
        "trees and rules. Single runs: compare speeds on an idle "
        "machine only.",
    ),
    "exactness": (
        "Is the output still the target's?",
        "Law error of the real loop with a random head on a toy target, all branches enumerated.",
    ),
}
"""Title and how to read it, by section of the document."""

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:1rem 0}td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}code{font-size:13px}"
    ".wide{overflow-x:auto}"
)


def page(document: Mapping[str, Any], pictures: Mapping[str, Path]) -> str:
    """The HTML of a document.

    Args:
        document: As `shape_report` makes it.
        pictures: Files by section; they are put into the page.
    """
    about = document["about"]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>monge: SHAPE</title>',
        f"<style>{_STYLE}</style><h1>SHAPE, measured</h1>",
        f"<p>Head: <code>{html.escape(str(about['head']))}</code>, {about['head_parameters']:,} numbers, "
        f"{about['head_bytes'] / 1e6:.1f} MB beside the target. Command: <code>{html.escape(' '.join(about['argv']))}</code>, "
        f"commit {html.escape(str(about['commit']))}, {html.escape(str(about['device']))}, {about['num_threads']} threads, "
        f"{html.escape(str(about['time_utc']))}, load {_load(about['load_average'])}.</p>",
    ]
    for name, (title, reading) in SECTIONS.items():
        parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(reading)}</p>")
        if name in pictures:
            image = base64.b64encode(pictures[name].read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{image}">')
        parts += [_table(rows) for rows in _rows_of(name, document)]
    parts.append(f"<h2>Provenance</h2><pre>{html.escape(json.dumps(about, indent=1))}</pre></html>")
    return "\n".join(parts)


def _rows_of(name: str, document: Mapping[str, Any]) -> list[Sequence[Mapping[str, Any]]]:
    if name == "stability":
        figures = {key: value for key, value in document["stability"].items() if key != "points"}
        return [_listed(figures), _listed(document["structure"])]
    if name == "times":
        times = document["times"]
        stages = [{"stage": stage, **figures, "share": times["share"][stage]} for stage, figures in times["stages"].items()]
        pieces = [{"piece of drafting": piece, **figures} for piece, figures in times["drafting"].items()]
        return [[*stages, {"stage": "total", **times["total"]}], pieces]
    if name == "steps":
        return [document["steps"], document["ceiling"]]
    if name == "calibration":
        return [[{key: row[key] for key in ("head", "step", "ece")} for row in document["calibration"]], document["gates"]]
    return [document[name]]


def _listed(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"figure": key, "value": value} for key, value in figures.items()]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{html.escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row.get(column))}</td>" for column in columns) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:  # noqa: ANN401 (whatever a document holds)
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, Mapping):
        if {"mean", "p5", "p50", "p95"} == value.keys():
            return f"{_cell(value['mean'])} ({_cell(value['p5'])} / {_cell(value['p50'])} / {_cell(value['p95'])})"
        return "; ".join(f"{html.escape(str(key))} {_cell(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_cell(one) for one in value)
    return html.escape(str(value))


def _load(average: Sequence[float] | None) -> str:
    return "unknown" if average is None else f"{average[0]:.1f}"

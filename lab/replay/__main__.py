"""`python -m lab.replay`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lab.command import plotting, run
from lab.replay.survey import Expectation, Position, fixed_depth, oracle, survey, survival
from monge.cli import options
from monge.cli.console import output, plain_table, quiet_host, reported, write_document
from monge.cli.options import check_out_folder
from monge.cli.replay import load_draft, show_replay
from monge.core.errors import MongeError
from monge.core.model import SequenceModel
from monge.replay.compare import replay
from monge.replay.configuration import Configuration, grid
from monge.replay.costs import costs_for, untimed
from monge.replay.file import read_log
from monge.replay.log import LawLog
from monge.replay.simulate import PLAIN, seeded
from monge.replay.text import ReplayTarget

OUT: Final = Path("lab-replay")
DEPTH: Final = 8


@reported
def main(
    log: Annotated[Path, typer.Argument(help="A log made by `monge replay record`.")],
    *,
    draft: options.Draft = None,
    drafter: Annotated[list[str] | None, typer.Option("--drafter")] = None,
    tree: Annotated[list[str] | None, typer.Option("--tree")] = None,
    verifier: Annotated[list[str] | None, typer.Option("--verifier")] = None,
    controller: Annotated[list[str] | None, typer.Option("--controller")] = None,
    depth: Annotated[int, typer.Option("--depth", help="Deepest fixed depth.")] = DEPTH,
    seed: Annotated[int, typer.Option("--seed", help="Of all passes.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for JSON and plots.")] = OUT,
) -> None:
    """Compare configurations with the best fixed depth, and with an oracle.

    The regret is the share of speed lost to each. The oracle knows the chance of acceptance at
    every position of the logged texts, and picks the best depth.
    """
    quiet_host()
    check_out_folder(out)
    draw = plotting("lab.replay.plots", "use monge replay run").write_plots
    found = read_log(log)
    model, replayed = load_draft(found, draft), list[dict[str, Any]]()
    for one in grid(drafter=drafter, tree=tree, verifier=verifier, controller=controller):
        try:
            figures = replay(one, found, model, seed=seed)
            bounds = bounded(one, found, model, figures, depth=depth, seed=seed)
        except MongeError as error:
            output().print(f"{one.label}: {error}", markup=False, soft_wrap=True)
            continue
        replayed.append(figures | {"bounds": bounds})
    document = {"replayed": replayed, "refused": []}
    show_replay(document)
    output().print(_table(replayed))
    files = [write_document(document, out, "replay.json"), *draw(replayed, out)]
    output().print("written: " + ", ".join(map(str, files)), soft_wrap=True)


def bounded(
    configuration: Configuration,
    log: LawLog,
    draft: SequenceModel | None,
    figures: dict[str, Any],
    *,
    depth: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the speeds of fixed depths and of the oracle, and the regret to them.

    Args:
        configuration: What was replayed.
        log: On which texts.
        draft: The draft model.
        figures: Those of `replay`.
        depth: Deepest plan.
        seed: Of the survey.
    """
    parts = configuration.components(ReplayTarget(log.model.vocab_size), draft)
    depth = min(depth, parts.drafter.capabilities.max_depth)
    texts = [
        survey(parts, log, text, seeded(seed, "survey", number), depth=depth)
        for number, text in enumerate(log.texts)
    ]
    names = configuration.drafter_names(draft)
    is_timed = bool(log.costs) and untimed(log, names) is None
    costs = costs_for(log, names) if is_timed else PLAIN
    total = sum(map(len, texts))
    depths = [
        _speeds([fixed_depth(text, costs, level) for text in texts], total)
        for level in range(depth + 1)
    ]
    ideal = _speeds([oracle(text, costs, depth) for text in texts], total)
    name = "tokens_per_s" if is_timed else "block_efficiency"
    speeds = [one[name] for one in depths]
    curves = [(survival(text, depth), len(text)) for text in texts]
    return {
        "depths": depths,
        "oracle": ideal,
        "best_depth": speeds.index(max(speeds)),
        "regret": {
            "best_fixed": 1.0 - figures[name]["mean"] / max(speeds),
            "oracle": 1.0 - figures[name]["mean"] / ideal[name],
        },
        "survival": [
            sum(curve[level] * weight for curve, weight in curves) / total for level in range(depth)
        ],
    }


def mean_nodes(texts: Sequence[Sequence[Position]]) -> tuple[int, ...]:
    """Return mean drafted nodes of depth at most 0, 1, ..., over all positions with room for them."""
    places = [place.nodes for text in texts for place in text]
    means = list[int]()
    for level in range(max(map(len, places))):
        nodes = [one[level] for one in places if len(one) > level]
        means.append(round(sum(nodes) / len(nodes)))
    return tuple(means)


def _speeds(texts: Sequence[Expectation], total: int) -> dict[str, float]:
    return {
        "block_efficiency": total / sum(text.rounds for text in texts),
        "tokens_per_s": total / sum(text.seconds for text in texts),
    }


def _table(replayed: Sequence[dict[str, Any]]) -> Any:  # noqa: ANN401
    shown = plain_table(
        "share of speed lost", "configuration", ("best depth", "to it", "to the oracle")
    )
    for found in replayed:
        bounds = found["bounds"]
        regret = bounds["regret"]
        shown.add_row(
            found["label"],
            str(bounds["best_depth"]),
            f"{regret['best_fixed']:.1%}",
            f"{regret['oracle']:.1%}",
        )
    return shown


if __name__ == "__main__":
    run(main)

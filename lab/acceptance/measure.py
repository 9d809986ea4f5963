"""`python -m lab.acceptance`: what every rule and tree shape keeps, over laws of a real pair, and how far it is from the best.

Speed has two factors, how many tokens a round commits and how long it takes. This command measures
the first, without a clock: acceptance at single nodes over logged laws, exactly where a closed form
is known, and tokens a round on whole trees. Numbers come with intervals from resampled texts,
because neighbouring prefixes of a text are not independent.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lab.acceptance.log import LawLog, LogSettings, log_laws, seeded
from lab.acceptance.nodes import node_records
from lab.acceptance.rounds import num_batches, round_records
from lab.acceptance.shapes import PATH_DEPTHS, Shape, path_table, shapes
from monge.bench.pair import Pair
from monge.bench.provenance import provenance
from monge.bench.resamples import Resamples
from monge.bench.runner import OnCall
from monge.core.errors import OptionError
from monge.prompts import Prompt, encode

QUICK_PROMPTS_PER_TASK: Final = 2
PROMPTS_PER_TASK: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSettings:
    """Settings of the measurement.

    Args:
        temperatures: Above zero.
        candidates: Numbers of candidates K at single nodes.
        budgets: Node budgets of the trees.
        path_counts: Numbers of independent paths of SpecTr's table.
        path_depths: Lengths of these paths.
        samples: Runs a node of rules without a closed form.
        verifications: Decisions of every rule on every tree.
        log: How texts are written and read.
    """

    temperatures: tuple[float, ...] = (0.3, 0.6, 1.0)
    candidates: tuple[int, ...] = (1, 2, 3, 4, 8)
    budgets: tuple[int, ...] = (8, 16, 32)
    path_counts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    path_depths: tuple[int, ...] = PATH_DEPTHS
    samples: int = 4
    verifications: int = 4
    log: LogSettings = LogSettings()

    def __post_init__(self) -> None:
        if not (self.temperatures and self.candidates):
            raise OptionError(
                "bench acceptance: give at least one temperature and one number of candidates"
            )


QUICK: Final = AcceptanceSettings(
    temperatures=(0.6, 1.0),
    candidates=(1, 2, 4),
    budgets=(8,),
    path_counts=(1, 8),
    path_depths=(4,),
    samples=2,
    verifications=2,
    log=LogSettings(max_new_tokens=32, nodes_per_text=8, roots_per_text=2, draft_top_k=32),
)


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: AcceptanceSettings,
    *,
    progress: OnCall,
) -> dict[str, Any]:
    """Log laws, and measure nodes and trees at every temperature.

    Args:
        pair: The networks.
        prompts: What the target continues.
        settings: What is measured.
        progress: Told about progress.

    Returns:
        `nodes`, `rounds` and `paths` (see `acceptance_nodes` and `acceptance_rounds`), settings,
        prompts and provenance.
    """
    before = provenance(pair.target.device)
    prompt_ids = [encode(pair.tokenizer, prompt.text) for prompt in prompts]
    if not all(prompt_ids):
        raise OptionError("bench: a prompt has no tokens; remove it")
    trees = shapes(settings.budgets)
    table = path_table(settings.path_counts, settings.path_depths)
    batches = num_batches(
        len(prompts) * min(settings.log.roots_per_text, settings.log.max_new_tokens)
    )
    progress(
        "starting",
        len(settings.temperatures)
        * (1 + len(settings.candidates) + batches * (len(trees) + len(table))),
    )
    resamples = Resamples.draw(len(prompts), seeded(settings.log.seed, "bootstrap"))
    found: dict[str, list[dict[str, Any]]] = {"nodes": [], "rounds": [], "paths": []}
    for temperature in settings.temperatures:
        progress(f"target writes, T = {temperature:g}")
        log = log_laws(pair, prompt_ids, temperature, settings.log)
        for width in settings.candidates:
            progress(f"nodes, T = {temperature:g}, K = {width}")
            found["nodes"] += node_records(
                log, width, resamples, samples=settings.samples, seed=settings.log.seed
            )
        found["rounds"] += _rounds(
            pair, log, trees, settings=settings, resamples=resamples, progress=progress
        )
        found["paths"] += _rounds(
            pair, log, table, settings=settings, resamples=resamples, progress=progress
        )
    return {
        **found,
        "settings": asdict(settings),
        "models": dict(pair.names),
        "prompts": [
            {"task": p.task, "num_tokens": len(ids)}
            for p, ids in zip(prompts, prompt_ids, strict=True)
        ],
        "provenance": before,
    }


def write_document(document: dict[str, Any], folder: Path) -> Path:
    """The document as JSON.

    Raises:
        OptionError: If the folder cannot be written to.
    """
    path = folder / "acceptance.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write results to {str(folder)!r}: {error}") from error
    return path


def _rounds(
    pair: Pair,
    log: LawLog,
    trees: Sequence[Shape],
    *,
    settings: AcceptanceSettings,
    resamples: Resamples,
    progress: OnCall,
) -> list[dict[str, Any]]:
    return round_records(
        pair,
        log,
        trees,
        settings.log,
        verifications=settings.verifications,
        resamples=resamples,
        on_shape=lambda name: progress(f"T = {log.temperature:g}, {name}"),
    )

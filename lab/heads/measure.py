"""`python -m lab.heads`: what a head's laws are worth, with every alignment and without, and what the loop makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from lab.shape.diagonal import fit, head_with
from monge.api import make_components
from monge.draft.by_name import drafter_of
from monge.draft.published_heads import Head
from monge.draft.shape import Shape
from monge.draft.tree.registry import TREES
from monge.engine.decoder import Decoder
from monge.heads.readers.files import CONFIG, Checkpoint, read_json
from monge.heads.readers.registry import unknown_format
from monge.heads.shape.alignment import ALIGNMENTS
from monge.heads.shape.checkpoint import is_shape, load_head
from monge.networks.base import FeatureModel
from monge.training.calibrate import measure
from monge.training.chain import ChainQuality
from monge.training.texts import Ends, Text, Texts, feature_model, gradient_ends, read_texts

ARMS: Final = ("none", "temperature", "diagonal", *(name for name in ALIGNMENTS if name != "none"))
"""Alignments, and one temperature for each step in their place."""
LOOPS: Final = (
    ("chain(3)", "speculative_sampling"),
    ("fixed_width((4, 2, 1), children='iid')", "recursive_rejection"),
    ("best_first(16, 3, 4)", "sample_and_match"),
)
"""Trees and rules that the loop runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm of the ablation: strengths of the alignments, temperatures, and figures on text that chose neither."""

    head: str
    arm: str
    strengths: tuple[float, ...]
    temperatures: tuple[float, ...]
    quality: ChainQuality


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """Tokens per target forward of the real loop."""

    head: str
    temperature: float
    tree: str
    verifier: str
    block_efficiency: float
    num_rounds: int


def compare_arms(
    network: PreTrainedModel,
    folder: Path,
    rows: Sequence[Text],
    on_arm: Callable[[str], None],
) -> list[ArmResult]:
    """Fit every arm to the same predictions and measure it on the last third of the rows.

    The first third fits the maps, the second one chooses strengths and temperatures. A ridge
    predictor is fitted anew in every arm, since its later steps start from the aligned states of
    the earlier ones.
    """
    target, ends = feature_model(network), gradient_ends(network)
    texts, third = read_texts(target, rows), len(rows) // 3
    parts = texts.part(0, third), texts.part(third, 2 * third), texts.part(2 * third, len(rows))
    results: list[ArmResult] = []
    for arm in ARMS:
        on_arm(f"{folder.name}, {arm}")
        results.append(_arm(folder, target, arm, parts, ends))
    return results


@torch.no_grad()
def _arm(
    folder: Path, target: FeatureModel, arm: str, parts: tuple[Texts, Texts, Texts], ends: Ends
) -> ArmResult:
    fitted, chosen, held_out = parts
    trained = load_head(folder).to(fitted.states.device)
    trained.check(target)
    head = head_with(arm, trained.predictor, trained.sizes).to(fitted.states.device)
    fit(head, arm, fitted, chosen, ends)
    return ArmResult(
        head=folder.name,
        arm=arm,
        strengths=tuple(float(step.get_buffer("strength")) for step in head.alignments),
        temperatures=tuple(head.temperatures.tolist()),
        quality=measure(head, held_out, ends),
    )


def check_head(folder: str | Path) -> None:
    """Refuse a folder without a head.

    Raises:
        ModelLoadError: If it is missing, cannot be read, or is of no known format.
    """
    if drafter_of(folder, folder) is None:
        raise unknown_format(Checkpoint(folder))


def is_shape_folder(folder: Path) -> bool:
    """Return whether a folder holds a SHAPE head, whose alignments can be compared."""
    return is_shape(read_json(folder / CONFIG))


def run_loops(
    network: PreTrainedModel,
    folder: Path,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    on_loop: Callable[[str], None],
) -> list[LoopResult]:
    """Decode prompts with the head, a published one or one of this library's, and count tokens per round."""
    results: list[LoopResult] = []
    for temperature in temperatures:
        for tree, verifier in LOOPS:
            on_loop(f"{folder.name}, {tree}, temperature {temperature:g}")
            target: Any = feature_model(network)
            drafter = (Shape if is_shape_folder(folder) else Head)(
                target=target, head=folder, tree=TREES.parse(tree)
            )
            decoder = Decoder(
                make_components(target, drafter=drafter, verifier=verifier),
                max_batch_size=len(prompts),
            )
            done = decoder.generate(
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=0,
                ignore_eos=True,
            )
            rounds = [record for result in done for record in result.records]
            results.append(
                LoopResult(
                    head=folder.name,
                    temperature=temperature,
                    tree=tree,
                    verifier=verifier,
                    block_efficiency=sum(len(record.token_ids) for record in rounds) / len(rounds),
                    num_rounds=len(rounds),
                )
            )
    return results

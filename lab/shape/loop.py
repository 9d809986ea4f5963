"""SHAPE in the real loop: where the time goes, sampling rules, contexts, other drafters, and the proof that nothing changes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from lab.shape.material import Material, Say, spread
from monge.api import make_components
from monge.core.errors import MongeError
from monge.core.metrics import acceptance_by_depth, block_efficiency
from monge.core.model import SequenceModel
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord
from monge.draft.shape import ShapeDrafter
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.registry import load_head as load_published
from monge.heads.shape.alignment import ALIGNMENTS
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from monge.training.texts import feature_model

GREEDY: Final = ("best_first(16, 3, 4)", "target_walk")
SAMPLED: Final = ("fixed_width((4, 2, 1), children='iid')", "rrs")
"""Tree and verifier at temperature 0, and above."""
OTHERS: Final = ("none", "ngram", "suffix")
STAGES: Final = ("draft_s", "score_s", "verify_s", "commit_s")
_REPEATS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rounds of some requests, and the seconds that decoding them took, prompts included."""

    records: tuple[StepRecord, ...]
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Rates, and times by stage."""
        num_tokens = sum(len(record.token_ids) for record in self.records)
        return {
            "block_efficiency": block_efficiency(self.records),
            "acceptance_by_depth": list(acceptance_by_depth(self.records)),
            "tokens_per_s": num_tokens / self.seconds,
            "nodes_per_round": sum(record.num_nodes for record in self.records) / len(self.records),
            "num_rounds": len(self.records),
        }


Prompts = Sequence[tuple[int, ...]]


def drafts_with(
    material: Material, head: ShapeHead, temperature: float
) -> Callable[[SequenceModel], Components]:
    """Components with a SHAPE drafter for a target, the tree and verifier those of the temperature."""
    tree, verifier = GREEDY if temperature == 0 else SAMPLED

    def components(target: SequenceModel) -> Components:
        drafter = ShapeDrafter(target=target, head=head, tree=TREES.parse(tree))
        return make_components(target, drafter=drafter, verifier=verifier)

    return components


def _published_parts(
    head: PublishedHead, temperature: float
) -> Callable[[SequenceModel], Components]:
    tree, verifier = GREEDY if temperature == 0 else SAMPLED
    return lambda target: make_components(
        target, drafter="head", head=head, tree=tree, verifier=verifier
    )


def run(
    material: Material,
    components: Callable[[SequenceModel], Components],
    prompts: Prompts,
    **options: Any,
) -> Run:
    """Decode prompts one by one, as a single user sees it; a first short call warms up.

    Raises:
        MongeError: If a request fails: it has no figures.
    """
    decoder = Decoder(components(feature_model(material.network)), max_batch_size=1)
    decoder.generate(prompts[:1], **{**options, "max_new_tokens": 4}, seed=0, ignore_eos=True)
    start = time.perf_counter()
    results = decoder.generate(prompts, **options, seed=0, ignore_eos=True)
    seconds = time.perf_counter() - start
    for result in results:
        if result.error is not None:
            raise MongeError(f"report shape: a request failed: {result.error}")
    return Run(
        records=tuple(record for result in results for record in result.records), seconds=seconds
    )


def sample_of(material: Material) -> list[tuple[int, ...]]:
    """The first prompts of every task."""
    return [
        ids
        for prompts in material.prompts.values()
        for ids in prompts[: material.settings.prompts_per_task]
    ]


def stage_times(material: Material, head: ShapeHead) -> dict[str, Any]:
    """Return milliseconds of greedy rounds at batch 1 by stage and part of drafting, median and tail."""
    options = {"max_new_tokens": material.settings.max_new_tokens, "temperature": 0.0}
    records = run(
        material, drafts_with(material, head, 0.0), sample_of(material), **options
    ).records
    stages = {
        stage.removesuffix("_s"): [1e3 * getattr(record.times, stage) for record in records]
        for stage in STAGES
    }
    total = [1e3 * record.times.total_s for record in records]
    return {
        "unit": "ms",
        "num_rounds": len(records),
        "total": spread(total),
        "stages": {stage: spread(values) for stage, values in stages.items()},
        "share": {stage: sum(values) / sum(total) for stage, values in stages.items()},
        "drafting": _drafting_times(material, head),
    }


@torch.inference_mode()
def _drafting_times(material: Material, head: ShapeHead) -> dict[str, Any]:
    """One step for one state: prediction, each kind of alignment, the output layer, and a tree's level."""
    texts, width = material.together.fitted, head.sizes.hidden_size
    state, token = texts.states[0, :1].float(), texts.token_ids[0, 1:2]
    known = material.ends.embed(token.to(state.device)).float()
    start = head.predictor.start(state, known)
    size = min(64, width)
    inside, cloud = state[:, :size], texts.states.flatten(0, 1)[:2048, :size].float()
    timed: dict[str, Callable[[], Any]] = {
        "predict": lambda: head.predictor.step(1, start, state, known),
        "output layer": lambda: material.ends.unembed(state),
    }
    for name in ALIGNMENTS:
        if name != "none":
            alignment = ALIGNMENTS[name](size).to(state.device)
            alignment.fit(cloud, cloud)
            timed[f"align: {name}"] = lambda alignment=alignment: alignment.map(inside)
    return {
        name: spread([1e3 * _seconds(call) for _ in range(_REPEATS)])
        for name, call in timed.items()
    }


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sampling_sweep(material: Material, head: ShapeHead, say: Say) -> list[dict[str, Any]]:
    """Temperature by top-p."""
    found: list[dict[str, Any]] = []
    for temperature in material.settings.temperatures:
        for top_p in material.settings.top_ps:
            if temperature == 0 and top_p < 1:
                continue  # the point mass is the same
            say(f"temperature {temperature:g}, top-p {top_p:g}")
            options = {
                "max_new_tokens": material.settings.max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
            }
            done = run(
                material, drafts_with(material, head, temperature), sample_of(material), **options
            )
            found.append({"temperature": temperature, "top_p": top_p, **done.figures()})
    return found


def context_sweep(material: Material, head: ShapeHead, say: Say) -> list[dict[str, Any]]:
    """Longer and longer texts in front, the prompts one after another; greedy."""
    tokens = [token for prompts in material.prompts.values() for ids in prompts for token in ids]
    longest = int(
        getattr(material.network.config.get_text_config(), "max_position_embeddings", None)
        or 1 << 30
    )
    found: list[dict[str, Any]] = []
    for length in material.settings.contexts:
        if length > len(tokens) or length + material.settings.max_new_tokens > longest:
            found.append(
                {
                    "context": length,
                    "skipped": f"prompts have {len(tokens)} tokens, the target reads {longest}",
                }
            )
            continue
        say(f"context of {length} tokens")
        options = {"max_new_tokens": material.settings.max_new_tokens, "temperature": 0.0}
        done = run(material, drafts_with(material, head, 0.0), [tuple(tokens[:length])], **options)
        times = {
            stage.removesuffix("_s"): spread(
                [1e3 * getattr(one.times, stage) for one in done.records]
            )
            for stage in STAGES
        }
        found.append({"context": length, **done.figures(), "stages_ms": times})
    return found


def other_drafters(
    material: Material, head: ShapeHead, say: Say, beside: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """Measure drafters without training, heads of other kinds and SHAPE with its own head on the same prompts.

    Heads build the same tree, which the same rule verifies.
    """
    published = {folder.name: load_published(folder) for folder in beside}
    found: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": material.settings.max_new_tokens, "temperature": temperature}
        arms: dict[str, Callable[[SequenceModel], Components]] = {
            name: lambda target, name=name: make_components(target, drafter=name) for name in OTHERS
        }
        for name, other in published.items():
            arms[name] = _published_parts(other, temperature)
        arms["shape"] = drafts_with(material, head, temperature)
        for name, components in arms.items():
            say(f"{name}, temperature {temperature:g}")
            done = run(material, components, sample_of(material), **options)
            found.append({"drafter": name, "temperature": temperature, **done.figures()})
    return found


def exactness() -> list[dict[str, Any]]:
    """Law errors of the loop with SHAPE on a toy target, every branch enumerated."""
    found: list[dict[str, Any]] = []
    for temperature in (0.0, 0.7, 1.0):
        for tree, verifier in (
            ("best_first(3, 2, 2)", "target_walk"),
            ("fixed_width((2,), children='iid')", "rrs"),
        ):
            case = Case(prompt=(0, 1), rules=SamplingRules(temperature=temperature))
            found.append(
                {
                    "temperature": temperature,
                    "tree": tree,
                    "verifier": verifier,
                    "law_error": law_error(
                        output_law(lambda t=tree, v=verifier: _toy(t, v), case),
                        target_law(_table(), case),
                    ),
                }
            )
    return found


def _table() -> TabularModel:
    return TabularModel(RandomTable(3, 3), 3)


def _toy(tree: str, verifier: str) -> Components:
    target = _table()
    sizes = TargetSizes.of(target)
    generator = torch.Generator().manual_seed(0)
    made = make_predictor(
        "gated", sizes, generator, num_steps=2, is_branched=True, width=4, gate_rank=2
    )
    head = ShapeHead(made, sizes)
    head.remember(target)
    return make_components(
        target,
        drafter=ShapeDrafter(target=target, head=head, tree=TREES.parse(tree)),
        verifier=verifier,
    )

"""`python -m lab.shape`: all measurements as one document of plain values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.shape.calibration import calibration, gates
from lab.shape.ceiling import ceiling
from lab.shape.heads import ablation, steps, transfer
from lab.shape.loop import context_sweep, exactness, other_drafters, sampling_sweep, stage_times
from lab.shape.material import Material, ReportSettings, Say, prepare
from lab.shape.states import similarity, step_stability, structure
from monge.bench.provenance import provenance
from monge.heads.shape.head import ShapeHead
from monge.prompts import Prompt


def shape_report(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: tuple[Prompt, ...],
    folder: Path,
    *,
    trained: Path | None,
    beside: Sequence[Path] = (),
    settings: ReportSettings,
    say: Say,
) -> dict[str, Any]:
    """Measure everything.

    Args:
        network: The target.
        tokenizer: Its tokenizer.
        prompts: Prompts by task.
        folder: Where the target's text is kept.
        trained: Folder of a trained head for this target; without one the ridge head decodes.
        beside: Folders of heads of other kinds, which stand beside the drafters without training.
        settings: How much is measured.
        say: Told what is done.

    Raises:
        MongeError: If the head is for another target, or there is too little text.
    """
    material = prepare(
        network, tokenizer, prompts, folder, trained=trained, settings=settings, say=say
    )
    head = _decoding_head(material)
    say("similarity of hidden states")
    states = {
        "similarity": similarity(material),
        "stability": step_stability(material),
        "structure": structure(material),
    }
    say("times of a round")
    return {
        "about": {
            **provenance(torch.device(network.device)),
            "head": "ridge" if trained is None else str(trained),
            "head_parameters": head.num_parameters,
            "head_bytes": head.num_bytes,
            "tokens_by_task": {
                task: part.fitted.token_ids.numel() * 3 // 2
                for task, part in material.parts.items()
            },
        },
        **states,
        "times": stage_times(material, head),
        "steps": steps(material, say),
        "calibration": calibration(material, say),
        "gates": gates(material),
        "ceiling": ceiling(material, say),
        "transfer": transfer(material, say),
        "ablation": ablation(material, say),
        "sampling": sampling_sweep(material, head, say),
        "contexts": context_sweep(material, head, say),
        "drafters": other_drafters(material, head, say, beside),
        "exactness": exactness(),
    }


def _decoding_head(material: Material) -> ShapeHead:
    if material.trained is not None:
        return material.load_trained()
    return material.fresh_ridge(material.together, is_branched=True, alignment="diagonal")

"""`python -m lab.shape`: all measurements as one document of plain values."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.shape.ceiling import ceiling
from lab.shape.heads import steps, transfer
from lab.shape.material import ReportSettings, Say, prepare
from monge.bench.provenance import provenance
from monge.prompts import Prompt


def shape_report(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: tuple[Prompt, ...],
    folder: Path,
    *,
    trained: Path | None,
    settings: ReportSettings,
    say: Say,
) -> dict[str, Any]:
    """Measure everything.

    Args:
        network: The target.
        tokenizer: Its tokenizer.
        prompts: Prompts by task.
        folder: Where the target's text is kept.
        trained: Folder of a trained head for this target, which stands beside the ridge heads.
        settings: How much is measured.
        say: Told what is done.

    Raises:
        MongeError: If the head is for another target, or there is too little text.
    """
    material = prepare(
        network, tokenizer, prompts, folder, trained=trained, settings=settings, say=say
    )
    return {
        "about": {
            **provenance(torch.device(network.device)),
            "head": None if trained is None else str(trained),
            "tokens_by_task": {
                task: part.fitted.token_ids.numel() * 3 // 2
                for task, part in material.parts.items()
            },
        },
        "steps": steps(material, say),
        "ceiling": ceiling(material, say),
        "transfer": transfer(material, say),
    }

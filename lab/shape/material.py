"""Material of `python -m lab.shape`: the target, its own text by task, and heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from monge.core.errors import OptionError
from monge.heads.shape.checkpoint import load_head
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.prompts import Prompt, encode
from monge.training.calibrate import calibrate_ridge
from monge.training.own_text import TextSettings, write_own_text
from monge.training.texts import Ends, Texts, feature_model, gradient_ends, read_texts

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """Sizes of the measurement.

    Args:
        rows_per_task: Rows of text that the target writes for every task, at temperature 1.
        row_length: Their length in tokens; a quarter is prompt.
        num_steps: Steps of the heads that are fitted here.
        prefixes: Prefixes of which the ceiling is estimated.
        rollouts: Continuations of each; an even number.
    """

    rows_per_task: int = 64
    row_length: int = 192
    num_steps: int = 3
    prefixes: int = 24
    rollouts: int = 32


QUICK: Final = ReportSettings(rows_per_task=9, prefixes=6, rollouts=16)
"""A minute for the built-in target on two processor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Text of one task: to fit on, to choose by, and to measure on."""

    fitted: Texts
    chosen: Texts
    held_out: Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything that the sections of a report share.

    Args:
        network: The target.
        parts: The target's own text, by task.
        ends: The target's ends.
        trained: Folder of a trained head, if there is one for this target.
        settings: How much is measured.
    """

    network: PreTrainedModel
    parts: Mapping[str, Part]
    ends: Ends
    trained: Path | None
    settings: ReportSettings

    @property
    def together(self) -> Part:
        """The text of all tasks."""
        rows = [
            [getattr(part, name) for part in self.parts.values()]
            for name in ("fitted", "chosen", "held_out")
        ]
        return Part(**dict(zip(("fitted", "chosen", "held_out"), map(joined, rows), strict=True)))

    def fresh_ridge(self, part: Part, *, is_branched: bool) -> ShapeHead:
        """A head without training, fitted on a part's text."""
        target = feature_model(self.network)
        predictor = make_predictor(
            "ridge",
            TargetSizes.of(target),
            num_steps=self.settings.num_steps,
            is_branched=is_branched,
        )
        head = ShapeHead(predictor, TargetSizes.of(target)).to(self.network.device)
        head.remember(target)
        calibrate_ridge(head, part.fitted, part.chosen, self.ends)
        return head

    def load_trained(self) -> ShapeHead:
        """The trained head."""
        assert self.trained is not None
        head = load_head(self.trained).to(self.network.device)
        head.check(feature_model(self.network))
        return head


def prepare(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    trained: Path | None,
    settings: ReportSettings,
    say: Say,
) -> Material:
    """Let the target write text for every task and read it again.

    Args:
        network: The target.
        tokenizer: Its tokenizer.
        prompts: Prompts of at least one task.
        folder: Where the text is kept; a second call continues there.
        trained: Folder of a trained head.
        settings: How much is measured.
        say: Told what is done.

    Raises:
        OptionError: If there is too little text.
    """
    by_task: dict[str, list[tuple[int, ...]]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(encode(tokenizer, prompt.text))
    target, parts = feature_model(network), dict[str, Part]()
    for task, ids in by_task.items():
        say(f"the target writes: {task}")
        text = TextSettings(
            num_tokens=settings.rows_per_task * settings.row_length,
            row_length=settings.row_length,
            prompt_length=settings.row_length // 4,
            batch_size=32,
        )
        parts[task] = _split(read_texts(target, write_own_text(network, ids, text, folder / task)))
    return Material(
        network=network,
        parts=parts,
        ends=gradient_ends(network),
        trained=trained,
        settings=settings,
    )


def joined(texts: Sequence[Texts]) -> Texts:
    """Several texts as one."""
    lengths = [end - start for text in texts for start, end in pairwise(text.starts)]
    names = ("token_ids", "is_learnt", "states", "features")
    return Texts(
        starts=(0, *accumulate(lengths)),
        **{name: torch.cat([getattr(text, name) for text in texts]) for name in names},
    )


def spread(values: Tensor | Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    array = np.asarray(
        values.double().cpu() if isinstance(values, Tensor) else values, dtype=np.float64
    )
    low, middle, high = np.percentile(array, [5, 50, 95])
    return {"mean": float(array.mean()), "p5": float(low), "p50": float(middle), "p95": float(high)}


def _split(texts: Texts) -> Part:
    """Two thirds to fit, the rest in halves."""
    rows = len(texts)
    if rows < 4:
        raise OptionError(
            f"shape: {rows} rows of text are too few to fit, choose and measure; write at "
            "least 4 for a task"
        )
    first = rows * 2 // 3
    second = (rows + first) // 2
    return Part(
        fitted=texts.part(0, first),
        chosen=texts.part(first, second),
        held_out=texts.part(second, rows),
    )

"""Logits processors of `transformers`, applied per row.

Each node of a tree is processed with the text of its row.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as known

from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules

_REFUSED: Final[Mapping[type[LogitsProcessor], str]] = MappingProxyType(
    {
        known.SynthIDTextWatermarkLogitsProcessor: "changes its state at every call, so it cannot "
        "be asked about several paths",
        known.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs a model of its own along one "
        "path",
        known.ClassifierFreeGuidanceLogitsProcessor: "mixes the rows of a batch",
        known.DiaClassifierFreeGuidanceLogitsProcessor: "mixes the rows of a batch",
        known.DiaEOSDelayPatternLogitsProcessor: "changes its state at every call",
        known.WhisperNoSpeechDetection: "runs a model of its own",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class RowProcessors:
    """The processors of one row, as a `monge.engine.sampling.Processor`.

    Args:
        padding: Padding left of the row's prompt, `[1, padding]`, which processors may count.
        processors: Processors, applied in order.
    """

    padding: Tensor
    processors: LogitsProcessorList

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        padded: Any = torch.cat([self.padding.to(token_ids.device), token_ids], dim=1)
        return self.processors(padded, scores)


def row_processors(
    processors: Sequence[Any], row: int, batch_size: int, padding: Tensor
) -> tuple[RowProcessors, ...]:
    """Processors of one row's nodes; empty without processors.

    Raises:
        OptionError: If a processor cannot be applied node by node.
    """
    if not processors:
        return ()
    of_row = [_of_row(processor, row, batch_size) for processor in processors]
    return (RowProcessors(padding, LogitsProcessorList(of_row)),)


def draft_rules(processors: Sequence[Any]) -> SamplingRules:
    """Sampling rules of the draft law, from the warpers that both libraries share.

    Decoding is lossless with any draft law; a close one is accepted more often.
    """
    rules = SamplingRules()
    for processor in processors:
        if isinstance(processor, known.TemperatureLogitsWarper):
            rules = replace(rules, temperature=float(processor.temperature))
        elif isinstance(processor, known.TopKLogitsWarper):
            rules = replace(rules, top_k=int(processor.top_k))
        elif isinstance(processor, known.TopPLogitsWarper) and processor.top_p > 0:
            rules = replace(rules, top_p=float(processor.top_p))
        elif isinstance(processor, known.MinPLogitsWarper):
            rules = replace(rules, min_p=float(processor.min_p))
    return rules


def _of_row(processor: Any, row: int, batch_size: int) -> Any:
    """A processor for one row, which it treats as row `row` of the batch."""
    for kind, reason in _REFUSED.items():
        if isinstance(processor, kind):
            raise OptionError(
                f"speculate: {type(processor).__name__} {reason}; use generate "
                "without custom_generate"
            )
    if isinstance(processor, known.PrefixConstrainedLogitsProcessor):
        return known.PrefixConstrainedLogitsProcessor(
            partial(_allowed, processor._prefix_allowed_tokens_fn, row), 1
        )
    if isinstance(processor, known.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        return _with(
            processor,
            prompt_ignore_length=ignored[row : row + 1] if isinstance(ignored, Tensor) else ignored,
        )
    if isinstance(processor, known.EncoderRepetitionPenaltyLogitsProcessor):
        prompt = row * processor.encoder_input_ids.shape[0] // batch_size
        return _with(processor, encoder_input_ids=processor.encoder_input_ids[prompt : prompt + 1])
    if isinstance(processor, known.EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // batch_size
        return _with(
            processor,
            batch_size=1,
            generated_ngrams=processor.generated_ngrams[prompt : prompt + 1],
        )
    return processor


def _allowed(
    function: Callable[[int, Tensor], list[int]], row: int, _: int, token_ids: Tensor
) -> list[int]:
    return function(row, token_ids)


def _with(processor: Any, **attributes: Any) -> Any:
    changed = copy.copy(processor)
    for name, value in attributes.items():
        setattr(changed, name, value)
    return changed

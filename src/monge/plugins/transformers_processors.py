"""Logits processors of `transformers`, applied to each node of a tree with the text of its row."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as known

from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.requests.processors import Processor, Stateless, check_scores, check_shared, name_of

_REFUSED: Final[Mapping[type[LogitsProcessor], str]] = {
    known.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs a model of its own along one path",
    known.ClassifierFreeGuidanceLogitsProcessor: "mixes the rows of a batch",
    known.DiaClassifierFreeGuidanceLogitsProcessor: "mixes the rows of a batch",
    known.WhisperNoSpeechDetection: "runs a model of its own",
}
_FUNCTIONS: Final = frozenset(
    {
        known.EncoderNoRepeatNGramLogitsProcessor,
        known.EncoderRepetitionPenaltyLogitsProcessor,
        known.EpsilonLogitsWarper,
        known.EtaLogitsWarper,
        known.ExponentialDecayLengthPenalty,
        known.ForcedBOSTokenLogitsProcessor,
        known.ForcedEOSTokenLogitsProcessor,
        known.InfNanRemoveLogitsProcessor,
        known.LogitNormalization,
        known.MinLengthLogitsProcessor,
        known.MinNewTokensLengthLogitsProcessor,
        known.MinPLogitsWarper,
        known.NoBadWordsLogitsProcessor,
        known.NoRepeatNGramLogitsProcessor,
        # Its function is one of the row and the text by contract: beams come and go.
        known.PrefixConstrainedLogitsProcessor,
        known.RepetitionPenaltyLogitsProcessor,
        known.SequenceBiasLogitsProcessor,
        known.SuppressTokensAtBeginLogitsProcessor,
        known.SuppressTokensLogitsProcessor,
        known.TemperatureLogitsWarper,
        known.TopHLogitsWarper,
        known.TopKLogitsWarper,
        known.TopPLogitsWarper,
        known.TypicalLogitsWarper,
        known.WatermarkLogitsProcessor,
    }
)
"""Processors of transformers that are functions of the text and the scores, row by row."""
_TRUNCATING: Final = (
    known.EpsilonLogitsWarper,
    known.EtaLogitsWarper,
    known.MinPLogitsWarper,
    known.TopHLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.TypicalLogitsWarper,
)
"""Processors of transformers that take improbable tokens out, after all others."""


@dataclass(frozen=True, eq=False)
class RowProcessor:
    """A processor as a row of the batch sees it.

    Args:
        processor: The processor.
        padding: Padding left of the row's prompt, `[1, padding]`, which processors may count.
        row: The row.
        num_rows: Rows of the batch that the processor gets. All of them hold this row's text.
    """

    processor: Any
    padding: Tensor
    row: int = 0
    num_rows: int = 1

    @property
    def __wrapped__(self) -> Any:
        return self.processor

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        padded: Any = torch.cat([self.padding.to(token_ids.device), token_ids], dim=1)
        processors = LogitsProcessorList([self.processor])
        if self.num_rows == 1:
            return processors(padded, scores)
        rows = scores.repeat(self.num_rows, 1)
        try:
            processed = processors(padded.repeat(self.num_rows, 1), rows)
        except Exception as error:
            raise OptionError(
                f"speculate: {name_of(self)} failed ({type(error).__name__}: {error}) on a batch "
                f"whose {self.num_rows} rows hold the text of row {self.row}; if its rows have "
                "grammars of their own, decode one row at a time"
            ) from error
        check_scores(self, processed, rows)
        return processed[self.row : self.row + 1]


def row_processors(
    processors: Sequence[Any], row: int, batch_size: int, padding: Tensor
) -> tuple[Processor, ...]:
    """Return the processors of a row's nodes; empty without processors.

    Unknown processors may hold state for every row: they get a batch, as in plain decoding.

    Raises:
        OptionError: If a processor cannot be applied node by node, or cannot be copied and there
            are several rows.
    """
    wrapped: list[Processor] = []
    for processor in processors:
        if type(processor) in _FUNCTIONS:
            wrapped.append(Stateless(RowProcessor(_of_row(processor, row, batch_size), padding)))
        else:
            for kind, reason in _REFUSED.items():
                if isinstance(processor, kind):
                    raise OptionError(
                        f"speculate: {type(processor).__name__} {reason}; use generate without "
                        "custom_generate"
                    )
            wrapped.append(RowProcessor(processor, padding, row, batch_size))
    if batch_size > 1:
        check_shared(wrapped)
    return tuple(wrapped)


def num_truncating(processors: Sequence[Any]) -> int:
    """Return the number of processors from the first on that takes improbable tokens out."""
    places = (
        place for place, processor in enumerate(processors) if isinstance(processor, _TRUNCATING)
    )
    return len(processors) - next(places, len(processors))


def draft_rules(processors: Sequence[Any]) -> SamplingRules:
    """Return sampling rules of the draft distribution, from the warpers that both libraries share.

    Decoding is lossless with any draft distribution; tokens of a close distribution are accepted more often.
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
    """Return a copy for a single row, which it treats as row `row` of the batch."""
    copied: Any = copy.copy(processor)
    if isinstance(copied, known.PrefixConstrainedLogitsProcessor):
        # It passes the number of the prompt, of which its beams are the rows.
        function, prompt = copied._prefix_allowed_tokens_fn, row // copied._num_beams
        copied._prefix_allowed_tokens_fn = lambda _, token_ids: function(prompt, token_ids)
        copied._num_beams = 1
    elif isinstance(copied, known.RepetitionPenaltyLogitsProcessor):
        if isinstance(copied.prompt_ignore_length, Tensor):
            copied.prompt_ignore_length = copied.prompt_ignore_length[row : row + 1]
    elif isinstance(copied, known.EncoderRepetitionPenaltyLogitsProcessor):
        prompts: Any = copied.encoder_input_ids
        prompt = row * len(prompts) // batch_size
        copied.encoder_input_ids = prompts[prompt : prompt + 1]
    elif isinstance(copied, known.EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * copied.batch_size // batch_size
        copied.batch_size, copied.generated_ngrams = 1, copied.generated_ngrams[prompt : prompt + 1]
    return copied

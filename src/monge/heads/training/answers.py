"""Answers that a chat model writes itself, as training text of heads.

They are saved batch by batch.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from monge.core.errors import OptionError
from monge.heads.training.own_text import RowProgress

ANSWERS: Final = "answers.jsonl"
_TURN: Final = 160  # most tokens of a turn that the target writes for the user


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """Settings of the answers.

    Args:
        num_tokens: Maximum tokens per answer.
        prompt_length: Maximum tokens per prompt; longer prompts keep their end.
        temperatures: Temperatures of the batches, in turn; 0 is greedy.
        batch_size: Answers per batch; `None` chooses by the device.
        seed: Each batch derives its own seed.
    """

    num_tokens: int = 220
    prompt_length: int = 420
    temperatures: tuple[float, ...] = (1.0, 1.0, 0.6, 0.0)
    batch_size: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def write_answers(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: AnswerSettings,
    folder: Path,
    on_rows: Callable[[float], None] = lambda count: None,
) -> list[Answer]:
    """Let the target answer prompts; a rerun keeps the answers of an interrupted call.

    Args:
        network: The target. On a processor with bfloat16 products, a bfloat16 copy writes several
            times faster.
        prompts: Token ids, each up to where the answer starts.
        settings: Settings of the answers.
        folder: Folder of `answers.jsonl`; short prompts come first.
        on_rows: Receives the number of new answers, in parts while a batch is written.

    Returns:
        The answers in the order of the prompts.

    Raises:
        OptionError: If there is no prompt, or the folder holds answers to other prompts.
    """
    if not prompts:
        raise OptionError("training: there are no prompts to answer; give --data with some text")
    # Prompts of about the same length are answered together, so that little of a batch is padding.
    places = sorted(
        range(len(prompts)), key=lambda place: min(len(prompts[place]), settings.prompt_length)
    )
    path, cut = (
        folder / ANSWERS,
        [tuple(prompts[place][-settings.prompt_length :]) for place in places],
    )
    batch_size = settings.batch_size or _rows_at_once(
        network, min(max(map(len, prompts)), settings.prompt_length) + settings.num_tokens
    )
    answers = _restored(path, cut)
    on_rows(len(answers))
    folder.mkdir(parents=True, exist_ok=True)
    while len(answers) < len(cut):
        batch = list(islice(cut, len(answers), len(answers) + batch_size))
        number = len(answers) // batch_size
        temperature = settings.temperatures[number % len(settings.temperatures)]
        told = RowProgress(on_rows, len(batch), settings.num_tokens)
        seed = settings.seed * 1_000_003 + number
        written = _answered(network, batch, settings, temperature, seed=seed, told=told)
        with path.open("a", encoding="utf-8") as file:
            for prompt, answer in zip(batch, written, strict=True):
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
        answers += [
            Answer(prompt, tuple(answer)) for prompt, answer in zip(batch, written, strict=True)
        ]
        told.end()
    return [answer for _, answer in sorted(zip(places, answers, strict=True), key=itemgetter(0))]


def _rows_at_once(network: PreTrainedModel, length: int) -> int:
    """Rows of a batch: what half of a CUDA device's free memory holds, at most 4,096; 192 elsewhere."""
    if network.device.type != "cuda":
        return 192
    config = network.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * dim * network.dtype.itemsize
    drawn = 20 * config.vocab_size  # logits, probabilities, their sums, and the mask
    free = torch.cuda.mem_get_info(network.device)[0]
    return max(1, min(4096, free // 2 // (length * cached + drawn)))


def write_prompts(
    network: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 (the host's type)
    opening: Sequence[int],
    count: int,
    folder: Path,
    *,
    seed: int = 0,
    on_rows: Callable[[float], None] = lambda count: None,
) -> list[str]:
    """Let a chat model write users' turns itself, by continuing its chat template where a user's turn starts.

    Args:
        network: The target.
        tokenizer: Its tokenizer.
        opening: Tokens of the template up to where the user's turn starts.
        count: Number of turns drawn at temperature 1; empty, unfinished and repeated ones are left
            out.
        folder: Folder of the turns' `answers.jsonl`; a rerun goes on there.
        seed: Seed of the draws.
        on_rows: Receives the number of new turns, in parts while a batch is written.

    Reference:
        Xu et al., Magpie, arXiv 2406.08464.
    """
    settings = AnswerSettings(num_tokens=_TURN, temperatures=(1.0,), seed=seed)
    written = write_answers(network, [opening] * count, settings, folder, on_rows)
    ended = (tokenizer.decode(one.answer[:-1]) for one in written if len(one.answer) < _TURN)
    return list(dict.fromkeys(text.strip() for text in ended if text.strip()))


def _answered(
    network: PreTrainedModel,
    batch: Sequence[tuple[int, ...]],
    settings: AnswerSettings,
    temperature: float,
    *,
    seed: int,
    told: RowProgress,
) -> list[list[int]]:
    length = max(map(len, batch))
    ids = torch.tensor(
        [[0] * (length - len(prompt)) + list(prompt) for prompt in batch], device=network.device
    )
    mask = torch.tensor(
        [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in batch],
        device=network.device,
    )
    config: Any = network.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    generate: Any = network.generate
    draw = [] if temperature == 0 else [_Draw(temperature, torch.Generator().manual_seed(seed))]
    with torch.inference_mode():
        written = generate(
            ids,
            attention_mask=mask,
            max_new_tokens=settings.num_tokens,
            pad_token_id=ends[0] or 0,
            do_sample=False,
            logits_processor=LogitsProcessorList([*draw, told]),
        )
    return [_ended(row, ends) for row in written[:, length:].tolist()]


class _Draw(LogitsProcessor):
    """Draws the token of each row by inversion, and masks all others for the greedy choice.

    Sampling in `transformers` draws one exponential variate per token of the vocabulary on one
    thread, which takes more than half of the time.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        self._temperature, self._generator = temperature, generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        probs = (scores.float() / self._temperature).softmax(dim=-1)
        sums = probs.cumsum(dim=-1, dtype=torch.float64)
        uniforms = torch.rand(len(sums), 1, generator=self._generator, dtype=sums.dtype)
        # Strictly above the sum: tokens without probability have no room there.
        drawn = torch.searchsorted(sums, uniforms.to(sums.device) * sums[:, -1:], right=True)
        drawn = drawn.clamp_max(sums.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


def _ended(row: list[int], ends: Sequence[int | None]) -> list[int]:
    """An answer, cut after its first end-of-text token."""
    found = [place for place, token in enumerate(row) if token in ends]
    return row[: found[0] + 1] if found else row


def _restored(path: Path, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        answers = [Answer(tuple(row["prompt"]), tuple(row["answer"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"cannot read {str(path)!r}: {error}; remove it to write the answers again"
        ) from error
    if any(answer.prompt != prompt for answer, prompt in zip(answers, prompts, strict=False)):
        raise OptionError(
            f"{str(path)!r} holds answers to other prompts; restore them or choose another folder"
        )
    return answers[: len(prompts)]

"""Text that a target writes itself, the training text of heads; saved batch by batch, so that a rerun continues."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from monge.backends.cpu.code_cache import network_facts
from monge.backends.traced import tensors_of
from monge.core.errors import OptionError
from monge.networks.adapters import switches_of
from monge.networks.attention_masks import left_padded

ANSWERS: Final = "answers.jsonl"
_TURN: Final = 160  # most tokens of a turn that the target writes for the user
Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and the target's answer."""
OnRows = Callable[[float], None]
"""Receives the number of new rows, in parts while a batch is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """Settings of the answers.

    Args:
        num_tokens: Maximum tokens per answer.
        prompt_length: Maximum tokens per prompt; longer prompts keep their end.
        temperatures: Temperatures of the batches, in turn; 0 is greedy.
        batch_size: Answers per batch; `None` chooses by the device.
        seed: Each batch derives its own seed.
        row_length: Tokens of a prompt with its answer, which then continues past end-of-text
            tokens; `None` ends answers there or after `num_tokens`.
    """

    num_tokens: int = 220
    prompt_length: int = 420
    temperatures: tuple[float, ...] = (1.0, 1.0, 0.6, 0.0)
    batch_size: int | None = None
    seed: int = 0
    row_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings(AnswerSettings):
    """Settings of rows of the same length, see `AnswerSettings`.

    Args:
        num_tokens: Approximate number of tokens of all rows, including prompts.

    Raises:
        OptionError: If a number is out of range.
    """

    num_tokens: int = 100_000
    prompt_length: int = 48
    temperatures: tuple[float, ...] = (1.0,)
    batch_size: int = 64
    row_length: int = 192

    def __post_init__(self) -> None:
        is_ordered = self.num_tokens >= self.row_length > self.prompt_length >= 1
        if not is_ordered or self.batch_size < 1:
            raise OptionError(
                "own text: need num_tokens >= row_length > prompt_length >= 1 and batch_size >= 1; "
                f"got {self.num_tokens}, {self.row_length}, {self.prompt_length} and "
                f"{self.batch_size}"
            )
        if not min(self.temperatures) > 0:
            raise OptionError(f"own text: temperatures must be above 0; got {self.temperatures}")

    @property
    def num_rows(self) -> int:
        """Number of rows for `num_tokens`."""
        return self.num_tokens // self.row_length


def write_own_text(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: TextSettings,
    folder: Path,
    on_rows: OnRows = lambda count: None,
) -> list[Answer]:
    """Let the target continue prompts, used in turn, to rows of the same length; see `write_answers`."""
    in_turn = list(islice(cycle(prompts), settings.num_rows))
    return write_answers(network, in_turn, settings, folder, on_rows)


def cut_rows(texts: Sequence[Sequence[int]], row_length: int) -> list[Answer]:
    """Concatenate texts and cut them into rows; the rest is dropped.

    Raises:
        OptionError: If the text does not fill a row.
    """
    tokens = tuple(token for text in texts for token in text)
    ends = range(row_length, len(tokens) + 1, row_length)
    if not ends:
        raise OptionError(
            f"own text: {len(tokens)} tokens do not fill a row of {row_length}; give more text"
        )
    return [((), tokens[end - row_length : end]) for end in ends]


def write_prompts(
    network: PreTrainedModel,
    tokenizer: Any,
    opening: Sequence[int],
    count: int,
    folder: Path,
    *,
    seed: int = 0,
    on_rows: OnRows = lambda count: None,
) -> list[str]:
    """Let a chat model write users' turns, by continuing its chat template where a user's turn starts.

    Args:
        network: The target.
        tokenizer: Its tokenizer.
        opening: Tokens of the template up to where the user's turn starts.
        count: Number of turns drawn at temperature 1; empty, unfinished and repeated turns are left
            out.
        folder: Folder of the turns' `answers.jsonl`; a rerun continues there.
        seed: Seed of the draws.
        on_rows: See `OnRows`.

    Reference:
        Xu et al., Magpie, arXiv 2406.08464.
    """
    settings = AnswerSettings(num_tokens=_TURN, temperatures=(1.0,), seed=seed)
    written = write_answers(network, [opening] * count, settings, folder, on_rows)
    ended = (tokenizer.decode(turn[:-1]).strip() for _, turn in written if len(turn) < _TURN)
    return list(dict.fromkeys(text for text in ended if text))


def write_answers(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: AnswerSettings,
    folder: Path,
    on_rows: OnRows = lambda count: None,
) -> list[Answer]:
    """Let the target answer prompts; a rerun keeps the answers of an interrupted call.

    Args:
        network: The target. On a processor with bfloat16 products, a bfloat16 copy writes several
            times faster.
        prompts: Token ids, each up to where the answer starts.
        settings: Settings of the answers.
        folder: Folder of `answers.jsonl`; short prompts come first.
        on_rows: See `OnRows`.

    Returns:
        The answers in the order of the prompts.

    Raises:
        OptionError: If there is no prompt, or the folder holds answers to other prompts, by other
            settings or of another network.
    """
    if not prompts:
        raise OptionError("training: there are no prompts to answer; give --data with some text")
    # Prompts of about the same length are answered together, so that little of a batch is padding.
    places = sorted(
        range(len(prompts)), key=lambda place: min(len(prompts[place]), settings.prompt_length)
    )
    cut = [tuple(prompts[place][-settings.prompt_length :]) for place in places]
    path, key = folder / ANSWERS, _digest(settings, network)
    batch_size = settings.batch_size or _rows_at_once(network, len(cut[-1]) + settings.num_tokens)
    answers = _restored(path, cut, key)
    on_rows(len(answers))
    folder.mkdir(parents=True, exist_ok=True)
    while len(answers) < len(cut):
        batch = cut[len(answers) :][:batch_size]
        most = settings.num_tokens
        if settings.row_length is not None:
            most = settings.row_length - len(batch[0])  # the shortest
        progress = RowProgress(on_rows, len(batch), most)
        written = _answered(network, batch, settings, len(answers) // batch_size, progress)
        with path.open("a", encoding="utf-8") as file:
            for prompt, answer in written:
                row = {"prompt": prompt, "answer": answer, "settings": key}
                file.write(json.dumps(row) + "\n")
        answers += written
        progress.end()
    return [answer for _, answer in sorted(zip(places, answers, strict=True), key=itemgetter(0))]


def _answered(
    network: PreTrainedModel,
    batch: Sequence[tuple[int, ...]],
    settings: AnswerSettings,
    number: int,
    progress: "RowProgress",
) -> list[Answer]:
    """Answers of batch `number`, cut after their first end-of-text token or at the row's end."""
    token_ids, mask = left_padded(batch, network.device)
    temperature = settings.temperatures[number % len(settings.temperatures)]
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
    draw = [] if temperature == 0 else [_Draw(temperature, generator)]
    config: Any = network.generation_config
    eos = config.eos_token_id if settings.row_length is None else None
    ends = eos if isinstance(eos, list) else [eos]
    generate: Any = network.generate
    with torch.inference_mode():
        written = generate(
            token_ids,
            attention_mask=mask,
            max_new_tokens=progress.num_tokens,
            pad_token_id=ends[0] or 0,
            eos_token_id=eos,
            do_sample=False,
            logits_processor=LogitsProcessorList([*draw, progress]),
        )
    answers: list[Answer] = []
    for prompt, row in zip(batch, written[:, token_ids.shape[1] :].tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        if settings.row_length is not None:
            end = settings.row_length - len(prompt)
        answers.append((prompt, tuple(row[:end])))
    return answers


def _rows_at_once(network: PreTrainedModel, length: int) -> int:
    """Rows of a batch that fill half of a CUDA device's free memory, at most 4,096; 192 elsewhere."""
    if network.device.type != "cuda":
        return 192
    config = network.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * dim * network.dtype.itemsize
    drawn = 20 * config.vocab_size  # logits, probabilities, their sums, and the mask
    free = torch.cuda.mem_get_info(network.device)[0]
    return max(1, min(4096, free // 2 // (length * cached + drawn)))


class RowProgress(LogitsProcessor):
    """Counts the rows of a batch in parts, a part for each token that `generate` writes."""

    def __init__(self, on_rows: OnRows, num_rows: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._on_rows, self._left = on_rows, float(num_rows)
        self._part = num_rows / (num_tokens + 1)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self._count(min(self._part, self._left))
        return scores

    def end(self) -> None:
        """Count the rest."""
        self._count(self._left)

    def _count(self, part: float) -> None:
        self._left -= part
        self._on_rows(part)


class _Draw(LogitsProcessor):
    """Draws the token of each row by inversion, and masks all others for the greedy choice.

    Sampling in `transformers` draws an exponential variate for each token of the vocabulary in a
    single thread, which takes more than half of the time.
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


def digest_of(network: PreTrainedModel, *known: object) -> str:
    """Return a name for what a network computes, by its weights, and for what else is given."""
    switches = [switches_of(module) for module in network.modules()]
    digest = blake2b(repr((known, network_facts(network), switches)).encode(), digest_size=6)
    for name, tensor in tensors_of(network).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(numbers.numpy().data)
    return digest.hexdigest()


def _digest(settings: AnswerSettings, network: PreTrainedModel) -> str:
    """Return a name for what answers depend on beside their prompts."""
    if settings.row_length is not None:  # no row depends on the number of rows
        settings = replace(settings, num_tokens=settings.row_length)
    config: Any = network.generation_config  # whose penalties `generate` honours
    return digest_of(network, settings, json.dumps(config.to_dict(), default=str))


def _restored(path: Path, prompts: Sequence[tuple[int, ...]], key: str) -> list[Answer]:
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        answers = [(tuple(row["prompt"]), tuple(row["answer"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"cannot read {str(path)!r}: {error}; remove it to write the answers again"
        ) from error
    answered = [prompt for prompt, _ in answers[: len(prompts)]]
    if answered != list(prompts[: len(answered)]) or any(
        row.get("settings") != key for row in rows
    ):
        raise OptionError(
            f"{str(path)!r} holds answers to other prompts or by other settings, or of another network; restore them "
            "or choose another folder"
        )
    return answers[: len(prompts)]

"""Text that a target writes itself, as training text of heads.

Rows have one length and are saved batch by batch.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, set_seed

from monge.core.errors import OptionError

ROWS: Final = "rows.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Settings of the text.

    Args:
        num_tokens: Approximate number of tokens, including prompts.
        row_length: Tokens per row.
        prompt_length: Maximum tokens per prompt.
        temperature: Sampling temperature.
        batch_size: Rows per batch.
        seed: Each batch derives its own seed.

    Raises:
        OptionError: If a number is out of range.
    """

    num_tokens: int = 100_000
    row_length: int = 192
    prompt_length: int = 48
    temperature: float = 1.0
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            not 0 < self.prompt_length < self.row_length
            or self.num_tokens < self.row_length
            or self.batch_size < 1
        ):
            raise OptionError(
                "own text: need num_tokens >= row_length > prompt_length >= 1 and batch_size >= "
                "1; got "
                f"{self.num_tokens}, {self.row_length}, {self.prompt_length} and {self.batch_size}"
            )
        if not self.temperature > 0:
            raise OptionError(f"own text: temperature must be above 0; got {self.temperature}")

    @property
    def num_rows(self) -> int:
        """Number of rows for `num_tokens`."""
        return self.num_tokens // self.row_length


class RowProgress(LogitsProcessor):
    """Counts the rows of a batch in parts: one for each token that `generate` writes, and the last when they are saved.

    Args:
        on_rows: Receives a number of rows.
        num_rows: Rows of the batch.
        num_tokens: Most tokens that a row is given.
    """

    def __init__(self, on_rows: Callable[[float], None], num_rows: int, num_tokens: int) -> None:
        self._on_rows, self._left = on_rows, float(num_rows)
        self._part = num_rows / (num_tokens + 1)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self._count(min(self._part, self._left))
        return scores

    def end(self) -> None:
        """Count what is left."""
        self._count(self._left)

    def _count(self, part: float) -> None:
        self._left -= part
        self._on_rows(part)


def write_own_text(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: TextSettings,
    folder: Path,
    on_rows: Callable[[float], None] = lambda count: None,
) -> Int64[Tensor, "rows seq"]:
    """Let the target continue prompts; a rerun keeps the rows of an interrupted call.

    Prompts are used in turn, cut to one length per batch. End-of-text tokens do not end a row.

    Args:
        network: The target.
        prompts: Token ids, each of at least one token.
        settings: Settings of the text.
        folder: Folder of the rows.
        on_rows: Receives the number of new rows, in parts while a batch is written.

    Raises:
        OptionError: If there is no prompt, or the folder holds other text.
    """
    if not prompts:
        raise OptionError("own text: there are no prompts to continue; give --data with some text")
    path, key = folder / ROWS, _key(prompts, settings)
    rows = _restored(path, key)
    on_rows(len(rows))
    while len(rows) < settings.num_rows:
        count = min(settings.batch_size, settings.num_rows - len(rows))
        batch = [
            prompts[(len(rows) + index) % len(prompts)][-settings.prompt_length :]
            for index in range(count)
        ]
        told = RowProgress(on_rows, count, settings.row_length - min(map(len, batch)))
        seed = settings.seed * 1_000_003 + len(rows)
        rows = torch.cat([rows, _continued(network, batch, settings, seed=seed, told=told)])
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({"rows": rows}, partial, metadata={"key": key})
        partial.replace(path)
        told.end()
    return rows


def cut_rows(texts: Sequence[Sequence[int]], row_length: int) -> Int64[Tensor, "rows seq"]:
    """Concatenate texts and cut them into rows; the rest is dropped.

    Raises:
        OptionError: If the text does not fill a row.
    """
    tokens = [token for text in texts for token in text]
    num_rows = len(tokens) // row_length
    if num_rows == 0:
        raise OptionError(
            f"own text: {len(tokens)} tokens do not fill a row of {row_length}; give more text"
        )
    return torch.tensor(tokens[: num_rows * row_length]).unflatten(0, (num_rows, row_length))


def _continued(
    network: PreTrainedModel,
    batch: Sequence[Sequence[int]],
    settings: TextSettings,
    *,
    seed: int,
    told: RowProgress,
) -> Tensor:
    length = min(map(len, batch))
    ids = torch.tensor([list(prompt[-length:]) for prompt in batch], device=network.device)
    wanted = settings.row_length - length
    generate: Any = network.generate
    set_seed(seed)  # the host draws from the global generators
    with torch.inference_mode():
        written = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=wanted,
            min_new_tokens=wanted,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([told]),
        )
    return written.cpu()


def _key(prompts: Sequence[Sequence[int]], settings: TextSettings) -> str:
    digest = hashlib.blake2b(
        json.dumps([list(prompt) for prompt in prompts]).encode(), digest_size=8
    ).hexdigest()
    return json.dumps({"prompts": digest, **asdict(settings)}, sort_keys=True)


def _restored(path: Path, key: str) -> Tensor:
    if not path.exists():
        return torch.empty(0, json.loads(key)["row_length"], dtype=torch.int64)
    try:
        with safe_open(path, framework="pt") as file:
            found, rows = (file.metadata() or {}).get("key"), file.get_tensor("rows")
    except (OSError, SafetensorError) as error:
        raise OptionError(
            f"cannot read {str(path)!r}: {error}; remove it to write the text again"
        ) from error
    if found != key:
        raise OptionError(
            f"{str(path)!r} holds text of other prompts or settings; restore them "
            "or choose another folder"
        )
    return rows

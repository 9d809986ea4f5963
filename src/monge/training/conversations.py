"""Conversations of a target with its states at every token, the training data of EAGLE-3 heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_LOGITS: Final = 512  # rows of logits at a time while states are read


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStates:
    """Tokens with the target's states: places `[rows, seq]` of a batch, or `[tokens]` of all conversations.

    Args:
        token_ids: Tokens.
        is_learnt: Mask of the tokens that the target wrote, whose laws are learnt.
        features: Concatenated hidden states of the fused layers, of any float type.
        last: Inputs of the target's output layer.
        log_z: Log-sum-exp of the logits at every token.
    """

    token_ids: Int64[Tensor, "*places"]
    is_learnt: Bool[Tensor, "*places"]
    features: Float[Tensor, "*places fused"]
    last: Float[Tensor, "*places hidden"]
    log_z: Float[Tensor, "*places"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(TokenStates):
    """Conversations, concatenated, shortest first.

    Args:
        starts: Start of each conversation, and the end of the last.
    """

    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self, first: int, count: int, device: torch.device | str = "cpu") -> TokenStates:
        """Select conversations as a batch on a device, padded on the right."""
        ends = list(zip(self.starts, self.starts[1:], strict=False))[first : first + count]
        padded: dict[str, Tensor] = {}
        for name in (field.name for field in fields(TokenStates)):
            cut = [getattr(self, name)[start:end] for start, end in ends]
            padded[name] = pad_sequence(cut, batch_first=True).to(device)
        return TokenStates(**padded)


def read_conversations(
    network: Any,
    conversations: Sequence[tuple[Sequence[int], Sequence[int]]],
    layers: Sequence[int],
    *,
    longest: int = 384,
    least: int = 1,
    batch_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Conversations:
    """Let the target read conversations and keep the states that training needs.

    Args:
        network: The target, a network of `transformers`.
        conversations: Prompts and answers, cut to `longest` tokens.
        layers: Indices of the fused hidden states.
        longest: Maximum tokens per conversation.
        least: Minimum tokens written by the target; shorter conversations are left out.
        batch_size: Conversations per forward; `None` chooses by the device.
        dtype: Type of the stored states; they take a few kilobytes per token. They stay on a CUDA
            device that has room for twice their size, and else on the host.
        on_rows: Receives the number of conversations read.
    """
    cut = [((*prompt, *answer)[:longest], len(prompt)) for prompt, answer in conversations]
    cut = sorted(
        (text for text in cut if len(text[0]) - text[1] >= least), key=lambda text: len(text[0])
    )
    starts = [0, *accumulate(len(tokens) for tokens, _ in cut)]
    total, output = starts[-1], network.get_output_embeddings()
    width, device = network.config.get_text_config().hidden_size, network.device
    if batch_size is None:
        batch_size = 64 if device.type == "cuda" else 8
    size = total * ((len(layers) + 1) * width * dtype.itemsize + 16)
    on = device if device.type == "cuda" and 2 * size < torch.cuda.mem_get_info(device)[0] else None
    # Allocated at once: small tensors that stay, between large ones that go, leave holes of gigabytes.
    read = Conversations(
        starts=tuple(starts),
        token_ids=torch.empty(total, dtype=torch.long, device=on),
        is_learnt=torch.empty(total, dtype=torch.bool, device=on),
        features=torch.empty(total, len(layers) * width, dtype=dtype, device=on),
        last=torch.empty(total, width, dtype=dtype, device=on),
        log_z=torch.empty(total, device=on),
    )
    for first in range(0, len(cut), batch_size):
        batch = cut[first : first + batch_size]
        rows = [torch.tensor(tokens) for tokens, _ in batch]
        ids = pad_sequence(rows, batch_first=True).to(device)
        places = torch.arange(ids.shape[1], device=device)
        sizes = torch.tensor([len(tokens) for tokens, _ in batch], device=device)
        given = torch.tensor([num_given for _, num_given in batch], device=device)
        is_text = places < sizes[:, None]
        with torch.inference_mode():
            # Padding is on the right: nothing that counts sees it.
            states = network.model(ids, use_cache=False, output_hidden_states=True).hidden_states
            last = states[-1][is_text]
            log_z = [output(part).float().logsumexp(dim=-1) for part in last.split(_LOGITS)]
        at = slice(starts[first], starts[first + len(batch)])
        read.token_ids[at] = ids[is_text]
        read.is_learnt[at] = (places >= given[:, None])[is_text]
        read.features[at] = torch.cat([states[layer][is_text] for layer in layers], dim=-1)
        read.last[at] = last
        read.log_z[at] = torch.cat(log_z)
        on_rows(len(batch))
    return read

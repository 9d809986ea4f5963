"""Text with the target's hidden states, the training data of heads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError
from monge.core.model import FeatureModel
from monge.engine.models.network_facts import OutputLayer
from monge.loading.networks import as_sequence_model

HELD_OUT_ROWS: Final = 16
"""Held-out rows of an evaluation during training."""
_HELD_OUT: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The target's embedding and output layer; gradients pass through them.

    Args:
        embed: Maps token ids to embeddings of any float type.
        unembed: Maps last hidden states, in float32 or wider, to logits.
    """

    embed: Callable[[Tensor], Tensor]
    unembed: Callable[[Tensor], Tensor]


def feature_model(network: PreTrainedModel) -> FeatureModel:
    """Wrap a network as a target with hidden states.

    Raises:
        UnsupportedModelError: If its hidden states are not available.
    """
    model = as_sequence_model(network)
    if not isinstance(model, FeatureModel):
        raise UnsupportedModelError(
            f"{type(network).__name__} is read as {type(model).__name__}, "
            "which shows no hidden states"
        )
    return model


def gradient_ends(network: PreTrainedModel) -> Ends:
    """Freeze a network and return its embedding and output layer."""
    network.requires_grad_(False)
    layer: Any = network.get_input_embeddings()
    output = OutputLayer(network)
    return Ends(embed=layer, unembed=lambda states: output(states.to(network.dtype))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Rows of text and the last hidden state of every token.

    Args:
        token_ids: The rows.
        states: Inputs of the target's output layer at every token.
    """

    token_ids: Int64[Tensor, "rows seq"]
    states: Float[Tensor, "rows seq hidden"]

    def __post_init__(self) -> None:
        bad = int((~torch.isfinite(self.states)).any(dim=-1).sum())
        if bad:
            raise OptionError(
                f"head training: the target's hidden states are not finite at {bad} of "
                f"{self.token_ids.numel()} tokens; check "
                "its weights, or load it in a wider type (dtype='float32')"
            )

    def split(self, held_out: float) -> tuple["Texts", "Texts"]:
        """Split off the last rows, at least one row, as held-out text."""
        rows = len(self.token_ids)
        cut = min(rows - 1, max(1, round(rows * (1 - held_out))))
        return self.rows(slice(0, cut)), self.rows(slice(cut, rows))

    def rows(self, which: slice) -> "Texts":
        """Some of the rows."""
        return Texts(token_ids=self.token_ids[which], states=self.states[which])


def thirds(texts: Texts) -> tuple[Texts, Texts, Texts]:
    """Split texts into rows to fit, to choose and to measure on.

    Raises:
        OptionError: If there are fewer than three rows.
    """
    if len(texts.token_ids) < 3:
        raise OptionError(
            "a head needs three rows of text or more, to fit, to choose and to measure; got "
            f"{len(texts.token_ids)}"
        )
    rest, held_out = texts.split(_HELD_OUT)
    fitted, chosen = rest.split(_HELD_OUT)
    return fitted, chosen, held_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Positions t of text, with the tokens and states of the following steps (teacher forcing).

    Args:
        states: h_t.
        tokens: Embeddings of x_{t+1} .. x_{t+N}.
        token_ids: x_{t+2} .. x_{t+N+1}, the tokens that the N steps predict.
        true: h_{t+1} .. h_{t+N}.
    """

    states: Float[Tensor, "nodes hidden"]
    tokens: Float[Tensor, "nodes steps hidden"]
    token_ids: Int64[Tensor, "nodes steps"]
    true: Float[Tensor, "nodes steps hidden"]


def num_windows(texts: Texts, num_steps: int) -> int:
    """Number of positions that `num_steps` steps follow.

    Raises:
        OptionError: If the rows are too short.
    """
    per_row = texts.token_ids.shape[1] - num_steps - 1
    if per_row < 1:
        raise OptionError(
            f"head training: rows of {texts.token_ids.shape[1]} tokens are too short for "
            f"{num_steps} steps; "
            f"give {num_steps + 2} or more"
        )
    return per_row * len(texts.token_ids)


def windows_at(texts: Texts, which: Int64[Tensor, " nodes"], num_steps: int, ends: Ends) -> Windows:
    """The windows with these indices, counted row by row."""
    per_row = num_windows(texts, num_steps) // len(texts.token_ids)
    row, first = which // per_row, which % per_row
    steps = first[:, None] + torch.arange(1, num_steps + 1, device=which.device)
    coming = texts.token_ids[row[:, None], steps]
    return Windows(
        states=wide(texts.states[row, first]),
        tokens=wide(ends.embed(coming)),
        token_ids=texts.token_ids[row[:, None], steps + 1],
        true=wide(texts.states[row[:, None], steps]),
    )


def random_windows(
    texts: Texts, count: int, num_steps: int, ends: Ends, generator: torch.Generator
) -> Windows:
    """Windows drawn uniformly with replacement."""
    which = torch.randint(num_windows(texts, num_steps), (count,), generator=generator)
    return windows_at(texts, which.to(texts.states.device), num_steps, ends)


def all_windows(texts: Texts, num_steps: int, ends: Ends, size: int = 1024) -> Iterator[Windows]:
    """All windows, in batches."""
    places = torch.arange(num_windows(texts, num_steps), device=texts.token_ids.device)
    for part in places.split(size):
        yield windows_at(texts, part, num_steps, ends)


def read_texts(
    target: FeatureModel,
    rows: Int64[Tensor, "rows seq"],
    batch_size: int = 8,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Texts:
    """Let the target read rows of text and keep its last hidden states.

    Args:
        target: The target; none of its sequences may be open.
        rows: Token ids, in rows of the same length.
        batch_size: Rows per forward.
        on_rows: Receives the number of rows read.
    """
    watched = target.watch((target.num_layers,))
    states: list[Tensor] = []
    for batch in rows.split(batch_size):
        opened = {number: row.tolist() for number, row in enumerate(batch)}
        target.open(opened)
        for number in opened:
            state = watched.take(number)
            assert state is not None
            states.append(state.clone())
            target.close(number)
        on_rows(len(batch))
    return Texts(token_ids=rows.to(states[0].device), states=torch.stack(states))


def wide(states: Tensor) -> Tensor:
    """Convert to at least float32, in which heads compute."""
    return states if states.dtype == torch.float64 else states.float()

"""Texts with the target's hidden states at every token, the training data of heads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError
from monge.loading.networks import as_sequence_model
from monge.networks.base import FeatureModel
from monge.networks.network_facts import OutputLayer

HELD_OUT_ROWS: Final = 16
"""Held-out rows of an evaluation during training."""
_HELD_OUT: Final = 0.1
Text = tuple[Sequence[int], Sequence[int]]
"""A prompt and what the target wrote behind it, as token ids."""


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
class TokenStates:
    """Tokens with the target's states: places `[rows, seq]` of a batch, or `[tokens]` of all texts.

    Args:
        token_ids: Tokens.
        is_learnt: Mask of the tokens that the target wrote, whose laws are learnt.
        states: Inputs of the target's output layer.
        features: Hidden states of further layers, side by side.
        log_z: Log-sum-exp of the logits at every token, where a head needs it.
    """

    token_ids: Int64[Tensor, "*places"]
    is_learnt: Bool[Tensor, "*places"]
    states: Float[Tensor, "*places hidden"]
    features: Float[Tensor, "*places fused"]
    log_z: Float[Tensor, "*places"] | None = None

    def _map(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(TokenStates)}
        return {name: change(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(TokenStates):
    """Texts with the states of every token, concatenated.

    Args:
        starts: Start of each text, and the end of the last.
    """

    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        bad = int((~torch.isfinite(self.states)).any(dim=-1).sum())
        if bad:
            raise OptionError(
                f"head training: the target's hidden states are not finite at {bad} of "
                f"{self.token_ids.numel()} tokens; check "
                "its weights, or load it in a wider type (dtype='float32')"
            )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def digest(self) -> str:
        """Name of the tokens."""
        known = repr(self.starts).encode() + self.token_ids.cpu().numpy().tobytes()
        return blake2b(known, digest_size=6).hexdigest()

    def split(self, held_out: float) -> tuple["Texts", "Texts"]:
        """Split off the last texts, at least one text, as held-out text."""
        cut = min(len(self) - 1, max(1, round(len(self) * (1 - held_out))))
        return self.part(0, cut), self.part(cut, len(self))

    def part(self, first: int, last: int) -> "Texts":
        """Return the texts from `first` up to `last`."""
        starts = self.starts[first : last + 1]
        places = slice(starts[0], starts[-1])
        return Texts(
            starts=tuple(start - starts[0] for start in starts),
            **self._map(lambda values: values[places]),
        )

    def batch(
        self, first: int, count: int, device: torch.device | str | None = None
    ) -> TokenStates:
        """Return some of the texts as a batch on a device, padded on the right."""
        ends = list(zip(self.starts, self.starts[1:], strict=False))[first : first + count]

        def padded(values: Tensor) -> Tensor:
            return pad_sequence([values[start:end] for start, end in ends], batch_first=True)

        return TokenStates(**self._map(lambda values: padded(values).to(device)))


def thirds(texts: Texts) -> tuple[Texts, Texts, Texts]:
    """Split texts into rows to fit, to choose and to measure on.

    Raises:
        OptionError: If there are fewer than three rows.
    """
    if len(texts) < 3:
        raise OptionError(
            "a head needs three rows of text or more, to fit, to choose and to measure; got "
            f"{len(texts)}"
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
        OptionError: If all texts are too short.
    """
    return len(_places(texts, num_steps))


def _places(texts: Texts, num_steps: int) -> Int64[Tensor, " nodes"]:
    """Places of those positions, see `num_windows`."""
    starts = torch.tensor(texts.starts, device=texts.states.device)
    counts = (starts.diff() - num_steps - 1).clamp_min(0)
    ends = counts.cumsum(0)
    if not int(ends[-1]):
        raise OptionError(
            f"head training: texts of at most {int(starts.diff().max())} tokens are too short for "
            f"{num_steps} steps; give {num_steps + 2} or more"
        )
    places = torch.arange(int(ends[-1]), device=starts.device)
    return places + (starts[:-1] - ends + counts).repeat_interleave(counts)


def _windows_at(
    texts: Texts, places: Int64[Tensor, " nodes"], num_steps: int, ends: Ends
) -> Windows:
    steps = places[:, None] + torch.arange(1, num_steps + 1, device=places.device)
    return Windows(
        states=wide(texts.states[places]),
        tokens=wide(ends.embed(texts.token_ids[steps])),
        token_ids=texts.token_ids[steps + 1],
        true=wide(texts.states[steps]),
    )


def random_windows(
    texts: Texts, count: int, num_steps: int, ends: Ends, generator: torch.Generator
) -> Windows:
    """Windows drawn uniformly with replacement."""
    places = _places(texts, num_steps)
    which = torch.randint(len(places), (count,), generator=generator)
    return _windows_at(texts, places[which.to(places.device)], num_steps, ends)


def all_windows(texts: Texts, num_steps: int, ends: Ends, size: int = 1024) -> Iterator[Windows]:
    """All windows, in batches."""
    for places in _places(texts, num_steps).split(size):
        yield _windows_at(texts, places, num_steps, ends)


def read_texts(
    target: FeatureModel,
    texts: Sequence[Text],
    layers: Sequence[int] = (),
    *,
    longest: int | None = None,
    least: int = 0,
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Texts:
    """Let the target read texts and keep its hidden states; the shortest text comes first.

    Args:
        target: The target; none of its sequences may be open.
        texts: Prompts and answers, at least one.
        layers: Indices of the hidden states that are kept as features.
        longest: Most tokens of a text, which is cut; `None` cuts none.
        least: Fewest tokens that the target wrote; shorter texts are left out.
        batch_size: Texts per forward.
        dtype: Type of the stored states; `None` keeps theirs.
        device: Where they are stored; `None` keeps them where they arise.
        on_rows: Receives the number of texts read.
    """
    cut = [((*prompt, *answer)[:longest], len(prompt)) for prompt, answer in texts]
    cut = [(text, given) for text, given in cut if len(text) - given >= least]
    cut.sort(key=lambda pair: len(pair[0]))
    starts = [0, *accumulate(len(text) for text, _ in cut)]
    watched, kept = target.watch((*layers, target.num_layers)), torch.empty(0)
    for first in range(0, len(cut), batch_size):
        batch = {first + row: text for row, (text, _) in enumerate(cut[first : first + batch_size])}
        target.open(batch)
        for number in batch:
            states = watched.take(number)
            assert states is not None
            if not len(kept):
                # Allocated at once: small tensors that stay, between large ones that go, leave
                # holes of gigabytes.
                kept = torch.empty(
                    starts[-1],
                    states.shape[1],
                    dtype=dtype or states.dtype,
                    device=states.device if device is None else device,
                )
            kept[starts[number] : starts[number + 1]] = states
            target.close(number)
        on_rows(len(batch))
    learnt = [place >= given for text, given in cut for place in range(len(text))]
    return Texts(
        starts=tuple(starts),
        token_ids=torch.tensor([token for text, _ in cut for token in text], device=kept.device),
        is_learnt=torch.tensor(learnt, device=kept.device),
        states=kept[:, -target.hidden_size :],
        features=kept[:, : -target.hidden_size],
    )


def wide(states: Tensor) -> Tensor:
    """Convert to at least float32, in which heads compute."""
    return states if states.dtype == torch.float64 else states.float()

"""Training of EAGLE heads, with the text and losses of SHAPE heads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional

from monge.heads.readers.eagle import EagleHead
from monge.heads.readers.files import InMemory
from monge.heads.readers.reading import Reading
from monge.heads.readers.tensors import Settings, Tensors
from monge.training.chain import ChainQuality, Step, chain_quality
from monge.training.loop import Trainee
from monge.training.losses import Weights, law_losses
from monge.training.texts import Ends, Texts, num_windows

_ROWS: Final = 8
"""Rows of text of one measurement's forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainee(Trainee):
    """An EAGLE head of one layer, initialised as the identity on the state.

    All steps of a chain are trained. From the second step on, the head reads its own predictions of
    the previous step, as in HASS and EAGLE-3. Attention then reads predictions at earlier positions
    too, where decoding reads the target's states, so figures of deeper steps are slightly
    pessimistic.

    Args:
        fitted: Training text and states.
        held_out: Held-out text and states, for early stopping.
        ends: The target's embedding and output layer.
        parts: Weights of the loss terms; the distance of predicted and true states is added with
            weight 1.
        num_steps: Length of a chain.
        config: Llama-like configuration of the layer, with the target's sizes.
        seed: Seed of the initial weights.

    Reference:
        Li et al., EAGLE, arXiv 2401.15077; training on own predictions: HASS, arXiv 2408.15766.
    """

    fitted: Texts
    held_out: Texts
    ends: Ends
    parts: Weights
    num_steps: int
    config: dict[str, Any]
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False, repr=False)
    head: EagleHead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_windows(self.fitted, self.num_steps)  # refuses rows that are too short
        device = self.fitted.states.device
        fresh = initial(self.config, torch.Generator().manual_seed(self.seed))
        trained = {name: tensor.to(device).requires_grad_() for name, tensor in fresh.items()}
        source = Tensors(InMemory(trained), {name: name for name in trained})
        object.__setattr__(self, "tensors", trained)
        object.__setattr__(self, "head", EagleHead(source, Settings(self.config, "eagle training")))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        rows, length = self.fitted.token_ids.shape
        which = torch.randint(rows, (max(1, batch_size // length),), generator=generator).to(
            self.fitted.states.device
        )
        texts = Texts(token_ids=self.fitted.token_ids[which], states=self.fitted.states[which])
        total = torch.zeros((), device=texts.states.device)
        for number, (states, true, step) in enumerate(self._steps(texts)):
            kl, tv = law_losses(step.true, step.drafted.float())
            angle = 1.0 - functional.cosine_similarity(states, true, dim=-1).mean()
            distance = functional.smooth_l1_loss(states, true)
            total = total + self.parts.decay**number * (
                kl + self.parts.tv * tv + self.parts.cosine * angle + distance
            )
        return total

    def look(self) -> float:
        return self.quality(self.held_out).block_efficiency

    def quality(self, texts: Texts) -> ChainQuality:
        """Acceptance on text."""
        starts = range(0, len(texts.token_ids), _ROWS)
        with torch.no_grad():
            return chain_quality(
                (step for _, _, step in self._steps(texts.rows(slice(start, start + _ROWS))))
                for start in starts
            )

    def _steps(self, texts: Texts) -> Iterator[tuple[Tensor, Tensor, Step]]:
        """Predicted states, true states and logits per step, for chains that start at every position.

        Step n of the chain that starts with the pair at place t is the prediction at place t + n -
        1, about the token after.
        """
        rows, length = texts.token_ids.shape
        states = texts.states if texts.states.dtype == torch.float64 else texts.states.float()
        chains = length - 1 - self.num_steps
        embeddings = self.ends.embed(texts.token_ids[:, 1:]).to(states.dtype).flatten(0, 1)
        read = states[:, :-1]
        for number in range(self.num_steps):
            segments = [Reading(self.head.num_kept).read(range(length - 1)) for _ in range(rows)]
            found = self.head.advance(embeddings, read.flatten(0, 1), segments).unflatten(
                0, (rows, -1)
            )
            here, true = (
                found[:, number : number + chains],
                states[:, number + 1 : number + 1 + chains],
            )
            with torch.no_grad():
                logits = self.ends.unembed(true).float().flatten(0, 1)
            drafted = self.head.logits(here.flatten(0, 1), self.ends.unembed)
            yield (
                here,
                true,
                Step(drafted, logits, self._tokens(texts.token_ids, number + 2, chains)),
            )
            read = torch.cat([states[:, :1], found[:, :-1]], dim=1)

    def _tokens(
        self, token_ids: Int64[Tensor, "rows seq"], first: int, count: int
    ) -> Int64[Tensor, " nodes"]:
        return token_ids[:, first : first + count].flatten()


def initial(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Weights under the names of the published format.

    Output projections are zero, so the state passes unchanged.
    """
    hidden, inner, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    dim, kv_heads = config["head_dim"], config["num_key_value_heads"]

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    name = "layers.0"
    return {
        "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
        f"{name}.self_attn.q_proj.weight": drawn(heads * dim, hidden),
        f"{name}.self_attn.k_proj.weight": drawn(kv_heads * dim, hidden),
        f"{name}.self_attn.v_proj.weight": drawn(kv_heads * dim, hidden),
        f"{name}.self_attn.o_proj.weight": torch.zeros(hidden, heads * dim),
        f"{name}.mlp.gate_proj.weight": drawn(inner, hidden),
        f"{name}.mlp.up_proj.weight": drawn(inner, hidden),
        f"{name}.mlp.down_proj.weight": torch.zeros(hidden, inner),
        f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
    }

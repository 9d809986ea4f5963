"""How a token of a block depends on the token before it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.layers import Nodes, Projection
from monge.heads.readers.tensors import Settings, Tensors


@dataclass(frozen=True, slots=True)
class BlockPath:
    """Nodes of a block.

    Args:
        token_ids: Their tokens; the head predicts the tokens after them.
        states: States of the rows that predict those tokens.
        memory: The head's recurrent state of the path, from the parent node; zeros at the anchor.
    """

    token_ids: Int64[Tensor, " nodes"]
    states: Nodes
    memory: Nodes


class Edges(nn.Module, ABC):
    """Corrects a row's logits given the previous token."""

    memory: int = 0
    """Width of what a path remembers."""

    @abstractmethod
    def forward(self, path: BlockPath, logits: Nodes) -> tuple[Float[Tensor, "nodes some"], Nodes]:
        """The corrected logits, and the paths' next recurrent state."""


class NoEdges(Edges):
    """No correction, as in DFlash."""

    def forward(self, path: BlockPath, logits: Nodes) -> tuple[Float[Tensor, "nodes some"], Nodes]:
        return logits, path.memory


class MarkovEdges(Edges):
    """DSpark's bias W2 W1[x], plain, gated by the row's state, or with a recurrent state of the path.

    Args:
        tensors: `markov_head.*`.
        settings: `markov_rank`, `markov_head_type`.
        hidden: Width of a row's state.
        sizes: Number of previous tokens, and of tokens that can be drafted.

    Raises:
        ModelLoadError: If the type is unknown.

    Reference:
        DSpark, arXiv 2607.05147.
    """

    before: Tensor

    def __init__(
        self, tensors: Tensors, settings: Settings, hidden: int, sizes: tuple[int, int]
    ) -> None:
        super().__init__()
        rank, self.kind = (
            settings.number("markov_rank"),
            str(settings.config.get("markov_head_type", "vanilla")),
        )
        vocab, drafted = sizes
        self.register_buffer("before", tensors.take("markov_head.markov_w1.weight", vocab, rank))
        self.after = Projection(tensors, "markov_head.markov_w2", drafted, rank)
        if self.kind == "gated":
            self.gate = Projection(tensors, "markov_head.gate_proj", rank, hidden + rank)
        elif self.kind == "rnn":
            self.joint, self.memory = (
                Projection(tensors, "markov_head.joint_proj", 3 * rank, 2 * rank + hidden),
                rank,
            )
        elif self.kind != "vanilla":
            raise settings.refuse(
                f"markov_head_type {self.kind!r} is not known here; known: vanilla, gated, rnn"
            )

    def forward(self, path: BlockPath, logits: Nodes) -> tuple[Float[Tensor, "nodes some"], Nodes]:
        known, memory = (
            functional.embedding(path.token_ids.to(self.before.device), self.before),
            path.memory,
        )
        if self.kind == "gated":
            known = torch.sigmoid(self.gate(torch.cat([path.states, known], dim=-1))) * known
        elif self.kind == "rnn":
            gate, new, out = self.joint(torch.cat([memory, known, path.states], dim=-1)).chunk(
                3, dim=-1
            )
            gate = torch.sigmoid(gate)
            memory, known = gate * memory + (1.0 - gate) * torch.tanh(new), torch.tanh(out)
        return logits + self.after(known), memory


class SelectorEdges(Edges):
    """DFlash 2's selector: the row's best candidates, each with the score <A[x] * H s, B[candidate]> added.

    Other tokens get no mass, and the declared draft law is the law after this restriction.

    Args:
        tensors: `candidate_selector.*`.
        settings: `selector_rank`, `selector_top_k`.
        hidden: Width of a row's state s.
        vocab: Number of tokens.

    Reference:
        DFlash 2, weights published by z-lab; read from its reference code.
    """

    before: Tensor
    after: Tensor

    def __init__(self, tensors: Tensors, settings: Settings, hidden: int, vocab: int) -> None:
        super().__init__()
        rank, self.top_k = settings.number("selector_rank"), settings.number("selector_top_k")
        if not 1 <= self.top_k <= vocab:
            raise settings.refuse(f"selector_top_k must lie in 1..{vocab}; got {self.top_k}")
        for part, name in (("before", "predecessor"), ("after", "successor")):
            key = f"candidate_selector.{name}_codebook"
            self.register_buffer(
                part, tensors.take(key if key in tensors else f"{key}.weight", vocab, rank)
            )
        self.project = Projection(tensors, "candidate_selector.hidden_projection", rank, hidden)

    def forward(self, path: BlockPath, logits: Nodes) -> tuple[Float[Tensor, "nodes some"], Nodes]:
        scores, candidates = logits.topk(self.top_k, dim=-1)
        known = functional.embedding(
            path.token_ids.to(self.before.device), self.before
        ) * self.project(path.states)
        scores = scores + (functional.embedding(candidates, self.after) @ known[..., None])[..., 0]
        return torch.full_like(logits, -torch.inf).scatter(1, candidates, scores), path.memory

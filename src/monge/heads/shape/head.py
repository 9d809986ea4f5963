"""A SHAPE head: a predictor, an alignment and a temperature per step, and the identity of its target."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from monge.core.errors import OptionError, unknown_name
from monge.heads.shape.alignment import ALIGNMENTS, Alignment, NoMap
from monge.heads.shape.predictors import (
    GatedPredictor,
    RidgePredictor,
    Start,
    States,
    StepPredictor,
)
from monge.networks.base import FeatureModel

_PROBES: Final = 16
"""Tokens whose embeddings distinguish targets."""
_SAME: Final = 0.99
"""Smallest cosine of the probes of two targets that count as the same target.

Rounding to bfloat16 or a light fine-tuning stays above.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """Sizes of a target.

    Args:
        hidden_size: Width of a hidden state.
        num_layers: Number of layers, the index of the last hidden state.
        vocab_size: Number of logits.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, target: FeatureModel) -> "TargetSizes":
        """Read the sizes of a network."""
        return cls(
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
        )


class StepAlignment(nn.Module):
    """An alignment in a subspace, with a strength: h + strength * P^T (map(P h) - P h).

    Args:
        alignment: The map, of the subspace's size.
        hidden_size: Width of a state.
    """

    subspace: Tensor
    strength: Tensor

    def __init__(self, alignment: Alignment, hidden_size: int) -> None:
        super().__init__()
        if alignment.size > hidden_size:
            raise OptionError(
                f"shape: an alignment in {alignment.size} dimensions needs states "
                f"that wide; got {hidden_size}"
            )
        self.alignment = alignment
        self.register_buffer("subspace", torch.eye(alignment.size, hidden_size))
        self.register_buffer("strength", torch.zeros(()))

    def map(self, states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes hidden"]:
        """The aligned states."""
        if isinstance(self.alignment, NoMap):
            return states
        inside = states @ self.subspace.T
        return states + self.strength * (self.alignment.map(inside) - inside) @ self.subspace


class ShapeHead(nn.Module):
    """Predicts the states of the coming steps.

    Args:
        predictor: The predictor.
        sizes: The target's sizes.
        alignment: Name of the alignment of every step.
        subspace: Dimension of the subspace; `None` takes at most 64.

    Raises:
        OptionError: If the subspace is larger than a state.
    """

    temperatures: Tensor
    probe: Tensor

    def __init__(
        self,
        predictor: StepPredictor,
        sizes: TargetSizes,
        alignment: str = "none",
        subspace: int | None = None,
    ) -> None:
        super().__init__()
        size = 0
        if alignment != "none":
            size = min(64, sizes.hidden_size) if subspace is None else subspace
        self.predictor, self.sizes, self.alignment_name = predictor, sizes, alignment
        self.subspace_size = size
        self.alignments = nn.ModuleList(
            StepAlignment(ALIGNMENTS[alignment](size), sizes.hidden_size)
            for _ in range(predictor.num_steps)
        )
        self.register_buffer("temperatures", torch.ones(predictor.num_steps))
        self.register_buffer("probe", torch.zeros(_PROBES, sizes.hidden_size))

    @property
    def num_parameters(self) -> int:
        """Number of parameters, including fitted buffers."""
        return sum(tensor.numel() for tensor in self.state_dict().values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def step(self, number: int, start: Start, previous: States, last: States) -> States:
        """The aligned state of a step; the next step starts from it. See `StepPredictor.step`."""
        return self.aligned(number, self.predictor.step(number, start, previous, last))

    def aligned(self, number: int, states: States) -> States:
        """Predicted states of a step after its alignment."""
        return self.alignment(number).map(states)

    def alignment(self, number: int) -> StepAlignment:
        """The alignment of a step, from 1."""
        alignment = self.alignments[number - 1]
        assert isinstance(alignment, StepAlignment)
        return alignment

    def cooled(
        self, number: int, logits: Float[Tensor, "nodes vocab"]
    ) -> Float[Tensor, "nodes vocab"]:
        """Logits of a step at the step's temperature."""
        temperature = float(self.temperatures[number - 1])
        return logits if temperature == 1.0 else logits / temperature

    def remember(self, target: FeatureModel) -> None:
        """Store the identity of the target."""
        self.probe.copy_(_probe_of(target))

    def check(self, target: FeatureModel) -> None:
        """Check that the head belongs to a target.

        Raises:
            OptionError: If sizes or embeddings differ.
        """
        sizes = TargetSizes.of(target)
        if sizes != self.sizes:
            expected = self.sizes
            raise OptionError(
                f"shape: this head is for a target of hidden size {expected.hidden_size}, "
                f"{expected.num_layers} layers and {expected.vocab_size} tokens; the target has "
                f"{sizes.hidden_size}, {sizes.num_layers} and {sizes.vocab_size}; train one for it "
                "with `monge train shape`"
            )
        probes = (self.probe, _probe_of(target).to(self.probe.device))
        ours, theirs = (probe.double().flatten() for probe in probes)
        cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
        if not cosine >= _SAME:
            raise OptionError(
                "shape: this head is for another target of the same sizes (their embeddings have "
                f"cosine {cosine:.3f}); train "
                "one for it with `monge train shape`"
            )


def make_predictor(
    kind: str, sizes: TargetSizes, generator: torch.Generator | None = None, **settings: Any
) -> StepPredictor:
    """Create a predictor from its kind and settings, as stored in checkpoints.

    Args:
        kind: `gated` or `ridge`.
        sizes: The target's sizes.
        generator: Source of initial weights.
        **settings: `num_steps`, `is_branched`; for `gated` also `width` and `gate_rank`.

    Raises:
        OptionError: If the kind is unknown.
        TypeError: If a setting is missing or unknown.
    """
    kinds = {"gated": partial(GatedPredictor, generator=generator), "ridge": RidgePredictor}
    if kind not in kinds:
        raise unknown_name("shape predictor", kind, kinds)
    return kinds[kind](sizes.hidden_size, **settings)


def _probe_of(target: FeatureModel) -> Tensor:
    last = target.vocab_size - 1
    return target.embed([index * last // (_PROBES - 1) for index in range(_PROBES)])


class FirstStep(nn.Module):
    """The first step as a module of tensors only, which a backend can compile."""

    def __init__(self, head: ShapeHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: States, known: States) -> tuple[Start, States]:
        """Return the shared computation and the predicted state, from the last state and the next token's embedding."""
        start = self.head.predictor.start(states, known)
        return start, self.head.step(1, start, states, known)


class LaterStep(nn.Module):
    """A later step, from 2, as a module of tensors only; see `ShapeHead.step`."""

    def __init__(self, head: ShapeHead, number: int) -> None:
        super().__init__()
        self.head, self.number = head, number

    def forward(self, start: Start, previous: States, last: States) -> tuple[States]:
        return (self.head.step(self.number, start, previous, last),)

"""Sizes of a target that heads depend on."""

from dataclasses import dataclass

from monge.core.model import FeatureModel


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

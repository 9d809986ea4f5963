"""What a head knows of its target by number."""

from dataclasses import dataclass

from monge.core.model import FeatureModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """Sizes of a target.

    Args:
        hidden_size: Width of a hidden state.
        num_layers: Layers, which is the index of the last hidden state.
        vocab_size: Tokens that have a logit.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, target: FeatureModel) -> "TargetSizes":
        """The sizes of a network."""
        return cls(
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
        )

"""What a rule has to say of itself so that whole rounds of chains can be decided on a device."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainDecision:
    """How a rule decides about a chain of single draws, all nodes at once and without a number that the host waits for.

    The plain twin is the rule: on the same uniforms it keeps as many tokens and emits the same one after them.

    Args:
        of_laws: `(p [nodes, vocab], q [drafts, vocab], tokens [drafts], uniforms [nodes])`, with one node more than drafts, to
            how many tokens are kept `[1]` and the token after them `[1]`.
        of_points: The same for point masses, given where they stand: `(p [nodes], tokens [drafts])`.
        num_uniforms: Uniforms that the rule draws where so many of so many tokens are kept.
    """

    of_laws: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    of_points: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    num_uniforms: Callable[[int, int], int]

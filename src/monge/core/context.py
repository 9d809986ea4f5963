"""The context that a drafter reads, and the plan that a controller makes."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The committed text of a request.

    Args:
        request_id: Names the request for models that keep a cache for it.
        token_ids: Prompt and committed tokens.
        num_prompt_tokens: Number of prompt tokens.
        rules: The sampling rules of the request, so that a drafter can apply them too.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    rules: SamplingRules

    def append(self, token_ids: tuple[int, ...]) -> "Context":
        """Return the context after a commit."""
        return replace(self, token_ids=self.token_ids + token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Limits of a round's tree, chosen before anything is drawn.

    Args:
        max_depth: Deepest node; 0 means no speculation; `None` leaves it to the builder.
        max_nodes: Drafted nodes, the root not counted; `None` leaves it to the builder.
        drafter: Drafter of a pool that drafts; `None` leaves it to the pool. Other drafters ignore
            it.
        model_free_depth: Deepest node of the model-free drafters of a pool, if the plan names no
            drafter; `None` for `max_depth`.
    """

    max_depth: int | None = None
    max_nodes: int | None = None
    drafter: str | None = None
    model_free_depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_depth", "max_nodes", "model_free_depth"):
            if (limit := getattr(self, name)) is not None and not limit >= 0:
                raise OptionError(
                    f"DraftPlan: {name} must be >= 0, or None for no limit; got {limit}"
                )

    def depth(self, builder_depth: int) -> int:
        """Return the depth of a builder under this plan."""
        return builder_depth if self.max_depth is None else min(builder_depth, self.max_depth)

    def nodes(self, builder_nodes: int) -> int:
        """Return the number of drafted nodes of a builder under this plan."""
        return builder_nodes if self.max_nodes is None else min(builder_nodes, self.max_nodes)

    def within(self, other: "DraftPlan") -> "DraftPlan":
        """Return this plan, no deeper and no larger than another plan."""
        depth = _least(self.max_depth, other.max_depth)
        nodes, lookup = _least(self.max_nodes, other.max_nodes), self.model_free_depth
        if lookup is not None:
            lookup = _least(lookup, other.max_depth)
        if (depth, nodes, lookup) == (self.max_depth, self.max_nodes, self.model_free_depth):
            return self
        return replace(self, max_depth=depth, max_nodes=nodes, model_free_depth=lookup)

    def reaching(self, num_tokens: int, max_length: int | None) -> "DraftPlan":
        """Return this plan, no deeper than a drafter of bounded context can draft.

        The deepest candidates are not read, so they may lie a token beyond the context.

        Args:
            num_tokens: Committed tokens.
            max_length: Longest text that the drafter reads; `None` for unbounded.
        """
        if max_length is None:
            return self
        return self.within(depth_plan(max(0, max_length - num_tokens + 1)))

    @property
    def for_model_free(self) -> "DraftPlan":
        """The plan of model-free drafters of a pool."""
        depth = self.model_free_depth
        return self if depth is None else depth_plan(depth, self.max_nodes)


PLAIN: Final = DraftPlan(max_depth=0)
"""Plain decoding in the coming round."""


@lru_cache(maxsize=1024)
def depth_plan(depth: int, nodes: int | None = None) -> DraftPlan:
    """Return the plan of this depth and this many drafted nodes."""
    return DraftPlan(max_depth=depth, max_nodes=nodes)


def _least(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)

"""Sampling rules: temperature, top-k, top-p and min-p."""

from dataclasses import dataclass, replace

from monge.core.setting_types import check_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """Rules that turn logits into a law; the same rules mean the same law for target and drafter.

    Applied in the order of `transformers`: temperature, top-k, top-p, min-p, each on the
    renormalised law that the rule before it leaves. Rules order tokens by decreasing logit, and
    tokens of equal logits by increasing id. They compare the logits as given, so the order is
    defined even where masses are 0, or equal by rounding. If a rule is in force, tokens of less
    than 1e-300 times the largest mass are left out, too.

    Args:
        temperature: 0 gives the point mass at the largest logit (lowest id first among equals).
        top_k: Keep the `top_k` largest logits, and those equal to the last of them. `None` keeps
            all.
        top_p: Keep the most probable tokens until their mass reaches `top_p`, in (0, 1].
        min_p: Keep tokens of at least `min_p` times the largest mass, in [0, 1].
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int = 1.0
    min_p: float | int = 0.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def truncates(self) -> bool:
        """True if some tokens lose their mass by rule."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def kind(self) -> str:
        """A member of `KINDS`; requests of one kind are computed together."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.truncates else "sampled"

    def within_top(self, top_k: int) -> "SamplingRules":
        """The same rules, and no more than the `top_k` most probable tokens."""
        return replace(self, top_k=top_k if self.top_k is None else min(top_k, self.top_k))

"""The reference law of a token in an audit: masses of named tokens, and the mass of the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.core.sampling_rules import SamplingRules

END: Final = "<end of text>"
"""Name that the audit gives to every token that ends a text."""

MOST_NAMED: Final = 64
"""Most named tokens of a law; others form a category, so costs do not grow with the vocabulary."""
SMALLEST_REST: Final = 1e-7
"""Mass of the other tokens where it rounds to nothing; it bounds the excess of the sum of the masses."""
_BOUNDARY_NOISE: Final = 0.02  # 16-bit noise of a cumulative mass that may move it across `top_p`
_SWAP_RATIO: Final = (
    1.3  # of the last kept mass to the first dropped one: 16-bit noise may swap them
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLaw:
    """A law over named tokens and a category for all others.

    Args:
        names: Token names, most probable first.
        probs: Their masses.
        rest: Mass of all other tokens; 0 only where sampling rules exclude them.
        draft: Masses of a draft model's law on these categories; `None` if it is unknown.
    """

    names: tuple[str, ...]
    probs: Float64[np.ndarray, " support"]
    rest: float
    draft: Float64[np.ndarray, " categories"] | None = None
    places: Mapping[str, int] = field(init=False, repr=False)
    masses: Float64[np.ndarray, " categories"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = dict(zip(self.names, range(len(self.names)), strict=True))
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "masses", np.concatenate((self.probs, (self.rest,))))

    def place(self, name: str) -> int:
        """Return the index of a token's category in `masses`."""
        return self.places.get(name, len(self.names))

    def score(self, name: str) -> float:
        """Return how much a token gains if tokens after rejected drafts come from p; its mean is 0.

        p = this law, q = the draft law. The residual draws no token of which q has more than p.
        """
        place = self.place(name)
        if self.draft is None or self.masses[place] == 0.0:
            return 0.0
        missing = np.maximum(self.masses - self.draft, 0.0)
        return float(missing.sum() - missing[place] / self.masses[place])

    def without(self, name: str) -> "TokenLaw":
        """Return the same law, which names a token that it excludes: without a name it counts as the rest."""
        return TokenLaw((*self.names, name), np.append(self.probs, 0.0), self.rest)


def law_of_logprobs(top: Mapping[str, float], rules: SamplingRules) -> TokenLaw | None:
    """Return the law of a request, from the largest log-probabilities at temperature 1, by token name.

    Returns:
        The law; `None` where these log-probabilities do not determine it, or where numeric noise
        may move its support. This depends on the text before the token only, so that leaving the
        token out does not bias a test.
    """
    ordered = sorted(top.items(), key=lambda pair: -pair[1])
    names = tuple(name for name, _ in ordered)
    probs = np.exp(np.array([logprob for _, logprob in ordered], dtype=np.float64))
    return truncated(names, probs, max(0.0, 1.0 - float(probs.sum())), rules)


def truncated(
    names: Sequence[str], probs: Float64[np.ndarray, " support"], rest: float, rules: SamplingRules
) -> TokenLaw | None:
    """Apply sampling rules to a law at temperature 1 whose most probable tokens are named.

    See `law_of_logprobs`.
    """
    if rules.top_k is not None and rules.top_k < len(names):
        if probs[rules.top_k - 1] < _SWAP_RATIO * probs[rules.top_k]:
            return None
        names, probs, rest = names[: rules.top_k], probs[: rules.top_k], 0.0
    if (rules.top_k is not None or rules.temperature != 1) and rest > SMALLEST_REST:
        # How many of the unnamed tokens are kept, or their mass at this temperature, is unknown.
        return None
    if rules.temperature != 1:
        probs = probs ** (1.0 / rules.temperature)
    total = probs.sum() + rest
    probs, rest = probs / total, rest / total
    if rules.top_p < 1:
        cumulative = probs.cumsum()
        distance = np.abs(cumulative - rules.top_p).min()
        if cumulative[-1] < rules.top_p + _BOUNDARY_NOISE or distance < _BOUNDARY_NOISE:
            return None
        size = 1 + int((cumulative < rules.top_p).sum())
        if size < len(probs) and probs[size - 1] < _SWAP_RATIO * probs[size]:
            return None
        names, probs, rest = names[:size], probs[:size] / cumulative[size - 1], 0.0
    if len(names) > MOST_NAMED:
        rest += probs[MOST_NAMED:].sum()
        names, probs = names[:MOST_NAMED], probs[:MOST_NAMED]
    rest = float(rest)
    return TokenLaw(tuple(names), probs, rest if rules.truncates else max(rest, SMALLEST_REST))

"""Log-probabilities of committed tokens, for requests with `logprobs`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError
from monge.laws.law import Law
from monge.requests.sampling import NodeLaws

LogprobSource = Literal["processed", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """The log-probabilities that a request wants.

    Args:
        num_top: Number of most probable tokens beside the token itself.
        source: `processed`, the distribution that the token was drawn from, or `raw`, the target's
            distribution at temperature 1, before processors and sampling rules.
        drawn: Whether entries say how their token was drawn; see `Drawn`.
    """

    num_top: int
    source: LogprobSource = "processed"
    drawn: bool = False

    def __post_init__(self) -> None:
        if self.num_top < 0:
            raise OptionError(
                f"logprobs: the number of most probable tokens must be >= 0; got {self.num_top}"
            )

    @property
    def num_scores(self) -> int:
        """Number of scores in each entry."""
        return 1 + self.num_top + 3 * self.drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a token was drawn.

    Its log-probability in the distribution before truncation is `processed + log(kept_mass)`.

    Args:
        processed: Natural log-probability under the distribution that the token was drawn from.
        raw: The same under the target's distribution at temperature 1, before processors and
            sampling rules.
        kept_mass: Mass, in (0, 1], that the tokens kept by truncation have in the distribution
            before it.
    """

    processed: float
    raw: float
    kept_mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and how probable it was.

    Args:
        token_id: The token.
        logprob: Its natural log-probability; -inf if its probability is 0.
        rank: 1 for the most probable token, and so on; equals share the better rank.
        top: The most probable tokens with their log-probabilities, largest first; tokens without
            mass are left out.
        drawn: How the token was drawn; `None` for tokens of a prompt, and unless requested.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    drawn: Drawn | None = None


def along(
    options: LogprobOptions, laws: NodeLaws, path: Sequence[int], token_ids: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Return the log-probability of each token that follows a node of a path."""
    is_raw = options.source == "raw"
    raw, processed = tuple[TokenLogprob, ...](), tuple[TokenLogprob, ...]()
    if is_raw or options.drawn:
        num_top = options.num_top if is_raw else 0
        raw = of_logits(laws.logits[list(path)], token_ids, num_top)
    if not is_raw or options.drawn:
        num_top = 0 if is_raw else options.num_top
        pairs = zip(path, token_ids, strict=True)
        processed = tuple(of_law(laws[node], token, num_top) for node, token in pairs)
    entries = raw if is_raw else processed
    if not options.drawn:
        return entries
    rows = zip(entries, processed, raw, map(laws.kept_mass, path), strict=True)
    return tuple(
        replace(entry, drawn=Drawn(processed=drawn.logprob, raw=plain.logprob, kept_mass=kept_mass))
        for entry, drawn, plain, kept_mass in rows
    )


def of_law(law: Law, token_id: int, num_top: int) -> TokenLogprob:
    """Return log-probabilities under a distribution."""
    sparse, prob = law.sparse(), law.prob(token_id)
    best = torch.topk(sparse.probs, min(num_top, len(sparse.probs)))
    pairs = zip(sparse.token_ids[best.indices].tolist(), best.values.log().tolist(), strict=True)
    return TokenLogprob(
        token_id=token_id,
        logprob=math.log(prob) if prob > 0 else -math.inf,
        rank=1 + int((sparse.probs > prob).sum()),
        top=tuple(pairs),
    )


def of_logits(
    logits: Float[Tensor, "nodes vocab"], token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Return log-probabilities at temperature 1: token i under row i of the logits."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    ids = torch.tensor([*token_ids]).to(logprobs.device, non_blocking=True)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1)
    ranks = 1 + (logprobs > chosen[:, None]).sum(dim=-1)
    values, tokens = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    best = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=tuple(pair for pair in zip(*row, strict=True) if pair[1] > -math.inf),
        )
        for token, logprob, rank, row in zip(
            token_ids, chosen.tolist(), ranks.tolist(), best, strict=True
        )
    )

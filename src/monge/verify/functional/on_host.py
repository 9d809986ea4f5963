"""Chains of large vocabularies on a CPU: each request by itself, its laws read where they lie.

A batch on a device takes every step for every request, and writes rows of masses. A CPU computes
only the few masses and sums that decide a request. The rules are those of `rejection`, with numbers
as values.

p = target law, q = draft law.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.laws.draws import TapeDraws
from monge.laws.law import Law, LawSequence
from monge.laws.lazy_laws import Excess, can_read, laws_of_masses
from monge.verify.functional.rejection import rejection, whole_chain
from monge.verify.functional.tensors import (
    Children,
    DraftLaws,
    Verified,
    children_of,
    frozen,
)
from monge.verify.functional.where import HostDraws, Uniforms, share


class HostChain:
    """The chain of a request; see `rejection.ChainProblem`.

    Args:
        tokens: Drafted tokens.
        targets: p at every place, and after the last token.
        drafts: q at every place, read in order.
    """

    whole, is_open = 1.0, np.True_

    def __init__(self, tokens: Sequence[int], targets: LawSequence, drafts: Iterable[Law]) -> None:
        self.tokens, self.targets, self.depth = tokens, targets, len(tokens)
        self._rest = iter(drafts)
        self._drafts: list[Law] = []

    def draft(self, place: int) -> Law:
        while len(self._drafts) <= place:
            self._drafts.append(next(self._rest))
        return self._drafts[place]

    def ratio(self, place: int) -> float:
        x = self.tokens[place]
        return self.targets[place].prob(x) / self.draft(place).prob(x)

    def weighed(self, scales: Sequence[float]) -> Callable[[int], float]:
        return lambda count: (
            scales[count]
            if count == self.depth
            else share(self._excess(count, scales).mass, scales[count])
        )

    def has(self, count: int) -> bool:
        return count <= self.depth

    def left(self, count: int, scales: Sequence[float]) -> Law:
        is_end = count == self.depth
        return self.targets[count] if is_end else self._excess(count, scales).law

    def _excess(self, count: int, scales: Sequence[float]) -> Excess:
        return Excess(scales[count], self.targets[count], self.draft(count))


Decide = Callable[[HostChain, HostDraws], tuple[int, int]]
"""A rule for a request: the number of its accepted tokens, and the token after them."""


def token_by_token(chain: HostChain, draws: HostDraws) -> tuple[int, int]:
    """Speculative sampling: try each token against p until a token is rejected."""
    for place, x in enumerate(chain.tokens):
        p, q = chain.targets[place], chain.draft(place)
        token, left = rejection(p, q, (x,), (), draws, is_open=np.True_)
        if token != x:
            return place, draws.categorical(left, np.True_)
    return chain.depth, draws.categorical(chain.targets[chain.depth], np.True_)


def walk(chain: HostChain, draws: HostDraws) -> tuple[int, int]:
    """Sample and match: draw from p until a token differs from the drafted token."""
    for place, x in enumerate(chain.tokens):
        if (token := draws.categorical(chain.targets[place], np.True_)) != x:
            return place, token
    return chain.depth, draws.categorical(chain.targets[chain.depth], np.True_)


def _verified(
    decide: Decide,
    *,
    probs: Float[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    uniforms: Uniforms,
    draft: DraftLaws | None = None,
    children: Children | None = None,
) -> Verified | None:
    """Return the verdicts, or `None` where the program for batches is to read the laws."""
    most = probs.shape[1]
    is_chain = children is None or frozen(children) == children_of(range(-1, most - 1))
    is_dense = draft is None or (draft.token_ids is None and can_read(draft.probs))
    if not (is_chain and is_dense and can_read(probs)):
        return None
    if not isinstance(uniforms, Tensor) or uniforms.shape[1] < most:
        return None
    lengths = (token_ids[:, 1:] >= 0).sum(1).tolist()
    drafts: Sequence[Sequence[Law]] | None = [()] * len(lengths)
    if draft is not None:
        x = token_ids[:, 1:]
        masses = draft.probs[:, : most - 1].gather(2, x.clamp_min(0)[..., None]).squeeze(2)
        # Without a draft mass no ratio is a number.
        if not bool(((masses > 0.0) | (x < 0)).all()):
            return None
        drafts = laws_of_masses(draft.probs, lengths)
    targets = laws_of_masses(probs, [length + 1 for length in lengths])
    if targets is None or drafts is None:
        return None
    chains = (
        HostChain(tokens[:length], *laws)
        for tokens, length, *laws in zip(
            token_ids[:, 1:].tolist(), lengths, targets, drafts, strict=True
        )
    )
    pairs = zip(chains, uniforms.tolist(), strict=True)
    accepted, next_token, used = torch.tensor(
        [decided(decide, chain, numbers) for chain, numbers in pairs]
    ).unbind(1)
    levels = torch.arange(1, most)
    path = torch.where(levels <= accepted[:, None], levels, -1)
    return Verified(path, accepted, next_token, used)


def decided(decide: Decide, chain: HostChain, uniforms: Sequence[float]) -> tuple[int, int, int]:
    """Return the number of accepted tokens, the token after them, and the number of used uniforms."""
    draws = TapeDraws(uniforms)
    return (*decide(chain, HostDraws(draws)), draws.num_drawn)


block = partial(_verified, whole_chain)
speculative_sampling = partial(_verified, token_by_token)
sample_and_match = partial(_verified, walk)

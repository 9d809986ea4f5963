"""The candidates of a node, conditioned on the token that the rule emitted there.

A lossless rule emits a token y with law p, and accepts it iff it is among the candidates. Given the
text, y is known: the committed token. By Bayes' rule, acceptance needs only the law of the
candidates given y:

    P(candidates | y) = P(candidates) P(rule emits y | candidates) / p(y).

p = target law, q = draft law, y = the committed token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from monge.core.draws import Draws
from monge.core.law import Law, SparseLaw
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.replay.logged_token import LoggedToken

Drawn = Iid | Mixed | WithoutReplacement


class ConditionalCandidates(ABC):
    """Draws the random candidates of a node given the emitted token, for one rule."""

    @abstractmethod
    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        """Draw candidates in drawing order, given that the committed token is emitted."""

    def next_scale(self, logged: LoggedToken, q: float) -> float:
        """Return the scale of the target below the committed token, drawn with probability `q`."""
        return 1.0


@dataclass(frozen=True, slots=True)
class IndependentCandidates(ConditionalCandidates):
    """Draw from the candidates' own law, for rules that do not depend on them."""

    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        return proposal.draw(draws)


@dataclass(frozen=True, slots=True)
class SequentialTests(ConditionalCandidates):
    """Draw for rules that test draws one after another; draws without a test follow their own law.

    Let P be the target that the tests so far have left, and Q the law of the next draw. From here
    on the rule emits y with law P whatever was rejected, so the draw is y, and accepted, with
    probability `min(1, Q_y / P_y)`, and otherwise a rejected token with law `(Q - P)_+`,
    normalised, after which P is `(P - Q)_+`, normalised.

    Args:
        num_tests: How many draws are tested; `None` for all of them.
        tests_fixed: Test deterministic candidates first, each as a point mass.
        drops_repeats: Test a draw against the law without the tokens that were drawn before it.
    """

    num_tests: int | None = None
    tests_fixed: bool = False
    drops_repeats: bool = False

    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        assert isinstance(proposal, Drawn)
        y, left, is_open = self._start(logged, proposal)
        tokens = list(proposal.fixed) if isinstance(proposal, Mixed) else []
        tests = proposal.width if self.num_tests is None else self.num_tests
        self._require(logged, proposal)
        for _ in range(proposal.width):
            q, is_new = self._next(proposal, tokens, draws)
            if q is None:
                break
            if not (is_open and is_new):
                tokens.append(draws.categorical(q))
            elif draws.bernoulli(min(1.0, q.prob(y) / left.prob(y))):
                tokens.append(y)
                is_open = False
            else:
                tests -= 1
                tokens.append(logged.rejected(q, left, draws))
                left, is_open = left.excess_over(q) or left, tests > 0
        return tuple(tokens)

    def _start(self, logged: LoggedToken, proposal: Drawn) -> tuple[int, SparseLaw, bool]:
        """Return the committed token, the target left for the draws, and if they are tested at all."""
        left: SparseLaw = logged.law
        fixed = proposal.fixed if isinstance(proposal, Mixed) and self.tests_fixed else ()
        if logged.token in fixed:
            return logged.token, left, False
        for token in fixed:
            left = left.without(token) or left
        return logged.token, left, True

    def _require(self, logged: LoggedToken, proposal: Drawn) -> None:
        """Refuse laws that are not covered where a second test needs all that the first one left."""
        if self.num_tests is None and proposal.width > 1:
            logged.require(proposal.law)

    def _next(
        self, proposal: Drawn, tokens: list[int], draws: Draws
    ) -> tuple[SparseLaw | None, bool]:
        """Return the law of the next draw, `None` if it is used up, and if it is a new token."""
        q: SparseLaw | None = proposal.law.sparse()
        repeats = (
            set(tokens)
            if isinstance(proposal, WithoutReplacement) or self.drops_repeats
            else set[int]()
        )
        if repeats and not isinstance(proposal, WithoutReplacement):
            mass = min(1.0, sum(q.prob(token) for token in repeats))
            if draws.bernoulli(mass):
                return _among(q, repeats), False
        for token in repeats:
            q = None if q is None else q.without(token)
        return q, True


@dataclass(frozen=True, slots=True)
class ScaledTests(ConditionalCandidates):
    """Draw for Block Verification of a chain: one draw a node, against a target that is scaled down.

    With w_i = min over k <= i of `q(y_1..y_k) p(y_(k+1)..y_i | y_1..y_k)`, the chain's first i
    tokens are y_1..y_i and accepted with probability w_i, and exactly i of them are, followed by y,
    with probability `w_i p(y) - w_(i+1)(y)`; what comes after is a draw from p. So given the text,
    the next token is accepted with probability `min(1, q_y / (s p_y))`, and s, which starts at one,
    becomes `min(1, s p_y / q_y)`. A rejected token has law `(q - s p)_+`, normalised. (What was
    drafted below it is tilted too, in a way that only laws off the text could tell; it is drawn
    from q.)
    """

    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        assert isinstance(proposal, Iid)
        y = logged.token
        if draws.bernoulli(min(1.0, proposal.law.prob(y) / (logged.scale * logged.law.prob(y)))):
            return (y,)
        q = proposal.law.sparse()
        if not logged.covers(q):
            return (logged.rejected(q, logged.law, draws),)
        masses = (q.probs - logged.scale * logged.law.at(q.token_ids)).clamp_min(0.0)
        kept = masses > 0.0
        return (draws.categorical(SparseLaw(q.token_ids[kept], masses[kept] / masses.sum())),)

    def next_scale(self, logged: LoggedToken, q: float) -> float:
        return min(1.0, logged.scale * logged.law.prob(logged.token) / q)


def draft_prob(proposal: Proposal, token: int) -> float:
    """Return the probability that a node's one candidate is this token."""
    return (
        float(token in proposal.token_ids)
        if isinstance(proposal, Deterministic)
        else _law(proposal).prob(token)
    )


def _law(proposal: Proposal) -> Law:
    assert isinstance(proposal, Drawn)
    return proposal.law


def _among(q: SparseLaw, tokens: set[int]) -> SparseLaw:
    """Return q, given that it is one of these tokens."""
    kept = torch.isin(q.token_ids, q.token_ids.new_tensor(sorted(tokens)))
    return SparseLaw(q.token_ids[kept], q.probs[kept] / q.probs[kept].sum())

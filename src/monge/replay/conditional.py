"""The candidates of a node, conditioned on the token that the rule emitted there.

A lossless rule emits a token y with law p, and accepts it iff it is among the candidates. Given the
text, y is known: the committed token. By Bayes' rule, acceptance needs only the law of the
candidates given y:

    P(candidates | y) = P(candidates) P(rule emits y | candidates) / p(y).

p = target law, q = draft law, y = the committed token, K = `width`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import SparseLaw
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.replay.log import LoggedToken
from monge.verify.flow import Flow
from monge.verify.k_seq import divisors
from monge.verify.optimal import Optimal
from monge.verify.problem import NodeProblem

Drawn = Iid | Mixed | WithoutReplacement

Conditional = Callable[[LoggedToken, Proposal, Draws], tuple[int, ...]]
"""Draws the random candidates of a node in drawing order, given that the committed token is emitted."""


def independent_candidates(
    logged: LoggedToken, proposal: Proposal, draws: Draws
) -> tuple[int, ...]:
    """Draw from the candidates' own law, for rules that do not depend on them."""
    return proposal.draw(draws)


def sequential_tests(
    logged: LoggedToken,
    proposal: Proposal,
    draws: Draws,
    *,
    num_tests: int | None = None,
    tests_fixed: bool = False,
    drops_repeats: bool = False,
) -> tuple[int, ...]:
    """Draw for rules that test draws one after another; draws without a test follow their own law.

    Let P be the target that the tests so far have left, and Q the law of the next draw. From here
    on the rule emits y with law P whatever was rejected, so the draw is y, and accepted, with
    probability `min(1, Q_y / P_y)`, and otherwise a rejected token with law `(Q - P)_+`,
    normalised, after which P is `(P - Q)_+`, normalised.

    `num_tests` of the draws are tested, or all of them. With `tests_fixed`, deterministic candidates
    are tested first, each as a point mass. With `drops_repeats`, a draw is tested against the law
    without the tokens that were drawn before it.
    """
    assert isinstance(proposal, Drawn)
    y, left = logged.token, logged.law
    tokens = list(proposal.fixed) if isinstance(proposal, Mixed) else []
    tested = tokens if tests_fixed else []
    for token in tested:
        left = left.without(token) or left
    is_open = y not in tested
    tests = proposal.width if num_tests is None else num_tests
    if num_tests is None and proposal.width > 1:
        logged.require(proposal.law)  # a second test needs all that the first one left
    for _ in range(proposal.width):
        q, is_new = _next(proposal, tokens, draws, drops_repeats=drops_repeats)
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


def _next(
    proposal: Drawn, tokens: list[int], draws: Draws, *, drops_repeats: bool
) -> tuple[SparseLaw | None, bool]:
    """Return the law of the next draw, `None` if it is used up, and if it is a new token."""
    q: SparseLaw | None = proposal.law.sparse()
    never_repeats = isinstance(proposal, WithoutReplacement)
    repeats = set(tokens) if never_repeats or drops_repeats else set[int]()
    mass = min(1.0, sum(q.prob(token) for token in repeats))
    if repeats and not never_repeats and draws.bernoulli(mass):
        is_repeat = torch.isin(q.token_ids, q.token_ids.new_tensor(sorted(repeats)))
        return _normalised(q.token_ids, q.probs * is_repeat), False
    for token in repeats:
        q = None if q is None else q.without(token)
    return q, True


def scaled_tests(logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
    """Draw for Block Verification of a chain: one draw a node, against a target that is scaled down.

    With w_i = min over k <= i of `q(y_1..y_k) p(y_(k+1)..y_i | y_1..y_k)`, the chain's first i
    tokens are y_1..y_i and accepted with probability w_i, and exactly i of them are, followed by y,
    with probability `w_i p(y) - w_(i+1)(y)`; what comes after is a draw from p. So given the text,
    the next token is accepted with probability `min(1, q_y / (s p_y))`, and s, which starts at one,
    becomes `min(1, s p_y / q_y)`. A rejected token has law `(q - s p)_+`, normalised. (What was
    drafted below it is tilted too, in a way that only laws off the text could tell; it is drawn
    from q.)
    """
    assert isinstance(proposal, Iid)
    y = logged.token
    if draws.bernoulli(min(1.0, proposal.law.prob(y) / (logged.scale * logged.law.prob(y)))):
        return (y,)
    q = proposal.law.sparse()
    if not logged.covers(q):
        return (logged.rejected(q, logged.law, draws),)
    masses = (q.probs - logged.scale * logged.law.at(q.token_ids)).clamp_min(0.0)
    return (draws.categorical(_normalised(q.token_ids, masses)),)


def next_scale(logged: LoggedToken, q: float) -> float:
    """Return s of `scaled_tests` below the committed token, drawn with probability `q`."""
    return min(1.0, logged.scale * logged.law.prob(logged.token) / q)


def same_test(logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
    """Draw for K-SEQ, which tests every draw with the same ratio.

    With `m = min(p / rho, q)` and beta its mass, y is accepted as the k-th draw with probability
    `(1 - beta)^(k-1) m_y`, in all `gamma m_y`; rejected draws have law `(q - m) / (1 - beta)`.
    """
    assert isinstance(proposal, Iid)
    logged.require(proposal.law)
    y, q, width = logged.token, proposal.law.sparse(), proposal.width
    rho, gamma = divisors(logged.law, q, width)
    p_y = logged.law.prob(y)
    is_accepted = draws.bernoulli(min(1.0, gamma * min(p_y / rho, q.prob(y)) / p_y))
    refused = q.probs - (logged.law.at(q.token_ids) / rho).minimum(q.probs)
    missed = min(1.0, float(refused.sum()))  # 1 - beta
    rejected = None if missed == 0.0 else _normalised(q.token_ids, refused)
    if is_accepted:
        return _first_at(y, q, rejected, missed, width=width, draws=draws)
    assert rejected is not None, "with beta = 1 the first draw is accepted"
    return tuple(draws.categorical(rejected) for _ in range(width))


def joint_decision(
    logged: LoggedToken, proposal: Proposal, draws: Draws, *, rule: Optimal
) -> tuple[int, ...]:
    """Draw for the optimal rule, which accepts y with probability (accepted mass of y) / p_y.

    Given that, draws are proposed from their own law, given that y is among them, and kept with the
    probability with which the rule accepts y; or proposed, and kept with the probability with which
    it rejects all, since a rejected node is emitted from one law whatever was drawn. About K
    proposals on average.
    """
    assert isinstance(proposal, Iid | Mixed)
    y, fixed = logged.token, proposal.fixed if isinstance(proposal, Mixed) else ()
    is_accepted = False
    if y not in fixed:
        flow = _flow(rule, logged, proposal, proposal.draw(draws), draws)
        mass = float(flow.masses[flow.token_ids == y].sum())  # of one token, or none
        is_accepted = draws.bernoulli(min(1.0, mass / logged.law.prob(y)))
    while True:
        tokens = (*fixed, *_containing(proposal, y, draws)) if is_accepted else proposal.draw(draws)
        probs = _flow(rule, logged, proposal, tokens, draws).accept_probs
        accepted = sum(prob for token, prob in probs.items() if token not in fixed)
        if draws.bernoulli(min(1.0, max(0.0, probs[y] if is_accepted else 1.0 - accepted))):
            return tokens


def _flow(
    rule: Optimal,
    logged: LoggedToken,
    proposal: Iid | Mixed,
    candidates: tuple[int, ...],
    draws: Draws,
) -> Flow:
    logged.require(proposal.law)
    problem = NodeProblem(
        target_law=logged.law, scale=1.0, proposal=proposal, candidates=candidates, draws=draws
    )
    flow = rule.flow(problem)
    assert isinstance(flow, Flow), "the optimal rule knows its accepted masses"
    return flow


def draft_prob(proposal: Proposal, token: int) -> float:
    """Return the probability that a node's one candidate is this token."""
    if isinstance(proposal, Deterministic):
        return float(token in proposal.token_ids)
    assert isinstance(proposal, Drawn)
    return proposal.law.prob(token)


def _containing(proposal: Iid | Mixed, token: int, draws: Draws) -> tuple[int, ...]:
    """Return independent draws, given that a token is among them."""
    q, width = proposal.law.sparse(), proposal.width
    others = q.without(token)
    missed = 0.0 if others is None else 1.0 - q.prob(token)
    return _first_at(token, q, others, missed, width=width, draws=draws)


def _first_at(
    token: int,
    q: SparseLaw,
    others: SparseLaw | None,
    missed: float,
    *,
    width: int,
    draws: Draws,
) -> tuple[int, ...]:
    """Draw the first place of a token, the draws from `others` before it, and free ones after it."""
    weights = torch.tensor([missed**number for number in range(width)], dtype=torch.float64)
    place = draws.categorical(_normalised(torch.arange(width), weights))
    before = [draws.categorical(others) for _ in range(place)] if others is not None else []
    return (*before, token, *(draws.categorical(q) for _ in range(width - place - 1)))


def _normalised(token_ids: Tensor, masses: Tensor) -> SparseLaw:
    support = masses > 0.0
    return SparseLaw(token_ids[support], masses[support] / masses.sum())

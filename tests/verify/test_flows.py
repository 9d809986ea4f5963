"""Every rule that can be lifted to trees, one node and a scaled target.

What its flow promises, by enumeration.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.acceptance.given_candidates import OptimalGivenCandidates
from monge.laws.draws import Draws, TapeDraws
from monge.laws.law import Law
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.oracle.exact_law import exact_law, law_error
from monge.verify.base import why_no_exactness
from monge.verify.flow import Emission, Flow, FlowRule
from monge.verify.problem import NodeProblem
from monge.verify.recursive_rejection_without_replacement import (
    RecursiveRejectionWithoutReplacement,
)
from monge.verify.registry import VERIFIERS
from monge.verify.sample_and_match import SampleAndMatch
from monge.verify.speculative_sampling import SpeculativeSampling
from tests.exact.test_rules import width_of
from tests.kit.strategies import dense_law, weight_pairs
from tests.verify.acceptance import EXACT
from tests.verify.flows import check_flow
from tests.verify.plain_search import DraftLine, winning_chances
from tests.verify.tables import remembered_tables  # noqa: F401

RULES = (
    *("sample_and_match", "speculative_sampling", "naive_tree", "k_seq", "greedy"),
    *("recursive_rejection", "recursive_rejection_without_replacement"),
)
SCALES = (1.0, 0.75, 0.2)


def proposals(q: Law) -> Iterator[Proposal]:
    yield Deterministic(q.top(2))
    for width in (1, 2, 3):
        yield Iid(q, width)
        yield WithoutReplacement(q, width)
    rest = q.without(q.top(1)[0])
    if rest is not None:
        yield Mixed(q.top(1), rest, 1)
        yield Mixed(q.top(1), rest, 2)


def legal(rule: FlowRule, q: Law) -> list[Proposal]:
    return [
        item
        for item in proposals(q)
        if why_no_exactness(rule, [type(item)], width_of(item)) is None
    ]


def check(rule: FlowRule, p: Law, scale: float, proposal: Proposal) -> None:
    (candidates, *_) = exact_law(proposal.draw)
    problem = NodeProblem(
        target_law=p,
        scale=scale,
        proposal=proposal,
        candidates=tuple(candidates),
        draws=TapeDraws(()),
    )
    if isinstance(rule.flow(problem), Flow):
        check_flow(rule, p, scale, proposal)
    else:
        check_emission(rule, p, scale, proposal)


def check_emission(rule: FlowRule, p: Law, scale: float, proposal: Proposal) -> None:
    """What is emitted is the scaled target on average, and for the whole target what the rule itself emits."""

    def emitted(draws: Draws):  # type: ignore[no-untyped-def]
        candidates = tuple(proposal.draw(draws))
        problem = NodeProblem(
            target_law=p, scale=scale, proposal=proposal, candidates=candidates, draws=draws
        )
        emission = rule.flow(problem)
        assert isinstance(emission, Emission)
        assert set(emission.accept_probs) == set(candidates)
        reach = 1.0
        for token, prob in emission.accept_probs.items():
            if prob > 0.0 and draws.bernoulli(min(1.0, prob / reach)):
                return candidates, token
            reach -= prob
        if reach > 0.0 and draws.bernoulli(min(1.0, emission.leftover / reach)):
            token = draws.categorical(emission.leftover_law)
            assert token not in candidates
            return candidates, token
        return candidates, None

    law = exact_law(emitted)
    average: dict[int, float] = {}
    for (_, token), prob in law.items():
        if token is not None:
            average[token] = average.get(token, 0.0) + prob
    part = p.sparse()
    wanted = dict(zip(part.token_ids.tolist(), (scale * part.probs).tolist(), strict=True))
    assert law_error(average, wanted) < EXACT
    if scale == 1.0:

        def by_itself(draws: Draws):  # type: ignore[no-untyped-def]
            candidates = tuple(proposal.draw(draws))
            return candidates, rule.emit(p, proposal, candidates, draws)

        assert law_error(law, exact_law(by_itself)) < EXACT


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=4)
@given(pair=weight_pairs(max_vocab=4), scale=st.sampled_from(SCALES))
def test_flows_average_to_what_they_declare(
    name: str, pair: tuple[list[int], list[int]], scale: float
) -> None:
    p, q = map(dense_law, pair)
    rule = VERIFIERS.make(name)
    assert isinstance(rule, FlowRule)
    for proposal in legal(rule, q):
        check(rule, p, scale, proposal)


@settings(max_examples=4)
@given(pair=weight_pairs(max_vocab=3), scale=st.sampled_from(SCALES))
def test_the_optimal_flow_given_the_candidates(
    pair: tuple[list[int], list[int]], scale: float
) -> None:
    p, q = map(dense_law, pair)
    rule = OptimalGivenCandidates()
    for proposal in legal(rule, q):
        check_flow(rule, p, scale, proposal)


@pytest.mark.parametrize("drawn", [(0, 0), (0, 2)])
def test_positions_average_to_the_candidates(drawn: tuple[int, int]) -> None:
    """Two draws: the chances given positions, on a grid over both, are about the exact probabilities given the tokens."""
    line = DraftLine.of_node(dense_law([5, 3, 2]), 0.75, dense_law([2, 3, 5]), 2)
    size = 12
    found: dict[int, float] = dict.fromkeys(drawn, 0.0)
    for first, second in np.ndindex(size, size):
        positions = [(first + 0.5) / size, (second + 0.5) / size]
        for token, chance in line.chances(drawn, TapeDraws(positions)).items():
            found[token] += chance / size**2
    # Chances jump where one position passes the other.
    assert found == pytest.approx(line.accept_probs(drawn), abs=3e-2)


@settings(max_examples=10)
@given(
    pair=weight_pairs(max_vocab=5),
    width=st.integers(1, 4),
    scale=st.sampled_from(SCALES),
    seed=st.integers(0, 99),
)
def test_chances_given_positions_are_those_of_all_swaps(
    pair: tuple[list[int], list[int]], width: int, scale: float, seed: int
) -> None:
    """Against the rule itself: every combination of swaps is played, and the smallest score wins."""
    p, q = map(dense_law, pair)
    node = DraftLine.of_node(p, scale, q, width)
    u = torch.rand(
        width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).numpy()
    partner = node.line.partners(u)
    swap = node.line.swap_probs(u, partner)
    wins = np.zeros(width)
    for choice in np.ndindex(*(2,) * width):
        scores = np.where(choice, partner, u)
        prob = float(np.prod(np.where(choice, swap, 1.0 - swap)))
        best = int(scores.argmin())
        wins[best] += prob * (scores[best] < node.line.threshold)
    np.testing.assert_allclose(winning_chances(node.line, u), wins, rtol=0, atol=1e-9)


def test_a_draw_without_a_place_on_the_line_is_refused() -> None:
    p, q = dense_law([1, 1]), dense_law([1, 0])
    node = DraftLine.of_node(p, 0.5, q, 2)
    assert node.chances((1, 1), TapeDraws([0.5, 0.5])) == {1: 0.0}
    assert node.accept_probs((1, 1)) == {1: 0.0}
    assert node.chances((1, 0), TapeDraws([0.5, 0.5]))[1] == 0.0


def test_which_form_a_flow_has() -> None:
    p, q = dense_law([5, 3, 2]), dense_law([2, 3, 5])

    def form(rule: FlowRule, proposal: Proposal, candidates: tuple[int, ...]) -> type:
        return type(
            rule.flow(
                NodeProblem(
                    target_law=p,
                    scale=0.5,
                    proposal=proposal,
                    candidates=candidates,
                    draws=TapeDraws(()),
                )
            )
        )

    assert (
        form(RecursiveRejectionWithoutReplacement(), WithoutReplacement(q, 2), (0, 2)) is Emission
    )
    assert form(RecursiveRejectionWithoutReplacement(), WithoutReplacement(q, 1), (0,)) is Flow
    assert form(SampleAndMatch(), Iid(q, 2), (0, 2)) is Emission
    assert form(SampleAndMatch(), Deterministic((0, 2)), (0, 2)) is Flow
    assert form(SpeculativeSampling(), Iid(q), (0,)) is Flow


@pytest.mark.parametrize("name", RULES)
def test_masses_of_another_scale_are_seen(name: str) -> None:
    """The checks above do look at the scale.

    A flow of the whole target passed off as that of a scaled one is refused.
    """
    rule = VERIFIERS.make(name)
    assert isinstance(rule, FlowRule)
    p, q = dense_law([5, 3, 2]), dense_law([2, 3, 5])

    class WholeTarget(type(rule)):  # type: ignore[misc]
        def flow(self, problem: NodeProblem) -> Flow | Emission:
            whole = NodeProblem(
                target_law=problem.target_law,
                scale=1.0,
                proposal=problem.proposal,
                candidates=problem.candidates,
                draws=problem.draws,
            )
            return rule.flow(whole)

    proposal = legal(rule, q)[-1]
    check(rule, p, 0.5, proposal)
    with pytest.raises(AssertionError):
        check(WholeTarget(), p, 0.5, proposal)

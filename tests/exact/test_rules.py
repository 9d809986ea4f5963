"""Every node rule, one node: the emitted token follows the target law, for every proposal that the rule accepts."""

import pytest
import torch
from hypothesis import given, settings

from monge.laws.law import DenseLaw, Law
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.oracle.exact_law import exact_law, law_error
from monge.verify.base import NodeRule, why_no_exactness
from monge.verify.registry import VERIFIERS
from tests.kit.strategies import dense_law, weight_pairs

NODE_RULES = [
    name
    for name in VERIFIERS
    if issubclass(VERIFIERS[name], NodeRule) and VERIFIERS.make(name).is_enumerable
]


def proposals(q: Law) -> list[Proposal]:
    made: list[Proposal] = [Deterministic(q.top(1)), Deterministic(q.top(2))]
    made += [Iid(q, 1), Iid(q, 2), Iid(q, 3)]
    made += [WithoutReplacement(q, 2), WithoutReplacement(q, 3)]
    rest = q.without(q.top(1)[0])
    if rest is not None:
        made += [Mixed(q.top(1), rest, 1), Mixed(q.top(1), rest, 2)]
    return made


def emitted(rule: NodeRule, p: Law, proposal: Proposal) -> dict[int, float]:
    return exact_law(lambda draws: rule.emit(p, proposal, proposal.draw(draws), draws))


def masses(p: DenseLaw) -> dict[int, float]:
    return {token: prob for token, prob in enumerate(p.probs.tolist()) if prob > 0}


@pytest.mark.parametrize("name", NODE_RULES)
@settings(max_examples=15)
@given(pair=weight_pairs(max_vocab=4))
def test_emitted_token_follows_the_target_law(name: str, pair: tuple[list[int], list[int]]) -> None:
    p, q = map(dense_law, pair)
    rule = VERIFIERS.make(name)
    assert isinstance(rule, NodeRule)
    legal = [
        item
        for item in proposals(q)
        if why_no_exactness(rule, [type(item)], width_of(item)) is None
    ]
    assert legal
    for proposal in legal:
        assert law_error(emitted(rule, p, proposal), masses(p)) < 1e-12, f"{name} on {proposal}"


@pytest.mark.parametrize("name", NODE_RULES)
def test_sparse_and_dense_laws_are_one_law(name: str) -> None:
    rule = VERIFIERS.make(name)
    assert isinstance(rule, NodeRule)
    p = DenseLaw(torch.tensor([0.5, 0.3, 0.0, 0.2], dtype=torch.float64))
    q = DenseLaw(torch.tensor([0.2, 0.0, 0.3, 0.5], dtype=torch.float64))
    for dense, sparse in zip(proposals(q), proposals(q.sparse()), strict=True):
        if why_no_exactness(rule, [type(dense)], width_of(dense)) is None:
            for target in (p, p.sparse()):
                assert law_error(emitted(rule, target, sparse), emitted(rule, p, dense)) < 1e-12


def width_of(proposal: Proposal) -> int:
    if isinstance(proposal, Deterministic):
        return len(proposal.token_ids)
    if isinstance(proposal, Mixed):
        return len(proposal.fixed) + proposal.width
    assert isinstance(proposal, Iid | WithoutReplacement)
    return proposal.width


def test_acceptance_of_the_worked_example() -> None:
    """p = (.5, .3, .2), q = (.2, .3, .5), two candidates.

    The published values of every rule here.
    """
    p = DenseLaw(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    q = DenseLaw(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))

    def acceptance(name: str, proposal: Proposal) -> float:
        rule = VERIFIERS.make(name)
        assert isinstance(rule, NodeRule)

        def accepted(draws):  # type: ignore[no-untyped-def]
            candidates = proposal.draw(draws)
            return rule.emit(p, proposal, candidates, draws) in candidates

        return exact_law(accepted).get(True, 0.0)

    for name, proposal, expected in (
        ("speculative_sampling", Iid(q, 1), 0.7),
        ("recursive_rejection", Iid(q, 2), 0.76),
        ("recursive_rejection_without_replacement", WithoutReplacement(q, 2), 0.82),
        ("sample_and_match", Iid(q, 2), 0.483),
        ("sample_and_match", Deterministic(q.top(2)), 0.5),
    ):
        assert acceptance(name, proposal) == pytest.approx(expected, abs=1e-12)

"""A chain decided at once: the verdict of the walk on the same uniforms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monge.core.draws import TapeDraws
from monge.core.law import DenseLaw, one_hot
from monge.core.proposal import Iid
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.core.tensor_laws import drawn, largest, make_laws, tempered_laws
from monge.core.tree import chain_of
from monge.verify.base import Walk
from monge.verify.block import Block
from monge.verify.fast.chain import BLOCK, SINGLE_DRAFT
from monge.verify.single_draft import SingleDraft

VOCAB = 5


def laws(generator, count, sharpness):
    """Some with zeros, some of which are point masses."""
    scores = torch.randn(count, VOCAB, generator=generator, dtype=torch.float64) * sharpness
    scores[torch.rand(count, VOCAB, generator=generator) < 0.3] = float("-inf")
    scores[:, 0] = scores[:, 0].clamp_min(-1.0)
    return torch.softmax(scores, dim=-1)


class Tape(TapeDraws):
    """Counts what is drawn."""

    def __init__(self, uniforms):
        super().__init__(uniforms)
        self.used = 0

    def uniform(self):
        self.used += 1
        return super().uniform()


DECISIONS = {"single_draft": (SINGLE_DRAFT, Walk(SingleDraft())), "block": (BLOCK, Block())}
every_decision = pytest.mark.parametrize(("decision", "rule"), DECISIONS.values(), ids=DECISIONS)


def by_the_rule(rule, p, q, tokens, uniforms):
    """What the plain rule makes of the chain: accepted tokens, the next one, and how many uniforms that took."""
    draws = Tape(uniforms)
    tree = chain_of(0, tuple(tokens), tuple(Iid(law) for law in q))
    verdict = rule.verify(tree, p, draws)
    return verdict.num_accepted, verdict.next_token, draws.used


@every_decision
@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 4), sharpness=st.sampled_from([0.1, 1.0, 5.0]))
def test_laws(decision, rule, seed, depth, sharpness):
    generator = torch.Generator().manual_seed(seed)
    p, q = laws(generator, depth + 1, sharpness), laws(generator, depth, sharpness)
    if seed % 3 == 0:
        q[0] = p[0]  # nothing is refused there, and there is no residual
    uniforms = torch.rand(2 * depth + 1, generator=generator, dtype=torch.float64)
    tokens = torch.cat([drawn(q[level], uniforms[level : level + 1]) for level in range(depth)])
    assert [int(token) for token in tokens] == [
        DenseLaw(law).quantile(float(position)) for law, position in zip(q, uniforms, strict=False)
    ]
    chain = [DenseLaw(row) for row in p], [DenseLaw(row) for row in q], tokens.tolist()
    plain = by_the_rule(rule, *chain, uniforms[depth:].tolist())
    accepted, token = (int(fact) for fact in decision.of_laws(p, q, tokens, uniforms[depth:]))
    assert (accepted, token, decision.num_uniforms(accepted, depth)) == plain


@every_decision
@settings(deadline=None, max_examples=200)
@given(data=st.data(), depth=st.integers(1, 4))
def test_points(decision, rule, data, depth):
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=depth, max_size=depth))
    p = data.draw(st.lists(st.integers(0, 2), min_size=depth + 1, max_size=depth + 1))
    chain = [one_hot(token) for token in p], [one_hot(token) for token in tokens], tokens
    plain = by_the_rule(rule, *chain, [0.4] * (depth + 1))
    accepted, token = (int(fact) for fact in decision.of_points(torch.tensor(p), torch.tensor(tokens)))
    assert (accepted, token, decision.num_uniforms(accepted, depth)) == plain


def test_every_outcome_comes_as_often_as_the_rule_has_it():
    """The law of (accepted, next) over the uniforms, cell by cell, and not on some noise: one token, two laws."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64), torch.tensor([[0.2, 0.2, 0.6]]).double()
    count, mass = 400, torch.zeros(3, 3, dtype=torch.float64)
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for token in range(3):
        for test in grid:
            accept = bool(test < p[0, token] / q[0, token])
            law = p[1] if accept else (p[0] - q[0]).clamp_min(0.0) / (p[0] - q[0]).clamp_min(0.0).sum()
            for position, weight in zip(law.cumsum(0) - law / 2, law, strict=True):  # the middle of every cell
                if weight > 0:
                    noise = torch.stack([test, position])
                    accepted, following = SINGLE_DRAFT.of_laws(p, q, torch.tensor([token]), noise)
                    first = token if int(accepted) else int(following)
                    mass[first, int(following) if int(accepted) else 0] += q[0, token] * weight / count
    torch.testing.assert_close(mass.sum(1), p[0], atol=2.0 / count, rtol=0)


class TestLaws:
    @pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0, 1e-300])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_are_those_of_the_rules(self, temperature, dtype):
        logits = torch.tensor([[1.0, 3.0, float("-inf"), 2.5, -4.0], [0.0, 0.0, 9.0, 1.0, 8.5]]).to(dtype)
        made = tempered_laws(logits, torch.tensor([temperature], dtype=torch.float64))
        rules = SamplingRules(temperature=temperature)
        for row, own in zip(logits, made, strict=True):
            expected = law_from_logits(row, rules)
            assert float((expected.at(torch.arange(VOCAB)) - own).abs().max()) < 1e-15
        assert bool(make_laws(made))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
    def test_logits_that_make_none(self, bad):
        logits = torch.zeros(2, VOCAB)
        logits[1] = logits[1] if bad is not None else float("-inf")
        logits[1, 3] = float("-inf") if bad is None else bad
        made = tempered_laws(logits, torch.ones(1, dtype=torch.float64))
        assert not bool(make_laws(made))
        assert 0 <= int(drawn(made[1], torch.tensor([0.5], dtype=torch.float64))) < VOCAB
        assert all(0 <= place < VOCAB for place in largest(logits).tolist())

    def test_the_last_position_has_a_token_of_mass(self):
        law = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64)
        assert int(drawn(law, torch.tensor([1.0 - 2**-53], dtype=torch.float64))) == 1

    def test_the_first_of_equals_is_the_largest(self):
        assert largest(torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 0.0]])).tolist() == [1, 0]

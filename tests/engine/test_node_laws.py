"""The laws of a tree's nodes, all at once or one by one."""

import math

import pytest
import torch

from monge.core.context import Context
from monge.core.errors import NonFiniteLogitsError
from monge.core.sampling_rules import SamplingRules
from monge.laws.tree import fixed_chain
from monge.requests import sampling
from monge.requests.sampling import NodeLaws

TREE = fixed_chain(1, (2, 0, 1))


def laws_of(logits, temperature=0.0, processors=()):
    rules = SamplingRules(temperature=temperature)
    context = Context(request_id=0, token_ids=(0, 1), num_prompt_tokens=1, rules=rules)
    return NodeLaws(logits, TREE, context, processors)


def test_greedy_laws_are_the_same_made_at_once(monkeypatch):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    at_once = [laws_of(logits)[node] for node in range(4)]
    monkeypatch.setattr(sampling, "_FEW", 0)
    assert at_once == [laws_of(logits)[node] for node in range(4)]
    assert [law.top(1) for law in at_once] == [(best,) for best in logits.argmax(-1).tolist()]


def test_a_node_without_a_law_is_an_error_where_somebody_asks_for_it():
    logits = torch.zeros(4, 9)
    logits[2, 3] = math.nan
    laws = laws_of(logits)
    assert laws[0].top(1) == laws[3].top(1) == (0,)
    with pytest.raises(NonFiniteLogitsError, match="1 of 9 are not finite"):
        laws[2]

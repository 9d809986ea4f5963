"""Whole trees that a device draws: the drafts of the host for equal draws, whatever it cannot draw itself."""

import copy
import warnings

import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.draft.model import Model
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.laws.draws import SeededDraws
from monge.laws.proposal import Deterministic
from monge.networks.hf_tree import HfTreeModel
from tests.engine import pretend
from tests.engine.tiny import network, prompts

GREEDY, WARM = SamplingRules(temperature=0), SamplingRules(temperature=0.7, top_k=30, top_p=0.9)
TEXTS = prompts((9, 4, 7), seed=5)
WHOLE = DraftPlan()


@pytest.fixture
def device():
    with pretend.device() as name:
        yield name


def exact_network():
    return copy.deepcopy(network("llama", "sdpa")).double()


def drafted(own, tree, rules, plans, draws=None):
    """Drafts of several requests, draws used, and the waits before anybody looked at the drafts.

    Requests have the same rules, or each its own.
    """
    model, rules = (
        HfTreeModel(own),
        [rules] * len(TEXTS) if isinstance(rules, SamplingRules) else rules,
    )
    drafter = Model(model=model, tree=tree)
    contexts = [
        Context(request_id=row, token_ids=tuple(text), num_prompt_tokens=len(text), rules=own)
        for row, (text, own) in enumerate(zip(TEXTS, rules, strict=True))
    ]
    draws = draws or [SeededDraws(3, row) for row in range(len(TEXTS))]
    states = drafter.open(contexts)
    pretend.waits.clear()
    drafts = drafter.draft(contexts, states, plans, draws)
    waits = sum(pretend.waits.values())
    drafts = [draft.result() for draft in drafts]
    return drafts, [one.num_drawn for one in draws], waits


def read_paths(draft):
    """Paths of the nodes that the draft model has read."""
    tree = draft.tree
    inner = (node for node in range(1, tree.num_nodes) if tree.candidates[node])
    return draft.state if draft.state is not None else (*map(tree.path_tokens, inner),)


def law_of(proposal):
    return None if isinstance(proposal, Deterministic) else proposal.law


def check_equal(found, expected, *, is_finite=True):
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.tree.token_ids == other.tree.token_ids
        assert one.tree.candidates == other.tree.candidates
        # The host has also read a node that it then found no law at.
        count = len(read_paths(other)) if is_finite else len(read_paths(one))
        assert read_paths(one) == read_paths(other)[:count]
        for law, wanted in zip(
            map(law_of, one.tree.proposals), map(law_of, other.tree.proposals), strict=True
        ):
            assert (law is None) == (wanted is None)
            if law is not None:
                tokens = torch.arange(97)
                given = law.at(tokens.to(law.device)).cpu()
                assert torch.allclose(given, wanted.at(tokens), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("tree", "rules", "num_waits"),
    [
        (Chain(4), SamplingRules(), 0),
        (Chain(4), WARM, 0),
        (Chain(4), GREEDY, 0),
        (FixedWidth((3, 2, 1)), SamplingRules(), 1),
        (FixedWidth((3, 2, 1)), WARM, 1),
        (FixedWidth((2, 2), "iid"), SamplingRules(), 2),
        (FixedWidth((2, 1)), GREEDY, 15),  # drawn node by node
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "plans",
    [
        [WHOLE] * 3,
        [DraftPlan(max_depth=2), DraftPlan(max_depth=1), WHOLE],
        [DraftPlan(max_depth=0), WHOLE, DraftPlan(max_depth=1)],
    ],
    ids=["whole", "depths", "none"],
)
def test_drafts_are_those_of_the_host(device, tree, rules, plans, num_waits):
    own = exact_network()
    found = drafted(copy.deepcopy(own).to(device), tree, rules, plans)
    assert found[2] <= num_waits
    check_equal(found, drafted(own, tree, rules, plans))


@pytest.mark.parametrize(
    "tree", [Chain(4), FixedWidth((3, 2, 1)), FixedWidth((2, 2), "iid")], ids=str
)
@pytest.mark.parametrize(
    "rules",
    [
        [SamplingRules(), WARM, GREEDY],
        [WARM, SamplingRules(temperature=0.7, top_k=2), SamplingRules(temperature=0.7, min_p=0.3)],
        [SamplingRules(temperature=0.5), SamplingRules(temperature=1.5), SamplingRules(top_p=0.5)],
    ],
    ids=["kinds", "truncated", "temperatures"],
)
def test_requests_of_several_rules_and_depths(device, tree, rules):
    own, plans = exact_network(), [DraftPlan(max_depth=2), WHOLE, WHOLE]
    found = drafted(copy.deepcopy(own).to(device), tree, rules, plans)
    check_equal(found, drafted(own, tree, rules, plans))


def test_trees_that_a_plan_cuts_are_drawn_by_levels(device):
    own, tree, plan = exact_network(), FixedWidth((3, 2)), DraftPlan(max_nodes=5)
    found = drafted(copy.deepcopy(own).to(device), tree, SamplingRules(), [plan] * 3)
    assert sum(pretend.waits.values()) > 1
    check_equal(found, drafted(own, tree, SamplingRules(), [plan] * 3))


@pytest.mark.parametrize("rules", [SamplingRules(), GREEDY], ids=["sampled", "greedy"])
def test_laws_that_are_not_finite_end_a_tree_where_the_host_ends_it(device, rules):
    """Some tokens have embeddings that are no numbers."""
    own = exact_network()
    with torch.no_grad():
        own.get_input_embeddings().weight[90:] = torch.nan
    plans = [WHOLE] * 3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = drafted(copy.deepcopy(own).to(device), Chain(6), rules, plans)
    assert any("not finite" in str(one.message) for one in told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = drafted(own, Chain(6), rules, plans)
    check_equal(found, expected, is_finite=False)
    sizes = {one.tree.num_nodes for one in found[0]}
    assert len(sizes) > 1
    assert max(sizes) > 2


def test_a_device_that_fails_half_way_has_drawn_nothing(device, monkeypatch):
    """The host knows no token then, so it may decode on with the same draws."""
    own, count, draws = exact_network(), [], [SeededDraws(3, row) for row in range(len(TEXTS))]
    read = HfTreeModel._read

    def failing(self, blocks, *, keep_logits, token_ids=None):
        logits = read(self, blocks, keep_logits=keep_logits, token_ids=token_ids)
        count.append(token_ids is not None)
        if sum(count) == 2 and count[-1]:
            raise RuntimeError("no memory")
        return logits

    monkeypatch.setattr(HfTreeModel, "_read", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        drafted(own.to(device), Chain(4), SamplingRules(), [WHOLE] * 3, draws)
    assert sum(count) == 2
    assert [own.num_drawn for own in draws] == [0, 0, 0]

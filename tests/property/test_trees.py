"""Trees, masks and draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monge.core.errors import LawError, MongeError, OptionError
from monge.laws.draws import SeededDraws, TapeDraws
from monge.laws.proposal import (
    Arbitrary,
    Deterministic,
    Iid,
    Independent,
    Mixed,
    PathDraws,
    WithoutReplacement,
)
from monge.laws.tree import GrowingTree, depths_of, fixed_chain, root_only
from monge.networks.attention_masks import UncommittedNodes
from monge.networks.base import NodeBlock
from monge.oracle.exact_law import exact_law
from tests.kit.strategies import dense_law

PARENTS = st.integers(1, 9).flatmap(
    lambda size: st.tuples(*(st.integers(-1, node - 1) for node in range(size)))
)


def ancestors(parents):
    """`mask[n, m]` is true where m is n or an ancestor of n."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        above = node
        while above >= 0:
            mask[node, above] = True
            above = parents[above]
    return mask


@given(parents=PARENTS)
def test_depth_counts_the_ancestors(parents):
    assert [depth + 1 for depth in depths_of(parents)] == ancestors(parents).sum(dim=1).tolist()


@given(parents=PARENTS, cut=st.integers(0, 9))
def test_nodes_read_in_several_blocks_see_what_one_block_sees(parents, cut):
    cut = min(cut, len(parents))
    nodes = UncommittedNodes()
    nodes.add(NodeBlock((0,) * cut, parents[:cut]))
    nodes.add(NodeBlock((0,) * (len(parents) - cut), parents[cut:]))
    assert torch.equal(torch.from_numpy(nodes.visible(0)), ancestors(parents))
    assert torch.equal(torch.from_numpy(nodes.visible(cut)), ancestors(parents)[cut:])
    assert tuple(nodes.depths) == depths_of(parents)


def tree_of(draws):
    q = dense_law([2, 3, 1])
    tree = GrowingTree(9)
    for node in tree.grow(0, Iid(q, 3), draws):
        tree.grow(node, Deterministic(q.top(2)), draws)
    return tree


@pytest.mark.parametrize("later", [Deterministic((1,)), Iid(dense_law([1, 1]), 1)])
def test_a_level_from_which_children_were_sampled_is_closed(later):
    """Whether a node has children must not depend on what its own level drew.

    `layer` would be biased.
    """
    tree, q = GrowingTree(9), dense_law([2, 3, 1])
    first, second = tree.grow(0, WithoutReplacement(q, 2), TapeDraws([0.1, 0.9]))
    tree.grow(first, Iid(q, 1), TapeDraws([0.5]))
    with pytest.raises(
        MongeError,
        match=r"children of depth 2 were sampled already, so nodes "
        r"\[2\] of depth 1 get none",
    ):
        tree.grow(second, later, TapeDraws([0.5]))


def test_a_level_is_drawn_node_by_node_in_the_order_given():
    tree, q = GrowingTree(9), dense_law([2, 3, 1])
    first, second = tree.grow(0, WithoutReplacement(q, 2), TapeDraws([0.1, 0.9]))
    grown = tree.grow_level({second: Iid(q, 2), first: Iid(q, 1)}, TapeDraws([0.1, 0.1, 0.9]))
    assert {
        node: [tree.token_ids[child] for child in children] for node, children in grown.items()
    } == {
        second: [0],
        first: [2],
    }
    assert tree.grow_level({}, TapeDraws([])) == {}
    (below,) = tree.grow(grown[first][0], Deterministic((1,)), TapeDraws([]))
    with pytest.raises(MongeError, match=r"all nodes have one depth; got nodes of depths \[2, 3\]"):
        tree.grow_level({grown[second][0]: Iid(q, 1), below: Iid(q, 1)}, TapeDraws([]))


def test_a_lone_root_is_what_grows_from_nothing():
    assert root_only(9) == GrowingTree(9).finish()


@pytest.mark.parametrize("token_ids", [(), (4,), (4, 5, 4)])
def test_a_fixed_chain_is_what_grows_by_single_candidates(token_ids):
    grown, node = GrowingTree(9), 0
    for token in token_ids:
        (node,) = grown.grow(node, Deterministic((token,)), TapeDraws([]))
    assert fixed_chain(9, token_ids) == grown.finish()


def test_repeats_are_one_node_offered_twice():
    tree = tree_of(TapeDraws([0.1, 0.2, 0.9])).finish()
    assert tree.token_ids == (9, 0, 2, 1, 0, 1, 0)
    assert tree.candidates[0] == (1, 1, 2)
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2)
    assert tree.path_tokens(5) == (2, 1)
    assert not tree.is_chain


def test_children_are_drawn_once():
    tree = tree_of(TapeDraws([0.1, 0.2, 0.9]))
    with pytest.raises(MongeError, match="node 0 has its children already"):
        tree.grow(0, Deterministic((1,)), TapeDraws([]))


def test_pruning_makes_every_sampled_proposal_arbitrary():
    tree = tree_of(TapeDraws([0.1, 0.2, 0.9])).finish().prune([2, 5])
    assert tree.token_ids == (9, 2, 1)
    assert tree.parents == (-1, 0, 1)
    assert tree.proposals == (Arbitrary((2,)), Deterministic((1,)), Deterministic(()))
    assert tree.candidates == ((1,), (2,), ())
    with pytest.raises(MongeError, match=r"nodes \[5\] are kept without their parents"):
        tree_of(TapeDraws([0.1, 0.2, 0.9])).finish().prune([5])


def test_draws_without_replacement_are_distinct_and_stop_with_the_support():
    q = dense_law([1, 0, 2, 1])
    tokens = WithoutReplacement(q, 4).draw(SeededDraws(1))
    assert sorted(tokens) == [0, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda q: Deterministic((2, 0)),
        lambda q: PathDraws(q, 3),
        lambda q: Independent((q, dense_law([1, 0, 4, 0]))),
        lambda q: WithoutReplacement(q, 2),
        lambda q: Mixed((3,), q, 2),
    ],
)
def test_rules_read_the_laws_that_candidates_are_drawn_from(make):
    proposal = make(dense_law([2, 3, 1, 0]))
    count, laws = len(proposal.fixed_ids), proposal.draft_laws
    assert proposal.draft_law is (laws[0] if len(set(laws)) == 1 else None)
    drawn = exact_law(proposal.draw)
    assert {tokens[:count] for tokens in drawn} == {proposal.fixed_ids}
    assert {len(tokens) for tokens in drawn} == {count + len(laws)}
    for place, law in enumerate(laws if proposal.may_repeat else laws[:1], count):
        for x in range(4):
            mass = sum(mass for tokens, mass in drawn.items() if tokens[place] == x)
            assert mass == pytest.approx(law.prob(x), abs=1e-12)


@pytest.mark.parametrize("kind", [Iid, WithoutReplacement])
def test_widths_start_at_one(kind):
    with pytest.raises(OptionError, match="width must be at least 1"):
        kind(dense_law([1, 1]), 0)


def test_mixed_candidates_do_not_overlap():
    with pytest.raises(LawError, match=r"gives mass to fixed candidates \[1\]"):
        Mixed((1,), dense_law([1, 1]), 2)


def test_equal_seeds_give_equal_draws_and_zero_is_a_seed():
    def draws(seed):
        source = SeededDraws(seed)
        return [source.uniform() for _ in range(600)]

    assert draws(0) == draws(0)
    assert len(set(draws(0)) & set(draws(1))) == 0
    assert all(0 <= value < 1 for value in draws(0))


def test_an_exhausted_tape_says_so():
    tape = TapeDraws([0.5])
    assert not tape.bernoulli(0.5)  # strictly below
    with pytest.raises(MongeError, match="all 1 uniforms are used"):
        tape.uniform()

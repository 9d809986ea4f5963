"""The shape drafter in the real loop: lossless with every pairing that is legal."""

from collections.abc import Callable

import pytest
import torch

from monge.api import make_components
from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.shape import Shape
from monge.draft.tree.base import ByRequest
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.laws.draws import TapeDraws
from monge.laws.from_logits import law_from_logits
from monge.laws.proposal import Deterministic, Iid
from monge.laws.tree import TokenTree
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.heads.toy import random_head
from tests.kit.laws import total_variation

LARGEST_ERROR = 1e-12
VOCAB = 3


def table(seed: int = 3) -> TabularModel:
    return TabularModel(RandomTable(VOCAB, seed), VOCAB)


def components(tree: str, verifier: str | None, **head: object) -> Components:
    target = table()
    head = random_head(target, **head)
    drafter = Shape(target=target, head=head, tree=TREES.parse(tree))
    return make_components(target, drafter=drafter, verifier=verifier)


def check_lossless(made: Callable[[], Components], **case: object) -> None:
    one = Case(**{"prompt": (0, 1), **case})
    assert law_error(output_law(made, one), target_law(table(), one)) < LARGEST_ERROR


def heat(temperature: float) -> SamplingRules:
    return SamplingRules(temperature=temperature)


PAIRINGS = [
    ("best_first(4, 2, 2)", "sample_and_match", 0),
    ("best_first(3, 2, 2)", "sample_and_match", 0.7),
    ("best_first(4, 2, 2)", "sample_and_match", 1),
    ("chain(2)", "speculative_sampling", 0.7),
    ("chain(2)", "layer('recursive_rejection')", 0),
    ("chain(2)", "layer('recursive_rejection')", 1),
    ("fixed_width((2, 1), children='top')", "layer", 1),
    (
        "fixed_width((2, 1), children='without_replacement')",
        "recursive_rejection_without_replacement",
        0.7,
    ),
    ("fixed_width((2,), children='iid')", "recursive_rejection", 1),
    ("fixed_width((2,), children='iid')", "layer('recursive_rejection')", 0.7),
    ("fixed_width((2,), children='iid')", "canonical", 0.7),
    ("fixed_width((2,), children='greedy_plus_one')", "greedy", 1),
    ("fixed_width((2,), children='iid')", "recursive_rejection", 0),
]


@pytest.mark.parametrize(("tree", "verifier", "temperature"), PAIRINGS)
def test_lossless_whatever_verifies(tree: str, verifier: str, temperature: float) -> None:
    check_lossless(lambda: components(tree, verifier), rules=heat(temperature))


@pytest.mark.parametrize("kind", ["gated", "ridge"])
@pytest.mark.parametrize("alignment", ["none", "gaussian", "sinkhorn_anchors"])
@pytest.mark.parametrize("is_branched", [True, False])
def test_lossless_whatever_predicts(kind: str, alignment: str, is_branched: bool) -> None:
    made = {"kind": kind, "alignment": alignment, "is_branched": is_branched}
    check_lossless(lambda: components("chain(2)", "speculative_sampling", **made), rules=heat(0.7))


def test_lossless_in_a_ragged_batch_beyond_the_end_and_from_a_prompt_of_one_token() -> None:
    """A first round without a hidden state drafts nothing; the ones after it do."""
    end = {"horizon": 2, "max_new_tokens": 3, "eos_ids": frozenset({1})}
    beside = {"prompt": (2,), "neighbours": ((0, 1, 2),), "slot": 1}
    check_lossless(lambda: components("chain(2)", "speculative_sampling"), **beside, **end)


def drafted(
    drafter: Shape,
    text: tuple[int, ...] = (0, 1),
    rules: SamplingRules | None = None,
    **plan: int,
) -> TokenTree:
    target, tape = drafter.target, TapeDraws([0.1, 0.5, 0.9] * 9)
    target.open({0: text[:-1]})
    rules = rules or SamplingRules()
    context = Context(request_id=0, token_ids=text, num_prompt_tokens=1, rules=rules)
    states = drafter.open([context])
    (draft,) = drafter.draft([context], states, [DraftPlan(**plan)], [tape])
    target.close(0)
    return draft.tree


def shape(tree: str, top_k: int | None = None, **head: object) -> Shape:
    target = table()
    made = random_head(target, **head)
    return Shape(target=target, head=made, tree=TREES.parse(tree), top_k=top_k)


def test_the_declared_laws_are_those_of_the_formula() -> None:
    """Node by node, with the steps written out: branches see their own token."""
    text = (0, 2, 1)
    tree = drafted(shape("fixed_width((2, 2), children='iid')"), text)
    target, head = table(), random_head(table()).double().requires_grad_(False)
    last = torch.tensor([list(target.table(text[:-1]))], dtype=torch.float64).log()
    start = head.predictor.start(last, target.embed((1,)))
    first = head.step(1, start, last, target.embed((1,)))
    laws = {0: law_from_logits(first[0] / float(head.temperatures[0]), SamplingRules())}
    for node in tree.candidates[0]:
        second = head.step(2, start, first, target.embed((tree.token_ids[node],)))
        laws[node] = law_from_logits(second[0] / float(head.temperatures[1]), SamplingRules())
    for node, law in laws.items():
        proposal = tree.proposals[node]
        assert isinstance(proposal, Iid)
        assert total_variation(proposal.law, law) < LARGEST_ERROR
    assert len({float(law.prob(0)) for law in laws.values()}) == len(laws)


def test_blind_heads_have_one_law_a_depth() -> None:
    tree = drafted(shape("fixed_width((3, 1), children='top')", is_branched=False))
    assert len({tree.token_ids[tree.candidates[node][0]] for node in tree.candidates[0]}) == 1


def test_plans_depths_and_steps_bound_the_tree() -> None:
    chain = shape("chain(5)")
    assert drafted(chain).num_nodes == 1 + 2 == 1 + chain.capabilities.max_depth  # the head's steps
    assert drafted(shape("chain(5)", num_steps=5), max_depth=3).num_nodes == 1 + 3
    assert drafted(chain, max_depth=0).num_nodes == 1
    assert drafted(shape("best_first(4, 2, 2)"), max_nodes=3).num_nodes == 1 + 3
    assert drafted(chain, (1,)).num_nodes == 1


def without_a_tree(**settings: object) -> Shape:
    target = table()
    made = make_components(target, head=random_head(target), drafter="shape", **settings)
    assert isinstance(made.drafter, Shape)
    return made.drafter


def test_where_nobody_names_a_tree_greedy_requests_get_top_tokens_and_others_a_chain() -> None:
    default = ByRequest(TREES.parse("best_first(3, 1, 3, 1)"), TREES.parse("chain(2)"))
    # How deep a round goes is said by what drafting costs here.
    for settings in (
        {},
        {"verifier": "recursive_rejection"},
        {"controller": "fsm"},
        {"controller": None},
    ):
        assert without_a_tree(**settings).tree == default
    assert default.limits.proposes == {Deterministic, Iid}
    greedy = "fixed_width(children='greedy_plus_one')"
    for asked, tree in (
        ({"tree": "chain(1)"}, "chain(1)"),
        ({"verifier": "speculative_sampling"}, "chain(3)"),
        ({"verifier": "greedy"}, greedy),
    ):
        assert without_a_tree(**asked).tree == TREES.parse(tree)
    for temperature, num_nodes, kind in ((0.0, 3, Deterministic), (1.0, 2, Iid)):
        made = drafted(without_a_tree(), rules=heat(temperature))
        assert made.num_nodes == 1 + num_nodes
        assert type(made.proposals[0]) is kind


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_lossless_with_the_default_tree(temperature: float) -> None:
    def made() -> Components:
        target = table()
        return make_components(target, head=random_head(target), drafter="shape")

    check_lossless(made, rules=heat(temperature))


def test_the_truncated_law_is_the_declared_one() -> None:
    """Drawn from the top of q and declared with all of q costs a total variation of 0.09; here they are one."""
    proposal = drafted(shape("chain(1)", top_k=2)).proposals[0]
    assert isinstance(proposal, Iid)
    assert proposal.law.sparse().probs.numel() == 2


def test_targets_without_hidden_states_are_refused() -> None:
    class Blind:
        vocab_size, forward_s, max_length, why_no_tree, why_no_draft = 3, 0.0, *[None] * 3
        open = append = extend = commit = length = close = lambda *_: None

    with pytest.raises(OptionError, match="that shows its hidden states; Blind does not"):
        Shape(target=Blind(), head=random_head(table()), tree=TREES.parse("chain"))


def test_a_head_that_makes_no_law_drafts_nothing() -> None:
    drafter = shape("chain")
    with torch.no_grad():
        drafter.head.predictor.up[0].fill_(float("nan"))
    with pytest.warns(UserWarning, match="logits are not finite; drafting stops here"):
        assert drafted(drafter).num_nodes == 1

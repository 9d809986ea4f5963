"""No rule asks for the target's law after a text that the target cannot write.

Constraints of users may raise there, or leave no token at all; plain decoding never asks them.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from monge.api import make_components
from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.draft.model import Model
from monge.draft.tree.registry import TREES
from monge.engine.batch import Batch
from monge.engine.session import Request, Session
from monge.laws.draws import Draws, RequestDraws
from monge.laws.from_logits import law_from_logits
from monge.laws.law import Law
from monge.laws.tree import TokenTree
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.verify.base import Verifier, as_verifier, why_no_exactness
from monge.verify.multipath_block import MultipathBlock
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS
from tests.exact.combinations import ReachableLaws, Text, verifiers

PROMPT: Text = (0,)
VOCAB = 3
ALL = [*verifiers(), "optimal", "gumbel", "layer('optimal')"]
WAYS = (
    *("iid", "without_replacement", "top", "greedy_plus_one", "mixed(1)"),
    *("temperatures((0.7, 1.6))", "shared"),
)
SHAPES = ["chain(3)", "paths(2, 3)", "paths(3, 2)"]
SHAPES += [f"fixed_width((2, 2), {way!r})" for way in WAYS]


class Forbidden:
    """The target's laws: token 1 comes only after an even number of tokens, token 2 after an odd one."""

    def __init__(self, rules: SamplingRules) -> None:
        self._table, self._rules = RandomTable(VOCAB, 11), rules

    def __call__(self, path: Text) -> Any:
        logits = TabularModel(self._table, VOCAB)._logits_after(PROMPT + path).clone()
        logits[1 if len(path) % 2 else 2] = -float("inf")
        return law_from_logits(logits, self._rules)


class AsksEverywhere(Verifier):
    """Exact, but for asking for all laws at once."""

    accepts = MultipathBlock.accepts

    def verify(self, tree: TokenTree, target_laws: Any, draws: Draws) -> Verdict:
        laws = [target_laws[node] for node in range(tree.num_nodes)]
        return MultipathBlock().verify(tree, laws, draws)


def trees(shape: str, rules: SamplingRules, seeds: Sequence[int]) -> list[ScoredTree]:
    """Drawn trees of one shape, with the draws that decide them."""
    drafter = Model(model=TabularModel(RandomTable(VOCAB, 23), VOCAB), tree=TREES.parse(shape))
    law, found = Forbidden(rules), []
    for seed in seeds:
        context = Context(request_id=seed, token_ids=PROMPT, num_prompt_tokens=1, rules=rules)
        draws = RequestDraws(seed)
        (draft,) = drafter.draft([context], drafter.open([context]), [DraftPlan()], [draws])
        found.append(
            ScoredTree(tree=draft.tree, target_laws=ReachableLaws(draft.tree, law), draws=draws)
        )
    return found


def legal_shapes(rule: Any) -> list[str]:
    return [
        shape
        for shape in SHAPES
        if why_no_exactness(rule, (own := TREES.parse(shape).limits).proposes, own.max_width)
        is None
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ALL)
def test_no_rule_asks_below_a_token_of_no_mass(verifier: str, temperature: float) -> None:
    """One request, and several together: batches have ways of their own."""
    rule, rules = VERIFIERS.parse(verifier), SamplingRules(temperature=temperature)
    shapes = legal_shapes(rule)
    assert shapes
    for shape in shapes:
        for first in range(0, 12, 6):
            for size in (1, 6):
                seeds = range(first, first + size)
                verdicts = as_verifier(rule).verify_many(trees(shape, rules, seeds))
                assert all(isinstance(verdict, Verdict) for verdict in verdicts)


def test_a_rule_that_asks_everywhere_is_seen() -> None:
    one = next(
        one
        for one in trees("paths(2, 3)", SamplingRules(), range(6))
        if 2 in one.tree.token_ids[1:3]
    )
    with pytest.raises(AssertionError, match="a law was asked for after"):
        AsksEverywhere().verify_one(one)


class Grammar:
    """A constraint without an answer after token 1, which it forbids."""

    def __call__(self, token_ids: Any, scores: Any) -> Any:
        if 1 in token_ids[0, 1:].tolist():
            raise ValueError("this prefix is not in the grammar")
        scores[:, 1] = -float("inf")
        return scores


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("paths(2, 2)", "multipath_block"),
        ("fixed_width((2, 1), 'iid')", "multipath_block"),
        ("chain(3)", "multipath_block"),
        ("chain(3)", "block"),
        ("fixed_width((2, 1), 'iid')", "layer('recursive_rejection')"),
        ("fixed_width((2, 1), 'without_replacement')", "traversal"),
    ],
)
def test_a_constraint_of_a_user_is_never_shown_what_it_forbids(tree: str, verifier: str) -> None:
    """In the real loop: the text has the target's law under the constraint, and no request ends."""

    def run(draws: Draws) -> Text:
        target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (11, 23))
        components = make_components(target, draft, tree=tree, verifier=verifier)
        request = Request(
            prompt_ids=PROMPT,
            max_new_tokens=3,
            rules=SamplingRules(),
            seed=0,
            draws=draws,
            processors=(Grammar(),),
        )
        session, batch = Session(request, request_id=0), Batch(components, isolated=True)
        batch.join([session])
        while session.finish_reason is None and session.num_generated < 2:
            batch.step()
        assert session.error is None, session.error
        return session.completion_ids[:2]

    def allowed(path: Text) -> Law:
        logits = TabularModel(RandomTable(VOCAB, 11), VOCAB)._logits_after(PROMPT + path)
        scores = Grammar()(torch.tensor([PROMPT + path]), logits[None].float())
        return law_from_logits(scores[0], SamplingRules())

    truth = {
        (first, second): allowed(()).prob(first) * allowed((first,)).prob(second)
        for first in (0, 2)
        for second in (0, 2)
    }
    assert law_error(exact_law(run), truth) < 1e-12

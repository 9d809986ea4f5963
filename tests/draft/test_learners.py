"""Drafters that learn from the target's rankings of finished rounds.

Exact text, and the published recurrences step by step.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from monge.api import make_components
from monge.core.context import Context, DraftPlan
from monge.core.draws import TapeDraws
from monge.core.errors import OptionError
from monge.core.proposal import Deterministic
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import AnyDrafter, Draft
from monge.draft.jacobi import JacobiDrafter
from monge.draft.lookahead import LookaheadDrafter, NgramPool
from monge.draft.registry import DRAFTERS
from monge.draft.token_recycling import TokenRecyclingDrafter
from monge.draft.tree_of_paths import node_at
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, Style, TabularModel
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS

VOCAB = 3
LEARNERS = (
    "token_recycling(num_nodes=4, depth=2, acceptance=(0.5, 0.2))",
    "token_recycling(num_nodes=3, depth=3, acceptance=(0.7,), keep=True)",
    "lookahead(window=2, ngram=3, num_candidates=1)",
    "lookahead(window=1, ngram=2, num_candidates=2, from_text=False)",
    "jacobi(2)",
)
WITH_RULES = [
    (drafter, verifier)
    for drafter in (LEARNERS[0], LEARNERS[2], LEARNERS[4])
    for verifier in VERIFIERS
    if verifier not in {"gumbel", "target_walk"}
    and unsupported_reason(
        VERIFIERS.make(verifier), [Deterministic], DRAFTERS.parse(drafter).capabilities.max_width
    )
    is None
]


def table(style: Style = "positive", vocab: int = VOCAB) -> TabularModel:
    return TabularModel(RandomTable(vocab, 11, style), vocab)


def context(tokens: Sequence[int]) -> Context:
    return Context(
        request_id=0, token_ids=tuple(tokens), num_prompt_tokens=1, rules=SamplingRules()
    )


def drafted(
    drafter: AnyDrafter, state: Any, tokens: Sequence[int], plan: DraftPlan | None = None
) -> Draft[Any]:
    (draft,) = drafter.draft([context(tokens)], [state], [plan or DraftPlan()], [TapeDraws([])])
    assert all(isinstance(proposal, Deterministic) for proposal in draft.tree.proposals)
    return draft


def opened(drafter: AnyDrafter, tokens: Sequence[int]) -> Any:
    (state,) = drafter.open([context(tokens)])
    return state


def ranked(
    target: TabularModel, text: Sequence[int], tree: TokenTree, count: int
) -> tuple[tuple[int, ...], ...]:
    """The target's most probable tokens at every node, straight from the table."""
    texts = [tuple(text) + tree.path_tokens(node) for node in range(tree.num_nodes)]
    return tuple(
        tuple(sorted(range(len(law)), key=lambda t: -law[t])[:count])
        for law in map(target.table, texts)
    )


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tree.path_tokens(node) for node in range(1, tree.num_nodes)}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("drafter", LEARNERS)
def test_lossless_over_several_rounds(drafter: str, temperature: float) -> None:
    """Two tokens and more need two rounds at least, and the second one drafts what the first one taught."""
    case = Case(
        prompt=(0, 2, 0, 1, 0),
        horizon=3,
        max_new_tokens=4,
        rules=SamplingRules(temperature=temperature),
    )
    found = output_law(lambda: make_components(table(), drafter=drafter), case)
    assert law_error(found, target_law(table(), case)) < 1e-12


@pytest.mark.parametrize(("drafter", "verifier"), WITH_RULES)
def test_lossless_with_every_rule_for_deterministic_candidates(drafter: str, verifier: str) -> None:
    case = Case(
        prompt=(0, 2, 0),
        horizon=2,
        max_new_tokens=3,
        eos_ids=frozenset({1}),
        rules=SamplingRules(temperature=0.7),
    )
    found = output_law(
        lambda: make_components(table("sparse"), drafter=drafter, verifier=verifier), case
    )
    assert law_error(found, target_law(table("sparse"), case)) < 1e-12


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("drafter", [*LEARNERS[:3], "pool('ngram(2)', 'jacobi(2)')"])
def test_lossless_in_a_ragged_batch(drafter: str, slot: int) -> None:
    case = Case(
        prompt=(0, 1),
        horizon=2,
        max_new_tokens=3,
        neighbours=((2, 1, 2, 0),),
        slot=slot,
        eos_ids=frozenset({2}),
    )
    found = output_law(lambda: make_components(table(), drafter=drafter), case)
    assert law_error(found, target_law(table(), case)) < 1e-12


@pytest.mark.parametrize("drafter", ["token_recycling", "lookahead", "jacobi"])
def test_greedy_text_is_the_plain_one_and_batches_change_nothing(drafter: str) -> None:
    target = table(vocab=7)
    prompts = [(0, 1, 2), (3,), (4, 5, 4, 5)]
    plain = Decoder(make_components(target, drafter="none")).generate(prompts, max_new_tokens=16)
    trees = []
    for size in (1, 3):
        decoder = Decoder(make_components(target, drafter=drafter), max_batch_size=size)
        results = decoder.generate(prompts, max_new_tokens=16)
        assert [one.token_ids for one in plain] == [one.token_ids for one in results]
        trees.append(
            [(one.num_nodes, one.num_accepted) for result in results for one in result.records]
        )
    assert trees[0] == trees[1]


def test_the_ranking_is_that_of_the_logits_at_every_node() -> None:
    """What the loop hands over equals the table's own ranking, node by node, on rejected branches too."""
    target, seen = table(vocab=5), []

    class Spy(TokenRecyclingDrafter):
        def observe(self, contexts: Any, drafts: Any, verdicts: Any) -> Any:
            for after, draft, verdict in zip(contexts, drafts, verdicts, strict=True):
                text = after.token_ids[: len(after.token_ids) - verdict.num_accepted - 1]
                seen.append(
                    verdict.successors == ranked(target, text, draft.tree, 2)
                    and draft.tree.num_nodes > 1
                )
            return super().observe(contexts, drafts, verdicts)

    spy = Spy(num_nodes=6, depth=2, acceptance=(0.4, 0.3))
    Decoder(make_components(target, drafter=spy)).generate(
        [(0, 1, 0, 2)], max_new_tokens=30, temperature=1.0, seed=4
    )
    assert len(seen) > 5
    assert seen.count(False) <= 2  # the first and the last round may draft nothing


class TestTokenRecycling:
    def test_the_prompt_fills_the_table_and_the_latest_comes_first(self) -> None:
        known = opened(TokenRecyclingDrafter(acceptance=(0.5, 0.2)), [1, 2, 1, 3, 1, 4, 1])
        assert known[1] == (4, 3)
        assert known[2] == (1,)
        assert set(known) == {1, 2, 3, 4}

    def test_rankings_replace_rows_and_the_text_prevails(self) -> None:
        drafter = TokenRecyclingDrafter(num_nodes=4, depth=2, acceptance=(0.5, 0.2))
        draft = drafted(drafter, opened(drafter, [1, 2, 1, 1]), [1, 2, 1, 1])
        assert (1,) in paths(draft.tree)
        assert (1, 2) in paths(draft.tree)
        inner = next(
            node for node in range(1, draft.tree.num_nodes) if draft.tree.path_tokens(node) == (1,)
        )
        successors = tuple((7 + node, 50) for node in range(draft.tree.num_nodes))
        verdict = Verdict(
            path=(inner,), next_token=5, next_kind="correction", successors=successors
        )
        (state,) = drafter.observe([context([1, 2, 1, 1, 1, 5])], [draft], [verdict])
        # Token 1 stands at the root and at both depths: its accepted node is heard last.
        assert state[1] == (7 + inner, 50)
        rejected = max(
            node for node in range(1, draft.tree.num_nodes) if draft.tree.token_ids[node] == 2
        )
        assert state[2] == (7 + rejected, 50)

    def test_the_tree_has_the_best_shape_and_fits_the_plan(self) -> None:
        drafter = TokenRecyclingDrafter(num_nodes=6, depth=3, acceptance=(0.6, 0.2))
        known = opened(drafter, [0])
        for token in range(10):
            known[token] = (token + 1) % 10, (token + 5) % 10
        assert paths(drafted(drafter, known, [0]).tree) == {
            (1,),
            (1, 2),
            (1, 2, 3),
            (5,),
            (5, 6),
            (1, 6),
        }
        assert drafted(drafter, known, [0], DraftPlan(max_nodes=2)).tree.num_nodes == 3
        assert paths(drafted(drafter, known, [0], DraftPlan(max_depth=1)).tree) == {(1,), (5,)}
        assert drafted(drafter, known, [0], DraftPlan(max_depth=0)).tree.num_nodes == 1

    def test_requests_share_a_table_only_if_asked(self) -> None:
        for keep in (False, True):
            drafter = TokenRecyclingDrafter(keep=keep)
            opened(drafter, [1, 2, 3])
            assert len(opened(drafter, [9])) == (2 if keep else 0)

    def test_a_chain_needs_no_trees(self) -> None:
        can = TokenRecyclingDrafter(acceptance=(0.5,)).capabilities
        assert not can.needs_trees
        assert can.num_successors == 1


class TestJacobi:
    def test_it_is_jacobi_iteration(self) -> None:
        """y_i of the next round = argmax p(. | text, y_1 .. y_(i-1) of this one), behind what was accepted."""
        target = table(vocab=6)
        decoder = Decoder(make_components(target, drafter="jacobi(4)"))
        (session,) = decoder.sessions([(0, 1)], max_new_tokens=24)
        guesses: tuple[int, ...] = ()
        for _ in decode([session], decoder.components, max_batch_size=1):
            record, text = session.records[-1], session.context.token_ids
            start = text[: record.context_length]
            chain = (*guesses, *([guesses[-1] if guesses else start[-1]] * 4))[: record.num_nodes]
            best = [
                max(range(6), key=lambda t, i=i: target.table(start + chain[:i])[t])
                for i in range(len(chain) + 1)
            ]
            num_accepted = next(
                (i for i, guess in enumerate(chain) if guess != best[i]), len(chain)
            )
            assert record.num_accepted == num_accepted
            guesses = tuple(best[num_accepted + 1 :])
            assert session.drafter_state == guesses
        assert max(record.num_accepted for record in session.records) > 0

    def test_plans_bound_it(self) -> None:
        assert drafted(JacobiDrafter(), (3, 4), [0, 1], DraftPlan(max_depth=3)).tree.token_ids == (
            1,
            3,
            4,
            4,
        )
        assert drafted(JacobiDrafter(num_draft_tokens=2), (), [0, 1]).tree.token_ids == (1, 1, 1)
        assert drafted(JacobiDrafter(), (3,), [0, 1], DraftPlan(max_nodes=0)).tree.num_nodes == 1


class TestLookahead:
    def test_the_window_is_the_published_mask_as_a_tree(self) -> None:
        """Column i follows the first guesses of the columns before it, and sees no other column."""
        drafter = LookaheadDrafter(window=3, ngram=3, num_candidates=1)
        state = opened(drafter, [1, 2, 3, 4, 5, 6])
        assert state.columns == ((3, 4), (4, 5), (5, 6))
        tree = drafted(drafter, state, [1, 2, 3, 4, 5, 6]).tree
        # (3, 4) is a column and the chain of first guesses alike: shared.
        assert paths(tree) == {(3,), (3, 4), (3, 4, 5), (3, 4, 5, 6)}
        apart = type(state)(((10, 11), (20, 21), (30, 31)), state.pool)
        tree = drafted(drafter, apart, [1, 2, 3, 4, 5, 6]).tree
        assert paths(tree) == {
            (10,),
            (10, 11),
            (10, 20),
            (10, 20, 21),
            (10, 20, 30),
            (10, 20, 30, 31),
        }

    def test_columns_move_on_and_their_ends_fill_the_pool(self) -> None:
        drafter = LookaheadDrafter(window=3, ngram=3, num_candidates=2, from_text=False)
        state = opened(drafter, [1, 2, 3, 4, 5, 6])
        state = type(state)(((10, 11), (20, 21), (30, 31)), state.pool)
        draft = drafted(drafter, state, [6])
        ends = {
            node_at(draft.tree, path): 100 + place
            for place, path in enumerate([(10, 11), (10, 20, 21), (10, 20, 30, 31)])
        }
        successors = tuple((ends.get(node, 0),) for node in range(draft.tree.num_nodes))
        verdict = Verdict(path=(1,), next_token=9, next_kind="correction", successors=successors)
        (after,) = drafter.observe([context([6, 10, 9])], [draft], [verdict])
        # Two tokens were committed: the column of position 2 is now that of position 1, one token
        # further on.
        assert after.columns == ((21, 101), (31, 102), (31, 102))
        assert [after.pool.after(token, 9) for token in (10, 20, 30)] == [
            [(11, 100)],
            [(21, 101)],
            [(31, 102)],
        ]
        assert drafted(drafter, after, [6, 10, 20]).tree.path_tokens(1) == (21,)

    def test_a_long_acceptance_leaves_the_last_column(self) -> None:
        drafter = LookaheadDrafter(window=1, ngram=3, from_text=False)
        state = opened(drafter, [1, 2, 3])
        draft = drafted(drafter, state, [1, 2, 3])
        successors = tuple((7,) for _ in range(draft.tree.num_nodes))
        verdict = Verdict(path=(1, 2), next_token=9, next_kind="bonus", successors=successors)
        (after,) = drafter.observe([context([1, 2, 3, 2, 3, 9])], [draft], [verdict])
        assert after.columns == ((3, 7),)

    def test_the_text_fills_the_pool_once(self) -> None:
        drafter = LookaheadDrafter(window=1, ngram=3)
        state = opened(drafter, [1, 2, 3, 1, 2])
        assert state.pool.after(1, 9) == [(2, 3)]
        draft = drafted(drafter, state, [1, 2, 3, 1, 2])
        verdict = Verdict(
            path=(), next_token=4, next_kind="correction", successors=((0,),) * draft.tree.num_nodes
        )
        (after,) = drafter.observe([context([1, 2, 3, 1, 2, 4])], [draft], [verdict])
        assert after.pool.after(1, 9) == [(2, 4), (2, 0), (2, 3)]  # the text last, after the window

    def test_pools_forget_the_oldest(self) -> None:
        pool = NgramPool(2)
        for last in (1, 2, 1, 3):
            pool.add((0, last))
        assert pool.after(0, 9) == [(3,), (1,)]
        assert pool.after(0, 1) == [(3,)]

    def test_plans_bound_it(self) -> None:
        drafter = LookaheadDrafter()
        state = opened(drafter, list(range(20)))
        assert max(drafted(drafter, state, range(20), DraftPlan(max_depth=2)).tree.depths) == 2
        assert drafted(drafter, state, range(20), DraftPlan(max_nodes=3)).tree.num_nodes == 4
        assert drafted(drafter, state, range(20), DraftPlan(max_nodes=0)).tree.num_nodes == 1


@pytest.mark.parametrize(
    "bad",
    [
        "token_recycling(num_nodes=0)",
        "token_recycling(depth=0)",
        "token_recycling(acceptance=())",
        "token_recycling(acceptance=(0.9, 0.9))",
        "jacobi(0)",
        "lookahead(window=0)",
        "lookahead(ngram=1)",
        "lookahead(num_candidates=0)",
        "lookahead(pool_size=0)",
    ],
)
def test_bad_settings_are_refused(bad: str) -> None:
    with pytest.raises(OptionError, match=f"{bad.partition('(')[0]}: "):
        DRAFTERS.parse(bad)


def test_in_a_pool_they_learn_from_others_trees() -> None:
    target = table(vocab=5)
    parts = make_components(
        target,
        TabularModel(RandomTable(5, 11), 5),
        drafter="pool('model', 'token_recycling')",
        tree="chain(3)",
    )
    (session,) = Decoder(parts).sessions([(0, 1)], max_new_tokens=20)
    for _ in decode([session], parts, max_batch_size=1):
        if session.finish_reason is None:
            assert session.records[-1].drafter == "model"
            known, text = session.drafter_state.states[1], session.context.token_ids
            record = session.records[-1]
            token, law = (
                text[record.context_length - 1],
                target.table(text[: record.context_length]),
            )
            if token not in record.token_ids[:-1]:
                assert known[token][0] == max(range(5), key=lambda t, law=law: law[t])

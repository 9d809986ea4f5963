"""What may decide which nodes have children, and how they are drawn.

By enumeration, one family of rules at a time.

Trees are made by hand here: `GrowingTree` refuses most of them.
"""

from collections.abc import Callable

import pytest

from monge.laws.draws import Draws
from monge.laws.proposal import Arbitrary, Deterministic, Iid, PathDraws, Proposal
from monge.laws.tree import TokenTree
from monge.oracle.exact_law import exact_law, law_error
from monge.verify.base import Verifier, as_verifier
from monge.verify.registry import VERIFIERS
from tests.verify.acceptance import EXACT
from tests.verify.tables import remembered_tables  # noqa: F401
from tests.verify.whole_trees import Path, Tables, continued, random_tables, text_error

SEEDS = range(3)


class HandMade:
    """A tree whose nodes get independent children in any order and for any reason.

    Args:
        tables: Draft laws.
        draws: Source of randomness.
        kind: What the children are declared as; the number of `PathDraws` is that of the paths that
            pass the node.
    """

    def __init__(self, tables: Tables, draws: Draws, kind: type[Iid]) -> None:
        self._tables, self._draws, self._kind = tables, draws, kind
        self.token_ids, self._parents = [0], [-1]
        self._proposals: list[Proposal] = [Deterministic()]
        self._candidates: list[tuple[int, ...]] = [()]

    def grow(self, node: int, width: int = 2) -> list[int]:
        if self._kind is PathDraws and node:
            width = self._candidates[self._parents[node]].count(node)
        proposal = self._kind(self._tables.draft(self.tree().path_tokens(node)), width)
        node_of: dict[int, int] = {}
        candidates: list[int] = []
        for token in proposal.draw(self._draws):
            if token not in node_of:
                node_of[token] = len(self.token_ids)
                self.token_ids.append(token)
                self._parents.append(node)
                self._proposals.append(Deterministic())
                self._candidates.append(())
            candidates.append(node_of[token])
        self._proposals[node], self._candidates[node] = proposal, tuple(candidates)
        return list(node_of.values())

    def tree(self) -> TokenTree:
        return TokenTree(
            token_ids=tuple(self.token_ids),
            parents=tuple(self._parents),
            proposals=tuple(self._proposals),
            candidates=tuple(self._candidates),
        )


Policy = Callable[[HandMade], None]


def own_path(made: HandMade) -> None:
    for child in made.grow(0):
        if made.token_ids[child] == 0:
            made.grow(child)


def siblings(made: HandMade) -> None:
    """An earlier level, beside the node's own path."""
    level = made.grow(0)
    for child in level:
        if len(level) == 2 or made.token_ids[child] == 0:
            made.grow(child)


def repeats_of_its_level(made: HandMade) -> None:
    """A budget that counts drawn nodes."""
    has_room = True
    for child in made.grow(0):
        if has_room:
            has_room = len(made.grow(child)) == 1


def widths_by_its_level(made: HandMade) -> None:
    width = 2
    for child in reversed(made.grow(0)):
        width = 2 if len(made.grow(child, width)) == 1 else 1


def deeper_levels(made: HandMade) -> None:
    """Depth first, as long as the last token drawn is 0."""
    goes_on = True
    for child in made.grow(0):
        for grandchild in made.grow(child, 1) if goes_on else ():
            (last,) = made.grow(grandchild, 1)
            goes_on = made.token_ids[last] == 0


NODE_BY_NODE = (
    *("recursive_rejection", "recursive_rejection_without_replacement", "k_seq", "naive_tree"),
    "optimal_given_candidates",
)
ANYTHING_BEFORE = (*NODE_BY_NODE, "traversal", "multipath_block", "layer('sample_and_match')")
EARLIER_LEVELS = (
    "layer('recursive_rejection')",
    "layer('k_seq')",
    "layer('optimal_given_candidates')",
)


def error(verifier: str, policy: Policy, kind: type[Iid] = Iid) -> float:
    """Law error of the text, the largest of several tables."""
    rule, depth = as_verifier(VERIFIERS.parse(verifier)), 3 if policy is deeper_levels else 2
    return max(
        _error(rule, random_tables(vocab=2, depth=depth, seed=seed), policy, depth + 1, kind)
        for seed in SEEDS
    )


def _error(rule: Verifier, tables: Tables, policy: Policy, length: int, kind: type[Iid]) -> float:
    def run(draws: Draws) -> Path:
        made = HandMade(tables, draws, kind)
        policy(made)
        tree = made.tree()
        verdict = rule.verify(tree, tables.laws(tree), draws)
        return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)

    return law_error(
        continued(exact_law(run), tables, length), continued({(): 1.0}, tables, length)
    )


@pytest.mark.parametrize("policy", [own_path, siblings])
@pytest.mark.parametrize("verifier", [*ANYTHING_BEFORE, *EARLIER_LEVELS])
def test_earlier_levels_may_decide_for_every_rule(verifier: str, policy: Policy) -> None:
    assert error(verifier, policy) < EXACT


@pytest.mark.parametrize("policy", [repeats_of_its_level, widths_by_its_level, deeper_levels])
@pytest.mark.parametrize("verifier", ANYTHING_BEFORE)
def test_anything_drawn_before_may_decide_for_rules_that_go_down_one_path_at_a_time(
    verifier: str, policy: Policy
) -> None:
    assert error(verifier, policy) < EXACT


@pytest.mark.parametrize("policy", [repeats_of_its_level, deeper_levels])
@pytest.mark.parametrize("verifier", ["layer('recursive_rejection')", "layer('k_seq')"])
def test_a_level_that_decides_about_itself_biases_layers(verifier: str, policy: Policy) -> None:
    assert error(verifier, policy) > 1e-4


def test_only_the_own_path_may_decide_about_draws_that_are_promised_to_be_paths() -> None:
    assert error("multipath_block", own_path, PathDraws) < EXACT
    assert error("multipath_block", siblings, PathDraws) > 1e-6
    assert error("layer('recursive_rejection')", siblings, PathDraws) < EXACT


UNLIKE = {
    "one top token": lambda q: Deterministic(q.top(1)),
    "two top tokens": lambda q: Deterministic(q.top(2)),
    "unknown": lambda q: Arbitrary(q.top(1)),
}


@pytest.mark.parametrize(
    ("verifier", "unlike"),
    [("block", unlike) for unlike in ("one top token", "unknown")]
    + [
        (verifier, unlike)
        for verifier in ("traversal", "multipath_block", "layer('recursive_rejection')")
        for unlike in UNLIKE
    ],
)
def test_a_drawn_token_may_decide_how_its_children_are_drawn(verifier: str, unlike: str) -> None:
    """A rule that looks at whole trees decides the same part of them, whatever comes below."""
    width = 1 if verifier == "block" else 2
    for seed in SEEDS:
        tables = random_tables(vocab=3 if width == 1 else 2, depth=2, seed=seed)

        def children(path: Path, tables: Tables = tables) -> Proposal | None:
            if len(path) == 2:
                return None
            q = tables.draft(path)
            return UNLIKE[unlike](q) if path == (0,) else Iid(q, width)

        assert text_error(as_verifier(VERIFIERS.parse(verifier)), tables, children, 3) < EXACT

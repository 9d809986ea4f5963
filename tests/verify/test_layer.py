"""Layer Verification: whole trees, every inner rule and way of drawing, by enumeration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from monge.core.errors import NonFiniteLogitsError, OptionError, ProposalMismatchError
from monge.draft.tree.children import way_of_drawing
from monge.laws.draws import Draws, SeededDraws, TapeDraws
from monge.laws.proposal import (
    Arbitrary,
    Deterministic,
    Iid,
    Proposal,
    WithoutReplacement,
    entry_for,
)
from monge.oracle.exact_law import exact_law
from monge.transport.candidates import CandidateLaw
from monge.transport.linear_program import solve_tree
from monge.transport.random_tree import RandomTree
from monge.verify.base import Walk, as_verifier, why_no_exactness
from monge.verify.block import Block
from monge.verify.flow import Emission, Flow, FlowRule
from monge.verify.k_seq import KSeq
from monge.verify.layer import FLOW_RULES, RULE_OF, Layer, LayerPass, NodeResidual
from monge.verify.problem import NodeProblem, ScoredTree
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.registry import VERIFIERS
from monge.verify.traversal import Traversal
from tests.verify.acceptance import EXACT
from tests.verify.tables import remembered_tables  # noqa: F401
from tests.verify.whole_trees import (
    Children,
    Path,
    Tables,
    expected_accepted,
    fixed_width,
    grown,
    random_tables,
    text_error,
    width_error,
)

INNER = {
    "sample_and_match": ("iid", "without_replacement", "top", "greedy_plus_one"),
    "recursive_rejection": ("iid", "top", "greedy_plus_one"),
    "recursive_rejection_without_replacement": ("iid", "without_replacement", "top"),
    "naive_tree": ("iid", "top"),
    "k_seq": ("iid", "top"),
    "greedy": ("greedy_plus_one", "top"),
    "optimal_given_candidates": ("iid", "greedy_plus_one", "top"),
}
COMBINATIONS = [(inner, way) for inner, ways in INNER.items() for way in ways]


@pytest.mark.parametrize(("inner", "way"), COMBINATIONS)
@pytest.mark.parametrize(("vocab", "widths"), [(3, (2,)), (2, (2, 2))])
def test_the_text_has_the_law_of_the_target(
    inner: str, way: str, vocab: int, widths: tuple[int, ...]
) -> None:
    tables = random_tables(vocab=vocab, depth=len(widths), seed=4)
    assert width_error(Layer(inner), tables, widths, way) < EXACT


@pytest.mark.parametrize(
    ("inner", "way"),
    [
        ("k_seq", "iid"),
        ("recursive_rejection_without_replacement", "without_replacement"),
        ("greedy", "top"),
    ],
)
@pytest.mark.parametrize(("vocab", "widths"), [(3, (1, 2)), (2, (2, 1, 1))])
def test_deeper_trees(inner: str, way: str, vocab: int, widths: tuple[int, ...]) -> None:
    tables = random_tables(vocab=vocab, depth=len(widths), seed=4)
    assert width_error(Layer(inner), tables, widths, way) < EXACT


@pytest.mark.parametrize("same_until", [0, 1, 2])
@pytest.mark.parametrize(
    "inner", ["recursive_rejection", "recursive_rejection_without_replacement"]
)
def test_equal_laws_and_zeros(inner: str, same_until: int) -> None:
    """Where p = q nothing is left to keep, and everything is accepted."""
    tables = random_tables(vocab=3, depth=2, seed=6)
    targets = {
        path: [0, *law[1:]] if len(path) == 1 else law for path, law in tables.targets.items()
    }
    drafts = {
        path: targets[path] if len(path) < same_until else law
        for path, law in tables.drafts.items()
    }
    same = Tables(targets, drafts)
    children = fixed_width(same, (2, 1), "iid")
    assert text_error(Layer(inner), same, children, 3) < EXACT
    if same_until == 2:
        assert expected_accepted(Layer(inner), same, children) == pytest.approx(2.0, abs=EXACT)


def test_different_ways_of_drawing_in_one_tree() -> None:
    """The default takes a rule for each node; averages and emissions meet in one layer."""
    tables = random_tables(vocab=3, depth=2, seed=2)
    ways = {(): ("without_replacement", 2), (0,): ("top", 2), (1,): ("without_replacement", 2)}

    def children(path: Path) -> Proposal | None:
        way, count = ways.get(path, ("", 0))
        return way_of_drawing(way).propose(tables.draft(path), count) if way else None

    def with_draws(path: Path) -> Proposal | None:
        return Iid(tables.draft(path), 2) if path == (2,) else children(path)

    assert text_error(Layer(), tables, children, 3) < EXACT
    assert text_error(Layer(PerKind()), tables, with_draws, 3) < EXACT


class NamedDraws(Iid):
    """Independent draws under another name."""


class NamedDrawsWithoutReplacement(WithoutReplacement):
    """Draws without replacement under another name."""


@pytest.mark.parametrize("kind", [NamedDraws, NamedDrawsWithoutReplacement])
def test_a_kind_of_draw_is_verified_as_the_kind_that_it_is_a_subclass_of(kind: type) -> None:
    tables = random_tables(vocab=2, depth=2, seed=4)
    widths = (2, 1)
    parent = kind.__bases__[0]

    def verdict(made: type):  # type: ignore[no-untyped-def]
        def children(path: Path) -> Proposal | None:
            return made(tables.draft(path), widths[len(path)]) if len(path) < len(widths) else None

        tape = torch.rand(
            40, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        ).tolist()
        tree = grown(children, TapeDraws(tape[:10]))
        return Layer().verify(tree, tables.laws(tree), TapeDraws(tape[10:]))

    assert verdict(kind) == verdict(parent)


def test_a_table_without_the_kind_says_so() -> None:
    with pytest.raises(KeyError, match="Arbitrary is not in the table of Iid"):
        entry_for(Arbitrary, {Iid: 1})


@dataclass(frozen=True, slots=True)
class PerKind(FlowRule):
    """Rules that can be enumerated, chosen by the way of drawing."""

    accepts = frozenset(RULE_OF)

    def emit(self, target_law, proposal, candidate_ids, draws):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def flow(self, problem: NodeProblem) -> Flow | Emission:
        rule = (
            RecursiveRejection()
            if isinstance(problem.proposal, Iid)
            else entry_for(type(problem.proposal), RULE_OF)
        )
        return rule.flow(problem)


@pytest.mark.parametrize("seed", range(20))
def test_one_candidate_a_node_is_the_block_rule(seed: int) -> None:
    """The same draws, asked for in the same order, give the same verdict."""
    tables = random_tables(vocab=3, depth=3, seed=seed)
    tape = torch.rand(
        40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()
    tree = grown(fixed_width(tables, (1, 1, 1), "iid"), TapeDraws(tape[:10]))
    laws = tables.laws(tree)
    expected = Block().verify(tree, laws, TapeDraws(tape[10:]))
    for inner in ("speculative_sampling", "recursive_rejection", "naive_tree", "k_seq"):
        assert Layer(inner).verify(tree, laws, TapeDraws(tape[10:])) == expected, inner


@pytest.mark.parametrize(
    "inner",
    [
        *("speculative_sampling", "naive_tree", "k_seq"),
        *("recursive_rejection", "recursive_rejection_without_replacement"),
    ],
)
def test_one_candidate_a_node_accepts_as_often_as_the_block_rule(inner: str) -> None:
    tables = random_tables(vocab=3, depth=2, seed=3)
    children = fixed_width(tables, (1, 1), "iid")

    def outcomes(rule):  # type: ignore[no-untyped-def]
        def run(draws: Draws):  # type: ignore[no-untyped-def]
            tree = grown(children, draws)
            verdict = rule.verify(tree, tables.laws(tree), draws)
            return tree.token_ids, verdict

        return exact_law(run)

    assert outcomes(Layer(inner)) == pytest.approx(outcomes(Block()), abs=EXACT)


@pytest.mark.parametrize(
    ("inner", "way"),
    [
        ("recursive_rejection", "iid"),
        ("recursive_rejection_without_replacement", "without_replacement"),
    ],
)
def test_accepted_tokens_are_the_sum_of_the_weights(inner: str, way: str) -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    children = fixed_width(tables, (2, 1), way)
    assert weighed(Layer(inner), tables, children) == pytest.approx(
        expected_accepted(Layer(inner), tables, children), abs=EXACT
    )


def weighed(rule: Layer, tables: Tables, children: Children) -> float:
    """E[sum of w], from the pass downwards alone."""
    total = 0.0
    for (tokens, parents, proposals, candidate_ids), prob in _trees(children).items():
        tree = replace(
            _EMPTY, token_ids=tokens, parents=parents, proposals=proposals, candidates=candidate_ids
        )
        layers = LayerPass(
            ScoredTree(tree=tree, target_laws=tables.laws(tree), draws=TapeDraws(()))
        )
        while layers.is_open:
            layers.descend([rule.flow(problem) for problem in layers.problems()])
            total += prob * sum(layers._weights.values())
    return total


_EMPTY = grown(lambda _: None, TapeDraws(()))


def _trees(children: Children):  # type: ignore[no-untyped-def]
    children = cache(children)  # one object a path, so that equal trees are equal keys

    def run(draws: Draws):  # type: ignore[no-untyped-def]
        tree = grown(children, draws)
        return tree.token_ids, tree.parents, tree.proposals, tree.candidates

    return exact_law(run)


@pytest.mark.slow
def test_between_the_walk_and_the_optimum() -> None:
    """Never above the multi-step optimum.

    On this bank never below the same rule node by node, and more on average.
    """
    gains = []
    for seed in range(2):
        tables = random_tables(vocab=3, depth=2, seed=seed)
        children = fixed_width(tables, (2, 1), "iid")
        for inner in ("recursive_rejection", "k_seq"):
            found = weighed(Layer(inner), tables, children)
            walked = expected_accepted(as_verifier(FLOW_RULES.parse(inner)), tables, children)
            assert found >= walked - EXACT, inner
            gains.append(found - walked)
        random_tree = RandomTree.from_children(
            lambda path, tables=tables: CandidateLaw.iid(
                tables.draft_masses(path), (2, 1)[len(path)]
            ),
            2,
        )
        best = solve_tree(random_tree, tables.target_masses).expected_accepted
        found = weighed(Layer("optimal_given_candidates"), tables, children)
        assert 0.9 * best < found <= best + 1e-8
    assert sum(gains) > 1e-2


def test_draws_without_replacement_between_the_walk_and_the_optimum() -> None:
    gains = []
    for seed in range(2):
        tables = random_tables(vocab=3, depth=2, seed=seed)
        children = fixed_width(tables, (2, 1), "without_replacement")
        found = weighed(Layer(), tables, children)
        walked = expected_accepted(
            Walk(FLOW_RULES.parse("recursive_rejection_without_replacement")), tables, children
        )
        assert found >= walked - EXACT
        gains.append(found - walked)
        random_tree = RandomTree.from_children(
            lambda path, tables=tables: CandidateLaw.without_replacement(
                tables.draft_masses(path), (2, 1)[len(path)]
            ),
            2,
        )
        assert found <= solve_tree(random_tree, tables.target_masses).expected_accepted + 1e-8
    assert sum(gains) > 1e-3


@dataclass(frozen=True, slots=True)
class ScaleForgotten(RecursiveRejection):
    """The target coupled whole, whatever weight is left."""

    def flow(self, problem: NodeProblem) -> Flow:
        return RecursiveRejection.flow(self, replace(problem, scale=1.0))


@dataclass(frozen=True, slots=True)
class MassesOfAnother(KSeq):
    """Accepts by its own probabilities and declares the masses of another rule."""

    def flow(self, problem: NodeProblem) -> Flow:
        return replace(KSeq.flow(self, problem), masses=RecursiveRejection().flow(problem).masses)


@pytest.mark.parametrize("rule", [ScaleForgotten(), MassesOfAnother()])
def test_wrong_flows_are_seen(rule: FlowRule) -> None:
    assert _error(Layer(rule)) > 1e-5
    assert _error(Layer(type(rule).__mro__[1]())) < EXACT


def test_a_wrong_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node keeps is s p - y; the residual of the whole target is not."""
    right = Flow.left
    monkeypatch.setattr(Flow, "left", lambda flow, law, scale: right(flow, law, 1.0))
    assert _error(Layer("recursive_rejection")) > 1e-5


def test_a_wrong_mass_of_the_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPass, "_stop_prob", lambda self, layer: 0.5)
    assert _error(Layer("recursive_rejection")) > 1e-5


def _error(rule: Layer) -> float:
    tables = random_tables(vocab=3, depth=2, seed=1)
    return width_error(rule, tables, (2, 1), "iid")


def test_by_name() -> None:
    assert VERIFIERS.parse("layer") == Layer()
    assert VERIFIERS.parse("layer('k_seq')") == Layer("k_seq")
    assert Layer("k_seq").accepts == KSeq().accepts
    assert Layer("speculative_sampling").max_width == 1
    assert Layer("optimal_given_candidates").is_enumerable
    assert not Layer().is_enumerable
    with pytest.raises(OptionError, match="unknown node rule 'k_sec'; did you mean 'k_seq'"):
        Layer("k_sec")
    reason = why_no_exactness(Layer("greedy"), (Iid,), 2)
    assert reason is not None
    assert reason.startswith("Layer(Greedy) is exact for Deterministic, Mixed candidates only")


def test_every_rule_with_a_flow_can_be_named() -> None:
    assert {name: part for name, part in VERIFIERS.items() if issubclass(part, FlowRule)} == dict(
        FLOW_RULES
    )


def test_refusals_and_candidates_of_unknown_origin() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    draws = SeededDraws(3)
    pair = grown(fixed_width(tables, (2,), "iid"), draws)
    with pytest.raises(
        ProposalMismatchError,
        match=r"node 0: Layer\(SpeculativeSampling\) is exact for "
        r"at most 1 candidate",
    ):
        Layer("speculative_sampling").verify(pair, tables.laws(pair), draws)
    with pytest.raises(ProposalMismatchError, match="nodes but 1 laws"):
        Layer().verify(pair, [tables.target(())], draws)
    forged = lambda path: Arbitrary((2, 0)) if len(path) < 2 else None  # noqa: E731
    assert text_error(Layer(), tables, forged, 3) < EXACT


class Watched(Sequence[object]):
    """Laws that remember who was looked at; some are not finite."""

    def __init__(self, laws, broken: frozenset[int] = frozenset()) -> None:  # type: ignore[no-untyped-def]
        self.laws, self.broken, self.seen = laws, broken, set[int]()

    def __len__(self) -> int:
        return len(self.laws)

    def __getitem__(self, node):  # type: ignore[no-untyped-def]
        self.seen.add(node)
        if node in self.broken:
            raise NonFiniteLogitsError(f"node {node}")
        return self.laws[node]


def test_many_requests_decide_as_one_by_one() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    tapes = torch.rand(
        12, 60, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).tolist()
    ways = ("iid", "without_replacement", "top", "greedy_plus_one")

    def scored(row: int) -> ScoredTree:
        tree = grown(
            fixed_width(tables, (2, 2)[: 1 + row % 2], ways[row % 4]), TapeDraws(tapes[row][:20])
        )
        broken = frozenset({0} if row == 5 else ())
        return ScoredTree(
            tree=tree,
            target_laws=Watched(tables.laws(tree), broken),
            draws=TapeDraws(tapes[row][20:]),
        )

    together = Layer().verify_many([scored(row) for row in range(12)])
    for row, outcome in enumerate(together):
        if row == 5:
            assert isinstance(outcome, NonFiniteLogitsError)
            with pytest.raises(NonFiniteLogitsError, match="node 0"):
                Layer().verify(scored(row).tree, scored(row).target_laws, scored(row).draws)
        else:
            alone = scored(row)
            assert outcome == Layer().verify(alone.tree, alone.target_laws, alone.draws)
    assert Traversal().verify_many([scored(5)])[0].args == ("node 0",)  # type: ignore[union-attr]


def test_a_law_that_is_needed_in_the_end_may_be_missing() -> None:
    tables = random_tables(vocab=3, depth=1, seed=1)
    same = Tables(tables.targets, tables.targets)
    tree = grown(fixed_width(same, (1,), "iid"), TapeDraws([0.5]))
    laws = Watched(same.laws(tree), frozenset({1}))
    (outcome,) = Layer("recursive_rejection").verify_many(
        [ScoredTree(tree=tree, target_laws=laws, draws=TapeDraws([0.5] * 9))]
    )
    assert isinstance(outcome, NonFiniteLogitsError)


def test_only_the_laws_that_matter_are_looked_at() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    targets = {path: [0, 1, 1] if not path else law for path, law in tables.targets.items()}
    zero = Tables(targets, tables.drafts)

    def children(path: Path) -> Proposal | None:
        return Deterministic((0, 1)) if len(path) < 2 else None

    tree = grown(children, TapeDraws(()))
    laws = Watched(zero.laws(tree))
    assert tree.token_ids[1] == 0
    Layer().verify(tree, laws, TapeDraws([0.3] * 9))
    assert 0 in laws.seen
    assert 1 not in laws.seen  # the target gives its token no mass
    # Two nodes with candidates and w > 0, and the one that is stopped at.
    assert len(laws.seen) <= 3


def test_kept_by_a_node_without_candidates() -> None:
    tables = random_tables(vocab=3, depth=1, seed=1)
    assert NodeResidual(node=0, mass=1.0).law([tables.target(())]).prob(0) == tables.target(
        ()
    ).prob(0)

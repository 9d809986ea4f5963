"""Wrong rules on banks of forty laws: each is seen, and each of its exact neighbours passes."""

import pytest

from monge.core.errors import LawError
from monge.draft.tree.children import way_of_drawing
from monge.laws.law import DenseLaw
from monge.laws.proposal import (
    Deterministic,
    Iid,
    PathDraws,
    Proposal,
    WithoutReplacement,
)
from monge.oracle.exact_law import exact_law
from monge.transport.closed_forms import k_seq_constants
from monge.verify.base import NodeRule, Verifier
from monge.verify.block import Block
from monge.verify.greedy import Greedy
from monge.verify.multipath_block import MultipathBlock
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.registry import VERIFIERS
from monge.verify.speculative_sampling import SpeculativeSampling
from monge.verify.traversal import Traversal
from tests.kit.banks import bank, certain_bank, near_bank
from tests.kit.known_bad import BonusLeftOut, TokenLevelResidual
from tests.kit.known_bad_nodes import (
    HARMLESS_NODES,
    KNOWN_BAD_NODES,
    CertainShortcut,
    Mutant,
    SmallResidualDropped,
)
from tests.kit.strategies import dense_law
from tests.verify.acceptance import EXACT
from tests.verify.programs import remembered_programs  # noqa: F401
from tests.verify.whole_trees import Tables, expected_accepted, random_tables, text_error

SEEN = 1e-6
"""Total variation above which a rule counts as wrong."""


def distance(mutant: Mutant, p: DenseLaw, q: DenseLaw) -> float:
    """Total variation of the emitted token's law from p."""
    law = exact_law(lambda draws: mutant.emit(p, q, draws))
    return 0.5 * sum(abs(law.get(token, 0.0) - mass) for token, mass in enumerate(p.probs.tolist()))


@pytest.mark.parametrize("name", KNOWN_BAD_NODES)
def test_wrong_rules_are_seen(name: str) -> None:
    assert any(distance(KNOWN_BAD_NODES[name], p, q) > SEEN for p, q in bank())


@pytest.mark.parametrize("name", HARMLESS_NODES)
def test_their_neighbours_pass(name: str) -> None:
    assert max(distance(HARMLESS_NODES[name], p, q) for p, q in bank()) < EXACT


@pytest.mark.parametrize("name", [*KNOWN_BAD_NODES, *HARMLESS_NODES])
def test_a_rule_that_has_nothing_left_to_emit_has_a_law(name: str) -> None:
    """p = q: all candidates can be accepted, but for the rounding of a solver."""
    mutant = (KNOWN_BAD_NODES | HARMLESS_NODES)[name]
    for p, _ in bank(6, vocab=3):
        assert distance(mutant, p, p) <= 1.0


def test_a_shortcut_for_an_almost_certain_token_is_seen() -> None:
    shortcut, exact = (
        Mutant(rule=rule, drawn=lambda q: way_of_drawing("greedy_plus_one").propose(q, 2))
        for rule in (CertainShortcut(), Greedy())
    )
    assert all(distance(shortcut, p, q) > SEEN for p, q in certain_bank())
    assert max(distance(exact, p, q) for p, q in certain_bank()) < EXACT
    assert max(distance(shortcut, p, q) for p, q in bank()) < EXACT  # it is never taken there


def test_a_small_residual_is_no_rounding() -> None:
    dropped, exact = (
        Mutant(rule=rule, drawn=lambda q: Iid(q, 1))
        for rule in (SmallResidualDropped(), SpeculativeSampling())
    )
    assert all(distance(dropped, p, q) > SEEN for p, q in near_bank())
    assert max(distance(exact, p, q) for p, q in near_bank()) < EXACT
    assert max(distance(dropped, p, p) for p, _ in near_bank()) < EXACT  # nothing is ever rejected


def test_a_negative_residual_is_refused() -> None:
    p, q = (dense_law(weights).probs.numpy() for weights in ([5, 3, 2], [2, 3, 5]))
    exact = k_seq_constants(p, q, 2).rho
    with pytest.raises(LawError, match="the residual would be negative"):
        k_seq_constants(p, q, 2, rho=0.99 * exact)


def test_a_point_mass_declared_for_draws_only_loses_acceptance() -> None:
    """One-hot laws for sampled candidates, with the residual that belongs to them, are sample and match."""
    told = Mutant(
        rule=RecursiveRejection(),
        drawn=lambda q: Iid(q, 1),
        declared=lambda q: Deterministic(q.top(1)),
    )
    for p, q in bank()[:10]:
        assert distance(told, p, q) < EXACT

        def hit(draws, p=p, q=q):  # type: ignore[no-untyped-def]
            candidates = Iid(q, 2).draw(draws)
            return (
                RecursiveRejection().emit(
                    p,
                    Deterministic(tuple(dict.fromkeys(candidates))),
                    tuple(dict.fromkeys(candidates)),
                    draws,
                )
                in candidates
            )

        offered = 1.0 - (1.0 - q.probs) ** 2
        assert exact_law(hit).get(True, 0.0) == pytest.approx(float(p.probs @ offered), abs=EXACT)


EQUAL = dense_law([5, 3, 2, 1])


@pytest.mark.parametrize("name", [name for name in VERIFIERS if VERIFIERS.make(name).is_enumerable])
def test_equal_laws_are_no_edge(name: str) -> None:
    """p = q: every residual is empty, and nothing is divided by its mass."""
    rule = VERIFIERS.make(name)
    kinds: tuple[Proposal, ...] = (
        Iid(EQUAL, 1),
        Iid(EQUAL, 2),
        WithoutReplacement(EQUAL, 2),
    )
    for proposal in kinds:
        if (
            isinstance(rule, NodeRule)
            and type(proposal) in rule.accepts
            and (rule.max_width or 2) >= 2
        ):
            emit = Mutant(rule=rule, drawn=lambda _, proposal=proposal: proposal)
            assert distance(emit, EQUAL, EQUAL) < EXACT


def chain(tables: Tables, depth: int):  # type: ignore[no-untyped-def]
    return lambda path: Iid(tables.draft(path)) if len(path) < depth else None


def test_a_token_level_residual_is_seen_in_a_block() -> None:
    errors = []
    for seed in range(40):
        tables = random_tables(vocab=3, depth=2, seed=seed)
        errors.append(text_error(TokenLevelResidual(), tables, chain(tables, 2), 3))
    assert sum(error > SEEN for error in errors) >= 5  # right on many laws: a bank is needed


def test_a_missing_bonus_token_only_costs_a_token() -> None:
    for seed in range(5):
        tables = random_tables(vocab=3, depth=2, seed=seed)
        assert text_error(BonusLeftOut(), tables, chain(tables, 2), 3) < EXACT
        full, short = (
            expected_accepted(rule, tables, chain(tables, 2)) for rule in (Block(), BonusLeftOut())
        )
        # Tokens a round are one more than these: the count shows what the law cannot.
        assert short < full - SEEN


@pytest.mark.parametrize(
    "rule", [Block(), Traversal(), MultipathBlock()], ids=lambda rule: type(rule).__name__
)
@pytest.mark.parametrize("equal_from", [0, 1])
def test_equal_laws_at_some_nodes_or_all(rule: Verifier, equal_from: int) -> None:
    tables = random_tables(vocab=3, depth=2, seed=3)
    drafts = {
        path: tables.targets[path] if len(path) >= equal_from else law
        for path, law in tables.drafts.items()
    }
    same = Tables(tables.targets, drafts)
    assert text_error(rule, same, chain(same, 2), 3) < EXACT
    promised = lambda path: PathDraws(same.draft(path), 1) if len(path) < 2 else None  # noqa: E731
    assert text_error(rule, same, promised, 3) < EXACT

"""The law of texts by the very program that a device runs, by enumeration, and wrong programs that must be rejected."""

import math
from collections.abc import Callable

import pytest
import torch

from monge.core.verdict import Verdict
from monge.draft.tree.children import way_of_drawing
from monge.laws.draws import Draws
from monge.laws.law import DenseLaw, LawSequence, SparseLaw
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.laws.tree import TokenTree
from monge.oracle.exact_law import ExactRows
from monge.verify.base import Rule, Verifier
from monge.verify.functional import (
    DraftLaws,
    Verified,
    block,
    layer,
    num_uniforms,
    optimal,
    quantile,
    recursive_rejection,
    speculative_sampling,
    traversal,
)
from monge.verify.functional.where import RowLaws
from monge.verify.layer import Layer
from monge.verify.optimal import Optimal
from monge.verify.problem import verdict_at
from tests.verify.tensor_problems import (
    BUSH,
    PROGRAMS,
    Drawn,
    branches,
    told,
)
from tests.verify.whole_trees import random_tables
from tests.verify.whole_trees import text_error as whole_text_error


class ByProgram(Verifier):
    """Decides as a program does on a uniform inside each branch of its rule."""

    accepts = frozenset[type[Proposal]]({Mixed})

    def __init__(self, program: Callable[..., Verified], rule: Rule) -> None:
        self._program, self._own, self._known = program, rule, dict[tuple[int, ...], tuple]()

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        if tree.token_ids not in self._known:
            laws = [target_laws[node] for node in range(tree.num_nodes)]
            cells = [draws for draws, _ in branches(Drawn(tree, laws), self._own)]
            weights = torch.tensor([math.prod(one.weights) for one in cells], dtype=torch.float64)
            self._known[tree.token_ids] = (
                SparseLaw(torch.arange(len(cells)), weights / weights.sum()),
                self._run(tree, laws, [one.inside for one in cells]),
            )
        law, verdicts = self._known[tree.token_ids]
        path, token, _ = verdicts[draws.categorical(law)]
        return verdict_at(tree, path[-1] if path else 0, token)

    def _run(self, tree: TokenTree, laws: list[DenseLaw], tapes: list[list[float]]):
        size, width = len(tapes), num_uniforms(tree.candidates)
        q = [
            one.law.probs if isinstance(one, Mixed) else torch.zeros(len(laws[0].probs)).double()
            for one in tree.proposals
        ]
        fixed = [len(one.fixed) if isinstance(one, Mixed) else 0 for one in tree.proposals]
        table = [[*row, *[0.5] * (width - len(row))] for row in tapes]
        return told(
            self._program(
                torch.stack([law.probs for law in laws]).expand(size, -1, -1),
                torch.tensor(tree.token_ids).expand(size, -1),
                tree.candidates,
                DraftLaws(torch.stack(q).expand(size, -1, -1)),
                torch.tensor(table, dtype=torch.float64),
                num_fixed=fixed,
            )
        )


class OnDevice(Verifier):
    """Decides by the very function that a device runs, with one request, so that the oracle enumerates it."""

    accepts = frozenset[type[Proposal]]({Proposal})

    def __init__(self, program: Callable[..., Verified]) -> None:
        self._program = program

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        laws = [target_laws[node].probs for node in range(tree.num_nodes)]
        q = [getattr(one, "law", target_laws[0]).probs for one in tree.proposals]
        pairs = zip(tree.proposals, tree.candidates, strict=True)
        fixed = [
            len(one.fixed) if isinstance(one, Mixed) else len(own) * isinstance(one, Deterministic)
            for one, own in pairs
        ]
        ((path, token, _),) = told(
            self._program(
                torch.stack(laws)[None],
                torch.tensor([tree.token_ids]),
                tree.candidates,
                DraftLaws(torch.stack(q)[None]),
                ExactRows(draws),
                **({"num_fixed": fixed} if any(fixed) else {}),
            )
        )
        return verdict_at(tree, path[-1] if path else 0, token)


KINDS = {Iid: "iid", Mixed: "greedy_plus_one", WithoutReplacement: "without_replacement"}


def law_error_of(name: str, program: Callable[..., Verified]) -> float:
    """Error of the law of texts of three tokens, over all trees that a draft law can draw."""
    _, rule, kind, shapes = PROGRAMS[name]
    # Two tokens have more mass under p than under q: after one, any rule that rejects emits it.
    tables, widths = random_tables(vocab=3, depth=2, seed=1), (2, 1) if BUSH in shapes else (1, 1)

    def children(path: tuple[int, ...]) -> Proposal | None:
        width = widths[len(path)] if len(path) < 2 else 0
        if kind is Deterministic and width:
            return Deterministic(tables.draft(path).top(width))
        return way_of_drawing(KINDS[kind]).propose(tables.draft(path), width) if width else None

    is_masked = program.__module__ == __name__ or "optimum" not in program.__module__
    verifier = OnDevice(program) if is_masked else ByProgram(program, rule)
    return whole_text_error(verifier, tables, children, 3)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in {"optimal", "layer"}])
def test_the_law_of_texts_is_the_target_s(name: str) -> None:
    assert law_error_of(name, PROGRAMS[name][0]) < 1e-12


def _accept_all(probs, ids, children, draft, draws):
    return speculative_sampling(probs, ids, DraftLaws(draft.probs.clamp_max(1e-9)), draws)


def _correct_from_target(probs, ids, children, draft, draws):
    found = speculative_sampling(probs, ids, draft, draws)
    at = probs.gather(1, found.num_accepted[:, None, None].expand(-1, 1, probs.shape[2]))
    next_token = draws.categorical(RowLaws(at.squeeze(1)), torch.ones(1, dtype=torch.bool))
    return found._replace(next_token=next_token)


def _of_the_wrong_node(probs, ids, children, draft, draws):
    return block(probs.roll(1, 1), ids, draft, draws)


def _as_independent(probs, ids, children, draft, draws):
    return recursive_rejection(probs, ids, children, draft, draws)


def _all_drawn(probs, ids, children, draft, draws, **_):
    return traversal(probs, ids, children, DraftLaws(draft.probs + 1e-3), draws)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("speculative_sampling", _accept_all),
        ("speculative_sampling", _correct_from_target),
        ("block", _of_the_wrong_node),
        ("without replacement", _as_independent),
        ("traversal", _all_drawn),
        ("mixed traversal", _all_drawn),
    ],
)
def test_wrong_programs_are_rejected(name: str, wrong: Callable[..., Verified]) -> None:
    assert law_error_of(name, wrong) > 1e-4


def _whole_target(probs, ids, children, draft, uniforms, **fixed):
    """What a node keeps is not all of p."""
    found = layer(probs, ids, children, draft, uniforms, **fixed)
    node = torch.cat([torch.zeros_like(ids[:, :1]), found.path], 1)
    node = node.gather(1, found.num_accepted[:, None])
    p = probs.gather(1, node[:, :, None].expand(-1, 1, probs.shape[2])).squeeze(1)
    last = uniforms.gather(1, found.num_uniforms[:, None] - 1).squeeze(1)
    return found._replace(next_token=quantile(p, last))


def _other_drafts(probs, ids, children, draft, uniforms, **fixed):
    return optimal(probs, ids, children, DraftLaws(draft.probs.flip(2)), uniforms, **fixed)


@pytest.mark.parametrize(("wrong", "rule"), [(_whole_target, Layer()), (_other_drafts, Optimal())])
def test_wrong_programs_for_trees_are_rejected(wrong, rule: Rule) -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)

    def children(path: tuple[int, ...]) -> Proposal | None:
        width = (2, 1)[len(path)] if len(path) < 2 else 0
        return (
            way_of_drawing("greedy_plus_one").propose(tables.draft(path), width) if width else None
        )

    assert whole_text_error(ByProgram(wrong, rule), tables, children, 3) > 1e-3

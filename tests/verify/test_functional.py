"""Tensor programs of the rules: for equal uniforms the verdict of the object, and the target's law by enumeration."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from monge.core.draws import Draws, TapeDraws
from monge.core.errors import OptionError, ProposalMismatchError
from monge.core.law import DenseLaw, Law, LawSequence, SparseLaw, trusted_law
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.tree.children import children_of as children_kind
from monge.testing.oracle import ExactDraws, ExactRows
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.block import Block
from monge.verify.functional import (
    DraftLaws,
    Verified,
    block,
    children_of,
    exact_match,
    layer,
    num_uniforms,
    optimal,
    probs_from_logits,
    quantile,
    recursive_rejection,
    speculative_sampling,
    target_walk,
    traversal,
)
from monge.verify.functional.masked import RowLaws
from monge.verify.layer import Layer
from monge.verify.optimal import Optimal
from monge.verify.problem import verdict_at
from monge.verify.rrs import Rrs
from monge.verify.rrs_without_replacement import RrsWithoutReplacement
from monge.verify.single_draft import SingleDraft
from monge.verify.target_walk import TargetWalk
from monge.verify.traversal import Traversal
from tests.engine import cuda_waits, pretend
from tests.verify.whole_trees import random_tables
from tests.verify.whole_trees import text_error as whole_text_error

VOCAB = 5
BELOW_ONE = math.nextafter(1, 0)
CHAIN = (-1, 0, 1, 2)
BUSH = (-1, 0, 0, 1, 1, 2)
STAR = (-1, 0, 0, 0)
REGIMES = ("rough", "ties", "zeros", "one-hot", "equal", "tiny masses")


def without(probs, token_ids, children, draft, uniforms, **_):
    return recursive_rejection(probs, token_ids, children, draft, uniforms, replacement=False)


def on_chain(rule: Callable[..., Verified]) -> Callable[..., Verified]:
    return lambda probs, token_ids, children, draft, uniforms, **_: rule(
        probs, token_ids, draft, uniforms
    )


PROGRAMS: dict[str, tuple[Callable[..., Verified], Rule, type, tuple[tuple[int, ...], ...]]] = {
    "speculative_sampling": (on_chain(speculative_sampling), SingleDraft(), Iid, (CHAIN, (-1,))),
    "block": (on_chain(block), Block(), Iid, (CHAIN, (-1,), (-1, 0))),
    "recursive_rejection": (recursive_rejection, Rrs(), Iid, (CHAIN, BUSH, STAR)),
    "without replacement": (without, RrsWithoutReplacement(), WithoutReplacement, (BUSH, STAR)),
    "traversal": (traversal, Traversal(), WithoutReplacement, (BUSH, STAR, CHAIN)),
    "target_walk": (
        lambda probs, token_ids, children, draft, uniforms, **_: target_walk(
            probs, token_ids, children, uniforms
        ),
        TargetWalk(),
        Deterministic,
        (BUSH, CHAIN, (-1,)),
    ),
    "mixed recursive_rejection": (recursive_rejection, Rrs(), Mixed, (BUSH, STAR)),
    "mixed traversal": (traversal, Traversal(), Mixed, (BUSH, STAR)),
    "optimal": (optimal, Optimal(), Iid, (BUSH, STAR, CHAIN)),
    "mixed optimal": (optimal, Optimal(), Mixed, (BUSH, STAR)),
    "layer": (layer, Layer(), Iid, (BUSH, STAR, CHAIN)),
    "mixed layer": (layer, Layer(), Mixed, (BUSH, STAR)),
}


@dataclass(frozen=True)
class Problem:
    """One scored tree, for the object and for the program.

    Args:
        num_fixed: Deterministic candidates of each node; empty for none.
        times: How often each other candidate was drawn.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    p: Tensor
    q: Tensor
    kind: type
    num_fixed: tuple[int, ...] = ()
    times: int = 1

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        fixed = self.num_fixed or (0,) * len(self.parents)
        pairs = zip(children_of(self.parents), fixed, strict=True)
        return tuple((*own[:count], *own[count:] * self.times) for own, count in pairs)

    @property
    def tree(self) -> TokenTree:
        return TokenTree(
            token_ids=self.token_ids,
            parents=self.parents,
            candidates=self.children,
            proposals=tuple(map(self._proposal, range(len(self.parents)))),
        )

    def _proposal(self, node: int) -> Proposal:
        tokens = tuple(self.token_ids[child] for child in self.children[node])
        fixed = len(tokens) if self.kind is Deterministic else (self.num_fixed or {node: 0})[node]
        if fixed == len(tokens):
            return Deterministic(tokens)
        law, count = trusted_law(self.q[node]), len(tokens) - fixed
        if self.kind is Mixed:
            return Mixed(tokens[:fixed], law, count)
        return self.kind(law, count)

    @property
    def laws(self) -> list[Law]:
        return [trusted_law(row) for row in self.p]

    def run(
        self, program: Callable[..., Verified], uniforms: Sequence[Sequence[float]]
    ) -> Verified:
        return self.call(program, uniforms, "cpu")()

    def call(
        self, program: Callable[..., Verified], uniforms: Sequence[Sequence[float]], device: str
    ) -> Callable[[], Verified]:
        """The program with these uniforms, on tensors that lie on a device already."""
        children = self.children
        size, width = len(uniforms), num_uniforms(children)
        table = torch.tensor(
            [[*row[:width], *[0.5] * (width - len(row))] for row in uniforms], dtype=torch.float64
        )
        return partial(
            program,
            self.p.to(device).expand(size, -1, -1),
            torch.tensor(self.token_ids, device=device).expand(size, -1),
            children,
            DraftLaws(self.q.to(device).expand(size, -1, -1)),
            table.to(device),
            **({"num_fixed": self.num_fixed} if self.num_fixed else {}),
        )


def masses(regime: str, rng: np.random.Generator) -> np.ndarray:
    if regime == "ties":
        weights = rng.integers(0, 3, VOCAB) + (np.arange(VOCAB) == rng.integers(VOCAB))
    elif regime == "zeros":
        weights = rng.dirichlet(np.ones(VOCAB)) * (rng.random(VOCAB) < 0.6)
        weights[rng.integers(VOCAB)] += 0.5
    elif regime == "one-hot":
        weights = np.eye(VOCAB)[rng.integers(VOCAB)]
    elif regime == "tiny masses":
        weights = rng.dirichlet(np.ones(VOCAB)) * 10.0 ** -rng.integers(0, 300, VOCAB)
        weights[rng.integers(VOCAB)] += 0.5
    else:
        weights = rng.dirichlet(np.ones(VOCAB))
    return weights / weights.sum()


def problem(
    regimes: tuple[str, str],
    parents: tuple[int, ...],
    kind: type,
    seed: int,
    *,
    can_fix_all: bool = True,
) -> Problem:
    """Laws that depend on the path, and candidates that their draft law can have drawn."""
    rng = np.random.default_rng(seed)
    p = np.stack([masses(regimes[0], rng) for _ in parents])
    q = np.stack([masses(regimes[1], rng) for _ in parents])
    if regimes[1] == "equal":
        q = p.copy()
    tokens, num_fixed = [0] * len(parents), [0] * len(parents)
    for node in range(len(parents)):
        own = [child for child, parent in enumerate(parents) if parent == node]
        fixed = list[int]()
        if kind is Mixed and own:
            takes_all = can_fix_all and node and rng.random() < 0.3
            num_fixed[node] = len(own) if takes_all else len(own) // 2
            fixed = rng.choice(VOCAB, num_fixed[node], replace=False).tolist()
            q[node, fixed] = 0.0
        num_drawn = len(own) - len(fixed)
        if (q[node] > 0).sum() < num_drawn:
            q[node] = np.isin(np.arange(VOCAB), fixed, invert=True) / (VOCAB - len(fixed))
        if fixed and num_drawn:
            q[node] /= q[node].sum()
        # Distinct, as trees of objects hold a token once.
        drawn = rng.choice(VOCAB, num_drawn, replace=False, p=q[node]).tolist() if num_drawn else []
        for child, token in zip(own, fixed + drawn, strict=True):
            tokens[child] = token
    is_sparing = kind is Iid and rng.random() < 0.3
    return Problem(
        parents,
        tuple(tokens),
        torch.from_numpy(p),
        torch.from_numpy(q),
        kind,
        tuple(num_fixed) if any(num_fixed) else (),
        2 if is_sparing and len(set(parents)) < len(parents) else 1,
    )


class Cells(ExactDraws):
    """Enumerates branches, and notes a uniform inside each branch and those at its borders."""

    def __init__(self, script: list[int], arity: list[int]) -> None:
        super().__init__(script, arity)
        self.inside: list[float] = []
        self.borders: list[tuple[float, ...]] = []

    def uniform(self) -> float:
        """A position has no branches: it depends on its place."""
        position = (0.5 + 0.6180339887 * len(self.inside)) % 1.0
        self.inside.append(position)
        self.borders.append(())
        return position

    def bernoulli(self, prob: float) -> bool:
        found = super().bernoulli(prob)
        self.inside.append(prob / 2 if found else min((1 + prob) / 2, BELOW_ONE))
        self.borders.append(beside([prob]))
        return found

    def categorical(self, law: Law) -> int:
        token = super().categorical(law)
        part = law.sparse()
        sums = [0.0, *part.probs.cumsum(0).tolist()]
        place = part.token_ids.tolist().index(token)
        middle = (sums[place] + sums[place + 1]) / 2 / sums[-1]
        self.inside.append(min(middle, BELOW_ONE))
        self.borders.append(beside([edge / sums[-1] for edge in sums]))
        return token


def beside(edges: Sequence[float]) -> tuple[float, ...]:
    """Uniforms on every threshold, and one unit in the last place to both sides."""
    near = [
        value
        for edge in edges
        for value in (edge, math.nextafter(edge, 0), math.nextafter(edge, 1))
    ]
    return tuple(value for value in near if 0.0 <= value < 1.0)


def branches(one: "Problem | Drawn", rule: Rule) -> list[tuple[Cells, Verdict]]:
    found, script, arity = list[tuple[Cells, Verdict]](), list[int](), list[int]()
    verifier = as_verifier(rule)
    while True:
        draws = Cells(script, arity)
        found.append((draws, verifier.verify(one.tree, one.laws, draws)))
        arity = list(draws.arity)
        while script and script[-1] + 1 == arity[len(script) - 1]:
            script.pop()
            arity.pop()
        if not script:
            return found
        script[-1] += 1


def told(verified: Verified) -> list[tuple[tuple[int, ...], int, int]]:
    rows = zip(
        verified.path.tolist(),
        verified.num_accepted.tolist(),
        verified.next_token.tolist(),
        verified.num_uniforms.tolist(),
        strict=True,
    )
    found = []
    for path, count, token, used in rows:
        assert all(node == -1 for node in path[count:])
        found.append((tuple(path[:count]), token, used))
    return found


PROBLEMS = st.tuples(
    st.sampled_from(REGIMES), st.sampled_from(REGIMES), st.integers(0, 2**32 - 1), st.integers(0, 2)
)


@pytest.mark.parametrize("name", PROGRAMS)
@given(chosen=PROBLEMS)
def test_equal_uniforms_give_the_verdict_of_the_object(name: str, chosen) -> None:
    """On, and one unit beside, every threshold of every branch."""
    program, rule, kind, shapes = PROGRAMS[name]
    *regimes, seed, shape = chosen
    is_plain = kind is not Mixed or not isinstance(rule, Rrs)  # which draws once from p there
    if not is_plain and regimes[1] == "equal":
        regimes[1] = "rough"  # rejected by rounding alone, what is left of p may be a candidate
    one = problem(tuple(regimes), shapes[shape % len(shapes)], kind, seed, can_fix_all=is_plain)
    rng, verifier = np.random.default_rng(seed), as_verifier(rule)
    rest = rng.random(num_uniforms(one.children)).tolist()

    def decided(row: Sequence[float]) -> tuple[tuple[int, ...], int, int]:
        draws = TapeDraws([*row, *rest])
        verdict = verifier.verify(one.tree, one.laws, draws)
        return verdict.path, verdict.next_token, draws.num_drawn

    tapes = list[list[float]]()
    for draws, _ in branches(one, rule):
        for place, borders in enumerate(draws.borders):
            before, after = draws.inside[:place], draws.inside[place + 1 :]
            is_position = not borders and len(tapes) < 100
            values = (
                jumps(lambda value: decided([*before, value, *after]), rng)  # noqa: B023
                if is_position
                else borders
            )
            tapes += [[*before, value, *after] for value in values]
    tapes = [[*row, *rest] for row in tapes]
    assert told(one.run(program, tapes)) == list(map(decided, tapes))


def jumps(outcome: Callable[[float], object], rng: np.random.Generator) -> list[float]:
    """Uniforms at both sides of places where the outcome changes, to the last bit."""
    points = [0.0, *sorted(rng.random(3).tolist()), BELOW_ONE]
    found = list(points)
    for ends in zip(points[:-1], points[1:], strict=True):
        low, high = ends
        first = outcome(low)
        if outcome(high) != first:
            while low < (middle := (low + high) / 2) < high:
                low, high = (middle, high) if outcome(middle) == first else (low, middle)
            found += [low, high, math.nextafter(low, 0.0), math.nextafter(high, 1.0)]
    return [value for value in found if value < 1.0]


@dataclass(frozen=True)
class Drawn:
    """A drawn tree, with the laws of the target."""

    tree: TokenTree
    laws: Sequence[DenseLaw]


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
        return children_kind(KINDS[kind], tables.draft(path), width) if width else None

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
        return children_kind("greedy_plus_one", tables.draft(path), width) if width else None

    assert whole_text_error(ByProgram(wrong, rule), tables, children, 3) > 1e-3


@given(seed=st.integers(0, 2**32 - 1))
def test_a_token_drawn_twice_is_tested_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = torch.from_numpy(np.stack([masses("rough", rng), masses("rough", rng)]))
    x = int(rng.integers(VOCAB))
    tree = TokenTree(
        token_ids=(0, x),
        parents=(-1, 0),
        proposals=(Iid(trusted_law(q), 2), Deterministic()),
        candidates=((1, 1), ()),
    )
    uniforms = rng.random((20, 3))
    expected = []
    for row in uniforms.tolist():
        verdict = as_verifier(Rrs()).verify(tree, [trusted_law(p)] * 2, TapeDraws(row))
        expected.append((verdict.path, verdict.next_token))
    found = recursive_rejection(
        p.expand(20, 2, -1),
        torch.tensor([0, x]).expand(20, -1),
        ((1, 1), ()),
        DraftLaws(q.expand(20, 2, -1)),
        torch.from_numpy(uniforms),
    )
    assert [(path, token) for path, token, _ in told(found)] == expected


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "target_walk"])
def test_laws_of_a_few_tokens_give_the_verdicts_of_whole_laws(name: str) -> None:
    program, _, kind, shapes = PROGRAMS[name]
    rng = np.random.default_rng(5)
    for seed in range(40):
        one = problem(("rough", "zeros"), shapes[seed % len(shapes)], kind, seed)
        uniforms = torch.from_numpy(rng.random((30, 3 * len(one.parents))))
        size = len(uniforms)
        q = one.q.scatter(1, one.q.argmin(1, keepdim=True), 0.0)
        q = q / q.sum(1, keepdim=True)
        ids = q.argsort(-1, descending=True)[:, : VOCAB - 1]
        tokens = torch.tensor(one.token_ids)
        drafted = [
            q[parent, token] for parent, token in zip(one.parents[1:], tokens[1:], strict=True)
        ]
        if any(float(mass) == 0.0 for mass in drafted):
            continue
        whole, few = (
            program(
                one.p.expand(size, -1, -1),
                tokens.expand(size, -1),
                children_of(one.parents),
                draft,
                uniforms,
            )
            for draft in (
                DraftLaws(q.expand(size, -1, -1)),
                DraftLaws(q.gather(1, ids).expand(size, -1, -1), ids.expand(size, -1, -1)),
            )
        )
        assert told(whole) == told(few)


@given(seed=st.integers(0, 2**32 - 1))
def test_exact_match_is_the_target_walk_of_point_masses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = problem(("rough", "rough"), BUSH, Deterministic, seed)
    logits = torch.from_numpy(rng.integers(0, 3, (1, len(BUSH), VOCAB))).float()  # with ties
    laws = [law_from_logits(row, SamplingRules(temperature=0)) for row in logits[0]]
    verdict = as_verifier(TargetWalk()).verify(one.tree, laws, TapeDraws([0.5] * 9))
    ((path, token, used),) = told(
        exact_match(logits, torch.tensor([one.token_ids]), children_of(BUSH))
    )
    assert (path, token, used) == (verdict.path, verdict.next_token, 0)


def _padded(one: Problem, num_nodes: int, token_id: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Laws and tokens of a chain, with nodes behind it that it does not have."""
    missing = num_nodes - len(one.parents)
    rows = torch.full((missing, VOCAB), 1 / VOCAB, dtype=torch.float64)
    token_ids = torch.tensor([*one.token_ids, *[token_id] * missing])
    return torch.cat([one.p, rows]), torch.cat([one.q, rows]), token_ids


def _together(name: str, chains: Sequence[Problem], rows: Tensor, padding: int = -1) -> Verified:
    size = 1 + max(len(one.parents) for one in chains)
    p, q, token_ids = map(
        torch.stack, zip(*(_padded(one, size, padding) for one in chains), strict=True)
    )
    children = children_of(range(-1, size - 1))
    return PROGRAMS[name][0](p, token_ids, children, DraftLaws(q), rows)


@pytest.mark.parametrize("name", ["block", "target_walk"])
@given(seed=st.integers(0, 2**32 - 1), regimes=st.tuples(*[st.sampled_from(REGIMES)] * 2))
def test_chains_of_several_lengths_are_verified_together(name, seed, regimes) -> None:
    kind = PROGRAMS[name][2]
    chains = [
        problem(regimes, tuple(range(-1, length)), kind, seed + length)
        for length in (3, 0, 1, 2) * 5
    ]
    rows = torch.from_numpy(np.random.default_rng(seed).random((len(chains), 12)))
    found = told(_together(name, chains, rows))
    alone = [
        told(one.run(PROGRAMS[name][0], [row.tolist()]))[0]
        for one, row in zip(chains, rows, strict=True)
    ]
    assert found == alone


def test_padding_that_is_taken_for_a_token_is_noticed() -> None:
    """The control: candidates that nobody drew are accepted."""
    chains = [problem(("rough", "equal"), (-1, 0), Iid, seed) for seed in range(9)]
    rows = torch.from_numpy(np.random.default_rng(0).random((9, 12)))
    right, wrong = (told(_together("block", chains, rows, padding)) for padding in (-1, 0))
    assert max(len(path) for path, _, _ in right) == 1 < max(len(path) for path, _, _ in wrong)


@pytest.mark.parametrize("name", ["block", "target_walk", "exact_match"])
def test_no_token_follows_bad_logits_into_padding(name: str) -> None:
    one = problem(("rough", "rough"), (-1, 0), Deterministic, 1)
    broken = Problem(one.parents, one.token_ids, one.p.clone(), one.q, Deterministic)
    broken.p[1] = math.nan
    p, q, token_ids = (part[None] for part in _padded(broken, 4))
    children, uniforms = children_of(range(-1, 3)), torch.zeros(1, 12, dtype=torch.float64)
    p[0, 0] = q[0, 0] = torch.eye(VOCAB)[one.token_ids[1]].double()
    found = (
        exact_match(p.log(), token_ids, children)
        if name == "exact_match"
        else PROGRAMS[name][0](p, token_ids, children, DraftLaws(q), uniforms)
    )
    assert found.next_token.tolist() == [-1]


RULES = [
    SamplingRules(),
    SamplingRules(temperature=0),
    SamplingRules(temperature=0.7),
    SamplingRules(temperature=1e-300),
    SamplingRules(top_k=2),
    SamplingRules(temperature=1.5, top_p=0.8),
    SamplingRules(min_p=0.3),
    SamplingRules(temperature=0.5, top_k=4, top_p=0.9, min_p=0.05),
]


@given(seed=st.integers(0, 2**32 - 1), is_coarse=st.booleans())
def test_laws_of_logits_are_those_of_the_sampling_rules(seed: int, is_coarse: bool) -> None:
    """One rule at a time with plain numbers, and all of them in one batch."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, (1, 2, 7)) if is_coarse else 3 * rng.normal(size=(1, 2, 7))
    logits = torch.from_numpy(values).float()

    def expected(rules: SamplingRules) -> Tensor:
        parts = [law_from_logits(row, rules).sparse() for row in logits[0]]
        return torch.stack(
            [torch.zeros(7).double().scatter(0, part.token_ids, part.probs) for part in parts]
        )

    for rules in RULES:
        found = probs_from_logits(
            logits,
            temperature=rules.temperature,
            top_k=rules.top_k,
            top_p=rules.top_p if rules.top_p < 1 else None,
            min_p=rules.min_p or None,
        )
        torch.testing.assert_close(found[0], expected(rules), rtol=0, atol=1e-15)
    together = probs_from_logits(
        logits.expand(len(RULES), -1, -1),
        temperature=torch.tensor(
            [float(rules.temperature) for rules in RULES], dtype=torch.float64
        ),
        top_k=torch.tensor([rules.top_k or 7 for rules in RULES]),
        top_p=torch.tensor([float(rules.top_p) for rules in RULES], dtype=torch.float64),
        min_p=torch.tensor([float(rules.min_p) for rules in RULES], dtype=torch.float64),
    )
    for found, rules in zip(together, RULES, strict=True):
        torch.testing.assert_close(found, expected(rules), rtol=0, atol=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", PROGRAMS)
def test_logits_that_are_not_finite_give_no_token(name: str, bad: float) -> None:
    program, rule, kind, (shape, *_) = PROGRAMS[name]
    one = problem(("rough", "rough"), shape, kind, 1)
    logits = one.p.log()
    logits[0, 2] = bad
    broken = Problem(one.parents, one.token_ids, probs_from_logits(logits[None])[0], one.q, kind)
    uniforms = np.random.default_rng(0).random((50, 3 * len(shape))).tolist()
    assert set(broken.run(program, uniforms).next_token.tolist()) == {-1}
    greedy = exact_match(logits[None], torch.tensor([one.token_ids]), children_of(shape))
    assert greedy.next_token.tolist() == [-1]


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_no_token_follows_a_bad_node_further_down(name: str) -> None:
    program, _, kind, _ = PROGRAMS[name]
    one = problem(("rough", "equal"), CHAIN, kind, 1)
    p = one.p.clone()
    p[1] = math.nan
    broken = Problem(CHAIN, one.token_ids, p, one.q, kind)
    uniforms = np.random.default_rng(0).random((50, len(CHAIN))).tolist()
    assert set(broken.run(program, uniforms).next_token.tolist()) == {-1}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_waits_and_no_shape_depends_on_data(name: str) -> None:
    """Tensors without data: a program that asks for a number would raise."""
    program, _, _, (shape, *_) = PROGRAMS[name]
    num_nodes = len(shape)
    program(  # the tables of a shape are made once
        torch.full((1, num_nodes, VOCAB), 1 / VOCAB, dtype=torch.float64),
        torch.zeros(1, num_nodes, dtype=torch.int64),
        children_of(shape),
        DraftLaws(torch.full((1, num_nodes, VOCAB), 1 / VOCAB, dtype=torch.float64)),
        torch.zeros(1, 3 * num_nodes, dtype=torch.float64),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(3, num_nodes, VOCAB)
        found = program(
            probs_from_logits(logits, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1),
            torch.empty(3, num_nodes, dtype=torch.int64),
            children_of(shape),
            DraftLaws(torch.empty(3, num_nodes, VOCAB, dtype=torch.float64)),
            torch.empty(3, 3 * num_nodes, dtype=torch.float64),
        )
    assert found.next_token.shape == (3,)


COMPILED = """
import torch
from monge.verify import functional as f

def decide(logits, heat, token_ids, q, uniforms):
    probs, shape = f.probs_from_logits(logits, temperature=heat, top_p=0.9), f.children_of((-1, 0, 1))
    laws = f.DraftLaws(q)
    yield f.exact_match(logits, token_ids, shape)
    yield f.target_walk(probs, token_ids, shape, uniforms)
    for program in (f.block, f.speculative_sampling):
        yield program(probs, token_ids, laws, uniforms)
    for program in (f.recursive_rejection, f.traversal, f.optimal, f.layer):
        yield program(probs, token_ids, shape, laws, uniforms)

def decide_all(*inputs):
    return list(decide(*inputs))

logits, q = torch.randn(4, 3, 9), torch.randn(4, 3, 9).double().softmax(-1)
token_ids, uniforms = torch.randint(9, (4, 3)), torch.rand(4, 9, dtype=torch.float64)
inputs = logits, torch.full((4,), 0.7), token_ids, q, uniforms
expected = decide_all(*inputs)  # the tables of a shape are made once
found = torch.compile(decide_all, backend="eager", fullgraph=True)(*inputs)
for one, other in zip(found, expected, strict=True):
    assert all(map(torch.equal, one, other))
"""


@pytest.mark.slow
def test_programs_are_compiled_whole() -> None:
    """Apart from this process, whose type checks are in the way."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("regimes", [("rough", "rough"), ("zeros", "tiny masses")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cuda_device_gives_the_verdicts_of_the_cpu(name: str, regimes: tuple[str, str]) -> None:
    """Without a wait, and from a captured graph as well."""
    program, _, kind, shapes = PROGRAMS[name]
    for shape in shapes:
        one = problem(regimes, shape, kind, 1)
        uniforms = np.random.default_rng(0).random((200, 2 * len(shape))).tolist()
        call = one.call(program, uniforms, "cuda")
        call()  # the tables of a shape are made once
        with cuda_waits.counted() as waits:
            found = call()
            assert waits() == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        assert told(found) == told(captured) == told(one.run(program, uniforms))


def test_too_few_uniforms_and_wrong_shapes_are_refused() -> None:
    one = problem(("rough", "rough"), CHAIN, Iid, 0)
    arguments = one.p[None], torch.tensor([one.token_ids]), DraftLaws(one.q[None])
    with pytest.raises(OptionError, match=r"uniforms: got 2 a request; these trees need 4"):
        block(*arguments, torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ProposalMismatchError, match=r"expected -1 for node 0"):
        children_of((0, 0, 1, 2))
    with pytest.raises(ProposalMismatchError, match=r"children of node 1: got \(1,\); expected"):
        target_walk(*arguments[:2], ((1,), (1,), (3,), ()), torch.zeros(1, 4, dtype=torch.float64))
    with pytest.raises(ProposalMismatchError, match=r"token_ids have 4 nodes, but children has 3"):
        target_walk(*arguments[:2], ((1,), (2,), ()), torch.zeros(1, 4, dtype=torch.float64))


def given(name: str, device: str = "cpu", **changes) -> dict:
    """Arguments of a program by name, for two requests, some of them changed."""
    program, _, kind, (shape, *_) = PROGRAMS[name]
    one = problem(("rough", "rough"), shape, kind, 1)
    arguments = {
        "probs": one.p.expand(2, -1, -1),
        "token_ids": torch.tensor([one.token_ids] * 2),
        "children": one.children,
        "draft": DraftLaws(one.q.expand(2, -1, -1)),
        "uniforms": torch.full((2, num_uniforms(one.children)), 0.5, dtype=torch.float64),
    }
    arguments |= {key: change(arguments[key].clone()) for key, change in changes.items()}
    placed = {
        key: own.to(device) if isinstance(own, Tensor) else own for key, own in arguments.items()
    }
    placed["draft"] = DraftLaws(placed["draft"].probs.to(device))
    return placed


def spoilt(place: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    """Set one number."""

    def change(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return change


WRONG_NUMBERS = {
    "a uniform of one": ("uniforms", (1, 0), 1.0, "got 1.0 in row 1; expected numbers in [0, 1)"),
    "a negative uniform": ("uniforms", (1, 0), -0.1, "got -0.1 in row 1; expected numbers in"),
    "no uniform": ("uniforms", (1, 0), math.nan, "got nan in row 1; expected numbers in"),
    "a token beyond": ("token_ids", (1, 1), VOCAB, "got 5 in row 1; expected tokens of a"),
    "a token far beyond": ("token_ids", (1, 1), 1 << 40, "got 1099511627776 in row 1; expected"),
    "a negative token": ("token_ids", (1, 1), -1, "got -1 in row 1; expected tokens of a"),
}
WRONG_SHAPES = {
    "uniforms": (lambda own: own.float(), "uniforms: got torch.float32 .* expected torch.float64"),
    "probs": (lambda own: own.float(), "probs: got torch.float32 .* expected torch.float64"),
    "token_ids": (lambda own: own[:, :1], r"token_ids: .* of shape \(2, 1\); expected .* of shape \(2, "),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_numbers_are_refused_or_give_no_token(name: str, wrong: str) -> None:
    """On a device without a wait, and the other requests are not affected."""
    key, place, value, message = WRONG_NUMBERS[wrong]
    program, right, changed = PROGRAMS[name][0], given(name), {key: spoilt(place, value)}
    if wrong == "a negative token" and name in {"block", "target_walk"}:
        assert program(**given(name, **changed)).next_token.min() >= 0, "padding"
        return
    with pytest.raises(OptionError, match=re.escape(f"{key}: {message}")):
        program(**given(name, **changed))
    expected = told(program(**right))
    with pretend.device() as device:
        arguments = given(name, device, **changed)
        program(**given(name, device))  # the tables of a shape are made once
        pretend.waits.clear()
        found = program(**arguments)
        assert not pretend.waits
        assert found.next_token.tolist()[1] == -1
        assert told(found)[0] == expected[0]


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_shapes_and_types_are_refused(name: str, wrong: str) -> None:
    change, message = WRONG_SHAPES[wrong]
    with pytest.raises(OptionError, match=message):
        PROGRAMS[name][0](**given(name, **{wrong: change}))


def test_draft_laws_of_tokens_that_are_not_there_are_refused_or_give_no_token() -> None:
    right = given("block")
    ids = torch.arange(VOCAB).expand(2, len(CHAIN), -1)
    for wrong in (-1, VOCAB):
        draft = DraftLaws(right["draft"].probs, ids.clone().index_fill(0, torch.tensor(1), wrong))
        with pytest.raises(OptionError, match=f"draft.token_ids: got {wrong} in row 1; expected"):
            block(right["probs"], right["token_ids"], draft, right["uniforms"])
        with pretend.device() as device:
            parts = [right[key].to(device) for key in ("probs", "token_ids", "uniforms")]
            moved = DraftLaws(*(part.to(device) for part in draft))
            found = block(parts[0], parts[1], moved, uniforms=parts[2])
            assert (found.next_token >= 0).tolist() == [True, False]


def test_a_float32_uniform_below_one_is_no_float64_one() -> None:
    """Rounded to float32 it is 1, behind the last token of the vocabulary."""
    probs = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    last = torch.tensor([BELOW_ONE], dtype=torch.float64)
    with pytest.raises(OptionError, match="positions: got torch.float32"):
        quantile(probs, last.float())
    assert quantile(probs, last).tolist() == [VOCAB - 1]
    for bad in (1.0, -0.1, math.nan):
        positions = torch.tensor([bad], dtype=torch.float64)
        with pytest.raises(OptionError, match=r"positions: got .* expected numbers in \[0, 1\)"):
            quantile(probs, positions)
        with pretend.device() as device:
            assert quantile(probs.to(device), positions.to(device)).tolist() == [-1]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1.0, math.nan, math.inf)),
        ("top_k", (0, -3)),
        ("top_p", (0.0, -0.5, 1.5, math.nan)),
        ("min_p", (-0.1, 2.0, math.nan)),
    ],
)
def test_wrong_sampling_rules_are_refused_or_give_no_law(name: str, values) -> None:
    logits, right = torch.randn(2, 3, VOCAB), {"top_k": 2}.get(name, 0.5)
    expected = probs_from_logits(logits, **{name: right})[0]
    types = [torch.int64] if name == "top_k" else [torch.float32, torch.float64]
    for value, dtype in product(values, types):
        row = torch.tensor([right, value], dtype=dtype)
        with pytest.raises(OptionError, match=name):
            probs_from_logits(logits, **{name: value})
        with pytest.raises(OptionError, match=f"{name}: got .* in row 1; expected"):
            probs_from_logits(logits, **{name: row})
        with pretend.device() as device:
            found = probs_from_logits(logits.to(device), **{name: row.to(device)})
            assert not pretend.waits
            assert found[1].isnan().all().item()
            torch.testing.assert_close(found[0].cpu(), expected, rtol=0, atol=1e-15)
    for odd in (torch.tensor([right]), torch.tensor([[right, right]])):
        with pytest.raises(OptionError, match=f"{name}: got .* of shape"):
            probs_from_logits(logits, **{name: odd})


def test_a_node_has_one_parent() -> None:
    one = problem(("rough", "rough"), CHAIN, Iid, 0)
    arguments = one.p[None], torch.tensor([one.token_ids])
    with pytest.raises(ProposalMismatchError, match="node 2 is a child of nodes 0 and 1"):
        target_walk(*arguments, ((1, 2), (2, 3), (), ()), torch.zeros(1, 5, dtype=torch.float64))

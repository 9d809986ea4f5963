"""Verdicts on a device: those of the objects for equal draws, from one wait for all trees of a shape."""

import math

import numpy as np
import pytest
import torch

from monge.core.errors import NonFiniteLogitsError
from monge.core.sampling_rules import SamplingRules
from monge.laws.draws import SeededDraws
from monge.laws.from_logits import law_from_logits
from monge.laws.law import Law, SparseLaw, trusted_law
from monge.laws.proposal import (
    Deterministic,
    Iid,
    Mixed,
    PathDraws,
    Proposal,
    WithoutReplacement,
)
from monge.laws.tree import GrowingTree, TokenTree
from monge.networks.base import launched
from monge.verify.base import as_verifier
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS
from tests.engine import pretend

VOCAB = 12


class Laws:
    """Laws of logits, one by one and together."""

    def __init__(self, logits: torch.Tensor, record=None, rules=SamplingRules()) -> None:  # noqa: B008 (frozen)
        self.scores, self.rules, self.record = logits, rules, record

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, node: int) -> Law:
        return law_from_logits(self.scores[node], self.rules)

    @property
    def is_stacked(self):
        return not self.scores.is_cpu


class PartlyFixed(Mixed):
    """`Mixed`, and at some nodes as many candidates that are not drawn."""


def proposal(kind: type, law: Law, width: int) -> Proposal:
    if kind is PartlyFixed and law.top(1)[0] % 2:
        return Deterministic(law.top(width + 1))
    if issubclass(kind, Mixed):
        (top,) = law.top(1)
        rest = law.without(top)
        assert rest is not None
        return Mixed((top,), rest, width)
    return Deterministic(law.top(width)) if kind is Deterministic else kind(law, width)


def trees(kind: type, shape: tuple[int, ...], is_sparse: bool, device: str, count: int = 6):
    """Drawn trees of several requests, with the target's logits; equal for every device."""
    rng = np.random.default_rng(4)
    found = []
    for row in range(count):
        tree, frontier = GrowingTree(0), (0,)
        draws = SeededDraws(row)
        for width in shape:
            proposals = dict[int, Proposal]()
            for node in frontier:
                q = torch.from_numpy(rng.dirichlet(np.full(VOCAB, 0.6)))
                law: Law = trusted_law(q.to(device))
                if is_sparse:
                    masses, ids = q.topk(6)
                    ids, order = ids.sort()
                    law = SparseLaw(ids.to(device), (masses[order] / masses.sum()).to(device))
                proposals[node] = proposal(kind, law, width)
            grown = tree.grow_level(proposals, draws)
            frontier = tuple(child for own in grown.values() for child in own)
        finished = tree.finish()
        logits = torch.from_numpy(rng.normal(size=(finished.num_nodes, VOCAB)))
        found.append((finished, logits.to(device)))
    return found


def verdicts(
    rule: str, scored: list[tuple[TokenTree, torch.Tensor, *tuple[SamplingRules, ...]]], record=None
):
    verifier = as_verifier(VERIFIERS.parse(rule))
    draws = [SeededDraws(100 + row) for row in range(len(scored))]
    outcomes = verifier.verify_many(
        [
            ScoredTree(tree=tree, target_laws=Laws(logits, record, *rules), draws=own)
            for (tree, logits, *rules), own in zip(scored, draws, strict=True)
        ],
    )
    return outcomes, [own.num_drawn for own in draws]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("rule", "kind", "shape", "has_program"),
    [
        ("speculative_sampling", Iid, (1, 1, 1), True),
        ("block", Iid, (1, 1, 1), True),
        ("recursive_rejection", Iid, (3, 2), True),
        ("recursive_rejection_without_replacement", WithoutReplacement, (3, 2), True),
        ("recursive_rejection_without_replacement", Iid, (3, 2), True),
        ("traversal", WithoutReplacement, (2, 2, 1), True),
        ("traversal", Iid, (3, 2), True),
        ("sample_and_match", Iid, (3, 2), True),
        ("recursive_rejection", Mixed, (2, 2), True),
        ("traversal", Mixed, (2, 2), True),
        ("optimal", Iid, (3, 1, 2), True),
        ("optimal", Mixed, (2, 1), True),
        ("layer", Iid, (3, 1, 2), True),
        ("layer", Iid, (1, 1, 1), True),
        ("layer", PathDraws, (2, 2), True),
        ("layer", Mixed, (2, 1), True),
        ("layer('optimal')", Iid, (3, 2), False),
        ("layer", WithoutReplacement, (3, 2), False),
        ("k_seq", Iid, (3, 2), False),
    ],
)
def test_verdicts_are_those_of_the_objects(rule, kind, shape, has_program, is_sparse) -> None:
    expected = verdicts(rule, trees(kind, shape, is_sparse, "cpu"))
    with pretend.device() as device:
        scored = trees(kind, shape, is_sparse, device)
        pretend.waits.clear()
        assert verdicts(rule, scored) == expected
        shapes = {tree.candidates for tree, _ in scored}
        assert (sum(pretend.waits.values()) <= len(shapes)) == has_program


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("rule", "kind"), [("block", Iid), ("sample_and_match", Iid)])
def test_chains_of_several_lengths_have_one_wait(rule, kind, is_sparse, records) -> None:
    lengths = ((1,), (1, 1, 1), (1,) * 5)
    chains = [trees(kind, shape, is_sparse, "cpu", count=2) for shape in lengths]
    expected = verdicts(rule, [one for own in chains for one in own])
    recorded = []

    def record(function, inputs):
        recorded.append([tuple(one.shape) for one in inputs])
        return launched(function, inputs)

    with pretend.device() as device:
        scored = [one for shape in lengths for one in trees(kind, shape, is_sparse, device, 2)]
        pretend.waits.clear()
        assert verdicts(rule, scored, record if records else None) == expected
        assert sum(pretend.waits.values()) == 1
    if records:  # six chains of up to five tokens
        assert recorded[0][:2] == [(4, 8), (8, 9, VOCAB)]


RULES = (
    SamplingRules(),
    SamplingRules(temperature=0.5),
    SamplingRules(top_k=3),
    SamplingRules(top_p=0.6),
    SamplingRules(min_p=0.4),
    SamplingRules(temperature=1.7, top_k=6, top_p=0.9, min_p=0.05),
)
MIXTURES = {
    "speculative_sampling": ((Iid, (1, 1)), (Iid, (1,))),
    "block": ((Iid, (1, 1)), (Iid, (1, 1, 1)), (Deterministic, (1, 1))),
    "recursive_rejection": ((Iid, (3, 2)), (Mixed, (2, 1)), (PartlyFixed, (2, 1)), (Iid, (2,))),
    "recursive_rejection_without_replacement": ((WithoutReplacement, (3, 2)), (Iid, (3, 2))),
    "traversal": (
        (WithoutReplacement, (3, 2)),
        (Iid, (3, 2)),
        (Mixed, (2, 1)),
        (PartlyFixed, (2, 1)),
    ),
    "sample_and_match": ((Iid, (3, 2)), (WithoutReplacement, (3, 2)), (Deterministic, (1, 1, 1))),
    "optimal": ((Iid, (3, 2)), (Mixed, (2, 1)), (PartlyFixed, (2, 1))),
    "layer": (
        (Iid, (3, 2)),
        (Mixed, (2, 1)),
        (PartlyFixed, (2, 1)),
        (PathDraws, (3, 2)),
        (Iid, (1, 1)),
    ),
}
"""Kinds of candidates and widths of levels that occur in one batch."""
SLOW = {"layer", "optimal", "traversal"}


@pytest.mark.parametrize(
    ("rule", "records"),
    [
        pytest.param(rule, records, marks=[pytest.mark.slow] * (records and rule in SLOW))
        for rule in MIXTURES
        for records in (False, True)
    ],
)
def test_requests_of_a_batch_share_nothing_that_differs(rule, records) -> None:
    """Sampling rules, shapes, ways of drawing, and laws of few tokens and of all, in any order."""

    def batch(device: str):
        requests = [
            (*pair, rules)
            for kind, shape in MIXTURES[rule]
            for is_sparse in (False, True)
            for pair, rules in zip(
                trees(kind, shape, is_sparse, device, 12), RULES * 2, strict=True
            )
        ]
        order = np.random.default_rng(0).permutation(len(requests))
        return [requests[place] for place in order]

    expected = verdicts(rule, batch("cpu"))
    with pretend.device() as device:
        scored = batch(device)
        pretend.waits.clear()
        record = launched if records else None
        assert verdicts(rule, scored, record) == expected
        calls = sum(count for place, count in pretend.waits.items() if "programs" in place[0])
        assert 0 < calls < len(scored), "some were verified together"


def test_plain_rounds_have_a_program_too() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, VOCAB)))
    tree = GrowingTree(0).finish()
    expected = verdicts("block", [(tree, logits)])
    with pretend.device() as device:
        scored = [(tree, logits.to(device))]
        pretend.waits.clear()
        assert verdicts("block", scored) == expected
        assert sum(pretend.waits.values()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_their_request_alone(bad: float) -> None:
    expected, _ = verdicts("block", trees(Iid, (1, 1), False, "cpu"))
    with pretend.device() as device:
        scored = trees(Iid, (1, 1), False, device)
        broken = scored[2][1].clone()
        broken[0, 3] = bad
        scored[2] = scored[2][0], broken
        found, _ = verdicts("block", scored)
    assert isinstance(found[2], NonFiniteLogitsError)
    assert [*found[:2], *found[3:]] == [*expected[:2], *expected[3:]]


def test_a_rule_of_a_user_decides_itself() -> None:
    """A subclass may decide differently, so that the program of its parent is not its own."""

    class Mine(type(VERIFIERS.parse("block"))):
        def verify(self, tree, target_laws, draws):
            raise RuntimeError("asked")

    with pretend.device() as device:
        ((tree, logits),) = trees(Iid, (1, 1), False, device, count=1)
        with pytest.raises(RuntimeError, match="asked"):
            Mine().verify_many(
                [ScoredTree(tree=tree, target_laws=Laws(logits), draws=SeededDraws(0))]
            )


def test_deterministic_candidates_are_walked() -> None:
    tree = TokenTree(
        token_ids=(0, 3, 4),
        parents=(-1, 0, 0),
        proposals=(Deterministic((3, 4)), Deterministic(), Deterministic()),
        candidates=((1, 2), (), ()),
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, VOCAB)))
    expected = verdicts("traversal", [(tree, logits)] * 20)
    with pretend.device() as device:
        assert verdicts("traversal", [(tree, logits.to(device))] * 20) == expected

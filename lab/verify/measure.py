"""`python -m lab.verify`: what one node, or one tree, costs each acceptance rule, beside drawing one token without any rule.

The yardstick is `softmax` and `multinomial` of one row of float32 logits of the same vocabulary:
what a sampler without speculation pays for a token. Laws are synthetic: target logits N(0, 3^2),
draft logits off by N(0, 0.7^2), and the draft law cut to its most probable tokens where the support
is smaller than the vocabulary. Laws and candidates are made outside the clock; the rule's own
look-ups, residual and draw of the emitted token are inside. Yardstick and rules take turns, so that
what slows the machine for a while slows both.

A tree is drawn by its builder from such laws, one pair for every node. The target comes as logits,
and several requests are verified together, as in a round: laws are made inside the clock. The other
yardstick of a tree is the time in which its rows of logits, the target's and the draft's, are read once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

import torch

from lab.verify.laws import read_s
from monge.backends.cuda import FunctionGraphs, GraphCapture
from monge.bench.provenance import provenance
from monge.bench.statistics import RepeatSummary, paired_ratios
from monge.cli.bench_decode import mode
from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.laws.draws import RequestDraws
from monge.laws.from_logits import law_from_logits
from monge.laws.law import DenseLaw, SparseLaw
from monge.laws.proposal import Deterministic, Proposal
from monge.laws.tree import GrowingTree, TokenTree
from monge.requests.sampling import NodeLaws
from monge.verify.base import NodeRule, Rule, Verifier, as_verifier, why_no_exactness
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS

FULL: Final = 0
"""A support as large as the vocabulary."""

MAX_DIFFERENT: Final = 8
"""Most different laws of one cell.

Larger batches repeat them, which costs a rule the same and saves memory.
"""

VERDICTS: Final = 8
"""Verdicts of one measurement of a tree, each from other draws.

A walk that stops at the root is cheaper than one to a leaf.
"""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Settings of the measurement.

    Args:
        rules: Names of rules, with settings; all registered ones where empty.
        vocab_sizes: V.
        supports: Tokens of the draft law; 0 is the full vocabulary.
        widths: K, candidates of the node.
        trees: Trees with settings; where there are any, they are measured in place of nodes.
        sampling: Temperature and further sampling rules of target and draft of a tree.
        batch_sizes: Nodes, or trees, in one measurement, one request each.
        repeats: Measurements of each cell.
        limit_s: A rule whose first measurement takes longer is skipped, there and at larger sizes.
        seed: Seed of laws and draws.
    """

    rules: tuple[str, ...] = ()
    vocab_sizes: tuple[int, ...] = (4096, 32768, 131072, 151936, 262144)
    supports: tuple[int, ...] = (64, 256, FULL)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    trees: tuple[str, ...] = ()
    sampling: tuple[tuple[float, Mapping[str, Any]], ...] = ((1.0, {}),)
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    repeats: int = 5
    limit_s: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_sizes", "widths", "batch_sizes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise OptionError(
                    f"verify: {name} must be positive numbers; got {getattr(self, name)}"
                )
        if not self.supports or min(self.supports) < 0:
            raise OptionError(
                "verify: supports are numbers of tokens, 0 for the full "
                f"vocabulary; got {self.supports}"
            )
        if self.repeats < 1:
            raise OptionError(f"verify: repeats must be at least 1; got {self.repeats}")
        for name in self.rules:
            # An unknown name or setting is an error that lists the known ones.
            VERIFIERS.parse(name)
        for name in self.trees:
            TREES.parse(name)


QUICK: Final = VerifySettings(
    vocab_sizes=(32768,),
    supports=(64, FULL),
    widths=(4,),
    batch_sizes=(1, 8),
    repeats=3,
    limit_s=0.1,
)


def measure(
    settings: VerifySettings, device: torch.device, step: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Time every rule in every cell: provenance, settings, and one record a cell."""
    records = (
        _tree_records(settings, device, step)
        if settings.trees
        else _node_records(settings, device, step)
    )
    return {"provenance": provenance(device), "settings": asdict(settings), "cells": records}


def _node_records(
    settings: VerifySettings, device: torch.device, step: Callable[[str], None]
) -> list[dict[str, Any]]:
    slow: set[tuple[str, int, int]] = set()
    records: list[dict[str, Any]] = []
    names = settings.rules or tuple(VERIFIERS)
    for vocab in sorted(settings.vocab_sizes):
        sizes = sorted({min(support, vocab) or vocab for support in settings.supports})
        for size, width, batch in product(sizes, settings.widths, settings.batch_sizes):
            cell = {"vocab": vocab, "support": size, "width": width, "batch": batch}
            step(", ".join(f"{name} {value}" for name, value in cell.items()))
            nodes = _Nodes(cell, settings, device)
            for name in names:
                timing = nodes.timed(name, nodes.work(name), slow)
                records.append({"rule": name, **cell} | timing)
    return records


def _tree_records(
    settings: VerifySettings, device: torch.device, step: Callable[[str], None]
) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    names = settings.rules or tuple(VERIFIERS)
    for vocab in sorted(settings.vocab_sizes):
        sizes = sorted({min(support, vocab) or vocab for support in settings.supports})
        for size, tree, sampling, batch in product(
            sizes, settings.trees, settings.sampling, settings.batch_sizes
        ):
            cell = {"vocab": vocab, "support": size, "tree": tree, "batch": batch}
            cell["sampling"] = mode(*sampling)
            step(", ".join(f"{name} {value}" for name, value in cell.items()))
            sampled = SamplingRules(temperature=sampling[0], **sampling[1])
            trees = Trees(TREES.parse(tree), cell, sampled, settings, device)
            records += [
                {"rule": name, **cell, "nodes": trees.num_nodes}
                | trees.timed(VERIFIERS.parse(name), batch)
                for name in names
            ]
    return records


class Trees:
    """One drawn tree and the target's logits for it, and the clock.

    Attributes:
        limits: Limits of the trees of its builder.
        tree: The tree.
        logits: Logits of all nodes.
        sampling: How they become laws.
    """

    def __init__(
        self,
        builder: TreeBuilder,
        cell: Mapping[str, Any],
        sampling: SamplingRules,
        settings: VerifySettings,
        device: torch.device,
    ) -> None:
        self.limits, self._settings, self._device = builder.limits, settings, device
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._draws = RequestDraws(settings.seed)
        self._record = None
        if device.type == "cuda":  # as the compiled backend runs verdicts in the end
            self._record = FunctionGraphs(GraphCapture(device), 0)
        vocab, support = cell["vocab"], cell["support"]
        self._num_draft_numbers = 0
        logits: dict[int, torch.Tensor] = {}
        growing, frontier, plan = GrowingTree(0), (0,), DraftPlan()
        while frontier:
            logits |= {node: self._normal(vocab, 3.0) for node in frontier}
            rows = torch.stack([logits[node] + self._normal(vocab, 0.7) for node in frontier])
            laws = [
                _cut(row.softmax(0), support)
                if support < vocab
                else law_from_logits(row.float(), sampling)
                for row in rows.to(device)
            ]
            self._num_draft_numbers += len(frontier) * support
            frontier = tuple(builder.expand(growing, frontier, laws, plan, self._draws))
        unread = self._normal(vocab, 3.0)  # nobody asks twice for the law after a leaf
        by_path = {_path(growing, node): row for node, row in logits.items()}
        self.tree = builder.finish(growing, plan)
        order = [
            by_path.get(self.tree.path_tokens(node), unread) for node in range(self.tree.num_nodes)
        ]
        self.logits = torch.stack(order).float().to(device)
        self.sampling = sampling
        self._context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=sampling)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes."""
        return self.tree.num_nodes - 1

    def timed(self, rule: Rule, batch: int) -> dict[str, Any]:
        """Seconds a tree of a batch and their ratio to the yardstick, or the reason why there are none."""
        reason = why_no_exactness(rule, self.limits.proposes, self.limits.max_width)
        if reason is not None:
            return {"skipped": reason}
        verifier, row = as_verifier(rule), self.logits[0]
        if self._record is not None:
            self._clock(verifier, batch)  # captured and compiled
        first = self._clock(verifier, batch)
        if first > self._settings.limit_s:
            return {
                "skipped": f"the tree took {first:.2g} s, longer than {self._settings.limit_s:g} s"
            }
        num_rows = len(self.logits) + self._num_draft_numbers / len(row)
        seconds, yardstick, reading = [], [], []
        for _ in range(self._settings.repeats):
            yardstick.append(_clock(lambda: torch.multinomial(row.softmax(0), 1), self._device))  # noqa: TID251 (the yardstick)
            reading.append(num_rows * read_s(row))
            seconds.append(self._clock(verifier, batch))
        return {
            "tree_s": asdict(RepeatSummary.of(seconds)),
            "reads": asdict(RepeatSummary.of(paired_ratios(seconds, reading))),
            "yardstick_s": asdict(RepeatSummary.of(yardstick)),
            "ratio": asdict(RepeatSummary.of(paired_ratios(seconds, yardstick))),
        }

    def _clock(self, verifier: Verifier, batch: int) -> float:
        """Seconds a tree. The draws of a request are there before its first round."""
        draws = [RequestDraws(seed) for seed in range(VERDICTS * batch)]
        for one in draws:
            one.peek(1)
        rounds = [draws[first : first + batch] for first in range(0, len(draws), batch)]
        work = lambda: [self._verdicts(verifier, own) for own in rounds]  # noqa: E731
        return _clock(work, self._device) / len(draws)

    def _verdicts(self, verifier: Verifier, draws: Sequence[RequestDraws]) -> None:
        verifier.verify_many(
            [
                ScoredTree(
                    tree=self.tree,
                    target_laws=NodeLaws(
                        self.logits, self.tree, self._context, (), record=self._record
                    ),
                    draws=own,
                )
                for own in draws
            ]
        )

    def _normal(self, vocab: int, deviation: float) -> torch.Tensor:
        return torch.empty(vocab, dtype=torch.float64).normal_(
            0.0, deviation, generator=self._generator
        )


def _path(tree: GrowingTree, node: int) -> tuple[int, ...]:
    return () if node == 0 else (*_path(tree, tree.parents[node]), tree.token_ids[node])


def _clock(work: Work, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Nodes:
    """The nodes of one cell, and the clock."""

    def __init__(
        self, cell: dict[str, int], settings: VerifySettings, device: torch.device
    ) -> None:
        self._cell, self._settings, self._device = cell, settings, device
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (min(cell["batch"], MAX_DIFFERENT), cell["vocab"])
        logits = torch.empty(shape, dtype=torch.float64).normal_(0.0, 3.0, generator=generator)
        noise = torch.empty(shape, dtype=torch.float64).normal_(0.0, 0.7, generator=generator)
        self._row = logits[0].float().to(device)
        self._p = [DenseLaw(law.softmax(0)) for law in logits.to(device)]
        self._q = [_cut(law.softmax(0), cell["support"]) for law in (logits + noise).to(device)]
        self._draws = RequestDraws(settings.seed)

    def work(self, name: str) -> Work | str:
        """Return the work that is timed under a rule's name, or why nothing is."""
        rule, width = VERIFIERS.parse(name), self._cell["width"]
        # Deterministic candidates are left to sample and match, so they show nothing of a rule that
        # is exact for draws.
        kinds = [
            kind for kind in CHILDREN if CHILDREN[kind].proposes in rule.accepts - {Deterministic}
        ]
        reason = "no way of drawing candidates is registered for it"
        for kind in kinds:
            children = CHILDREN[kind]()
            reason = why_no_exactness(rule, (children.proposes,), width) or ""
            if width < children.min_width:
                reason = f"children {kind!r} start at width {children.min_width}"
            if not reason:
                proposals = [children.propose(q, width) for q in self._q]
                return self._one_by_one(rule, proposals)
        return reason

    def timed(
        self, label: str, work: Work | str, slow: set[tuple[str, int, int]]
    ) -> dict[str, Any]:
        """Seconds a node and their ratio to the yardstick, or the reason why there are none."""
        if isinstance(work, str):
            return {"skipped": work}
        limit, batch, width = self._settings.limit_s, self._cell["batch"], self._cell["width"]
        if (label, width, batch) in slow:
            return {"skipped": f"took longer than {limit:g} s at a smaller size"}
        first = _clock(work, self._device)
        if first > limit:
            slow.add((label, width, batch))
            return {"skipped": f"{batch} nodes took {first:.2g} s, longer than {limit:g} s"}
        seconds, yardstick = [], []
        for _ in range(self._settings.repeats):
            yardstick.append(
                _clock(lambda: torch.multinomial(self._row.softmax(0), 1), self._device)  # noqa: TID251
            )
            seconds.append(_clock(work, self._device) / batch)
        return {
            "node_s": asdict(RepeatSummary.of(seconds)),
            "yardstick_s": asdict(RepeatSummary.of(yardstick)),
            "ratio": asdict(RepeatSummary.of(paired_ratios(seconds, yardstick))),
        }

    def _one_by_one(self, rule: Rule, proposals: Sequence[Proposal]) -> Work:
        """All nodes, one after another, each as a tree of one level."""
        trees = [self._tree(proposal) for proposal in proposals]
        which = [node % len(trees) for node in range(self._cell["batch"])]
        if isinstance(rule, NodeRule):
            candidates = [
                tuple(tree.token_ids[child] for child in tree.candidates[0]) for tree in trees
            ]
            return lambda: [
                rule.emit(self._p[i], proposals[i], candidates[i], self._draws) for i in which
            ]
        laws = [[self._p[i]] * tree.num_nodes for i, tree in enumerate(trees)]
        return lambda: [rule.verify(trees[i], laws[i], self._draws) for i in which]

    def _tree(self, proposal: Proposal) -> TokenTree:
        growing = GrowingTree(0)
        growing.grow(0, proposal, self._draws)
        return growing.finish()


def _cut(probs: torch.Tensor, support: int) -> DenseLaw | SparseLaw:
    if support >= probs.numel():
        return DenseLaw(probs)
    token_ids = probs.topk(support).indices.sort().values
    return SparseLaw(token_ids, probs[token_ids] / probs[token_ids].sum())

"""Grows trees with a network: one request, or several requests together."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import renamed
from monge.core.model import NodeBlock
from monge.core.proposal import Deterministic
from monge.core.sampling_rules import SamplingRules, laws_from_logits
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder

Value = TypeVar("Value")


def draft_rules(
    builder: TreeBuilder, own: SamplingRules, rules: SamplingRules | None, top_k: int | None
) -> SamplingRules:
    """How logits become draft laws.

    Trees of the most probable tokens draw nothing and only rank, so they are built from the law at
    temperature 1: a greedy request's law ranks one token.

    Args:
        builder: Shapes the tree.
        own: The rules of the request.
        rules: The rules of the drafter; `None` takes the request's own.
        top_k: Most tokens of a draft law; `None` for no limit.
    """
    only_ranks = builder.limits.proposes == {Deterministic}
    rules = rules or (SamplingRules() if only_ranks else own)
    return rules if top_k is None else rules.within_top(top_k)


def check_top_k(top_k: int | None) -> None:
    """Refuse a draft law of no tokens.

    Raises:
        OptionError: If `top_k` is below 1.
    """
    if top_k is not None and top_k < 1:
        raise OptionError(
            f"draft top_k must be at least 1, or None for the whole draft law; got {top_k}"
        )


@dataclass(slots=True, kw_only=True)
class Growth:
    """The tree of one request, level by level.

    Args:
        context: The request.
        plan: Its limits.
        draws: Its randomness.
        builder: Shapes the tree.
        rules: How logits become draft laws.
        network: Name of the network, for warnings.
        draft_ids: The tokens that logits are about, ascending; `None` for all of the target's.

    Attributes:
        frontier: Nodes whose children are drawn next.
        blocks: The levels that the network has read below the root.
        paths: Tokens on the path to each node of these levels, in reading order.
        error: Why the network could not read some drawn nodes, if so; see `grow_together`.
        token_probs: Draft probability of each candidate, by its path of tokens, if the plan has a
            `min_token_prob`.
    """

    context: Context
    plan: DraftPlan
    draws: Draws
    builder: TreeBuilder
    rules: SamplingRules
    network: str
    draft_ids: Int64[Tensor, " some"] | None = None
    frontier: tuple[int, ...] = (0,)
    blocks: list[NodeBlock] = field(default_factory=list[NodeBlock])
    paths: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    error: Exception | None = None
    token_probs: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    _slot_of: dict[int, int] = field(default_factory=dict[int, int])
    tree: GrowingTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = GrowingTree(self.context.token_ids[-1])

    @property
    def request_id(self) -> int:
        """The request's name."""
        return self.context.request_id

    @property
    def may_draft(self) -> bool:
        """Whether the plan allows another node."""
        return self.plan.depth(1) > 0 and self.plan.nodes(1) > 0

    def grow(self, logits: Float[Tensor, "nodes some"]) -> None:
        """Draw the children of the frontier, given its logits, and set the next frontier."""
        nodes, laws, finite = [], [], []
        for row, (node, law) in enumerate(
            zip(self.frontier, laws_from_logits(logits, self.rules), strict=True)
        ):
            if law is None:
                # The node gets no candidates, which does not depend on draws below it.
                text = f"{self.network}, request {self.request_id}: logits are not finite; drafting stops here"
                warnings.warn(text, stacklevel=2)
            else:
                nodes.append(node)
                laws.append(law if self.draft_ids is None else renamed(law, self.draft_ids))
                finite.append(row)
        if not nodes:
            self.frontier = ()
            return
        self.frontier = tuple(self.builder.expand(self.tree, nodes, laws, self.plan, self.draws))
        if (least := self.plan.min_token_prob) is not None:
            probs = self._child_probs(nodes, logits[finite])
            for child, prob in probs.items():
                path = tuple(self.tree.token_ids[node] for node in self.tree.path(child))
                self.token_probs[path] = prob
            # The tokens stay in the tree: to drop a drawn token would bias the output.
            self.frontier = tuple(child for child in self.frontier if probs[child] >= least)

    def _child_probs(
        self, nodes: Sequence[int], logits: Float[Tensor, "nodes some"]
    ) -> dict[int, float]:
        """Return the probability of each child of the nodes at temperature 1."""
        tree, row_of = self.tree, {node: row for row, node in enumerate(nodes)}
        last = range(tree.depths.index(tree.depths[-1]), len(tree.depths))
        children = [child for child in last if tree.parents[child] in row_of]
        if not children:
            return {}
        rows, tokens = (
            torch.tensor(values).to(logits.device, non_blocking=True)
            for values in (
                [row_of[tree.parents[child]] for child in children],
                [tree.token_ids[child] for child in children],
            )
        )
        if self.draft_ids is not None:
            tokens = torch.searchsorted(self.draft_ids, tokens)
        return dict(zip(children, logits.softmax(dim=-1)[rows, tokens].tolist(), strict=True))

    def block(self) -> NodeBlock:
        """Return the frontier as a block to be read."""
        return NodeBlock(
            tuple(self.tree.token_ids[node] for node in self.frontier),
            tuple(self._slot_of.get(self.tree.parents[node], -1) for node in self.frontier),
        )

    def note_read(self) -> None:
        """Remember that the network has read the frontier."""
        self.blocks.append(self.block())
        for node in self.frontier:
            above = self.tree.parents[node]
            self.paths.append(
                (*(self.paths[self._slot_of[above]] if above else ()), self.tree.token_ids[node])
            )
        self._slot_of |= zip(
            self.frontier, range(len(self.paths) - len(self.frontier), len(self.paths)), strict=True
        )

    def forget(self) -> None:
        """Forget what the network has read below the root; its `restore` drops it there too."""
        self.blocks, self.paths, self._slot_of = [], [], {}

    def finish(self) -> TokenTree:
        """The finished tree."""
        return self.builder.finish(self.tree, self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReader:
    """The functions with which a network reads the levels of growing trees.

    Args:
        read: Reads the frontiers of these requests, all of one depth, and returns their logits.
        restore: Rolls the network back to the `blocks` of a request after a failed `read`.
        max_depth: Largest depth with a draft law; `None` for unbounded.
    """

    read: Callable[[Sequence[Growth]], Mapping[int, Float[Tensor, "nodes vocab"]]]
    restore: Callable[[Growth], None]
    max_depth: int | None = None


def grow_together(
    growths: Sequence[Growth], logits: Mapping[int, Float[Tensor, "one vocab"]], reader: LevelReader
) -> None:
    """Grow the trees of several requests; one forward reads a level of all of them.

    A drawn token is never dropped. If the network raises while it reads a level, each request is
    read alone. If that raises too, each node is read alone, behind its own path and without the
    other nodes. A node that cannot be read even so, or whose logits are not finite, gets no
    candidates. Whether a node has candidates then depends on its path only, as rules for whole
    paths require.

    Args:
        growths: The requests.
        logits: The network's logits at their roots, by request.
        reader: Reads the levels below.
    """
    active, depth = list(growths), 1
    while active:
        for growth in active:
            growth.grow(logits[growth.request_id])
        active, depth = [growth for growth in active if growth.frontier], depth + 1
        if not active or (reader.max_depth is not None and depth > reader.max_depth):
            return
        logits = _read(active, reader)
        active = [growth for growth in active if growth.frontier]


def _read(growths: Sequence[Growth], reader: LevelReader) -> Mapping[int, Tensor]:
    """Return the logits at the frontiers, and reduce the frontiers to nodes that could be read."""
    whole = [growth for growth in growths if growth.error is None]
    found = _tried(lambda: reader.read(whole)) if whole else {}
    known = {} if isinstance(found, Exception) else dict(found)
    for growth in growths:
        if growth.request_id in known:
            growth.note_read()
        elif (logits := _read_alone(growth, reader)) is not None:
            known[growth.request_id] = logits
    return known


def _read_alone(growth: Growth, reader: LevelReader) -> Tensor | None:
    """Do the same for one request, after a forward has raised: its level, else node by node."""
    if growth.error is None:
        logits = _tried(partial(_read_level, growth, reader))
        if not isinstance(logits, Exception):
            return logits
        growth.error = logits
    found: dict[int, Tensor] = {}
    for node in growth.frontier:
        logits = _tried(partial(_read_path, growth, node, reader))
        if not isinstance(logits, Exception):
            found[node] = logits
    growth.frontier = tuple(found)
    return torch.cat(list(found.values())) if found else None


def _read_level(growth: Growth, reader: LevelReader) -> Tensor:
    reader.restore(growth)
    logits = reader.read([growth])[growth.request_id]
    growth.note_read()
    return logits


def _read_path(growth: Growth, node: int, reader: LevelReader) -> Tensor:
    """Return the logits at a node, read behind its path only.

    Nodes that were read together before would fail together, so that one node decided whether
    another one has candidates.
    """
    growth.forget()
    reader.restore(growth)
    logits = None
    for above in growth.tree.path(node):
        growth.frontier = (above,)
        logits = reader.read([growth])[growth.request_id]
        growth.note_read()
    assert logits is not None, "the root is read with the text"
    return logits


def _tried(work: Callable[[], Value]) -> Value | Exception:
    try:
        return work()
    except Exception as error:  # noqa: BLE001  the drawn tokens are kept
        return error

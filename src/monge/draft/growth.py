"""Grows trees with a network, for a request or for several requests together."""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, takewhile
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import AnyDraft, Capabilities, Draft, FutureDraft, State
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.laws.draws import Draws, PeekableDraws, can_peek
from monge.laws.from_logits import laws_from_logits
from monge.laws.law import Law, renamed
from monge.laws.levels import (
    DrawnTrees,
    LevelDraws,
    LevelShape,
    RootDraws,
    draw_levels,
    relatives,
)
from monge.laws.proposal import Deterministic
from monge.laws.tree import DrawnTokens, FutureTree, GrowingTree, TokenTree
from monge.networks.base import NodeBlock

TreeDraws = Callable[[RootDraws], DrawnTrees]
"""Draws whole trees of the same shape, and reads all levels but the last; see `networks.base.LevelModel`."""

DrawnLevel = Mapping[int, tuple[Law, tuple[int, ...]]]
"""Draft law and children of every node of a level that gets children."""


def check_top_k(top_k: int | None) -> None:
    """Refuse a draft law of no tokens.

    Raises:
        OptionError: If `top_k` is below 1.
    """
    if top_k is not None and top_k < 1:
        raise OptionError(
            f"draft top_k must be at least 1, or None for the whole draft law; got {top_k}"
        )


def tree_capabilities(limits: TreeLimits, **more: Any) -> Capabilities:
    """Return the capabilities of a drafter that grows trees within these limits.

    Args:
        limits: The limits of its tree builder.
        **more: Further fields of `Capabilities`; `max_depth` may only lower the builder's.
    """
    return Capabilities(
        proposes=limits.proposes,
        max_width=limits.max_width,
        max_depth=min(limits.max_depth, more.pop("max_depth", None) or limits.max_depth),
        needs_trees=limits.max_width > 1,
        max_nodes=limits.max_nodes,
        **more,
    )


@dataclass(slots=True)
class ReadNodes:
    """The nodes of a growing tree that a network has read below the root.

    Attributes:
        paths: Tokens on the path to each node, in reading order.
    """

    tree: GrowingTree
    paths: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _slot_of: dict[int, int] = field(default_factory=dict[int, int])

    def block(self, nodes: Sequence[int]) -> NodeBlock:
        """Return nodes as a block to be read."""
        return NodeBlock(
            tuple(self.tree.token_ids[node] for node in nodes),
            tuple(self._slot_of.get(self.tree.parents[node], -1) for node in nodes),
        )

    def note(self, nodes: Sequence[int]) -> None:
        """Remember that the network has read nodes."""
        for node in nodes:
            above = self._slot_of.get(self.tree.parents[node])
            path = () if above is None else self.paths[above]
            self._slot_of[node] = len(self.paths)
            self.paths.append((*path, self.tree.token_ids[node]))


@dataclass(slots=True, kw_only=True)
class TreeExpansion:
    """The tree of a request, level by level.

    Args:
        context: The request.
        plan: Limits of the tree.
        draws: Randomness of the request.
        builder: Shapes the tree.
        rules: How logits become draft laws.
        network: Name of the network, for warnings.
        draft_ids: The tokens that logits are about, ascending; `None` for all of the target's.

    Attributes:
        frontier: Nodes whose children are drawn next.
        tree: The tree so far.
        read: The nodes that the network has read.
        drawn: The finished tree, if it was drawn at once. The network has then read its nodes with children.
    """

    context: Context
    plan: DraftPlan
    draws: Draws
    builder: TreeBuilder
    rules: SamplingRules
    network: str
    draft_ids: Int64[Tensor, " some"] | None = None
    frontier: tuple[int, ...] = (0,)
    drawn: TokenTree | FutureTree | None = None
    tree: GrowingTree = field(init=False)
    read: ReadNodes = field(init=False)

    def __post_init__(self) -> None:
        self.tree = GrowingTree(self.root)
        self.read = ReadNodes(self.tree)

    @property
    def request_id(self) -> int:
        """The request's name."""
        return self.context.request_id

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.context.token_ids[-1]

    @property
    def may_draft(self) -> bool:
        """True if the plan allows another node."""
        return self.plan.depth(1) > 0 and self.plan.nodes(1) > 0

    @property
    def uniforms(self) -> PeekableDraws | None:
        """The draws, if tensors of uniforms can be made of them."""
        return self.draws if can_peek(self.draws) else None

    def grow(self, logits: Float[Tensor, "nodes some"], drawn: DrawnLevel | None = None) -> None:
        """Draw the children of the frontier, given its logits, and set the next frontier.

        Args:
            logits: The logits.
            drawn: The children, if they are drawn already.
        """
        if drawn is not None:
            tokens = {node: children for node, (_, children) in drawn.items()}
            self._skip(sum(map(len, tokens.values())))
            self._expand({node: law for node, (law, _) in drawn.items()}, tokens)
            return
        laws = dict(zip(self.frontier, laws_from_logits(logits, self.rules), strict=True))
        finite = {node: law for node, law in laws.items() if law is not None}
        if len(finite) < len(laws):
            # These nodes get no candidates, which does not depend on draws below them.
            self._warn_not_finite()
        if not finite:
            self.frontier = ()
            return
        if (ids := self.draft_ids) is not None:
            finite = {node: renamed(law, ids) for node, law in finite.items()}
        self._expand(finite, self.draws)

    def attach(self, shape: LevelShape, drawn: DrawnTrees) -> bool:
        """Take a tree that is drawn and read already.

        The host need not wait for a chain: where a law is not finite, it ends.

        Args:
            shape: Its shape.
            drawn: The trees of several requests, which may be deeper.

        Returns:
            False for another tree with a law that is not finite or has too few tokens.
        """
        count = sum(shape.sizes)
        if max(shape.widths) == 1:
            drawn_ids = drawn.drawn_ids(self.request_id)[:count]
            result = cache(partial(self._drawn_chain, shape, drawn))
            self.drawn = FutureTree(self.root, drawn_ids, relatives(shape)[0], result)
            return True
        token_ids, laws = drawn[self.request_id]
        if min(token_ids[:count]) < 0:
            return False
        self.drawn = self._drawn(shape, token_ids[:count], laws)
        return True

    def _drawn_chain(self, shape: LevelShape, drawn: DrawnTrees) -> TokenTree:
        token_ids, laws = drawn[self.request_id]
        known = [*takewhile(lambda token: token >= 0, token_ids[: len(shape.widths)])]
        if len(known) < len(shape.widths):
            self._warn_not_finite()
            shape = replace(shape, widths=shape.widths[: len(known)])
        return self._drawn(shape, known, laws)

    def _drawn(self, shape: LevelShape, token_ids: Sequence[int], laws: Sequence[Law]) -> TokenTree:
        parents, candidates = relatives(shape)
        self._skip(len(token_ids))
        kind: Any = shape.kind
        inner = [children for children in candidates if children]
        drawn = [kind(law, len(children)) for law, children in zip(laws, inner, strict=False)]
        leaves = [Deterministic()] * (len(parents) - len(drawn))
        return TokenTree(
            token_ids=(self.root, *token_ids),
            parents=parents,
            proposals=(*drawn, *leaves),
            candidates=candidates,
        )

    def _warn_not_finite(self) -> None:
        text = (
            f"{self.network}, request {self.request_id}: logits are not finite; drafting stops here"
        )
        warnings.warn(text, stacklevel=3)

    def _skip(self, count: int) -> None:
        assert self.uniforms is not None, "only these draws are made elsewhere"
        self.uniforms.skip(count)

    def _expand(self, laws: Mapping[int, Law], draws: Draws | DrawnTokens) -> None:
        expand: Any = self.builder.expand  # drawn tokens are for a `LevelTree` only
        grown = expand(self.tree, tuple(laws), list(laws.values()), self.plan, draws)
        self.frontier = tuple(grown)

    def draft(self, state: State) -> AnyDraft[State]:
        """Return the draft with the tree, which is finished or on its way.

        Args:
            state: The drafter's state after drawing it.
        """
        if isinstance(self.drawn, FutureTree):
            return FutureDraft(self.drawn, state)
        tree = self.drawn or self.builder.finish(self.tree, self.plan)
        return Draft(tree, state)


def expansions(
    contexts: Sequence[Context],
    plans: Sequence[DraftPlan],
    draws: Sequence[Draws],
    *,
    tree: TreeBuilder,
    rules: SamplingRules | None,
    top_k: int | None,
    network: str,
    draft_ids: Int64[Tensor, " some"] | None = None,
) -> list[TreeExpansion]:
    """Return the unexpanded tree of every request; see `TreeExpansion`.

    Trees of the most probable tokens draw nothing and only rank, so they are built from the law at
    temperature 1: a greedy request's law ranks one token.

    Args:
        contexts: The requests.
        plans: Their limits.
        draws: Their randomness.
        tree: Shapes the trees.
        rules: How logits become draft laws; `None` takes the request's own rules.
        top_k: Most tokens of a draft law; `None` for no limit.
        network: Name of the network, for warnings.
        draft_ids: See `TreeExpansion`.
    """
    rows: list[TreeExpansion] = []
    for context, plan, row_draws in zip(contexts, plans, draws, strict=True):
        builder = tree.under(context.rules)
        only_ranks = builder.limits.proposes == {Deterministic}
        used = rules or (SamplingRules() if only_ranks else context.rules)
        rows.append(
            TreeExpansion(
                context=context,
                plan=plan,
                draws=row_draws,
                builder=builder,
                rules=used if top_k is None else used.within_top(top_k),
                network=network,
                draft_ids=draft_ids,
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelForward:
    """The functions with which a network reads the levels of growing trees.

    Args:
        extend: Read a block of nodes of each request, and return the logits at them.
        reset: Drop the nodes of a request that were read below the root.
        max_depth: Largest depth with a draft law; `None` for unbounded.
        draw: Draws and reads whole trees; `None` if the network cannot.
    """

    extend: Callable[[Mapping[int, NodeBlock]], Mapping[int, Float[Tensor, "nodes some"]]]
    reset: Callable[[TreeExpansion], object]
    max_depth: int | None = None
    draw: TreeDraws | None = None

    def read(self, rows: Sequence[TreeExpansion]) -> Mapping[int, Float[Tensor, "nodes some"]]:
        """Read the frontiers of these requests and return their logits."""
        logits = self.extend({row.request_id: row.read.block(row.frontier) for row in rows})
        for row in rows:
            row.read.note(row.frontier)
        return logits


def expand_trees(
    rows: Sequence[TreeExpansion],
    logits: Mapping[int, Float[Tensor, "one some"]],
    forward: LevelForward,
) -> None:
    """Expand the trees of several requests; one forward reads a level of all of them.

    A drawn token is never dropped. A node whose logits are not finite gets no candidates. Whether a
    node has candidates then depends on its path only, as rules for whole paths require.

    Args:
        rows: The requests.
        logits: The network's logits at their roots, by request.
        forward: Reads the levels below.
    """
    drawn = _draw_trees(rows, logits, forward)
    active, depth = [row for row in rows if row.request_id not in drawn], 1
    while active:
        # On a CPU, children are drawn one by one.
        together = [row for row in active if not logits[row.request_id].is_cpu]
        ready = draw_frontiers(together, logits)
        for row in active:
            row.grow(logits[row.request_id], ready.get(row.request_id))
        active, depth = [row for row in active if row.frontier], depth + 1
        if not active or (forward.max_depth is not None and depth > forward.max_depth):
            return
        logits = forward.read(active)


def draw_frontiers(
    rows: Sequence[TreeExpansion], logits: Mapping[int, Float[Tensor, "nodes some"]]
) -> dict[int, DrawnLevel]:
    """Draw the next level of many trees on a device; the host waits once for trees of the same kind.

    Node by node, it would wait for every law and for every token. The children are the same, as
    functions of the draws, up to rounding.

    Args:
        rows: The requests.
        logits: Logits at their frontiers, by request.

    Returns:
        Levels by request. Missing are trees whose builder must draw (see `TreeBuilder.level`), and
        levels with a law that is not finite or has fewer tokens than are drawn.
    """
    groups: dict[
        tuple[LevelShape, Hashable, int], list[tuple[TreeExpansion, PeekableDraws, int]]
    ] = {}
    for row in rows:
        level, draws = row.builder.level(row.tree, row.frontier, row.plan, row.rules), row.uniforms
        if level is not None and draws is not None:
            key = level[0], row.rules.kind, logits[row.request_id].shape[1]
            groups.setdefault(key, []).append((row, draws, level[1]))
    levels: dict[int, DrawnLevel] = {}
    for (shape, *_), group in groups.items():
        (width,), draft_ids = shape.widths, group[0][0].draft_ids
        served = torch.cat([logits[row.request_id][:count] for row, _, count in group])[:, None]
        rules = [row.rules for row, _, count in group for _ in range(count)]
        uniforms = [number for _, draws, count in group for number in draws.peek(count * width)]
        positions = torch.tensor(uniforms, dtype=torch.float64).view(-1, width)
        positions = positions.to(served.device, non_blocking=True)
        given = LevelDraws(served, positions, shape, rules, draft_ids)
        drawn = DrawnTrees(range(len(rules)), draw_levels(given, _read_nothing), draft_ids)
        nodes = map(drawn.__getitem__, range(len(rules)))
        for row, _, count in group:
            children = dict(zip(row.frontier, islice(nodes, count), strict=False))
            if all(min(tokens) >= 0 for tokens, _ in children.values()):
                levels[row.request_id] = {
                    node: (law, tuple(tokens)) for node, (tokens, (law,)) in children.items()
                }
    return levels


def _read_nothing(token_ids: Tensor, level: int) -> Tensor:
    raise AssertionError("nothing is read below the only level")


def _draw_trees(
    rows: Sequence[TreeExpansion], logits: Mapping[int, Tensor], forward: LevelForward
) -> set[int]:
    """Draw whole trees without a wait between their levels; return the requests whose trees are drawn.

    All other requests have drawn nothing: those whose trees are of another kind, and those that
    branch and have a law that is not finite.
    """
    groups: dict[Hashable, dict[int, tuple[TreeExpansion, PeekableDraws, LevelShape]]] = {}
    for row in rows if forward.draw is not None else ():
        request, draws = row.request_id, row.uniforms
        if draws is None or logits[request].is_cpu:
            continue
        if (shape := row.builder.shape(row.plan, row.rules, forward.max_depth)) is not None:
            key = row.builder, row.rules.kind, logits[request].shape
            groups.setdefault(key, {})[request] = row, draws, shape
    done = set[int]()
    for group in groups.values():
        assert forward.draw is not None
        deepest = max(
            (shape for _, _, shape in group.values()), key=lambda shape: len(shape.widths)
        )
        count = sum(deepest.sizes)
        drawn = forward.draw(
            RootDraws(
                logits={request: logits[request] for request in group},
                uniforms={request: draws.peek(count) for request, (_, draws, _) in group.items()},
                rules={request: row.rules for request, (row, _, _) in group.items()},
                shape=deepest,
                draft_ids=next(row.draft_ids for row, _, _ in group.values()),
            )
        )
        for request, (row, _, shape) in group.items():
            if row.attach(shape, drawn):
                done.add(request)
            else:
                forward.reset(row)
    return done

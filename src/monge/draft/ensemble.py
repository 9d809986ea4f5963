"""Several draft models on the same tree."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError, UnsupportedModelError
from monge.core.sampling_rules import SamplingRules
from monge.core.setting_types import check_bounds
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, ChunkedPrefill, Draft
from monge.draft.growth import ReadNodes, check_top_k
from monge.draft.model import (
    ReadPaths,
    append_texts,
    commit_accepted,
    open_texts,
    read_text,
    within_reach,
)
from monge.laws.draws import Draws
from monge.laws.from_logits import laws_from_logits
from monge.laws.law import Law
from monge.laws.proposal import Independent, Proposal
from monge.laws.tree import GrowingTree
from monge.networks.base import SequenceModel, draft_length

States = tuple[ReadPaths, ...]
"""State of a request: for each model, the nodes that it has read after the committed text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble(ChunkedPrefill[States]):
    """Draft with several models at once; each draws a child at every node.

    The tree grows level by level; each model reads every node of the frontier, in one forward for
    all requests of the batch. With `paths`, each model draws and reads a path; paths share nodes
    while they agree.

    A node gets no candidates if not all of them fit the limit of nodes. This is decided before the
    level is drawn, so it depends on earlier levels only.

    Args:
        models: The draft models, at least two, all in the target's vocabulary; none for those of
            `monge.load`.
        depth: Deepest node.
        num_nodes: Most drafted nodes.
        paths: Whether each model draws a path, instead of a child at every node.
        rules: Sampling rules of the draft laws; `None` drafts under the request's own.
        top_k: Draft from the `top_k` most probable tokens of every model only; the declared laws
            are the truncated laws.

    Raises:
        OptionError: If there are fewer than two models, a model is given twice, or a size is below
            1.
        UnsupportedModelError: If a model reads only chains, and the tree is not a chain.

    Reference:
        Draft laws of different models: Khisti et al., arXiv 2410.18234; SpecInfer, arXiv
        2305.09781.
    """

    models: tuple[SequenceModel, ...] = field(default=(), repr=False)
    depth: int = 3
    num_nodes: int = 16
    paths: bool = False
    rules: SamplingRules | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if len(self.models) == 1:
            raise OptionError("ensemble: give at least two draft models, as in draft=[A, B]; got 1")
        if len({id(model) for model in self.models}) < len(self.models):
            raise OptionError(
                "ensemble: one draft model is given twice; its draws at several temperatures are "
                "a tree's children"
            )
        check_bounds("ensemble", depth=self.depth, num_nodes=self.num_nodes)
        check_top_k(self.top_k)
        if self.num_nodes < len(self.models):
            raise OptionError(
                f"ensemble: num_nodes must be at least {len(self.models)}, one a "
                f"model; got {self.num_nodes}"
            )
        for number, model in enumerate(self.models, start=1):
            if model.why_no_tree is not None and self.depth > 1 and not self.paths:
                raise UnsupportedModelError(
                    f"ensemble: draft model {number} cannot read trees: {model.why_no_tree}; "
                    "use ensemble(paths=True)"
                )

    @property
    def capabilities(self) -> Capabilities:
        bounds = map(draft_length, self.models)
        lengths = [bound for bound in bounds if bound is not None]
        return Capabilities(
            proposes=frozenset[type[Proposal]]({Independent}),
            max_width=len(self.models),
            max_depth=self.depth,
            needs_trees=True,
            max_nodes=self.num_nodes,
            max_length=min(lengths, default=None),
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[States]:
        for model in self.models:
            open_texts(model, contexts)
        return [self._unread] * len(contexts)

    def read(self, contexts: Sequence[Context]) -> None:
        for model in self.models:
            append_texts(model, contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[States],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[States]]:
        for model in self.models:
            plans = within_reach(model, contexts, plans, mixed=True)
        rows = [self._row(*row) for row in zip(contexts, plans, draws, strict=True)]
        active = [row for row in rows if row.frontier]
        texts = {row.request_id: row.context.token_ids for row in active}
        logits = [read_text(model, texts) for model in self.models] if active else []
        while active:
            for row in active:
                row.grow(
                    [logits_of_model.get(row.request_id) for logits_of_model in logits],
                    has_paths=self.paths,
                )
            active = [row for row in active if row.frontier]
            logits = self._read_level(active)
        return [
            Draft(row.tree.finish(), tuple(tuple(read.paths) for read in row.read)) for row in rows
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[States]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[States]:
        if any(any(draft.state) for draft in drafts):
            for index, model in enumerate(self.models):
                read = [draft.state[index] for draft in drafts]
                commit_accepted(model, contexts, drafts, read, verdicts)
        return [self._unread] * len(contexts)

    def close(self, context: Context) -> None:
        for model in self.models:
            model.close(context.request_id)

    @property
    def _unread(self) -> States:
        return ((),) * len(self.models)

    def _row(self, context: Context, plan: DraftPlan, draws: Draws) -> "_EnsembleRow":
        rules, tree = self.rules or context.rules, GrowingTree(context.token_ids[-1])
        models, depth = tuple(range(len(self.models))), plan.depth(self.depth)
        return _EnsembleRow(
            context=context,
            tree=tree,
            draws=draws,
            rules=rules if self.top_k is None else rules.within_top(self.top_k),
            depth=depth,
            num_nodes=plan.nodes(self.num_nodes),
            read=[ReadNodes(tree) for _ in models],
            frontier={0: models} if depth > 0 else {},
        )

    def _read_level(self, rows: Sequence["_EnsembleRow"]) -> list[Mapping[int, Tensor]]:
        """Return the logits of every model at the frontiers."""
        logits: list[Mapping[int, Tensor]] = []
        for index, model in enumerate(self.models):
            level = [(row, nodes) for row in rows if (nodes := row.nodes_of(index))]
            blocks = {row.request_id: row.read[index].block(nodes) for row, nodes in level}
            logits.append(model.extend(blocks) if blocks else {})
            for row, nodes in level:
                row.read[index].note(nodes)
        return logits


@dataclass(slots=True, kw_only=True)
class _EnsembleRow:
    """One request while its tree grows.

    Args:
        read: By model, the nodes that it has read.
        frontier: Nodes whose children are drawn next, each with its models.
    """

    context: Context
    tree: GrowingTree
    draws: Draws
    rules: SamplingRules
    depth: int
    num_nodes: int
    read: list[ReadNodes]
    frontier: dict[int, tuple[int, ...]]

    @property
    def request_id(self) -> int:
        return self.context.request_id

    def grow(
        self, logits: Sequence[Float[Tensor, "nodes vocab"] | None], *, has_paths: bool
    ) -> None:
        """Draw a level, given every model's logits at those nodes of the frontier where it draws."""
        everyone = tuple(range(len(self.read)))
        room, laws_at = self.num_nodes - (self.tree.num_nodes - 1), dict[int, dict[int, Law]]()
        for node, laws in self._laws(logits).items():
            room -= len(laws)  # equal draws must not decide whether another node has candidates
            if room < 0:
                break
            laws_at[node] = laws
        self.tree.grow_level(
            {node: Independent(tuple(laws.values())) for node, laws in laws_at.items()}, self.draws
        )
        self.frontier = {}
        if self.tree.depths[-1] < self.depth:
            for node, laws in laws_at.items():
                for index, child in zip(laws, self.tree.candidates(node), strict=True):
                    drawn_by = (*self.frontier.get(child, ()), index)
                    self.frontier[child] = drawn_by if has_paths else everyone

    def nodes_of(self, index: int) -> list[int]:
        """Return the nodes of the frontier below which a model draws."""
        return [node for node, models in self.frontier.items() if index in models]

    def _laws(
        self, logits: Sequence[Float[Tensor, "nodes vocab"] | None]
    ) -> dict[int, dict[int, Law]]:
        """Return the draft laws at each node of the frontier; nodes without a law are left out."""
        laws: dict[int, dict[int, Law]] = {node: {} for node in self.frontier}
        for index, rows in enumerate(logits):
            node_laws = [] if rows is None else laws_from_logits(rows, self.rules)
            for node, law in zip(self.nodes_of(index), node_laws, strict=True):
                if law is None:
                    # The model skips this node, which does not depend on draws below it.
                    name = f"draft model {index + 1}, request {self.request_id}"
                    warnings.warn(
                        f"{name}: logits are not finite; it drafts nothing here", stacklevel=2
                    )
                else:
                    laws[node][index] = law
        return {node: node_laws for node, node_laws in laws.items() if node_laws}

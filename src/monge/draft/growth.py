"""One request while a network grows its tree."""

import warnings
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.model import NodeBlock
from monge.core.sampling_rules import SamplingRules, laws_from_logits
from monge.core.stopping import Evidence
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder
from monge.draft.watch import Watch


@dataclass(slots=True, kw_only=True)
class Growth:
    """The tree of one request, level by level.

    Args:
        context: The request.
        plan: Its limits.
        draws: Its randomness.
        builder: Shapes the tree.
        rules: How logits become draft laws.
        network: What gives the logits, for warnings.

    Attributes:
        frontier: Nodes whose children are drawn next.
        paths: Tokens on the way to every node that the network has read below the root, in reading order.
    """

    context: Context
    plan: DraftPlan
    draws: Draws
    builder: TreeBuilder
    rules: SamplingRules
    network: str
    frontier: tuple[int, ...] = (0,)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    _slot_of: dict[int, int] = field(default_factory=dict)
    tree: GrowingTree = field(init=False)
    watch: Watch | None = field(init=False)

    def __post_init__(self) -> None:
        self.tree = GrowingTree(self.context.token_ids[-1])
        self.watch = None if self.plan.stop is None else Watch(self.tree, self.plan.stop)

    @property
    def request_id(self) -> int:
        """The request's name."""
        return self.context.request_id

    @property
    def may_draft(self) -> bool:
        """Whether the plan leaves room for a node."""
        return self.plan.depth(1) > 0 and self.plan.nodes(1) > 0

    def grow(self, logits: Float[Tensor, "nodes vocab"]) -> None:
        """Draw the children of the frontier, given the network's logits at it; the next frontier is what is read next."""
        nodes, laws, finite = [], [], []
        for row, (node, law) in enumerate(zip(self.frontier, laws_from_logits(logits, self.rules), strict=True)):
            if law is None:
                # The node stays without candidates, which depends on nothing drawn below it; the target goes on alone.
                text = f"{self.network}, request {self.request_id}: logits are not finite; drafting stops here"
                warnings.warn(text, stacklevel=2)
            else:
                nodes.append(node)
                laws.append(law)
                finite.append(row)
        known = logits if len(finite) == len(logits) else logits[finite]
        if not nodes or (self.watch is not None and not self.watch.draws(nodes, known)):
            self.frontier = ()
            return
        self.frontier = tuple(self.builder.expand(self.tree, nodes, laws, self.plan, self.draws))
        if self.watch is not None:
            self.frontier = self.watch.reads(nodes, self.frontier)

    def next_block(self) -> NodeBlock:
        """The frontier as nodes to be read, below those that were read before."""
        for node in self.frontier:
            above = self.tree.parents[node]
            self._slot_of[node] = len(self.paths)
            self.paths.append((*(self.paths[self._slot_of[above]] if above else ()), self.tree.token_ids[node]))
        return NodeBlock(
            tuple(self.tree.token_ids[node] for node in self.frontier),
            tuple(self._slot_of.get(self.tree.parents[node], -1) for node in self.frontier),
        )

    def finish(self) -> TokenTree:
        """The finished tree."""
        return self.builder.finish(self.tree, self.plan)

    @property
    def evidence(self) -> Evidence | None:
        """What a stop rule made it note."""
        return None if self.watch is None else self.watch.evidence

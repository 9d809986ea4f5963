"""The walk of one request down its tree, one node at a time."""

from monge.core.errors import ProposalMismatchError
from monge.core.proposal import Arbitrary
from monge.core.verdict import Verdict
from monge.verify.problem import NodeProblem, ScoredTree


class Descent:
    """The state of a walk: it asks for a token at each node with candidates, and follows it.

    Args:
        scored: The scored tree of the request.
        path: Nodes that are accepted already.
        examined: `Verdict.examined` of the nodes above the last of them.

    Raises:
        ProposalMismatchError: If there is not one law for every node.
    """

    def __init__(self, scored: ScoredTree, path: tuple[int, ...] = (), examined: tuple[int, ...] = ()) -> None:
        num_nodes, num_laws = scored.tree.num_nodes, len(scored.target_laws)
        if num_laws != num_nodes:
            raise ProposalMismatchError(f"verify: the tree has {num_nodes} nodes but {num_laws} laws came")
        self._scored, self._node = scored, path[-1] if path else 0
        self._path, self._examined = list(path), list(examined)
        self._verdict: Verdict | None = None

    @property
    def is_open(self) -> bool:
        return self._verdict is None and bool(self._scored.tree.candidates[self._node])

    @property
    def is_walked(self) -> bool:
        """Whether the candidates here are `Arbitrary`, so that only the target walk is exact."""
        return isinstance(self._scored.tree.proposals[self._node], Arbitrary)

    @property
    def node(self) -> int:
        return self._node

    def problem(self) -> NodeProblem:
        """Return the problem of the node; this computes the target's law."""
        tree = self._scored.tree
        return NodeProblem(
            target_law=self._scored.target_laws[self._node],
            proposal=tree.proposals[self._node],
            candidates=tuple(tree.token_ids[child] for child in tree.candidates[self._node]),
            draws=self._scored.draws,
        )

    def follow(self, token: int) -> None:
        """Go to the candidate with the emitted token, or stop if there is none."""
        tree = self._scored.tree
        child_of = {tree.token_ids[child]: child for child in tree.candidates[self._node]}
        self._examined.append(len(child_of))
        if token in child_of:
            self._node = child_of[token]
            self._path.append(self._node)
        else:
            self._verdict = Verdict(
                path=tuple(self._path), next_token=token, next_kind="correction", examined=tuple(self._examined)
            )

    def verdict(self) -> Verdict:
        """Return the verdict of a finished walk; at a leaf, draw the bonus token."""
        if self._verdict is not None:
            return self._verdict
        token = self._scored.draws.categorical(self._scored.target_laws[self._node])
        return Verdict(path=tuple(self._path), next_token=token, next_kind="bonus", examined=tuple(self._examined))

"""Verifiers, node rules, and the walk that turns a node rule into a verifier.

p = target law, q = draft law.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from monge.core.errors import ProposalMismatchError, RequestError
from monge.core.parts import Part
from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence
from monge.laws.proposal import Arbitrary, Proposal
from monge.laws.tree import TokenTree
from monge.verify.problem import NodeProblem, ScoredTree, are_stacked
from monge.verify.programs import Programs

Made = TypeVar("Made")


class _Declarations(Part, ABC):
    """Attributes of every rule; they belong to the class, or to the object if they depend on its settings.

    Attributes:
        accepts: Proposals for which the rule is exact.
        max_width: Most candidates for which it is exact, if bounded.
        is_lossless: True if the emitted token follows the target law exactly.
        is_enumerable: True if it draws discrete variables only, so that the oracle can run every
            branch. A rule that draws positions in [0, 1] is proved by integration instead.
        programs: Tensor programs that decide as the rule does, for batches on a device; see
            `verify/programs.py`.
        invariant_for: Proposals for which the text is a function of the seed and the target,
            whatever the candidates.
    """

    accepts: frozenset[type[Proposal]]
    max_width: int | None = None
    is_lossless: bool = True
    is_enumerable: bool = True
    programs: Programs | None = None
    invariant_for: frozenset[type[Proposal]] = frozenset()

    @property
    def title(self) -> str:
        """Name for messages."""
        return type(self).__name__


class NodeRule(_Declarations):
    """A rule for a single node: the usual way to add a verifier."""

    @abstractmethod
    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        """Emit the next token.

        Args:
            target_law: Law of the next token at this node.
            proposal: Proposal of the candidates.
            candidates: The candidates' tokens in drawing order, repeats kept; not empty.
            draws: Source of randomness.

        Returns:
            A token that follows `target_law`; if it is one of the candidates, by whatever branch,
            the walk descends.
        """

    def emit_one(self, problem: NodeProblem) -> int:
        """Call `emit` for a problem."""
        return self.emit(problem.target_law, problem.proposal, problem.candidates, problem.draws)


class Verifier(_Declarations):
    """A rule for the whole tree."""

    @abstractmethod
    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        """Accept a path of nodes, and draw the token after it.

        Args:
            tree: The scored tree.
            target_laws: The target's law after every node, `tree.num_nodes` of them; may be
                computed on demand.
            draws: Source of randomness.
        """

    def verify_many(self, scored: Sequence[ScoredTree]) -> Sequence[Verdict | RequestError]:
        """Verify the trees of several requests; each verdict is that of `verify`.

        A request draws from its own source only, in the same order as alone. If its target logits
        are not finite, it gets the error instead of a verdict; other requests are not affected.
        """
        verdicts = self.by_programs(scored)
        return [
            verdicts[row] if row in verdicts else self.verify_one(request)
            for row, request in enumerate(scored)
        ]

    def by_programs(self, scored: Sequence[ScoredTree]) -> Mapping[int, Verdict]:
        """Return the verdicts that tensor programs give, by place."""
        rule = self._rule
        # A subclass may decide differently.
        programs = rule.programs if "programs" in vars(type(rule)) else None
        can_stack = programs is not None and any(
            are_stacked(request.target_laws) for request in scored
        )
        return programs.verdicts(scored) if programs is not None and can_stack else {}

    @property
    def _rule(self) -> "Rule":
        """The rule that decides."""
        return self

    def verify_one(self, scored: ScoredTree) -> Verdict | RequestError:
        """Return the verdict, or the error if the target's logits are not finite."""
        return _or_error(lambda: self.verify(scored.tree, scored.target_laws, scored.draws))


Rule = NodeRule | Verifier


class Descent:
    """The walk of a request down its tree: at each node with candidates, it takes a token from the rule and follows it.

    Args:
        scored: The scored tree of the request.
        path: Nodes that are accepted already.
        examined: `Verdict.examined` of the nodes above the last of them.

    Raises:
        ProposalMismatchError: If the numbers of laws and nodes differ.
    """

    def __init__(
        self, scored: ScoredTree, path: tuple[int, ...] = (), examined: tuple[int, ...] = ()
    ) -> None:
        check_laws(scored.tree, scored.target_laws)
        self._scored, self.node = scored, path[-1] if path else 0
        self._path, self._examined = list(path), list(examined)
        self._emitted: int | None = None

    @property
    def is_open(self) -> bool:
        return self._emitted is None and bool(self._scored.tree.candidates[self.node])

    @property
    def is_walked(self) -> bool:
        """True if the candidates here are `Arbitrary`, so that only sample and match is exact."""
        return isinstance(self._scored.tree.proposals[self.node], Arbitrary)

    @property
    def depth(self) -> int:
        return len(self._path)

    def problem(self) -> NodeProblem:
        """Return the problem of the node; this computes the target's law."""
        return self._scored.problem(self.node)

    def follow(self, token: int) -> bool:
        """Go to the candidate with the emitted token; return False, and stop, if there is none."""
        tree = self._scored.tree
        child_of = {tree.token_ids[child]: child for child in tree.candidates[self.node]}
        if child_of:
            self._examined.append(len(child_of))
        if token not in child_of:
            self._emitted = token
            return False
        self.node = child_of[token]
        self._path.append(self.node)
        return True

    def verdict(self) -> Verdict:
        """Return the verdict of a finished walk; at a leaf, draw the bonus token.

        Raises:
            RequestError: If the target's logits at a leaf are not finite.
        """
        token = self._emitted
        if token is None:
            token = self._scored.draws.categorical(self._scored.target_laws[self.node])
        return Verdict(
            path=tuple(self._path),
            next_token=token,
            next_kind="correction" if self._scored.tree.candidates[self.node] else "bonus",
            examined=tuple(self._examined),
        )


def check_laws(tree: TokenTree, target_laws: LawSequence) -> None:
    """Raise `ProposalMismatchError` unless there is a law for every node."""
    if len(target_laws) != tree.num_nodes:
        raise ProposalMismatchError(
            f"verify: the tree has {tree.num_nodes} nodes but {len(target_laws)} laws came"
        )


@dataclass(frozen=True, slots=True)
class Walk(Verifier):
    """The verifier of a node rule: emit at a node, and descend while the token is a candidate.

    It is exact because every emitted token follows the target's law given its prefix. Nodes with
    `Arbitrary` candidates use sample and match, which is exact for any candidates.
    """

    rule: NodeRule

    @property
    def _rule(self) -> NodeRule:
        return self.rule

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        descent = Descent(ScoredTree(tree=tree, target_laws=target_laws, draws=draws))
        while descent.is_open:
            problem = descent.problem()
            if descent.is_walked:
                descent.follow(draws.categorical(problem.target_law))
            else:
                self._check(descent, problem)
                descent.follow(self.rule.emit_one(problem))
        return descent.verdict()

    def _check(self, descent: Descent, problem: NodeProblem) -> None:
        """Refuse candidates for which the rule is not exact."""
        reason = why_no_exactness(self.rule, (type(problem.proposal),), len(problem.candidates))
        if reason is not None:
            raise ProposalMismatchError(f"node {descent.node}: {reason}")


def _or_error(make: Callable[[], Made]) -> Made | RequestError:
    try:
        return make()
    except RequestError as error:
        return error


def as_verifier(rule: Rule) -> Verifier:
    """Return the verifier itself, or the walk of a node rule."""
    return Walk(rule) if isinstance(rule, NodeRule) else rule


def why_no_exactness(
    rule: Rule, proposals: Iterable[type[Proposal]], max_width: int | None
) -> str | None:
    """Return why a rule is not exact for these candidates, or `None` if it is.

    Args:
        rule: A node rule or a verifier; a `Walk` answers for its rule.
        proposals: Kinds of proposals that may occur.
        max_width: Most candidates of a node; `None` for unbounded.
    """
    rule = rule.rule if isinstance(rule, Walk) else rule
    name = rule.title
    exact = (*rule.accepts, Arbitrary)
    wrong = sorted(kind.__name__ for kind in proposals if not issubclass(kind, exact))
    if wrong:
        known = ", ".join(sorted(kind.__name__ for kind in rule.accepts))
        return f"{name} is exact for {known} candidates only; these are drawn as {', '.join(wrong)}"
    if rule.max_width is not None and (max_width is None or max_width > rule.max_width):
        return (
            f"{name} is exact for at most {rule.max_width} candidate(s) a node; up to "
            f"{max_width or 'any number'} are offered"
        )
    return None

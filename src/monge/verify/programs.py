"""Verdicts of requests on a device by the tensor programs of `verify/functional.py`.

The host waits once for all requests whose trees have the same shape, and once for all chains of the
same kind. The objects wait at every node.

The objects decide for rules without `programs`, trees that mix ways of drawing, logits processors,
and draws that cannot be peeked. They also decide everything on a CPU, where the call dominates the
cost of a vector operation. Three more cases are left to them: draws without replacement in layers,
whose default rule is `traversal`; rules that solve a program or search at each node; and
deterministic candidates of `block` and `recursive_rejection` beside nodes with drawn candidates, which no tree has.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.laws.draws import PeekableDraws, can_peek
from monge.laws.from_logits import RuleRows, probs_from_logits, rule_rows
from monge.laws.law import DenseLaw, Law, SparseLaw
from monge.laws.proposal import Arbitrary, Deterministic, Proposal
from monge.laws.tree import TokenTree
from monge.networks.base import Recorder, launched
from monge.verify.functional.optimum import layer, optimal
from monge.verify.functional.rejection import block, recursive_rejection, sample_and_match
from monge.verify.functional.tensors import (
    Children,
    DraftLaws,
    TreeTensors,
    Verified,
    Ways,
    children_of,
    frozen,
    num_uniforms,
)
from monge.verify.problem import ScoredTree, are_stacked, verdict_at

Program = Callable[..., Verified]
"""A function of `verify/functional.py` with the arguments of `recursive_rejection`."""


def walk(
    p: Tensor, ids: Tensor, children: Children, q: DraftLaws, uniforms: Tensor, **_: object
) -> Verified:
    """`sample_and_match`, which reads no draft laws."""
    return sample_and_match(p, ids, children, uniforms)


def on_chain(
    p: Tensor, ids: Tensor, children: Children, q: DraftLaws, uniforms: Tensor, **_: object
) -> Verified:
    """`block`, whose trees are chains."""
    return block(p, ids, q, uniforms)


without_replacement: Final = partial(recursive_rejection, replacement=False)

_WITH_REPEATS: Final = (recursive_rejection, optimal, layer)
"""Programs that read independent draws as often as they were drawn."""
_OF_CHAINS: Final = (walk, on_chain)
"""Programs that take chains of several lengths together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs of a rule.

    Args:
        by_kind: Program of the trees whose candidates are all of this kind.
        max_width: Most candidates of a node, if bounded.
        takes_fixed_nodes: Whether trees of drawn candidates may have nodes without drawn
            candidates.
    """

    by_kind: Mapping[type[Proposal], Program]
    max_width: int | None = None
    takes_fixed_nodes: bool = False

    def verdicts(self, scored: Sequence[ScoredTree]) -> dict[int, Verdict]:
        """Return the verdicts that programs can give, by place; they are those of the rule, up to rounding."""
        outcomes: dict[int, Verdict] = {}
        groups: dict[Hashable, dict[int, _Question]] = {}
        for row, request in enumerate(scored):
            if (question := self._question(request)) is not None:
                groups.setdefault(question.key, {})[row] = question
        for group in groups.values():
            verdicts = zip(group, _answers(list(group.values())), strict=True)
            # A token is missing where the logits are not finite; the rule says so in words.
            outcomes |= {row: verdict for row, verdict in verdicts if verdict is not None}
        return outcomes

    def _question(self, scored: ScoredTree) -> "_Question | None":
        laws, tree, draws = scored.target_laws, scored.tree, scored.draws
        if not are_stacked(laws) or not can_peek(draws) or len(laws) != tree.num_nodes:
            return None
        pairs = zip(tree.proposals, tree.candidates, strict=True)
        kinds = {type(proposal) for proposal, candidates in pairs if candidates} - {Arbitrary}
        if self.takes_fixed_nodes and not kinds <= {Deterministic}:
            kinds -= {Deterministic}
        chosen = {self._program(kind) for kind in kinds or {Deterministic}}
        if self.max_width is not None and max(map(len, tree.candidates)) > self.max_width:
            return None
        if len(chosen) != 1 or (program := chosen.pop()) is None:
            return None
        logits, rules, record = laws.scores, laws.rules, laws.record
        if program is walk:
            return _Question(scored, program, logits, rules, record, tree.candidates, (), (), draws)
        drawn_laws = _draft_laws(tree)
        if any(Arbitrary is type(proposal) for proposal in tree.proposals) or not all(
            _is_readable(law, logits) for law in drawn_laws
        ):
            return None
        children = tree.candidates
        if program not in _WITH_REPEATS:
            children = tuple(tuple(dict.fromkeys(siblings)) for siblings in children)
        fixed = tuple(len(proposal.fixed_ids) for proposal in tree.proposals)
        return _Question(scored, program, logits, rules, record, children, fixed, drawn_laws, draws)

    def _program(self, kind: type[Proposal]) -> Program | None:
        """The program of a kind of proposal, or of the nearest kind that it is a subclass of."""
        return next(filter(None, map(self.by_kind.get, kind.__mro__)), None)


@dataclass(frozen=True, slots=True)
class _Question:
    """A request's tree, for a program.

    Args:
        scored: The tree, its laws and draws.
        program: The program.
        logits: The target's logits after every node.
        rules: How they become p.
        record: See `StackedLaws.record`.
        children: Shape of the tree.
        fixed: Number of deterministic candidates of each node beside drawn candidates.
        laws: q of every node; empty if the program reads none.
        draws: The draws of the request.
    """

    scored: ScoredTree
    program: Program
    logits: Float[Tensor, "nodes vocab"]
    rules: SamplingRules
    record: Recorder | None
    children: tuple[tuple[int, ...], ...]
    fixed: tuple[int, ...]
    laws: tuple[Law, ...]
    draws: PeekableDraws

    @property
    def key(self) -> Hashable:
        """Equal for questions that the same call answers."""
        is_dense = all(map(_is_dense, self.laws))
        shape = None if self.is_padded else (self.children, self.fixed)
        logits = self.logits.shape[1], self.logits.dtype
        return self.program, self.rules.kind, shape, logits, is_dense

    @property
    def is_padded(self) -> bool:
        """True for chains: a call takes chains of several lengths."""
        return self.program in _OF_CHAINS and self.children == _chain(len(self.children))


def _draft_laws(tree: TokenTree) -> tuple[Law, ...]:
    """Return the draft law of every node; at leaves, whose laws are not read, that of another node."""
    laws = [proposal.draft_law for proposal in tree.proposals]
    known = next(law for law in laws if law is not None)
    return tuple(known if law is None else law for law in laws)


def _is_readable(law: Law, logits: Float[Tensor, "nodes vocab"]) -> bool:
    is_whole = isinstance(law, DenseLaw) and law.probs.numel() == logits.shape[1]
    return (is_whole or isinstance(law, SparseLaw)) and law.device == logits.device


def _is_dense(law: Law) -> bool:
    return isinstance(law, DenseLaw)


@lru_cache(maxsize=256)
def _chain(num_nodes: int) -> tuple[tuple[int, ...], ...]:
    return children_of(range(-1, num_nodes - 1))


def _answers(questions: Sequence[_Question]) -> list[Verdict | None]:
    first = questions[0]
    device, children, fixed = first.logits.device, first.children, first.fixed
    padded = questions
    if first.is_padded:
        children = _chain(max(len(question.children) for question in questions))
        fixed = (0,) * len(children) if fixed else ()
    if first.record is not None:
        # Padded to powers of two, for fewer shapes to record.
        padded = [*questions, *[first] * (_power_of_two(len(questions)) - len(questions))]
        if first.is_padded and len(children) > 1:
            children = _chain(1 + _power_of_two(len(children) - 1))
            fixed = (0,) * len(children) if fixed else ()
    token_ids = [question.scored.tree.token_ids for question in padded]
    token_ids = torch.tensor(
        [(*tokens, *[-1] * (len(children) - len(tokens))) for tokens in token_ids]
    )
    needed = num_uniforms(children)
    uniforms = torch.tensor(
        [question.draws.peek(needed) for question in padded], dtype=torch.float64
    )
    numbers, num_sorted = rule_rows([question.rules for question in padded], first.logits)
    inputs: tuple[Tensor, ...] = (
        numbers,
        _padded([question.logits for question in padded], len(children)),
        token_ids.to(device, non_blocking=True),
        uniforms.to(device, non_blocking=True),
        *_stacked(padded, len(children)),
    )
    record = launched if first.record is None else first.record
    # The host waits here, and nowhere else.
    function = _ConfiguredProgram(num_sorted, first.program, children, fixed)
    rows: list[list[int]] = record(function, inputs).tolist()
    return [_verdict(question, row) for question, row in zip(questions, rows, strict=False)]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _padded(rows: Sequence[Tensor], size: int) -> Tensor:
    """Stack tensors, padded with zeros to a length."""
    stacked = _joined(rows)
    missing = size - stacked.shape[1]
    return pad(stacked, (0, 0, 0, missing)) if missing else stacked


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors, padded with zeros to the longest. If nothing needs padding, a single call copies all."""
    are_equal = len({len(row) for row in rows}) == 1
    return torch.stack(list(rows)) if are_equal else pad_sequence(list(rows), batch_first=True)


@dataclass(frozen=True, slots=True)
class _ConfiguredProgram:
    """A program for trees of the same shape, with its settings; a `Recordable`.

    Args:
        num_sorted: As in `RuleRows`, whose numbers are the first input.
        program: The program.
        children: Shape of the trees.
        fixed: Number of deterministic candidates of each node beside drawn candidates.
    """

    num_sorted: int | None
    program: Program
    children: tuple[tuple[int, ...], ...]
    fixed: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> Int64[Tensor, "requests numbers"]:
        """Return accepted nodes, the next token, the used uniforms, and the path."""
        numbers, logits, token_ids, uniforms, *laws = inputs
        probs = probs_from_logits(logits, RuleRows(numbers, self.num_sorted))
        draft = DraftLaws(*laws) if laws else DraftLaws(uniforms[:0, :, None])
        verified = self.program(
            probs, token_ids, self.children, draft, uniforms, num_fixed=self.fixed
        )
        counts = [verified.num_accepted, verified.next_token, verified.num_uniforms]
        return torch.cat([torch.stack(counts, 1), verified.path], 1)

    def constants(self, device: torch.device) -> object:
        """See `Recordable`."""
        shape = frozen(self.children)
        return TreeTensors.of(shape, device), Ways.of(shape, self.fixed, device)


def _stacked(questions: Sequence[_Question], num_nodes: int) -> tuple[Tensor, ...]:
    """Return the fields of `DraftLaws`, padded to a number of nodes; none if the program reads none."""
    if not questions[0].laws:
        return ()
    # Nodes that a chain does not have repeat a law, which nobody reads.
    laws = [
        law
        for question in questions
        for law in (*question.laws, *question.laws[:1] * (num_nodes - len(question.laws)))
    ]
    size = len(questions), num_nodes, -1
    if all(map(_is_dense, laws)):
        return (
            torch.stack([law.probs for law in laws if isinstance(law, DenseLaw)]).reshape(size),
        )
    parts = [law.sparse() for law in laws]
    # Padded with mass zero at token 0, which changes nothing.
    return (
        _joined([part.probs for part in parts]).reshape(size),
        _joined([part.token_ids for part in parts]).reshape(size),
    )


def _verdict(question: _Question, row: list[int]) -> Verdict | None:
    count, token, used, *path = row
    if token < 0:
        return None
    question.draws.skip(used)
    return verdict_at(question.scored.tree, path[count - 1] if count else 0, token)

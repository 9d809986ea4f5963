"""Replay a certificate without trust.

Each check asks one question about a round, in the order in which the round was made: was the text
before it the committed one, were the children drawn as declared, are the stated laws the target's,
does the verifier decide so, does it keep the target's law, and is what it decided what was
committed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

import torch
from torch import Tensor

from monge.audit.certificate import (
    Arrays,
    Certificate,
    broken_seal,
    law_of,
    tree_of,
)
from monge.audit.coupling import Coupling, Level
from monge.audit.plain_forward import Forward
from monge.audit.redraft import DraftFindings, Redrafter
from monge.core.draws import ClockDraws, RequestDraws
from monge.core.errors import MongeError
from monge.core.law import Law, total_variation
from monge.core.proposal import Arbitrary, Deterministic
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.registry import VERIFIERS

Answer = Literal["exact", "not exact", "could not tell"]
EXIT: Final[Mapping[Answer, int]] = {"exact": 0, "not exact": 1, "could not tell": 2}
LAW_BOUND: Final = 1e-12
"""Largest law error that counts as rounding."""
TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.25, "bfloat16": 1.0}
"""Largest difference of a logit to the float64 forward that counts as rounding, by type."""
_MASS_ROUNDING: Final = 1e-9
"""Rounding of a mass that is made again from its logits; float64 sums over a vocabulary stay below 1e-12."""
NUM_NODES: Final = 256
"""Nodes of a run whose coupling is enumerated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, or that could not be judged.

    Args:
        request: Number of the request, from 1; 0 for the whole certificate.
        round: Number of its round, from 1; 0 for the whole request.
        field: The field of the certificate.
        reason: What is wrong with it.
        is_wrong: Whether it shows that the run is not exact.
    """

    request: int
    round: int
    field: str
    reason: str
    is_wrong: bool = True

    def __str__(self) -> str:
        places = [
            f"{name} {number}"
            for name, number in (("request", self.request), ("round", self.round))
            if number
        ]
        return f"{', '.join([*places, self.field])}: {self.reason}"


@dataclass(slots=True, kw_only=True)
class Report:
    """What was found.

    Attributes:
        num_requests: Requests.
        num_rounds: Rounds that were replayed.
        num_tokens: Tokens that they committed.
        num_nodes: Nodes with candidates that the verifiers stood on.
        num_enumerated: Nodes whose coupling was enumerated.
        num_whole: Those for which the draft laws kept all of their tokens.
        law_error: Largest law error of a coupling, given the stated logits.
        logit_difference: Largest difference of a stated logit to the float64 forward.
        law_distance: Largest total variation between a stated law and the float64 one.
        drafts: What the drafter gave when it was made again.
        skipped: Uniforms that controllers drew.
        findings: What is wrong; empty for an exact run.
        notes: What was taken as declared.
    """

    num_requests: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_enumerated: int = 0
    num_whole: int = 0
    law_error: float = 0.0
    logit_difference: float = 0.0
    law_distance: float = 0.0
    drafts: DraftFindings = field(default_factory=DraftFindings)
    skipped: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[str] = field(default_factory=list[str])

    @property
    def answer(self) -> Answer:
        """The verdict."""
        if any(finding.is_wrong for finding in self.findings):
            return "not exact"
        return "could not tell" if self.findings else "exact"

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.num_rounds:,} rounds, {self.num_tokens:,} tokens, "
            f"worst law error {self.law_error:.0e}, "
            f"worst logit difference {self.logit_difference:.0e}: {self.answer}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        own = asdict(self)
        own["drafts"] = self.drafts.as_json()
        return {"verdict": self.answer, "summary": self.summary(), **own}


class _MismatchError(MongeError):
    """A round does not hold."""

    def __init__(self, field_name: str, reason: str, *, is_wrong: bool = True) -> None:
        super().__init__(reason)
        self.field, self.is_wrong = field_name, is_wrong


def certify(
    certificate: Certificate,
    forward: Forward,
    *,
    vocab_size: int,
    rule: Rule | None = None,
    redrafter: Redrafter | None = None,
    tolerance: float | None = None,
    num_nodes: int = NUM_NODES,
    on_round: Callable[[], None] = lambda: None,
) -> Report:
    """Replay a certificate.

    Args:
        certificate: The record.
        forward: The target, in float64.
        vocab_size: Tokens that have a logit.
        rule: The verifier, if it is no registered one.
        redrafter: The drafter, made again; `None` takes the declared draft laws as they are.
        tolerance: See `TOLERANCES`; `None` takes that of the target's type.
        num_nodes: Nodes whose coupling is enumerated at most, spread evenly over the run.
        on_round: Called after every round.
    """
    report = Report(num_requests=len(certificate.requests))
    place, reason = _whole(certificate, vocab_size)
    if reason is not None:
        report.findings.append(Finding(request=0, round=0, field=place, reason=reason))
        return report
    dtype = str(certificate.header["target"]["dtype"])
    tolerance = TOLERANCES.get(dtype, 0.0) if tolerance is None else tolerance
    visited = sum(
        1 + len(one["verdict"]["path"]) for own in certificate.requests for one in own["rounds"]
    )
    every = max(1, math.ceil(visited / num_nodes))
    for number, request in enumerate(certificate.requests, start=1):
        replayed = _Replay(
            certificate.arrays, request, report, forward, tolerance=tolerance, every=every
        )
        _replay(replayed, number, rule, redrafter, on_round)
    if redrafter is None:
        report.notes.append(
            "draft laws were taken as declared; the drawn children were checked against them"
        )
    left = report.num_nodes - report.num_enumerated
    if left:
        report.notes.append(
            f"the coupling of {left} of {report.num_nodes} nodes was not enumerated; their verdicts "
            "are those of the verifier run again"
        )
    narrowed = report.num_enumerated - report.num_whole
    if narrowed:
        report.notes.append(
            f"at {narrowed} nodes the enumerated draft law was conditioned on its most probable tokens"
        )
    return report


def _whole(certificate: Certificate, vocab_size: int) -> tuple[str, str | None]:
    """The first thing that is wrong with the document itself."""
    try:
        broken = broken_seal(certificate.document())
        if broken is not None:
            return broken, "the seal does not fit the contents: the record was changed or damaged"
        for name in certificate.arrays.stored:
            certificate.arrays.get(name)
        size = certificate.header["target"]["vocab_size"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return "document", f"malformed: {type(error).__name__}: {error}"
    if size != vocab_size:
        return "header.target.vocab_size", f"got {size}, the target has {vocab_size} tokens"
    return "", None


def _replay(
    replayed: "_Replay",
    number: int,
    rule: Rule | None,
    redrafter: Redrafter | None,
    on_round: Callable[[], None],
) -> None:
    report, place = replayed.report, 0
    try:
        replayed.begin(rule)
        for place, _ in enumerate(replayed.request["rounds"], start=1):
            replayed.check_round(place - 1)
            on_round()
        place = 0
        replayed.end()
        if redrafter is not None:
            for found in redrafter.redraft(replayed.request, replayed.trees, report.drafts):
                report.findings.append(
                    Finding(
                        request=number,
                        round=found.round,
                        field="tree",
                        reason=found.reason,
                        is_wrong=found.is_wrong,
                    )
                )
    except _MismatchError as error:
        report.findings.append(
            Finding(
                request=number,
                round=place,
                field=error.field,
                reason=str(error),
                is_wrong=error.is_wrong,
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"malformed: {type(error).__name__}: {error}"
        report.findings.append(Finding(request=number, round=place, field="fields", reason=reason))


class _Replay:
    """One request while it is replayed.

    Args:
        arrays: Laws and logits.
        request: The request's fields.
        report: Receives figures.
        forward: The target.
        tolerance: Of logits.
        every: One of so many nodes is enumerated.
    """

    def __init__(
        self,
        arrays: Arrays,
        request: Mapping[str, Any],
        report: Report,
        forward: Forward,
        *,
        tolerance: float,
        every: int,
    ) -> None:
        self.arrays, self.request, self.report = arrays, request, report
        self._forward, self._tolerance, self._every = forward, tolerance, every
        self.trees: list[TokenTree] = []
        self._text: tuple[int, ...] = ()
        self._committed = Tensor()
        self._place = 0

    def begin(self, rule: Rule | None) -> None:
        """Check the request's own fields, and read the whole text once."""
        request = self.request
        _check_types(request)
        self._rules = SamplingRules(**request["rules"])
        self._verifier = _verifier_of(str(request["verifier"]), rule)
        self._coupling = Coupling(self._verifier)
        self._draws = _Tape(RequestDraws(request["seed"], request["row"]))
        self._text = tuple(request["prompt_ids"])
        tokens = [token for one in request["rounds"] for token in one["token_ids"]]
        _equal("token_ids", list(request["token_ids"]), tokens, "the rounds committed")
        if not self._text:
            raise _MismatchError("prompt_ids", "the prompt is empty")
        if tokens:
            self._committed = self._forward((*self._text, *tokens[:-1]), len(self._text) - 1)

    def check_round(self, place: int) -> None:
        """Check one round.

        Raises:
            _MismatchError: Naming the field.
        """
        one, is_last = self.request["rounds"][place], place == len(self.request["rounds"]) - 1
        _equal("context_length", one["context_length"], len(self._text), "the text before it has")
        tree = self._tree(one["tree"])
        self._check_draws(one, tree)
        laws = self._check_laws(one, tree)
        verdict = self._check_verdict(one, tree, laws)
        self._check_coupling(tree, laws, verdict)
        self._check_commit(one, tree, verdict, is_last=is_last)
        self.trees.append(tree)
        self.report.num_rounds += 1
        self.report.num_tokens += len(one["token_ids"])

    def end(self) -> None:
        """Check how the text ended."""
        request = self.request
        tokens, reason = request["token_ids"], request["finish_reason"]
        limit = request["max_new_tokens"]
        if len(tokens) > limit:
            raise _MismatchError("max_new_tokens", f"{len(tokens)} tokens with a limit of {limit}")
        possible = {"stop"}
        if tokens and tokens[-1] in request["eos_ids"]:
            possible = {"eos"}
        elif len(tokens) == limit:
            possible |= {"length"}
        else:
            possible |= {None, "error"}  # interrupted, or ended by an error
        if reason not in possible:
            raise _MismatchError("finish_reason", f"{reason!r} does not fit the end of the text")

    def _tree(self, stored: Mapping[str, Any]) -> TokenTree:
        try:
            tree = tree_of(stored, self.arrays)
        except (MongeError, KeyError, TypeError) as error:
            raise _MismatchError("tree", str(error)) from error
        _equal("tree.tokens", tree.token_ids[0], self._text[-1], "the text ends with")
        return tree

    def _check_draws(self, one: Mapping[str, Any], tree: TokenTree) -> None:
        """Every drawn child is what the declared way of drawing gives for its uniforms."""
        place, drawn = self._place, {tuple(own["path"]): own for own in one["draws"]}
        _equal("start", one["start"], place, "the round before it ended at uniform")
        if len(drawn) != len(one["draws"]):
            raise _MismatchError("draws", "a node drew its children twice")
        first = min((own["start"] for own in one["draws"]), default=one["verify"][0])
        if first < place:
            raise _MismatchError("draws", f"uniform {first} was used by an earlier round")
        if first > place:
            if self.request["controller"] in _STEADY:
                raise _MismatchError("draws", f"uniforms {place} to {first} were left out")
            self.report.skipped += first - place
        spans = [(own["start"], own["stop"]) for own in one["draws"]] + [tuple(one["verify"])]
        for (_, stop), (start, _) in pairwise(spans):
            if stop != start:
                raise _MismatchError("draws", f"uniforms {stop} to {start} are used otherwise")
        self._draws.move_to(len(self._text))
        for node, proposal in enumerate(tree.proposals):
            offered = tuple(tree.token_ids[child] for child in tree.candidates[node])
            path = tree.path_tokens(node)
            if isinstance(proposal, Deterministic | Arbitrary):
                _equal(f"tree.candidates[{node}]", offered, proposal.token_ids, "declared are")
                continue
            if path not in drawn:
                raise _MismatchError("draws", f"node {node} is declared as drawn and has no draw")
            own = drawn.pop(path)
            self._draws.seek(own["start"])
            right = _given(proposal.draw, self._draws)
            _equal(f"tree.candidates[{node}]", offered, right, "its uniforms give")
            _equal("draws.tokens", tuple(own["tokens"]), right, "the uniforms give")
            _equal("draws.stop", own["stop"], self._draws.place, "the last uniform is")
        for own in drawn.values():
            is_left = tuple(own["path"]) and not _has(tree, tuple(own["path"]))
            if not is_left and not any(isinstance(kind, Arbitrary) for kind in tree.proposals):
                raise _MismatchError("draws", f"children after {own['path']} are not in the tree")

    def _check_laws(self, one: Mapping[str, Any], tree: TokenTree) -> dict[int, Law]:
        """The stated laws are the target's, up to rounding of its logits."""
        nodes = [node for node, _ in one["laws"]]
        if sorted(set(nodes)) != nodes or any(not 0 <= node < tree.num_nodes for node in nodes):
            raise _MismatchError("laws", f"nodes {nodes} are not nodes of the tree, in order")
        exact = self._exact_logits(tree, nodes)
        laws: dict[int, Law] = {}
        for node, stored in one["laws"]:
            name = f"laws of node {node}"
            try:
                laws[node], ids, logits = self._stated(stored)
            except (MongeError, KeyError, TypeError) as error:
                raise _MismatchError(name, str(error)) from error
            row = exact[node]
            if int(ids.max()) >= row.numel() or logits.numel() != ids.numel():
                raise _MismatchError(name, "its tokens are not those of the target")
            difference = _largest_difference(logits, row[ids])
            self.report.logit_difference = max(self.report.logit_difference, difference)
            if difference > self._tolerance:
                raise _MismatchError(
                    name,
                    f"a logit differs by {difference:.2g} from the float64 forward, which is more "
                    f"than the tolerance of {self._tolerance:g}",
                )
            self._check_rules(name, laws[node], ids, logits, row)
        return laws

    def _stated(self, stored: Mapping[str, Any]) -> tuple[Law, Tensor, Tensor]:
        """A stated law, its tokens and their logits."""
        logits = self.arrays.get(stored["logits"])
        if "masses" not in stored and "token" not in stored:
            return law_from_logits(logits, self._rules), torch.arange(logits.numel()), logits
        law = law_of(stored, self.arrays)
        return law, law.sparse().token_ids, logits

    def _check_rules(self, name: str, law: Law, ids: Tensor, logits: Tensor, exact: Tensor) -> None:
        """The law is what the sampling rules make of logits within the tolerance."""
        self.report.law_distance = max(
            self.report.law_distance, _distance(law, law_from_logits(exact, self._rules))
        )
        own = law.sparse()
        # What is cut takes its mass along, so that masses are a function of the kept logits.
        scores = logits.double() - logits.double().max()
        masses = (
            torch.softmax(scores / self._rules.temperature, 0) if own.probs.numel() > 1 else 1.0
        )
        if float((law.at(ids) - masses).abs().max()) > _MASS_ROUNDING:
            raise _MismatchError(name, "its masses are not those of its logits")
        # The float64 logits, with the stated ones where they are stated.
        mixed = exact.clone()
        mixed[ids] = logits.double()
        near = law_from_logits(mixed, self._rules).sparse()
        kept, among = set(own.token_ids.tolist()), set(near.token_ids.tolist())
        low, moved = float(mixed[sorted(kept)].min()), [float(mixed[one]) for one in kept ^ among]
        slack = 2 * self._tolerance
        if all(abs(value - low) <= slack for value in moved) or _distance(law, near) <= slack:
            return
        raise _MismatchError(name, "it keeps other tokens than the sampling rules do")

    def _exact_logits(self, tree: TokenTree, nodes: Sequence[int]) -> dict[int, Tensor]:
        """Float64 logits at nodes of the tree: from the committed text where they lie on it."""
        start = len(self._text) - len(self.request["prompt_ids"])
        ahead = tuple(self.request["token_ids"][start:])
        found: dict[int, Tensor] = {}
        # Deepest first: one forward serves all nodes of its path.
        for node in sorted(nodes, key=lambda one: -len(tree.path(one))):
            path = tree.path_tokens(node)
            if node in found:
                continue
            if path == ahead[: len(path)] and start + len(path) < self._committed.shape[0]:
                found[node] = self._committed[start + len(path)]
                continue
            rows = self._forward((*self._text, *path), len(self._text) - 1)
            found |= {
                at: rows[depth]
                for depth, at in enumerate((0, *tree.path(node)))
                if at in nodes and at not in found
            }
        return found

    def _check_verdict(
        self, one: Mapping[str, Any], tree: TokenTree, laws: Mapping[int, Law]
    ) -> Verdict:
        """The verifier, run again on the same tree, laws and uniforms, decides so."""
        start, stop = one["verify"]
        self._draws.seek(start)
        try:
            right = self._verifier.verify(tree, _Stated(laws, tree.num_nodes), self._draws)
        except (MongeError, KeyError) as error:
            raise _MismatchError("verdict", f"the verifier refuses the tree: {error}") from error
        stated = one["verdict"]
        _equal("verdict.path", tuple(stated["path"]), right.path, "the verifier accepts")
        _equal("verdict.next_token", stated["next_token"], right.next_token, "the verifier draws")
        _equal("verdict.next_kind", stated["next_kind"], right.next_kind, "the verifier says")
        _equal("verdict.examined", tuple(stated["examined"]), right.examined, "the verifier says")
        _equal("verify", stop, self._draws.place, "the verifier's last uniform is")
        self._place = stop
        return right

    def _check_coupling(self, tree: TokenTree, laws: Mapping[int, Law], verdict: Verdict) -> None:
        """The verifier keeps the target's law at every node that it stood on."""
        visited = (0, *verdict.path)
        report = self.report
        for place, node in enumerate(visited):
            if not tree.candidates[node]:
                continue
            report.num_nodes += 1
            if (report.num_nodes - 1) % self._every:
                continue
            levels = [
                Level(target_law=laws[at], proposal=tree.proposals[at])
                for at in visited[place : place + 3]
                if at in laws
            ]
            if not levels:
                continue
            found = self._coupling.error_at(levels)
            if found.error is None:
                continue
            report.num_enumerated += 1
            report.num_whole += found.is_whole
            report.law_error = max(report.law_error, found.error)
            if not found.error < LAW_BOUND:
                raise _MismatchError(
                    f"coupling of node {node}",
                    f"the verifier {self._verifier.title} gives the next token another law than the "
                    f"target's: law error {found.error:.2g}",
                )

    def _check_commit(
        self, one: Mapping[str, Any], tree: TokenTree, verdict: Verdict, *, is_last: bool
    ) -> None:
        """What was committed is what the verdict says, up to a stop."""
        tokens = tuple(one["token_ids"])
        whole = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
        _equal("token_ids", tokens, whole[: len(tokens)], "the verdict says")
        eos, reason = self.request["eos_ids"], self.request["finish_reason"]
        stops = [place for place, token in enumerate(tokens, start=1) if token in eos]
        is_cut = len(tokens) < len(whole)
        if not tokens or (stops and (stops[0] != len(tokens) or not is_last)):
            raise _MismatchError("token_ids", "the text goes on after its end")
        if is_cut and not (is_last and reason in {"eos", "stop", "length"}):
            raise _MismatchError(
                "token_ids", f"{len(tokens)} of the {len(whole)} tokens of the verdict"
            )
        self._text += tokens


class _Tape(ClockDraws):
    """The uniforms of a seed and row, from any place of their stream on.

    Args:
        own: The request's draws.
    """

    def __init__(self, own: RequestDraws) -> None:
        self._own, self._drawn = own, list[float]()
        self.place = 0

    def seek(self, place: int) -> None:
        """Go to a place of the stream."""
        if not 0 <= place <= len(self._drawn) + _FARTHEST:
            raise _MismatchError("draws", f"there is no uniform {place} in this run")
        self.place = place

    def uniform(self) -> float:
        while len(self._drawn) <= self.place:
            self._drawn.append(self._own.uniform())
        self.place += 1
        return self._drawn[self.place - 1]

    def bernoulli(self, prob: float) -> bool:
        return self.uniform() < prob

    def categorical(self, law: Law) -> int:
        return law.quantile(self.uniform())

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Tensor:
        return self._own.clocks(depth, draft, num_tokens)

    def move_to(self, place: int) -> None:
        self._own.move_to(place)


_FARTHEST: Final = 1 << 20
_STEADY: Final = frozenset({"Fixed()"})
"""Controllers that draw nothing."""


class _Stated:
    """Stated laws by node; looking at another one shows that another verifier decided."""

    def __init__(self, laws: Mapping[int, Law], num_nodes: int) -> None:
        self._laws, self._num_nodes = laws, num_nodes

    def __len__(self) -> int:
        return self._num_nodes

    def __getitem__(self, node: int) -> Law:
        if node not in self._laws:
            raise _MismatchError("laws", f"the verifier looks at node {node}, whose law is missing")
        return self._laws[node]


def _verifier_of(text: str, rule: Rule | None) -> Verifier:
    if rule is not None:
        return as_verifier(rule)
    if not text or text.startswith("<"):
        raise _MismatchError(
            "verifier", f"{text or 'no verifier'} has no name to make it by", is_wrong=False
        )
    try:
        return as_verifier(VERIFIERS.parse(text))
    except MongeError as error:
        raise _MismatchError("verifier", str(error)) from error


def _check_types(request: Mapping[str, Any]) -> None:
    for name in ("seed", "row", "max_new_tokens"):
        if type(request[name]) is not int:
            raise _MismatchError(name, f"{request[name]!r} is no whole number")
    for name in ("prompt_ids", "token_ids", "eos_ids"):
        if not all(type(token) is int and token >= 0 for token in request[name]):
            raise _MismatchError(name, "token ids are whole numbers of at least 0")


def _equal(name: str, stated: object, right: object, whose: str) -> None:
    if stated != right:
        raise _MismatchError(name, f"got {_short(stated)}; {whose} {_short(right)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_LONGEST: Final = 60


def _given(draw: Callable[[Any], tuple[int, ...]], draws: _Tape) -> tuple[int, ...]:
    try:
        return draw(draws)
    except MongeError as error:
        raise _MismatchError("draws", str(error)) from error


def _has(tree: TokenTree, path: tuple[int, ...]) -> bool:
    return any(tree.path_tokens(node) == path for node in range(tree.num_nodes))


def _largest_difference(one: Tensor, other: Tensor) -> float:
    left, right = one.double(), other.double()
    same = left == right  # minus infinity too
    return float((left - right).abs().masked_fill(same, 0.0).nan_to_num(math.inf).max())


def _distance(one: Law, other: Law) -> float:
    return total_variation(one.sparse(), other.sparse())

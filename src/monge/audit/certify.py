"""Replay a certificate without trust.

Each check asks one question about a round, in the order in which the round was made: was the text
before it the committed one, were the children drawn as declared, are the stated laws the target's,
does the verifier decide so, does it keep the target's law, and is what it decided what was
committed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from monge.audit.ends import check_end
from monge.audit.mismatch import MismatchError, check_equal
from monge.audit.plain_forward import Forward
from monge.audit.redraft import DraftFindings, Redrafter
from monge.audit.tape import Tape
from monge.core.errors import MongeError
from monge.core.law import Law, total_variation
from monge.core.proposal import Arbitrary, Deterministic
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.engine.text import Tokenizer
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.registry import VERIFIERS

Answer = Literal["exact", "not exact", "could not tell"]
EXIT: Final[Mapping[Answer, int]] = {"exact": 0, "not exact": 1, "could not tell": 2}
LAW_BOUND: Final = 1e-12
"""Largest law error that counts as rounding."""
TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.25, "bfloat16": 1.0}
"""Largest difference of a logit to the float64 forward that counts as rounding, by type."""
_FEW_SEEDS: Final = 3
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
        seeds: Seeds of the requests.
        dtype: Type in which the target computed.
        tolerance: Largest difference of a logit that counts as rounding.
        told: What the verdict takes from the record, with the number of requests.
        findings: What is wrong; empty for an exact run.
        notes: Where the checks are weaker.
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
    seeds: list[int] = field(default_factory=list[int])
    dtype: str = ""
    tolerance: float = 0.0
    told: dict[str, int] = field(default_factory=dict[str, int])
    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[str] = field(default_factory=list[str])

    @property
    def answer(self) -> Answer:
        """The verdict."""
        if any(finding.is_wrong for finding in self.findings):
            return "not exact"
        return "could not tell" if self.findings else "exact"

    def tell(self, fact: str) -> None:
        """Note what the verdict takes from a request."""
        self.told[fact] = self.told.get(fact, 0) + 1

    @property
    def basis(self) -> str:
        """What an exact run was made of, as far as that was checked: seeds, plans, ends, tolerance."""
        few = len(self.seeds) <= _FEW_SEEDS
        seeds = ", ".join(map(str, self.seeds)) if few else f"{len(self.seeds)} of the record"
        whole = self.num_requests
        told = [
            fact if count == whole else f"{fact} in {count} of {whole} requests"
            for fact, count in self.told.items()
        ]
        limit = f"{self.dtype} logits within {self.tolerance:g}"
        return "; ".join([f"seed {seeds}", *self.drafts.plan_facts(), *told, limit])

    def summary(self) -> str:
        """One line."""
        basis = f" ({self.basis})" if self.answer == "exact" else ""
        return (
            f"{self.num_rounds:,} rounds, {self.num_tokens:,} tokens, "
            f"worst law error {self.law_error:.0e}, "
            f"worst logit difference {self.logit_difference:.0e}: {self.answer}{basis}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        own = asdict(self)
        own["drafts"] = self.drafts.as_json()
        return {"verdict": self.answer, "summary": self.summary(), **own}


def certify(
    certificate: Certificate,
    forward: Forward,
    *,
    vocab_size: int,
    dtype: str | None = None,
    tokenizer: Tokenizer | None = None,
    eos_ids: frozenset[int] = frozenset(),
    rule: Rule | None = None,
    redrafter: Redrafter | None = None,
    undrafted: str = "no drafter was given",
    tolerance: float | None = None,
    num_nodes: int = NUM_NODES,
    on_round: Callable[[], None] = lambda: None,
) -> Report:
    """Replay a certificate.

    Args:
        certificate: The record.
        forward: The target, in float64.
        vocab_size: Tokens that have a logit.
        dtype: Type in which the target computes; `None` takes what the header says.
        tokenizer: The target's; without it texts with stop strings cannot be judged.
        eos_ids: Tokens that end a text of the target; the report tells where a request has others.
        rule: The verifier, if it is no registered one.
        redrafter: The drafter, made again; without it a run that drafted cannot be judged.
        undrafted: Why there is none.
        tolerance: See `TOLERANCES`; `None` takes that of the target's type.
        num_nodes: Nodes whose coupling is enumerated at most, spread evenly over the run.
        on_round: Called after every round.
    """
    report = Report(num_requests=len(certificate.requests))
    try:
        num_visited, is_drafted = _looked_over(certificate, vocab_size, dtype)
    except MismatchError as error:
        report.findings.append(_finding(error))
        return report
    report.dtype = str(certificate.header["target"]["dtype"])
    report.tolerance = TOLERANCES.get(report.dtype, 0.0) if tolerance is None else tolerance
    stored_in = getattr(torch, report.dtype, None) if tolerance is None else None
    target = _Target(forward, stored_in, tokenizer, eos_ids)
    every = max(1, math.ceil(num_visited / num_nodes))
    for number, request in enumerate(certificate.requests, start=1):
        replayed = _Replay(certificate.arrays, request, report, target, every=every)
        _replay(replayed, number, rule, redrafter, on_round)
    if redrafter is None and is_drafted:
        reason = (
            f"taken as declared, since {undrafted}; a draft law that was chosen after the uniforms "
            "can give any text"
        )
        report.findings.append(_finding(MismatchError("drafts", reason, is_wrong=False)))
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


def _looked_over(certificate: Certificate, vocab_size: int, dtype: str | None) -> tuple[int, bool]:
    """How many nodes were stood on, and whether anything was drafted.

    Raises:
        MismatchError: With the first thing that is wrong with the document itself.
    """
    try:
        broken = broken_seal(certificate.document())
        if broken is not None:
            raise MismatchError(
                broken, "the seal does not fit the contents: the record was changed or damaged"
            )
        for name in certificate.arrays.stored:
            certificate.arrays.get(name)
        stated = certificate.header["target"]
        check_equal("header.target.vocab_size", stated["vocab_size"], vocab_size, "the target has")
        check_equal("header.target.dtype", stated["dtype"], dtype or stated["dtype"], "it is")
        rounds = [one for own in certificate.requests for one in own["rounds"]]
        num_visited = sum(1 + len(one["verdict"]["path"]) for one in rounds)
        is_drafted = any(one["draws"] or len(one["tree"]["tokens"]) > 1 for one in rounds)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MismatchError("document", f"malformed: {type(error).__name__}: {error}") from error
    if not rounds:
        raise MismatchError("requests", "nothing to certify: there are no rounds", is_wrong=False)
    return num_visited, is_drafted


def _finding(error: MismatchError, request: int = 0, place: int = 0) -> Finding:
    return Finding(
        request=request,
        round=error.place or place,
        field=error.field,
        reason=str(error),
        is_wrong=error.is_wrong,
    )


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
            redrafter.redraft(replayed.request, replayed.trees, report.drafts)
    except MismatchError as error:
        report.findings.append(_finding(error, number, place))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"malformed: {type(error).__name__}: {error}"
        report.findings.append(Finding(request=number, round=place, field="fields", reason=reason))


@dataclass(frozen=True, slots=True)
class _Target:
    """The target that requests are replayed with; see `certify`."""

    forward: Forward
    dtype: torch.dtype | None  # whose numbers recorded logits must be; `None` for any
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]


class _Replay:
    """One request while it is replayed.

    Args:
        arrays: Laws and logits.
        request: The request's fields.
        report: Receives figures.
        target: The target.
        every: One of so many nodes is enumerated.
    """

    def __init__(
        self,
        arrays: Arrays,
        request: Mapping[str, Any],
        report: Report,
        target: "_Target",
        *,
        every: int,
    ) -> None:
        self.arrays, self.request, self.report = arrays, request, report
        self._target, self._tolerance, self._every = target, report.tolerance, every
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
        self._draws = Tape(request["seed"], request["row"])
        self._text = tuple(request["prompt_ids"])
        tokens = [token for one in request["rounds"] for token in one["token_ids"]]
        check_equal("token_ids", list(request["token_ids"]), tokens, "the rounds committed")
        if not self._text:
            raise MismatchError("prompt_ids", "the prompt is empty")
        if tokens:
            self._committed = self._target.forward((*self._text, *tokens[:-1]), len(self._text) - 1)

    def check_round(self, place: int) -> None:
        """Check one round.

        Raises:
            MismatchError: Naming the field.
        """
        one, is_last = self.request["rounds"][place], place == len(self.request["rounds"]) - 1
        check_equal(
            "context_length", one["context_length"], len(self._text), "the text before it has"
        )
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
        request, report = self.request, self.report
        if (unproven := check_end(request, self._target.tokenizer)) is not None:
            report.tell(f"end of the text not checked ({unproven})")
        if set(request["eos_ids"]) != self._target.eos_ids:
            report.tell(f"eos_ids {request['eos_ids']} of the request")
        if request["stop"]:
            report.tell(f"stop {request['stop']} of the request")
        if request["seed"] not in report.seeds:
            report.seeds.append(request["seed"])

    def _tree(self, stored: Mapping[str, Any]) -> TokenTree:
        try:
            tree = tree_of(stored, self.arrays)
        except (MongeError, KeyError, TypeError) as error:
            raise MismatchError("tree", str(error)) from error
        check_equal("tree.tokens", tree.token_ids[0], self._text[-1], "the text ends with")
        return tree

    def _check_draws(self, one: Mapping[str, Any], tree: TokenTree) -> None:
        """Every drawn child is what the declared way of drawing gives for its uniforms."""
        drawn = {tuple(own["path"]): own for own in one["draws"]}
        check_equal("start", one["start"], self._place, "the round before it ended at uniform")
        if len(drawn) != len(one["draws"]):
            raise MismatchError("draws", "a node drew its children twice")
        place = self._place
        for start, stop in [*((own["start"], own["stop"]) for own in one["draws"]), one["verify"]]:
            if start > place:
                raise MismatchError("draws", f"uniforms {place} to {start} were left out")
            if not place <= start <= stop:
                raise MismatchError("draws", f"uniform {min(start, stop)} was used before")
            place = stop
        self._draws.move_to(len(self._text))
        for node, proposal in enumerate(tree.proposals):
            offered = tuple(tree.token_ids[child] for child in tree.candidates[node])
            path = tree.path_tokens(node)
            if isinstance(proposal, Deterministic | Arbitrary):
                check_equal(f"tree.candidates[{node}]", offered, proposal.token_ids, "declared are")
                continue
            if path not in drawn:
                raise MismatchError("draws", f"node {node} is declared as drawn and has no draw")
            own = drawn.pop(path)
            self._draws.seek(own["start"])
            right = _given(proposal.draw, self._draws)
            check_equal(f"tree.candidates[{node}]", offered, right, "its uniforms give")
            check_equal("draws.tokens", tuple(own["tokens"]), right, "the uniforms give")
            check_equal("draws.stop", own["stop"], self._draws.place, "the last uniform is")
        for own in drawn.values():
            is_left = tuple(own["path"]) and not _has(tree, tuple(own["path"]))
            if not is_left and not any(isinstance(kind, Arbitrary) for kind in tree.proposals):
                raise MismatchError("draws", f"children after {own['path']} are not in the tree")

    def _check_laws(self, one: Mapping[str, Any], tree: TokenTree) -> dict[int, Law]:
        """The stated laws are the target's, up to rounding of its logits."""
        nodes = [node for node, _ in one["laws"]]
        if sorted(set(nodes)) != nodes or any(not 0 <= node < tree.num_nodes for node in nodes):
            raise MismatchError("laws", f"nodes {nodes} are not nodes of the tree, in order")
        exact = self._exact_logits(tree, nodes)
        laws: dict[int, Law] = {}
        for node, stored in one["laws"]:
            name = f"laws of node {node}"
            try:
                laws[node], ids, logits = self._stated(stored)
            except (MongeError, KeyError, TypeError) as error:
                raise MismatchError(name, str(error)) from error
            if self._target.dtype is not None and not torch.equal(
                logits.to(self._target.dtype).to(logits.dtype), logits
            ):
                raise MismatchError(
                    name,
                    f"its logits are no numbers of {self.report.dtype}, in which the target is said "
                    f"to compute, so that a tolerance of {self._tolerance:g} does not fit them",
                    is_wrong=False,
                )
            row = exact[node]
            if int(ids.max()) >= row.numel() or logits.numel() != ids.numel():
                raise MismatchError(name, "its tokens are not those of the target")
            difference = _largest_difference(logits, row[ids])
            self.report.logit_difference = max(self.report.logit_difference, difference)
            if difference > self._tolerance:
                raise MismatchError(
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
            raise MismatchError(name, "its masses are not those of its logits")
        # The float64 logits, with the stated ones where they are stated.
        mixed = exact.clone()
        mixed[ids] = logits.double()
        near = law_from_logits(mixed, self._rules).sparse()
        kept, among = set(own.token_ids.tolist()), set(near.token_ids.tolist())
        low, moved = float(mixed[sorted(kept)].min()), [float(mixed[one]) for one in kept ^ among]
        slack = 2 * self._tolerance
        if all(abs(value - low) <= slack for value in moved) or _distance(law, near) <= slack:
            return
        raise MismatchError(name, "it keeps other tokens than the sampling rules do")

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
            rows = self._target.forward((*self._text, *path), len(self._text) - 1)
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
            raise MismatchError("verdict", f"the verifier refuses the tree: {error}") from error
        stated = one["verdict"]
        check_equal("verdict.path", tuple(stated["path"]), right.path, "the verifier accepts")
        check_equal(
            "verdict.next_token", stated["next_token"], right.next_token, "the verifier draws"
        )
        check_equal("verdict.next_kind", stated["next_kind"], right.next_kind, "the verifier says")
        check_equal(
            "verdict.examined", tuple(stated["examined"]), right.examined, "the verifier says"
        )
        check_equal("verify", stop, self._draws.place, "the verifier's last uniform is")
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
                raise MismatchError(
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
        check_equal("token_ids", tokens, whole[: len(tokens)], "the verdict says")
        can_be_cut = is_last and self.request["finish_reason"] in {"eos", "stop", "length"}
        if not tokens or (len(tokens) < len(whole) and not can_be_cut):
            raise MismatchError(
                "token_ids", f"{len(tokens)} of the {len(whole)} tokens of the verdict"
            )
        self._text += tokens


class _Stated:
    """Stated laws by node; looking at another one shows that another verifier decided."""

    def __init__(self, laws: Mapping[int, Law], num_nodes: int) -> None:
        self._laws, self._num_nodes = laws, num_nodes

    def __len__(self) -> int:
        return self._num_nodes

    def __getitem__(self, node: int) -> Law:
        if node not in self._laws:
            raise MismatchError("laws", f"the verifier looks at node {node}, whose law is missing")
        return self._laws[node]


def _verifier_of(text: str, rule: Rule | None) -> Verifier:
    if rule is not None:
        return as_verifier(rule)
    if not text or text.startswith("<"):
        raise MismatchError(
            "verifier", f"{text or 'no verifier'} has no name to make it by", is_wrong=False
        )
    try:
        made = as_verifier(VERIFIERS.parse(text))
    except MongeError as error:
        raise MismatchError("verifier", str(error)) from error
    if not made.is_lossless:
        raise MismatchError("verifier", f"{text} is lossy")
    return made


def _check_types(request: Mapping[str, Any]) -> None:
    for name in ("seed", "row", "max_new_tokens"):
        if type(request[name]) is not int:
            raise MismatchError(name, f"{request[name]!r} is no whole number")
    if not all(type(text) is str and text for text in request["stop"]):
        raise MismatchError("stop", "stop strings are texts of at least one character")
    for name in ("prompt_ids", "token_ids", "eos_ids"):
        if not all(type(token) is int and token >= 0 for token in request[name]):
            raise MismatchError(name, "token ids are whole numbers of at least 0")


def _given(draw: Callable[[Any], tuple[int, ...]], draws: Tape) -> tuple[int, ...]:
    try:
        return draw(draws)
    except MongeError as error:
        raise MismatchError("draws", str(error)) from error


def _has(tree: TokenTree, path: tuple[int, ...]) -> bool:
    return any(tree.path_tokens(node) == path for node in range(tree.num_nodes))


def _largest_difference(one: Tensor, other: Tensor) -> float:
    left, right = one.double(), other.double()
    same = left == right  # minus infinity too
    return float((left - right).abs().masked_fill(same, 0.0).nan_to_num(math.inf).max())


def _distance(one: Law, other: Law) -> float:
    return total_variation(one.sparse(), other.sparse())

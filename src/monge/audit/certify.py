"""Replay a certificate without trust.

Each check is a file of `monge.audit.checks`. A round is checked in the order in which it was made:
the text before it, the children as declared, the target's laws, the verifier's decision, the law
that it keeps, and the committed tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from monge.audit.certificate import Arrays, Certificate
from monge.audit.certify_report import CertifyReport, Finding
from monge.audit.checks.commit import check_commit
from monge.audit.checks.coupling import check_coupling
from monge.audit.checks.document import check_document, check_fields, verifier_of
from monge.audit.checks.draws import check_draws, check_tree
from monge.audit.checks.end import check_end
from monge.audit.checks.laws import TOLERANCES, LawCheck, Target
from monge.audit.checks.verdict import check_verdict
from monge.audit.coupling import Coupling
from monge.audit.mismatch import MismatchError, check_equal
from monge.audit.plain_forward import Forward
from monge.audit.redraft import Redrafter
from monge.audit.tape import Tape
from monge.core.tree import TokenTree
from monge.engine.text import Tokenizer
from monge.verify.base import Rule

NUM_NODES: Final = 256
"""Nodes of a run whose coupling is enumerated."""


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
) -> CertifyReport:
    """Replay a certificate, and return the outcome of all checks.

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
    report = CertifyReport(num_requests=len(certificate.requests))
    try:
        num_visited, is_drafted = check_document(certificate, vocab_size, dtype)
    except MismatchError as error:
        report.findings.append(_finding(error))
        return report
    report.dtype = str(certificate.header["target"]["dtype"])
    report.tolerance = TOLERANCES.get(report.dtype, 0.0) if tolerance is None else tolerance
    target = Target(
        forward=forward,
        dtype=getattr(torch, report.dtype, None) if tolerance is None else None,
        tolerance=report.tolerance,
    )
    every = max(1, math.ceil(num_visited / num_nodes))
    for number, request in enumerate(certificate.requests, start=1):
        replayed = _Replay(certificate.arrays, request, report)
        try:
            for _ in replayed.rounds(target, rule, every=every):
                on_round()
            _check_end(request, report, tokenizer, eos_ids)
            if redrafter is not None:
                redrafter.redraft(request, replayed.trees, report.drafts)
        except MismatchError as error:
            report.findings.append(_finding(error, number, replayed.place))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            report.findings.append(
                Finding(
                    request=number,
                    round=replayed.place,
                    field="fields",
                    reason=f"malformed: {type(error).__name__}: {error}",
                )
            )
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


class _Replay:
    """One request while it is replayed.

    Attributes:
        trees: Trees of the rounds that hold.
        place: Number of the round that is checked, from 1; 0 before and after them.
    """

    def __init__(self, arrays: Arrays, request: Mapping[str, Any], report: CertifyReport) -> None:
        self._arrays, self._request, self._report = arrays, request, report
        self.trees, self.place = list[TokenTree](), 0

    def rounds(self, target: Target, rule: Rule | None, *, every: int) -> Iterator[None]:
        """Check the rounds one after another.

        Raises:
            MismatchError: Naming the field.
        """
        request, report = self._request, self._report
        check_fields(request)
        verifier = verifier_of(str(request["verifier"]), rule)
        coupling, tape = Coupling(verifier), Tape(request["seed"], request["row"])
        laws_of_text = LawCheck(target, request, self._arrays, report)
        text, last = tuple(request["prompt_ids"]), len(request["rounds"])
        is_ended = request["finish_reason"] in {"eos", "stop", "length"}
        for self.place, one in enumerate(request["rounds"], start=1):
            check_equal(
                "context_length", one["context_length"], len(text), "the text before it has"
            )
            tree = check_tree(one["tree"], self._arrays, text[-1])
            check_draws(one, tree, tape, len(text))
            laws = laws_of_text.check(one["laws"], tree, text)
            verdict = check_verdict(one, tree, laws, verifier, tape)
            check_coupling(coupling, tree, laws, verdict, report, every=every)
            tokens = tuple(one["token_ids"])
            check_commit(tokens, tree, verdict, can_be_cut=is_ended and self.place == last)
            text += tokens
            self.trees.append(tree)
            report.num_rounds += 1
            report.num_tokens += len(tokens)
            yield
        self.place = 0


def _check_end(
    request: Mapping[str, Any],
    report: CertifyReport,
    tokenizer: Tokenizer | None,
    eos_ids: frozenset[int],
) -> None:
    """Check the end of a text, and note what the verdict takes from the record."""
    if (unproven := check_end(request, tokenizer)) is not None:
        report.tell(f"end of the text not checked ({unproven})")
    if set(request["eos_ids"]) != eos_ids:
        report.tell(f"eos_ids {request['eos_ids']} of the request")
    if request["stop"]:
        report.tell(f"stop {request['stop']} of the request")
    if request["seed"] not in report.seeds:
        report.seeds.append(request["seed"])


def _finding(error: MismatchError, request: int = 0, place: int = 0) -> Finding:
    return Finding(
        request=request,
        round=error.place or place,
        field=error.field,
        reason=str(error),
        is_wrong=error.is_wrong,
    )

"""Replay a certificate without trust.

Each check is a file of `monge.audit.checks`. A round is checked in the order in which it was made:
the text before it, the children as declared, the target's laws, the verifier's decision, the law
that it keeps, and the committed tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from monge.audit.certificate import Certificate
from monge.audit.certify_report import CertifyReport, MismatchError, check_equal
from monge.audit.checks.coupling import CouplingCheck
from monge.audit.checks.laws import TOLERANCES, LawCheck
from monge.audit.checks.request import (
    check_document,
    check_end,
    check_fields,
    stated_loading,
    tell_settings,
    verifier_of,
)
from monge.audit.checks.round import check_commit, check_draws, check_tree, check_verdict
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
        report.loading = stated_loading(certificate.header)
    except MismatchError as error:
        report.add(error)
        return report
    report.dtype = str(certificate.header["target"]["dtype"])
    report.tolerance = TOLERANCES.get(report.dtype, 0.0) if tolerance is None else tolerance
    logit_dtype = getattr(torch, report.dtype, None) if tolerance is None else None
    every = max(1, math.ceil(num_visited / num_nodes))
    for number, request in enumerate(certificate.requests, start=1):
        place = 0
        try:
            check_fields(request)
            verifier = verifier_of(str(request["verifier"]), rule)
            laws = LawCheck(forward, logit_dtype, request, certificate.arrays, report)
            coupling = CouplingCheck(verifier, every, report)
            trees, tape = list[TokenTree](), Tape(request["seed"], request["row"])
            place = 1  # an error belongs to the round after the last tree
            for tree in _replayed(request, tape, laws, coupling):
                trees.append(tree)
                place = 1 + len(trees)
                on_round()
            place = 0
            tell_settings(request, report)
            check_end(request, tokenizer, eos_ids, report)
            if redrafter is not None:
                redrafter.redraft(request, trees, report.drafts)
        except MismatchError as error:
            report.add(error, number, place)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            reason = f"malformed: {type(error).__name__}: {error}"
            report.add(MismatchError("fields", reason), number, place)
    if redrafter is None and is_drafted:
        reason = (
            f"taken as declared, since {undrafted}; a draft law that was chosen after the uniforms "
            "can give any text"
        )
        report.add(MismatchError("drafts", reason, is_wrong=False))
    if left := report.num_nodes - report.num_enumerated:
        report.notes.append(
            f"the coupling of {left} of {report.num_nodes} nodes was not enumerated; their verdicts "
            "are those of the verifier run again"
        )
    if narrowed := report.num_enumerated - report.num_whole:
        report.notes.append(
            f"at {narrowed} nodes the enumerated draft law was conditioned on its most probable tokens"
        )
    return report


def _replayed(
    request: Mapping[str, Any], tape: Tape, laws: LawCheck, coupling: CouplingCheck
) -> Iterator[TokenTree]:
    """Check the rounds of a request one after another, and yield their trees."""
    text, report = tuple(request["prompt_ids"]), coupling.report
    is_ended = request["finish_reason"] in {"eos", "stop", "length"}
    for place, stored in enumerate(request["rounds"], start=1):
        check_equal("context_length", stored["context_length"], len(text), "the text before it has")
        tree = check_tree(stored["tree"], laws.arrays, text[-1])
        check_draws(stored, tree, tape, len(text))
        target_laws = laws.check(stored["laws"], tree, text)
        verdict = check_verdict(stored, tree, target_laws, coupling.verifier, tape)
        coupling.check(tree, target_laws, verdict)
        tokens = tuple(stored["token_ids"])
        is_last = place == len(request["rounds"])
        check_commit(tokens, tree, verdict, can_be_cut=is_ended and is_last)
        text += tokens
        report.num_rounds += 1
        report.num_tokens += len(tokens)
        yield tree

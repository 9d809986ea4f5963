"""Check the document, the fields of its requests, and the end of their texts."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from monge.audit.certificate import Certificate
from monge.audit.certify_report import CertifyReport, MismatchError, check_equal
from monge.core.errors import MongeError
from monge.core.sampling_rules import SamplingRules
from monge.engine.text import TextStream, Tokenizer
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.registry import VERIFIERS

_TOLD_OTHERWISE: Final = {"draft", "verifier", "controller", "dtype", "max_batch_size"}
"""Settings of a header that each request has, that the reader gives, or that decide no text."""


def check_document(
    certificate: Certificate, vocab_size: int, dtype: str | None
) -> tuple[int, bool]:
    """Check the seals, the arrays and the header, and return the visited nodes and if it drafts."""
    try:
        broken = certificate.broken_seal()
        if broken is not None:
            raise MismatchError(
                broken, "the seal does not fit the contents: the record was changed or damaged"
            )
        for name in certificate.arrays.stored:
            certificate.arrays.get(name)
        stated = certificate.header["target"]
        check_equal("header.target.vocab_size", stated["vocab_size"], vocab_size, "the target has")
        check_equal("header.target.dtype", stated["dtype"], dtype or stated["dtype"], "it is")
        rounds = [entry for request in certificate.requests for entry in request["rounds"]]
        num_visited = sum(1 + len(entry["verdict"]["path"]) for entry in rounds)
        is_drafted = any(entry["draws"] or len(entry["tree"]["tokens"]) > 1 for entry in rounds)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MismatchError("document", f"malformed: {type(error).__name__}: {error}") from error
    if not rounds:
        raise MismatchError("requests", "nothing to certify: there are no rounds", is_wrong=False)
    return num_visited, is_drafted


def stated_loading(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the header says that the models are loaded, as far as nothing else tells it."""
    loading = header.get("loading") or {}
    if not isinstance(loading, Mapping):
        raise MismatchError("header.loading", "malformed: expected names and values")
    weights = header["target"].get("weights", "exact")
    rounded = {} if weights == "exact" else {"weights": weights}
    return rounded | {key: value for key, value in loading.items() if key not in _TOLD_OTHERWISE}


def check_fields(request: Mapping[str, Any]) -> None:
    """Check the types of a request's fields, and that its text is that of its rounds."""
    for name in ("seed", "row", "max_new_tokens"):
        if type(request[name]) is not int:
            raise MismatchError(name, f"{request[name]!r} is no whole number")
    if not all(type(text) is str and text for text in request["stop"]):
        raise MismatchError("stop", "stop strings are texts of at least one character")
    for name in ("prompt_ids", "token_ids", "eos_ids"):
        if not all(type(token) is int and token >= 0 for token in request[name]):
            raise MismatchError(name, "token ids are whole numbers of at least 0")
    tokens = [token for entry in request["rounds"] for token in entry["token_ids"]]
    check_equal("token_ids", list(request["token_ids"]), tokens, "the rounds committed")
    if not request["prompt_ids"]:
        raise MismatchError("prompt_ids", "the prompt is empty")


def verifier_of(text: str, rule: Rule | None) -> Verifier:
    """Return the verifier of this text, or `rule` if it is given; it must not be lossy."""
    if rule is not None:
        return as_verifier(rule)
    if not text or text.startswith("<"):
        raise MismatchError(
            "verifier", f"{text or 'no verifier'} has no name to make it by", is_wrong=False
        )
    try:
        verifier = as_verifier(VERIFIERS.parse(text))
    except MongeError as error:
        raise MismatchError("verifier", str(error)) from error
    if not verifier.is_lossless:
        raise MismatchError("verifier", f"{text} is lossy")
    return verifier


def check_end(
    request: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    eos_ids: frozenset[int],
    report: CertifyReport,
) -> None:
    """Check that a text ends where its request says, and nowhere before.

    The report is told what the verdict takes from the record: ends that no record can prove, end
    tokens that are not `eos_ids`, and stop strings.
    """
    tokens, reason = request["token_ids"], request["finish_reason"]
    limit = request["max_new_tokens"]
    if len(tokens) > limit:
        raise MismatchError("max_new_tokens", f"{len(tokens)} tokens with a limit of {limit}")
    ends = [place for place, token in enumerate(tokens, 1) if token in request["eos_ids"]]
    stops = _stops(request, tokenizer) if request["stop"] else []
    if min([*ends, *stops], default=len(tokens)) < len(tokens):
        raise MismatchError("token_ids", "the text goes on after its end")
    # In the order in which the loop asks.
    if ends:
        possible = {"eos"}
    elif stops:
        possible = {"stop"}
    else:
        possible = {"length"} if len(tokens) == limit else {None, "error"}
        if request.get("stop_check", False) and tokens:
            possible.add("stop")
    if reason not in possible:
        raise MismatchError("finish_reason", f"{reason!r} does not fit the end of the text")
    unproven = {None: "interrupted", "error": "an error"}
    if not stops:
        unproven["stop"] = "code of the user"
    if reason in unproven:
        report.tell(f"end of the text not checked ({unproven[reason]})")
    if set(request["eos_ids"]) != eos_ids:
        report.tell(f"eos_ids {request['eos_ids']} of the request")
    if request["stop"]:
        report.tell(f"stop {request['stop']} of the request")


def tell_settings(request: Mapping[str, Any], report: CertifyReport) -> None:
    """Tell the report the settings that decide the text of a request, beside those of its end and its plans."""
    report.seeds.append(request["seed"])
    report.rows.append(request["row"])
    rules, usual = asdict(SamplingRules(**request["rules"])), asdict(SamplingRules())
    for name, value in rules.items():
        if name == "temperature" or value != usual[name]:
            report.tell(f"{name} {value}")
    report.tell(f"at most {request['max_new_tokens']} tokens")
    report.tell(f"verified by {request['verifier']}")
    for name, value in request.get("limits", {}).items():
        if value is not None:
            report.tell(f"plans limited to {name} {value}")


def _stops(request: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    """Return the place, from 1 on, of the token that completes the first stop string, if there is one."""
    if tokenizer is None:
        raise MismatchError(
            "stop", "stop strings cannot be looked for without a tokenizer", is_wrong=False
        )
    stream = TextStream(tokenizer, request["prompt_ids"], request["stop"])
    tokens = enumerate(request["token_ids"], 1)
    return [place for place, token in tokens if stream.push(token)][:1]

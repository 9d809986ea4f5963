"""Check the document and the fields of its requests."""

from collections.abc import Mapping
from typing import Any

from monge.audit.certificate import Certificate
from monge.audit.certify_report import MismatchError, check_equal
from monge.core.errors import MongeError
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.registry import VERIFIERS


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
        rounds = [one for own in certificate.requests for one in own["rounds"]]
        num_visited = sum(1 + len(one["verdict"]["path"]) for one in rounds)
        is_drafted = any(one["draws"] or len(one["tree"]["tokens"]) > 1 for one in rounds)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MismatchError("document", f"malformed: {type(error).__name__}: {error}") from error
    if not rounds:
        raise MismatchError("requests", "nothing to certify: there are no rounds", is_wrong=False)
    return num_visited, is_drafted


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
    tokens = [token for one in request["rounds"] for token in one["token_ids"]]
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
        made = as_verifier(VERIFIERS.parse(text))
    except MongeError as error:
        raise MismatchError("verifier", str(error)) from error
    if not made.is_lossless:
        raise MismatchError("verifier", f"{text} is lossy")
    return made

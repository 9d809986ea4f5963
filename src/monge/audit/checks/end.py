"""Check where a recorded text ends."""

from collections.abc import Mapping
from typing import Any

from monge.audit.certify_report import MismatchError
from monge.engine.text import TextStream, Tokenizer


def check_end(request: Mapping[str, Any], tokenizer: Tokenizer | None) -> str | None:
    """Check that a text ends where its request says, and nowhere before.

    Args:
        request: The request's fields.
        tokenizer: The target's; needed for stop strings.

    Returns:
        For an end that no record can prove, its cause; else `None`.
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
    if reason == "stop" and not stops:
        return "code of the user"
    return {None: "interrupted", "error": "an error"}.get(reason)


def _stops(request: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    """Return the place, from 1 on, of the token that completes the first stop string, if there is one."""
    if tokenizer is None:
        raise MismatchError(
            "stop", "stop strings cannot be looked for without a tokenizer", is_wrong=False
        )
    stream = TextStream(tokenizer, request["prompt_ids"], request["stop"])
    tokens = enumerate(request["token_ids"], 1)
    return [place for place, token in tokens if stream.push(token)][:1]

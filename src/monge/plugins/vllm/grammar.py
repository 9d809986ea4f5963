"""Drafts that a grammar forbids: verified here, where vLLM drops them.

vLLM drops a forbidden draft because of what it is, and draws the token in its place from p: a bias.
The bitmask of its position gives it no mass, so a verifier rejects it, and draws from the residual.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from monge.plugins.vllm.verify import PLACEHOLDER


def mend(manager: Any) -> None:
    """Replace two methods of vLLM's `StructuredOutputManager`, in a single object."""
    for ours in (validate_tokens, grammar_bitmask):
        setattr(manager, ours.__name__, partial(ours, manager))


def validate_tokens(manager: Any, request: Any, spec_tokens: list[int]) -> list[int]:
    """Return the drafted tokens that the grammar allows, and the first that it forbids."""
    allowed = type(manager).validate_tokens(manager, request, spec_tokens)
    following = spec_tokens[len(allowed) : len(allowed) + 1]
    return allowed + [token for token in following if token != PLACEHOLDER]


def grammar_bitmask(
    manager: Any,
    requests: Mapping[str, Any],
    structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: Mapping[str, list[int]],
) -> Any:
    """Return vLLM's bitmasks for drafts whose last token may be forbidden, which no grammar can follow."""
    kind, tokens = type(manager), dict(scheduled_spec_decode_tokens)
    for name in structured_output_request_ids:
        if drafted := tokens.get(name):
            allowed = kind.validate_tokens(manager, requests[name], drafted)
            tokens[name] = allowed + [PLACEHOLDER] * (len(drafted) - len(allowed))
    return kind.grammar_bitmask(manager, requests, structured_output_request_ids, tokens)

"""Read prompts, and see how surprising the target finds the ends of them."""

from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import NodeBlock, SequenceModel
from monge.core.prompt import PromptProfile
from monge.engine.logprobs import of_logits
from monge.engine.session import Session

_LAST: Final = 32
"""Tokens whose laws are looked at.

A forward of that many nodes is a fraction of the prompt's own, and their mean is steady.
"""

_SCORED: Final = 64
"""Tokens whose logits are held at a time where log-probabilities are wanted; at least `_LAST`."""


def score(
    session: Session, target: SequenceModel, first: int, size: int
) -> Float[Tensor, "nodes vocab"]:
    """Read and commit tokens of a prompt; the log-probabilities of those after them are noted if requested.

    Args:
        session: Of the prompt; its sequence holds the first tokens.
        target: The target.
        first: How many tokens it holds.
        size: How many more are read, at least one.

    Returns:
        The logits after the tokens that were read last, all of them if they are few.
    """
    text, number = session.request.prompt_ids, session.context.request_id
    wanted, end = session.request.prompt_logprobs, first + size
    step = size if target.no_draft_reason is not None else _SCORED
    while True:
        count = min(step, end - first)
        logits = target.extend({number: NodeBlock.chain(text[first : first + count])})[number]
        target.commit({number: range(count)})
        first += count
        if wanted is not None:
            following = text[first - count + 1 : first + 1]
            session.prompt_logprobs += of_logits(logits, following, wanted.num_top)
        if first == end:
            return logits


def ending_size(target: SequenceModel, prompt: PromptProfile) -> int:
    """Return how many tokens before a prompt's last one are read with their laws.

    0 if these are known, or cannot be.
    """
    if prompt.surprisal is not None or target.no_draft_reason is not None:
        return 0
    return min(_LAST, len(prompt.token_ids) - 1)


def profiled(prompt: PromptProfile, logits: Float[Tensor, "nodes vocab"]) -> PromptProfile:
    """The prompt with its surprisal and entropy, from the logits at the tokens before its last one."""
    following = prompt.token_ids[-len(logits) :]
    logs = torch.log_softmax(logits.double(), dim=-1)
    own = logs[torch.arange(len(following)), torch.tensor(following, device=logs.device)]
    # Tokens of mass zero add nothing to the entropy; one that is read all the same is infinitely
    # surprising.
    terms = torch.where(logs.isfinite(), logs.exp() * logs, 0.0)
    return replace(prompt, surprisal=float(-own.mean()), entropy=float(-terms.sum(dim=-1).mean()))

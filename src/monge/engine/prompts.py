"""Read prompts, and see how surprising the target finds the ends of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from monge.core.model import NodeBlock, SequenceModel
from monge.core.prompt import PromptProfile

_LAST: Final = 32
"""Tokens whose laws are looked at: a forward of that many nodes is a fraction of the prompt's own, and their mean is steady."""


def open_profiled(target: SequenceModel, prompts: Mapping[int, PromptProfile]) -> dict[int, PromptProfile]:
    """Open sequences with all but the last token of their prompts, and add what the target's laws say of these.

    No law of a token that is still to be generated is looked at.

    Args:
        target: The target.
        prompts: By sequence; those whose surprisal is known are only opened.

    Returns:
        The profiles; without surprisal and entropy where a prompt is a single token, or tokens must be read one at a time.
    """
    read = {
        sequence: NodeBlock.chain(prompt.token_ids[-_LAST - 1 : -1])
        for sequence, prompt in prompts.items()
        if prompt.surprisal is None and len(prompt.token_ids) > 1 and target.no_draft_reason is None
    }
    target.open(
        {
            sequence: prompt.token_ids[: len(prompt.token_ids) - 1 - (len(read[sequence].token_ids) if sequence in read else 0)]
            for sequence, prompt in prompts.items()
        }
    )
    found = dict(prompts)
    if read:
        for sequence, logits in target.extend(read).items():
            following = prompts[sequence].token_ids[-len(read[sequence].token_ids) :]
            logs = torch.log_softmax(logits.double(), dim=-1)
            own = logs[torch.arange(len(following)), torch.tensor(following, device=logs.device)]
            # Tokens of mass zero add nothing to the entropy; one that is read all the same is infinitely surprising.
            terms = torch.where(logs.isfinite(), logs.exp() * logs, 0.0)
            found[sequence] = replace(
                prompts[sequence],
                surprisal=float(-own.mean()),
                entropy=float(-terms.sum(dim=-1).mean()),
            )
        target.commit({sequence: range(len(block.token_ids)) for sequence, block in read.items()})
    return found

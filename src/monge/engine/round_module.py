"""A whole round as a module of tensors: draft a chain, score it, decide; what lies between the forwards is in it too."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from monge.core.tensor_laws import drawn, largest, make_laws, tempered_laws
from monge.engine.step import StepSpec
from monge.engine.step_module import Step
from monge.verify.base import ChainDecision

NUM_FACTS = 3
"""What a round gives behind its drafted tokens: how many are kept, the token after them, and whether all laws are laws."""


class Round(torch.nn.Module):
    """One round of one request, with everything that varies between rounds as an input.

    Nodes of a chain lie in the cache where their positions say, so a node sees the columns up to its own position. What is
    read and written is what the two networks' steps read and write; the tensors are theirs.

    Args:
        draft: The draft model's step.
        target: The target's.
        specs: Of both, in this order.
        depth: Tokens of the chain.
        decision: The verifier.
        is_greedy: Whether the laws are point masses at the largest logits; otherwise a temperature makes them.
    """

    def __init__(
        self,
        draft: Step,
        target: Step,
        specs: tuple[StepSpec, StepSpec],
        depth: int,
        decision: ChainDecision,
        *,
        is_greedy: bool,
    ) -> None:
        super().__init__()
        self.draft, self.target = draft, target
        self.depth, self.is_greedy = depth, is_greedy
        self.specs, self.decision = specs, decision

    def forward(
        self,
        text: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        noise: tuple[Tensor, Tensor],
        draft_kept: Sequence[Tensor],
        target_kept: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What came of the round, and what it was made of: laws of the drafts and of the target, or logits where it is greedy.

        Args:
            text: Committed tokens that the draft model has not read, the root last, `[1, tokens]`.
            places: Length of the text `[1]`; columns that the draft model's nodes may see, from 0 on, `[seq]`; the target's.
            noise: A uniform for every draw and test, in the order of the plain round, `[2 depth + 1]`; the temperature `[1]`.
                Where the round is greedy nobody looks at them.
            draft_kept: Keys and values of the draft model, changed in place.
            target_kept: The target's, likewise.

        Returns:
            The drafted tokens and the facts behind them `[depth + NUM_FACTS]`; `[depth, vocab]`; `[depth + 1, vocab]`.
        """
        end, draft_columns, target_columns = places
        ahead = torch.arange(self.depth + 1, device=text.device)
        rows, tokens = self._drafted(text, (end, draft_columns), noise, draft_kept)
        chain = torch.cat([text[0, -1:], tokens])[None]
        positions = (end - 1 + ahead)[None]
        scored = _read(self.target, self.specs[1], chain, (positions, target_columns, ahead), target_kept)
        if self.is_greedy:
            facts = self.decision.of_points(largest(scored), tokens)
            is_good = rows.amax(-1).isfinite().all() & scored.amax(-1).isfinite().all()
        else:
            scored = tempered_laws(scored, noise[1])
            facts = self.decision.of_laws(scored, rows, tokens, noise[0][self.depth :])
            is_good = make_laws(rows) & make_laws(scored)
        return torch.cat([tokens, *facts, is_good.long()[None]]), rows, scored

    def tensors(self) -> Mapping[str, Tensor]:
        """Weights and buffers by name."""
        return dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))

    def _drafted(
        self, text: Tensor, places: tuple[Tensor, Tensor], noise: tuple[Tensor, Tensor], kept: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What the tokens were drawn from, and the tokens."""
        (end, columns), count = places, text.shape[1]
        positions = (end - count + torch.arange(count, device=text.device))[None]
        shown = torch.full((1,), count - 1, device=text.device)
        rows, tokens = list[Tensor](), list[Tensor]()
        for level in range(self.depth):
            logits = _read(self.draft, self.specs[0], text, (positions, columns, shown), kept)[-1:]
            rows.append(logits if self.is_greedy else tempered_laws(logits, noise[1]))
            tokens.append(largest(logits) if self.is_greedy else drawn(rows[-1][0], noise[0][level : level + 1]))
            text, positions, shown = tokens[-1][None], (end + level)[None], torch.zeros_like(shown)
        return torch.cat(rows), torch.cat(tokens)


def _read(
    step: Step, spec: StepSpec, token_ids: Tensor, places: tuple[Tensor, Tensor, Tensor], kept: Sequence[Tensor]
) -> Tensor:
    """Logits of the nodes that are asked for, or of all where the network does not let them be chosen."""
    positions, columns, shown = places
    seen = (columns <= positions[0, :, None])[None, None]
    if spec.mask_dtype != torch.bool:
        seen = torch.where(seen, 0.0, torch.finfo(spec.mask_dtype).min).to(spec.mask_dtype)
    logits, *_ = step(token_ids, (positions, positions, shown), [seen] * len(spec.kinds), kept)
    return logits[0]

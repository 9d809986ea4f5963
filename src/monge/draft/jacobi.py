"""Jacobi decoding: the target's answers to the last guesses are the next guesses."""

from dataclasses import dataclass

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.setting_types import check_bounds
from monge.core.tree import TokenTree, fixed_chain
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free

Guesses = tuple[int, ...]
"""State of one request: the guesses that the last pass gave for the tokens behind the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiDrafter(ModelFreeDrafter[Guesses]):
    """A chain of guesses, each the target's most probable token after the guesses before it, one round ago.

    One pass of the target over a chain of guesses y gives `argmax p(. | text, y_1 .. y_i)` for
    every i at once; behind the accepted ones these are the next round's guesses. Positions that no
    pass has looked at repeat the guess before them. Candidates are a function of finished rounds
    (`Deterministic`).

    Args:
        num_draft_tokens: Guesses a round.

    Reference:
        Santilli et al., "Accelerating transformer inference for translation via parallel decoding"
        (arXiv 2305.10427), Jacobi iteration; at temperature 0 its fixed point is the greedy text.
    """

    num_draft_tokens: int = 8

    def __post_init__(self) -> None:
        check_bounds("jacobi", num_draft_tokens=self.num_draft_tokens)

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=self.num_draft_tokens, num_successors=1)

    def start(self, context: Context) -> Guesses:
        return ()

    def tree(self, context: Context, state: Guesses, plan: DraftPlan, draws: Draws) -> TokenTree:
        root, size = context.token_ids[-1], plan.nodes(plan.depth(self.num_draft_tokens))
        last = state[-1] if state else root
        chain = (*state, *(last for _ in range(size - len(state))))
        return fixed_chain(root, chain[:size])

    def follow(self, context: Context, draft: Draft[Guesses], verdict: Verdict) -> Guesses:
        """Return the target's answers to the candidates below the accepted path.

        The first of these is not the new root, but stands in its place.
        """
        answers: list[int] = []
        node = verdict.path[-1] if verdict.path else 0
        while draft.tree.candidates[node]:
            node = draft.tree.candidates[node][0]
            answers.append(verdict.successors[node][0])
        return tuple(answers)

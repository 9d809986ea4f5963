"""Jacobi decoding: the target's answers to the last guesses are the next guesses."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.proposal import Deterministic
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, Drafter
from monge.draft.tree_of_paths import tree_of_paths

Guesses = tuple[int, ...]
"""State of one request: guesses of the tokens behind the text, as far as the last pass gave any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiDrafter(Drafter[Guesses]):
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
        if self.num_draft_tokens < 1:
            raise OptionError(
                f"jacobi: num_draft_tokens must be at least 1; got {self.num_draft_tokens}"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=1,
            max_depth=self.num_draft_tokens,
            needs_trees=False,
            num_successors=1,
            runs_network=False,
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[Guesses]:
        return [()] * len(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[Guesses],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[Guesses]]:
        drafts: list[Draft[Guesses]] = []
        for context, guesses, plan, row_draws in zip(contexts, states, plans, draws, strict=True):
            root, size = context.token_ids[-1], plan.nodes(plan.depth(self.num_draft_tokens))
            last = guesses[-1] if guesses else root
            chain = (*guesses, *(last for _ in range(size - len(guesses))))
            drafts.append(
                Draft(
                    tree_of_paths(root, [chain], num_nodes=size, depth=size, draws=row_draws),
                    guesses,
                )
            )
        return drafts

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[Guesses]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[Guesses]:
        return [
            _answers(draft.tree, verdict) for draft, verdict in zip(drafts, verdicts, strict=True)
        ]

    def close(self, context: Context) -> None:
        return None


def _answers(tree: TokenTree, verdict: Verdict) -> Guesses:
    """What the target says after the first candidates below the accepted path.

    The new root is in the first one's place.
    """
    answers: list[int] = []
    node = verdict.path[-1] if verdict.path else 0
    while tree.candidates[node]:
        node = tree.candidates[node][0]
        answers.append(verdict.successors[node][0])
    return tuple(answers)

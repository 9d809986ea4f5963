"""A draft model with another tokenizer: its text is proposed in the target's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.setting_types import check_bounds
from monge.draft.base import Capabilities, Draft, Drafter
from monge.draft.model import open_texts, read_text, within_reach
from monge.laws.draws import Draws
from monge.laws.proposal import Deterministic
from monge.laws.tree import fixed_chain
from monge.networks.base import ForeignModel, SequenceModel, draft_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenize(Drafter[None]):
    """Let a draft model with another tokenizer continue the text greedily, and propose that text in the target's tokens.

    Unlike `model` across vocabularies, it can propose tokens that only the target has. The
    candidates are a function of the text (`Deterministic`): no law of target tokens is known, so
    nothing is sampled.

    Args:
        model: The draft model, loaded across tokenizers; `None` for that of `monge.load`.
        num_own_tokens: Tokens that the draft model writes a round, in its own vocabulary.
        num_draft_tokens: Largest number of proposed target tokens.

    Raises:
        OptionError: If a size is too small, or the draft model shares the target's tokenizer.

    Reference:
        Timor et al., arXiv 2502.05202, string-level exact match (SLEM).
    """

    model: SequenceModel | None = field(default=None, repr=False)
    num_own_tokens: int = 4
    num_draft_tokens: int = 8

    def __post_init__(self) -> None:
        check_bounds(
            "retokenize", num_own_tokens=self.num_own_tokens, num_draft_tokens=self.num_draft_tokens
        )
        if self.model is not None and not isinstance(self.model, ForeignModel):
            raise OptionError(
                "drafter 'retokenize' is for a draft model with another tokenizer, loaded with "
                "cross_tokenizer=True; this one "
                "speaks the target's tokens: use drafter='model'"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=1,
            max_depth=self.num_draft_tokens,
            needs_trees=False,
            max_nodes=self.num_draft_tokens,
            max_length=draft_length(self._network),
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[None]:
        open_texts(self._network, contexts)
        return [None] * len(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[None],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[None]]:
        model = self._network
        plans = within_reach(model, contexts, plans)
        sizes = [plan.nodes(plan.depth(self.num_draft_tokens)) for plan in plans]
        wanted = {
            context.request_id: context.token_ids
            for context, size in zip(contexts, sizes, strict=True)
            if size > 0
        }
        if wanted:
            read_text(model, wanted)
        continuations = model.continuations(dict.fromkeys(wanted, self.num_own_tokens))
        return [
            Draft(
                fixed_chain(
                    context.token_ids[-1],
                    tuple(continuations.get(context.request_id, ())[:size]),
                ),
                None,
            )
            for context, size in zip(contexts, sizes, strict=True)
        ]

    def close(self, context: Context) -> None:
        self._network.close(context.request_id)

    @property
    def _network(self) -> ForeignModel:
        assert isinstance(self.model, ForeignModel), "monge.load provides it"
        return self.model

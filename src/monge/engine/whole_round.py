"""Rounds of one request that run as one: from the text that the draft model has not read to what is accepted."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from torch import Tensor

from monge.core.context import DraftPlan
from monge.core.draws import can_peek
from monge.core.law import Law, one_hot, unchecked_law
from monge.core.model import SequenceModel
from monge.core.proposal import Iid, Proposal
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.draft.base import Draft, OwnChain
from monge.engine.attempt import attempt
from monge.engine.cache import TreeCache
from monge.engine.clock import now
from monge.engine.hf import HfTreeModel
from monge.engine.round_module import NUM_FACTS
from monge.engine.session import Session
from monge.verify.base import ChainDecision

DEEPEST: Final = 8
"""Longest chain of such a round: every level is written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInputs:
    """What a round is told, the two caches placed.

    Args:
        text: Committed tokens that the draft model has not read, the root last.
        end: Length of the text.
        uniforms: One for every draw and test that there may be.
        temperature: Of the laws; 0 where the round is greedy.
        draft: The draft model's cache.
        target: The target's.
    """

    text: tuple[int, ...]
    end: int
    uniforms: list[float]
    temperature: float
    draft: TreeCache
    target: TreeCache


@runtime_checkable
class RoundProgram(Protocol):
    """Runs a `Round`."""

    @property
    def longest_text(self) -> int:
        """Most tokens that the draft model may have to read first: at least the last one, and one before it."""
        ...

    def __call__(self, inputs: RoundInputs) -> tuple[list[int], Tensor]:
        """The drafted tokens with the facts behind them, and the drafts' laws (see `Round.forward`)."""
        ...


class WholeRound:
    """Runs the rounds of requests alone whose draft is a chain of single draws; all others are left to the loop's stages.

    What it decides is what the stages would decide from the same draws, of which it uses as many.

    Args:
        target: The target.
        draft: The draft model.
        chain: What drafts are.
        decision: The verifier's.
        programs: What runs greedy rounds (`True`) and sampled ones.
        depth: Tokens of their chains; no more than those of drafts, which a plan may cut.
    """

    def __init__(
        self,
        target: HfTreeModel,
        draft: HfTreeModel,
        chain: OwnChain[Any],
        decision: ChainDecision,
        programs: Mapping[bool, RoundProgram],
        *,
        depth: int,
    ) -> None:
        self.depth, self.longest_text = depth, min(program.longest_text for program in programs.values())
        self._target, self._draft, self._chain = target, draft, chain
        self._decision, self._programs, self._is_off = decision, programs, False

    def is_of(self, target: SequenceModel, chain: OwnChain[Any] | None, decision: ChainDecision | None) -> bool:
        """Whether it runs the rounds of these parts."""
        return self._target is target and self._chain == chain and self._decision == decision

    def takes(self, session: Session, plan: DraftPlan, chain: OwnChain[Any]) -> bool:
        """Whether the round of a request alone can run as one.

        Args:
            session: The request.
            plan: Of the round.
            chain: What drafts are, of the drafter that knows the request.
        """
        request, depth = session.request, self.depth
        is_whole = plan.stop is None and not plan.num_fixed and plan.nodes(depth) == depth
        is_whole = is_whole and plan.depth(chain.depth) == depth
        if self._is_off or not is_whole or session.drafting != "together" or not can_peek(session.draws):
            return False
        if request.processors or request.logprobs is not None or request.rules.truncates:
            return False
        if not (self._draft.lays_chains and self._target.lays_chains):
            return False
        if not chain.is_next(session.context, session.drafter_state, plan):
            return False
        return len(session.context.token_ids) - self._draft.length(session.context.request_id) <= self.longest_text

    def run(self, session: Session, plan: DraftPlan, chain: OwnChain[Any]) -> tuple[Draft[Any], Verdict] | None:
        """The draft and what became of it; `None`, with nothing drawn or kept, where the stages must look at it themselves."""
        name, rules = session.context.request_id, session.context.rules
        made: list[tuple[list[int], Tensor]] = []
        start = now()
        error = attempt(lambda: made.append(self._programs[rules.temperature == 0](self._inputs(session))))
        self._target.note_forward(now() - start)
        if error is not None:
            self._is_off = True
            warnings.warn(
                f"rounds run stage by stage from here on, since running one as a whole failed: {type(error).__name__}: {error}",
                stacklevel=2,
            )
        if not made or not made[0][0][-1]:
            # What was read is dropped, so that nobody reads behind it.
            self._draft.commit({name: ()})
            self._target.commit({name: ()})
            return None
        numbers, laws = made[0]
        drawn, verdict = self._outcome(session, numbers, laws)
        return chain.draft(session.context, session.drafter_state, plan, drawn), verdict

    def _inputs(self, session: Session) -> RoundInputs:
        """Look at the draws, and make room in both caches."""
        assert can_peek(session.draws), "`takes` asks first"
        tokens, name, depth = session.context.token_ids, session.context.request_id, self.depth
        text = tokens[self._draft.length(name) :]
        return RoundInputs(
            text=text,
            end=len(tokens),
            uniforms=session.draws.peek(2 * depth + 1),
            temperature=float(session.context.rules.temperature),
            draft=self._draft.lay_chain(name, len(text) + depth - 1),
            target=self._target.lay_chain(name, depth + 1),
        )

    def _outcome(self, session: Session, numbers: list[int], laws: Tensor) -> tuple[list[tuple[int, Proposal]], Verdict]:
        """What was drawn, with its laws, and what became of it."""
        name, depth, tokens = session.context.request_id, self.depth, tuple(numbers[:-NUM_FACTS])
        accepted, token, _ = numbers[-NUM_FACTS:]
        for _ in range(depth + self._decision.num_uniforms(accepted, depth)):
            session.draws.uniform()
        # The text is read for good; the chain's nodes behind it wait for the commit.
        self._draft.commit({name: range(len(session.context.token_ids) - self._draft.length(name))})
        self._draft.lay_chain(name, depth - 1)
        drawn: list[tuple[int, Proposal]] = [
            (token, Iid(law)) for token, law in zip(tokens, _laws(session.context.rules, tokens, laws), strict=True)
        ]
        verdict = Verdict(
            path=tuple(range(1, accepted + 1)),
            next_token=token,
            next_kind="bonus" if accepted == depth else "correction",
            examined=(1,) * min(accepted + 1, depth),
        )
        return drawn, verdict


def _laws(rules: SamplingRules, tokens: tuple[int, ...], laws: Tensor) -> list[Law]:
    if rules.temperature == 0:
        return [one_hot(token, laws.device) for token in tokens]
    return [unchecked_law(row) for row in laws]

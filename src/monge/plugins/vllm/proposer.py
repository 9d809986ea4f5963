"""Network-free drafters for vLLM, through its `custom_class` hook.

**V1 model runner only.** vLLM calls this hook experimental and falls back to its V1 runner for it,
which it calls deprecated; the V2 runner has no such hook. The tokens are verified as one chain per
request with one-hot draft laws: drafts change the speed only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from monge.control.base import AnyController, Reads, RoundInfo, SharedState
from monge.control.registry import CONTROLLERS
from monge.core.context import Context, DraftPlan
from monge.core.draws import RequestDraws
from monge.core.errors import MongeError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord, Verdict
from monge.draft.base import AnyDrafter, Draft
from monge.draft.by_name import drafters_in, make_drafter, options_of
from monge.plugins.vllm.settings import settings_of

PATIENCE: Final = 16
"""Steps for which a request that is not scheduled is remembered: it waits, or has ended."""

_WORKING: Final = "ngram, suffix(width=1) and none work, alone or in a pool"


@dataclass(slots=True, eq=False)
class HostRow:
    """One request, which the host identifies by its text alone.

    Args:
        text: Text by which it is recognised.
        plan: Plan of the last step.
        draft: Proposal of the last step.
        last_step: Last step with this request.
    """

    context: Context
    draws: RequestDraws
    text: np.ndarray
    drafter_state: Any
    controller_state: Any
    plan: DraftPlan = DraftPlan(max_depth=0)
    draft: Draft[Any] | None = None
    last_step: int = 0

    @property
    def draft_tokens(self) -> list[int]:
        """The proposed chain."""
        return [] if self.draft is None else list(self.draft.tree.token_ids[1:])

    def commit(
        self, token_ids: tuple[int, ...], *, batch_size: int
    ) -> tuple[Draft[Any], Verdict, StepRecord]:
        """Record the tokens that the host committed: accepted tokens, then its own token."""
        draft = self.draft
        assert draft is not None
        drafted, room = self.draft_tokens, len(token_ids) - 1
        accepted = 0  # the host may have cut the draft, so its length says nothing
        while accepted < min(room, len(drafted)) and drafted[accepted] == token_ids[accepted]:
            accepted += 1
        kind = "bonus" if accepted == len(drafted) else "correction"
        examined = (1,) * min(accepted + 1, len(drafted))
        path = tuple(range(1, accepted + 1))
        verdict = Verdict(path=path, next_token=token_ids[-1], next_kind=kind, examined=examined)
        record = StepRecord(
            plan=self.plan,
            num_nodes=len(drafted),
            depth=len(drafted),
            num_accepted=accepted,
            examined=examined,
            next_kind=kind,
            token_ids=token_ids,
            batch_size=batch_size,
            context_length=len(self.context.token_ids),
            drafter=draft.drafter,
        )
        self.context = self.context.append(token_ids)
        return draft, verdict, record


class Proposer:
    """Drafts for vLLM.

    `--speculative-config '{"method": "custom_class", "model": "monge.plugins.vllm.Proposer", ...}'`

    Every request has its own window, up to vLLM's `num_speculative_tokens`: a drafter without
    matches proposes no tokens, and the controller shortens rejected drafts. Settings come in vLLM's
    `additional_config`, as `{"monge": {"drafter": "pool('ngram', 'suffix(width=1)')", "controller":
    "fixed"}}`.

    Under tensor parallelism every rank drafts from the same tokens and seeds, so controllers that
    read clocks are refused.

    Args:
        vllm_config: vLLM's own configuration.

    Raises:
        OptionError: If a setting is unknown, or a part needs a network, hidden states, the
            target's logits, a tree, or a clock.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = settings_of(vllm_config)
        self._drafter = _drafter(settings.drafter)
        self._controller = _controller(settings.controller)
        self._num_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        # By text: the host reorders rows between steps and passes no ids.
        self._rows: dict[bytes, list[HostRow]] = {}
        self._shared, self._num_requests, self._step = SharedState(), 0, 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM; there is no network to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Propose tokens to verify next.

        Args:
            sampled_token_ids: Tokens that each row committed in this step; empty for rows without
                drafting.
            num_tokens_no_spec: Length of each row's text, `[batch]`.
            token_ids_cpu: The texts, `[batch, max_model_len]`.
            slot_mappings: Not used.

        Returns:
            Draft tokens of every row, at most `num_speculative_tokens`, often fewer.

        Raises:
            MongeError: If a row's text does not end with its committed tokens, so vLLM's contract
                has changed.
        """
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        places = [place for place, sampled in enumerate(sampled_token_ids) if sampled]
        texts = [
            np.array(token_ids_cpu[place, : int(num_tokens_no_spec[place])]) for place in places
        ]
        rows = self._follow(texts, [tuple(map(int, sampled_token_ids[place])) for place in places])
        if rows:
            self._draft(rows)
        for place, row in zip(places, rows, strict=True):
            proposed[place] = row.draft_tokens
        self._forget()
        return proposed

    def _forget(self) -> None:
        """End the step, and drop the rows that have not been seen recently."""
        self._step += 1
        for text, rows in list(self._rows.items()):
            recent = [row for row in rows if self._step - row.last_step <= PATIENCE]
            for row in rows:
                if row not in recent:
                    self._drafter.close(row.context)
            if recent:
                self._rows[text] = recent
            else:
                del self._rows[text]

    def _follow(
        self, texts: Sequence[np.ndarray], sampled: Sequence[tuple[int, ...]]
    ) -> list[HostRow]:
        """Return the rows of the texts; known rows observe the accepted tokens, others are new."""
        rows: list[HostRow] = []
        known: list[tuple[HostRow, tuple[int, ...]]] = []
        new: list[HostRow] = []
        for text, tokens in zip(texts, sampled, strict=True):
            if tuple(text[-len(tokens) :].tolist()) != tokens:
                raise MongeError(
                    "vllm: a row's text does not end with the tokens that it committed; this vLLM "
                    "is not supported"
                )
            if same := self._rows.get(text[: -len(tokens)].tobytes()):
                row = same.pop(0)  # rows with equal texts are interchangeable
                known.append((row, tokens))
            else:
                row = self._new_row(text)
                new.append(row)
            row.text = text
            rows.append(row)
        if new:
            states = self._drafter.open([row.context for row in new])
            for row, state in zip(new, states, strict=True):
                row.drafter_state = state
        if known:
            self._learn(known)
        return rows

    def _new_row(self, text: np.ndarray) -> HostRow:
        token_ids, number = tuple(text.tolist()), self._num_requests
        self._num_requests += 1
        context = Context(
            request_id=number,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            rules=SamplingRules(),
        )
        # No time and no counter in the seed: all ranks of a tensor-parallel group must draw alike.
        draws = RequestDraws(len(token_ids))
        return HostRow(context, draws, text, None, self._controller.init(self._shared))

    def _learn(self, rows: Sequence[tuple[HostRow, tuple[int, ...]]]) -> None:
        drafts, verdicts, records = zip(
            *(row.commit(tokens, batch_size=len(rows)) for row, tokens in rows), strict=True
        )
        states = self._drafter.observe([row.context for row, _ in rows], drafts, verdicts)
        for (row, _), record, state in zip(rows, records, states, strict=True):
            row.drafter_state = state
            row.controller_state = self._controller.update(row.controller_state, record)
            memory = self._controller.learn(self._shared.memory, row.controller_state, record)
            self._shared.memory = memory

    def _draft(self, rows: Sequence[HostRow]) -> None:
        lengths, memory = tuple(len(row.text) for row in rows), self._shared.memory
        info = RoundInfo(context_lengths=lengths, batch_size=len(rows), memory=memory)
        draws = [row.draws for row in rows]
        plans = self._controller.plan([row.controller_state for row in rows], info, draws)
        plans = [self._bounded(plan, len(row.text)) for row, plan in zip(rows, plans, strict=True)]
        contexts, states = [row.context for row in rows], [row.drafter_state for row in rows]
        drafts = self._drafter.draft(contexts, states, plans, draws)
        for row, plan, draft in zip(rows, plans, drafts, strict=True):
            row.plan, row.draft, row.last_step = plan, draft.result(), self._step
            self._rows.setdefault(row.text.tobytes(), []).append(row)

    def _bounded(self, plan: DraftPlan, length: int) -> DraftPlan:
        # A draft of n tokens commits up to n + 1, and a text at the model's length takes none.
        depth = min(plan.depth(self._num_draft_tokens), max(self._max_length - length - 1, 0))
        nodes = min(plan.nodes(depth), depth)
        return replace(plan, max_depth=depth, max_nodes=nodes, model_free_depth=None)


def _drafter(text: str) -> AnyDrafter:
    missing = [
        name
        for name in drafters_in(text)
        if not {"model", "target", "tree"}.isdisjoint(options_of(name))
    ]
    if missing:
        raise OptionError(
            f"vllm: drafter {missing[0]!r} needs a network, and vLLM loads the "
            f"target alone; {_WORKING}"
        )
    drafter = make_drafter(text, {})
    can = drafter.capabilities
    refusals = {
        "reads the target's hidden states": can.reads_states,
        "drafts trees, and vLLM verifies single chains; make it a chain, as in suffix(width=1)": can.needs_trees,
    }
    for reason, applies in refusals.items():
        if applies:
            raise OptionError(f"vllm: drafter {text!r} {reason}; {_WORKING}")
    return drafter


def _controller(text: str) -> AnyController:
    controller = CONTROLLERS.parse(text)
    if Reads.LATENCY in controller.reads:
        raise OptionError(
            f"vllm: controller {text!r} reads clocks, which vLLM does not share and which differ "
            "from rank to rank; fixed, fsm and cached_fsm work"
        )
    return controller

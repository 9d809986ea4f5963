"""Network-free drafters for vLLM, through its `custom_class` hook.

**V1 model runner only.** vLLM calls this hook experimental and falls back to its V1 runner for it;
the V2 runner has no such hook. vLLM verifies the tokens itself, as one chain per request with
one-hot draft laws: drafts change the speed only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from monge.control.base import AnyController, Reads, RoundInfo, SharedState
from monge.control.registry import CONTROLLERS
from monge.core.context import Context, DraftPlan
from monge.core.draws import RequestDraws
from monge.core.errors import MongeError, OptionError, unknown_name
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import AnyDrafter
from monge.draft.by_name import drafters_in, make_drafter, options_of
from monge.plugins.vllm_rows import HostRow, Rows

SECTION: Final = "monge"
"""Our settings inside vLLM's `additional_config`."""
DEFAULTS: Final[Mapping[str, str]] = {"drafter": "suffix(width=1)", "controller": "fsm"}

_WORKING: Final = "ngram, suffix(width=1) and none work, alone or in a pool"


class Proposer:
    """Drafts for vLLM.

    `--speculative-config '{"method": "custom_class", "model": "monge.plugins.vllm.Proposer",
    ...}'`.

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
        settings = _settings(vllm_config.additional_config)
        self._drafter = _drafter(settings["drafter"])
        self._controller = _controller(settings["controller"])
        self._num_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._rows = Rows()
        self._shared = SharedState()

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
        for row in self._rows.forgotten():
            self._drafter.close(row.context)
        return proposed

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
            row = self._rows.take(text[: -len(tokens)])
            if row is None:
                row = self._new_row(text)
                new.append(row)
            else:
                known.append((row, tokens))
            row.text = text
            rows.append(row)
        self._open(new)
        self._learn(known)
        return rows

    def _new_row(self, text: np.ndarray) -> HostRow:
        token_ids = tuple(text.tolist())
        number = self._rows.new_number()
        context = Context(
            request_id=number,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            rules=SamplingRules(),
        )
        # No time and no counter in the seed: every rank of a tensor-parallel group has to draw
        # alike.
        return HostRow(
            context, RequestDraws(len(token_ids)), text, None, self._controller.init(self._shared)
        )

    def _open(self, rows: Sequence[HostRow]) -> None:
        if rows:
            for row, state in zip(
                rows, self._drafter.open([row.context for row in rows]), strict=True
            ):
                row.drafter_state = state

    def _learn(self, rows: Sequence[tuple[HostRow, tuple[int, ...]]]) -> None:
        if not rows:
            return
        outcomes = [row.commit(tokens, batch_size=len(rows)) for row, tokens in rows]
        contexts, drafts = [row.context for row, _ in rows], [outcome.draft for outcome in outcomes]
        states = self._drafter.observe(contexts, drafts, [outcome.verdict for outcome in outcomes])
        for (row, _), outcome, state in zip(rows, outcomes, states, strict=True):
            row.drafter_state = state
            row.controller_state = self._controller.update(row.controller_state, outcome.record)

    def _draft(self, rows: Sequence[HostRow]) -> None:
        info = RoundInfo(context_lengths=tuple(len(row.text) for row in rows), batch_size=len(rows))
        plans = self._controller.plan(
            [row.controller_state for row in rows], info, [row.draws for row in rows]
        )
        plans = [self._bounded(plan, len(row.text)) for row, plan in zip(rows, plans, strict=True)]
        contexts, states = [row.context for row in rows], [row.drafter_state for row in rows]
        drafts = self._drafter.draft(contexts, states, plans, [row.draws for row in rows])
        for row, plan, draft in zip(rows, plans, drafts, strict=True):
            row.plan, row.draft = plan, draft
            self._rows.put(row)

    def _bounded(self, plan: DraftPlan, length: int) -> DraftPlan:
        # A draft of n tokens commits up to n + 1, and a text at the model's length takes none.
        depth = min(plan.depth(self._num_draft_tokens), max(self._max_length - length - 1, 0))
        return DraftPlan(
            max_depth=depth,
            max_nodes=min(plan.nodes(depth), depth),
            min_token_prob=plan.min_token_prob,
            drafter=plan.drafter,
        )


def _settings(additional: Any) -> dict[str, str]:
    given = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping) or not all(
        isinstance(value, str) for value in given.values()
    ):
        raise OptionError(
            f"vllm: additional_config[{SECTION!r}] must hold texts, as in "
            f"{dict(DEFAULTS)}; got {given!r}"
        )
    for name in given:
        if name not in DEFAULTS:
            raise unknown_name(f"setting of additional_config[{SECTION!r}]", name, DEFAULTS)
    return {**DEFAULTS, **given}


def _drafter(text: str) -> AnyDrafter:
    missing = [
        one
        for one in drafters_in(text)
        if not {"model", "target", "tree"}.isdisjoint(options_of(one))
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
        "needs the target's most probable tokens, which vLLM does not pass on": can.num_successors
        > 0,
        "drafts trees, and vLLM verifies single chains; make it a chain, as in "
        "suffix(width=1)": can.needs_trees,
    }
    for reason, is_so in refusals.items():
        if is_so:
            raise OptionError(f"vllm: drafter {text!r} {reason}; {_WORKING}")
    return drafter


def _controller(text: str) -> AnyController:
    controller = CONTROLLERS.parse(text)
    if Reads.LATENCY in controller.reads:
        raise OptionError(
            f"vllm: controller {text!r} reads clocks, which vLLM does not share and which differ "
            "from rank to rank; "
            "fixed, fsm, cached_fsm and transformers_heuristic work"
        )
    return controller

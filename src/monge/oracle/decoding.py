"""The exact law of what the real loop writes, and the law that it should have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from monge.core.context import DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.engine.components import Components
from monge.engine.loop import close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.laws.draws import Draws
from monge.laws.from_logits import law_from_logits
from monge.oracle.exact_law import exact_law
from monge.oracle.tabular import TabularModel

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small decoding problem.

    Args:
        prompt: Prompt tokens.
        horizon: Tokens whose joint law is compared.
        max_new_tokens: Limit of the request; more than the horizon lets trees reach beyond it.
        rules: Sampling rules.
        eos_ids: Tokens that end the text.
        neighbours: Prompts of further requests in the same batch, decoded with fixed draws.
        slot: Place of the enumerated request in the batch.
        limits: Of the enumerated request's trees.
        adaptive: False for fixed plans of the enumerated request, without a controller.
        controllers: Names of the controllers that plan, by place in the batch; empty if no request
            names a controller.
    """

    prompt: Text = (0,)
    horizon: int = 2
    max_new_tokens: int = 2
    rules: SamplingRules = SamplingRules()
    eos_ids: frozenset[int] = frozenset()
    neighbours: tuple[Text, ...] = ()
    slot: int = 0
    limits: DraftPlan = DraftPlan()
    adaptive: bool = True
    controllers: tuple[str | None, ...] = ()


def output_law(
    make_components: Callable[[], Components], case: Case, *, max_runs: int = 200_000
) -> dict[Text, float]:
    """Law of the first `horizon` tokens written by the real loop, by enumeration of every draw.

    `make_components` builds everything afresh, so that a run depends on its draws alone.
    """
    return exact_law(lambda draws: _run(make_components(), case, draws), max_runs=max_runs)


def target_law(target: TabularModel, case: Case) -> dict[Text, float]:
    """The law of plain decoding: the product of the target's laws, ended by end-of-text tokens."""
    laws: dict[Text, float] = {(): 1.0}
    for _ in range(case.horizon):
        longer: dict[Text, float] = {}
        for text, weight in laws.items():
            if text and text[-1] in case.eos_ids:
                longer[text] = weight
                continue
            for token, prob in _next_masses(target, case.prompt + text, case.rules).items():
                longer[(*text, token)] = weight * prob
        laws = longer
    return laws


def _run(components: Components, case: Case, draws: Draws) -> Text:
    prompts = list(case.neighbours)
    prompts.insert(case.slot, case.prompt)
    sessions = [
        Session(
            Request(
                prompt_ids=prompt,
                max_new_tokens=case.max_new_tokens,
                rules=case.rules,
                seed=row,
                eos_ids=case.eos_ids,
                draws=draws if row == case.slot else None,
                limits=case.limits if row == case.slot else DraftPlan(),
                adaptive=case.adaptive or row != case.slot,
                controller=case.controllers[row] if case.controllers else None,
            ),
            request_id=row,
        )
        for row, prompt in enumerate(prompts)
    ]
    open_sessions(sessions, components)
    watched, active = sessions[case.slot], sessions
    while watched.finish_reason is None and watched.num_generated < case.horizon:
        run_round(active, components)
        for session in active:
            if session.finish_reason is not None:
                close_session(session, components)
        active = [session for session in active if session.finish_reason is None]
    return watched.completion_ids[: case.horizon]


def _next_masses(target: TabularModel, text: Text, rules: SamplingRules) -> Mapping[int, float]:
    logits = torch.tensor(list(target.table(text)), dtype=torch.float64).log()
    law = law_from_logits(logits, rules).sparse()
    return dict(zip(law.token_ids.tolist(), law.probs.tolist(), strict=True))

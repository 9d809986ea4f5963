"""Audits of toy servers, in process."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from monge.api import make_components
from monge.audit.client import Client
from monge.audit.references import LocalReference, Reference, ServerReference
from monge.audit.report import Report
from monge.audit.run import audit, probe
from monge.audit.settings import AuditSettings
from monge.audit.situations import usual_situations
from monge.audit.structured import structured_fields
from monge.core.sampling_rules import SamplingRules
from monge.engine.components import Components
from monge.engine.loop import close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.laws.draws import Draws
from monge.oracle.tabular import LawTable, TabularModel
from monge.verify.base import Verifier
from tests.kit.known_bad import KNOWN_BAD_RULES
from tests.kit.wrong_engines import DRAFT, END, EXACT_ENGINES, TARGET, VOCAB, Engine
from tests.kit.wrong_servers import Letters, ToyServer

PROMPTS = ("abc", "bad", "dig", "gala")
EOS_NAMES = frozenset({"<end>", "token_id:0"})


class LoopEngine:
    """The loop of this library."""

    def __init__(self, **parts: Any) -> None:
        self._made = parts

    def generate(
        self, prompt: tuple[int, ...], rules: SamplingRules, max_tokens: int, draws: Draws, **_: int
    ) -> list[int]:
        # A seed has the shared clocks that the Gumbel coupling needs.
        options = {"seed": int(draws.uniform() * 2**53), "eos_ids": frozenset({END})}
        request = Request(prompt_ids=prompt, max_new_tokens=max_tokens, rules=rules, **options)
        models = TabularModel(TARGET, VOCAB), TabularModel(DRAFT, VOCAB)
        parts: Components = make_components(*models, **self._made)
        session = Session(request, request_id=0)
        open_sessions([session], parts)
        while session.finish_reason is None:
            run_round([session], parts)
        close_session(session, parts)
        return list(session.completion_ids)


LOOP_ENGINES: dict[str, Engine] = {
    "sample and match": LoopEngine(tree="chain(3)", verifier="sample_and_match"),
    "recursive rejection": LoopEngine(
        tree="fixed_width((2, 2), 'iid')", verifier="recursive_rejection"
    ),
    "block verification": LoopEngine(tree="chain(3)", verifier="block"),
    "layer verification": LoopEngine(
        tree="fixed_width((2, 2), 'iid')", verifier="layer('recursive_rejection')"
    ),
    "Gumbel coupling": LoopEngine(tree="chain(3, 'shared')", verifier="gumbel"),
}


TOO_SMALL = ("epsilon", "without replacement", "repeats dropped", "one coin")
"""Known-bad rules that move less mass here than 20,000 tokens show.

A mean total variation of about 0.015 or less.
"""


def known_bad(name: str) -> Engine:
    """The loop of this library with a wrong rule."""
    rule = KNOWN_BAD_RULES[name]
    tree = "chain(1)" if isinstance(rule, Verifier) else "fixed_width((2,), 'iid')"
    return LoopEngine(tree=tree, verifier=rule)


KNOWN_BAD: dict[str, Engine] = {
    f"{name} (loop)": known_bad(name) for name in KNOWN_BAD_RULES if not name.startswith(TOO_SMALL)
}


def client_of(server: ToyServer, **options: Any) -> Client:
    return Client("http://toy", transport=httpx.ASGITransport(app=server), **options)


def local_reference(*, by_id: bool = False, draft: LawTable | None = None) -> LocalReference:
    own = draft and TabularModel(draft, VOCAB)
    parts = TabularModel(TARGET, VOCAB), Letters(), frozenset({END})
    return LocalReference(*parts, by_id=by_id, draft=own)


def judge(
    server: ToyServer,
    *,
    budget: int = 4000,
    is_local: bool = True,
    knows_end: bool = True,
    is_quick: bool = False,
    only: tuple[str, ...] | None = None,
    draft: LawTable | None = None,
    **options: Any,
) -> Report:
    """Audit a toy server, in the situations of these names only, with or without its draft model."""

    async def run() -> Report:
        twin = ToyServer(EXACT_ENGINES["plain"], seed=99, by_id=True)
        async with client_of(server) as client, client_of(twin) as other:
            naming = await probe(client, PROMPTS[0])
            by_id, names = naming == "ids", EOS_NAMES if knows_end else frozenset[str]()
            reference: Reference = ServerReference(other, eos_names=names, by_id=by_id, num_top=12)
            if is_local:
                reference = local_reference(by_id=by_id, draft=draft)
            played = shortened(usual_situations(PROMPTS, is_quick=is_quick))
            played = tuple(one for one in played if only is None or one.name in only)
            structured = dict[str, Any]()
            if is_local and any(one.is_structured for one in played):
                structured = await structured_fields(client, PROMPTS)
            given = {"budget": budget, "naming": naming, "structured": structured, **options}
            return await audit(client, reference, AuditSettings(situations=played, **given))

    return asyncio.run(run())


def shortened(played: Any) -> Any:
    """The situations with prompts of the toy tokenizer."""
    known = {"first tokens": PROMPTS[:2], "shared prefix": ("cabbag", "cabcde", "cabbag")}
    known["long prompt"] = ("abcdefghijkl" * 8,)
    return tuple(replace(one, prompts=known.get(one.name, one.prompts)) for one in played)

"""The audit over our own server: every exact verifier with several drafters is accepted, a wrong rule is rejected."""

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from monge.api import make_components
from monge.audit.client import Client
from monge.audit.report import Report
from monge.audit.run import audit, probe
from monge.audit.settings import AuditSettings
from monge.audit.situations import usual_situations
from monge.core.errors import MongeError
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.options import ServeOptions
from monge.oracle.tabular import TabularModel
from monge.requests.chat_format import InstructionFormat
from monge.serve.http.app import create_app
from monge.verify.registry import VERIFIERS
from tests.audit.toy import PROMPTS, local_reference, shortened
from tests.kit.known_bad import KNOWN_BAD_RULES
from tests.kit.wrong_engines import DRAFT, END, TARGET, VOCAB
from tests.kit.wrong_servers import LETTERS, Letters

DRAFTS: dict[str, dict[str, str]] = {
    "model, chain": {"drafter": "model", "tree": "chain(3)"},
    "model, i.i.d. tree": {"drafter": "model", "tree": "fixed_width((2, 2), 'iid')"},
    "model, tree without replacement": {"drafter": "model", "tree": "fixed_width((2, 2))"},
    "model, top tokens": {"drafter": "model", "tree": "fixed_width((2, 2), 'top')"},
    "model, mixed tree": {"drafter": "model", "tree": "fixed_width((2, 2), 'mixed')"},
    "model, shared clocks": {"drafter": "model", "tree": "chain(3, 'shared')"},
    "model, paths": {"drafter": "model", "tree": "paths(3, 2)"},
    "ngram": {"drafter": "ngram(num_draft_tokens=3)"},
    "suffix": {"drafter": "suffix(num_nodes=6, depth=3)"},
    "pool of ngram and model": {
        "drafter": "pool('ngram(num_draft_tokens=2, min_ngram=2)', 'model')",
        "tree": "chain(2)",
    },
}
FEW = [
    ("block", "model, chain"),
    ("recursive_rejection", "model, i.i.d. tree"),
    ("layer", "pool of ngram and model"),
]


class Tokenizer(Letters):
    """What the server asks of a tokenizer besides."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return super().__call__(text)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return LETTERS[token_id]


def components(verifier: Any, **drafts: str) -> Components:
    draft = TabularModel(DRAFT, VOCAB) if "model" in drafts["drafter"] else None
    return make_components(TabularModel(TARGET, VOCAB), draft, verifier=verifier, **drafts)


def judged(parts: Components, budget: int) -> tuple[Report, float]:
    """Audit our server; also give the accepted share of the drafted tokens.

    Every request has a seed and the controller is fixed, so that the texts depend on nothing else.
    """
    options = {"eos_ids": frozenset({END}), "max_batch_size": 16}
    chat = InstructionFormat(Tokenizer())
    decoder = Decoder(parts, tokenizer=Tokenizer(), chat=chat, **options)
    app = create_app(decoder, ServeOptions(served_model_name="toy"))
    transport = httpx.ASGITransport(app=app)
    played = tuple(replace(one, is_seeded=True) for one in shortened(usual_situations(PROMPTS)))

    async def run() -> tuple[Report, float]:
        async with (
            app.router.lifespan_context(app),
            Client("http://ours", transport=transport) as client,
            httpx.AsyncClient(transport=transport, base_url="http://ours") as http,
        ):
            naming = await probe(client, PROMPTS[0])
            settings = AuditSettings(budget=budget, situations=played, naming=naming)
            report = await audit(client, local_reference(by_id=naming == "ids"), settings)
            metrics = (await http.get("/metrics")).text
            drafted, accepted = (
                float(re.findall(rf"^vllm:spec_decode_num_{kind}\S* (\S+)$", metrics, re.M)[0])
                for kind in ("draft_tokens_total", "accepted_tokens_total")
            )
            return report, accepted / drafted

    return asyncio.run(run())


def legal() -> Iterator[tuple[str, str]]:
    """Every verifier of the library, with the drafts for which it is exact."""
    for verifier in VERIFIERS:
        for drafts, options in DRAFTS.items():
            try:
                components(verifier, **options)
            except MongeError:
                continue
            yield verifier, drafts


def test_a_wrong_rule_in_our_server_is_found():
    rule = KNOWN_BAD_RULES["rejected token zeroed out"]
    parts = components(rule, drafter="model", tree="fixed_width((2,), 'iid')")
    report, _ = judged(parts, budget=4000)  # found after 217 tokens
    assert report.verdict == "not lossless", report.reason


def test_every_verifier_is_audited():
    assert all(VERIFIERS.make(name).is_lossless for name in VERIFIERS)
    assert {verifier for verifier, _ in legal()} == set(VERIFIERS)
    assert {drafts for _, drafts in legal()} == set(DRAFTS)


SLOW = (pytest.mark.slow, pytest.mark.timeout(600))


@pytest.mark.parametrize(
    ("verifier", "drafts"),
    [pytest.param(*pair, marks=() if pair in FEW else SLOW) for pair in legal()],
)
def test_our_server_is_lossless(verifier, drafts):
    report, accepted = judged(components(verifier, **DRAFTS[drafts]), budget=600)
    sys.stdout.write(f"{verifier}, {drafts}: log e-value {report.log_e:.1f}\n")
    assert report.verdict == "lossless", report.reason
    assert (verifier, drafts) not in FEW or accepted > 0.02

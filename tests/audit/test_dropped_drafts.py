"""The built-in pair behind a server that drops forbidden drafts: only a bet beside the draft model finds the bias."""

import asyncio
import sys

import numpy as np
import pytest
import torch

from monge.api import built_in, load
from monge.audit.client import Completion
from monge.audit.gate import audited
from monge.audit.references import LocalReference, logits_along
from monge.audit.settings import AuditSettings
from monge.audit.situations import situations_named
from monge.core.text import token_ids_of
from monge.requests.text import TOKEN_ID

DEPTH = 4


class Engine:
    """Drafts chains of four tokens and verifies them token by token."""

    url, model = "an engine in this process", "built-in"

    def __init__(self, *, drops: bool) -> None:
        self._target, draft = (load(built_in(name), drafter="none") for name in ("target", "draft"))
        self._networks = [loaded.components.target for loaded in (self._target, draft)]
        self._drops, self._numbers = drops, np.random.default_rng(1)
        tokenizer, self._end = self._target.tokenizer, min(self._target.eos_ids)
        reference = LocalReference(self._networks[0], tokenizer, self._target.eos_ids)
        self._admitted = reference._admitted.numpy()
        self._sizes = np.array([len(text) for text in reference._texts])

    async def complete(self, prompt, *, max_tokens, temperature, **fields):
        ids = list(token_ids_of(self._target.tokenizer, prompt))
        start, place, size = len(ids), DEPTH, 0  # the first token is the prefill's
        while len(ids) < start + max_tokens and ids[-1] != self._end:
            p, q = (self._law(network, ids, temperature) for network in self._networks)
            allowed = self._admitted[size % 2] if "structured_outputs" in fields else p >= 0
            p = np.where(allowed, p, 0.0) / p[allowed].sum()
            token, is_accepted = self._drawn(p), False
            if place < DEPTH:
                x, residual = self._drawn(q), np.maximum(p - q, 0.0)
                is_accepted = self._numbers.random() * q[x] < p[x]
                if is_accepted or allowed[x] or not self._drops:
                    token = x if is_accepted else self._drawn(residual / residual.sum())
            place = place + 1 if is_accepted else 0
            ids.append(token)
            size += self._sizes[token]
        made = ids[start:]
        ended = made[-1] == self._end
        names = tuple(f"{TOKEN_ID}{token}" for token in (made[:-1] if ended else made))
        text = self._target.tokenizer.decode(made, skip_special_tokens=True)
        return Completion(text=text, finish="stop" if ended else "length", tokens=names)

    def _law(self, network, ids, temperature):
        (logits,) = logits_along(network, tuple(ids), len(ids) - 1)
        if temperature == 0:
            return np.eye(logits.shape[-1])[int(logits[-1].argmax())]
        return (logits[-1].double() / temperature).softmax(-1).numpy()

    def _drawn(self, masses):
        return int(self._numbers.choice(len(masses), p=masses))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "exact"])
def test_the_bias_is_found_beside_the_draft_model(drops):
    settings = AuditSettings(budget=2000, situations=situations_named(["structured"]))
    reference = {"target": "built-in", "draft": "built-in"}
    with torch.inference_mode():
        report = asyncio.run(audited(Engine(drops=drops), reference, settings))
    line = f"{report.num_tokens} tokens, log e-value {report.log_e:.1f}: {report.reason}"
    sys.stdout.write(line + "\n")
    expected = "not lossless" if drops else "lossless"
    assert report.verdict == expected, line

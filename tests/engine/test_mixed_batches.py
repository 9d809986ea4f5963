"""Requests that differ in everything share a batch on a simulated device; each writes what it writes alone on the host."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import monge
from monge.backends import cuda
from monge.backends.cuda import FunctionGraphs
from monge.core.context import DraftPlan
from monge.engine.batch import decode
from monge.networks.hf_tree import HfTreeModel
from monge.requests.grammar import GrammarState
from tests.engine import pretend
from tests.engine.pretend import placed
from tests.engine.tiny import VOCAB, network, perturbed, prompts
from tests.heads.readers.published import KINDS
from tests.heads.toy import random_head


class Alternating(GrammarState):
    """Even and odd tokens take turns, and a multiple of ten is followed by the next number."""

    def __init__(self, last=None):
        super().__init__(None, VOCAB, frozenset())
        self.last = last

    @property
    def allowed(self):
        if self.last is not None and self.last % 10 == 0:
            return [self.last + 1]
        return [token for token in range(VOCAB) if self.last is None or (token - self.last) % 2]

    def of_request(self):
        return self

    def after(self, token):
        return Alternating(token) if token in self.allowed else None

    def write(self, row):
        bits = np.isin(np.arange(32 * len(row)), self.allowed)
        row[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def _next_run(self):
        return tuple(self.allowed) if len(self.allowed) == 1 else ()


OPTIONS = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_k": 40},
    {"top_p": 0.6},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "limits": DraftPlan(max_depth=1)},
    {"temperature": 0.6, "limits": DraftPlan(max_depth=2)},
    {"temperature": 1.0, "limits": DraftPlan(max_nodes=3)},
    {"temperature": 0.0, "limits": DraftPlan(max_depth=1)},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.0, "top_p": 0.6},
    {"temperature": 1.0, "speculative": False},
    {"temperature": 0.0, "speculative": False},
    {"temperature": 1.0, "max_new_tokens": 2},
    {"temperature": 0.0, "max_new_tokens": 4},
    {"temperature": 1.0, "seed": 8},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": {5: 3.0}},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(3, 40))},
    {"temperature": 1.0, "grammar": Alternating()},
    {"temperature": 0.0, "grammar": Alternating()},
    {"top_p": 0.6, "grammar": Alternating(), "repetition_penalty": 1.3},
)
"""Settings of the requests of one batch."""
LATER = ("limits", "speculative", "grammar")
"""Settings that `Request` has and `Decoder.requests` has not."""


def sessions_of(decoder, options=OPTIONS):
    """A session for each request, in order."""
    texts = prompts(tuple(3 + row % 5 for row in range(len(options))), seed=5)
    made = []
    for row, (text, own) in enumerate(zip(texts, options, strict=True)):
        settings = {"max_new_tokens": 6, "seed": 3, "row": row, "ignore_eos": True}
        settings |= {"temperature": 1.0}
        settings |= {name: value for name, value in own.items() if name not in LATER}
        (request,) = decoder.requests([text], **settings)
        later = {name: own[name] for name in LATER if name in own}
        made.append(decoder.session(replace(request, **later)))
    return made


def written(decoder, sessions, batch_size):
    for _ in decode(sessions, decoder.components, max_batch_size=batch_size):
        pass
    assert all(session.error is None for session in sessions)
    texts = [session.completion_ids for session in sessions]
    told = [one for session in sessions for one in session.logprobs]
    return texts, [(one.token_id, round(one.logprob, 3)) for one in told]


def pair(device, monkeypatch, folder, settings, head, backend):
    """A decoder on the host, and one on the device."""
    monkeypatch.setattr(cuda, "GraphCapture", lambda _: pretend.Rerun())
    monkeypatch.setattr(cuda, "FunctionGraphs", partial(FunctionGraphs, few_calls=2))
    target = network("llama", "sdpa")
    if head == "eagle3":
        KINDS[head](target.config.hidden_size, VOCAB).write(folder)

    def draft(where):
        if head is None:
            return placed(perturbed(target), where)
        return folder if head == "eagle3" else random_head(HfTreeModel(target))

    options = {"controller": "fixed", **settings}
    return (
        monge.load(target, draft("cpu"), **options),
        monge.load(placed(target, device), draft(device), backend=backend, **options),
    )


USUAL = [
    ("block", "chain(3)", {}, None, "compiled"),
    ("recursive_rejection", "fixed_width((3, 1), 'mixed(1)')", {}, None, "eager"),
    ("layer", "fixed_width((2, 1), 'iid')", {}, None, "eager"),
    ("traversal", "fixed_width((2, 1))", {}, None, "eager"),
]
RARE = [
    ("block", "chain(3)", {}, "eagle3", "compiled"),
    ("recursive_rejection_without_replacement", "fixed_width((2, 2))", {}, None, "eager"),
    ("block", "chain(3)", {"drafter": "model(top_k=1)"}, None, "compiled"),
    ("block", "chain(3)", {"drafter": "model(top_k=5)"}, None, "compiled"),
    (None, None, {}, "shape", "compiled"),
    (None, None, {"drafter": "pool(ngram, model)"}, None, "compiled"),
]


@pytest.mark.parametrize(
    ("verifier", "tree", "options", "head", "backend"),
    [*USUAL, *(pytest.param(*row, marks=pytest.mark.slow) for row in RARE)],
    ids=str,
)
def test_every_request_of_a_mixed_batch_has_its_own_text(
    device, monkeypatch, tmp_path, verifier, tree, options, head, backend
):
    settings = options if tree is None else options | {"verifier": verifier, "tree": tree}
    host, whole = pair(device, monkeypatch, tmp_path, settings, head, backend)
    alone = written(host, sessions_of(host), batch_size=1)
    together = sessions_of(whole)
    assert written(whole, together, batch_size=len(together)) == alone
    assert len(set(alone[0])) > len(OPTIONS) // 2


@pytest.mark.parametrize("head", [pytest.param(None, marks=pytest.mark.slow), "eagle3"])
def test_a_graph_is_no_other_request_s(device, monkeypatch, tmp_path, head):
    """One after another, requests take the same row of the caches."""
    settings = {"verifier": "block", "tree": "chain(3)"}
    host, whole = pair(device, monkeypatch, tmp_path, settings, head, "compiled")
    options = (*OPTIONS[:9], *OPTIONS[:2])
    alone = written(host, sessions_of(host, options), batch_size=1)
    assert written(whole, sessions_of(whole, options), batch_size=1) == alone


@pytest.mark.parametrize("tree", ["chain(3)", "fixed_width((2, 1))"])
@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_a_round_waits_as_often_for_many_settings_as_for_few(device, monkeypatch, tree, backend):
    """For drafts and verdicts of the requests whose rules truncate, and of the others; not for each of eight settings."""
    monkeypatch.setattr(cuda, "GraphCapture", lambda _: pretend.Rerun())
    own = network("llama", "sdpa")
    models = placed(own, device), placed(perturbed(own), device)
    decoder = monge.load(*models, tree=tree, backend=backend, controller="fixed")
    options = [
        *({"temperature": heat} for heat in (0.5, 0.7, 1.0, 1.3)),
        *({"top_p": 0.9}, {"top_k": 7}, {"top_k": 9, "min_p": 0.1}, {"top_p": 0.8, "seed": 5}),
    ]
    sessions = sessions_of(decoder, options)
    pretend.waits.clear()
    written(decoder, sessions, len(options))
    num_rounds = max(session.num_rounds for session in sessions)
    # A last round that drafts nothing has a verdict of another kind.
    assert 2 * num_rounds <= sum(pretend.waits.values()) <= 4 * num_rounds + 4, pretend.waits

"""How surprising the target finds a prompt: its own laws, and the same cache as without asking."""

import itertools
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from monge.api import built_in, make_components
from monge.control.base import PromptReader
from monge.control.fixed import Fixed
from monge.control.latency import Latency
from monge.core.prompt import PromptProfile
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import Batch
from monge.engine.components import Components
from monge.engine.opening import Prefill
from monge.engine.session import Session
from monge.loading.networks import as_sequence_model, load_network
from monge.networks.base import NodeBlock
from monge.networks.hf_tree import HfTreeModel
from monge.oracle.tabular import RandomTable, TabularModel
from monge.requests.logprobs import LogprobOptions, TokenLogprob
from tests.engine.laws import session
from tests.engine.tiny import COMMON, STATEFUL, network, prompts, seeded

VOCAB = 4


class Asks(Fixed, PromptReader):
    """A controller that keeps the profiles of prompts."""

    reads_prompt_laws = True

    def read(self, state, prompt):
        return prompt


def profiles_of(target, *profiles: PromptProfile, chunk: int | None = None) -> list[PromptProfile]:
    components = make_components(target, drafter="none", controller=Asks())
    sessions = [session(row, one.token_ids, profile=one) for row, one in enumerate(profiles)]
    prefill = Prefill(components)
    for one in sessions:
        prefill.join(one)
    while len(prefill):
        prefill.read(chunk)
    return [one.controller_state for one in sessions]


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_surprisal_and_entropy_are_those_of_the_last_tokens(length: int, chunk: int | None) -> None:
    model = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    ids = tuple(place % 3 for place in range(length))
    (profile,) = profiles_of(model, PromptProfile(token_ids=ids, text="kept"), chunk=chunk)
    assert model.text(0) == ids[:-1]
    assert profile.text == "kept"
    if length == 1:
        assert profile.surprisal is None
        return
    places = range(max(1, length - 32), length)
    laws = [model.table(ids[:place]) for place in places]
    surprisals = [-math.log(law[ids[place]]) for place, law in zip(places, laws, strict=True)]
    assert profile.surprisal == pytest.approx(math.fsum(surprisals) / len(places))
    entropies = [-math.fsum(mass * math.log(mass) for mass in law if mass > 0.0) for law in laws]
    assert profile.entropy == pytest.approx(math.fsum(entropies) / len(places))


def test_a_known_prompt_profile_is_not_read_again() -> None:
    model = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    known = PromptProfile(token_ids=(0, 1, 2), surprisal=1.5, entropy=0.5)
    found = profiles_of(model, known, PromptProfile(token_ids=(2, 1)))
    assert found[0] == known
    assert found[1].surprisal == pytest.approx(-math.log(model.table((2,))[1]))
    assert (model.text(0), model.text(1)) == ((0, 1), (2,))


def test_a_network_goes_on_as_if_it_had_not_been_asked() -> None:
    held = load_network(built_in("target"))
    texts = [tuple(range(40, 100)), tuple(range(30, 37))]
    asked, silent = HfTreeModel(held), HfTreeModel(held)
    profiles = profiles_of(asked, *(PromptProfile(token_ids=ids) for ids in texts))
    silent.open({number: ids[:-1] for number, ids in enumerate(texts)})
    blocks = {number: NodeBlock.chain((ids[-1], 7, 8)) for number, ids in enumerate(texts)}
    ours, theirs = asked.extend(blocks), silent.extend(blocks)
    for number, ids in enumerate(texts):
        torch.testing.assert_close(ours[number], theirs[number], atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            logits = held(torch.tensor([ids])).logits[0, -min(33, len(ids)) : -1].double()
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-logits.shape[0] :]))
        assert profiles[number].surprisal == pytest.approx(float(expected), rel=1e-4)


def decode_all(sessions: list[Session], components: Components, chunk: int | None) -> None:
    batch = Batch(components, prefill_chunk=chunk)
    batch.join(sessions)
    while len(batch):
        batch.step()


def stateful() -> PreTrainedModel:
    config = AutoConfig.for_model("mamba", **{**COMMON, **STATEFUL["mamba"]})
    return seeded(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize(
    ("kind", "controller"),
    [
        *itertools.product(["table", "llama"], ["fixed", "linear_selection(('surprisal',))"]),
        ("mamba", "fixed"),
    ],
)
def test_log_probabilities_of_prompts_are_those_of_a_plain_forward_however_they_are_read(
    kind: str, controller: str
) -> None:
    """Whole and in chunks, short and longer than what is scored at a time, beside one that is not asked."""
    if kind == "table":
        made = TabularModel(RandomTable(VOCAB, 3), VOCAB)
        texts = [tuple(place * place % VOCAB for place in range(70)), (2, 1), (3,), (0, 1, 2)]
    else:
        held = stateful() if kind == "mamba" else network(kind)
        made = as_sequence_model(held)
        texts = [*prompts((70, 9), seed=2), (5,), *prompts((6,), seed=3)]
    drafts = made.why_no_draft is None
    components = make_components(
        made,
        drafter="pool('ngram', 'suffix')" if drafts else "none",
        controller=controller,
        latency=Latency.linear(plain=1.0, node=0.1, draft=0.1) if "linear" in controller else None,
    )
    found: list[list[tuple[TokenLogprob, ...]]] = []
    for chunk in (None, 1, 3, 1000):
        wanted = [LogprobOptions(num_top=2, source="raw")] * 3 + [None]
        given = {"max_new_tokens": 2, "rules": SamplingRules(temperature=0.0)}
        sessions = [
            session(row, ids, prompt_logprobs=own, **given)
            for row, (ids, own) in enumerate(zip(texts, wanted, strict=True))
        ]
        decode_all(sessions, components, chunk)
        found.append([one.prompt_logprobs for one in sessions])
    for number, ids in enumerate(texts):
        if kind == "table":
            expected = [math.log(made.table(ids[:end])[ids[end]]) for end in range(1, len(ids))]
        else:
            with torch.inference_mode():
                logits = held(torch.tensor([ids])).logits[0].double()
            logs = torch.log_softmax(logits[:-1], dim=-1)
            expected = logs[range(len(ids) - 1), list(ids[1:])].tolist()
        for way in found:
            entries = way[number]
            assert [entry.token_id for entry in entries] == list(ids[1:] if number < 3 else ())
            assert all(len(entry.top) == 2 for entry in entries)
            assert [entry.logprob for entry in entries] == pytest.approx(
                expected if number < 3 else [], abs=1e-12 if kind == "table" else 1e-4
            )

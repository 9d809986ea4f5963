"""The scheduler: the same text whoever shares the rounds, order, limits, ends."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fastapi.testclient import TestClient

from monge.core.errors import ContextLengthError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits
from monge.networks.base import NodeBlock
from monge.options import ServeOptions
from monge.requests.logprobs import LogprobOptions
from monge.requests.processors import Stateless
from monge.serve.api.request_parser import RequestParser
from monge.serve.api.schemas import CompletionRequest
from monge.serve.scheduling.generation import Generation, QueueFullError, SchedulerClosedError
from monge.serve.scheduling.scheduler import Scheduler
from tests.serve.served import LONG, slow_decoder, toy_app, toy_decoder, wait_for
from tests.serve.toy import VOCAB, Gate, Model, alone, decoder, generation, submit, submit_all


def is_empty(scheduler):
    parts = scheduler._decoder.components
    return parts.target.open_sequences == 0 and parts.drafter.model.open_sequences == 0


def texts_of(scheduler, requests):
    handles = [submit(scheduler, one) for one in requests]
    return [handle.completion(60).token_ids for handle in handles]


def held(scheduler, **options):
    """The handle of a request that holds the decoding thread until its gate is opened."""
    gate = Gate()
    handle = submit(scheduler, generation(1, processors=(gate,), **options))
    assert gate.reached.wait(60)
    return handle, gate


def marked(served, name):
    """A processor that notes whom it serves."""
    return Stateless(lambda token_ids, scores: served.append(name) or scores)


@pytest.mark.parametrize(("tree", "chunk"), [("chain(3)", 1), ("fixed_width((2, 2))", 512)])
def test_a_crowd_writes_what_each_writes_alone(tree, chunk):
    def made(row):
        prompt = [(3 * row + place) % VOCAB for place in range(1 + row % 5)]
        heat = (0.0, 0.7, 1.0)[row % 3]
        return generation(*prompt, seed=row, tokens=3 + row % 7, temperature=heat)

    requests, options = [made(row) for row in range(32)], ServeOptions(prefill_chunk=chunk)
    expected = [alone(one, tree=tree) for one in requests]
    for size, count in ((32, 32), (3, 10)):
        with Scheduler(decoder(tree=tree, max_batch_size=size), options) as scheduler:
            assert texts_of(scheduler, requests[:count]) == expected[:count]
            assert is_empty(scheduler)


def test_log_probabilities_are_those_of_the_law_and_of_the_model():
    prompt = (2, 0, 5, 1)
    rules = SamplingRules(temperature=0.6, top_k=4)

    def ban(token_ids, scores):
        scores = scores.clone()
        scores[:, int(token_ids[0, -1])] = -math.inf
        return scores

    asked = generation(*prompt, processors=(ban,))
    asked = replace(asked, rules=rules, prompt_logprobs=LogprobOptions(num_top=2, source="raw"))
    sources = [LogprobOptions(num_top=3, source=source) for source in ("processed", "raw")]
    made = [replace(asked, logprobs=options) for options in sources]
    with Scheduler(decoder(), ServeOptions(prefill_chunk=2)) as scheduler:
        processed, raw = [submit(scheduler, one).completion(60) for one in made]
    assert processed.token_ids == raw.token_ids
    model = Model(1)
    text = prompt + processed.token_ids
    model.open({0: ()})
    logits = model.extend({0: NodeBlock.chain(text)})[0]
    plain_law = torch.log_softmax(logits, -1)
    pairs = zip(processed.logprobs, raw.logprobs, strict=True)
    for place, (own, plain) in enumerate(pairs, start=len(prompt)):
        scores = ban(torch.tensor([text[:place]]), logits[place - 1 : place].float())[0]
        law = law_from_logits(scores, rules)
        assert own.token_id == plain.token_id == text[place]
        assert own.logprob == pytest.approx(math.log(law.prob(text[place])))
        assert plain.logprob == pytest.approx(float(plain_law[place - 1][text[place]]))
        assert all(value == pytest.approx(math.log(law.prob(token))) for token, value in own.top)
        assert len(own.top) == len(plain.top) == 3
    for place, entry in enumerate(raw.prompt_logprobs, start=1):
        assert entry.token_id == prompt[place]
        assert entry.logprob == pytest.approx(float(plain_law[place - 1][prompt[place]]))
    assert len(raw.prompt_logprobs) == len(prompt) - 1


def test_requests_that_can_never_fit_are_refused_at_once():
    short, usual = ServeOptions(kv_budget_tokens=50), ServeOptions()
    for options, wrong, kind, message in (
        (short, generation(1, 2, tokens=58), ContextLengthError, "= 60 exceeds the server's .* 50"),
        (short, generation(1, 9), OptionError, r"token ids must lie in 0\.\.6; got 9"),
        (short, generation(1, stop=("x",)), OptionError, "stop strings need a tokenizer"),
        (usual, generation(1, 2, tokens=99), ContextLengthError, "exceeds the target's context"),
    ):
        scheduler = Scheduler(decoder(max_length=100), options)
        with scheduler, pytest.raises(kind, match=message):
            submit(scheduler, wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_waiting": 0}, "max_waiting must be at least 1; got 0"),
        ({"kv_budget_tokens": 1}, "kv_budget_tokens must be at least 2; got 1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, or None"),
    ],
)
def test_limits_without_room_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Scheduler(decoder(), ServeOptions(**options))


def test_the_caches_are_never_promised_twice():
    with Scheduler(decoder(max_batch_size=8), ServeOptions(kv_budget_tokens=60)) as scheduler:
        _, gate = held(scheduler, tokens=18)
        # 20 tokens: three rows of 20 fit
        handles = [submit(scheduler, generation(1, 2, tokens=18, seed=row)) for row in range(4)]
        gate.opened.set()
        used = []
        for handle in handles:
            for _ in handle:
                state = scheduler.snapshot()
                used.append((state.kv_used_tokens, state.num_running + state.num_prefilling))
        assert max(rows for _, rows in used) <= 3
        assert max(tokens for tokens, _ in used) <= 60
        assert scheduler.snapshot().kv_used_tokens == 0


def test_cancelled_generations_give_back_their_room_wherever_they_are():
    with Scheduler(decoder(max_batch_size=3), ServeOptions(prefill_chunk=2)) as scheduler:
        running, gate = held(scheduler, tokens=30)
        made = [generation(*[2] * 20, seed=row) for row in range(3)]
        prefilling, untouched, waiting = [submit(scheduler, one) for one in made]
        waiting.cancel()
        gate.opened.set()
        next(iter(running))
        assert waiting.completion(60).finish_reason == "cancelled"
        prefilling.cancel()
        assert prefilling.completion(60).finish_reason == "cancelled"
        running.cancel()
        last = running.completion(60)
        assert last.finish_reason == "cancelled"
        assert last.summary.num_generated_tokens < 30
        assert untouched.completion(60).token_ids == alone(generation(*[2] * 20, seed=1))
        assert is_empty(scheduler)
        assert scheduler.snapshot().finished == {"cancelled": 3, "length": 1}
        untouched.cancel()  # too late: nothing happens
        assert submit(scheduler, generation(3)).completion(60).finish_reason == "length"


def test_closing_finishes_what_was_taken_or_cuts_it_short():
    scheduler = Scheduler(decoder(max_batch_size=2))
    handles = [submit(scheduler, generation(1, seed=row)) for row in range(5)]
    scheduler.start()
    scheduler.close(finish=True)
    assert [handle.completion(1).finish_reason for handle in handles] == ["length"] * 5

    scheduler = Scheduler(decoder(max_batch_size=1))
    scheduler.start()
    handles = [submit(scheduler, generation(1, tokens=3000)) for _ in range(2)]
    scheduler.close(finish=True, timeout_s=0.05)
    assert [handle.completion(1).finish_reason for handle in handles] == ["cancelled"] * 2
    assert is_empty(scheduler)

    scheduler = Scheduler(decoder())
    handle = submit(scheduler, generation(1))
    scheduler.close()
    assert handle.completion(1).finish_reason == "cancelled", "it was never started"


def test_a_full_queue_and_a_closed_scheduler_say_so():
    options = ServeOptions(max_waiting=2)
    with Scheduler(decoder(max_length=100, max_batch_size=1), options) as scheduler:
        gate = Gate()
        first = generation(1, processors=(gate,))
        handles = submit_all(scheduler, [first, *(generation(1, seed=seed) for seed in range(4))])
        assert gate.reached.wait(60)
        submit(scheduler, generation(1))
        with pytest.raises(QueueFullError, match=r"The queue is full \(2 requests\); retry later."):
            submit_all(scheduler, [generation(1), generation(2)])
        assert scheduler.snapshot().num_waiting == 5, "what comes together waits as one request"
        gate.opened.set()
        assert [handle.completion(60).finish_reason for handle in handles] == ["length"] * 5
        with pytest.raises(ContextLengthError):
            submit_all(scheduler, [generation(1), generation(1, tokens=500)])
        assert scheduler.snapshot().num_waiting == 0, "none of them was to be taken"
    assert is_empty(scheduler)
    with pytest.raises(SchedulerClosedError, match="no more generations are taken: the scheduler"):
        submit(scheduler, generation(1))


def test_a_full_queue_counts_requests():
    app = toy_app(slow_decoder(max_batch_size=1), max_waiting=1)
    with TestClient(app) as client, ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, "/v1/completions", json=LONG | {"n": 3})
        wait_for(lambda: app.state.snapshot().num_waiting == 2)
        answer = client.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "queue_full"
        assert "The queue is full (1 requests)" in answer.json()["error"]["message"]
        app.state.end_generations()
        # An idle server was to take it, however many completions it asks for.
        assert first.result().status_code == 503


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ({name: (name, 1) for name in "abcdef"}, "abcdef"),
        ({"a": ("x", 4), "b": ("x", 3), "c": ("x", 1)}, "abcababa"),
        ({"a": ("x", 3), "b": ("x", 1), "c": ("y", 2), "d": ("z", 1)}, "acdbcaa"),
    ],
)
def test_clients_and_requests_of_one_client_take_turns(asked, order):
    """Requests have a client and a number of choices each."""
    served, handles = [], []
    with Scheduler(decoder(max_batch_size=1)) as scheduler:
        _, gate = held(scheduler, tokens=1)
        for name, (client, choices) in asked.items():
            made = [generation(1, tokens=1, processors=(marked(served, name),))] * choices
            handles += submit_all(scheduler, made, client=client)
        gate.opened.set()
        for handle in handles:
            handle.completion(60)
    assert "".join(served) == order


def test_a_round_looks_at_nothing_that_waits(monkeypatch):
    looked, slot = [], Generation.deadline
    watched = property(lambda one: looked.append(1) or slot.__get__(one), slot.__set__)
    monkeypatch.setattr(Generation, "deadline", watched)
    with Scheduler(decoder(max_batch_size=1), ServeOptions(max_waiting=1000)) as scheduler:
        first, gate = held(scheduler, tokens=5)
        many = [submit(scheduler, generation(1), deadline_s=600) for _ in range(500)]
        gate.opened.set()
        first.completion(60)
        for handle in many:
            handle.cancel()
        assert [handle.completion(60).finish_reason for handle in many].count("cancelled") > 400
    # At most twelve rounds for each that was served, and one running generation in a round.
    assert len(looked) < 20 * (1 + scheduler.snapshot().finished["length"])


def test_choices_of_a_request_share_its_bias_and_hold_no_text():
    bias = {str(token): 1.0 for token in range(5)}
    parser = RequestParser(toy_decoder(), ServeOptions(), max_sequence_tokens=400)
    body = json.dumps({"prompt": ["a", "b"], "n": 3, "logit_bias": bias}).encode()
    parsed = parser.parse(body, CompletionRequest, "name")
    made = parsed.choices
    assert parsed.body.prompt == (), "texts are not held while a request waits"
    assert [one.row for one in made] == list(range(6))
    assert len({id(one.processors[0]) for one in made}) == 2, "one a prompt"

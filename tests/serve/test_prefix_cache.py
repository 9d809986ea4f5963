"""A server with a prefix cache writes what it writes without one, within its budget, and says what it did not read."""

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from monge.core.errors import MongeError
from monge.options import ServeOptions
from monge.serve.scheduling.scheduler import Scheduler
from tests.serve.served import samples, toy_app
from tests.serve.toy import VOCAB, Gate, alone, decoder, generation, submit, submit_all

BLOCKS = [tuple((3 * row + place * place) % VOCAB for place in range(12)) for row in range(3)]
PROMPTS = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5).map(lambda some: sum(some, ()))
REQUESTS = st.tuples(
    PROMPTS,
    st.integers(1, 20),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(["", "", "cancel", "wait"]),
)
LONG = sum(BLOCKS, ())


class Watched:
    """A sink that looks at the scheduler after every round, in its thread."""

    def __init__(self):
        self.scheduler, self.broken = None, []

    def __call__(self, measure, value):
        if measure == "round_tokens" and self.scheduler is not None:
            now = self.scheduler.snapshot()
            if now.kv_used_tokens + now.kv_kept_tokens > now.kv_budget_tokens:
                self.broken.append(now)


@given(
    requests=st.lists(REQUESTS, min_size=2, max_size=8),
    budget=st.integers(80, 400),
    room=st.integers(1, 4000),
    chunk=st.integers(1, 40),
    size=st.integers(1, 3),
)
def test_texts_are_those_without_a_cache(requests, budget, room, chunk, size):
    watched = Watched()
    options = ServeOptions(kv_budget_tokens=budget, prefix_cache_bytes=room, prefill_chunk=chunk)
    with Scheduler(decoder(max_batch_size=size), options, sink=watched) as scheduler:
        watched.scheduler, told = scheduler, []
        for seed, (prompt, tokens, temperature, how) in enumerate(requests):
            made = generation(*prompt, seed=seed, tokens=tokens, temperature=temperature)
            handle = submit(scheduler, made)
            told.append((made, handle, how))
            if how == "cancel":
                handle.cancel()
            elif how == "wait":
                handle.completion(60)
        for made, handle, how in told:
            if how == "wait":
                continue
            found = handle.completion(60)
            text = alone(made)
            assert found.token_ids == text[: len(found.token_ids)]
            assert found.token_ids == text or found.finish_reason == "cancelled" and how == "cancel"
        parts, now = scheduler._decoder.components, scheduler.snapshot()
        assert parts.target.open_sequences == parts.drafter.model.open_sequences == 0
        assert now.kv_kept_tokens <= min(budget, room // 8)
    assert not watched.broken


def test_a_prompt_is_read_once_and_its_answers_go_on():
    with Scheduler(decoder(), ServeOptions(prefill_chunk=8)) as scheduler:
        target = scheduler._decoder.components.target
        first = submit(scheduler, generation(*LONG, seed=1)).completion(60)
        turn = (*LONG, *first.token_ids, 3, 1, 4)
        expected = [0, len(LONG) - 1, len(turn) - 4, 12]
        others = [LONG, turn, (*BLOCKS[0], *BLOCKS[0], *BLOCKS[0])]
        found = [first.summary.num_cached_tokens]
        for prompt in others:
            made = generation(*prompt, seed=2)
            output = submit(scheduler, made).completion(60)
            assert output.token_ids == alone(made)
            found.append(output.summary.num_cached_tokens)
        expected[-1] = 0  # shorter than what is worth a copy
        assert found == expected
        now = scheduler.snapshot()
        assert now.num_cached_tokens == sum(expected)
        assert now.num_prompt_tokens == sum(map(len, [LONG, *others]))
        assert sum(size for _, size in target.pieces) < now.num_prompt_tokens + len(turn)


def test_choices_of_a_long_prompt_wait_for_the_first():
    made = [generation(*LONG, *LONG, seed=row) for row in range(4)]
    with Scheduler(decoder(), ServeOptions(prefill_chunk=8)) as scheduler:
        ends = [handle.completion(60) for handle in submit_all(scheduler, made)]
    assert [one.token_ids for one in ends] == [alone(one) for one in made]
    assert [one.summary.num_cached_tokens for one in ends] == [0] + [2 * len(LONG) - 1] * 3


def test_the_prefix_cache_makes_room_for_waiting_requests():
    options = ServeOptions(kv_budget_tokens=len(LONG) + 24)
    with Scheduler(decoder(max_batch_size=2), options) as scheduler:
        submit(scheduler, generation(*LONG, tokens=20)).completion(60)
        assert scheduler.snapshot().kv_kept_tokens > len(LONG)
        gate = Gate()
        other = submit(scheduler, generation(*LONG[::-1], tokens=24, processors=(gate,)))
        assert gate.reached.wait(60), "it is not kept waiting"
        now = scheduler.snapshot()
        assert (now.kv_used_tokens, now.kv_kept_tokens) == (now.kv_budget_tokens, 0)
        gate.opened.set()
        assert other.completion(60).finish_reason == "length"


def test_a_request_that_fails_leaves_nothing_behind():
    """A prompt that breaks the network, logits that are not numbers, a round that fails."""
    whole = decoder()
    target, poison = whole.components.target, (VOCAB - 1, *LONG)
    with Scheduler(whole) as scheduler:
        for names in (target.failing_prompts, target.nan, target.failing):
            names.add(VOCAB - 1)
            assert submit(scheduler, generation(*poison)).completion(60).finish_reason == "error"
            names.clear()
            assert scheduler.snapshot().kv_kept_tokens == 0
        first = submit(scheduler, generation(*poison)).completion(60)
        again = submit(scheduler, generation(*poison)).completion(60)
        assert first.token_ids == again.token_ids == alone(generation(*poison))
        assert [first.summary.num_cached_tokens, again.summary.num_cached_tokens] == [0, len(LONG)]


def test_a_copy_that_fails_costs_the_cache_and_no_text(monkeypatch):
    whole = decoder()
    with Scheduler(whole) as scheduler:
        submit(scheduler, generation(*LONG)).completion(60)

        def full(*place):
            raise MongeError("no memory")

        monkeypatch.setattr(whole.components.target, "save", full)
        made = generation(*LONG, seed=3)
        with pytest.warns(UserWarning, match="could not be kept for later ones .*no memory"):
            assert submit(scheduler, made).completion(60).token_ids == alone(made)
        assert submit(scheduler, made).completion(60).summary.num_cached_tokens == 0


@pytest.mark.parametrize("size", [1 << 20, 0])
def test_usage_and_metrics_say_what_was_not_read(size):
    prompt, cached = "the same long prompt again", 25 if size else 0
    with TestClient(toy_app(prefix_cache_bytes=size)) as client:
        for expected in (0, cached):
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            details = usage["prompt_tokens_details"]
            written = len(prompt) if size and not expected else 0
            assert (details["cached_tokens"], details["cache_write_tokens"]) == (expected, written)
        twice = body | {"n": 2, "prompt": [prompt] * 2}
        usage = client.post("/v1/completions", json=twice).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * cached
        scored = client.post("/v1/completions", json=body | {"echo": True, "logprobs": 1}).json()
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        values = {one.name: one.value for one in samples(client.get("/metrics").text)}
        told = [values[f"vllm:prefix_cache_{name}_total"] for name in ("queries", "hits")]
        assert told == ([7 * len(prompt), 5 * cached] if size else [0, 0])
        assert (values["monge:kv_kept_tokens"] > 0) == (size > 0)
        if size:
            chat = {"input": prompt, "max_output_tokens": 3, "temperature": 0}
            answers = [client.post("/v1/responses", json=chat).json() for _ in range(2)]
            details = [one["usage"]["input_tokens_details"] for one in answers]
            assert [one["cached_tokens"] > 0 for one in details] == [False, True]
            assert [one["cache_write_tokens"] > 0 for one in details] == [True, False]


SALTS = ["", "a", "b", None]


@given(salts=st.lists(st.sampled_from(SALTS), min_size=2, max_size=6), room=st.integers(300, 4000))
def test_only_requests_of_one_salt_share_beginnings(salts, room):
    """Texts of other salts, and of none, are as if they had never been read."""
    options = ServeOptions(prefix_cache_bytes=room)
    with Scheduler(decoder(), options) as scheduler:
        for place, salt in enumerate(salts):
            made = generation(*LONG, seed=place, cache_salt=salt)
            output = submit(scheduler, made).completion(60)
            assert output.token_ids == alone(made)
            if room >= 3 * 8 * (len(LONG) + 12) or salt is None:
                is_known = salt is not None and salt in salts[:place]
                assert output.summary.num_cached_tokens == (len(LONG) - 1 if is_known else 0)
                is_new = salt is not None and not is_known
                assert output.summary.num_written_tokens == (len(LONG) if is_new else 0)
        assert scheduler.snapshot().kv_kept_tokens <= room // 8
        assert scheduler._prefixes.salts == {}


def test_choices_and_equal_prompts_of_other_salts_do_not_wait_for_each_other():
    salts = ["a", "a", "b", None, None]
    made = [generation(*LONG, *LONG, seed=row, cache_salt=salt) for row, salt in enumerate(salts)]
    with Scheduler(decoder(), ServeOptions(prefill_chunk=8)) as scheduler:
        ends = [handle.completion(60) for handle in submit_all(scheduler, made)]
        kept = scheduler.snapshot().kv_kept_tokens
    assert [one.token_ids for one in ends] == [alone(one) for one in made]
    cached = [one.summary.num_cached_tokens for one in ends]
    assert cached == [0, 2 * len(LONG) - 1, 0, 0, 0]
    assert kept <= 2 * 2 * len(LONG) + 3 * 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_clients_choose_with_whom_they_share(path):
    prompt = "the same long prompt again and again"
    names = {"/v1/completions": "prompt", "/v1/responses": "input"}
    asked = prompt if path in names else [{"role": "user", "content": prompt}]
    body = {names.get(path, "messages"): asked, "temperature": 0}
    with TestClient(toy_app()) as client:

        def cached(**fields):
            answer = client.post(path, json=body | fields)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
            return details["cached_tokens"] > 0, details["cache_write_tokens"] > 0

        assert cached(cache_salt="a", cache_prompt=True) == (False, True)
        assert cached() == (False, True)
        assert cached(cache_salt="b", cache_prompt=False) == (False, False)
        assert cached(cache_salt="b") == (False, True)
        assert cached(cache_salt="a") == (True, False)
        assert cached(cache_prompt=False) == (False, False)
        assert cached(cache_salt=None) == (True, False)
        refused = client.post(path, json=body | {"cache_salt": ""}).json()["error"]
        assert refused["param"] == "cache_salt"

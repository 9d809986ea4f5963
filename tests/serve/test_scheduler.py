"""The scheduler: the same text whoever shares the rounds, order, limits, ends."""

import math
import time
from collections import defaultdict

import pytest
import torch

from monge.core.errors import ContextLengthError, OptionError
from monge.core.model import NodeBlock
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.engine.processors import Stateless
from monge.serve.scheduler import Scheduler
from tests.serve.toy import VOCAB, Gate, Letters, Model, alone, decoder, generation


def is_empty(scheduler):
    parts = scheduler._decoder.components
    return parts.target.open_sequences == 0 and parts.drafter.model.open_sequences == 0


@pytest.mark.parametrize(("tree", "chunk"), [("chain(3)", 1), ("fixed_width((2, 2))", 512)])
def test_a_crowd_writes_what_each_writes_alone(tree, chunk):
    generations = [
        generation(
            *[(3 * row + place) % VOCAB for place in range(1 + row % 5)],
            seed=row,
            tokens=3 + row % 7,
            temperature=(0.0, 0.7, 1.0)[row % 3],
        )
        for row in range(32)
    ]
    expected = [alone(one, tree=tree) for one in generations]
    with Scheduler(decoder(tree=tree), max_batch_size=32, prefill_chunk=chunk) as crowd:
        handles = [crowd.submit(one) for one in generations]
        assert [handle.completion(60).token_ids for handle in handles] == expected
        assert is_empty(crowd)
    with Scheduler(decoder(tree=tree), max_batch_size=3, prefill_chunk=chunk) as few:
        handles = [few.submit(one) for one in generations[:10]]
        assert [handle.completion(60).token_ids for handle in handles] == expected[:10]


def test_text_and_stop_strings_are_those_of_the_decoder():
    made = generation(0, 1, seed=5, tokens=40, stop=("ab", "c"))
    whole = decoder(tokenizer=Letters())
    (result,) = whole.generate(
        [made.prompt_ids], max_new_tokens=40, temperature=1.0, seed=5, stop=made.stop
    )
    with Scheduler(decoder(tokenizer=Letters())) as scheduler:
        events = list(scheduler.submit(made))
    assert "".join(event.text for event in events) == result.text
    assert tuple(token for event in events for token in event.token_ids) == result.token_ids
    assert events[-1].finish_reason == result.finish_reason == "stop"
    assert [event.summary is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert sum(event.num_accepted for event in events) > 0


def test_without_speculation_nothing_is_drafted_and_the_text_is_the_greedy_one():
    whole = decoder()
    with Scheduler(whole) as scheduler:
        plain, drafted = [
            scheduler.submit(generation(1, 3, temperature=0.0, speculative=speculative)).completion(
                60
            )
            for speculative in (False, True)
        ]
    assert plain.token_ids == drafted.token_ids
    assert plain.summary.speculation.num_drafts == plain.summary.speculation.num_draft_tokens == 0
    assert plain.summary.speculation.num_rounds == 12
    assert drafted.summary.speculation.num_drafts > 0
    drafter = whole.components.drafter.model
    assert {sequence for sequence, _ in drafter.pieces} == {1}, (
        "the draft model was to be shown the second generation only"
    )


def test_log_probabilities_are_those_of_the_law_and_of_the_model():
    prompt = (2, 0, 5, 1)
    rules = SamplingRules(temperature=0.6, top_k=4)

    def ban(token_ids, scores):
        scores = scores.clone()
        scores[:, int(token_ids[0, -1])] = -math.inf
        return scores

    made = [
        generation(*prompt, processors=(ban,), logprobs=3, logprobs_of=source, prompt_logprobs=2)
        for source in ("processed", "raw")
    ]
    made = [
        type(one)(**{name: getattr(one, name) for name in one.__slots__} | {"rules": rules})
        for one in made
    ]
    with Scheduler(decoder(), prefill_chunk=2) as scheduler:
        processed, raw = [scheduler.submit(one).completion(60) for one in made]
    assert processed.token_ids == raw.token_ids
    model = Model(1)
    text = prompt + processed.token_ids
    model.open({0: ()})
    logits = model.extend({0: NodeBlock.chain(text)})[0]
    for place, (own, plain) in enumerate(
        zip(processed.logprobs, raw.logprobs, strict=True), start=len(prompt)
    ):
        law = law_from_logits(
            ban(torch.tensor([text[:place]]), logits[place - 1 : place].float())[0], rules
        )
        assert own.token_id == plain.token_id == text[place]
        assert own.logprob == pytest.approx(math.log(law.prob(text[place])))
        assert plain.logprob == pytest.approx(
            float(torch.log_softmax(logits[place - 1], -1)[text[place]])
        )
        assert all(value == pytest.approx(math.log(law.prob(token))) for token, value in own.top)
        assert len(own.top) == len(plain.top) == 3
    for place, entry in enumerate(raw.prompt_logprobs, start=1):
        assert entry.logprob == pytest.approx(
            float(torch.log_softmax(logits[place - 1], -1)[prompt[place]])
        )
    assert [entry.token_id for entry in raw.prompt_logprobs] == list(prompt[1:])


def test_who_comes_first_is_served_first():
    served = []

    def marked(row):
        return Stateless(lambda token_ids, scores: served.append(row) or scores)

    with Scheduler(decoder(), max_batch_size=1) as scheduler:
        gate = Gate()
        first = scheduler.submit(generation(1, tokens=1, processors=(gate,)))
        assert gate.reached.wait(60)
        handles = [
            scheduler.submit(generation(1, seed=row, tokens=1 + row % 3, processors=(marked(row),)))
            for row in range(6)
        ]
        assert scheduler.snapshot().num_waiting == 6
        gate.opened.set()
        for handle in (first, *handles):
            handle.completion(60)
    assert list(dict.fromkeys(served)) == list(range(6)), (
        "a later generation overtook an earlier one"
    )


def test_what_can_never_fit_is_refused_at_once():
    with Scheduler(decoder(max_length=100), kv_budget_tokens=50) as scheduler:
        with pytest.raises(
            ContextLengthError, match="= 60 exceeds the 50 tokens of all caches together"
        ):
            scheduler.submit(generation(1, 2, tokens=58))
        with pytest.raises(OptionError, match=r"token ids must lie in 0\.\.6; got 9"):
            scheduler.submit(generation(1, 9))
        with pytest.raises(OptionError, match="stop strings need a tokenizer"):
            scheduler.submit(generation(1, stop=("x",)))
        with pytest.raises(OptionError, match="must be >= 0; got -1"):
            scheduler.submit(generation(1, logprobs=-1))
    with (
        Scheduler(decoder(max_length=100)) as scheduler,
        pytest.raises(ContextLengthError, match="exceeds the target's context"),
    ):
        scheduler.submit(generation(1, 2, tokens=99))
    with pytest.raises(OptionError, match="deadline_s must be positive"):
        generation(1, deadline_s=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be at least 1; got 0"),
        ({"max_waiting": 0}, "max_waiting must be at least 1; got 0"),
        (
            {"kv_budget_tokens": 1},
            "kv_budget_tokens must hold a prompt and a token, at least 2; got 1",
        ),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, or None"),
    ],
)
def test_limits_without_room_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Scheduler(decoder(), **options)


def test_the_caches_are_never_promised_twice():
    with Scheduler(decoder(), max_batch_size=8, kv_budget_tokens=60) as scheduler:
        gate = Gate()
        # 20 tokens: three rows of 20 fit
        scheduler.submit(generation(1, 2, tokens=18, processors=(gate,)))
        assert gate.reached.wait(60)
        handles = [scheduler.submit(generation(1, 2, tokens=18, seed=row)) for row in range(4)]
        gate.opened.set()
        used = []
        for handle in handles:
            for _ in handle:
                state = scheduler.snapshot()
                used.append((state.kv_used_tokens, state.num_running + state.num_prefilling))
        assert max(rows for _, rows in used) <= 3
        assert max(tokens for tokens, _ in used) <= 60
        assert scheduler.snapshot().kv_used_tokens == 0


def test_cancelled_jobs_give_back_their_room_wherever_they_are():
    with Scheduler(decoder(), max_batch_size=3, prefill_chunk=2) as scheduler:
        gate = Gate()
        running = scheduler.submit(generation(1, tokens=30, processors=(gate,)))
        assert gate.reached.wait(60)
        prefilling, untouched, waiting = [
            scheduler.submit(generation(*[2] * 20, seed=row)) for row in range(3)
        ]
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
        assert scheduler.submit(generation(3)).completion(60).finish_reason == "length"


def test_a_deadline_ends_a_job_with_what_it_has():
    with Scheduler(decoder(tokenizer=Letters())) as scheduler:
        gate = Gate()
        handle = scheduler.submit(generation(1, tokens=5000, deadline_s=0.05, processors=(gate,)))
        queued = scheduler.submit(generation(1, tokens=5000, deadline_s=0.05))
        assert gate.reached.wait(60)
        time.sleep(0.06)
        gate.opened.set()
        whole = handle.completion(60)
        assert whole.finish_reason == queued.completion(60).finish_reason == "deadline"
        assert 0 < len(whole.token_ids) == len(whole.text) < 5000
        assert is_empty(scheduler)


def test_draining_finishes_what_was_taken():
    scheduler = Scheduler(decoder(), max_batch_size=2)
    handles = [scheduler.submit(generation(1, seed=row)) for row in range(5)]
    scheduler.start()
    scheduler.close(drain=True)
    assert [handle.completion(1).finish_reason for handle in handles] == ["length"] * 5


def test_a_drain_that_takes_too_long_is_cut_short():
    scheduler = Scheduler(decoder(), max_batch_size=1)
    scheduler.start()
    handles = [scheduler.submit(generation(1, tokens=3000)) for _ in range(2)]
    scheduler.close(drain=True, timeout_s=0.05)
    assert [handle.completion(1).finish_reason for handle in handles] == ["cancelled"] * 2
    assert is_empty(scheduler)


def test_what_was_never_started_cancels_its_jobs():
    scheduler = Scheduler(decoder())
    handle = scheduler.submit(generation(1))
    scheduler.close()
    assert handle.completion(1).finish_reason == "cancelled"


def test_figures_agree_with_each_other():
    seen = defaultdict(list)
    generations = [
        generation(*[row % VOCAB] * (1 + row), seed=row, tokens=1 + 2 * row) for row in range(6)
    ]
    with Scheduler(
        decoder(), max_batch_size=3, sink=lambda measure, value: seen[measure].append(value)
    ) as scheduler:
        done = [handle.completion(60) for handle in [scheduler.submit(one) for one in generations]]
        state = scheduler.snapshot()
    told = [whole.summary.speculation for whole in done]
    assert (
        state.num_generated_tokens
        == sum(len(whole.token_ids) for whole in done)
        == sum(seen["generated_tokens"])
    )
    assert (
        state.num_prompt_tokens
        == sum(len(one.prompt_ids) for one in generations)
        == sum(seen["prompt_tokens"])
    )
    assert state.speculation.num_rounds == sum(one.num_rounds for one in told)
    assert state.speculation.num_draft_tokens == sum(one.num_draft_tokens for one in told) > 0
    assert state.speculation.accepted_by_position == tuple(
        map(sum, zip(*(one.accepted_by_position for one in told), strict=True))
    )
    for one in [*told, state.speculation]:
        histogram = one.acceptance_histogram
        assert len(histogram) == one.max_depth + 1 == 4
        assert sum(histogram) == one.num_drafts
        assert (
            sum(depth * count for depth, count in enumerate(histogram))
            == one.num_accepted_tokens
            <= one.num_draft_tokens
        )
    # The last token of every prompt is read in its first round, with the tree.
    assert sum(seen["round_tokens"]) == state.num_generated_tokens + state.num_prompt_tokens - len(
        generations
    )
    assert (
        len(seen["first_token_s"])
        == len(seen["queue_s"])
        == len(seen["total_s"])
        == len(generations)
    )
    assert len(seen["inter_token_s"]) == sum(one.num_rounds - 1 for one in told)
    for whole in done:
        timings = whole.summary.timings
        assert 0 <= timings.queue_s <= timings.first_token_s <= timings.total_s
        assert timings.prefill_s >= 0
        assert timings.decode_s >= 0


def test_a_crowd_of_networks_writes_what_each_writes_alone():
    import monge
    from tests.engine.tiny import network, perturbed, prompts

    target = network("llama")
    texts = prompts((9, 40, 7, 23, 5, 3, 1, 31), seed=6)
    whole = monge.load(target, perturbed(target), tree="fixed_width((3, 2))", controller="fixed")
    generations = [
        generation(*text, seed=row, tokens=10, temperature=0.8) for row, text in enumerate(texts)
    ]
    expected = [
        whole.generate(
            [one.prompt_ids], max_new_tokens=10, temperature=0.8, seed=one.seed, ignore_eos=True
        )[0].token_ids
        for one in generations
    ]
    with Scheduler(whole, max_batch_size=5, prefill_chunk=6) as scheduler:
        handles = [scheduler.submit(one) for one in generations]
        assert [handle.completion(60).token_ids for handle in handles] == expected
        assert scheduler.submit(generations[1]).completion(60).token_ids == expected[1]
    whole.components.target.check_integrity()
    assert not whole.components.target._rows
    assert not whole.components.drafter.model._rows


@pytest.mark.slow
def test_a_crowd_of_32_on_the_built_in_pair_writes_what_each_writes_alone():
    import monge

    whole = monge.load(controller="fixed")
    prompts = [
        tuple(whole.tokenizer(text)["input_ids"])
        for text in ("Once upon a time", "The sea", "She said that", "It was")
    ]
    generations = [
        generation(
            *prompts[row % 4],
            seed=row,
            tokens=24,
            temperature=(0.0, 0.8)[row % 2],
            eos_ids=whole.eos_ids,
        )
        for row in range(32)
    ]
    expected = [
        whole.generate(
            [one.prompt_ids], max_new_tokens=24, temperature=one.rules.temperature, seed=one.seed
        )[0].token_ids
        for one in generations
    ]
    with Scheduler(whole, max_batch_size=32, prefill_chunk=3) as scheduler:
        handles = [scheduler.submit(one) for one in generations]
        assert [handle.completion(200).token_ids for handle in handles] == expected

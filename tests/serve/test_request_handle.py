"""Events reach their reader, in order, in a thread or in a coroutine."""

import asyncio
import threading

import pytest

from monge.serve.generation import Output, Speculation, Summary
from monge.serve.request_handle import RequestHandle

SUMMARY = Summary(num_generated_tokens=3)
EVENTS = [
    Output(text="a", token_ids=(5, 6)),
    Output(text="", token_ids=()),
    Output(text="b", token_ids=(7,), finish_reason="length", summary=SUMMARY),
]


def fed(pause_s=0.0):
    cancelled = threading.Event()
    handle = RequestHandle(0, cancelled.set)

    def feed():
        for event in EVENTS:
            cancelled.wait(pause_s)
            handle.put(event)

    threading.Thread(target=feed).start()
    return handle, cancelled


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_thread_reads_events_in_order(pause_s):
    handle, _ = fed(pause_s)
    assert list(handle) == EVENTS
    assert list(handle) == []


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_coroutine_reads_events_in_order(pause_s):
    async def read():
        handle, _ = fed(pause_s)
        return [event async for event in handle]

    assert asyncio.run(read()) == EVENTS


def test_events_add_up_to_a_completion():
    handle, _ = fed()
    whole = handle.completion(timeout_s=10)
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("ab", (5, 6, 7), "length")
    assert whole.summary is SUMMARY
    assert asyncio.run(fed(0.01)[0].completion_async()).token_ids == (5, 6, 7)


def test_waiting_in_vain_says_so():
    handle = RequestHandle(7, lambda: None)
    with pytest.raises(TimeoutError, match="generation 7: nothing came"):
        handle.completion(timeout_s=0.01)


def test_a_reader_that_gave_up_loses_nothing():
    async def read():
        handle = RequestHandle(0, lambda: None)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(handle), 0.01)
        for event in EVENTS:
            handle.put(event)
        return [event async for event in handle]

    assert asyncio.run(read()) == EVENTS


def test_events_after_the_readers_loop_ended_are_kept():
    handle = RequestHandle(0, lambda: None)

    async def start():
        reading = asyncio.ensure_future(anext(handle))
        await asyncio.sleep(0)
        reading.cancel()

    asyncio.run(start())
    for event in EVENTS:
        handle.put(event)
    assert list(handle) == EVENTS


def test_speculation_has_the_invariants_of_its_histogram():
    told = Speculation(
        num_rounds=9,
        num_draft_tokens=11,
        acceptance_histogram=(2, 5, 0, 0),
    )
    assert (told.max_depth, told.num_drafts, told.num_accepted_tokens) == (3, 7, 5)
    assert told.accepted_by_position == (5, 0, 0)
    assert told.mean_acceptance_length == pytest.approx(1 + 5 / 7)
    assert told.draft_acceptance_rate == pytest.approx(5 / 11)
    assert (Speculation().mean_acceptance_length, Speculation().draft_acceptance_rate) == (1.0, 0.0)

"""Thousands of jobs leave nothing behind."""

import gc
import tracemalloc

import pytest

from monge.api import make_parts
from monge.engine.decoder import Decoder
from monge.serve.scheduler import Scheduler
from monge.testing.tabular import RandomTable, TabularModel
from tests.serve.toy import job

VOCAB = 7


class Markov(TabularModel):
    """A table of the last token only, so that the table itself stops growing."""

    def __init__(self, seed):
        super().__init__(RandomTable(VOCAB, seed), VOCAB)

    def _logits_after(self, text):
        return super()._logits_after(text[-1:])


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_types")
def test_memory_stays_flat_over_two_thousand_jobs():
    target, draft = Markov(1), Markov(2)
    decoder = Decoder(make_parts(target, draft, tree="chain(3)"))

    def submit(scheduler, count):
        tickets = [scheduler.submit(job(row % VOCAB, 1, seed=row, tokens=3, temperature=0.0)) for row in range(count)]
        for row, ticket in enumerate(tickets):
            if row % 50 == 0:
                ticket.cancel()
            assert len(ticket.completion(60).token_ids) <= 3

    with Scheduler(decoder, max_batch_size=32, max_waiting=200) as scheduler:
        submit(scheduler, 200)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(9):
            submit(scheduler, 200)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        state = scheduler.snapshot()
        assert (state.num_running, state.num_waiting, state.kv_used_tokens) == (0, 0, 0)
        assert sum(state.finished.values()) == 2000
        assert not scheduler._cancelled
    assert not target._committed
    assert not target._nodes
    assert not draft._committed
    assert grown < 100_000, f"{grown} bytes more after 1800 jobs: something is kept for every job"

"""A seed is reported only where it gives its text again, whatever the clock says and whoever came before."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle

import pytest

from monge.api import make_components
from monge.control.base import Reads
from monge.control.fixed import Fixed
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder
from monge.oracle.tabular import RandomTable, TabularModel
from monge.runtime.clock import measured_by

VOCAB = 6
UNSTEADY = {Reads.LATENCY, Reads.MEMORY}
STEADY_CLOCK, WILD_CLOCK = (0.01,), (0.001, 2.0, 0.5, 0.001, 0.001, 3.0, 0.02)


@contextmanager
def clock(steps: tuple[float, ...]) -> Iterator[None]:
    """A clock that moves by these seconds, again and again, whenever it is read."""
    moves, seconds = cycle(steps), 0.0

    def now() -> float:
        nonlocal seconds
        seconds += next(moves)
        return seconds

    with measured_by(now):
        yield


def decoder(name: str, verifier: str | None) -> Decoder:
    models = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2))
    drafter = "pool('ngram(2)', 'model')" if CONTROLLERS[name].selects else "model"
    parts = {"drafter": drafter, "verifier": verifier, "controller": name}
    return Decoder(make_components(*models, tree="chain(6)", **parts))


def write(made: Decoder, **options: object):
    settings = {"max_new_tokens": 80, "temperature": 1.0, "seed": 3} | options
    (result,) = made.generate([(1, 2)], **settings)
    return result


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_reported_seed_gives_its_text_under_another_clock_and_after_other_requests(name):
    with clock(STEADY_CLOCK):
        first = write(decoder(name, None))
    with clock(WILD_CLOCK):
        made = decoder(name, None)
        made.generate([(1,), (2, 3)], max_new_tokens=40, temperature=1.0, seed=9)
        again = write(made)
    is_steady = UNSTEADY.isdisjoint(CONTROLLERS.make(name).reads)
    assert (first.seed, again.seed) == ((3, 3) if is_steady else (None, None))
    if is_steady:
        assert first.token_ids == again.token_ids
        assert [one.plan for one in first.records] == [one.plan for one in again.records]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for name in CONTROLLERS
        for options in ({"temperature": 0.0}, {"seed": 3})
        if not UNSTEADY.isdisjoint(CONTROLLERS.make(name).reads)
    ],
)
def test_plans_do_not_matter_to_greedy_texts_and_rules_that_do_not_look_at_them(name, options):
    verifier = "gumbel" if "seed" in options else None
    results = []
    for steps in (STEADY_CLOCK, WILD_CLOCK):
        with clock(steps):
            results.append(write(decoder(name, verifier), **options))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].seed == results[1].seed == 3


@pytest.mark.parametrize("name", ["on_the_fly", "goodput"])
def test_the_clock_decides_what_a_controller_of_measured_times_writes(name):
    """Otherwise the comparisons above would prove nothing."""
    texts = set()
    for forward_s in (0.0, 50.0):
        made, ticks, spent = decoder(name, None), count(), [0.0]
        (draft,) = made.components.draft_models
        extend = draft.extend

        def slow(blocks, spent=spent, forward_s=forward_s, extend=extend):
            spent[0] += forward_s
            return extend(blocks)

        draft.extend = slow
        with measured_by(lambda ticks=ticks, spent=spent: 0.01 * next(ticks) + spent[0]):
            texts.add(write(made).token_ids)
    assert len(texts) == 2


@dataclass(frozen=True, slots=True)
class Misspelt(Fixed):
    """Says that it reads `costs`, which nothing is called."""

    reads = frozenset({"costs"})


def test_a_controller_that_reads_something_unknown_is_refused():
    target = TabularModel(RandomTable(VOCAB, 1), VOCAB)
    with pytest.raises(OptionError, match="unknown value of Misspelt.reads: 'costs'"):
        make_components(target, drafter="ngram", controller=Misspelt())

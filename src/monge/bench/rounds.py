"""`monge bench rounds`: what plain rounds take by their place behind drafts, against plain rounds among themselves.

The baseline of "never slower than plain decoding" is a plain round, and behind a draft one takes longer than those after it:
this shows for how many rounds. One decoder decodes the same prompts in two turns, with drafts between and without.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch

from monge.api import load
from monge.bench.provenance import provenance
from monge.bench.statistics import Summary
from monge.bench.tasks import shipped
from monge.control.base import PLAIN, Controller, Memory
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.verdict import StepRecord
from monge.engine.decoder import Decoder

_BEGINNING: Final = 3  # first rounds of a request, which take longer whoever drafts


@dataclass(frozen=True, slots=True)
class Turns(Controller[int]):
    """Rounds that draft, then plain ones, over and over.

    Args:
        num_drafted: Rounds in a row that draft.
        num_plain: Plain ones behind them.
        depth: Of the drafts.
    """

    num_drafted: int
    num_plain: int
    depth: int

    reads = frozenset({"accepted"})

    def init(self, memory: Memory) -> int:
        return 0

    def plan(self, state: int, draws: Draws) -> DraftPlan:
        is_plain = state % (self.num_drafted + self.num_plain) >= self.num_drafted
        return PLAIN if is_plain else DraftPlan(max_depth=self.depth)

    def update(self, state: int, record: StepRecord) -> int:
        return state + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """What is measured.

    Args:
        drafted: Rounds in a row that draft.
        plain: Plain ones behind them.
        depth: Tokens of a draft.
        batch: Requests that share rounds.
        max_new_tokens: Length of every text.
        repeats: Passes over the prompts, each both ways; one more, before them, counts for nothing.
        temperature: 0 is greedy.
        loading: Further options of `load`.
    """

    drafted: int = 12
    plain: int = 8
    depth: int = 3
    batch: int = 1
    max_new_tokens: int = 96
    repeats: int = 10
    temperature: float = 0.0
    loading: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("drafted", "plain", "depth", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise OptionError(f"bench rounds: {name} must be at least 1; got {getattr(self, name)}")
        if self.max_new_tokens <= (needed := self.drafted * (self.depth + 1) + self.plain + _BEGINNING):
            raise OptionError(
                f"bench rounds: {self.drafted} rounds that draft and {self.plain} plain ones may write {needed} tokens; let "
                f"texts be longer than that, got max_new_tokens={self.max_new_tokens}"
            )


def measure(settings: RoundSettings, notify: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Time plain rounds both ways: provenance, settings, and by place milliseconds and their ratio to plain decoding.

    Returns:
        Under `plain` rounds without drafts between, under `places` those behind them, the first first; each a summary over
        passes of the pass's median.

    Raises:
        OptionError: If the drafter drafts nothing.
    """
    turns = Turns(settings.drafted, settings.plain, settings.depth)
    decoder = load(controller=turns, max_batch_size=settings.batch, **settings.loading)
    if not decoder.parts.drafts:
        raise OptionError("bench rounds: this drafter drafts nothing, so no round is behind a draft; choose another one")
    plainly = Decoder(
        replace(decoder.parts, controller=Turns(0, 1, 0)),
        tokenizer=decoder.tokenizer,
        eos_ids=decoder.eos_ids,
        max_batch_size=settings.batch,
    )
    plain, places = list[float](), defaultdict[int, list[float]](list)
    for number in range(settings.repeats + 1):
        notify(f"pass {number} of {settings.repeats}")
        usual = median(_by_place(plainly, settings)[0])
        behind = _by_place(decoder, settings)
        if number:
            plain.append(usual)
            for place, seconds in behind.items():
                places[place].append(median(seconds))
    shown = range(1, 1 + min(len(places), settings.plain))
    return {
        "provenance": provenance(torch.device(settings.loading.get("device", "cpu"))),
        "settings": asdict(settings),
        "plain": asdict(Summary.of(plain)),
        "places": [
            {
                "place": place,
                "seconds": asdict(Summary.of(places[place])),
                "ratio": asdict(Summary.of([one / usual for one, usual in zip(places[place], plain, strict=True)])),
            }
            for place in shown
        ],
    }


def _by_place(decoder: Decoder, settings: RoundSettings) -> dict[int, list[float]]:
    """Seconds of plain rounds by their number behind the last draft; 0 where there was none before."""
    texts, found = [prompt.text for prompt in shipped(per_task=settings.batch)], defaultdict[int, list[float]](list)
    for first in range(0, len(texts) - settings.batch + 1, settings.batch):
        group = texts[first : first + settings.batch]
        results = decoder.generate(
            group, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, ignore_eos=True
        )
        for place, seconds in _places(results[0].records, settings.batch):
            found[place].append(seconds)
    return found


def _places(records: Sequence[StepRecord], batch_size: int) -> list[tuple[int, float]]:
    """Place and seconds of a request's plain rounds in a full batch, but for its first ones."""
    found, num_plain, has_drafted = list[tuple[int, float]](), 0, False
    for number, record in enumerate(records):
        if record.plan.max_depth:
            num_plain, has_drafted = 0, True
            continue
        num_plain += 1
        if number >= _BEGINNING and record.batch_size == batch_size:
            found.append((num_plain if has_drafted else 0, record.times.total_s))
    return found

"""Situations of an audit: an engine that is right alone may be wrong in a crowd, or for a shared prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.audit.bets import NUM_PREFIXES
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules

PROMPTS: Final = (
    "The old lighthouse keeper opened the door and",
    "def fibonacci(n):\n    ",
    "In the year 1905, a clerk at the patent office",
    "Question: Why is the sky blue?\nAnswer:",
    "The recipe needs two eggs, a cup of flour and",
    "Dear Sir or Madam,\n\nI am writing to",
)
"""Few prompts: the laws of their first tokens are learned from many texts."""

LONG: Final = (
    " ".join(
        f"Item {number}: the measured value was {number * 37 % 101}." for number in range(1, 41)
    )
    + " The largest"
)
SHARED: Final = "The following is a short story about two friends who travel to the sea. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Requests of the same kind.

    Args:
        name: Shown in reports.
        prompts: Prompts, taken in turn.
        rules: Sampling rules.
        beside: Sampling rules of requests that are sent beside these, in turn with them.
        max_tokens: Tokens of each text.
        concurrency: Requests at once.
        share: Share of the budget, relative to the other situations.
        is_seeded: Whether each request brings its own seed.
        is_structured: Whether the texts must follow a regex; see `monge.audit.structured`.
    """

    name: str
    prompts: tuple[str, ...]
    rules: SamplingRules = SamplingRules()
    beside: tuple[SamplingRules, ...] = ()
    max_tokens: int = 16
    concurrency: int = 4
    share: float = 1.0
    is_seeded: bool = False
    is_structured: bool = False

    def request(self, index: int) -> tuple[str, SamplingRules]:
        """Return the prompt and the sampling rules of a request."""
        every = (self.rules, *self.beside)
        turn, place = divmod(index, len(every))
        return self.prompts[turn % len(self.prompts)], every[place]


def usual_situations(
    prompts: tuple[str, ...] = PROMPTS, *, is_quick: bool = False
) -> tuple[Situation, ...]:
    """Return the situations of an audit, in order.

    Args:
        prompts: Short prompts.
        is_quick: Only those in which most faults show.
    """
    first, second = prompts[:2]
    shared = (SHARED + first, SHARED + second, SHARED + first)
    few = SamplingRules(top_k=4)
    every = (
        Situation(
            name="first tokens",
            prompts=(first, second),
            rules=few,
            max_tokens=NUM_PREFIXES,
            concurrency=16,
        ),
        Situation(
            name="shared prefix", prompts=shared, max_tokens=NUM_PREFIXES, concurrency=1, share=0.5
        ),
        Situation(name="16 at once", prompts=prompts, concurrency=16),
        # The bias of dropped drafts is small, and shows nowhere else.
        Situation(name="structured", prompts=prompts, concurrency=8, share=4.0, is_structured=True),
        Situation(
            name="temperature 0.7, top-k 8",
            prompts=prompts,
            rules=SamplingRules(temperature=0.7, top_k=8),
        ),
        Situation(name="alone", prompts=prompts, concurrency=1, share=0.5),
        Situation(name="4 at once", prompts=prompts),
        Situation(name="top-p 0.8", prompts=prompts, rules=SamplingRules(top_p=0.8)),
        Situation(name="seeds", prompts=prompts, is_seeded=True),
        Situation(name="long prompt", prompts=(LONG,)),
        Situation(
            name="greedy beside sampled",
            prompts=prompts,
            rules=SamplingRules(temperature=0.0),
            beside=(SamplingRules(),),
            concurrency=8,
            share=0.5,
        ),
        Situation(
            name="top-k beside top-p",
            prompts=prompts,
            rules=SamplingRules(top_p=0.8),
            beside=(SamplingRules(top_k=8),),
            concurrency=8,
        ),
    )
    free = tuple(situation for situation in every if not situation.is_structured)
    return free[:4] if is_quick else every


def situations_named(names: Sequence[str]) -> tuple[Situation, ...]:
    """Return some of the usual situations, in the order of their names.

    Raises:
        OptionError: If a name is unknown.
    """
    known = {situation.name: situation for situation in usual_situations()}
    if unknown := [name for name in names if name not in known]:
        raise OptionError(f"unknown situation {unknown[0]!r}; known: {', '.join(map(repr, known))}")
    return tuple(known[name] for name in names)

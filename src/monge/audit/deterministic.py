"""The first stages of an audit: greedy texts, and the log-probabilities of first tokens.

They need few requests, and tell servers with other weights from servers with a wrong sampler.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from monge.audit.client import Server
from monge.audit.references import Reference, token_names
from monge.audit.token_law import TokenLaw
from monge.core.sampling_rules import SamplingRules

_SAME_WEIGHTS_NATS: Final = 0.15
"""Median difference of first tokens' log-probabilities that 16-bit arithmetic does not reach."""
_SAME_FIRST_TOKENS: Final = 0.8
"""Share of prompts whose greedy first tokens must agree: these come before any speculation."""
_NOISE_FACTOR: Final = 2.0
_MOST_CHARACTERS: Final = 600
"""Sampled characters after which greedy texts start again from a prompt of the audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which a greedy text leaves the reference, after `position` tokens.

    `gap` is how many nats less probable it is than the reference's most probable token, `expected`.
    """

    prompt: str
    position: int
    expected: str
    got: str
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStages:
    """Results of the first stages.

    Args:
        num_greedy: Greedy tokens that were compared.
        noise: Numeric noise of the reference, in nats.
        tolerance: Largest gap that counts as a near-tie.
        differences: Greedy texts that differ by more.
        first_difference: Median difference of first tokens' log-probabilities; `None` if the server
            returns none.
        later_difference: The same of later tokens.
        same_weights: Both servers seem to run the same weights.
    """

    num_greedy: int
    noise: float
    tolerance: float
    differences: tuple[Difference, ...]
    first_difference: float | None
    later_difference: float | None
    same_weights: bool

    @property
    def same_logprobs(self) -> bool:
        """Return whether the server's log-probabilities are those of the reference."""
        differences = (self.first_difference, self.later_difference)
        return all(nats is None or nats <= _SAME_WEIGHTS_NATS for nats in differences)


async def deterministic(
    client: Server,
    reference: Reference,
    prompts: Sequence[str],
    *,
    fields: Mapping[str, object],
    tolerance: float,
    num_greedy_tokens: int = 0,
) -> FirstStages:
    """Compare greedy texts and log-probabilities.

    If a greedy text for each prompt gives fewer than `num_greedy_tokens`, the next prompts are
    these prompts with the texts that the server sampled after them. A difference is a gap of more
    than `tolerance`, or of twice the reference's noise if that is larger.
    """
    noise = await reference.noise(prompts)
    tolerance = max(tolerance, _NOISE_FACTOR * noise)
    differences, num_greedy, num_texts = list[Difference](), 0, 0
    first, later = list[float](), list[float]()
    waiting, most_texts = deque(prompts), len(prompts) + num_greedy_tokens
    while waiting and num_texts < most_texts:
        prompt, num_texts = waiting.popleft(), num_texts + 1
        greedy = await client.complete(prompt, temperature=0.0, **fields)
        names = token_names(greedy, reference.eos_names)
        laws = await reference.laws(prompt, names, SamplingRules())
        compared = [(name, law) for name, law in zip(names, laws, strict=False) if law is not None]
        num_greedy += len(compared)
        far = [
            Difference(prompt=prompt, position=position, expected=law.names[0], got=name, gap=gap)
            for position, (name, law) in enumerate(compared)
            if (gap := _gap(law, name)) > tolerance
        ]
        differences += far[:1]
        sampled = await client.complete(prompt, temperature=1.0, **fields)
        names = token_names(sampled, reference.eos_names)
        laws = await reference.laws(prompt, names, SamplingRules())
        rows = zip(names, laws, sampled.logprobs, strict=False)
        for position, (name, law, logprob) in enumerate(rows):
            if law is not None and logprob is not None and name in law.places:
                difference = abs(logprob - math.log(law.probs[law.places[name]]))
                (later if position else first).append(difference)
        if num_greedy < num_greedy_tokens:
            again, longer = prompts[num_texts % len(prompts)], prompt + sampled.text
            waiting.append(longer if len(longer) < len(again) + _MOST_CHARACTERS else again)
    first_difference = median(first) if first else None
    num_first = sum(difference.position == 0 for difference in differences)
    other_firsts = num_first > (1 - _SAME_FIRST_TOKENS) * num_texts
    other_logprobs = first_difference is not None and first_difference > _SAME_WEIGHTS_NATS
    return FirstStages(
        num_greedy=num_greedy,
        noise=noise,
        tolerance=tolerance,
        differences=tuple(differences),
        first_difference=first_difference,
        later_difference=median(later) if later else None,
        same_weights=not (other_firsts or (other_logprobs and bool(differences))),
    )


def _gap(law: TokenLaw, name: str) -> float:
    """Return how much less probable a token is than the most probable token, in nats.

    An unnamed token counts as the last named token.
    """
    place = min(law.place(name), len(law.names) - 1)
    return math.log(law.probs[0] / law.probs[place])

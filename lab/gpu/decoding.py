"""Ways of decoding over plain decoding."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine, distinct
from monge.bench.arms import NO_DRAFTS, Arm, Call, HostArm, TokenIds, named_arm
from monge.bench.pair import Pair
from monge.bench.runner import Work, in_turns
from monge.bench.statistics import paired_ratios
from monge.core.errors import MongeError

_GOALS: Final = {(1, 0.0): 2.8, (1, 1.0): 2.2, (8, 1.0): 1.5, (16, 1.0): 1.2, (64, 1.0): 0.98}
"""Of the default over plain decoding, by number of requests and temperature."""
_PLAIN: Final = named_arm(NO_DRAFTS)


def default(requests: int) -> Callable[[Machine, float], list[Figure]]:
    """Return the row of the default for so many requests together."""

    def measure(machine: Machine, until: float) -> list[Figure]:
        prompts = machine.prompts(machine.pair, requests)
        return [
            _ratio(
                f"default over plain, {_mode(temperature)}, {size} request{'s'[: size - 1]}",
                _speeds(
                    machine,
                    machine.pair,
                    prompts,
                    temperature,
                    until,
                    named_arm("default:"),
                    _PLAIN,
                ),
                goal,
            )
            for (size, temperature), goal in _GOALS.items()
            if size == requests
        ]

    return measure


def over_host(machine: Machine, until: float) -> list[Figure]:
    """Return plain decoding over that of `transformers` with a static cache, which compiles its forward."""
    host = HostArm(name="static cache", settings={"cache_implementation": "static"})
    prompts = machine.prompts(machine.pair, 1)
    speeds = _speeds(machine, machine.pair, prompts, 0.0, until, _PLAIN, host)
    return [_ratio("plain over the static cache of transformers", speeds, 1.25)]


def lookups(machine: Machine, until: float) -> list[Figure]:
    """Return lookups over plain decoding, behind a text that repeats nothing."""
    arm = named_arm("drafter=ngram")
    prompt = distinct(machine.pair.target_model.vocab_size, machine.size.context)
    speeds = _speeds(machine, machine.pair, (prompt,), 1.0, until, arm, _PLAIN)
    return [_ratio("lookups over plain where nothing matches, T = 1", speeds, 0.98)]


def with_head(machine: Machine, until: float) -> list[Figure]:
    """Return a small network with its head over its plain decoding, and the speed of the latter."""
    pair, figures = machine.headed, list[Figure]()
    prompts, name = machine.prompts(pair, 1), Path(str(pair.names["target"])).name
    for temperature in (1.0, 0.0):
        arm, mode = named_arm("head:"), _mode(temperature)
        speeds = _speeds(machine, pair, prompts, temperature, until, arm, _PLAIN)
        plain = {"values": speeds[_PLAIN.name], "unit": "tokens/s", "goal": 500, "is_least": True}
        figures.append(_ratio(f"{name} with its head over plain, {mode}", speeds, 1.3))
        figures.append(Figure(name=f"{name}, plain, {mode}", **plain))
    return figures


def _speeds(
    machine: Machine, pair: Pair, prompts: TokenIds, temperature: float, until: float, *arms: Arm
) -> dict[str, tuple[float, ...]]:
    """Return the tokens per second of arms that write as many tokens each, in turns."""
    # Of many requests, half as long texts are enough.
    tokens = machine.size.tokens // (1 if len(prompts) == 1 else 2)

    def work(arm: Arm) -> Work:
        seeds = count()

        def seconds() -> float:
            call = Call(
                prompt_ids=prompts, max_new_tokens=tokens, temperature=temperature, seed=next(seeds)
            )
            rows = list[int]()
            took = machine.seconds(lambda: rows.extend(map(len, arm.decode(pair, call).token_ids)))
            if min(rows) != tokens:
                raise MongeError(f"{arm.name} wrote {min(rows)} tokens instead of {tokens}")
            return took

        arm.prepare(pair)
        return seconds

    found = in_turns({arm.name: work(arm) for arm in arms}, machine.size.repeats, until)
    return {
        name: tuple(tokens * len(prompts) / one for one in seconds)
        for name, seconds in found.items()
    }


def _ratio(name: str, speeds: dict[str, tuple[float, ...]], goal: float) -> Figure:
    """Return the first of two speeds over the second."""
    said = ", ".join(f"{arm} {median(own):.0f}" for arm, own in speeds.items()) + " tokens/s"
    return Figure(
        name=name, values=paired_ratios(*speeds.values()), goal=goal, is_least=True, detail=said
    )


def _mode(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"

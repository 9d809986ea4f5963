"""The arms that `monge bench decode` compares, and the search for the host's best settings."""

import time
from collections.abc import Sequence
from typing import Any, Final

from monge.bench.arms import Arm, Call, HostArm, MongeArm, TokenIds, synchronize
from monge.bench.pair import Pair
from monge.bench.statistics import Summary

PLAIN: Final = "transformers"
DEFAULT: Final = "monge"
NONE: Final = "monge none"
LOOKUP_TOKENS: Final = 8
ASSISTANT_TOKENS: Final = (2, 3, 5, 8)
QUICK_ASSISTANT_TOKENS: Final = (2, 5)
TUNING_REPEATS: Final = 2


def host_arms(pair: Pair, tuned: dict[float, dict[str, Any]]) -> list[Arm]:
    """`transformers` plain, assisted (default and tuned) and prompt lookup."""
    arms: list[Arm] = [HostArm(name=PLAIN, family="plain")]
    if pair.draft is not None:
        arms.append(HostArm(name="transformers assisted", family="assisted", assistant={}, max_batch_size=1))
    if tuned:
        arms.append(HostArm(name="transformers assisted tuned", family="assisted", assistant=tuned, max_batch_size=1))
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    name = "transformers prompt lookup"
    return [*arms, HostArm(name=name, family="prompt_lookup", settings=lookup, max_batch_size=1)]


def plain_arm() -> Arm:
    """This library without speculation."""
    return MongeArm(name=NONE, settings={"drafter": "none"})


def usual_arms() -> list[Arm]:
    """This library with its defaults, with prompt lookup, and without speculation."""
    return [MongeArm(name=DEFAULT), MongeArm(name="monge ngram", settings={"drafter": "ngram"}), plain_arm()]


def tune_assistant(
    pair: Pair, prompts: TokenIds, *, counts: Sequence[int], temperatures: Sequence[float], max_new_tokens: int, seed: int
) -> tuple[dict[float, dict[str, Any]], list[dict[str, Any]]]:
    """Search the host's assisted generation, for every temperature, over a constant number of drafted tokens.

    The confidence threshold, which ends a draft early, is off. The search sees prompts that are measured afterwards, which
    favours the tuned arm.

    Returns:
        The best options by temperature, and what every candidate reached.
    """
    best: dict[float, dict[str, Any]] = {}
    tried: list[dict[str, Any]] = []
    for temperature in temperatures:
        speeds: dict[int, list[float]] = {count: [] for count in counts}
        for repeat in range(TUNING_REPEATS):
            for count in counts:
                arm = HostArm(name="tuning", family="assisted", assistant={temperature: assistant_options(count)})
                start, num_tokens = time.perf_counter(), 0
                for row in prompts:
                    call = Call(prompt_ids=(row,), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + repeat)
                    num_tokens += len(arm.decode(pair, call).token_ids[0])
                synchronize(pair)
                speeds[count].append(num_tokens / (time.perf_counter() - start))
        medians = {count: Summary.of(values).median for count, values in speeds.items()}
        best[temperature] = assistant_options(max(medians, key=lambda count: medians[count]))
        tried += [
            {"temperature": temperature, **assistant_options(count), "tokens_per_s": speed} for count, speed in medians.items()
        ]
    return best, tried


def assistant_options(num_tokens: int) -> dict[str, Any]:
    """A constant number of drafted tokens, whatever the draft model's confidence."""
    return {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }

"""`monge bench decode`: how many tokens per second the same two networks give, decoded in different ways.

Decoding a single sequence is bound by reading the weights: a forward over eight tokens costs little
more than a forward over one, so tokens that a cheap drafter guesses are checked almost for free.
The gain is the block efficiency (tokens per target forward), less the time of drafting, the wider
forward, and the loop itself (engine efficiency). A large batch fills the arithmetic units, wider
forwards stop being free, and the gain shrinks. Reading the prompt is bound by arithmetic and the
same for all arms; it is included for all.

Loading is excluded, the networks are the same objects for all arms, and arms take turns, so that a
slow minute of the machine slows all of them. Text that ends in a loop is easy to draft: the share
of looping completions stands beside every speed.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Final

from monge.bench.arms import Arm, HostArm, TokenIds, assistant_options, host_arms
from monge.bench.pair import Pair
from monge.bench.provenance import provenance
from monge.bench.report import arm_record, slowest_adaptive, summary
from monge.bench.runner import Measurement, OnCall, Settings, measure
from monge.core.errors import ContextLengthError, OptionError
from monge.core.words import counted
from monge.prompts import Prompt

QUICK: Final = Settings(max_new_tokens=32, repeats=3, batch_sizes=(1,), time_limit_s=25.0)
QUICK_PROMPTS_PER_TASK: Final = 1
PROMPTS_PER_TASK: Final = 4
TUNING_REPEATS: Final = 2


def compare(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    ours: Sequence[Arm],
    assistant_tokens: Sequence[int],
    on_call: OnCall,
) -> tuple[dict[str, Any], list[Measurement]]:
    """Tune transformers' assisted generation, measure all arms, and sum up.

    Args:
        pair: The networks.
        prompts: The prompts; the target's template writes their messages.
        settings: Settings of the measurement.
        ours: The arms of this library.
        assistant_tokens: Drafted tokens that the search for transformers' best settings tries; with
            none transformers' arms are left out.
        on_call: Told about progress.

    Returns:
        The document of the comparison, as plain values, and its measurements.
    """
    before = provenance(pair.target.device)
    token_ids = tuple(map(pair.encode, prompts))
    if not all(token_ids):
        raise OptionError("bench: a prompt has no tokens; remove it")
    _check_lengths(pair, token_ids, settings)
    tried: list[dict[str, Any]] = []
    arms = list(ours)
    if assistant_tokens:
        tuned: dict[float, dict[str, Any]] = {}
        if pair.draft is not None and 1 in settings.batch_sizes:
            on_call("tuning transformers assisted")
            first = _one_per_task(prompts, token_ids)
            tuned, tried = tune_assistant(pair, first, settings, assistant_tokens)
        arms = [*host_arms(pair, tuned), *ours]
    measurements = measure(pair, arms, token_ids, settings, on_call=on_call)
    after = provenance(pair.target.device)
    document = {
        **summary(measurements, batch_size=min(settings.batch_sizes)),
        "slowest_adaptive": slowest_adaptive(measurements),
        "settings": asdict(settings),
        "models": dict(pair.names),
        "target_model": repr(pair.target_model),
        "draft_model": None if pair.draft_model is None else repr(pair.draft_model),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "prompts": [
            {"task": p.task, "num_tokens": len(ids)}
            for p, ids in zip(prompts, token_ids, strict=True)
        ],
        "assisted_tuning": tried,
        "provenance": before | {"load_average_after": after["load_average"]},
        "arms": [arm_record(measurement, measurements) for measurement in measurements],
    }
    return document, measurements


def _check_lengths(pair: Pair, prompts: TokenIds, settings: Settings) -> None:
    """Refuse completions for which the target has no room, before any arm finds out for itself."""
    longest, room = max(map(len, prompts)), pair.target_model.max_length
    if room is not None and longest + settings.max_new_tokens > room:
        raise ContextLengthError(
            f"bench: the longest prompt of {counted(longest, 'token')} + "
            f"max_new_tokens={settings.max_new_tokens} exceeds the target's "
            f"context length of {room} tokens; ask for fewer tokens, or leave that prompt out"
        )


def tune_assistant(
    pair: Pair, prompts: TokenIds, settings: Settings, counts: Sequence[int]
) -> tuple[dict[float, dict[str, Any]], list[dict[str, Any]]]:
    """Tune the constant number of drafted tokens of transformers' assisted generation.

    The confidence threshold, which ends a draft early, is off. The search sees prompts that are
    measured afterwards, which favours the tuned arm.

    Returns:
        The best options by temperature, and what every candidate reached; or why there are none.
    """
    trial = replace(settings, repeats=TUNING_REPEATS, batch_sizes=(1,), time_limit_s=None)
    arms = {
        count: dict.fromkeys(settings.temperatures, assistant_options(count)) for count in counts
    }
    measured = measure(
        pair,
        [HostArm(name=str(count), family="assisted", assistant=arms[count]) for count in counts],
        prompts,
        trial,
        on_call=lambda *_: None,
    )
    failures = [measurement.failure for measurement in measured if measurement.failure is not None]
    if failures:
        return {}, [{"failure": failures[0]}]
    tried = [
        {
            "temperature": measurement.work.temperature,
            **assistant_options(int(measurement.arm.name)),
            "tokens_per_s": median(measurement.tokens_per_s),
        }
        for measurement in measured
    ]
    best: dict[float, dict[str, Any]] = {}
    for temperature in settings.temperatures:
        entries = [entry for entry in tried if entry["temperature"] == temperature]
        fastest = max(entries, key=lambda entry: entry["tokens_per_s"])
        best[temperature] = assistant_options(fastest["num_assistant_tokens"])
    return best, tried


def _one_per_task(prompts: Sequence[Prompt], token_ids: TokenIds) -> TokenIds:
    first = {
        prompt.task: ids for prompt, ids in zip(reversed(prompts), reversed(token_ids), strict=True)
    }
    return tuple(first.values())

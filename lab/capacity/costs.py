"""Seconds of a replica's rounds and prompts on this machine, and the file that carries them to another one."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from lab.capacity.simulation import Machine
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.components import Components
from monge.engine.loop import close_session
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.replay.costs import RoundCosts
from monge.replay.measure import measured_rounds

BUDGET_S: Final = 8.0
_LENGTHS: Final = (32, 256)
_REPEATS: Final = 3


def measured_machine(
    components: Components, max_batch_size: int, *, budget_s: float = BUDGET_S
) -> Machine:
    """Time rounds of batch sizes 1, 2, 4, .. and prompts of two lengths, by running them.

    Args:
        components: The components that would decode.
        max_batch_size: Rows of a round.
        budget_s: Seconds for the rounds.
    """
    powers = [1 << power for power in range(max_batch_size.bit_length())]
    costs = measured_rounds(components, batch_sizes=[*powers, max_batch_size], budget_s=budget_s)
    return Machine(costs, _prefill_s(components), max_batch_size)


def levelled(machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return machines whose plain rounds take the median of the measured times, at every batch size.

    They are one machine, measured one arm after the other: if it is slower meanwhile, no arm should
    look slow for that. Each arm's times are scaled as its plain rounds are.
    """
    levelled = {label: one.costs for label, one in machines.items()}
    for batch in next(iter(levelled.values())).verify:
        common = median(costs.verify_s(0, batch) for costs in levelled.values())
        levelled = {
            label: costs.scaled(batch, common / costs.verify_s(0, batch))
            for label, costs in levelled.items()
        }
    made = dict[str, Machine]()
    for label, one in machines.items():
        factor = levelled[label].verify_s(0) / one.costs.verify_s(0)
        prefill_s = factor * one.prefill_s[0], factor * one.prefill_s[1]
        made[label] = replace(one, costs=levelled[label], prefill_s=prefill_s)
    return made


def _prefill_s(components: Components) -> tuple[float, float]:
    """Seconds of reading a prompt, fixed and per token, by target and drafter."""
    limits = [components.target.max_length, components.drafter.capabilities.max_length]
    longest = min((limit for limit in limits if limit is not None), default=max(_LENGTHS) + 2) - 2
    short, long = (min(length, longest) for length in _LENGTHS)
    _read_s(components, short)
    first, second = (
        median(_read_s(components, length) for _ in range(_REPEATS)) for length in (short, long)
    )
    if long <= short:
        return 0.0, first / short
    per_token = max(second - first, 0.0) / (long - short)
    return max(first - per_token * short, 0.0), per_token


def _read_s(components: Components, length: int) -> float:
    prompt = tuple(
        7919 * place * (place + 1) % components.target.vocab_size for place in range(length)
    )
    session = Session(
        Request(prompt_ids=prompt, max_new_tokens=1, rules=SamplingRules(), seed=0), request_id=-1
    )
    open_sessions([session], components)
    close_session(session, components)
    return session.prefill_s


def as_dict(machines: Mapping[str, Machine]) -> dict[str, Any]:
    """Machines by arm, as plain values."""
    return {
        label: {
            "costs": one.costs.as_dict(),
            "prefill_s": list(one.prefill_s),
            "max_batch_size": one.max_batch_size,
        }
        for label, one in machines.items()
    }


def read_machines(path: Path, labels: Sequence[str]) -> dict[str, Machine]:
    """The machines of a file that `python -m lab.capacity` wrote, for some arms.

    Raises:
        OptionError: If it cannot be read, or lacks an arm.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["machines"]
        machines = {label: _machine(one) for label, one in found.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise OptionError(
            f"cannot read machines from {str(path)!r}: {error}; give a file that this command wrote"
        ) from error
    missing = [label for label in labels if label not in machines]
    if missing:
        raise OptionError(
            f"{str(path)!r} has no times of {missing[0]!r}; it has: {', '.join(machines)}"
        )
    return {label: machines[label] for label in labels}


def _machine(values: Mapping[str, Any]) -> Machine:
    fixed, per_token = map(float, values["prefill_s"])
    if not (
        math.isfinite(fixed) and math.isfinite(per_token) and fixed >= 0.0 and per_token >= 0.0
    ):
        raise ValueError(f"prefill_s must be two numbers >= 0; got {values['prefill_s']}")
    costs = RoundCosts.from_dict(values["costs"])
    return Machine(costs, (fixed, per_token), int(values["max_batch_size"]))

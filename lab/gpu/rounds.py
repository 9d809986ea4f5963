"""Sampled rounds of a chain: their time over the forwards in them, and how often they wait."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Final

import torch

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine
from monge.bench.arms import Call, named_arm
from monge.bench.runner import in_turns
from monge.bench.statistics import paired_ratios
from monge.core.errors import MongeError
from monge.core.verdict import StepRecord

_DEPTH: Final = 4
_NAME: Final = f"sampled round of `chain({_DEPTH})`"


def round_time(machine: Machine, until: float) -> list[Figure]:
    """Return the time of a round over that of a target's forward and the draft model's steps."""
    size, pair, decode = machine.size, machine.pair, _decoding(machine)
    assert pair.draft_model is not None, "every size has one"
    context = len(machine.prompts(pair, 1)[0]) + size.tokens // 2
    works = {
        "round": lambda: median(one.times.total_s for one in decode(size.tokens)),
        "forward": machine.forward(pair.target_model, context, _DEPTH + 1),
        "draft step": machine.forward(pair.draft_model, context, 1),
    }
    found = in_turns(works, size.repeats, until)
    pairs = zip(found["forward"], found["draft step"], strict=True)
    values = paired_ratios(found["round"], [one + _DEPTH * other for one, other in pairs])
    name = f"{_NAME} over a forward and {_DEPTH} draft steps"
    detail = ", ".join(f"{name} {1e3 * median(seconds):.2f} ms" for name, seconds in found.items())
    return [Figure(name=name, values=values, goal=1.12, detail=detail)]


def waits(machine: Machine, until: float) -> list[Figure]:
    """Return how often the host waits for the device in a round, as torch tells it.

    Of two texts, one begins as the other does; their difference leaves out the prompt. A profiler
    would slow every launch for the rest of the process.
    """
    decode, tokens = _decoding(machine), machine.size.tokens
    seen = list[tuple[int, int]]()
    for length in (tokens, 2 * tokens):
        decode(length)  # what is captured at first use
        with _counted_waits(machine.device) as counted:
            num_rounds = len(decode(length))
            seen.append((num_rounds, counted()))
    rounds, waited = (long - short for short, long in zip(*seen, strict=True))
    if rounds < 1:
        raise MongeError("the longer text has no more rounds than the shorter one")
    return [Figure(name=f"waits in a {_NAME}", values=(waited / rounds,), goal=2)]


@contextmanager
def _counted_waits(device: torch.device) -> Iterator[Callable[[], int]]:
    """Give how often the host has waited since; on a CPU it never does."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(one.message) for one in told)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _decoding(machine: Machine) -> Callable[[int], tuple[StepRecord, ...]]:
    """Return what decodes so many tokens of one text, and gives its rounds."""
    arm = named_arm(f"drafter=model, tree=chain({_DEPTH}), controller=fixed")
    prompts = machine.prompts(machine.pair, 1)

    def decode(tokens: int) -> tuple[StepRecord, ...]:
        call = Call(prompt_ids=prompts, max_new_tokens=tokens, temperature=1.0, seed=0)
        return arm.decode(machine.pair, call).records

    return decode

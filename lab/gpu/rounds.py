"""Sampled rounds of a chain: their time over the forwards in them, and how often they wait."""

from collections.abc import Callable
from statistics import median
from typing import Final

from torch.profiler import ProfilerActivity, profile

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine
from lab.gpu.turns import in_turns
from monge.bench.arms import Call, MongeArm
from monge.bench.statistics import paired_ratios
from monge.core.errors import MongeError
from monge.core.verdict import StepRecord

_DEPTH: Final = 4
_NAME: Final = f"sampled round of `chain({_DEPTH})`"
_WAITS: Final = {
    "cuda": (
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaDeviceSynchronize",
        "cudaMemcpy",
    ),
    "cpu": ("aten::_local_scalar_dense", "aten::nonzero"),
}
"""Calls in which the host waits for a device; on a CPU, those in which it would."""
_LAUNCHES: Final = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch")


def round_time(machine: Machine, until: float) -> list[Figure]:
    """Return the time of a round over that of a target's forward and the draft model's steps."""
    size, pair, decode = machine.size, machine.pair, _decoding(machine)
    assert pair.draft_model is not None, "every size has one"
    context = len(machine.prompts(pair, 1)[0]) + size.tokens // 2
    with (
        machine.forwards(pair.target_model, context) as forward,
        machine.forwards(pair.draft_model, context) as step,
    ):
        works = {
            "round": lambda: median(one.times.total_s for one in decode(size.tokens)),
            "forward": forward(_DEPTH + 1),
            "draft step": step(1),
        }
        found = in_turns(works, size.repeats, until)
    pairs = zip(found["forward"], found["draft step"], strict=True)
    values = paired_ratios(found["round"], [one + _DEPTH * other for one, other in pairs])
    name = f"{_NAME} over a forward and {_DEPTH} draft steps"
    detail = ", ".join(f"{name} {1e3 * median(seconds):.2f} ms" for name, seconds in found.items())
    return [Figure(name=name, values=values, goal=1.12, detail=detail)]


def waits(machine: Machine, until: float) -> list[Figure]:
    """Return how often the host waits for the device in a round, as a profiler counts it.

    Of two texts, one begins as the other does; their difference leaves out the prompt, and what the
    profiler itself does.
    """
    kind, decode, tokens = machine.device.type, _decoding(machine), machine.size.tokens
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (kind == "cuda")]
    seen = list[tuple[int, ...]]()
    for length in (tokens, 2 * tokens):
        decode(length)  # captures its graphs
        with profile(activities=activities) as profiler:
            num_rounds = len(decode(length))
        events = {event.key: event.count for event in profiler.key_averages()}
        groups = (_WAITS[kind], _LAUNCHES)
        counts = (sum(events.get(name, 0) for name in names) for names in groups)
        seen.append((num_rounds, *counts))
    rounds, waited, launched = (long - short for short, long in zip(*seen, strict=True))
    if rounds < 1 or (kind == "cuda" and launched < 1):
        raise MongeError("the profiler saw no rounds on the device; it may not be allowed to")
    detail = f"{launched / rounds:.0f} launches"
    return [Figure(name=f"waits in a {_NAME}", values=(waited / rounds,), goal=2, detail=detail)]


def _decoding(machine: Machine) -> Callable[[int], tuple[StepRecord, ...]]:
    """Return what decodes so many tokens of one text, and gives its rounds."""
    settings = {"drafter": "model", "tree": f"chain({_DEPTH})", "controller": "fixed"}
    arm, prompts = MongeArm(name="chain", settings=settings), machine.prompts(machine.pair, 1)

    def decode(tokens: int) -> tuple[StepRecord, ...]:
        call = Call(prompt_ids=prompts, max_new_tokens=tokens, temperature=1.0, seed=0)
        return arm.decode(machine.pair, call).records

    return decode

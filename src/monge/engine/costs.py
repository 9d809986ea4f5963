"""Measuring what rounds cost on this machine, by running them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

import torch

from monge.control.base import Controller, CostModel, Memory
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.model import SizedModel
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord
from monge.engine.apart import apart
from monge.engine.clock import now
from monge.engine.cost_files import load_costs, save_costs
from monge.engine.loop import close_session, open_sessions, run_round
from monge.engine.parts import Parts
from monge.engine.session import Request, Session

BUDGET_S: Final = 1.0
DEPTHS: Final = (0, 1, 2, 4, 8)
_PROMPT: Final = 32  # tokens of the text that the table is measured on
_LONG_PROMPT: Final = 512  # tokens of the text that shows what context costs
_CONTEXT_DEPTH: Final = 2  # of the drafts whose verification shows it too
_ROUNDS: Final = 4  # measured rounds of every depth, if the budget allows, each after others of its depth
_PATIENCE: Final = 4.0  # budgets after which one cycle, the cold one, has to do
_REQUESTS: Final = -1_000_000  # ids of the measured requests: below those of real ones


@dataclass(frozen=True, slots=True)
class _Cycle(Controller[int]):
    """The depths of one drafter of a pool: two times once each, then some plain rounds, then the others twice each in turns."""

    depths: tuple[int, ...]
    drafter: str | None = None

    @property
    def schedule(self) -> tuple[int, ...]:
        """Depths of all rounds."""
        return self.depths * 2 + (0,) * (CostModel.plain_run + 1) + self._turn * _ROUNDS

    @property
    def _turn(self) -> tuple[int, ...]:
        return tuple(depth for depth in self.depths if depth for _ in range(2))

    def counted(self, records: Sequence[StepRecord]) -> Sequence[StepRecord]:
        """Those of the finished rounds that say what rounds cost."""
        cycle = len(self.depths)
        first = 2 * cycle + CostModel.plain_run - 1
        if len(records) < first + 2 + len(self._turn):
            return records[cycle : 2 * cycle] if len(records) >= 2 * cycle else records
        return [*records[first : first + 2], *records[first + 3 :: 2]]

    def init(self, memory: Memory) -> int:
        return 0

    def plan(self, state: int, draws: Draws) -> DraftPlan:
        return DraftPlan(max_depth=self.schedule[state], drafter=self.drafter)

    def update(self, state: int, record: StepRecord) -> int:
        return state + 1


def with_costs(parts: Parts, *, batch_sizes: Sequence[int], folder: Path | None = None) -> Parts:
    """The parts with costs, if a controller reads them: those they have, those kept in the folder, or new ones.

    Raises:
        OptionError: If there is a folder, and no controller reads costs; if it cannot be read or written; or if a batch is
            empty.
    """
    if min(batch_sizes) < 1:
        raise OptionError(f"max_batch_size must be at least 1; got {min(batch_sizes)}")
    if folder is not None and "costs" not in parts.reads:
        raise OptionError(
            f"costs (--costs) {str(folder)!r}: {', '.join(parts.controllers) or parts.controller_name} reads no measured "
            "times; leave it out, or choose a controller that does, such as 'price'"
        )
    if "costs" not in parts.reads or parts.memory.costs is not None:
        return parts
    key = costs_key(parts)
    costs = None if folder is None else load_costs(folder, key)
    if costs is None:
        costs = apart(lambda: measure_costs(parts, batch_sizes=batch_sizes))
        if folder is not None:
            save_costs(costs, folder, key)
    return replace(parts, memory=Memory(costs))


def measure_costs(parts: Parts, *, batch_sizes: Sequence[int] = (1,), budget_s: float = BUDGET_S) -> CostModel:
    """Run real rounds of several depths on random text, and tabulate their times.

    Every depth runs at least once per batch size; what the budget leaves is spent on repeats. Where a round takes so long that
    a larger batch would need several budgets, it is left out, and a long text is shorter: decoding corrects the table.

    Args:
        parts: The parts that will decode.
        batch_sizes: Requests decoded together, the smallest of which is always measured.
        budget_s: Seconds after which no further round is begun.
    """
    networks = [member.name for member in parts.memory.members if member.runs_network] or [None]
    first, *others = [_Drafting(name) for name in networks]
    verify: dict[int, dict[int, float]] = {}
    sizes = sorted(set(batch_sizes))
    share = budget_s / (len(sizes) * len(networks) + 1)
    cycle_s = 0.0  # of one request, at most: one after another they take no less time than together
    for batch_size in sizes:
        if batch_size * cycle_s > _PATIENCE * budget_s:
            continue
        rest = defaultdict[int, list[float]](list)
        for record in first.measure(parts, batch_size, share):
            rest[record.num_nodes].append(record.times.total_s - record.times.draft_s)
        verify[batch_size] = CostModel.fitted(rest)
        for other in others:
            other.measure(parts, batch_size, share)
        cycle_s = cycle_s or (sum(verify[batch_size].values()) + sum(first.seconds[batch_size].values())) / batch_size
    plain_context_s, context_s = _context_s(parts, sizes[0], share, _long_prompt(verify[sizes[0]], _PATIENCE * share))
    return CostModel(
        verify_s=verify,
        draft_s=first.seconds,
        context_s=context_s,
        plain_context_s=plain_context_s,
        base_context=_PROMPT,
        graph_sizes=parts.target.widths if isinstance(parts.target, SizedModel) else (),
        nodes=_filled(first.nodes),
        deepest=parts.drafter.capabilities.max_depth,
        drafters={one.name: (one.seconds, _filled(one.nodes)) for one in (first, *others) if one.name is not None},
    )


def measure_whole(parts: Parts, depth: int, *, budget_s: float = BUDGET_S / 4) -> float:
    """How many plain rounds a round of some depth takes that runs as one; they take turns.

    Args:
        parts: The parts that will decode.
        depth: Of the rounds.
        budget_s: Seconds after which no further round is begun.
    """
    name = next((member.name for member in parts.memory.members if member.runs_network), None)
    records = _rounds(parts, _Cycle((0, depth), name), 1, _PROMPT, budget_s, as_one=True)
    plain, whole = ([one.times.total_s for one in records if one.as_one is kind] for kind in (False, True))
    return median(whole) / median(plain) if plain and whole else math.inf


@dataclass(slots=True)
class _Drafting:
    """What is measured of one drafter: of the only one where it has no name.

    Args:
        name: Its name in the pool.
        seconds: Seconds of drafting by batch size and depth.
        nodes: Drafted nodes by depth.
    """

    name: str | None
    seconds: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    nodes: dict[int, int] = field(default_factory=dict[int, int])

    def measure(self, parts: Parts, batch_size: int, budget_s: float) -> Sequence[StepRecord]:
        """Run rounds of all depths, and note what drafting took."""
        deepest = next(
            (member.max_depth for member in parts.memory.members if member.name == self.name),
            parts.drafter.capabilities.max_depth,
        )
        cycle = _Cycle(tuple(sorted({min(depth, deepest) for depth in DEPTHS})), self.name)
        records, times = _rounds(parts, cycle, batch_size, _PROMPT, budget_s), defaultdict[int, list[float]](list)
        for record in records:
            times[record.depth].append(record.times.draft_s)
            self.nodes[record.depth] = max(record.num_nodes, self.nodes.get(record.depth, 0))
        self.seconds[batch_size] = CostModel.fitted(times)
        return records


def costs_key(parts: Parts) -> str:
    """What costs depend on: the networks, their types and device, drafter and tree, verifier, threads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    described = (parts.target, parts.drafter, parts.rule, device, torch.get_num_threads())
    return " | ".join(map(repr, described))


def _rounds(
    parts: Parts, cycle: _Cycle, batch_size: int, prompt: int, budget_s: float, *, as_one: bool = False
) -> Sequence[StepRecord]:
    """Records of rounds of all depths, one request's of each round.

    The first cycle is a warm-up: a drafter that runs for the first time can take many times its later time, and a controller
    that believes it never drafts again. Only where rounds are so slow that two cycles take several budgets is it all there is.
    Where the budget allows, plain rounds then follow, as many as it takes until the target's weights and shapes are at hand as
    they are where nobody drafts, and after them every depth that drafts twice in a row, of which the second rounds count.
    """
    # Otherwise stage by stage: a round that runs as one has no time of drafting.
    trial = replace(parts, controller=cycle, memory=Memory(), whole_round=parts.whole_round if as_one else None)
    schedule = cycle.schedule
    longest = min(length for length in (parts.target.max_length, parts.drafter.capabilities.max_length, 1 << 30) if length)
    most = min(sum(schedule) + len(schedule) + 1, longest - 1)
    prompt = max(1, min(prompt, longest - most))
    vocab = parts.target.vocab_size
    sessions = [
        Session(
            Request(prompt_ids=_text(prompt, vocab, row), max_new_tokens=most, rules=SamplingRules(), seed=row),
            request_id=_REQUESTS - row,
        )
        for row in range(batch_size)
    ]
    open_sessions(sessions, trial)
    start = now()
    try:
        for number in range(len(schedule)):
            passed, cycles = now() - start, number / len(cycle.depths)
            is_late = passed > budget_s and (cycles >= 2 or (cycles >= 1 and passed > _PATIENCE * budget_s))
            if is_late or any(session.finish_reason is not None for session in sessions):
                break
            run_round(sessions, trial)
    finally:
        for session in sessions:
            close_session(session, trial)
    return cycle.counted(sessions[0].records)


def _long_prompt(verify_s: Mapping[int, float], budget_s: float) -> int:
    """Tokens of a text that is read within a budget, by what further nodes cost."""
    few, many = min(verify_s), max(verify_s)
    further_s = verify_s[many] - verify_s[few]
    return _LONG_PROMPT if further_s <= 0.0 else min(_LONG_PROMPT, int(budget_s * (many - few) / further_s))


def _context_s(parts: Parts, batch_size: int, budget_s: float, longest: int) -> tuple[float, float]:
    """Seconds per token of context and per request, in plain rounds and in those that verify a draft.

    Short and long texts are read one right after the other, and the fastest rounds are compared: a slower moment of the machine
    would look like a cost of the text.

    Args:
        parts: The parts that will decode.
        batch_size: Requests decoded together.
        budget_s: Seconds after which no further round is begun.
        longest: Tokens of the long text, where the models have room for it; if it is hardly longer than the short one, nothing
            is measured, and texts are taken to cost nothing.
    """
    if longest <= 2 * _PROMPT:
        return 0.0, 0.0
    cycle = _Cycle((0, min(_CONTEXT_DEPTH, parts.drafter.capabilities.max_depth)))
    short, long = (_rounds(parts, cycle, batch_size, length, budget_s) for length in (_PROMPT, longest))
    length = long[0].context_length
    if length <= 2 * _PROMPT:
        return 0.0, 0.0

    def fastest(records: Sequence[StepRecord], is_plain: bool) -> float:
        return min(
            (one.times.total_s - one.times.draft_s for one in records if (one.num_nodes == 0) == is_plain), default=math.inf
        )

    slopes = [(fastest(long, kind) - fastest(short, kind)) / (length - _PROMPT) / batch_size for kind in (True, False)]
    plain, drafting = (max(0.0, slope) if math.isfinite(slope) else 0.0 for slope in slopes)
    return plain, max(plain, drafting)


def _filled(nodes: Mapping[int, int]) -> tuple[int, ...]:
    """Nodes by depth 0, 1, .., from those of some depths."""

    def between() -> Iterator[int]:
        known = sorted({0: 0, **nodes}.items())
        yield 0
        for (low, few), (high, many) in zip(known, known[1:], strict=False):
            for depth in range(low + 1, high + 1):
                yield math.ceil(few + (many - few) * (depth - low) / (high - low))

    return tuple(between())


def _text(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Tokens that repeat nothing soon, so that no drafter finds them easy."""
    return tuple((7 + 31 * seed + 7919 * position * (position + 1)) % vocab_size for position in range(length))

"""Measuring the latency of rounds on this machine, by running them."""

import math
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from monge.control.base import Reads, RoundInfo, SharedState, SoloController
from monge.control.latency import Latency, shortest_s
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.model import FeatureModel, SizedModel
from monge.core.proposal import Deterministic
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import GrowingTree
from monge.core.verdict import StepRecord
from monge.draft.base import Capabilities, Draft, StatelessDrafter
from monge.engine.clock import now
from monge.engine.components import Components
from monge.engine.latency_files import load_latency, save_latency
from monge.engine.loop import close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.engine.threads import run_in_thread

BUDGET_S: Final = 1.0
_DEPTHS: Final = (0, 1, 2, 4, 8)
_PROMPT: Final = 32  # tokens of the text that the table is measured on
_LONG_PROMPT: Final = 512  # tokens of the text that shows what context costs
_CYCLES: Final = 6  # most rounds of each depth
_PATIENCE: Final = 4.0  # budgets after which a batch size is left out, or one cycle has to do
_UNBOUNDED: Final = 1 << 30  # tokens of a context
_REQUESTS: Final = -1_000_000  # ids of the measured requests: below those of real ones


@dataclass(frozen=True, slots=True)
class _Cycle(SoloController[int]):
    """Plans the depths in turn, for one drafter of a pool."""

    depths: tuple[int, ...]
    drafter: str | None = None

    def init(self, shared: SharedState) -> int:
        return 0

    def plan_one(self, state: int, info: RoundInfo, context_length: int, draws: Draws) -> DraftPlan:
        return DraftPlan(max_depth=self.depths[state % len(self.depths)], drafter=self.drafter)

    def update(self, state: int, record: StepRecord) -> int:
        return state + 1


def with_latency(
    components: Components, *, batch_sizes: Sequence[int], folder: Path | None = None
) -> Components:
    """The components with latency, if a controller reads it.

    Their own, that kept in the folder, or newly measured.

    Raises:
        OptionError: If there is a folder and no controller reads latency, if the folder cannot be
            read or written, or if a batch is empty.
    """
    if min(batch_sizes) < 1:
        raise OptionError(f"max_batch_size must be at least 1; got {min(batch_sizes)}")
    if folder is not None and Reads.LATENCY not in components.reads:
        raise OptionError(
            f"costs (--costs) {str(folder)!r}: "
            f"{', '.join(components.controllers) or components.controller_name} reads no "
            "measured times; leave it out, or choose a controller that does, such as 'goodput'"
        )
    if Reads.LATENCY not in components.reads or components.shared.latency is not None:
        return components
    key = latency_key(components)
    latency = None if folder is None else load_latency(folder, key)
    if latency is None:
        latency = run_in_thread(lambda: measure_latency(components, batch_sizes=batch_sizes))
        if folder is not None:
            save_latency(latency, folder, key)
    return replace(components, shared=SharedState(latency))


def measure_latency(
    components: Components, *, batch_sizes: Sequence[int] = (1,), budget_s: float = BUDGET_S
) -> Latency:
    """Run real rounds of several depths on random text, and tabulate their shortest times.

    What else runs on the machine makes a round longer, never shorter.

    Batch sizes whose rounds would take several budgets are left out: decoding corrects the table.

    Args:
        components: The components that will decode.
        batch_sizes: Requests decoded together; the smallest is always measured.
        budget_s: Seconds after which no further round is begun.
    """
    networks = [member.name for member in components.shared.members if member.runs_network] or [
        None
    ]
    first, *others = [_Drafting(name) for name in networks]
    verify: dict[int, dict[int, float]] = {}
    sizes = sorted(set(batch_sizes))
    share = budget_s / (len(sizes) * len(networks) + 1)
    cycle_s = 0.0  # of one request: a batch takes at most as long as its requests one after another
    for size in sizes:
        if size * cycle_s > _PATIENCE * budget_s:
            continue
        verifying = defaultdict[int, list[float]](list)
        records = first.measure(components, size, share)
        deepest = min(components.drafter.capabilities.max_depth, _DEPTHS[-1])
        if max((record.num_nodes for record in records), default=0) < deepest:
            records = _filled_rounds(components, size, share) or records
        for record in records:
            verifying[record.num_nodes].append(record.times.total_s - record.times.draft_s)
        verify[size] = {nodes: shortest_s(times) for nodes, times in verifying.items()}
        for other in others:
            other.measure(components, size, share)
        cycle_s = cycle_s or (sum(verify[size].values()) + sum(first.seconds[size].values())) / size
    return Latency(
        verify_s=verify,
        draft_s=first.seconds,
        context_s=_context_s(components, sizes[0], share, verify[sizes[0]]),
        base_context=_PROMPT,
        graph_sizes=components.target.widths if isinstance(components.target, SizedModel) else (),
        nodes=_filled(first.nodes),
        deepest=components.drafter.capabilities.max_depth,
        drafters={
            one.name: (one.seconds, _filled(one.nodes))
            for one in (first, *others)
            if one.name is not None
        },
    )


@dataclass(frozen=True, slots=True)
class FillerDrafter(StatelessDrafter):
    """Propose meaningless candidates, so that a round of any size can be timed.

    Args:
        max_depth: Depth of the first path.
        width: Candidates of every node on the first path.
    """

    max_depth: int
    width: int = 1

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=self.width,
            max_depth=self.max_depth,
            needs_trees=self.width > 1,
        )

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[None],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[None]]:
        drafts: list[Draft[None]] = []
        for context, plan, row_draws in zip(contexts, plans, draws, strict=True):
            tree, node = GrowingTree(context.token_ids[-1]), 0
            for _ in range(plan.depth(self.max_depth)):
                node, *_ = tree.grow(node, Deterministic(tuple(range(self.width))), row_draws)
            drafts.append(Draft(tree.finish(), None))
        return drafts


def _filled_rounds(
    components: Components, batch_size: int, budget_s: float
) -> Sequence[StepRecord]:
    """Records of rounds that verify chains, for a drafter that found little in the text.

    A lookup drafts where the text repeats itself, which the measured text hardly does.
    """
    own = components.drafter.capabilities
    if Deterministic not in own.proposes:
        return ()
    depths = tuple(sorted({min(depth, own.max_depth) for depth in _DEPTHS}))
    trial = replace(components, drafter=FillerDrafter(depths[-1]), shared=SharedState())
    return _rounds(trial, _Cycle(depths), batch_size, _PROMPT, budget_s)


def latency_key(components: Components) -> str:
    """Return a text that differs where latency may.

    It names the networks and their types, drafter and tree, verifier, processor, device, threads and
    version of torch.
    """
    target = components.target
    device = target.embed((0,)).device.type if isinstance(target, FeatureModel) else "cpu"
    described = (
        target,
        components.drafter,
        components.rule,
        processor_name(),
        torch.cuda.get_device_name() if device == "cuda" else device,
        torch.get_num_threads(),
        str(torch.__version__),
    )
    return " | ".join(map(repr, described))


def processor_name() -> str:
    """Return the name of the CPU, or of its architecture where the system tells no more."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@dataclass(slots=True)
class _Drafting:
    """Measured drafting of one drafter.

    Args:
        name: Its name in the pool; `None` without a pool.
        seconds: Seconds of drafting by batch size and depth.
        nodes: Drafted nodes by depth.
    """

    name: str | None
    seconds: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    nodes: dict[int, int] = field(default_factory=dict[int, int])

    def measure(
        self, components: Components, batch_size: int, budget_s: float
    ) -> Sequence[StepRecord]:
        """Run rounds of all depths, and note the seconds of drafting."""
        own = [member.max_depth for member in components.shared.members if member.name == self.name]
        deepest = own[0] if own else components.drafter.capabilities.max_depth
        cycle = _Cycle(tuple(sorted({min(depth, deepest) for depth in _DEPTHS})), self.name)
        records, times = (
            _rounds(components, cycle, batch_size, _PROMPT, budget_s),
            defaultdict[int, list[float]](list),
        )
        for record in records:
            times[record.depth].append(record.times.draft_s)
            self.nodes[record.depth] = max(record.num_nodes, self.nodes.get(record.depth, 0))
        self.seconds[batch_size] = {depth: shortest_s(own) for depth, own in times.items()}
        return records


def _rounds(
    components: Components, cycle: _Cycle, batch_size: int, prompt: int, budget_s: float
) -> Sequence[StepRecord]:
    """Records of rounds of all depths: one of each round, with the depth and nodes of the largest tree.

    A network that runs for the first time can take many times its later time, so there are at least
    two cycles, except where these would take several budgets.
    """
    trial, size = replace(components, controller=cycle, shared=SharedState()), len(cycle.depths)
    bounds = (
        components.target.max_length,
        components.draft_length,
        *(member.max_length for member in components.shared.members),
    )
    longest = min((bound for bound in bounds if bound is not None), default=_UNBOUNDED)
    most = min(_CYCLES * (sum(cycle.depths) + size) + 1, longest - 1)
    prompt = max(1, min(prompt, longest - most))
    sessions = [
        Session(
            Request(
                prompt_ids=_text(prompt, components.target.vocab_size, row),
                max_new_tokens=most,
                rules=SamplingRules(),
                seed=row,
            ),
            request_id=_REQUESTS - row,
        )
        for row in range(batch_size)
    ]
    open_sessions(sessions, trial)
    start = now()
    try:
        for number in range(_CYCLES * size):
            passed, cycles = now() - start, number / size
            is_late = passed > budget_s and (
                cycles >= 2 or (cycles >= 1 and passed > _PATIENCE * budget_s)
            )
            if is_late or any(session.finish_reason is not None for session in sessions):
                break
            run_round(sessions, trial)
    finally:
        for session in sessions:
            close_session(session, trial)
    # A request that fails has fewer records than the others.
    rounds = [
        [session.records[number] for session in sessions if number < len(session.records)]
        for number in range(max(len(session.records) for session in sessions))
    ]
    return [
        replace(
            rows[0],
            num_nodes=max(record.num_nodes for record in rows),
            depth=max(record.depth for record in rows),
        )
        for rows in rounds
    ]


def _context_s(
    components: Components, batch_size: int, budget_s: float, verify_s: Mapping[int, float]
) -> float:
    """Seconds per token of context and per request.

    The fastest plain rounds on a short and on a long text.
    """
    few, many = min(verify_s), max(verify_s)
    per_token = max(verify_s[many] - verify_s[few], 0.0) / max(many - few, 1)
    longest = (
        _LONG_PROMPT
        if per_token == 0.0
        else min(_LONG_PROMPT, int(_PATIENCE * budget_s / per_token))
    )
    if longest <= 2 * _PROMPT:
        return 0.0
    short, long = (
        _rounds(components, _Cycle((0,)), batch_size, length, budget_s)
        for length in (_PROMPT, longest)
    )
    further = long[0].context_length - short[0].context_length
    if further <= _PROMPT:
        return 0.0
    fastest = [shortest_s(record.times.total_s for record in records) for records in (short, long)]
    slope = (fastest[1] - fastest[0]) / further / batch_size
    return max(0.0, slope)


def _filled(nodes: Mapping[int, int]) -> tuple[int, ...]:
    """Nodes of the depths 0, 1, .., interpolated from those of some depths."""
    known, filled = sorted({0: 0, **nodes}.items()), [0]
    for (low, few), (high, many) in zip(known, known[1:], strict=False):
        filled += [
            math.ceil(few + (many - few) * (depth - low) / (high - low))
            for depth in range(low + 1, high + 1)
        ]
    return tuple(filled)


def _text(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Tokens that repeat nothing soon, so that no drafter finds them easy."""
    return tuple(
        (7 + 31 * seed + 7919 * position * (position + 1)) % vocab_size
        for position in range(length)
    )

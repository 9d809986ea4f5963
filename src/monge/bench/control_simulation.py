"""Controllers on a simulated chain drafter: what their rules are worth, without networks, clocks or machines.

A round's acceptance is drawn from regimes that last; every position deviates a little. The drafter's confidence is that
acceptance itself. Times are those of a linear cost table in units of a plain forward. The controllers are the real ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from monge.control.base import AnyController, CostModel, Memory
from monge.control.fixed import Fixed
from monge.control.registry import CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord

MAX_WINDOW: Final = 16
MAX_FIXED: Final = 12
_LOWEST, _HIGHEST = 0.02, 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a simulated stream is like.

    Args:
        regimes: Acceptance of each regime.
        switch_prob: Chance per round that the regime is drawn anew, each as likely.
        noise: Standard deviation of a position's own deviation.
        draft: Cost of a drafted level, in plain forwards.
        node: Cost of a further token to verify, likewise.
    """

    regimes: tuple[float, ...] = (0.35, 0.6, 0.8, 0.95)
    switch_prob: float = 0.1
    noise: float = 0.05
    draft: float = 0.08
    node: float = 0.02

    def costs(self) -> CostModel:
        """The cost table of this world."""
        return CostModel.linear(plain=1.0, node=self.node, draft=self.draft)

    def rounds(self, count: int, draws: Draws) -> Iterator[tuple[float, ...]]:
        """Acceptance by depth, round after round."""
        normal, regime = NormalDist(), self.regimes[0]
        for _ in range(count):
            if draws.bernoulli(self.switch_prob):
                regime = self.regimes[int(draws.uniform() * len(self.regimes))]
            deviations = (self.noise * normal.inv_cdf(max(draws.uniform(), 1e-12)) for _ in range(MAX_WINDOW))
            yield tuple(min(_HIGHEST, max(_LOWEST, regime + deviation)) for deviation in deviations)


WORLDS: Final[Mapping[str, World]] = {
    "light load": World(),
    "verification ten times dearer": World(node=0.2),
}
_ON_THE_FLY: Final = "on_the_fly(history={h}, prior=(0.0007, 0.0003), probe_prob=0.2, max_window=16)"
ARMS: Final[Mapping[str, str]] = {
    **{f"on_the_fly, last {h} rounds": _ON_THE_FLY.format(h=h) for h in (4, 16, 64)},
    "fsm": "fsm(max_window=16)",
    "q_learning": "q_learning",
    "transformers_heuristic": "transformers_heuristic",
    "price without confidence": "price(max_window=16)",
    "price": "price(max_window=16)",
}


def speed(controller: AnyController, world: World, num_rounds: int, draws: Draws, *, confident: bool = True) -> float:
    """Tokens per plain forward's time of a controller in a world.

    Args:
        controller: The controller.
        world: The world.
        num_rounds: Rounds simulated, as one request.
        draws: Source of randomness.
        confident: Whether the drafter tells its confidence.
    """
    costs = world.costs()
    memory = Memory(costs)
    state = controller.init(memory)
    tokens, seconds, length = 0, 0.0, 0
    for acceptance in world.rounds(num_rounds, draws):
        record = _round(controller.plan(state, draws), acceptance, (draws, length, confident))
        state = controller.update(state, record)
        tokens += len(record.token_ids)
        length += len(record.token_ids)
        reads = max(record.depth, record.levels_read)
        seconds += costs.verify_s(record.num_nodes) + (costs.draft_s(reads) if reads else 0.0)
    return tokens / seconds


def compare_controllers(num_rounds: int, make_draws: Callable[[], Draws]) -> list[dict[str, Any]]:
    """Speeds of the best fixed window, found by trying all, and of the controllers, in every world.

    Args:
        num_rounds: Rounds of every arm.
        make_draws: Makes the source of randomness; every arm gets the same.
    """
    rows: list[dict[str, Any]] = []
    for name, world in WORLDS.items():
        fixed = {window: speed(Fixed(max_depth=window), world, num_rounds, make_draws()) for window in range(MAX_FIXED + 1)}
        best = max(fixed, key=fixed.__getitem__)
        rows.append({"world": name, "controller": f"fixed, window {best} (the best)", "speed": fixed[best], "ratio": 1.0})
        for arm, text in ARMS.items():
            reached = speed(CONTROLLERS.parse(text), world, num_rounds, make_draws(), confident="without confidence" not in arm)
            rows.append({"world": name, "controller": arm, "speed": reached, "ratio": reached / fixed[best]})
    return rows


def _round(plan: DraftPlan, acceptance: Sequence[float], setting: tuple[Draws, int, bool]) -> StepRecord:
    """One round of a chain drafter under a plan, and of a target that accepts with these probabilities."""
    draws, length, confident = setting
    limit = min(plan.depth(MAX_WINDOW), MAX_WINDOW)
    depth, levels_read = _drafted(plan, acceptance, limit) if confident and plan.stop else (limit, 0)
    accepted = 0
    while accepted < depth and draws.bernoulli(acceptance[accepted]):
        accepted += 1
    return StepRecord(
        plan=plan,
        num_nodes=depth,
        depth=depth,
        num_accepted=accepted,
        examined=(1,) * min(depth, accepted + 1),
        next_kind="bonus" if accepted == depth else "correction",
        token_ids=(0,) * (accepted + 1),
        context_length=length,
        levels_read=levels_read,
        confidences=tuple(acceptance[:depth]) if levels_read else (),
    )


def _drafted(plan: DraftPlan, acceptance: Sequence[float], limit: int) -> tuple[int, int]:
    """Depth of the chain, and levels read, where the confidence is the acceptance itself."""
    stop = plan.stop
    assert stop is not None
    reach, depth, levels_read = 1.0, 0, 0
    while depth < limit:
        levels_read += 1
        expected = stop.acceptance(depth + 1, acceptance[depth])
        if not stop.draws(depth + 1, reach * expected):
            break
        depth, reach = depth + 1, reach * expected
        if not stop.reads(depth + 1, reach * stop.next_acceptance(depth + 1, expected)):
            break
    return depth, levels_read

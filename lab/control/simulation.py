"""The worth of controllers' rules, on a simulated chain drafter without networks, clocks or machines.

A round's acceptance is drawn from regimes that last; every position deviates a little. All
controllers meet the same rounds and the same coins, so their speeds are compared in pairs. Times
are those of a linear latency model in units of a plain forward. The controllers are the real ones,
and their own time is taken.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from monge.control.base import AnyController, RoundInfo, SharedState
from monge.control.fixed import Fixed
from monge.control.latency import Latency
from monge.control.registry import CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws

MAX_WINDOW: Final = 16
MAX_FIXED: Final = 12
_LOWEST, _HIGHEST = 0.02, 0.99


@dataclass(frozen=True, slots=True)
class Round:
    """The fate of a draft.

    Args:
        acceptance: Chance by depth that a token is accepted.
        coins: Uniform numbers that decide.
    """

    acceptance: tuple[float, ...]
    coins: tuple[float, ...]

    def num_accepted(self, depth: int) -> int:
        """Accepted tokens of a chain so deep."""
        decided = zip(self.coins[:depth], self.acceptance[:depth], strict=True)
        return next(
            (place for place, (coin, chance) in enumerate(decided) if coin >= chance), depth
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A simulated stream.

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

    def costs(self) -> Latency:
        """The latency of this world."""
        return Latency.linear(plain=1.0, node=self.node, draft=self.draft)

    def rounds(self, count: int, draws: Draws) -> Iterator[Round]:
        """Round after round."""
        normal, regime = NormalDist(), self.regimes[0]
        for _ in range(count):
            if draws.bernoulli(self.switch_prob):
                regime = self.regimes[int(draws.uniform() * len(self.regimes))]
            deviations = (
                self.noise * normal.inv_cdf(max(draws.uniform(), 1e-12)) for _ in range(MAX_WINDOW)
            )
            chances = tuple(
                min(_HIGHEST, max(_LOWEST, regime + deviation)) for deviation in deviations
            )
            yield Round(chances, tuple(draws.uniform() for _ in range(MAX_WINDOW)))


WORLDS: Final[Mapping[str, World]] = {
    "light load": World(),
    "verification ten times dearer": World(node=0.2),
    "useless draft three quarters of the time": World(
        regimes=(0.02, 0.02, 0.02, 0.8), switch_prob=0.02
    ),
}
_ON_THE_FLY: Final = (
    "on_the_fly(history={h}, prior=(0.0007, 0.0003), probe_prob=0.2, max_window=16)"
)
ARMS: Final[Mapping[str, str]] = {
    **{f"on_the_fly, last {h} rounds": _ON_THE_FLY.format(h=h) for h in (4, 16, 64)},
    "fsm": "fsm(max_window=16)",
    "q_learning": "q_learning",
    "goodput": "goodput(max_window=16)",
}


@dataclass(slots=True)
class Stopwatch:
    """Seconds that a controller itself took.

    Args:
        clock: What seconds are.
    """

    clock: Callable[[], float]
    seconds: float = 0.0

    def run(self, work: Callable[..., Any], *given: Any) -> Any:  # noqa: ANN401 (whatever the work gives)
        """Work on the clock."""
        start = self.clock()
        done = work(*given)
        self.seconds += self.clock() - start
        return done


def speed(
    controller: AnyController,
    world: World,
    rounds: Iterable[Round],
    draws: Draws,
    *,
    watch: Stopwatch | None = None,
) -> float:
    """Tokens per plain forward's time of a controller in a world.

    Args:
        controller: The controller.
        world: What rounds cost.
        rounds: Its rounds, as one request.
        draws: The controller's own source of randomness.
        watch: Takes the time of plans and updates.
    """
    costs, memory = world.costs(), None
    state = controller.init(SharedState(costs))
    tokens, seconds, length = 0, 0.0, 0
    watch = watch or Stopwatch(lambda: 0.0)
    for one in rounds:
        info = RoundInfo(context_lengths=(length,), memory=memory)
        record = chain_record(watch.run(controller.plan, [state], info, [draws])[0], one, length)
        state = watch.run(controller.update, state, record)
        memory = watch.run(controller.learn, memory, state, record)
        tokens += len(record.token_ids)
        length += len(record.token_ids)
        seconds += costs.round_s(record.depth)
    return tokens / seconds


def compare_controllers(
    num_rounds: int,
    make_draws: Callable[[int], Draws],
    arms: Mapping[str, str] = ARMS,
    *,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Speeds of the best fixed window, found by trying all, and of the controllers, in every world; and their own time.

    Args:
        num_rounds: Rounds of every arm.
        make_draws: Makes a source of randomness of some number: 0 for the worlds, 1 for the
            controllers, the same for each.
        arms: Controllers by name.
        clock: Takes the controllers' own time.
    """
    rows: list[dict[str, Any]] = []
    for name, world in WORLDS.items():
        rounds = list(world.rounds(num_rounds, make_draws(0)))
        fixed = {
            window: speed(Fixed(max_depth=window), world, rounds, make_draws(1))
            for window in range(MAX_FIXED + 1)
        }
        best = max(fixed, key=fixed.__getitem__)
        rows.append(
            {
                "world": name,
                "controller": f"fixed, window {best} (the best)",
                "speed": fixed[best],
                "ratio": 1.0,
            }
        )
        for arm, text in arms.items():
            watch = Stopwatch(clock)
            reached = speed(CONTROLLERS.parse(text), world, rounds, make_draws(1), watch=watch)
            own = {"own_s_per_round": watch.seconds / num_rounds}
            rows.append(
                {
                    "world": name,
                    "controller": arm,
                    "speed": reached,
                    "ratio": reached / fixed[best],
                    **own,
                }
            )
    return rows


def chain_record(plan: DraftPlan, one: Round, length: int, **fields: Any) -> StepRecord:
    """One round of a chain drafter under a plan; `fields` are further fields of the record."""
    depth = min(plan.depth(MAX_WINDOW), MAX_WINDOW)
    accepted = one.num_accepted(depth)
    return StepRecord(
        plan=plan,
        num_nodes=depth,
        depth=depth,
        num_accepted=accepted,
        examined=(1,) * min(depth, accepted + 1),
        next_kind="bonus" if accepted == depth else "correction",
        token_ids=(0,) * (accepted + 1),
        context_length=length,
        **fields,
    )

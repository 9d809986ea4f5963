"""The worth of knowing the right drafter, on simulated requests without networks or clocks.

Requests come in kinds that suit different drafters, and the prompt tells the kind by what it
repeats. A drafter with a network and a lookup propose chains; what the lookup would have had
accepted is known in every round, as in the real loop. All controllers meet the same rounds and
coins, and seconds are those of a linear latency model in units of a plain forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lab.control.simulation import MAX_WINDOW, Round, Stopwatch, World, chain_record
from monge.control.base import AnyController, PromptReader, RoundInfo, SharedState
from monge.control.fixed import Fixed
from monge.control.latency import Latency
from monge.control.registry import CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.prompt import PromptProfile
from monge.core.selection import CounterfactualDraft, Member
from monge.laws.draws import Draws

WORLD: Final = "drafters that suit different texts"
ROUNDS_OF_REQUEST: Final = 40
_DEPTH: Final = 8
_NETWORK: Final = Member(name="model", max_depth=_DEPTH, runs_network=True)
_LOOKUP: Final = Member(name="ngram", max_depth=_DEPTH, runs_network=False)
_NOTHING: Final = Member(name="none", max_depth=0, runs_network=False)
MEMBERS: Final = (_NETWORK, _LOOKUP, _NOTHING)
_NO_LEVELS: Final = Round((0.0,) * MAX_WINDOW, (1.0,) * MAX_WINDOW)

ARMS: Final[Mapping[str, str]] = {
    "hedge": "hedge",
    "hedge('goodput')": "hedge('goodput')",
    "linear_selection": "linear_selection",
    "linear_selection(inner='goodput')": "linear_selection(inner='goodput')",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text.

    Args:
        acceptance: Regimes of the drafter with a network and of the lookup, see `World`; they last
            for the whole request.
        prompt: A prompt of this kind.
    """

    acceptance: Mapping[str, float]
    prompt: tuple[int, ...]


KINDS: Final = (
    Kind({"model": 0.6, "ngram": 0.9}, (1, 2, 3, 4) * 16),
    Kind({"model": 0.8, "ngram": 0.1}, tuple(range(64))),
    Kind({"model": 0.05, "ngram": 0.05}, tuple(number * 7 % 61 for number in range(122))),
)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request: its kind, and the fate of every drafter round by round."""

    kind: Kind
    rounds: tuple[Mapping[str, Round], ...]


def simulated_requests(count: int, draws: Draws, *, world: World) -> list[SimulatedRequest]:
    """Requests of all kinds, as likely as each other.

    Args:
        count: How many.
        draws: Decides everything.
        world: How much positions deviate; its regimes are those of the kinds.
    """
    found: list[SimulatedRequest] = []
    for _ in range(count):
        kind = KINDS[int(draws.uniform() * len(KINDS))]
        streams = {
            name: replace(world, regimes=(chance,), switch_prob=0.0).rounds(
                ROUNDS_OF_REQUEST, draws
            )
            for name, chance in kind.acceptance.items()
        }
        rounds = tuple(
            {**dict(zip(streams, those, strict=True)), _NOTHING.name: _NO_LEVELS}
            for those in zip(*streams.values(), strict=True)
        )
        found.append(SimulatedRequest(kind, rounds))
    return found


def selection_speed(
    controller: AnyController,
    costs: Latency,
    requests: Sequence[SimulatedRequest],
    draws: Draws,
    *,
    drafter: str = _NETWORK.name,
    watch: Stopwatch | None = None,
) -> float:
    """Tokens per plain forward's time.

    Args:
        controller: What plans every round, and, if it selects, which drafter drafts.
        costs: What rounds cost.
        requests: One after another; what the controller shares between them lasts.
        draws: The controller's own source of randomness.
        drafter: Drafts where the plan names none.
        watch: Takes the time of plans and updates.
    """
    shared, tokens, seconds = SharedState(costs, members=MEMBERS), 0, 0.0
    watch = watch or Stopwatch(lambda: 0.0)
    for request in requests:
        state, length = controller.init(shared), len(request.kind.prompt)
        if isinstance(controller, PromptReader):
            state = watch.run(controller.read, state, PromptProfile(token_ids=request.kind.prompt))
        for rounds in request.rounds:
            info = RoundInfo(context_lengths=(length,), memory=shared.memory)
            plan: DraftPlan = watch.run(controller.plan, [state], info, [draws])[0]
            name = plan.drafter or drafter
            member = next(one for one in MEMBERS if one.name == name)
            within = plan.within(DraftPlan(max_depth=member.max_depth))
            record = chain_record(
                within,
                rounds[name],
                length,
                drafter=name,
                counterfactuals=_counterfactuals(rounds, length),
            )
            state = watch.run(controller.update, state, record)
            shared.memory = watch.run(controller.learn, shared.memory, state, record)
            seconds += costs.of(name, runs_network=member.runs_network).round_s(record.depth)
            tokens, length = tokens + len(record.token_ids), length + len(record.token_ids)
    return tokens / seconds


def compare_selections(
    num_rounds: int,
    make_draws: Callable[[int], Draws],
    arms: Mapping[str, str] = ARMS,
    *,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Speeds of the best drafter with its best fixed window, of `goodput` with that drafter, and of the selections.

    Args:
        num_rounds: Rounds of every arm, in whole requests.
        make_draws: As for `compare_controllers`.
        arms: Controllers by name.
        clock: Takes the controllers' own time.
    """
    world = World()
    requests = simulated_requests(
        max(1, num_rounds // ROUNDS_OF_REQUEST), make_draws(0), world=world
    )
    fixed = {
        (member.name, window): selection_speed(
            Fixed(max_depth=window), world.costs(), requests, make_draws(1), drafter=member.name
        )
        for member in MEMBERS
        for window in range(min(1, member.max_depth), member.max_depth + 1)
    }
    best, window = max(fixed, key=fixed.__getitem__)
    most = fixed[best, window]
    rows: list[dict[str, Any]] = [
        {
            "world": WORLD,
            "controller": f"fixed, {best}, window {window} (the best)",
            "speed": most,
            "ratio": 1.0,
        }
    ]
    for arm, text in {f"goodput, {best} only": "goodput", **arms}.items():
        watch = Stopwatch(clock)
        reached = selection_speed(
            CONTROLLERS.parse(text),
            world.costs(),
            requests,
            make_draws(1),
            drafter=best,
            watch=watch,
        )
        own = {"own_s_per_round": watch.seconds / (len(requests) * ROUNDS_OF_REQUEST)}
        rows.append(
            {"world": WORLD, "controller": arm, "speed": reached, "ratio": reached / most, **own}
        )
    return rows


def _counterfactuals(rounds: Mapping[str, Round], position: int) -> tuple[CounterfactualDraft, ...]:
    """Return the drafts that drafters without a network would have had accepted."""
    found: list[CounterfactualDraft] = []
    for member in (_LOOKUP, _NOTHING):
        accepted = rounds[member.name].num_accepted(member.max_depth)
        factors = (1.0,) * accepted + (0.0,) * (accepted < member.max_depth)
        found.append(
            CounterfactualDraft(
                drafter=member.name, position=position, num_nodes=member.max_depth, factors=factors
            )
        )
    return tuple(found)

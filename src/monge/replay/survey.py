"""Look at every position of a text.

With which chance would each of the next drafted tokens be accepted there?

From that, without any simulation, what every fixed window expects, and what an oracle expects that
knows all chances (not the coins) and picks the best window at every position: both by dynamic
programming from the end of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.engine.loop import close_session
from monge.engine.opening import open_sessions
from monge.replay.costs import RoundCosts
from monge.replay.log import LawLog, LoggedText
from monge.replay.run import following, open_text, play_round
from monge.replay.text import TextDraws, TextVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What a round would meet that starts after some token of a text.

    Args:
        chances: For depth 1, 2, ...: P(accepted | text, the depth above was accepted).
        nodes: Drafted nodes of depth at most 0, 1, 2, ...
        room: Most draft tokens that the request's limit allows here.
        runs_network: Whether the drafter that drafts here runs one, so that drafting costs time.
    """

    chances: tuple[float, ...]
    nodes: tuple[int, ...]
    room: int
    runs_network: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Expected rounds and seconds of a text, from its start."""

    rounds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Full(SoloController[None]):
    """Always plans the deepest tree."""

    depth: int

    def init(self, shared: SharedState) -> None:
        return None

    def plan_one(
        self, state: None, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        return DraftPlan(max_depth=self.depth)

    def update(self, state: None, record: StepRecord) -> None:
        return None


def survey(
    components: Components, log: LawLog, text: LoggedText, draws: Draws, *, depth: int
) -> tuple[Position, ...]:
    """The chances at every position of a text.

    The drafter runs once at every position, its tree led along the text. Where siblings decide the
    shape of what is below (a budget of nodes, merged paths), they are one sample of their law.

    Args:
        components: Drafter and verifier; the controller is not used, the target as `following`
            says.
        log: Where the text is from.
        text: One of its texts.
        draws: Source of randomness.
        depth: Deepest window.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    looking = replace(components, controller=_Full(depth), shared=SharedState())
    session, guide = open_text(looking, log, text, draws)
    guide.is_forced = True
    playing = replace(
        looking,
        greedy_rule=None,
        rule=TextVerifier(only_looks=True),
        target=following(components, log),
    )
    found: list[Position] = []
    open_sessions([session], playing)
    try:
        while session.finish_reason is None:
            room = text.max_new_tokens - session.num_generated - 1
            play_round(session, guide, playing)
            runs_network = components.runs_network(session.records[-1].drafter)
            found.append(_position(guide, room=room, runs_network=runs_network))
    finally:
        close_session(session, playing)
    return tuple(found)


def fixed_window(positions: Sequence[Position], costs: RoundCosts, window: int) -> Expectation:
    """What a fixed window expects."""
    return _expected(positions, costs, [window])


def oracle(positions: Sequence[Position], costs: RoundCosts, depth: int) -> Expectation:
    """What the best window at every position expects, chosen with all chances known."""
    return _expected(positions, costs, range(depth + 1))


def survival(positions: Sequence[Position], depth: int) -> tuple[float, ...]:
    """Mean over positions of P(the first k draft tokens are accepted), k = 1, 2, ....

    Positions near the end are left out.
    """
    curves: list[list[float]] = []
    for position in positions[: max(1, len(positions) - depth)]:
        reach, curve = 1.0, list[float]()
        for level in range(depth):
            reach *= position.chances[level] if level < len(position.chances) else 0.0
            curve.append(reach)
        curves.append(curve)
    return tuple(sum(column) / len(curves) for column in zip(*curves, strict=True))


def _expected(
    positions: Sequence[Position], costs: RoundCosts, windows: Sequence[int]
) -> Expectation:
    """Backwards over positions: the round's own cost, and what is expected after as many tokens as it may commit."""
    ahead = [Expectation(rounds=0.0, seconds=0.0)]  # ahead[-1 - k]: after k more tokens
    for left, position in enumerate(reversed(positions), start=1):
        choices = [
            _round(position, costs, min(window, position.room), ahead, left) for window in windows
        ]
        ahead.append(min(choices, key=lambda choice: choice.seconds))
    return ahead[-1]


def _round(
    position: Position, costs: RoundCosts, window: int, ahead: Sequence[Expectation], left: int
) -> Expectation:
    rounds, seconds, reach = 1.0, round_seconds(position, costs, window), 1.0
    # The last token of the text is its round's own, so at most left - 1 draft tokens count as
    # accepted.
    for accepted in range(min(window, left - 1) + 1):
        chance = (
            position.chances[accepted]
            if accepted < min(window, left - 1, len(position.chances))
            else 0.0
        )
        weight, reach = reach * (1.0 - chance), reach * chance
        after = ahead[left - 1 - accepted]
        rounds, seconds = rounds + weight * after.rounds, seconds + weight * after.seconds
    return Expectation(rounds=rounds, seconds=seconds)


def round_seconds(position: Position, costs: RoundCosts, window: int) -> float:
    """Predicted seconds of a round with some window."""
    depth = min(window, len(position.nodes) - 1)
    drafting = costs.draft_s(depth) if position.runs_network else 0.0
    return costs.verify_s(position.nodes[depth]) + drafting


def _position(guide: TextDraws, *, room: int, runs_network: bool) -> Position:
    """What was seen of the round; a node that the builder drew and left out of the finished tree cannot be accepted."""
    assert guide.tree is not None, "the verifier has seen the tree"
    tree, text = guide.tree, guide.text.all_ids
    paths = {tree.path_tokens(node) for node in range(1, tree.num_nodes)}
    chances = [
        chance if text[guide.start : guide.start + depth] in paths else 0.0
        for depth, chance in enumerate(guide.chances, start=1)
    ]
    depths = tree.depths
    return Position(
        chances=tuple(chances),
        nodes=tuple(
            sum(0 < depth <= level for depth in depths) for level in range(max(depths) + 1)
        ),
        room=room,
        runs_network=runs_network,
    )

"""Survey every position of a logged text: the chance that each of the next drafted tokens is accepted.

From the chances follow, by dynamic programming from the end of the text, the time of every fixed
depth and of an oracle that knows all chances (not the coins) and picks the best depth everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from monge.control.base import SharedState
from monge.control.fixed import Fixed
from monge.core.draws import Draws
from monge.core.law import LawSequence
from monge.core.proposal import Iid, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import StepRecord, Verdict
from monge.engine.components import Components
from monge.engine.loop import close_session
from monge.engine.opening import open_sessions
from monge.replay.conditional import ConditionalCandidates
from monge.replay.costs import RoundCosts, predicted
from monge.replay.log import LawLog, LoggedText, LoggedToken
from monge.replay.run import open_text, simulate_round, stand_in
from monge.replay.text import TextDraws
from monge.verify.base import Verifier

SAMPLES: Final = 64
"""Draws of a node's candidates, whose mean estimates the chance of acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One round of the deepest tree, begun after some token of a text.

    Args:
        chances: For depth 1, 2, ...: P(accepted | text, the depth above was accepted).
        nodes: Drafted nodes of depth at most 0, 1, 2, ...
        room: Most draft tokens that the request's limit allows here.
        record: The round.
        runs_network: Whether the drafter that drafts here runs one, so that drafting costs time.
    """

    chances: tuple[float, ...]
    nodes: tuple[int, ...]
    room: int
    record: StepRecord
    runs_network: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Expected rounds and seconds of a text, from its start."""

    rounds: float
    seconds: float


@dataclass(slots=True)
class ForcedCandidates(ConditionalCandidates):
    """Put the committed token among the candidates, and note how likely it was to be there.

    Args:
        own: The law of the candidates, given the emitted token.
        chances: Of the nodes on the text, from the root down.
    """

    own: ConditionalCandidates
    chances: list[float] = field(default_factory=list[float])

    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        drawn = [self.own.draw(logged, proposal, draws) for _ in range(SAMPLES)]
        holding = [tokens for tokens in drawn if logged.token in tokens]
        self.chances.append(len(holding) / SAMPLES)
        if holding and isinstance(proposal, Iid):
            return holding[0]
        candidates = proposal.draw(draws)
        others = [token for token in candidates if token != logged.token]
        return (logged.token, *others[: len(candidates) - 1])

    def next_scale(self, logged: LoggedToken, q: float) -> float:
        # A forced candidate may have no draft mass; the bound of the ratio is 1.
        return self.own.next_scale(logged, q) if q > 0.0 else 1.0


@dataclass(slots=True)
class Refusal(Verifier):
    """Accept nothing, so that every round commits one token, and keep the tree."""

    tree: TokenTree | None = None
    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        assert isinstance(draws, TextDraws)
        self.tree = tree
        kind = "correction" if tree.candidates[0] else "bonus"
        examined = (len({tree.token_ids[child] for child in tree.candidates[0]}),)
        return Verdict(
            path=(),
            next_token=draws.text.all_ids[draws.start],
            next_kind=kind,
            examined=examined if tree.candidates[0] else (),
        )


def survey(
    components: Components, log: LawLog, text: LoggedText, draws: Draws, *, depth: int
) -> tuple[Position, ...]:
    """Return the chances at every position of a text.

    The drafter runs once at every position, its tree led along the text. Where siblings decide the
    shape of what is below (a budget of nodes, merged paths), they are one sample of their law.

    Args:
        components: Drafter and verifier; the controller is not used.
        log: Where the text is from.
        text: One of its texts.
        draws: Source of randomness.
        depth: Deepest plan.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    full = replace(components, controller=Fixed(max_depth=depth), shared=SharedState())
    session, text_draws = open_text(full, log, text, draws)
    refusal = Refusal()
    full = replace(full, greedy_rule=None, rule=refusal, target=stand_in(components, log))
    own, found = text_draws.conditional, list[Position]()
    open_sessions([session], full)
    try:
        while session.finish_reason is None:
            forced = text_draws.conditional = ForcedCandidates(own)
            room = text.max_new_tokens - session.num_generated - 1
            simulate_round(session, text_draws, full)
            record = session.records[-1]
            assert refusal.tree is not None
            chances = _on_text(refusal.tree, text.all_ids[text_draws.start :], forced.chances)
            depths = refusal.tree.depths
            levels = range(max(depths) + 1)
            found.append(
                Position(
                    chances=chances,
                    nodes=tuple(sum(0 < at <= level for at in depths) for level in levels),
                    room=room,
                    record=record,
                    runs_network=components.runs_network(record.drafter),
                )
            )
    finally:
        close_session(session, full)
    return tuple(found)


def fixed_depth(positions: Sequence[Position], costs: RoundCosts, depth: int) -> Expectation:
    """Return the expectation of one fixed depth."""
    return _expected(positions, costs, [depth])


def oracle(positions: Sequence[Position], costs: RoundCosts, depth: int) -> Expectation:
    """Return the expectation of the best depth at every position, chosen with all chances known."""
    return _expected(positions, costs, range(depth + 1))


def survival(positions: Sequence[Position], depth: int) -> tuple[float, ...]:
    """Return the mean over positions of P(the first k draft tokens are accepted), k = 1, 2, ...

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
    positions: Sequence[Position], costs: RoundCosts, depths: Sequence[int]
) -> Expectation:
    """Go backwards over positions: a round costs its own time and that of what is left after it."""
    ahead = [Expectation(rounds=0.0, seconds=0.0)]  # ahead[-1 - k]: after k more tokens
    for left, position in enumerate(reversed(positions), start=1):
        choices = [
            _round(position, costs, min(depth, position.room), ahead, left) for depth in depths
        ]
        ahead.append(min(choices, key=lambda choice: choice.seconds))
    return ahead[-1]


def _round(
    position: Position, costs: RoundCosts, depth: int, ahead: Sequence[Expectation], left: int
) -> Expectation:
    rounds, seconds, reach = 1.0, round_seconds(position, costs, depth), 1.0
    # The last token of the text is its round's own, so at most left - 1 draft tokens count as
    # accepted.
    for accepted in range(min(depth, left - 1) + 1):
        chance = (
            position.chances[accepted]
            if accepted < min(depth, left - 1, len(position.chances))
            else 0.0
        )
        weight, reach = reach * (1.0 - chance), reach * chance
        after = ahead[left - 1 - accepted]
        rounds, seconds = rounds + weight * after.rounds, seconds + weight * after.seconds
    return Expectation(rounds=rounds, seconds=seconds)


def round_seconds(position: Position, costs: RoundCosts, depth: int) -> float:
    """Return the predicted seconds of a round of some depth."""
    depth = min(depth, len(position.nodes) - 1)
    record = replace(position.record, depth=depth, num_nodes=position.nodes[depth])
    return predicted(record, costs, runs_network=position.runs_network).times.total_s


def _on_text(tree: TokenTree, ahead: tuple[int, ...], drawn: Sequence[float]) -> tuple[float, ...]:
    """Return chances by depth; a token that the finished tree leaves out cannot be accepted.

    Candidates that are not drawn are accepted if the text goes on with them.
    """
    paths = {tree.path_tokens(node) for node in range(1, tree.num_nodes)}
    chances = drawn or [1.0] * max(tree.depths)
    return tuple(
        chance if ahead[:depth] in paths else 0.0 for depth, chance in enumerate(chances, start=1)
    )

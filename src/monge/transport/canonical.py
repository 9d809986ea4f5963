"""The canonical decomposition: select one candidate, then accept it as if it were the only candidate.

p = target law. A *selection* kernel beta(i | t), summing to 1 over the candidates of t, gives the
selected candidate a law x; accept it with probability min(1, p_i / x_i), else emit from (p - x)_+.
The output law is p and the acceptance sum(min(p, x)) for every kernel, provided x is the law of the
kernel that is executed. The best kernel attains the optimum (Khisti et al., arXiv 2410.18234,
Theorem 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final, Literal

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.errors import OptionError
from monge.transport.candidates import TransportProblem
from monge.transport.laws import Vector, check_law, check_pair

MAX_LEADING: Final = 64
"""Most leading tokens of the truncated program: two thousand variables."""

Tail = Literal["ranked", "first"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSelection:
    """Selects one of two candidates X1 ~ q1, X2 ~ q2, drawn independently.

    Args:
        order: Tokens of either support by decreasing `p - q1 q2`, `[support]`.
        leading_choice: w_ij = P(select i | the pair is {i, j}) for the leading tokens, by rank,
            `[leading, leading]`.
        tail: Selection of a pair outside the leading tokens: the higher "ranked" token, or the
            "first" candidate.
        winner_law: x, computed from the clipped choices, `[vocab]`.
    """

    order: Int64[np.ndarray, " support"]
    leading_choice: Float64[np.ndarray, "leading leading"]
    tail: Tail
    winner_law: Vector

    def first_prob(self, first: int, second: int) -> float:
        """P(select the first candidate | both)."""
        (i, *_), (j, *_) = (
            np.flatnonzero(self.order == token).tolist() for token in (first, second)
        )
        num_leading = len(self.leading_choice)
        if i == j:
            return 1.0
        if max(i, j) < num_leading:
            return float(self.leading_choice[i, j])
        return 1.0 if i < j or (self.tail == "first" and min(i, j) >= num_leading) else 0.0


def truncated_program(
    p: Vector, q1: Vector, q2: Vector, *, num_leading: int, tail: Tail = "ranked"
) -> PairSelection:
    """The truncated linear program for two candidates.

    Law:
        Lossless for every `num_leading`, since x is computed from the choices after they are
        clipped to [0, 1].

    Rule:
        Order tokens by `p - q1 q2`; a pair inside the leading tokens selects by the program's w; a
        pair with one token outside selects the leading token; a pair outside selects the higher
        ranked token (variant 1) or X1 (variant 2, which needs no full sort). Maximise sum(min(p,
        x)) over w_ij + w_ji = 1.

    Cost:
        A linear program with s (s + 1) / 2 variables; optimal where the leading tokens are all.

    Reference:
        Khisti et al., arXiv 2410.18234, section 4; the second variant's tail is ours, the paper's
        was not available.
    """
    p, q1, q2 = check_law("target", p), check_law("draft law 1", q1), check_law("draft law 2", q2)
    check_pair(p, q1)
    check_pair(p, q2)
    if not 1 <= num_leading <= MAX_LEADING:
        raise OptionError(
            f"truncated program: num_leading must lie in 1..{MAX_LEADING}; got {num_leading}"
        )
    support = np.flatnonzero(q1 + q2)
    order = support[np.argsort((q1 * q2 - p)[support])]
    leading = order[:num_leading]
    base = _tail_law(q1, q2, order, num_leading, tail)
    pairs = np.outer(q1[leading], q2[leading])
    choice = _best_choice(p[leading], base[leading], pairs + pairs.T)
    x = base.copy()
    x[leading] += (choice * (pairs + pairs.T)).sum(axis=1)
    return PairSelection(order=order, leading_choice=choice, tail=tail, winner_law=x)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tournament:
    """Select between the first two candidates, then between the winner and the third, and so on.

    Args:
        rounds: One selection per candidate after the first; the first draft law of each is the
            winner law of the selection before it.
    """

    rounds: tuple[PairSelection, ...]

    def selection_probs(self, candidates: Sequence[int]) -> dict[int, float]:
        """P(selected | candidates) of every distinct candidate."""
        probs = {candidates[0]: 1.0}
        for pair, challenger in zip(self.rounds, candidates[1:], strict=True):
            stays = {z: prob * pair.first_prob(z, challenger) for z, prob in probs.items()}
            moved = sum(prob - stays[z] for z, prob in probs.items())
            probs = stays | {challenger: stays.get(challenger, 0.0) + moved}
        return probs

    def selection(self, problem: TransportProblem) -> Float64[np.ndarray, "tuples vocab"]:
        """beta(i | t) for every tuple."""
        selection = np.zeros((len(problem.candidates.tuples), problem.target.size))
        for row, candidates in enumerate(problem.candidates.tuples):
            for token, prob in self.selection_probs(candidates).items():
                selection[row, token] = prob
        return selection


def tournament(
    p: Vector, draft_laws: Sequence[Vector], *, num_leading: int, tail: Tail = "ranked"
) -> Tournament:
    """Selections for any number of independent candidates, from equal or different draft laws: lossless, not optimal.

    Reference: Khisti et al., arXiv 2410.18234, section 5.
    """
    if len(draft_laws) < 2:
        raise OptionError(f"tournament: expected two draft laws or more; got {len(draft_laws)}")
    rounds: list[PairSelection] = []
    winner = draft_laws[0]
    for challenger in draft_laws[1:]:
        rounds.append(truncated_program(p, winner, challenger, num_leading=num_leading, tail=tail))
        winner = rounds[-1].winner_law
    return Tournament(rounds=tuple(rounds))


def _tail_law(
    q1: Vector, q2: Vector, order: Int64[np.ndarray, " support"], num_leading: int, tail: Tail
) -> Vector:
    """Winner law without the pairs of two different leading tokens."""
    a, b = q1[order], q2[order]
    below1 = np.append(np.cumsum(a[::-1])[-2::-1], 0.0)  # mass at later ranks
    below2 = np.append(np.cumsum(b[::-1])[-2::-1], 0.0)
    outside = np.arange(order.size) >= num_leading
    won = a * b + a * below2 + b * below1
    if tail == "first":
        won[outside] = (a * b[outside].sum())[outside]
    leading = ~outside
    won[leading] = (a * b + a * b[outside].sum() + b * a[outside].sum())[leading]
    x = np.zeros(q1.size)
    x[order] = won
    return x


def _best_choice(
    p: np.ndarray, base: np.ndarray, pair_masses: np.ndarray
) -> Float64[np.ndarray, "leading leading"]:
    """The w in [0, 1] that maximises sum(min(p, base + sum_j w_ij pair_ij)); w_ij + w_ji = 1.

    A flow from pairs to their tokens, as far as these lack mass. The excess mass of a token goes to
    another token along the shortest chain of pairs that can be decided the other way. This ends
    when no such chain is left (Edmonds and Karp 1972).
    """
    size = p.size
    needs = (p - base).tolist()
    masses: list[list[float]] = pair_masses.tolist()
    # given[i][j] is the mass of the pair {i, j} that selects i: at first the half of it for either.
    given = [[0.5 * masses[i][j] if i != j else 0.0 for j in range(size)] for i in range(size)]
    excess = [sum(given[i]) - max(0.0, needs[i]) for i in range(size)]
    while (chain := _chain(given, excess)) is not None:
        steps = list(pairwise(chain))
        moved = min(excess[chain[0]], -excess[chain[-1]], *(given[i][j] for i, j in steps))
        for i, j in steps:
            given[i][j] = 0.0 if given[i][j] == moved else given[i][j] - moved
            given[j][i] = masses[i][j] - given[i][j]
        excess[chain[0]] = 0.0 if excess[chain[0]] == moved else excess[chain[0]] - moved
        excess[chain[-1]] = 0.0 if excess[chain[-1]] == -moved else excess[chain[-1]] + moved
    choice = np.zeros((size, size))
    for i, j in combinations(range(size), 2):
        choice[i, j] = min(1.0, given[i][j] / masses[i][j]) if masses[i][j] > 0.0 else 0.5
        choice[j, i] = 1.0 - choice[i, j]
    return choice


def _chain(given: Sequence[Sequence[float]], excess: Sequence[float]) -> list[int] | None:
    """The shortest chain from a token with too much mass to a token that lacks mass; each token can give to the next."""
    came_from = {token: -1 for token, much in enumerate(excess) if much > 0.0}
    reached = list(came_from)
    for token in reached:  # grows while it is walked
        if excess[token] < 0.0:
            chain = [token]
            while came_from[chain[-1]] >= 0:
                chain.append(came_from[chain[-1]])
            return chain[::-1]
        for other, mass in enumerate(given[token]):
            if mass > 0.0 and other not in came_from:
                came_from[other] = token
                reached.append(other)
    return None

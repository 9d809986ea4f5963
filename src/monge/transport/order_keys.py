"""Order-statistic keys: a second construction of the optimum for independent candidates, to check the first.

p = target (sub-)law, q = draft law, K = `width`. Every token owns a set S_i of [0, 1] of length
q_i, the sets being disjoint. A candidate draws its key uniformly from its token's set, so keys are
uniform; the largest of K has density K u^(K-1), and the token that holds it is i with probability
x_i = integral of K u^(K-1) over S_i. Accept it with probability min(1, p_i / x_i), else emit from
(p - x)_+. The sets are built for the flattest x with sum(min(p, x)) = alpha*.

The output law is p for *any* disjoint sets once x is recomputed from them; only the acceptance
depends on how well they were built.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.errors import LawError
from monge.transport.bounds import iid_optimum
from monge.transport.candidates import CandidateLaw, TokenTuple
from monge.transport.clamps import ceiling, floor
from monge.transport.coupling import Coupling
from monge.transport.laws import by_ratio, check_law, check_sub_law
from monge.transport.numerics import power_quotient
from monge.transport.problem import TransportProblem
from monge.transport.score_law import ScoreLaw, unit_nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderKeys:
    """The key sets of one node.

    Args:
        width: K.
        num_tokens: Size of the vocabulary.
        owners: Token of each segment, by increasing position, `[segments]`.
        starts: Left ends, `[segments]`.
        stops: Right ends, `[segments]`.
        winner_law: x, recomputed from the segments, `[vocab]`.
    """

    width: int
    num_tokens: int
    owners: Int64[np.ndarray, " segments"]
    starts: Float64[np.ndarray, " segments"]
    stops: Float64[np.ndarray, " segments"]
    winner_law: Float64[np.ndarray, " vocab"]

    @classmethod
    def build(
        cls, p: Float64[np.ndarray, " vocab"], q: Float64[np.ndarray, " vocab"], width: int
    ) -> "OrderKeys":
        """Key sets that attain the optimum for `width` independent draws from q.

        P may sum to less than one.
        """
        p, q = check_sub_law("target", p), check_law("draft law", q)
        wanted = selection_law(p, q, width)
        tokens, _ = by_ratio(wanted, q)
        order = tokens[::-1]
        segments = np.array(list(_segments(q[order].tolist(), wanted[order].tolist(), width)))
        segments = segments[segments[:, 2] > segments[:, 1]]
        segments = segments[np.argsort(segments[:, 1], kind="stable")]
        owners, starts, stops = (
            order[segments[:, 0].astype(np.int64)],
            segments[:, 1],
            segments[:, 2],
        )
        masses = (stops - starts) * power_quotient(starts, stops, width)
        winner_law = np.bincount(owners, weights=masses, minlength=p.size)
        return cls(
            width=width,
            num_tokens=p.size,
            owners=owners,
            starts=starts,
            stops=stops,
            winner_law=winner_law,
        )

    def score_law(self, tokens: tuple[int, ...]) -> ScoreLaw:
        """Key laws of some tokens; a candidate loses against u when its own key is smaller.

        On the common refinement of the segments every distribution function is linear, so winners
        are integrals of polynomials of degree K - 1, and ceil(K/2) nodes are exact.
        """
        mine = np.isin(self.owners, tokens)
        points = np.unique(np.concatenate([self.starts[mine], self.stops[mine]]))
        unit, unit_weights = unit_nodes((self.width + 1) // 2)
        nodes = (points[:-1, None] + np.diff(points)[:, None] * unit).ravel()
        weights = (np.diff(points)[:, None] * unit_weights).ravel()
        density, loses = np.zeros((len(tokens), nodes.size)), np.zeros((len(tokens), nodes.size))
        for row, token in enumerate(tokens):
            starts, stops = self.starts[self.owners == token], self.stops[self.owners == token]
            length = (stops - starts).sum()
            if length == 0.0:
                raise LawError(f"keys: token {token} has no key set, so it cannot be a candidate")
            covered = np.clip(nodes[:, None], starts, stops) - starts
            loses[row] = covered.sum(axis=1) / length
            density[row] = ((nodes[:, None] > starts) & (nodes[:, None] < stops)).any(
                axis=1
            ) / length
        return ScoreLaw(tokens=tokens, weights=weights, density=density, loses=loses)

    def selection_probs(self, candidate_ids: TokenTuple) -> dict[int, float]:
        """P(the largest key is held by token x), for every distinct candidate."""
        return self.score_law(tuple(sorted(set(candidate_ids)))).winner_probs(candidate_ids)


def selection_law(
    p: Float64[np.ndarray, " vocab"], q: Float64[np.ndarray, " vocab"], width: int
) -> Float64[np.ndarray, " vocab"]:
    """Selection law x = median(p, lambda q, mu q).

    Min(p, mu q) outside the minimal cut H, max(p, lambda q) inside.

    Outside H the masses sum to 1 - q(H)^K, inside to q(H)^K: the cut is tight, so sum(min(p, x)) =
    alpha*.
    """
    ascending, _ = by_ratio(p, q)
    size = len(iid_optimum(p, q, width).tokens)
    inside, outside = ascending[:size], ascending[size:][::-1]
    caught = 1.0 if size == ascending.size else float(q[inside].sum()) ** width
    x = np.zeros(p.size)
    if outside.size:
        x[outside] = np.minimum(
            p[outside], ceiling(p[outside], q[outside], 1.0 - caught) * q[outside]
        )
    if inside.size:
        x[inside] = np.maximum(p[inside], floor(p[inside], q[inside], caught) * q[inside])
    return x


def keys_coupling(
    p: Float64[np.ndarray, " vocab"], q: Float64[np.ndarray, " vocab"], width: int
) -> Coupling:
    """The rule of the keys for `width` independent draws from q, enumerated."""
    keys = OrderKeys.build(check_law("target", p), q, width)
    drafted = keys.winner_law > 0.0
    accept = np.ones(p.size)
    accept[drafted] = np.minimum(1.0, p[drafted] / keys.winner_law[drafted])
    candidates = CandidateLaw.iid(q, width)
    kernel = np.zeros((len(candidates.tuples), p.size))
    for row, candidate_ids in enumerate(candidates.tuples):
        for token, prob in keys.selection_probs(candidate_ids).items():
            kernel[row, token] = prob * accept[token]
    return Coupling.from_kernel(TransportProblem(target=p, candidates=candidates), kernel)


@dataclass(frozen=True, slots=True)
class _Hole:
    """A used interval.

    Its length and mass are stored: as stop - start, rounding would cascade from hole to hole.
    """

    start: float
    stop: float
    length: float
    mass: float


def _segments(
    lengths: list[float], masses: list[float], width: int
) -> Iterator[tuple[int, float, float]]:
    """(token index, start, stop) of disjoint sets with these lengths and masses.

    Tokens by decreasing mass / length.

    A left-curtain construction: a token takes a fresh interval left of all used ones if its mass
    fits there, and otherwise the gaps around the leftmost hole, which grows by them and swallows
    the holes it meets.
    """
    holes: list[_Hole] = []  # leftmost last
    for token, (length, mass) in enumerate(zip(lengths, masses, strict=True)):
        limit = holes[-1].start if holes else 1.0
        fits = not holes or (
            limit >= length and mass <= length * power_quotient(limit - length, limit, width)
        )
        if fits:
            start = _window(length, mass, width, limit)
            yield token, start, start + length
            holes.append(_Hole(start, start + length, length, mass))
            continue
        top = holes.pop()
        total_length, total_mass, right = top.length + length, top.mass + mass, top.stop
        while True:
            start = _window(total_length, total_mass, width, 1.0)
            if not holes or holes[-1].start >= start + total_length:
                break
            swallowed = holes.pop()
            yield token, right, swallowed.start
            right = swallowed.stop
            total_length, total_mass = total_length + swallowed.length, total_mass + swallowed.mass
        yield token, start, top.start
        yield token, right, start + total_length
        holes.append(_Hole(start, start + total_length, total_length, total_mass))


def _window(length: float, mass: float, width: int, limit: float) -> float:
    """Start a in [0, limit - length] of the interval of this length and mass, clipped to the ends.

    The mean density is convex and increasing in a, so Newton's method from the right of the root
    falls onto it.
    """
    wanted = mass / length
    a = max(0.0, limit - length)
    if width == 1 or power_quotient(a, a + length, width) <= wanted:
        return a
    # K a^(K-1) is a lower bound of the mean density
    a = min(a, (wanted / width) ** (1.0 / (width - 1)))
    while a > 0.0:
        slope = width * power_quotient(a, a + length, width - 1)
        step = (power_quotient(a, a + length, width) - wanted) / slope
        if not a - step < a:
            break
        a -= step
    return max(a, 0.0)

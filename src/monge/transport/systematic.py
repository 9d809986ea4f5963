"""The optimum for systematic draws: earliest deadline first.

p = target law. Along [0, 1] each token is on offer in one run of neighbouring cells. Passing mass
on to candidates is then a schedule of one machine: token i is a job of size p_i that may run while
it is on offer, and what runs at a position is accepted there. A job that runs late in its window
leaves room for nobody, so running the job whose window closes first is optimal.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from monge.core.systematic import Cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An optimal flow from the cells to their tokens.

    Args:
        times: For every cell the tokens that run in it, with the time they get; what is left of the
            cell is idle.
        masses: y, the time that each token gets in all; at most its size.
    """

    times: tuple[Mapping[int, float], ...]
    masses: Mapping[int, float]

    @property
    def accepted(self) -> float:
        """sum(y), the acceptance: no idle cell offers a token with mass left, so a residual token is never a candidate."""
        return sum(self.masses.values())


def earliest_deadline_first(cells: Cells, sizes: Mapping[int, float]) -> Schedule:
    """Run, in every cell, the candidates with mass left in the order in which their windows close.

    Args:
        cells: Joint law of the candidates.
        sizes: p_i, or s p_i for a scaled target, of every token that is on offer somewhere.

    Reference:
        Earliest deadline first is optimal for one machine that may interrupt its jobs (Jackson
        1955; Horn 1974); as a rule of acceptance, own construction, novelty not established.
    """
    if all(len(candidates) == 1 for candidates in cells.candidates):  # nobody competes for a cell
        alone = [
            (token, min(length, sizes[token]))
            for (token,), length in zip(cells.candidates, cells.lengths, strict=True)
        ]
        return Schedule(times=tuple({token: time} for token, time in alone), masses=dict(alone))
    closes = {
        token: cell for cell, candidates in enumerate(cells.candidates) for token in candidates
    }
    left = {token: sizes[token] for token in closes}
    masses = dict.fromkeys(closes, 0.0)
    times: list[dict[int, float]] = []
    for candidates, length in zip(cells.candidates, cells.lengths, strict=True):
        idle, ran = length, {}
        for token in sorted(candidates, key=closes.__getitem__):
            time = min(idle, left[token])
            if time > 0.0:
                ran[token] = time
                masses[token] += time
                left[token] -= time
                idle -= time
        times.append(ran)
    return Schedule(times=tuple(times), masses=masses)

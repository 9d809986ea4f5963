"""How long `price` keeps drafting off: trials are to take their share of the time and no more."""

import math
from dataclasses import dataclass

from monge.control.price_outlook import Outlook
from monge.control.price_reading import coming_back_s
from monge.control.price_request import Request

_GROWING_SHARE = 0.05  # of the time of plain decoding, that trials may take while rests still grow
_LONGEST_TRIAL = 16


@dataclass(frozen=True, slots=True)
class Rests:
    """Lengths of rests, in tokens; for the settings see `Price`."""

    first_off: int
    last_off: int
    trial: int
    probe_share: float | int

    def trial_rounds(self, state: Request, outlook: Outlook) -> int:
        """Rounds of a trial: as many as are expected to lose what coming back costs in any case.

        The first one finds nothing at hand, and one acceptance says little. So where it is a near thing whether drafting pays,
        a trial is long enough to show what going on costs and gains; where a round loses much, or drafting is far from paying,
        it is short.
        """
        coming_s, loss_s = coming_back_s(state.memory), outlook.loss_s
        spare_s = min(coming_s * outlook.closeness**2, self.probe_share * self.last_off * outlook.seconds[0] - coming_s)
        if spare_s <= 0.0:
            return self.trial
        return max(self.trial, _LONGEST_TRIAL if spare_s >= _LONGEST_TRIAL * loss_s else int(spare_s / loss_s))

    def following(self, state: Request, outlook: Outlook) -> int:
        """Of the rest that follows a trial: at least twice the last one, and more where drafting is far from paying."""
        lost = self.trial_rounds(state, outlook) * outlook.loss_s + coming_back_s(state.memory)
        longest = self.longest(lost, outlook.seconds[0])
        return max(
            self.first_off, min(max(math.ceil(2 * state.off_tokens / outlook.closeness), self.shortest(lost, outlook)), longest)
        )

    def shortest(self, lost_s: float, outlook: Outlook) -> int:
        """Of a first rest: where text must be read for a trial, rests that only doubled would be full of trials."""
        return math.ceil(lost_s / (_GROWING_SHARE * outlook.seconds[0]))

    def longest(self, lost_s: float, plain_s: float) -> int:
        """Of a rest after which a trial without success, which loses so much, takes its share of the time."""
        return max(self.first_off, min(self.last_off, math.ceil(lost_s / (self.probe_share * plain_s))))

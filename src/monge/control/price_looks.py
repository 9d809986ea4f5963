"""How long `price` goes on by one look at what rounds bring: longer where looks say the same."""

import math
from typing import Final

from monge.control.memory import Memory
from monge.control.price_apart import Apart
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import Outlook, usual_plan
from monge.control.price_reading import coming_back_s
from monge.control.price_request import Request
from monge.control.price_stretch import Stretch
from monge.control.price_together import SETTLED

_LOOK_S: Final = 0.06
"""Seconds of alike rounds that share one look at what they bring: a look is not to cost a percent. Twice as many where looks
say the same."""
_PATIENCE: Final = 4.0
"""Plain rounds by which they may be behind plain decoding before one looks earlier."""


def next_stretch(state: Request, outlook: Outlook, max_window: int) -> Stretch | None:
    """The coming rounds that are planned alike, by a look at what they are expected to bring; a trial has none.

    Args:
        state: The request.
        outlook: What is expected.
        max_window: Largest window.
    """
    if state.trial_left:
        return None
    pooled, in_one = pooled_of(state.memory), outlook.whole if outlook.as_one else None
    pooled.calm = pooled.calm.after(None if in_one is None else in_one[0], outlook.window, outlook.speed / outlook.plain_speed)
    look_s = 2.0 * _LOOK_S if pooled.calm.is_calm else _LOOK_S
    num_rounds = math.ceil(look_s / (outlook.seconds[outlook.window] if in_one is None else in_one[1]))
    if state.off_tokens and state.rounds_on < SETTLED:
        num_rounds = min(num_rounds, SETTLED - state.rounds_on)
    stretch = Stretch(
        usual_plan(outlook, pooled.calibration, max_window),
        outlook,
        num_rounds,
        patience_s(state.memory, state.debt_s, outlook),
        state.debt_s,
        state.memory.lookups,
        state.looked,
        Apart.of(outlook),
        begins=state.context_length is None,
    )
    pooled.note_stretch(stretch)
    return stretch


def patience_s(memory: Memory, debt_s: float, outlook: Outlook) -> float:
    """Seconds by which rounds may fall behind plain decoding until one looks again, where they are behind by `debt_s`."""
    limit_s = max(coming_back_s(memory), _PATIENCE * outlook.seconds[0])
    return limit_s if debt_s < limit_s else debt_s + _PATIENCE / 2.0 * outlook.seconds[0]

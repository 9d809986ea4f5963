"""Works that are timed in turns, so that what slows the machine for a while slows all of them."""

import time
from collections.abc import Callable, Mapping
from typing import Final

Work = Callable[[], float]
"""Does the work once, and returns its seconds."""
_WARM_UPS: Final = 2  # in the first, graphs are captured; what comes later may move their memory


def in_turns(works: Mapping[str, Work], repeats: int, until: float) -> dict[str, tuple[float, ...]]:
    """Return the seconds of every work, without the first turns.

    The order rotates. Once a turn is counted, no other begins after `until`, by `time.perf_counter`.
    """
    names, turns = list(works), list[dict[str, float]]()
    for turn in range(_WARM_UPS + repeats):
        if turn > _WARM_UPS and time.perf_counter() > until:
            break
        names.append(names.pop(0))
        turns.append({name: works[name]() for name in names})
    return {name: tuple(turn[name] for turn in turns[_WARM_UPS:]) for name in works}

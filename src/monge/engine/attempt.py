"""Going on after an error that concerns one request."""

from collections.abc import Callable


def attempt(work: Callable[[], object]) -> Exception | None:
    """What a piece of work raised, if anything. For work whose failure is dealt with by its caller, whatever it is."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  requests and drafters bring code of their own, whose errors nobody knows
        return error
    return None

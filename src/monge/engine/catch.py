"""Going on after an error that concerns one request."""

from collections.abc import Callable


def catch(work: Callable[[], object]) -> Exception | None:
    """Run some work and return the exception that it raises, if any; the caller handles it."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  requests and drafters bring code of their own, which may raise anything
        return error
    return None

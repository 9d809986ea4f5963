"""Linear programs that are solved once.

Enumeration meets the same node on thousands of branches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from monge.transport.canonical import tournament, truncated_program
from monge.verify import canonical
from tests.kit import known_bad_nodes


@pytest.fixture(scope="module", autouse=True)
def remembered_programs() -> Iterator[None]:
    """A function of its arguments stays the same function when its values are kept."""
    with remembering_programs():
        yield


@contextmanager
def remembering_programs() -> Iterator[None]:
    """Keep solved programs until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "tournament", remembered(tournament))
        patch.setattr(known_bad_nodes, "truncated_program", remembered(truncated_program))
        yield


def remembered(solve):  # type: ignore[no-untyped-def]
    """The same program, solved once for equal arguments."""
    solved: dict[str, object] = {}

    def recalled(*laws, **options):  # type: ignore[no-untyped-def]
        key = repr((laws_of(laws), options))
        if key not in solved:
            solved[key] = solve(*laws, **options)
        return solved[key]

    return recalled


def laws_of(laws):  # type: ignore[no-untyped-def]
    """Laws, and lists of laws, to the last bit."""
    return tuple(laws_of(law) if isinstance(law, list | tuple) else law.tobytes() for law in laws)

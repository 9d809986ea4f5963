"""Linear programs that are solved once: enumeration meets the same node on thousands of branches."""

from collections.abc import Iterator

import pytest

from monge.transport.canonical import Tournament, tournament
from monge.verify import canonical


@pytest.fixture(scope="module", autouse=True)
def remembered_programs() -> Iterator[None]:
    """A function of its arguments stays the same function when its values are kept."""
    solved: dict[object, Tournament] = {}

    def remembered(p, laws, *, num_leading, tail):  # type: ignore[no-untyped-def]
        key = (p.tobytes(), tuple(law.tobytes() for law in laws), num_leading, tail)
        if key not in solved:
            solved[key] = tournament(p, laws, num_leading=num_leading, tail=tail)
        return solved[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "tournament", remembered)
        yield

"""Score tables that are integrated once.

Enumeration meets the same node on thousands of branches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.acceptance import given_candidates
from lab.acceptance.score_table import ScoreTable


@pytest.fixture(scope="module", autouse=True)
def remembered_tables() -> Iterator[None]:
    """A function of its arguments stays the same function when its values are kept."""
    with remembering_tables():
        yield


@contextmanager
def remembering_tables() -> Iterator[None]:
    """Keep score tables until the block ends."""
    made: dict[object, ScoreTable] = {}

    class Remembered:
        @staticmethod
        def build(line):  # type: ignore[no-untyped-def]
            key = (
                line.width,
                line.threshold,
                line.edges.tobytes(),
                line.owners.tobytes(),
                line.gains.tobytes(),
            )
            if key not in made:
                made[key] = ScoreTable.build(line)
            return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given_candidates, "ScoreTable", Remembered)
        yield

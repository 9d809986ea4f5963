"""The simulated device."""

import pytest

from tests.engine import pretend


@pytest.fixture
def device():
    with pretend.device() as name:
        yield name

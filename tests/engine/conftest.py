"""Fixtures of the engine's tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked_types():
    """No type checks: the checker reads an item of every sequence, and the laws of a tree are computed when they are read."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

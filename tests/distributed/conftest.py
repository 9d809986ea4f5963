"""Decoders of the tests of this folder are tables."""

import pytest

from monge.distributed import ray_serve
from tests.serve.served import toy_decoder


@pytest.fixture
def tables(monkeypatch):
    """Decoders are tables, whatever their options."""
    monkeypatch.setattr(ray_serve, "load_decoder", lambda **_: toy_decoder())

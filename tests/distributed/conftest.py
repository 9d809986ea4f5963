"""Decoders of the tests of this folder are tables."""

import pytest

from monge.distributed import batch, ray_serve
from tests.serve.served import toy_decoder


@pytest.fixture
def tables(monkeypatch):
    """Decoders are tables, whatever their options."""
    for room in (batch, ray_serve):
        monkeypatch.setattr(room, "load_decoder", lambda _: toy_decoder())

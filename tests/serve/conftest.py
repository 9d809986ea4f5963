"""A client of the toy server."""

import pytest
from fastapi.testclient import TestClient

from tests.serve.served import toy_app


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app(), raise_server_exceptions=False) as made:
        yield made

"""Clients of the toy server, and of the built-in pair behind one."""

import openai
import pytest
from fastapi.testclient import TestClient

import monge
from monge.options import ServeOptions
from monge.serve.http.app import create_app
from tests.serve.served import toy_app


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app(), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def web():
    """A client of the built-in pair, whose text a tokenizer of the host writes."""
    with TestClient(create_app(monge.load(), ServeOptions(served_model_name="toy"))) as client:
        yield client


@pytest.fixture(scope="module")
def official(web):
    """The client that users of the API have."""
    return openai.OpenAI(api_key="none", base_url="http://testserver/v1", http_client=web)

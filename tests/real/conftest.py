"""SmolLM2-135M-Instruct, where its package is installed.

`make test` installs it, and goes on without it.
"""

import pytest

import monge
from monge.core.errors import ModelLoadError
from monge.loading.named_models import NAMED
from monge.loading.networks import load_network, load_tokenizer

CONVERSATION = [
    {"role": "user", "content": "Name the first four planets, and write the list twice."}
]


@pytest.fixture(scope="session")
def network():
    pytest.importorskip("gguf")
    try:
        NAMED["smollm2"].path()
    except ModelLoadError as error:
        pytest.skip(str(error))
    return load_network("smollm2")


@pytest.fixture(scope="session")
def tokenizer(network):
    return load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def plain(network, tokenizer):
    return monge.load(network, tokenizer=tokenizer, drafter="none")

import pytest

from monge.bench.pair import Pair, load_pair
from tests.bench.tiny import save_pair


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_pair(tiny_paths) -> Pair:
    return load_pair(*tiny_paths)

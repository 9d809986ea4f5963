"""Every family through the compiled backend.

The logits of fresh forwards, or a refusal that says why.
"""

import shutil

import pytest

from monge.core.errors import BackendError
from tests.engine.compiling import shared_programs
from tests.engine.tiny import TREE_FAMILIES, network, prompts
from tests.parity.comparing import RandomGrowth

LARGEST_DIFFERENCE = 5e-5
"""As for the eager backend: float32 forwards in another order of summation."""
REFUSED = ()
"""Families whose forward branches on values, so that it cannot be traced."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with shared_programs(tmp_path_factory) as make:
        yield make


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is on the path"
)
@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_node_logits(compiled, name):
    model = network(name, "eager" if name == "gemma2" else "sdpa")  # gemma2 has no sdpa
    if name in REFUSED:
        with pytest.raises(BackendError, match="cannot be compiled"):
            compiled(model)
        return
    step = compiled(model)
    growth = RandomGrowth(model, prompts((9, 4, 6), seed=1), seed=2, step=step)
    differences = [growth.round(compare=True) for _ in range(8)]
    assert growth.non_prefix_commits > 8, "the rounds were to move columns of the cache"
    assert max(differences) < LARGEST_DIFFERENCE, differences

"""Every family through the OpenVINO backend: the logits of fresh forwards, or a refusal that says why."""

import importlib.util

import pytest

from monge.core.errors import BackendError
from monge.engine.compiled_store import FOLDER_VARIABLE
from monge.engine.openvino import openvino_step
from tests.engine.tiny import TREE_FAMILIES, network, prompts
from tests.parity.comparing import RandomGrowth

LARGEST_DIFFERENCE = 5e-5
"""As for the eager backend: float32 forwards in another order of summation."""
REFUSED = ()
"""Families whose forward cannot be converted."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_node_logits(name, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model = network(name, "eager" if name == "gemma2" else "sdpa")  # gemma2 has no sdpa
    if name in REFUSED:
        with pytest.raises(BackendError, match="cannot run in OpenVINO"):
            openvino_step(model, "same", lambda _: None)
        return
    growth = RandomGrowth(model, prompts((9, 4, 6), seed=1), seed=2, step=openvino_step(model, "same", lambda _: None))
    differences = [growth.round(compare=True) for _ in range(8)]
    assert growth.non_prefix_commits > 8, "the rounds were to move columns of the cache"
    assert max(differences) < LARGEST_DIFFERENCE, differences

"""Distances of rounded weights, on laws that are known."""

import json
import math

import pytest
import torch

from lab.quality.__main__ import main
from lab.quality.measure import text_quality


def test_distances_of_known_laws():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [1 / 3] * 3], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.7, 0.2], [1 / 3] * 3], dtype=torch.float64)
    found = text_quality(p.log() + 3.0, q.log() - 1.0, torch.tensor([0, 1, 2]))
    assert found.num_tokens == 2
    assert found.nats == pytest.approx(-math.log(0.3) - math.log(0.1))
    assert found.rounded_nats == pytest.approx(-math.log(0.6) - math.log(0.2))
    expected = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.6)
    expected += 0.8 * math.log(0.8 / 0.7) + 0.1 * math.log(0.1 / 0.2)
    assert found.divergence == pytest.approx(expected)
    assert found.variation == pytest.approx(0.3 + 0.1)
    assert found.num_equal == 1


def test_the_command_on_the_built_in_target(tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("The history of\nWhat is 7 times 8?\n")
    main(data=path, kinds=["int8"], tokens=16, answers=8, threads=1, as_json=True)
    out = capsys.readouterr().out
    assert "int8" in out
    row = json.loads(out.splitlines()[-1])["weights"]["int8"]
    assert 0 < row["divergence"]["mean"] < 0.1
    assert 0 < row["variation"]["mean"] < 0.2
    assert row["perplexity_ratio"]["mean"] == pytest.approx(1.0, abs=0.1)

"""Distances of rounded weights, on laws that are known."""

import json
import math

import pytest
import torch

from lab.quality.__main__ import main
from lab.quality.greedy import WAYS, difference
from lab.quality.greedy import main as compare_greedy
from lab.quality.measure import text_quality
from monge.backends.cpu.code_cache import FOLDER_VARIABLE
from monge.core.errors import OptionError
from tests.engine.compiling import require


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


def test_the_first_difference_of_greedy_texts():
    plain = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    assert difference(plain, plain) == (3, None)
    assert difference(plain, [(1, 2, 3), (4, 5, 0), (0, 8, 9)]) == (1, "text 2, token 3")


@pytest.mark.slow  # it compiles two programs
def test_greedy_texts_of_a_type_are_equal_in_every_way(capsys, monkeypatch):
    require("compiled")
    pytest.importorskip("gguf")
    monkeypatch.setenv(FOLDER_VARIABLE, "")  # which the command sets
    compare_greedy(types=["Q2_K"], prompts=10, tokens=8, threads=None)
    (row,) = capsys.readouterr().out.splitlines()[2:]
    assert row == "| Q2_K |" + " 10 of 10 |" * len(WAYS) + " none |"
    with pytest.raises(OptionError, match="unknown type 'Q4K'; did you mean 'Q4_K'"):
        compare_greedy.__wrapped__(types=["Q4K"], prompts=1, tokens=1, threads=None)

"""The SHAPE report: formulas against brute force, every section measured, the command."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.shape.ceiling import acceptance, best_blind_law
from lab.shape.material import ReportSettings
from lab.shape.report import shape_report
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import Prompt
from tests.bench.tiny import save_pair

TINY = ReportSettings(rows_per_task=6, row_length=64, num_steps=2, prefixes=2, rollouts=4)
SUMS = "Question: what is seven times eight, and what is nine more than that? Answer:"
TALE = "Once upon a time there was a king who had three sons and a garden of old apple trees."
PROMPTS = (Prompt(task="sums", text=SUMS), Prompt(task="tales", text=TALE))


def laws_of(seed: int, count: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(count, vocab, generator=generator, dtype=torch.float64).pow(4)
    raw[:, 0] *= (torch.arange(count) % 2).double()  # a token that half of the laws forbid
    return raw / raw.sum(dim=1, keepdim=True)


@given(seed=st.integers(0, 10_000), count=st.integers(2, 6), vocab=st.integers(2, 5))
def test_no_law_beats_the_ceiling(seed: int, count: int, vocab: int) -> None:
    laws = laws_of(seed, count, vocab)
    best = best_blind_law(laws)
    assert float(best.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(best.min()) >= 0.0
    top = acceptance(laws, best)
    near = 0.95 * best + 0.05 * laws_of(seed + 2, 40, vocab)
    others = [laws.mean(dim=0), *laws, *laws_of(seed + 1, 40, vocab), *near]
    assert all(acceptance(laws, other) <= top + 1e-12 for other in others)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shape")
    target, _ = save_pair(folder)
    network, tokenizer = load_network(target), load_tokenizer(target)
    options = {"trained": None, "settings": TINY, "say": lambda _: None}
    return shape_report(network, tokenizer, PROMPTS, folder / "out", **options)


def test_every_section_is_measured(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document)) == document, "plain values only"
    assert {row["head"] for row in document["steps"]} == {"ridge, direct", "ridge, recurrent"}
    pairs = {(row["fitted_on"], row["measured_on"]) for row in document["transfer"]}
    assert pairs == set(product(("sums", "tales", "all"), ("sums", "tales")))
    own = [row for row in document["transfer"] if row["fitted_on"] == row["measured_on"]]
    assert [row["relative_to_own"] for row in own] == [1.0, 1.0]


def test_the_theorems_hold_where_they_are_measured(document: dict[str, Any]) -> None:
    assert all(row["bound_violations"] == 0 for row in document["steps"])
    for row in document["steps"]:
        assert row["acceptance_bound"]["mean"] <= row["acceptance"]
        assert row["error"]["mean"] <= row["error_bound"]["mean"] + 1e-4
        assert row["survival"] <= row["acceptance"] + 1e-9 or row["step"] > 1
    assert document["ceiling"][0]["ceiling_above"] == pytest.approx(1.0, abs=1e-5)
    for row in document["ceiling"]:
        assert row["ridge_direct"] <= row["ceiling_above"] + 1e-6
        assert row["mean_law"] <= row["ceiling_above"] + 1e-9


def test_the_command_prints_its_tables(lab, tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": SUMS}) + "\n")
    asked = f"--target {target} --data {tmp_path}/data.jsonl --rows 4 --out {tmp_path}/out"
    result = lab("shape", asked, "--quick")
    assert result.exit_code == 0, result.stderr
    assert "block efficiency" in result.stdout
    assert json.loads((tmp_path / "out" / "report.json").read_text())["transfer"]

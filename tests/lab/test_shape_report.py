"""The SHAPE report: formulas against brute force, every section measured, page and command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.shape.ceiling import acceptance, best_blind_law
from lab.shape.material import ReportSettings
from lab.shape.page import SECTIONS, page
from lab.shape.plots import draw
from lab.shape.reliability import expected_error
from lab.shape.report import shape_report
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import Prompt
from tests.heads.readers.published import eagle3

TINY = ReportSettings(
    rows_per_task=6,
    row_length=64,
    lags=2,
    positions=16,
    num_steps=2,
    prompts_per_task=1,
    max_new_tokens=4,
    temperatures=(0.0, 1.0),
    top_ps=(1.0, 0.9),
    contexts=(16, 100_000),
    prefixes=2,
    rollouts=4,
)
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
    others = [
        laws.mean(dim=0),
        *laws,
        *laws_of(seed + 1, 40, vocab),
        *(0.95 * best + 0.05 * q for q in laws_of(seed + 2, 40, vocab)),
    ]
    assert all(acceptance(laws, other) <= top + 1e-12 for other in others)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.bench.tiny import save_pair

    folder = tmp_path_factory.mktemp("shape")
    target, _ = save_pair(folder)
    said: list[str] = []
    options = {"trained": None, "settings": TINY, "say": said.append}
    beside = (eagle3(32, 4096).write(folder / "my-eagle3"),)
    network, tokenizer = load_network(target), load_tokenizer(target)
    made = shape_report(network, tokenizer, PROMPTS, folder / "out", beside=beside, **options)
    assert len(said) > 10
    return made


def test_every_section_is_measured(document: dict[str, Any]) -> None:
    assert document.keys() >= {*SECTIONS, "about", "structure", "ceiling"}
    lags = {(row["task"], row["lag"]) for row in document["similarity"]}
    assert lags == {(task, lag) for task in ("sums", "tales") for lag in (1, 2)}
    assert {row["head"] for row in document["steps"]} == {"ridge, direct", "ridge, recurrent"}
    assert len(document["transfer"]) == 3 * 2
    arms = {"none", "temperature", "diagonal", "gaussian", "sinkhorn_anchors"}
    assert {row["arm"] for row in document["ablation"]} == arms
    rules = [(row["temperature"], row["top_p"]) for row in document["sampling"]]
    assert rules == [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)]
    assert document["contexts"][0]["num_rounds"] > 0
    assert "the target reads 4096" in document["contexts"][1]["skipped"]
    rates = {row["drafter"]: row["block_efficiency"] for row in document["drafters"]}
    assert rates.keys() >= {"none", "suffix", "my-eagle3", "shape"}
    assert rates["none"] == 1.0


def test_the_theorems_hold_where_they_are_measured(document: dict[str, Any]) -> None:
    stability = document["stability"]
    assert stability["violations"] == 0
    assert all(y <= x + 1e-9 for x, y in stability["points"])
    assert stability["bound_from_cosine"]["p50"] >= stability["bound"]["p50"]
    assert all(row["bound_violations"] == 0 for row in document["steps"])
    for row in document["steps"]:
        assert row["acceptance_bound"]["mean"] <= row["acceptance"]
        assert row["error"]["mean"] <= row["error_bound"]["mean"] + 1e-4
        assert row["survival"] <= row["acceptance"] + 1e-9 or row["step"] > 1
    assert document["ceiling"][0]["ceiling_above"] == pytest.approx(1.0, abs=1e-5)
    for row in document["ceiling"]:
        assert row["ridge_direct"] <= row["ceiling_above"] + 1e-6
        assert row["mean_law"] <= row["ceiling_above"] + 1e-9
    assert all(row["law_error"] < 1e-12 for row in document["exactness"])
    assert sum(document["times"]["share"].values()) == pytest.approx(1.0, abs=0.05)


def test_calibration_compares_what_is_said_with_the_target(document: dict[str, Any]) -> None:
    assert expected_error([(0.25, 0.5, 2), (0.75, 0.75, 6)]) == pytest.approx(0.0625)
    counts = {sum(count for *_, count in row["bins"]) for row in document["calibration"]}
    assert len(counts) == 1
    for row in document["calibration"]:
        assert row["ece"] == pytest.approx(expected_error(row["bins"]))
    assert all(len(row["ece_by_step"]) == 2 for row in document["transfer"])
    assert document["gates"] == []  # a ridge head has none


def test_page_and_pictures_hold_every_section(document: dict[str, Any], tmp_path: Path) -> None:
    document = json.loads(json.dumps(document))  # plain values only
    pictures = draw(document, tmp_path)
    text = page(document, pictures)
    assert text.count("data:image/png;base64,") == len(pictures) == 10
    assert all(title.split("'")[0] in text for title, _ in SECTIONS.values())
    assert "<script" not in text
    assert text.count("<table>") >= len(SECTIONS)

"""The measurement over the distributions of a tiny pair."""

import json

import numpy as np
import pytest

from lab.acceptance.log import LogSettings, seeded
from lab.acceptance.measure import AcceptanceSettings, measure_acceptance
from lab.acceptance.nodes import OPTIMUM
from lab.acceptance.plots import write_plots
from monge.bench.resamples import Resamples
from monge.prompts import Prompt

EXACT = 1e-12


def test_resamples_are_paired_and_cover_the_mean():
    resamples = Resamples.draw(4, seeded("test"), count=200)
    values, clusters = np.array([1.0, 2.0, 3.0, 6.0, 6.0]), np.array([0, 1, 2, 3, 3])
    found, shifted = (resamples.estimate(values + by, clusters) for by in (0.0, 1.0))
    assert found.mean == pytest.approx(3.6)
    assert 1.0 <= found.low < found.mean < found.high <= 6.0
    assert (shifted.low - found.low, shifted.high - found.high) == pytest.approx((1.0, 1.0))


PROMPTS = (Prompt(task="a", text="The sea was"), Prompt(task="b", text="Once upon"))
LOG = LogSettings(max_new_tokens=6, nodes_per_text=2, roots_per_text=1, draft_top_k=4)
SHAPES = {"candidates": (1, 2), "budgets": (4,), "path_counts": (1, 2), "path_depths": (2,)}
SETTINGS = AcceptanceSettings(temperatures=(1.0,), samples=1, verifications=1, log=LOG, **SHAPES)


@pytest.fixture(scope="module")
def document(tiny_pair):
    steps = []
    progress = lambda *call: steps.append(call)  # noqa: E731
    found = measure_acceptance(tiny_pair, PROMPTS, SETTINGS, progress=progress)
    assert steps[0] == ("starting", len(steps) - 1)
    return found


def test_no_rule_beats_the_optimum_at_a_node(document):
    optima = [record for record in document["nodes"] if record["rule"] == OPTIMUM]
    best = {(one["candidates"], one["drafting"]): one["acceptance"]["mean"] for one in optima}
    compared = 0
    for record in document["nodes"]:
        if record["how"] == "closed form":
            mean = record["acceptance"]["mean"]
            assert 0 <= mean <= best[record["candidates"], record["drafting"]] + EXACT
            compared += record["rule"] != OPTIMUM
    assert compared > 10
    assert best[2, "iid"] >= best[1, "iid"]


def test_rounds(document):
    for part in ("rounds", "paths"):
        for record in document[part]:
            assert 1 <= record["block_efficiency"]["mean"] <= record["depth"] + 1
            assert record["num_rounds"] == 2
    assert {"chain", "binary", "comb"} <= {record["family"] for record in document["rounds"]}
    assert all(record["num_nodes"] <= record["budget"] for record in document["rounds"])
    of_pairs = {(one["tree"], one["rule"]): one["over_one_draft"] for one in document["paths"]}
    one_draft = of_pairs["paths(num_paths=1, depth=2)", "speculative_sampling"]
    assert one_draft == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_plots_are_written(document, tmp_path):
    names = [file.name for file in write_plots(document, tmp_path)]
    assert names == ["acceptance_by_candidates.png", "block_efficiency_by_nodes.png"]


def test_command(lab, tiny_paths, tmp_path):
    target, draft = tiny_paths
    (tmp_path / "prompts.txt").write_text("The sea was\n")
    files = f"--out {tmp_path}/out --prompts {tmp_path}/prompts.txt"
    places = f"--target {target} --draft {draft} {files}"
    chosen = "--quick --temperature 1 --candidates 1 --nodes 2 --draft-top-k 3 --no-plots --json"
    result = lab("acceptance", places, chosen)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text()) == document
    assert document["settings"]["log"]["draft_top_k"] == 3
    assert {record["candidates"] for record in document["nodes"]} == {1}

import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from lab.verify.measure import VerifySettings, measure
from monge.draft.tree.registry import TREES
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS

TINY = VerifySettings(
    vocab_sizes=(32,), supports=(8, 0), widths=(1, 2), batch_sizes=(1, 9), repeats=2, limit_s=60.0
)


@pytest.fixture
def run(lab):
    return lambda *arguments: lab("verify", *arguments)


def test_every_rule_is_timed_or_says_why_not():
    document = measure(TINY, torch.device("cpu"))
    cells: dict[tuple[int, ...], dict[str, Any]] = {}
    for one in document["cells"]:
        cells.setdefault((one["support"], one["width"], one["batch"]), {})[one["rule"]] = one
    assert cells.keys() == set(product((8, 32), (1, 2), (1, 9)))
    for records in cells.values():
        assert records.keys() >= set(VERIFIERS)
        for record in records.values():
            assert record.get("skipped") or record["node_s"]["low"] > 0.0
    left_out = [one for one in document["cells"] if "skipped" in one]
    skipped = {(one["rule"], one["width"]): one["skipped"] for one in left_out}
    assert "at most 1" in skipped["block", 2]
    measured = {one["rule"] for one in document["cells"] if "ratio" in one}
    assert measured >= set(VERIFIERS)
    assert document["provenance"]["argv"] == sys.argv


@pytest.mark.parametrize(
    ("tree", "nodes", "timed"),
    [
        ("chain(2)", 2, {"speculative_sampling", "block", "layer"}),
        ("fixed_width((2, 1), 'temperatures')", 4, {"sample_and_match", "gumbel", "layer"}),
        ("best_first(3, 2, 2)", 3, {"sample_and_match", "traversal"}),
    ],
)
def test_every_rule_that_is_exact_for_a_tree_is_timed_on_it(tree, nodes, timed):
    sampling = ((0.7, {"top_p": 0.9}),)
    settings = replace(TINY, supports=(8,), trees=(tree,), sampling=sampling)
    cells = measure(settings, torch.device("cpu"))["cells"]
    assert {one["sampling"] for one in cells} == {"temperature 0.7, top-p 0.9"}
    assert {one["rule"] for one in cells} == set(VERIFIERS)
    assert {one["nodes"] for one in cells} == {nodes}
    measured = {one["rule"] for one in cells if "ratio" in one}
    assert measured >= timed
    assert all(one["tree_s"]["low"] > 0.0 for one in cells if one["rule"] in measured)
    builder = TREES.parse(tree)
    limits = builder.limits
    for one in cells:
        reason = why_no_exactness(VERIFIERS.make(one["rule"]), limits.proposes, limits.max_width)
        assert one.get("skipped") == reason


def test_command_ends_with_one_json_object(run):
    sizes = "--vocab 32 --support 0 --candidates 2 --batch 1 --repeats 1 --rules optimal"
    result = run("--quick --json", sizes)
    assert result.exit_code == 0
    assert "vocabulary 32, support 32, 2 candidates, batch 1" in result.stdout
    assert "x softmax + multinomial" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert [one["rule"] for one in document["cells"]] == ["optimal"]


def test_laws_are_timed_under_sampling_rules(run):
    result = run("--laws --vocab 200 --repeats 2 --json")
    assert result.exit_code == 0, result.output
    assert "vocabulary 200, nearly flat" in result.output
    cells = json.loads(result.output.strip().splitlines()[-1])["cells"]
    supports = {(one["logits"], one["rules"]): one["support"] for one in cells}
    assert supports["peaked", "temperature 1, top-k 50"] == 50
    assert supports["equal", "temperature 0.7, top-p 0.9"] == 180
    assert supports["equal", "temperature 1, top-k 50"] == 200, "all are equal to the last of them"
    assert {one["ratio"]["median"] for one in cells if one["rules"] == "temperature 1"} == {1.0}
    assert "must be positive; got [0, 2]" in run("--laws --vocab 0 --repeats 2").output

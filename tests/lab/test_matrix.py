"""`python -m lab.matrix`: all that is exact, and every controller."""

import json

import pytest

from lab.matrix import all_arms, controller_arms, legal_pairs
from monge.bench.arms import DEFAULT
from monge.control.registry import DEPTH_CONTROLLERS
from monge.draft.tree.registry import TREES
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS


def test_matrix_is_all_that_is_exact(tiny_pair):
    names = [arm.name for arm in all_arms(tiny_pair)]
    assert len(set(names)) == len(names)
    trees = ("chain", "fixed_width", "best_first")
    pairs = set(legal_pairs(trees))
    for tree in trees:
        limits = TREES.make(tree).limits
        for verifier in VERIFIERS:
            legal = (
                unsupported_reason(VERIFIERS.make(verifier), limits.proposes, limits.max_width)
                is None
            )
            assert ((tree, verifier) in pairs) == legal
            assert (f"monge {tree} {verifier}" in names) == legal
    assert {DEFAULT, "monge none", "monge ngram target_walk", "monge fixed_width/iid rrs"} <= set(
        names
    )


def test_every_controller_has_an_arm(tiny_pair):
    names = {arm.name for arm in controller_arms(tiny_pair)}
    assert {
        f"monge {name}" for name in DEPTH_CONTROLLERS if name not in ("fixed", "goodput")
    } < names
    assert {"monge", "monge none", "monge window 1", "monge window 8"} < names


@pytest.mark.slow
def test_command(lab, tiny_paths, tmp_path):
    (tmp_path / "mine.txt").write_text("The sea was\n")
    models = f"--target {tiny_paths[0]} --draft {tiny_paths[1]} --prompts {tmp_path}/mine.txt"
    limits = "--max-new-tokens 4 --repeats 1 --batch 1 --temperature 0"
    result = lab("matrix", models, limits, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert len(document["arms"]) > 15
    assert [arm["arm"] for arm in document["arms"] if arm["failure"] is not None] == []

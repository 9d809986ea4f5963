"""`monge acceptance`: the worked example to the last digit, files, trees, and input that must be refused."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from monge.laws.law import residual
from monge.laws.proposal import Iid
from monge.verify.base import NodeRule

A = ("--target-probs", "0.5,0.3,0.2", "--draft-probs", "0.2,0.3,0.5")


@pytest.fixture
def report(run):
    """The JSON report of the command."""

    def ask(*arguments):
        result = run("acceptance", *arguments, "--json")
        assert result.exit_code == 0, result.stderr
        (line,) = result.stdout.splitlines()
        return json.loads(line)

    return ask


def test_worked_example(run, report):
    found = report(*A, "--candidates", 2)
    rules, best = found["rules"], found["optimum"]
    expected = {
        "sample_and_match": 0.483,
        "recursive_rejection": 0.76,
        "recursive_rejection_without_replacement": 0.82,
    }
    expected |= {"k_seq": 0.791355, "naive_tree": 0.76, "greedy": 0.9, "optimal": 0.86}
    expected |= {"speculative_sampling": 0.7}
    assert {name: round(rules[name], 6) for name in expected} == expected
    ways = ("iid", "without_replacement", "greedy")
    assert [round(best[way], 6) for way in ways] == [0.86, 0.985714, 0.9]
    assert [round(value, 6) for value in best["mixed"]] == [0.86, 0.9, 0.5]
    assert (found["candidates"], found["vocabulary"]) == (2, 3)
    assert found["drafting"]["recursive_rejection_without_replacement"] == "without_replacement"
    assert found["gap"]["recursive_rejection"]["iid"] == pytest.approx(0.1)
    found = report(*A, "--candidates", 3)
    assert round(found["optimum"]["iid"], 6) == 0.988
    assert len(found["optimum"]["mixed"]) == 4
    shown = run("acceptance", *A, "--candidates", 2).stdout
    rows = [line.split() for line in shown.splitlines()]
    assert any(row[-3::2] == ["0.791355", "0.068645"] for row in rows if "k_seq" in row)
    assert "d = 0..K: 0.860000 0.900000 0.500000" in shown


def test_acceptance_one_condition(report, run):
    found = report(*A, "--candidates", 2)["acceptance_one"]
    assert found == {"holds": False, "smallest_num_drafts": 4, "tightest_set": [1, 2]}
    none = report("--target-probs", "0.5,0.5,0", "--draft-probs", "0.4,0.4,0.2", "--candidates", 2)
    found = none["acceptance_one"]
    assert found == {"holds": False, "smallest_num_drafts": None, "tightest_set": [2]}
    assert none["optimum"]["iid"] < 1
    near = ("--target-probs", "0.5,0.3,0.2", "--draft-probs", "0.3,0.3,0.4")
    assert report(*near, "--candidates", 2)["acceptance_one"]["holds"] is True
    line = run("acceptance", *A, "--candidates", 2).stdout.splitlines()
    assert (
        "acceptance one, i.i.d. drafts: does not hold (from 4 drafts on; tightest set of tokens: "
        "1, 2)" in line
    )


def test_laws_from_files(report, tmp_path):
    np.save(tmp_path / "p.npy", np.array([0.5, 0.3, 0.2]))
    (tmp_path / "q.json").write_text("[0.2, 0.3, 0.5]")
    (tmp_path / "q.txt").write_text("0.2\n0.3\n0.5\n")
    inline = report(*A, "--candidates", 1)
    for name in ("q.json", "q.txt"):
        files = ("--target-probs", f"@{tmp_path / 'p.npy'}", "--draft-probs", f"@{tmp_path / name}")
        assert report(*files, "--candidates", 1) == inline


def test_large_vocabulary_goes_through_closed_forms(report, tmp_path):
    generator = np.random.default_rng(0)
    for name in ("p", "q"):
        law = generator.dirichlet(np.full(200, 0.1))
        np.save(tmp_path / f"{name}.npy", law)
    files = f"--target-probs @{tmp_path}/p.npy --draft-probs @{tmp_path}/q.npy"
    found = report(*files.split(), "--candidates", 2)
    assert found["how"]["recursive_rejection"]["iid"] == "closed form"
    assert found["how"]["canonical"]["iid"].startswith("no closed form")
    assert found["rules"]["canonical"] is None
    best = found["optimum"]["without_replacement"]
    assert found["rules"]["k_seq"] <= found["rules"]["optimal"] <= best


BAD_INPUT = {
    "--target-probs 0.5,0.3": "masses must sum to 1; got 0.8 over 2 tokens; normalise where",
    "--draft-probs 0.5,0.3,0.3": "masses must be non-negative and sum to at most 1; got",
    "--target-probs 1.2,-0.2,0": "masses must be non-negative and sum to at most 1; got smallest",
    "--draft-probs nan,0.5,0.5": "sum to at most 1; got smallest nan",
    "--draft-probs 0.5,0.5": "target over (3,) and draft law over (2,) tokens; both must cover one",
    "--target-probs 0.5;0.5": "--target-probs: no list of numbers, such as 0.5,0.3,0.2: could not",
    "--target-probs ": "--target-probs: no list of numbers",
    "--target-probs @nowhere.npy": "--target-probs: cannot read 'nowhere.npy'",
    "--target-probs @nowhere.json": "cannot read 'nowhere.json'",
    "--candidates 0": "--candidates must lie in 1..32; got 0",
    "--candidates 33": "--candidates must lie in 1..32; got 33",
    "--target-probs @p.npy": "--target-probs: expected one list of probabilities; got shape (2, 2)",
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.items())
def test_bad_input(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    np.save("p.npy", np.eye(2))
    options = dict(zip(A[::2], A[1::2], strict=True)) | {"--candidates": "2"}
    options |= [arguments.split(" ")]
    result = run("acceptance", *(word for option in options.items() for word in option))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    half = run("acceptance", "--candidates", 2)
    assert "give --target-probs, --draft-probs and --candidates, or a RULE" in half.stderr


@dataclass(frozen=True, slots=True)
class KeepsFirst(NodeRule):
    """Accepts the first candidate whatever the target says."""

    accepts = frozenset({Iid})

    def emit(self, target_law, proposal, candidates, draws):
        return candidates[0]


@dataclass(frozen=True, slots=True)
class KeepsFirstOpenly(KeepsFirst):
    """The same, declared as lossy."""

    is_lossless = False


@dataclass(frozen=True, slots=True)
class OneDraw(NodeRule):
    """The rule of the documentation."""

    accepts = frozenset({Iid})
    max_width = 1

    def keeps(self, ratio):
        return min(1.0, ratio)

    def emit(self, target_law, proposal, candidates, draws):
        (x,), q = candidates, proposal.law
        if draws.bernoulli(self.keeps(target_law.prob(x) / q.prob(x))):
            return x
        return draws.categorical(residual(target_law, q))


@dataclass(frozen=True, slots=True)
class NoProbability(OneDraw):
    """Takes the ratio for a probability."""

    def keeps(self, ratio):
        return ratio


def test_a_rule_above_the_optimum_is_wrong(run, installed):
    installed(mine=KeepsFirst, honest=KeepsFirstOpenly)
    result = run("acceptance", *A, "--candidates", 2)
    assert result.exit_code == 1
    assert "mine accepts more than the optimum of lossless rules" in result.stderr
    assert "so the rule is wrong" in result.stderr
    assert "honest" not in result.stderr
    assert "ABOVE by" in result.stdout
    result = run("acceptance", *A, "--candidates", 2, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["above_the_optimum"] == ["mine"]


def test_a_rule_is_enumerated_by_name(run, installed):
    installed(mine=OneDraw, wrong=KeepsFirst, careless=NoProbability)
    result = run("acceptance", "mine")
    assert result.exit_code == 0
    assert "exact in all 1 trees" in result.stdout
    assert "no proof for other tables and trees" in result.stdout
    result = run("acceptance", "wrong")
    assert result.exit_code == 1
    assert "not exact: the text does not have the target's law" in result.stdout
    result = run("acceptance", "careless", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["exact"] is False
    assert "is no probability" in found["trees"]["chain(2, 'iid')"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimal"], "verifier 'optimal' draws positions in [0, 1] and cannot be enumerated"),
        (["blok"], "unknown verifier 'blok'; did you mean 'block'?"),
        (["recursive_rejection", "--candidates", "2"], "a RULE is enumerated on tables of its own"),
    ],
)
def test_rules_that_are_not_enumerated(run, arguments, message):
    result = run("acceptance", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr

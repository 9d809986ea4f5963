import json

import pytest

from monge.bench.arms import MongeArm
from monge.core.errors import OptionError

SHORT = "--quick --max-new-tokens 4 --repeats"


@pytest.fixture
def bench(run, tiny_paths, tmp_path):
    """`monge bench decode` on the tiny pair."""
    target, draft = tiny_paths
    common = ["--target", target, "--draft", draft, "--out", tmp_path / "out"]
    return lambda words, *more: run("bench", "decode", *common, *words.split(), *more)


def test_quick_ends_with_one_json_object(bench, tmp_path):
    result = bench("--quick --json --max-new-tokens 8 --repeats 2")
    assert result.exit_code == 0
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["speedup_over_plain"] > 0
    assert document["block_efficiency"] > 0
    assert len(document["arms"]) == 14
    assert [arm["failure"] for arm in document["arms"] if arm["failure"]] == []
    assert len(document["prompts"]) == 3
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == document
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"result.json", "rounds.jsonl.gz"}


def test_table_for_people(bench, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"question": "Why?"}\n{"turns": ["Tell me."]}\n')
    result = bench(f"{SHORT} 1 --prompts {mine} --batch 1 --batch 2 --temperature 0")
    assert result.exit_code == 0
    for text in (
        "greedy, batch 1, 2 prompts",
        "greedy, batch 2, 2 prompts",
        "decodes at most 1 sequence(s) at a time",
        "assisted, greedy, 2 draft tokens: ",
        "x plain: times the speed of transformers",
        "monge, batch 1: ",
        " times the speed of transformers, ",
    ):
        assert text in result.stdout
    assert "temperature 1" not in result.stdout
    assert "adaptive" not in result.stdout


def test_sampling_rules_stand_above_the_table(bench):
    rules = "--temperature 0.7 --top-k 9 --top-p 0.9 --min-p 0.1"
    result = bench(f"{SHORT} 1 --batch 1 --prompts-per-task 1 {rules} --json")
    assert "temperature 0.7, top-k 9, top-p 0.9, min-p 0.1, batch 1, 3 prompts" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["settings"]["top_p"] == 0.9
    assert {arm["failure"] for arm in document["arms"]} == {None}


def test_named_arms_of_a_useless_draft(bench, tmp_path):
    arm = ("--arm", "mine: controller=goodput")
    result = bench(f"{SHORT} 1 --useless-draft --mixed --temperature 0", *arm)
    assert result.exit_code == 0
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert document["models"]["draft"].endswith("output shifted")
    slowest = document["slowest_adaptive"]["arm"]
    assert slowest in {"mine", "monge", "monge ngram"}, "the default adapts too"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere.txt"], "cannot read prompts from 'nowhere.txt'"),
        (["--repeats", "0"], "must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--prompts-per-task", "0"], "(--prompts-per-task) must be at least 1"),
        (["--temperature", "nan"], "temperature must be finite and >= 0"),
        (["--top-p", "0"], "top_p must lie in (0, 1]; got 0"),
        (["--time-limit", "-1"], "the time limit must not be negative; got -1"),
        (["--seed", str(2**64)], "seed must be a whole number of at least -2^63"),
        (
            ["--max-new-tokens", "100000"],
            "+ max_new_tokens=100000 exceeds the target's context length of",
        ),
        (["--device", "foo"], "device 'foo' cannot be used"),
        (["--dtype", "float99"], "unknown dtype 'float99'; did you mean 'float64'"),
        (["--arm", "mine"], "cannot read arm 'mine'"),
        (["--target", "./nowhere"], "no folder './nowhere'"),
        (["--arm", "a: controller=goodpt"], "did you mean 'goodput'"),
        (["--named-only"], "--named-only needs arms of --arm"),
        (["--out", __file__], "cannot write results"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input(bench, arguments, message):
    result = bench("--quick", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_a_run_of_which_every_arm_failed_fails(bench, tmp_path, monkeypatch):
    def failing(*_):
        raise OptionError("no room")

    monkeypatch.setattr(MongeArm, "decode", failing)
    result = bench("--named-only --arm d: --batch 1 --max-new-tokens 2 --repeats 1")
    assert result.exit_code == 2
    assert "d: OptionError: no room" in result.stdout
    assert "error: every arm failed" in result.stderr
    assert (tmp_path / "out" / "result.json").is_file()


def test_ctrl_c(bench, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("monge.cli.bench_decode.compare", interrupted)
    assert bench("--quick").exit_code == 130

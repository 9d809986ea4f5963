"""`monge batch` as its users type it."""

import json

import pytest


@pytest.fixture
def batch(run, tiny_paths, tmp_path):
    target, draft = tiny_paths
    (tmp_path / "in.jsonl").write_text('{"question": "A", "id": 1}\n{"question": 5}\n')

    def invoke(*arguments):
        return run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--target", target, "--draft", draft, *arguments)

    return invoke


def test_rows_and_their_errors(batch, tmp_path):
    result = batch("--prompt-field", "question", "--max-new-tokens", 4, "--seed", 3)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "2 rows in" in result.stderr
    assert "seed 3" in result.stderr
    assert "1 of 2 rows could not be decoded" in result.stderr
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["id"], len(first["token_ids"])) == (1, 4)
    assert "'question' must be text" in second["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", 2], "need --ray"),
        (["--drafter", "nonsense"], "unknown drafter 'nonsense'"),
        (["--shard-rows", 0], "at least 1 row"),
    ],
)
def test_options_that_cannot_be(batch, arguments, message):
    result = batch(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr

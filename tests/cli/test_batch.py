"""`monge batch` as its users type it."""

import json

import pytest


@pytest.fixture
def batch(run, tiny_paths, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "A", "id": 1}\n{"question": 5}\n')
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    models = ("--target", tiny_paths[0], "--draft", tiny_paths[1], "--prompt-field", "question")
    return lambda *arguments: run("batch", *files, *models, *arguments)


def test_rows_and_their_errors(batch, tmp_path):
    result = batch("--max-new-tokens", 4, "--seed", 3)
    assert result.exit_code == 1, "a pipeline is to notice"
    assert result.stdout == ""
    assert "2 rows in" in result.stderr
    assert "1 of 2 rows could not be decoded" in result.stderr
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["id"], first["seed"], len(first["token_ids"])) == (1, 3, 4)
    assert "'question' must be text" in second["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", 2], "need --ray"),
        (["--drafter", "nonsense"], "unknown drafter 'nonsense'"),
        (["--shard-rows", 0], "at least 1 row"),
        (["--max-new-tokens", -1], "max_new_tokens must be at least 1; got -1"),
        (["--max-new-tokens", 1 << 40], "none of 2 rows could be decoded, so nothing was written"),
        (["--stop", ""], "a stop string is empty"),
        (["--prompt-field", "q"], "'q' must be text or a list of token ids; got nothing"),
        (["--seed", 1 << 64], "seed must be a whole number of at least -2^63"),
    ],
)
def test_options_that_cannot_be(batch, tmp_path, arguments, message):
    result = batch(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["in.jsonl"], "it stands in the way of the right command"


def test_a_grammar_of_the_command_and_one_of_a_row(run, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "A"}\n{"prompt": "A", "grammar": "choice:red|blue"}\n')
    result = run("batch", source, output, "--seed", 1, "--grammar", "choice:yes|no")
    assert result.exit_code == 0, result.stderr
    first, second = (json.loads(line)["text"] for line in output.read_text().splitlines())
    assert first in {"yes", "no"}
    assert second in {"red", "blue"}

"""`monge generate --certificate` and `monge certify`, on the tiny pair."""

import json

import pytest

pytestmark = pytest.mark.usefixtures("unchecked_types")


@pytest.fixture(scope="module")
def record(tiny_paths, tmp_path_factory):
    """A record of a sampled run."""
    from typer.testing import CliRunner

    from monge.cli.app import app

    target, draft = tiny_paths
    path = tmp_path_factory.mktemp("records") / "run.json"
    command = f"generate Once --target {target} --draft {draft} --tree chain(2) --verifier block"
    settings = f"--temperature 0.7 --top-k 6 --seed 1 --max-new-tokens 5 --certificate {path}"
    result = CliRunner().invoke(app, f"{command} {settings}".split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"monge certify {path}" in result.stderr
    return path


@pytest.fixture
def certify(run, tiny_paths):
    target, draft = tiny_paths
    return lambda *arguments: run("certify", *arguments, "--target", target, "--draft", draft)


def test_an_exact_run(record, certify):
    result = certify(record, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["verdict"]) == (0, "exact"), report
    assert report["num_tokens"] == 5
    assert report["law_error"] < 1e-12
    assert report["drafts"]["laws"] > 0


def test_without_the_draft_model(record, run, tiny_paths):
    result = run("certify", record, "--target", tiny_paths[0], "--nodes", 1)
    assert result.exit_code == 0
    assert "taken as declared" in result.stdout


def test_a_changed_byte(record, certify, tmp_path):
    text, changed = record.read_text(), tmp_path / "changed.json"
    changed.write_text(text.replace('"next_kind": "', '"next_kind": "x', 1))
    result = certify(changed)
    assert result.exit_code == 1
    assert "request 1, round 1: the seal does not fit" in result.stdout
    assert "not exact" in result.stdout


def test_bad_input(record, certify, run, tiny_paths, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text(record.read_text()[:1000])
    for result, message in (
        (certify(tmp_path / "none.json"), "no such file"),
        (certify(cut), "cut off"),
        (run("certify", record), "give --target"),
        (run("certify", record, "--target", tiny_paths[1]), "another target"),
    ):
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())

"""`monge bench peers`: what is refused, and what a run without engines reports."""

from typer.testing import CliRunner

from monge.cli.app import app


def test_an_engine_that_does_not_exist():
    result = CliRunner().invoke(app, ["bench", "peers", "--peer", "tgi"])
    assert result.exit_code != 0
    assert "unknown peer 'tgi'" in result.output


def test_names_are_no_folders():
    result = CliRunner().invoke(app, ["bench", "peers", "--target", "no/such"])
    assert result.exit_code != 0
    assert "peers need the folder of a checkpoint" in " ".join(result.output.split())


def test_engines_that_are_not_installed_are_reported(tmp_path):
    asked = ["--peer", "vllm", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--quick"]
    result = CliRunner().invoke(app, ["bench", "peers", *asked])
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "vllm is not installed in" in shown
    assert "vllm draft is not asked to sample" in shown
    assert (tmp_path / "out" / "peers.json").is_file()

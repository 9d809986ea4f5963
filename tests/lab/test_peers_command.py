"""`python -m lab.peers`: what is refused, and what a run without engines reports."""


def test_an_engine_that_does_not_exist(lab):
    result = lab("peers", "--peer", "tgi")
    assert result.exit_code != 0
    assert "unknown peer 'tgi'" in result.output


def test_names_are_no_folders(lab):
    result = lab("peers", "--target", "no/such")
    assert result.exit_code != 0
    assert "peers need the folder of a checkpoint" in " ".join(result.output.split())


def test_engines_that_are_not_installed_are_reported(lab, tmp_path):
    asked = ["--peer", "vllm", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--quick"]
    result = lab("peers", *asked)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "vllm is not installed in" in shown
    assert "vllm draft is not asked to sample" in shown
    assert (tmp_path / "out" / "peers.json").is_file()

"""`python -m lab.grow`: a folder that loads, and what it prints."""

from monge.loading.networks import load_network


def test_writes_a_folder(lab, tmp_path):
    result = lab("grow", str(tmp_path / "large"), "--params", "40M")
    assert result.exit_code == 0, result.output
    assert "parameters in" in result.output
    assert f"monge bench decode --target {tmp_path / 'large'} --draft" in result.output.replace(
        "\n", " "
    )
    assert load_network(tmp_path / "large").config.hidden_size == 256


def test_a_size_that_is_none(lab, tmp_path):
    result = lab("grow", str(tmp_path / "large"), "--params", "large")
    assert result.exit_code != 0
    assert "cannot read the size 'large'" in result.output
    assert not (tmp_path / "large").exists()

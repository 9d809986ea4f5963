"""`python -m lab.shape` as a user types it."""

import json

from tests.lab.test_shape_report import PROMPTS, TINY


def test_page_and_json_and_what_is_refused(lab, tiny_paths, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.shape.__main__.QUICK", TINY)
    for prompt in PROMPTS:
        (tmp_path / f"{prompt.task}.txt").write_text(prompt.text + "\n")
    data = [option for prompt in PROMPTS for option in ("--data", tmp_path / f"{prompt.task}.txt")]
    arguments = ("shape", "--quick", "--target", tiny_paths[0], "--out", tmp_path / "out", *data)
    result = lab(*arguments)
    assert result.exit_code == 0, result.stderr
    assert str(tmp_path / "out" / "report.html") in result.stdout
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["about"]["head"] == "ridge"
    assert set(found["about"]["tokens_by_task"]) == {"sums", "tales"}
    few = lab(*arguments[:-6], "--out", tmp_path / "few", *data, "--rows", 3)
    assert few.exit_code == 2
    assert "3 rows of text are too few" in few.stderr

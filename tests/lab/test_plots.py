"""`python -m lab.plots`: what commands wrote, drawn."""

import json

import pytest

RECORD = {
    "arm": "monge",
    "family": "monge",
    "failure": None,
    "temperature": 0.0,
    "batch_size": 1,
    "tokens_per_s": {"median": 3.0, "low": 2.0, "high": 4.0},
    "acceptance_by_depth": [0.9, 0.5],
    "seconds_per_round": dict.fromkeys(
        ("draft_s", "score_s", "verify_s", "commit_s", "other_s"), 1
    ),
}
FAILED = {"arm": "other", "failure": "RuntimeError: broken"}
ROUND = {"at": 0, "depth": 2, "nodes": 3, "accepted": 1, "price": 40.0}


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (
            {"arms": [RECORD, FAILED]},
            {"tokens_per_s.png", "round_time.png", "acceptance_by_depth.png"},
        ),
        ({"arms": [FAILED]}, set()),
        ({"completions": [{"rounds": [ROUND, ROUND | {"price": None}]}]}, {"result.png"}),
    ],
    ids=["decode", "nothing measured", "trace"],
)
def test_plots(lab, tmp_path, document, names):
    (tmp_path / "result.json").write_text(json.dumps(document))
    assert lab("plots", tmp_path / "result.json", "--out", tmp_path / "drawn").exit_code == 0
    files = list((tmp_path / "drawn").iterdir())
    assert {file.name for file in files} == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_another_file_is_refused(lab, tmp_path):
    (tmp_path / "some.json").write_text("[]")
    result = lab("plots", tmp_path / "some.json")
    assert result.exit_code == 2
    assert "is neither" in result.stderr

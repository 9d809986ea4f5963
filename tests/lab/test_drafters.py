import json

from lab.drafters.table import OTHERS, VARIANTS
from tests.heads.readers.published import eagle3

FEW = "--tokens 1800 --num-prompts 1 --max-new-tokens 4 --repeats 1"


def test_drafters_are_compared_on_equal_terms(lab, tiny_paths, tmp_path):
    head = eagle3(32, 4096).write(tmp_path / "my-eagle3")
    (tmp_path / "mine.txt").write_text("One and two.\n")
    target, draft = tiny_paths
    asked = f"--target {target} --draft {draft} --head {head} --data {tmp_path}/mine.txt {FEW}"
    result = lab("drafters", asked, f"--clock cpu --out {tmp_path}/out --json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "drafters.json").read_text()) == document
    assert (document["settings"]["clock"], document["backend"]) == ("cpu", "eager")
    lines = document["drafters"]
    assert len(lines) == 2 * (len(OTHERS) + 1 + len(VARIANTS) + 1)
    assert all(line["nodes_per_round"] <= 16 for line in lines)
    assert all(1.0 <= line["block_efficiency"] <= 4.0 for line in lines)
    plain = [line for line in lines if line["name"] == "none"]
    assert all(line["block_efficiency"] == line["over_plain"]["median"] == 1.0 for line in plain)
    fitted = [line for line in lines if line["name"].startswith("shape, training-free")]
    assert all(line["training_s"] > 0 and line["training_tokens"] > 0 for line in fitted)
    assert "my-eagle3" in result.stdout

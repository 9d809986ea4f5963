"""`python -m lab.heads`: every alignment of a SHAPE head, and the loop with every head."""

import json

from lab.heads.measure import ARMS
from monge.loading.networks import load_network
from monge.training.own_text import TextSettings, write_own_text
from monge.training.shape import HeadSettings, make_head


def test_a_head_is_measured(lab, tiny_paths, tmp_path):
    network, prompts = load_network(tiny_paths[0]), [(1, 2, 3), (4, 5, 6)]
    settings = TextSettings(num_tokens=960, row_length=64, prompt_length=3)
    rows = write_own_text(network, prompts, settings, tmp_path / "text")
    make_head(network, rows, HeadSettings(preset="ridge", num_steps=1), tmp_path / "head")
    (tmp_path / "data.txt").write_text("once upon a time\nthe history of mathematics\n")
    files = f"--head {tmp_path}/head --data {tmp_path}/data.txt"
    asked = f"--target {tiny_paths[0]} {files} --tokens 1800"
    measured = lab("heads", asked, f"--max-new-tokens 4 --out {tmp_path}/out --json")
    assert measured.exit_code == 0, measured.output
    document = json.loads(measured.stdout.splitlines()[-1])
    assert [arm["arm"] for arm in document["arms"]] == list(ARMS)
    assert all(loop["block_efficiency"] >= 1.0 for loop in document["loops"])

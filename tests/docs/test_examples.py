"""The examples run, and print what they promise."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import torch

from monge.engine.loading import load_network, load_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart():
    assert "the same greedy tokens: True" in run("quickstart.py")


def test_prove_a_rule():
    right, wrong = run("prove_a_rule.py").splitlines()
    assert float(right.rsplit(" ", 1)[1]) < 1e-12
    assert float(wrong.rsplit(" ", 1)[1]) > 1e-3


def test_compare_draft_laws():
    head, _, *rows = run("compare_draft_laws.py", "3").splitlines()
    assert len(rows) == 8
    best = head.split(" | ").index("i.i.d.")
    assert all(0.0 < float(row.strip("| ").split(" | ")[best]) <= 1.0 for row in rows)


def test_second_target(tmp_path):
    dim, hidden, layers, heads, kv_heads, vocab, length = sizes = (8, 12, 2, 2, 1, 262, 32)
    per_layer = 2 * dim + dim * dim * 2 + 2 * dim * (dim * kv_heads // heads) + 3 * dim * hidden
    numbers = [0.01 * (index % 17) for index in range(vocab * dim + layers * per_layer + dim + length * dim // heads)]
    (tmp_path / "small.bin").write_bytes(struct.pack("<7i", *sizes) + struct.pack(f"<{len(numbers)}f", *numbers))
    pieces = [*(f"<{index}>" for index in range(3)), *(f"<0x{byte:02X}>" for byte in range(256)), " ", "a", " a"]
    packed = [struct.pack("<fi", -float(index), len(piece)) + piece.encode() for index, piece in enumerate(pieces)]
    (tmp_path / "pieces.bin").write_bytes(struct.pack("<i", 6) + b"".join(packed))
    run("second_target.py", str(tmp_path / "small.bin"), str(tmp_path / "pieces.bin"), "--out", str(tmp_path / "out"))
    network, tokenizer = load_network(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    assert network.config.num_key_value_heads == kv_heads
    assert tokenizer("a")["input_ids"] == [1, 261]
    assert tokenizer.decode([261, 260]) == "aa"
    assert torch.isfinite(network(torch.tensor([[1, 261]])).logits).all()

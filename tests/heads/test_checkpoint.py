"""SHAPE heads on disk: what was saved is loaded, what is broken is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from monge.core.errors import ModelLoadError, OptionError
from monge.heads.shape.checkpoint import CONFIG, WEIGHTS, load_head, save_head
from monge.heads.shape.head import TargetSizes, make_predictor
from monge.oracle.tabular import RandomTable, TabularModel
from tests.heads.toy import random_head

VOCAB = 4


def table(vocab: int = VOCAB) -> TabularModel:
    return TabularModel(RandomTable(vocab, 0), vocab)


@pytest.mark.parametrize("kind", ["gated", "ridge"])
@pytest.mark.parametrize("alignment", ["none", "gaussian", "sinkhorn_anchors"])
@pytest.mark.parametrize("is_branched", [True, False])
def test_a_head_comes_back(tmp_path: Path, kind: str, alignment: str, is_branched: bool) -> None:
    head = random_head(table(), kind, alignment=alignment, is_branched=is_branched)
    save_head(head, tmp_path, about={"tokens": 3})
    loaded = load_head(tmp_path)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert json.loads((tmp_path / CONFIG).read_text())["about"] == {"tokens": 3}
    assert loaded.num_parameters == sum(tensor.numel() for tensor in head.state_dict().values())
    assert loaded.num_bytes == 4 * loaded.num_parameters


def test_predictors_may_be_stored_narrow_and_fitted_numbers_stay(tmp_path: Path) -> None:
    head = random_head(table(), alignment="gaussian")
    save_head(head, tmp_path, dtype=torch.bfloat16)
    stored, loaded = load_file(tmp_path / WEIGHTS), load_head(tmp_path)
    assert stored["predictor.token"].dtype == torch.bfloat16
    assert stored["temperatures"].dtype == torch.float32
    torch.testing.assert_close(loaded.predictor.token, head.predictor.token, atol=0, rtol=1e-2)
    assert torch.equal(loaded.temperatures, head.temperatures)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_head(random_head(table()), tmp_path)
    return tmp_path


def test_broken_files_are_refused(saved: Path) -> None:
    weights = saved / WEIGHTS
    whole = weights.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"\xff" * 100):
        weights.write_bytes(broken)
        with pytest.raises(ModelLoadError, match=r"cannot read .*head\.safetensors.*fetch it agai"):
            load_head(saved)
    weights.unlink()
    with pytest.raises(ModelLoadError, match="holds no tensors"):
        load_head(saved)
    (saved / CONFIG).write_text("{")
    for folder in (saved, saved / "elsewhere"):
        with pytest.raises(ModelLoadError, match="no shape head in .*monge train shape"):
            load_head(folder)


RIDGE = {"kind": "ridge", "num_steps": 2, "is_branched": True}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperatures", None, "lacks tensor 'temperatures'"),
        ("more", torch.ones(1), "tensors that this format does not have: more"),
        ("predictor.token", torch.ones(2, 2), r"predictor.token has shape \(2, 2\)"),
        ("predictor.token", torch.full((4, 4), torch.nan), "predictor.token holds numbers that"),
        ("format", "eagle", "has format 'eagle', version 1"),
        ("version", 2, "version 2; this library reads"),
        ("predictor", {**RIDGE, "kind": "other"}, "unknown shape predictor 'other'"),
        ("predictor", {"kind": "ridge", "num_steps": 2}, "TypeError: .*'is_branched'"),
        ("predictor", {**RIDGE, "depth": 1}, "TypeError: .*'depth'"),
        ("target", {"hidden_size": 4}, "TypeError"),
        ("alignment", {"name": "gausian", "subspace": 4}, "did you mean 'gaussian'"),
        ("alignment", {"name": "gaussian", "subspace": 40}, "needs states that wide"),
    ],
)
def test_tensors_and_settings_that_make_no_head_are_named(
    saved: Path, name: str, value: object, message: str
) -> None:
    config, tensors = json.loads((saved / CONFIG).read_text()), load_file(saved / WEIGHTS)
    if name in config:
        (saved / CONFIG).write_text(json.dumps(config | {name: value}))
    else:
        kept = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(kept if value is None else kept | {name: value}, saved / WEIGHTS)
    with pytest.raises(ModelLoadError, match=message):
        load_head(saved)


def test_heads_of_another_target_are_refused() -> None:
    head, sizes = random_head(table()), r"hidden size 4, 1 layers and 4 tokens; the target has 5, 1"
    head.check(table())
    with pytest.raises(OptionError, match=sizes):
        head.check(table(5))
    head.probe.copy_(head.probe.roll(1, 1))
    with pytest.raises(OptionError, match="another target of the same sizes"):
        head.check(table())


def test_predictors_that_make_no_sense_are_refused() -> None:
    sizes = TargetSizes.of(table())
    with pytest.raises(OptionError, match="num_steps must be at least 1"):
        make_predictor("ridge", sizes, num_steps=0, is_branched=True)
    with pytest.raises(OptionError, match="width and gate_rank must be at least 1"):
        make_predictor("gated", sizes, num_steps=1, is_branched=True, width=0, gate_rank=1)

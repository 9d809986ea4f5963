"""Logs survive the disk, and whatever is wrong with one is named."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from monge.core.errors import OptionError
from monge.core.law import DenseLaw
from monge.replay.file import LogFileError, read_log, write_log
from monge.replay.log import ForeignLogError, ModelIdentity
from tests.replay.toys import logged, models

TEXT = (1, 0, 2, 2)


@pytest.fixture
def log():
    return logged(models(3)[0], TEXT)


@pytest.mark.parametrize("top", [None, 1, 2])
def test_round_trip(tmp_path, top):
    log = logged(models(3)[0], TEXT, top=top)
    found = read_log(write_log(log, tmp_path / "deep" / "run.mlog"))
    assert found.model == log.model
    assert found.rules == log.rules
    assert found.top == top
    assert found.texts[0].all_ids == log.texts[0].all_ids
    for place in range(2, 6):
        there, here = found.texts[0].logged_token(place), log.texts[0].logged_token(place)
        assert torch.equal(there.law.token_ids, here.law.token_ids)
        assert torch.equal(there.law.probs, here.law.probs)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.mlog"]


def test_who_may_read_a_log_is_up_to_the_system(log, tmp_path):
    (tmp_path / "other").touch()
    written = write_log(log, tmp_path / "run.mlog")
    assert written.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_compact_law_keeps_the_committed_token_exactly_and_the_rest_as_one(log):
    compact = logged(models(3)[0], TEXT, top=1)
    for place in range(2, 6):
        full, known = log.texts[0].logged_token(place), compact.texts[0].logged_token(place)
        assert known.law.prob(known.token) == pytest.approx(full.law.prob(known.token), abs=1e-15)
        assert known.other == 3
        assert float(known.law.probs.sum()) == pytest.approx(1.0)
        even = DenseLaw(torch.tensor([1 / 3] * 3, dtype=torch.float64))
        assert known.law.probs.numel() == 3 or not known.covers(even)


def rewritten(path, edit):
    """A file whose header was edited by somebody who knows how to make the digest."""
    from monge.replay.file import _digest

    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["monge_log"])
    edit(header, tensors)
    metadata["monge_log"] = json.dumps(header)
    metadata["digest"] = _digest(metadata["monge_log"], tensors)
    save_file(tensors, path, metadata=metadata)


def test_truncated_and_flipped(log, tmp_path):
    path = write_log(log, tmp_path / "run.mlog")
    whole = path.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = rf"run\.mlog: truncated or not a log: its {size} bytes.*make the log again"
        with pytest.raises(LogFileError, match=message):
            read_log(path)
    bad = bytearray(whole)
    bad[-3] ^= 1
    path.write_bytes(bad)
    message = r"run\.mlog: corrupted: field 'digest' expects \w+, the contents give \w+; copy"
    with pytest.raises(LogFileError, match=message):
        read_log(path)


def test_no_log_at_all(tmp_path):
    message = r"nowhere\.mlog: no such file; make a log with `monge replay record"
    with pytest.raises(LogFileError, match=message):
        read_log(tmp_path / "nowhere.mlog")
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(LogFileError, match=r"field 'monge_log' is missing: not a log"):
        read_log(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda header, tensors: header.update(version=9),
            r"field 'version': got 9, this release reads 1",
        ),
        (lambda header, tensors: tensors.pop("probs/0"), r"header: KeyError: 'probs/0'"),
        (lambda header, tensors: header.pop("rules"), r"header: KeyError: 'rules'"),
        (
            lambda header, tensors: header["rules"].update(top_p=7),
            r"header: OptionError: top_p must lie in",
        ),
    ],
)
def test_inconsistent_contents(log, tmp_path, edit, message):
    path = write_log(log, tmp_path / "run.mlog")
    rewritten(path, edit)
    with pytest.raises(LogFileError, match=message):
        read_log(path)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"vocab_size": 4}, "vocabulary size 3; the draft model 'draft' has 4"),
        ({"tokenizer": "cc"}, "tokenizer bb; the draft model 'draft' has cc"),
        ({"network": "dd"}, "network aa; the draft model 'draft' has dd"),
    ],
)
def test_another_models_log(log, other, what):
    mine = {"vocab_size": 3, "network": "aa", "tokenizer": "bb"}
    named = replace(log, model=ModelIdentity(name="mine", **mine))
    named.check_model(ModelIdentity(name="draft", vocab_size=3, tokenizer="bb"), "the draft model")
    with pytest.raises(ForeignLogError, match=f"made with 'mine', {what}; log the texts again"):
        named.check_model(
            ModelIdentity(name="draft", **{"vocab_size": 3} | other), "the draft model"
        )


def test_what_cannot_be_written(log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot write the log to"):
        write_log(log, tmp_path / "file" / "run.mlog")
    with pytest.raises(OptionError, match="at least one text"):
        replace(log, texts=())


@pytest.mark.parametrize("top", [0, 3, 4])
def test_impossible_sizes(log, top):
    message = rf"need complete laws and 1 <= top < 3 tokens; got top={top}"
    with pytest.raises(OptionError, match=message):
        log.texts[0].masses.compact(top, TEXT)

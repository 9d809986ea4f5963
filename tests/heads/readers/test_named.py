"""Heads that ship with the package are found by name wherever a head's folder is taken."""

from pathlib import Path

from monge.draft.by_name import drafter_of, head_drafter, read_head
from monge.heads.readers.eagle3 import Eagle3Head


def test_a_named_head_is_read():
    assert drafter_of("smollm2-head", "smollm2") == "head"
    head = read_head("smollm2-head", "smollm2")
    assert isinstance(head, Eagle3Head)
    assert head.draft_ids is not None


def test_a_path_of_that_name_is_a_path():
    assert drafter_of(Path("smollm2-head"), None) is None


def test_a_drafter_has_its_folder():
    text = head_drafter("smollm2-head", "smollm2")
    assert text is not None
    assert text.startswith("head(head=")
    assert "smollm2_head" in text

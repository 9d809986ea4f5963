"""The proposer for vLLM, against a host that is played: rows come, move, wait and leave."""

from types import SimpleNamespace

import numpy as np
import pytest

from monge.core.errors import MongeError, OptionError
from monge.plugins.vllm import Proposer
from monge.plugins.vllm.proposer import PATIENCE

MAX_LENGTH = 64


def proposer(num_draft_tokens=6, **settings):
    return Proposer(
        SimpleNamespace(
            additional_config={"monge": settings} if settings else {},
            speculative_config=SimpleNamespace(num_speculative_tokens=num_draft_tokens),
            model_config=SimpleNamespace(max_model_len=MAX_LENGTH),
        )
    )


def cycle(place):
    return (7, 8, 9, 10, 11)[place % 5]


CYCLE = [cycle(place) for place in range(MAX_LENGTH)]


class Host:
    """What vLLM does around the hook: a target with a text of its own accepts drafts that agree."""

    def __init__(self, texts, own=cycle, **settings):
        self.own, self.proposer = own, proposer(**settings)
        self.texts = {name: list(text) for name, text in texts.items()}
        self.drafts = {name: [] for name in texts}

    def step(self, names, *, waiting=()):
        """One step for some rows in this order; those that wait commit nothing."""
        sampled = [[] if name in waiting else self._commit(name) for name in names]
        ids = np.zeros((len(names), MAX_LENGTH), dtype=np.int32)
        for row, name in enumerate(names):
            ids[row, : len(self.texts[name])] = self.texts[name]
        lengths = np.array([len(self.texts[name]) for name in names])
        proposed = self.proposer.propose(sampled, lengths, ids, slot_mappings=None)
        self.drafts.update(zip(names, proposed, strict=True))
        return sampled, proposed

    def pass_time(self):
        """Steps without rows, until all are forgotten."""
        for _ in range(PATIENCE + 1):
            self.proposer.propose([], np.zeros(0), np.zeros((0, MAX_LENGTH), dtype=np.int32))

    @property
    def rows(self):
        return [row for rows in self.proposer._rows.values() for row in rows]

    def _commit(self, name):
        text, draft = self.texts[name], self.drafts[name]
        new = []
        for token in draft:
            if token != self.own(len(text) + len(new)):
                break
            new.append(token)
        new.append(self.own(len(text) + len(new)))
        text += new
        return new


def test_repetition_is_drafted_and_its_own_window_grows():
    one = Host({"a": CYCLE[:12], "b": [30, 31, 32, 33]})
    first = one.step(["a", "b"])[1]
    assert first[1] == []
    lengths = [len(first[0]), *(len(one.step(["a"])[1][0]) for _ in range(5))]
    assert lengths[0] == 4, "the first window of the controller"
    assert lengths[-1] == 6, "never more than the host verifies"
    assert all(
        token == cycle(len(one.texts["a"]) + place) for place, token in enumerate(one.drafts["a"])
    )


def test_the_window_shrinks_where_drafts_are_rejected():
    rising = Host(
        {"a": [1, 2, 3, 1, 2, 3, 1, 2, 3]},
        lambda place: (1, 2, 3)[place % 3] if place < 10 else 20 + place % 30,
    )
    lengths = [len(rising.step(["a"])[1][0]) for _ in range(2)]
    assert lengths[0] == 4
    (row,) = rising.rows
    assert row.controller_state == 3


def test_rows_are_found_again_wherever_they_are():
    texts = {"a": CYCLE[:11], "b": CYCLE[:15]}
    alone = {name: Host({name: text}) for name, text in texts.items()}
    both = Host(texts)
    for order in (["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]):
        both.step(order)
        for name, one in alone.items():
            one.step([name])
            assert one.drafts[name] == both.drafts[name]
            assert one.texts[name] == both.texts[name]
    assert len(both.rows) == 2


def test_a_row_that_waits_is_remembered_and_one_that_ends_is_not():
    one = Host({"a": CYCLE[:12], "b": [30, 31]})
    one.step(["a", "b"])
    _, proposed = one.step(["a", "b"], waiting=["a"])
    assert proposed[0] == []
    one.drafts["a"] = []
    one.step(["a"])
    (row,) = [row for row in one.rows if row.context.num_prompt_tokens == 13]
    assert row.controller_state == 3, "the host gave up what was drafted before the row waited"
    one.pass_time()
    assert not one.rows


def test_equal_texts_have_rows_of_their_own():
    text = CYCLE[:12]
    one = Host({"a": text, "b": text})
    for _ in range(3):
        one.step(["a", "b"])
        assert one.drafts["a"] == one.drafts["b"]
    assert len(one.rows) == 2


@pytest.mark.parametrize(
    ("length", "most"), [(MAX_LENGTH - 4, 2), (MAX_LENGTH - 2, 0), (MAX_LENGTH - 1, 0)]
)
def test_the_models_length_is_kept(length, most):
    one = Host({"a": CYCLE[:length]})
    assert len(one.step(["a"])[1][0]) == most


@pytest.mark.parametrize(
    "drafter", ["ngram", "suffix(width=1)", "pool('ngram', 'suffix(width=1)')", "none"]
)
@pytest.mark.parametrize("controller", ["fixed", "fsm", "cached_fsm"])
def test_parts_by_name(drafter, controller):
    one = Host({"a": CYCLE[:12], "b": [3, 4, 5]}, drafter=drafter, controller=controller)
    for _ in range(4):
        one.step(["a", "b"])
    assert one.texts["a"] == CYCLE[: len(one.texts["a"])]
    assert (len(one.drafts["a"]) > 0) == (drafter != "none")


def test_what_ended_helps_others_if_asked_for():
    story = [40, 41, 42, 43, 44, 45, 46, 47]
    one = Host({"a": story[:-1]}, lambda place: 47, drafter="suffix(width=1, max_history=1000)")
    one.step(["a"])
    one.pass_time()
    one.texts["b"], one.drafts["b"] = [9, 40, 41], []
    one.own = lambda place: 42
    assert one.step(["b"])[1][0][:3] == [43, 44, 45]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "suffix"}, r"single chains; make it a chain, as in suffix\(width=1\)"),
        ({"drafter": "model"}, "'model' needs a network"),
        ({"drafter": "pool('ngram', 'head')"}, "'head' needs a network"),
        ({"drafter": "sufix(width=1)"}, "did you mean 'suffix'"),
        ({"controller": "goodput"}, "reads clocks"),
        ({"controler": "fsm"}, "did you mean 'controller'"),
        ({"drafter": 3}, "must hold texts"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(OptionError, match=message):
        proposer(**settings)


def test_a_host_that_passes_other_texts_is_refused():
    with pytest.raises(MongeError, match="does not end with the tokens that it committed"):
        proposer().propose([[5]], np.array([3]), np.array([[1, 2, 3, 5]], dtype=np.int32))

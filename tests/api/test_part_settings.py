"""Settings of parts that a user writes: of the declared type, given once, and refused by name."""

import dataclasses
import re
from typing import Literal

import pytest

from monge.control.registry import CONTROLLERS
from monge.core.errors import MongeError, OptionError
from monge.core.registry import Registry
from monge.draft.registry import DRAFTERS
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.draft.tree.registry import TREES
from monge.verify.registry import VERIFIERS


@pytest.mark.parametrize(
    ("room", "text", "message"),
    [
        (TREES, "chain('a')", "tree 'chain': depth must be int, such as 3; got 'a'"),
        (TREES, "chain(2.5)", "depth must be int, such as 3; got 2.5"),
        (TREES, "chain(True)", "depth must be int, such as 3; got True"),
        (TREES, "fixed_width(3)", "must be tuple[int, ...], such as (3, 2, 1, 1); got 3"),
        (DRAFTERS, "ngram(max_ngram=2.5)", "'ngram': max_ngram must be int, such as 16; got 2.5"),
        (DRAFTERS, "head(3)", "head must be PublishedHead | str | Path | None; got 3"),
        (CONTROLLERS, "fsm(first='x')", "controller 'fsm': first must be int, such as 4; got 'x'"),
        (CONTROLLERS, "cached_fsm(machine=(4, 1))", "such as (4, 1, 1, 1, 8); got (4, 1)"),
        (VERIFIERS, "layer(inner=3)", "inner must be FlowRule | str | None; got 3"),
        (TREES, "chain(depth=2, depth=3)", "tree 'chain': depth is given twice"),
        (TREES, "chain({[]: 1})", "cannot read tree"),
        (TREES, "chain(1, 'iid', 3)", "takes at most 2 settings; got 3"),
        # The engine provides these.
        (DRAFTERS, "shape(tree='chain')", "unknown option of drafter 'shape': 'tree'"),
    ],
)
def test_wrong_settings_are_refused(room, text, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        room.parse(text)


def test_options_of_the_engine_are_no_settings():
    assert list(DRAFTERS.settings("model")) == ["top_k"]
    assert list(DRAFTERS.settings("head")) == ["head", "top_k"]
    assert "target" in DRAFTERS.options("head")


def test_values_of_the_declared_type_are_kept():
    assert TREES.parse("fixed_width([2, 1])") == FixedWidth((2, 1))
    assert TREES.make("chain", depth=2) == Chain(2)
    assert CONTROLLERS.parse("cached_fsm(rate=1)") == CONTROLLERS.make("cached_fsm", rate=1)
    assert CONTROLLERS.parse("fixed(max_depth=None)") == CONTROLLERS.make("fixed")


@dataclasses.dataclass(frozen=True)
class Fragile:
    """Refuses its settings in Python's own words."""

    way: Literal["here", 2] = "here"
    size: int = 1

    def __post_init__(self) -> None:
        if self.size > 2:
            raise AttributeError("no such size")
        if self.size > 1:
            raise MongeError("too large")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fragile(size=3)", "^toy 'fragile' cannot be made with size=3: no such size"),
        ("fragile(size=2)", "^too large$"),
        ("fragile('there')", r"way must be 'here' \| 2, such as 'here'; got 'there'"),
    ],
)
def test_errors_of_a_part_name_part_setting_and_value(text, message):
    room = Registry("toy", {"fragile": Fragile})
    with pytest.raises(MongeError, match=message):
        room.parse(text)
    assert room.parse("fragile(2)") == Fragile(2)

"""Parts as a user gives them, objects or texts: settings of the declared type, given once, and refused by name."""

import dataclasses
import pickle
import re
from typing import Literal

import pytest

from monge.api import make_components
from monge.control.fixed import Fixed
from monge.control.hedge import Hedge
from monge.control.registry import CONTROLLERS
from monge.core.errors import MongeError, OptionError
from monge.core.registry import Registry
from monge.draft.ensemble import Ensemble
from monge.draft.model import Model
from monge.draft.ngram import Ngram
from monge.draft.pool import Pool
from monge.draft.registry import DRAFTERS
from monge.draft.suffix import Suffix
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.draft.tree.registry import TREES
from monge.engine.decoder import Decoder
from monge.verify.block import Block
from monge.verify.layer import Layer
from monge.verify.optimal import Optimal
from monge.verify.registry import VERIFIERS
from tests.kit.tables import table, table_decoder


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
        (TREES, "chain(four)", "tree 'chain': depth must be int, such as 3; got 'four'"),
        (DRAFTERS, "model(tree=chian)", "unknown tree 'chian'; did you mean 'chain'"),
        (DRAFTERS, "model(tree=3)", "tree: expected a tree or its name; got 3 of type int"),
        # The engine provides these.
        (DRAFTERS, "shape(target='chain')", "unknown option of drafter 'shape': 'target'"),
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


ROOMS = {"verifier": VERIFIERS, "drafter": DRAFTERS, "tree": TREES, "controller": CONTROLLERS}
WRITTEN = [
    (VERIFIERS, "layer(inner='k_seq')"),
    (DRAFTERS, "ngram(max_ngram=4, min_ngram=2)"),
    (DRAFTERS, "head(head='a folder', tree=chain(depth=9))"),
    (DRAFTERS, "pool(ngram(max_ngram=5), ngram(max_ngram=2), model(top_k=3), min_nodes=2)"),
    (TREES, "fixed_width(widths=(4, 2), children='mixed(num_fixed=1)')"),
    (CONTROLLERS, "hedge(inner=fixed(max_depth=2), keep=0.5)"),
]


@pytest.mark.parametrize(
    ("room", "text"),
    [
        *WRITTEN,
        *((room, name) for room in ROOMS.values() for name in room if name != "pool"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_a_part_is_shown_as_the_text_that_gives_it(room, text):
    part = room.of(text)
    assert room.of(repr(part)) == part
    assert repr(pickle.loads(pickle.dumps(part))) == repr(part)
    if "(" in text and "inner" not in text:
        assert repr(part) == text
    assert room.of(part) is part


def test_parts_inside_parts_need_no_quotation_marks():
    bare = DRAFTERS.parse("pool(ngram(min_ngram=2), model(tree=chain(4, top)))")
    assert bare == DRAFTERS.parse("pool('ngram(min_ngram=2)', model(tree='chain(4, \"top\")'))")
    assert bare == Pool(Ngram(min_ngram=2), Model(tree=Chain(4, "top")))
    assert list(bare.drafters) == ["ngram", "model"]
    assert CONTROLLERS.parse("hedge(fixed(2))") == CONTROLLERS.parse("hedge('fixed(2)')")
    assert repr(Hedge(inner=Fixed(max_depth=2))) == "hedge(inner=fixed(max_depth=2))"


OBJECTS = [
    (0, {"drafter": Ngram(min_ngram=2)}, {}),
    (1, {"drafter": Pool(Ngram(), Model())}, {}),
    (1, {"drafter": Model(), "tree": Chain(4)}, {}),
    (1, {"drafter": Model(tree=Chain(4))}, {"drafter": "model", "tree": "chain(4)"}),
    (2, {"drafter": Ensemble(depth=2)}, {}),
    (1, {"verifier": Block(), "controller": Fixed(max_depth=2)}, {}),
    (1, {"verifier": Layer(Optimal()), "controller": [Fixed(max_depth=2), Fixed()]}, {}),
]


@pytest.mark.parametrize(("num_drafts", "objects", "texts"), OBJECTS, ids=str)
def test_objects_decode_as_their_texts(num_drafts, objects, texts):
    drafts = [table(seed) for seed in (2, 3)][:num_drafts]
    texts = texts or {
        name: [repr(entry) for entry in part] if isinstance(part, list) else repr(part)
        for name, part in objects.items()
    }
    first, second = (Decoder(make_components(table(1), drafts, **one)) for one in (texts, objects))
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    one, other = (decoder.generate([0, 1, 0, 1], **options)[0] for decoder in (first, second))
    assert one.token_ids == other.token_ids
    assert one.stats.num_rounds == other.stats.num_rounds < 30
    assert repr(first.components.drafter) == repr(second.components.drafter)
    assert list(second.components.controllers) == list(first.components.controllers)


def test_decoders_with_the_same_object_share_nothing():
    """Each has its requests, whose numbers begin at 0, and its texts."""
    drafter = Pool(Suffix(max_history=50), Model())
    made = [Decoder(make_components(table(1), table(2), drafter=drafter)) for _ in range(2)]
    alone = Decoder(make_components(table(1), table(2), drafter=drafter))
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    streams = [decoder.stream([0, 1, 0, 1], **options) for decoder in made]
    pieces = list(zip(*streams, strict=True))
    expected = tuple(alone.stream([0, 1, 0, 1], **options))
    assert tuple(one for one, _ in pieces) == tuple(other for _, other in pieces) == expected
    assert repr(drafter) == "pool(suffix(max_history=50), model)", "what was given stays as it is"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"drafter": Ngram}, "expected a drafter or its name; got the class Ngram; "),
        ({"drafter": Ngram}, "make an object: Ngram(...)"),
        ({"drafter": Chain(2)}, "expected a drafter or its name; got chain(depth=2) of type Chain"),
        ({"tree": 3}, "tree: expected a tree or its name; got 3 of type int"),
        ({"tree": Block()}, "tree: expected a tree or its name; got block of type Block"),
        (
            {"verifier": Fixed(max_depth=2)},
            "verifier: expected a verifier or its name; got fixed(max_",
        ),
        ({"controller": Block()}, "controller: expected a controller or its name; got block of"),
        ({"controller": ["fixed", Fixed]}, "got the class Fixed; make an object: Fixed(...)"),
        (
            {"controller": [Fixed(max_depth=2), "fixed(max_depth=2)"]},
            "'fixed(max_depth=2)' is given twice",
        ),
        (
            {"drafter": Model(tree=Chain(4)), "tree": "chain"},
            "drafter 'model(tree=chain(depth=4))' has a tree already; leave out one of the two",
        ),
        (
            {"drafter": Model(model=table(3), tree=Chain(4))},
            "has a draft model (draft=...) already; leave out one of the two",
        ),
        ({"drafter": Ensemble()}, "ensemble: give at least two draft models"),
    ],
)
def test_objects_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        table_decoder(**parts)


def test_a_drafter_without_its_network_says_where_to_give_it():
    for drafter in (Model(), DRAFTERS.parse("head('a folder')")):
        with pytest.raises(OptionError, match="no network yet: give it to monge.load"):
            _ = drafter.capabilities

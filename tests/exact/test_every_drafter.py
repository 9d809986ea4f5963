"""Every registered drafter on a table that shows hidden states: at each temperature the written text has the target's law."""

from collections.abc import Callable

import pytest
from tests.draft.test_translated import foreign

from monge.api import make_parts
from monge.core.sampling_rules import SamplingRules
from monge.draft.heads import ShapeDrafter
from monge.draft.registry import DRAFTERS
from monge.draft.tree.registry import TREES
from monge.engine.parts import Parts
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from tests.draft.test_layer_skip import Layered
from tests.heads.toy import random_head

VOCAB = 3


def target() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 11), VOCAB)


def draft_model() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 23), VOCAB)


def other_draft_model() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 31), VOCAB)


def shape() -> Parts:
    model = target()
    return make_parts(model, drafter=ShapeDrafter(target=model, head=random_head(model), tree=TREES.parse("chain(2)")))


MADE: dict[str, Callable[[], Parts]] = {
    "model": lambda: make_parts(target(), draft_model(), tree="chain(2)"),
    "ensemble": lambda: make_parts(target(), [draft_model(), other_draft_model()], drafter="ensemble(depth=1)"),
    "shape": shape,
    "retokenize": lambda: make_parts(target(), foreign(), drafter="retokenize(num_own_tokens=2)"),
    "layer_skip": lambda: make_parts(Layered(), drafter="layer_skip", tree="chain(2)"),
    "cascade": lambda: make_parts(target(), draft_model(), drafter="cascade('ngram(2)', 'model')", tree="chain(2)"),
    "pool": lambda: make_parts(target(), draft_model(), drafter="pool('jacobi(2)', 'model')", tree="chain(2)"),
    "ngram": lambda: make_parts(target(), drafter="ngram(num_draft_tokens=2)"),
    "suffix": lambda: make_parts(target(), drafter="suffix(num_nodes=3, depth=2)"),
    "token_recycling": lambda: make_parts(target(), drafter="token_recycling(num_nodes=3, depth=2)"),
    "lookahead": lambda: make_parts(target(), drafter="lookahead(window=2, ngram=3)"),
    "jacobi": lambda: make_parts(target(), drafter="jacobi(2)"),
    "none": lambda: make_parts(target(), drafter="none"),
}


def test_none_is_left_out() -> None:
    assert set(MADE) | {"head"} == set(DRAFTERS)  # every kind of head: tests/heads/readers


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("drafter", MADE)
def test_lossless(drafter: str, temperature: float) -> None:
    case = Case(prompt=(0, 2, 0, 1, 0), horizon=2, max_new_tokens=2, rules=SamplingRules(temperature=temperature))
    assert law_error(output_law(MADE[drafter], case), target_law(target(), case)) < 1e-12

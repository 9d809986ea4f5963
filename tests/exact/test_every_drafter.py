"""Every registered drafter on a table that shows hidden states.

At each temperature the written text has the target's law.
"""

from collections.abc import Callable

import pytest

from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.draft.registry import DRAFTERS
from monge.draft.shape import Shape
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.draft.test_cross_tokenizer import foreign
from tests.heads.toy import random_head

VOCAB, POOL = 3, "pool('ngram(2)', 'model')"


def target() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 11), VOCAB)


def draft_model() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 23), VOCAB)


def drafts() -> list[TabularModel]:
    return [draft_model(), TabularModel(RandomTable(VOCAB, 31), VOCAB)]


def shape() -> Components:
    model = target()
    return make_components(
        model,
        drafter=Shape(target=model, head=random_head(model), tree=TREES.parse("chain(2)")),
    )


MADE: dict[str, Callable[[], Components]] = {
    "model": lambda: make_components(target(), draft_model(), tree="chain(2)"),
    "ensemble": lambda: make_components(target(), drafts(), drafter="ensemble(depth=1)"),
    "shape": shape,
    "retokenize": lambda: make_components(target(), foreign(), drafter="retokenize(2)"),
    "pool": lambda: make_components(target(), draft_model(), drafter=POOL, tree="chain(2)"),
    "ngram": lambda: make_components(target(), drafter="ngram(num_draft_tokens=2)"),
    "suffix": lambda: make_components(target(), drafter="suffix(num_nodes=3, depth=2)"),
    "none": lambda: make_components(target(), drafter="none"),
}


def test_none_is_left_out() -> None:
    assert set(MADE) | {"head"} == set(DRAFTERS)  # every kind of head: tests/heads/readers


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("drafter", MADE)
def test_every_drafter_keeps_the_law(drafter: str, temperature: float) -> None:
    rules = SamplingRules(temperature=temperature)
    case = Case(prompt=(0, 2, 0, 1, 0), horizon=2, max_new_tokens=2, rules=rules)
    assert law_error(output_law(MADE[drafter], case), target_law(target(), case)) < 1e-12

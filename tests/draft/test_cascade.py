"""Cascades: the first that has enough to say drafts, whoever controls; exact text, refusals."""

from typing import Any

import pytest

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError, ProposalMismatchError
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord
from monge.draft.by_name import drafters_in
from monge.draft.cascade import CascadeDrafter
from monge.draft.ngram import NgramDrafter
from monge.draft.none import NoDrafter
from monge.draft.pool import PoolDrafter
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel


def pair(vocab: int = 3) -> tuple[TabularModel, TabularModel]:
    return TabularModel(RandomTable(vocab, 11), vocab), TabularModel(RandomTable(vocab, 23), vocab)


class Names(SoloController[None]):
    """Names a drafter in every plan."""

    def init(self, shared: SharedState) -> None:
        return None

    def plan_one(
        self, state: None, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        return DraftPlan(drafter="model")

    def update(self, state: None, record: StepRecord) -> None:
        return None


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("min_nodes", [1, 2])
def test_lossless(min_nodes: int, temperature: float) -> None:
    case = Case(
        prompt=(0, 1, 0), horizon=2, max_new_tokens=3, rules=SamplingRules(temperature=temperature)
    )
    drafter = f"cascade('ngram(2)', 'model', min_nodes={min_nodes})"
    found = output_law(lambda: make_components(*pair(), drafter=drafter, tree="chain(2)"), case)
    assert law_error(found, target_law(pair()[0], case)) < 1e-12


def test_lossless_with_drafters_that_learn_and_a_neighbour() -> None:
    case = Case(prompt=(0, 1), horizon=2, max_new_tokens=2, neighbours=((2, 1, 2),), slot=1)
    drafter = "cascade('lookahead(window=1, ngram=2)', 'jacobi(1)', 'model', min_nodes=2)"
    found = output_law(lambda: make_components(*pair(), drafter=drafter, tree="chain(1)"), case)
    assert law_error(found, target_law(pair()[0], case)) < 1e-12


def first_drafters(drafter: str, prompt: tuple[int, ...], **parts: Any) -> tuple[str | None, ...]:
    target, draft = pair(9)
    decoder = Decoder(
        make_components(target, draft if "model" in drafter else None, drafter=drafter, **parts)
    )
    (result,) = decoder.generate([prompt], max_new_tokens=4)
    return tuple(record.drafter for record in result.records)


def test_the_first_that_has_enough_to_say_drafts() -> None:
    assert (
        first_drafters("cascade('ngram', 'model')", (1, 2, 3, 1))[0] == "ngram"
    )  # finds (2, 3, 1)
    assert first_drafters("cascade('ngram', 'model', min_nodes=3)", (1, 2, 3, 1))[0] == "ngram"
    assert first_drafters("cascade('ngram', 'model', min_nodes=4)", (1, 2, 3, 1))[0] == "model"
    assert first_drafters("cascade('ngram', 'model')", (1, 2, 3))[0] == "model"
    # For lookups only.
    assert first_drafters("cascade('model', 'ngram', min_nodes=9)", (1, 2, 3, 1))[0] == "model"
    # The last one drafts always.
    assert first_drafters("cascade('none', 'ngram', min_nodes=9)", (1, 2, 3, 1))[0] == "ngram"


def test_controllers_do_not_choose() -> None:
    assert (
        first_drafters("cascade('ngram', 'model')", (1, 2, 3, 1), controller=Names())[0] == "ngram"
    )
    assert first_drafters("pool('ngram', 'model')", (1, 2, 3, 1), controller=Names())[0] == "model"
    assert make_components(*pair(), drafter="cascade('ngram', 'model')").shared.members == ()


def test_caches_follow_whoever_drafts() -> None:
    """A draft model of the target's own laws is accepted to its full depth, also right after rounds that it missed."""
    target, draft = (TabularModel(RandomTable(4, 11), 4) for _ in range(2))
    parts = make_components(
        target,
        draft,
        drafter="cascade('ngram(min_ngram=3)', 'model', min_nodes=2)",
        tree="chain(3)",
    )
    (session,) = Decoder(parts).sessions([(0, 1)], max_new_tokens=60)
    for _ in decode([session], parts, max_batch_size=1):
        record = session.records[-1]
        if record.drafter == "model":
            assert record.num_accepted >= min(record.depth, len(record.token_ids) - 1)
    assert {record.drafter for record in session.records} >= {"ngram", "model"}


def test_capabilities_and_verifiers_are_those_of_all() -> None:
    with pytest.raises(ProposalMismatchError, match="legal here"):
        make_components(
            *pair(), drafter="cascade('suffix', 'model')", tree="chain(2)", verifier="single_draft"
        )
    can = make_components(
        *pair(), drafter="cascade('jacobi(5)', 'model')", tree="chain(2)"
    ).drafter.capabilities
    assert (can.max_depth, can.num_successors) == (5, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cascade", "cascade lists at least two different drafters, as in cascade"),
        ("cascade('ngram', 'ngram')", "different"),
        ("cascade('ngram', 'pool(1)')", "a pool cannot be in a cascade"),
        ("cascade('ngram', 'model', min_node=2)", "did you mean 'min_nodes'"),
        ("cascade('ngram', 'model', drafters=2)", "cannot read"),
        ("cascade('ngram', 'model', min_nodes=0)", "min_nodes must be at least 1; got 0"),
        ("pool('ngram', 'model', min_nodes=1)", "unknown option"),
    ],
)
def test_bad_cascades_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_components(*pair(), drafter=text)


def test_objects_are_checked_too() -> None:
    some: dict[str, Any] = {"ngram": NgramDrafter(), "none": NoDrafter()}
    with pytest.raises(OptionError, match="at least two"):
        CascadeDrafter(drafters={"ngram": NgramDrafter()})
    with pytest.raises(OptionError, match="is a cascade itself"):
        CascadeDrafter(drafters={"ngram": NgramDrafter(), "more": CascadeDrafter(drafters=some)})
    with pytest.raises(OptionError, match="is a pool itself"):
        CascadeDrafter(drafters={"ngram": NgramDrafter(), "more": PoolDrafter(drafters=some)})
    assert drafters_in("cascade('ngram', 'none', min_nodes=2)") == ("ngram", "none")

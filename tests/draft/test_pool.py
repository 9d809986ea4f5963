"""Pools of drafters: routing, caches that follow, shadow drafts, limits, exact text, refusals."""

from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.errors import OptionError, ProposalMismatchError
from monge.core.verdict import StepRecord
from monge.draft.base import NoDrafter
from monge.draft.ngram import Ngram
from monge.draft.pool import Pool
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.laws.draws import Draws
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.draft.lookups import looked_up

VOCAB = 5
POOL = "pool('model', 'ngram', 'suffix', 'none')"


class Counting(TabularModel):
    """Counts the tokens that it reads, prompts included."""

    tokens_read = 0

    def open(self, prefixes: Any) -> None:
        self.tokens_read += sum(len(prefix) for prefix in prefixes.values())
        super().open(prefixes)

    def extend(self, blocks: Any) -> Any:
        self.tokens_read += sum(len(block.token_ids) for block in blocks.values())
        return super().extend(blocks)


@dataclass(frozen=True, slots=True)
class Script(SoloController[int]):
    """Plans in turn, one a round; with `by_acceptance`, the next one only after a rejection."""

    plans: tuple[DraftPlan, ...]
    by_acceptance: bool = False

    reads = frozenset({"accepted"})

    def init(self, shared: SharedState) -> int:
        return 0

    def plan_one(self, state: int, info: RoundInfo, context_length: int, draws: Draws) -> DraftPlan:
        return self.plans[state % len(self.plans)]

    def update(self, state: int, record: StepRecord) -> int:
        is_rejected = record.num_accepted < record.depth or record.depth == 0
        return state + (is_rejected or not self.by_acceptance)


def scripted(*names: str | None) -> Script:
    return Script(tuple(DraftPlan(max_depth=3, drafter=name) for name in names))


def by_acceptance(*names: str) -> Script:
    """Which one drafts depends on what was accepted."""
    return Script(tuple(DraftPlan(max_depth=2, drafter=name) for name in names), True)


def pair(vocab: int = VOCAB) -> tuple[TabularModel, Counting]:
    """A target and its own laws as a draft model, so that drafts are accepted to any depth."""
    return TabularModel(RandomTable(vocab, 1), vocab), Counting(RandomTable(vocab, 1), vocab)


def small() -> tuple[TabularModel, TabularModel]:
    """Fresh models for every run of an enumeration."""
    return TabularModel(RandomTable(3, 11), 3), TabularModel(RandomTable(3, 23), 3)


def decoded(parts: Any, prompt: tuple[int, ...], count: int, seed: int = 0) -> Any:
    """The result of one sampled request."""
    (result,) = Decoder(parts).generate([prompt], max_new_tokens=count, temperature=1.0, seed=seed)
    return result


@pytest.mark.parametrize(
    "tree", ["chain(3)", "fixed_width((3, 2), 'iid')", "best_first(4, 3, 3, 3)"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_cache_follows_while_drafters_take_turns(tree: str, temperature: float) -> None:
    target, draft = pair()
    names = ("model", "ngram", "ngram", "suffix", "none", None, "model")
    decoder = Decoder(
        make_components(target, draft, drafter=POOL, tree=tree, controller=scripted(*names))
    )
    sessions = decoder.sessions(
        [[0, 1], [2]], max_new_tokens=60, temperature=temperature, seed=3, ignore_eos=True
    )
    for session in decode(sessions, decoder.components, max_batch_size=2):
        wanted = names[(len(session.records) - 1) % len(names)]
        if session.records[-1].plan.max_depth != 0:
            assert session.records[-1].drafter == (wanted or "model")
        if session.finish_reason is None:
            text = session.context.token_ids
            read = draft.text(session.context.request_id)
            assert read == text[: len(read)]
            _, ngram, suffix, _ = session.drafter_state.states
            assert array("q", ngram).tolist() == list(text)
            assert suffix.length() == len(text)
    deepest = {
        name: max(r.num_accepted for s in sessions for r in s.records if r.drafter == name)
        for name in names
        if name
    }
    assert deepest["model"] >= 2
    assert deepest["none"] == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_a_draft_model_that_is_not_used_reads_at_most_the_prompt(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    target, draft = pair()
    controller = scripted("ngram")
    monkeypatch.setattr(Script, "prefills_drafter_eagerly", lambda *_: at_once)
    components = make_components(target, draft, drafter=POOL, controller=controller)
    result = decoded(components, (0, 1, 2), 20)
    assert result.error is None
    assert draft.tokens_read == (2 if at_once else 0)
    assert result.stats.drafters == ("ngram",) * result.stats.num_rounds


def test_one_batch_may_use_several_drafters() -> None:
    target, draft = pair()
    components = make_components(
        target, draft, drafter=POOL, controller=by_acceptance("ngram", "suffix", "model")
    )
    prompts = [(0, 1, 0, 1), (2, 3), (4,)]
    together, alone = (
        Decoder(components, max_batch_size=size).generate(
            prompts, max_new_tokens=24, temperature=1.0, seed=5
        )
        for size in (3, 1)
    )
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.stats.drafters for one in together] == [one.stats.drafters for one in alone]
    assert len({name for one in together for name in one.stats.drafters}) == 3


def test_without_a_name_the_first_that_proposes_drafts() -> None:
    target, draft = pair()
    components = make_components(target, draft, drafter="pool('ngram(min_ngram=2)', 'model')")
    result = decoded(components, (0, 1, 2, 3, 4, 0, 1), 12)
    assert result.stats.drafters[0] == "ngram"
    assert "model" in result.stats.drafters
    assert all(record.depth > 0 for record in result.records[:-1])


def test_a_model_free_drafter_needs_min_nodes_unless_it_is_the_last_or_named() -> None:
    prompt = (1, 2, 3, 1)  # the lookup finds (2, 3, 1)

    def first(drafter: str, **parts: Any) -> str | None:
        models = pair()[: 1 + ("model" in drafter)]
        components = make_components(*models, drafter=drafter, **parts)
        (result,) = Decoder(components).generate([prompt], max_new_tokens=4)
        return result.records[0].drafter

    assert first("pool('ngram', 'model', min_nodes=3)") == "ngram"
    assert first("pool('ngram', 'model', min_nodes=4)") == "model"
    assert first("pool('model', 'ngram', min_nodes=9)") == "model"
    assert first("pool('none', 'ngram', min_nodes=9)") == "ngram"
    named = scripted("ngram")
    assert first("pool('ngram', 'model', min_nodes=4)", controller=named) == "ngram"


@pytest.mark.parametrize(
    ("names", "tree"),
    [
        (("model", "ngram"), "chain(2)"),
        (("none", "model"), "chain(2)"),
        (("none", "model"), "fixed_width((2, 1), 'without_replacement')"),
    ],
)
def test_the_law_is_the_targets_while_acceptance_chooses_the_drafter(
    names: tuple[str, str], tree: str
) -> None:
    case = Case(prompt=(0, 1, 0), horizon=2, max_new_tokens=3)
    pool = f"pool{names}"

    def components() -> Any:
        return make_components(*small(), drafter=pool, tree=tree, controller=by_acceptance(*names))

    assert law_error(output_law(components, case), target_law(small()[0], case)) < 1e-12


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_the_law_is_the_targets_where_the_first_that_proposes_drafts(min_nodes: int) -> None:
    pool = f"pool('ngram(2)', 'model', min_nodes={min_nodes})"
    case = Case(prompt=(0, 1), horizon=2, max_new_tokens=3)
    output = output_law(lambda: make_components(*small(), drafter=pool, tree="chain(2)"), case)
    assert law_error(output, target_law(small()[0], case)) < 1e-12


def test_counterfactuals_come_for_every_round_once_the_text_decides() -> None:
    """It equals what the drafters would have proposed, held against the finished text.

    Late, never twice, never dropped.
    """
    target, draft = pair(3)
    components = make_components(target, draft, drafter=POOL, controller=scripted("model", "none"))
    prompt = (0, 1, 2, 0, 1)
    result = decoded(components, prompt, 80, seed=1)
    text, ngram = prompt + result.token_ids, Ngram()
    seen = {
        entry.position: entry
        for record in result.records
        for entry in record.counterfactuals
        if entry.drafter == "ngram"
    }
    assert sum(
        entry.drafter == "ngram" for record in result.records for entry in record.counterfactuals
    ) == len(seen)
    starts = [record.context_length for record in result.records]
    assert [start for start in starts if start + ngram.num_draft_tokens < len(text)] == [
        start for start in starts if start in seen and start + ngram.num_draft_tokens < len(text)
    ]
    late = 0
    for record in result.records:
        for entry in (one for one in record.counterfactuals if one.drafter == "ngram"):
            late += entry.position < record.context_length
            assert entry.factors == expected_factors(ngram, text, entry.position)
    assert late > 0
    assert any(len(entry.factors) > 1 for entry in seen.values())


def expected_factors(ngram: Ngram, text: tuple[int, ...], start: int) -> tuple[float, ...]:
    factors: list[float] = []
    for token, real in zip(looked_up(ngram, text[:start]), text[start:], strict=False):
        factors.append(float(token == real))
        if token != real:
            break
    return tuple(factors)


def test_capabilities_are_the_union() -> None:
    target, draft = pair()
    can = make_components(
        target, draft, drafter="pool('ngram', 'model')", tree="fixed_width((3, 2), 'iid')"
    ).drafter.capabilities
    assert can.max_width == 3
    assert can.max_depth == 8
    assert can.needs_trees
    assert {kind.__name__ for kind in can.proposes} == {"Iid", "Deterministic"}


def test_the_verifier_must_be_exact_for_all() -> None:
    with pytest.raises(ProposalMismatchError, match="legal here"):
        make_components(
            *pair(),
            drafter="pool('model', 'suffix')",
            tree="chain(2)",
            verifier="speculative_sampling",
        )


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("pool('ngram')", {}, "at least two"),
        ("pool", {}, "at least two"),
        ("pool('ngram', 'ngram')", {}, "different"),
        ("pool('ngram', 3)", {}, "expected a drafter or its name; got 3 of type int"),
        ("pool(ngram, pool(ngram, none))", {}, "cannot be in a pool"),
        ("pool('ngram', 'sufix')", {}, "did you mean 'suffix'"),
        ("pool('ngram', 'suffix')", {"tree": "chain(2)"}, "takes no tree"),
        ("pool('ngram', 'model')", {}, "needs a draft model"),
        ("pool('ngram', 'none', min_nodes=0)", {}, "min_nodes must be at least 1; got 0"),
        ("pool('ngram', 'none', min_node=2)", {}, "did you mean 'min_nodes'"),
    ],
)
def test_bad_pools_are_refused(text: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_components(pair()[0], drafter=text, **settings)


def test_objects_are_checked_too() -> None:
    with pytest.raises(OptionError, match="at least two"):
        Pool(Ngram())
    pool = Pool(Ngram(), NoDrafter())
    with pytest.raises(OptionError, match="a pool cannot be in a pool"):
        Pool(Ngram(), pool)


def test_equal_names_are_told_apart_by_their_settings() -> None:
    text = "pool('ngram(max_ngram=2)', 'ngram(max_ngram=5)', 'none')"
    members = make_components(pair()[0], drafter=text).shared.members
    assert [one.name for one in members] == ["ngram(max_ngram=2)", "ngram(max_ngram=5)", "none"]


def test_an_unknown_drafter_in_a_plan_costs_the_speculation_and_says_so() -> None:
    components = make_components(
        pair()[0], drafter="pool('ngram', 'none')", controller=scripted("engram")
    )
    with pytest.warns(UserWarning, match="did you mean 'ngram'"):
        result = decoded(components, (0, 1), 4)
    assert len(result.token_ids) == 4


@pytest.mark.parametrize(
    ("limits", "looked_up_depth", "modelled"),
    [
        ({"max_depth": 3}, 3, 3),
        ({"max_depth": 2, "model_free_depth": 5}, 5, 2),
        ({"max_depth": 3, "model_free_depth": 0}, 0, 3),
        ({"max_depth": 0, "model_free_depth": 2}, 2, 0),
        ({"max_depth": 0}, 0, 0),
    ],
    ids=str,
)
def test_lookups_may_have_a_limit_of_their_own(
    limits: dict[str, int], looked_up_depth: int, modelled: int
) -> None:
    parts = make_components(
        *pair(3),
        drafter="pool('ngram', 'model')",
        tree="chain(4)",
        controller=Script((DraftPlan(**limits),)),
    )
    result = decoded(parts, (0, 1, 2, 0, 1), 80, seed=1)
    records = result.records[:-8]  # the room for tokens shortens the last ones
    deepest = {
        name: max((one.depth for one in records if one.drafter == name), default=0)
        for name in ("ngram", "model")
    }
    assert deepest["ngram"] == looked_up_depth
    assert deepest["model"] in {0, modelled}
    if not looked_up_depth:
        assert {one.depth for one in records} == {modelled}
    assert not any(one.counterfactuals for one in records)


@pytest.mark.parametrize("names", [None, "model"], ids=["asked", "shadow"])
def test_a_lookup_that_fails_costs_its_request_the_speculation(
    names: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("its own fault")

    monkeypatch.setattr(Ngram, "draft", fail)
    parts = make_components(*pair(), drafter="pool('ngram', 'model')", controller=scripted(names))
    with pytest.warns(UserWarning, match="the drafter failed"):
        result = decoded(parts, (1, 2, 1, 2), 60, seed=7)
    assert len(result.token_ids) == 60
    assert not any(record.depth for record in result.records)

"""A draft model whose context is shorter than the text.

Candidates come while it can read, then the text is decoded plainly. The text has the target's law,
and no drafter is asked for more than its context.
"""

import itertools

import pytest

from monge.api import make_components
from monge.core.context import DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.opening import Prefill
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.draft.test_cross_tokenizer import foreign

VOCAB, LONG_MATCHES = 3, "pool('ngram(2)', 'model', min_nodes=2)"
EXACT = 1e-12


class Bounded(TabularModel):
    """Notes every text beyond its context."""

    def __init__(self, seed: int, max_length: int, vocab: int = VOCAB) -> None:
        super().__init__(RandomTable(vocab, seed), vocab, max_length)
        self.beyond: list[tuple[int, ...]] = []
        self.longest = 0

    def _logits_after(self, text: tuple[int, ...]):
        self.longest = max(self.longest, len(text))
        if self.max_length is not None and len(text) > self.max_length:
            self.beyond.append(text)
        return super()._logits_after(text)


def target() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 11), VOCAB)


def parts(kind: str, draft: Bounded) -> Components:
    if kind == "ensemble":
        drafts = [draft, TabularModel(RandomTable(VOCAB, 31), VOCAB, None)]
        return make_components(target(), drafts, drafter="ensemble(depth=2)")
    made = {
        "chain": {"drafter": "model", "tree": "chain(2)", "verifier": "block"},
        "tree": {"drafter": "model", "tree": "fixed_width((2, 1), 'without_replacement')"},
        "paths": {"drafter": "model", "tree": "paths(2, 2)", "verifier": "multipath_block"},
        "best first": {"drafter": "model", "tree": "best_first(4, 3, 2, 1)"},
        "pool": {"drafter": "pool('ngram(2)', 'model')", "tree": "chain(2)"},
        "pool, model first": {"drafter": "pool('model', 'ngram(2)')", "tree": "chain(2)"},
        "pool, long matches": {"drafter": LONG_MATCHES, "tree": "chain(2)"},
    }
    return make_components(target(), draft, **made[kind])


KINDS = ("chain", "tree", "paths", "best first", "ensemble")
KINDS += ("pool", "pool, model first", "pool, long matches")


# Two draft models, and room for a draft of the whole text: half a minute.
LONGEST = pytest.param("ensemble", 2, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "max_length"),
    [LONGEST if case == ("ensemble", 2) else case for case in itertools.product(KINDS, (1, 2))],
)
def test_the_law_is_the_targets_where_the_context_ends_within_a_text(
    kind: str, max_length: int
) -> None:
    case = Case(prompt=(0,), horizon=2, max_new_tokens=4)
    drafts: list[Bounded] = []

    def make() -> Components:
        drafts.append(Bounded(23, max_length))
        return parts(kind, drafts[-1])

    assert law_error(output_law(make, case), target_law(target(), case)) < EXACT
    assert not any(draft.beyond for draft in drafts)
    longest = max(draft.longest for draft in drafts)
    assert longest == max_length, "it drafts as long as it can"


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_the_targets_after_a_prompt_that_is_too_long(kind: str) -> None:
    case = Case(prompt=(0, 1, 2), horizon=2, max_new_tokens=3)
    drafts: list[Bounded] = []

    def make() -> Components:
        drafts.append(Bounded(23, 2))
        return parts(kind, drafts[-1])

    assert law_error(output_law(make, case), target_law(target(), case)) < EXACT
    assert not any(draft.longest for draft in drafts)


@pytest.mark.parametrize("drafter", ["model", "retokenize(num_own_tokens=2)"])
@pytest.mark.parametrize(
    ("prompt", "neighbours"), [((2,), ()), ((2, 2, 2), ()), ((2,), ((2, 2, 2),))]
)
def test_other_words_that_are_longer_than_the_context(
    drafter: str, prompt: tuple[int, ...], neighbours: tuple[tuple[int, ...], ...]
) -> None:
    """Texts that outgrow the draft model, and prompts that it cannot read: its drafter does not fail."""
    own: list[Bounded] = []

    def make() -> Components:
        own.append(Bounded(23, 4, vocab=4))
        tree = {"tree": "chain(2)"} if drafter == "model" else {}
        return make_components(target(), foreign(own[-1]), drafter=drafter, **tree)

    case = Case(prompt=prompt, horizon=2, max_new_tokens=3, neighbours=neighbours)
    assert law_error(output_law(make, case), target_law(target(), case)) < EXACT
    assert not any(one.beyond for one in own)
    assert max(one.longest for one in own) == 4


def test_tokens_that_others_draw_may_be_several_of_the_draft_models_own() -> None:
    own = Bounded(23, 20, vocab=4)
    drafts = [foreign(own), TabularModel(RandomTable(VOCAB, 31), VOCAB)]
    decoder = Decoder(make_components(target(), drafts, drafter="ensemble(depth=3)"))
    for seed in range(20):
        decoder.generate([(0,), (2, 2)], max_new_tokens=16, temperature=1.0, seed=seed)
    assert own.longest in {19, 20}
    assert not own.beyond


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_all_lengths_writes_what_plain_decoding_writes(kind: str) -> None:
    prompts = [(0,), (1, 2), (0, 1, 2, 0, 1, 2, 0), (2, 1, 0, 2, 1)]
    greedy = SamplingRules(temperature=0.0)
    draft = Bounded(11, 6)
    decoder = Decoder(parts(kind, draft), max_batch_size=3)
    plain = Decoder(make_components(target(), drafter="none"))
    written = decoder.generate(prompts, max_new_tokens=9, temperature=greedy.temperature)
    wanted = plain.generate(prompts, max_new_tokens=9, temperature=0.0)
    assert [one.token_ids for one in written] == [one.token_ids for one in wanted]
    assert written[0].stats.num_rounds < 9
    assert not draft.beyond
    assert decoder.max_length is None


def test_trees_become_less_deep_as_the_context_ends() -> None:
    draft = Bounded(11, 6)
    components = make_components(target(), draft, drafter="model", tree="chain(3, 'top')")
    (result,) = Decoder(components).generate([(0,) * 4], max_new_tokens=9, temperature=0.0)
    lengths = [(record.context_length, record.depth) for record in result.records]
    assert lengths[0] == (4, 3)
    assert all(depth == 0 for length, depth in lengths if length > 6)
    assert DraftPlan().reaching(6, 6) == DraftPlan(max_depth=1)


@pytest.mark.parametrize("kind", ["chain", "ensemble", "pool", "pool, model first"])
def test_prompts_that_are_read_in_pieces(kind: str) -> None:
    draft = Bounded(11, 4)
    components = parts(kind, draft)
    prefill = Prefill(components)
    session = Decoder(components).sessions([(0, 1, 2, 0, 1, 2)], max_new_tokens=3)[0]
    prefill.join(session)
    while len(prefill):
        prefill.read(2)
    assert session.error is None
    assert not draft.longest


def test_speculation_is_not_asked_of_a_request_that_has_none() -> None:
    draft = Bounded(11, 2)
    decoder = Decoder(make_components(target(), draft, drafter="model", tree="chain(2)"))
    (session,) = decoder.sessions([(0, 1)], max_new_tokens=5)
    session.drafts = False
    assert len(list(decode([session], decoder.components, max_batch_size=1))) == 5
    assert not draft.longest

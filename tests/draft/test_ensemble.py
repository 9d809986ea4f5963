"""Several draft models on one tree.

Exact in the loop, within limits, and refused where they do not fit.
"""

import pytest
import torch

from monge.api import make_components
from monge.core.context import Context, DraftPlan
from monge.core.errors import (
    MongeError,
    OptionError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from monge.core.sampling_rules import SamplingRules
from monge.draft.ensemble import Ensemble
from monge.draft.model import Model
from monge.laws.draws import SeededDraws
from monge.laws.proposal import Independent
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.verify.layer import Layer
from tests.draft.test_cross_tokenizer import foreign

VOCAB = 3
EXACT = 1e-12
TWO_LEVELS = Case(horizon=2, max_new_tokens=3)
"""Over a vocabulary of two, which is enough for draws that repeat and draws that do not."""


def table(seed, style="positive", vocab=VOCAB):
    return TabularModel(RandomTable(vocab, seed, style), vocab)


def components(drafter="ensemble(depth=2)", *, drafts=2, style="positive", vocab=VOCAB, **settings):
    models = [table(seed, style, vocab) for seed in (23, 5, 41)[:drafts]]
    return make_components(table(11, vocab=vocab), models, drafter=drafter, **settings)


def error(case, **settings):
    target = table(11, vocab=settings.get("vocab", VOCAB))
    return law_error(output_law(lambda: components(**settings), case), target_law(target, case))


@pytest.mark.parametrize("style", ["positive", "sparse", "ties"])
@pytest.mark.parametrize("verifier", ["canonical", "sample_and_match", "layer"])
@pytest.mark.parametrize("paths", [False, True])
def test_text_has_the_targets_law(paths, verifier, style):
    drafter = f"ensemble(depth=2, paths={paths})"
    for case, vocab in ((TWO_LEVELS, 2), (Case(horizon=2, max_new_tokens=2), VOCAB)):
        parts = {"drafter": drafter, "verifier": verifier, "style": style, "vocab": vocab}
        assert error(case, **parts) < EXACT


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("verifier", ["canonical", "layer"])
def test_limits_that_bind_leave_the_law(verifier, num_nodes):
    """The first drawn level may hold one node or two.

    Which nodes below them have candidates must not depend on that.
    """
    for limit in (
        {"drafter": f"ensemble(depth=2, num_nodes={num_nodes})"},
        {"controller": f"fixed(max_nodes={num_nodes})"},
    ):
        assert error(TWO_LEVELS, verifier=verifier, vocab=2, **limit) < EXACT


@pytest.mark.parametrize(
    "rules", [SamplingRules(temperature=0.0), SamplingRules(temperature=0.7, top_k=2)]
)
def test_sampling_rules_and_truncated_drafts(rules):
    case = Case(horizon=2, max_new_tokens=2, rules=rules)
    assert error(case) < EXACT
    assert (
        error(case, drafter="ensemble(top_k=2)", draft_rules=SamplingRules(temperature=1.5)) < EXACT
    )


def test_three_models_and_neighbours_in_the_batch():
    assert error(Case(horizon=1, max_new_tokens=2), drafter="ensemble(depth=1)", drafts=3) < EXACT
    assert error(Case(horizon=2, max_new_tokens=2, neighbours=((1, 2), (2,)), slot=1)) < EXACT


def drawn(drafter, draws, **limits):
    context = Context(request_id=0, token_ids=(0, 1), num_prompt_tokens=2, rules=SamplingRules())
    (state,) = drafter.open([context])
    (draft,) = drafter.draft([context], [state], [DraftPlan(**limits)], [draws])
    drafter.close(context)
    return draft.tree


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 6])
def test_which_nodes_have_candidates_is_decided_before_their_level_is_drawn(num_nodes):
    def level(draws):
        models = (table(23), table(5))
        tree = drawn(Ensemble(models=models, depth=2, num_nodes=num_nodes), draws)
        upper = [node for node, depth in enumerate(tree.depths) if depth == 1]
        tokens = tuple(tree.token_ids[node] for node in upper)
        return tokens, tuple(bool(tree.candidates[node]) for node in upper)

    found = exact_law(level)
    assert len({above for above, _ in found}) == len(found) > 3


@pytest.mark.parametrize("seed", range(8))
def test_every_node_has_one_draw_of_each_model(seed):
    models = (table(23), table(5))
    tree = drawn(Ensemble(models=models, depth=2), SeededDraws(seed))
    for node, depth in enumerate(tree.depths):
        assert len(tree.candidates[node]) == (2 if depth < 2 else 0)
        if depth < 2:
            proposal = tree.proposals[node]
            assert isinstance(proposal, Independent)
            text = (0, 1, *tree.path_tokens(node))
            for model, law in zip(models, proposal.laws, strict=True):
                torch.testing.assert_close(
                    law.at(torch.arange(VOCAB)),
                    torch.tensor(model.table(text), dtype=torch.float64),
                )


@pytest.mark.parametrize("seed", range(8))
def test_one_path_a_model(seed):
    drafter = Ensemble(models=(table(23), table(5)), depth=3, paths=True)
    tree = drawn(drafter, SeededDraws(seed))
    first, second = (0,), (0,)
    for _ in range(3):
        ends = {first[-1]: tree.candidates[first[-1]], second[-1]: tree.candidates[second[-1]]}
        assert all(len(candidates) == (2 if len(ends) == 1 else 1) for candidates in ends.values())
        first, second = (*first, ends[first[-1]][0]), (*second, ends[second[-1]][-1])
    assert tree.num_nodes == len({*first, *second})


def test_limits_of_a_plan():
    drafter = Ensemble(models=(table(23), table(5)), depth=4, num_nodes=30)
    for draws in map(SeededDraws, range(5)):
        assert max(drawn(drafter, draws, max_depth=2).depths) == 2
        assert drawn(drafter, draws, max_nodes=5).num_nodes - 1 <= 5
        assert drawn(drafter, draws, max_depth=0).num_nodes == 1
        assert drawn(drafter, draws, max_nodes=1).num_nodes == 1


def test_defaults_for_several_draft_models():
    made = make_components(table(11), [table(23), table(5)])
    assert isinstance(made.drafter, Ensemble)
    assert isinstance(made.rule, Layer)
    assert len(made.draft_models) == 2
    assert type(make_components(table(11), [table(23)]).drafter) is Model


def test_beside_a_lookup():
    made = components("pool('ngram', 'ensemble')")
    assert [member.runs_network for member in made.shared.members] == [False, True]
    case = Case(prompt=(0, 1, 0), horizon=2, max_new_tokens=2)
    assert error(case, drafter="pool('ngram(2)', 'ensemble(depth=1)')") < EXACT


def test_a_draft_model_with_another_tokenizer():
    def made():
        return make_components(table(11), [table(23), foreign()], drafter="ensemble(depth=2)")

    case = Case(prompt=(0, 2, 0, 1, 0), horizon=2, max_new_tokens=2)
    assert law_error(output_law(made, case), target_law(table(11), case)) < EXACT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"drafter": "ensemble", "drafts": 1},
            "ensemble: give at least two draft models, as in draft=[A, B]; got 1",
        ),
        ({"drafter": "ensemble(depth=0)"}, "ensemble: depth must be at least 1; got 0"),
        (
            {"drafter": "ensemble(num_nodes=1)"},
            "ensemble: num_nodes must be at least 2, one a model; got 1",
        ),
        ({"drafter": "ensemble", "tree": "chain(2)"}, "drafter 'ensemble' takes no tree"),
        ({"drafter": "model"}, "drafter 'model' takes no list of draft models (draft=[A, B])"),
        ({"drafter": "ngram"}, "drafter 'ngram' takes no list of draft models (draft=[A, B])"),
        ({"drafter": "pool('model', 'ensemble')"}, "drafter 'model' needs a draft model"),
        (
            {"drafter": "pool('model', 'ensemble')", "drafts": 1},
            "drafter 'ensemble' needs a list of draft models",
        ),
        ({"drafter": "ensemble", "drafts": 0}, "drafter 'ensemble' needs a list of draft models"),
        ({"verifier": "k_seq"}, "KSeq is exact for"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(MongeError) as refused:
        components(**settings)
    assert message in str(refused.value)


def test_models_that_do_not_fit_are_refused():
    model = table(23)
    with pytest.raises(OptionError, match="one draft model is given twice"):
        make_components(table(11), [model, model])
    with pytest.raises(VocabularyMismatchError, match="the draft model has 4 tokens"):
        make_components(table(11), [model, TabularModel(RandomTable(4, 5), 4)])
    chains_only = table(5)
    chains_only.why_no_tree = "it keeps recurrent state"
    refusal = r"draft model 2 cannot read trees.*use ensemble\(paths=True\)"
    with pytest.raises(UnsupportedModelError, match=refusal):
        make_components(table(11), [model, chains_only])
    make_components(table(11), [model, chains_only], drafter="ensemble(paths=True)")

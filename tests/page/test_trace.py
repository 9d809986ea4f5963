"""The trace of a run says what its verifier saw, for every drafter and every tree."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from monge.api import make_components
from monge.engine.batch import decode
from monge.engine.decoder import Decoder, chunk_of
from monge.laws.proposal import Arbitrary, Deterministic, Independent, Mixed
from monge.oracle.tabular import RandomTable, TabularModel
from monge.page.files import page_of
from monge.page.trace import ORIGINS, document, origins_of, rounds_of
from monge.verify.base import Verifier, as_verifier
from tests.exact.test_every_drafter import MADE
from tests.serve.served import toy_decoder

VOCAB = 5
TREES = (
    "chain(3)",
    "chain(2, 'top')",
    "fixed_width((2, 2), 'iid')",
    "fixed_width((2, 1), 'without_replacement')",
    "fixed_width((3, 1), 'top')",
    "fixed_width((3, 1), 'mixed')",
    "fixed_width((2, 1), 'temperatures')",
    "fixed_width((2, 1), 'shared')",
    "paths(2, 2)",
    "best_first(4, 2, 2)",
    "eagle2(6, 2, 2)",
)
"""A tree of every builder, and of every way of drawing children."""


def of_tree(tree):
    target, draft = (TabularModel(RandomTable(VOCAB, seed, "positive"), VOCAB) for seed in (1, 2))
    return make_components(target, draft, drafter="model", tree=tree)


RUNS = MADE | {tree: lambda tree=tree: of_tree(tree) for tree in TREES}
ACCEPTED = {"lookup", "draft", "head", "grammar"}


class Watched(Verifier):
    """A rule, and what it saw: by round, the tree, the target's laws and the verdict."""

    def __init__(self, rule):
        self.accepts, self.max_width = rule.accepts, rule.max_width
        self.watched, self.rounds = as_verifier(rule), []

    def verify(self, tree, target_laws, draws):
        verdict = self.watched.verify(tree, target_laws, draws)
        self.rounds.append((tree, list(target_laws), verdict))
        return verdict


def expected_draft_prob(tree, node):
    parent = tree.parents[node]
    proposal, token = tree.proposals[parent], tree.token_ids[node]
    if isinstance(proposal, Deterministic | Arbitrary):
        return None
    if isinstance(proposal, Mixed) and token in proposal.fixed:
        return None
    place = tree.candidates[parent].index(node)
    law = proposal.laws[place] if isinstance(proposal, Independent) else proposal.law
    return law.prob(token)


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_says_what_the_verifier_saw(name, unchecked_types):
    parts = RUNS[name]()
    watched = Watched(parts.rule)
    decoder = Decoder(replace(parts, rule=watched), max_batch_size=1)
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1, "return_trees": True}
    (session,) = decoder.sessions([[0, 1, 0, 1]], **options)
    list(decode([session], decoder.components, max_batch_size=1))
    rounds = rounds_of(session.records, session.request.prompt_ids, decoder)
    pairs_of_rounds = zip(rounds, session.records, watched.rounds, strict=True)
    for shown, record, (tree, laws, verdict) in pairs_of_rounds:
        nodes = shown["nodes"]
        assert tuple(node["id"] for node in nodes) == tree.token_ids
        assert tuple(node["parent"] for node in nodes) == tree.parents
        assert tuple(shown["path"]) == verdict.path
        for node in range(1, tree.num_nodes):
            draft = expected_draft_prob(tree, node)
            assert nodes[node]["q"] == (None if draft is None else pytest.approx(draft, abs=1e-12))
            target = laws[tree.parents[node]].prob(tree.token_ids[node])
            assert nodes[node]["p"] == pytest.approx(target, abs=1e-12)
        assert [token["id"] for token in shown["tokens"]] == list(record.token_ids)
        on_path = [(nodes[node]["p"], nodes[node]["q"]) for node in shown["path"]]
        pairs = [(token["p"], token["q"]) for token in shown["tokens"]]
        assert pairs[: len(on_path)] == on_path[: len(pairs)]
    origins = Counter(token["origin"] for one in rounds for token in one["tokens"])
    assert set(origins) <= set(ORIGINS)
    assert sum(origins.values()) == session.num_generated
    kept = sum(min(one.num_accepted, len(one.token_ids)) for one in session.records)
    assert sum(origins[kind] for kind in ACCEPTED) == kept
    kinds = Counter(one.next_kind if one.num_nodes else "target" for one in session.records[:-1])
    assert all(origins[kind] >= number for kind, number in kinds.items())
    sizes = [len(one.token_ids) for one in session.records]
    assert [one["at"] for one in rounds] == [sum(sizes[:place]) for place in range(len(rounds))]


def test_keeping_trees_draws_nothing():
    options, texts = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}, []
    for keeps in (False, True):
        decoder = toy_decoder(tree="fixed_width((2, 2))")
        (result,) = decoder.generate("once", return_trees=keeps, **options)
        assert {one.tree is not None for one in result.records} == {keeps}
        texts.append(result.token_ids)
    assert texts[0] == texts[1]


def test_a_processor_that_refuses_other_texts_leaves_their_probabilities_out():
    options = {"max_new_tokens": 12, "temperature": 0.0}
    make = lambda: toy_decoder(tree="fixed_width((2, 2), 'top')")  # noqa: E731
    (plain,) = make().generate("once", **options)
    whole = (*make().encode("once"), *plain.token_ids)

    def strict(token_ids, scores):
        text = tuple(token_ids[0].tolist())
        assert text == whole[: len(text)], "no verifier looks at this text"
        return scores

    (result,) = make().generate("once", logits_processors=[strict], return_trees=True, **options)
    assert result.token_ids == plain.token_ids
    trees = [record.tree for record in result.records if record.tree is not None]
    assert len(trees) == len(result.records)
    assert any(None in tree.target_probs[1:] for tree in trees)
    assert all(tree.next_prob == 1.0 for tree in trees)


def test_texts_of_tokens_add_up_and_the_file_holds_them_as_data():
    decoder = toy_decoder()
    (session,) = decoder.sessions(["once"], max_new_tokens=30, temperature=1.0, return_trees=True)
    list(decode([session], decoder.components, max_batch_size=1))
    rounds = rounds_of(session.records, session.request.prompt_ids, decoder)
    texts = [token["text"] for one in rounds for token in one["tokens"]]
    assert "".join(texts) == chunk_of(session).text
    made = document([{"prompt": "</script><!--<script>", "rounds": rounds}], decoder)
    page = page_of(made)
    data = page.partition('id="trace">')[2].partition("</script>")[0]
    assert json.loads(data) == made
    assert page.count("<script") == page.count("</script") == 2


def test_origins_name_the_kinds_of_drafters():
    origins = origins_of(toy_decoder(drafter="pool('ngram', 'model')").components.drafter)
    assert origins == {"ngram": "lookup", "model": "draft", "grammar": "grammar"}
    assert origins_of(toy_decoder().components.drafter)[None] == "draft"

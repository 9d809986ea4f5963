"""The trace of a run says what its certificate says, for every drafter and every tree."""

import json
from collections import Counter

import pytest
import torch

from monge.audit.certificate import law_of, tree_of
from monge.audit.recorder import RunRecorder
from monge.core.proposal import Arbitrary, Deterministic, Independent, Mixed
from monge.engine.batch import decode
from monge.engine.decoder import Decoder, piece_of
from monge.page.files import page_of
from monge.page.trace import ORIGINS, document, origins_of, rounds_of
from tests.audit.certified import all_runs, written
from tests.serve.served import toy_decoder

RUNS = {
    name if name.startswith("drafter") else name.rpartition(" ")[0]: make
    for name, make in all_runs().items()
}
ACCEPTED = {"lookup", "draft", "head", "grammar"}


def run_of(recorder, prompt=(0, 1, 0, 1), **options):
    settings = {"max_new_tokens": 8, "keeps_trees": True} | options
    return written(recorder, [list(prompt)], **settings)[0]


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


def expected_target_laws(stored, arrays):
    """By node, what the certificate has of the target's laws."""
    found = {}
    for node, fields in stored["laws"]:
        if {"ids", "token", "masses"} & set(fields):
            found[node] = law_of(fields, arrays).prob
        else:
            masses = torch.softmax(arrays.get(fields["logits"]).double(), 0)
            found[node] = masses.tolist().__getitem__
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_agrees_with_the_certificate(name, unchecked_types):
    decoder = Decoder(RUNS[name](), max_batch_size=1)
    session = run_of(recorder := RunRecorder(decoder))
    rounds = rounds_of(session.records, session.request.prompt_ids, decoder)
    certificate = recorder.certificate()
    for shown, record, stored in zip(
        rounds, session.records, certificate.requests[0]["rounds"], strict=True
    ):
        nodes, tree = shown["nodes"], tree_of(stored["tree"], certificate.arrays)
        assert tuple(node["id"] for node in nodes) == tree.token_ids
        assert tuple(node["parent"] for node in nodes) == tree.parents
        assert shown["path"] == stored["verdict"]["path"]
        targets = expected_target_laws(stored, certificate.arrays)
        for node in range(1, tree.num_nodes):
            draft = expected_draft_prob(tree, node)
            assert nodes[node]["q"] == (None if draft is None else pytest.approx(draft, abs=1e-12))
            if tree.parents[node] in targets:
                target = targets[tree.parents[node]](tree.token_ids[node])
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
    assert [one["at"] for one in rounds] == [
        sum(len(one.token_ids) for one in session.records[:place]) for place in range(len(rounds))
    ]


def test_keeping_trees_draws_nothing():
    make = lambda: toy_decoder(tree="fixed_width((2, 2))")  # noqa: E731
    texts = [
        make().generate("once", max_new_tokens=40, temperature=1.0, seed=3, keeps_trees=keeps)
        for keeps in (False, True)
    ]
    assert texts[0][0].token_ids == texts[1][0].token_ids
    assert {one.tree is None for one in texts[0][0].records} == {True}
    assert {one.tree is None for one in texts[1][0].records} == {False}


def test_a_processor_that_refuses_other_texts_leaves_their_probabilities_out():
    options = {"max_new_tokens": 12, "temperature": 0.0}
    make = lambda: toy_decoder(tree="fixed_width((2, 2), 'top')")  # noqa: E731
    (plain,) = make().generate("once", **options)
    whole = (*make().encode("once"), *plain.token_ids)

    def strict(token_ids, scores):
        text = tuple(token_ids[0].tolist())
        assert text == whole[: len(text)], "no verifier looks at this text"
        return scores

    (result,) = make().generate("once", processors=[strict], keeps_trees=True, **options)
    assert result.token_ids == plain.token_ids
    trees = [record.tree for record in result.records if record.tree is not None]
    assert len(trees) == len(result.records)
    assert any(None in tree.target_probs[1:] for tree in trees)
    assert all(tree.next_prob == 1.0 for tree in trees)


def test_texts_of_tokens_add_up_and_the_file_holds_them_as_data():
    decoder = toy_decoder()
    (session,) = decoder.sessions(["once"], max_new_tokens=30, temperature=1.0, keeps_trees=True)
    for _ in decode([session], decoder.components, max_batch_size=1):
        pass
    rounds = rounds_of(session.records, session.request.prompt_ids, decoder)
    texts = [token["text"] for one in rounds for token in one["tokens"]]
    assert "".join(texts) == piece_of(session).text
    made = document([{"prompt": "</script><!--<script>", "rounds": rounds}], decoder)
    page = page_of(made)
    data = page.partition('id="trace">')[2].partition("</script>")[0]
    assert json.loads(data) == made
    assert page.count("<script") == page.count("</script") == 2


def test_origins_name_the_kinds_of_drafters():
    origins = origins_of(toy_decoder(drafter="pool('ngram', 'model')").components.drafter)
    assert origins == {"ngram": "lookup", "model": "draft", "grammar": "grammar"}
    assert origins_of(toy_decoder().components.drafter)[None] == "draft"

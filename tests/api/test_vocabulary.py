"""A draft model whose vocabulary is padded to another size still drafts for the target, and the law stays exact."""

import pytest
import torch

from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits
from monge.loading.networks import _differing_tokens
from monge.networks.base import NodeBlock
from monge.networks.cross_tokenizer import ResizedVocabulary
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from tests.kit.tables import table

VOCAB = 3


def resized(size: int) -> ResizedVocabulary:
    return ResizedVocabulary(table(2, size), VOCAB)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("chain(2)", "speculative_sampling"),
        ("fixed_width((2,))", "recursive_rejection_without_replacement"),
    ],
)
def test_padding_does_not_change_the_law(size, tree, verifier):
    case = Case(horizon=2, max_new_tokens=3)

    def components():
        return make_components(table(1, VOCAB), resized(size), tree=tree, verifier=verifier)

    assert law_error(output_law(components, case), target_law(table(1, VOCAB), case)) < 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_padding_tokens_are_never_drafted_and_missing_ones_have_no_mass(size):
    model = resized(size)
    model.open({0: (0,)})
    logits = model.extend({0: NodeBlock.chain((1,))})[0]
    assert logits.shape == (1, VOCAB)
    law = law_from_logits(logits[0], SamplingRules())
    assert (law.prob(2) == 0.0) == (size == 2)


def test_a_token_beyond_the_draft_models_rows_is_read_as_its_last_one():
    first, second = resized(2), resized(2)
    first.open({0: (0, 2)})
    second.open({0: (0, 1)})
    seen = [
        model.extend({0: NodeBlock.chain((token,))})[0]
        for model, token in ((first, 2), (second, 1))
    ]
    assert torch.equal(*seen)


def test_padding_is_no_other_tokenizer():
    ours = {"a": 0, "b": 1, "[PAD2]": 2}
    assert not _differing_tokens(ours, {"a": 0, "b": 1, "[PAD2]": 2, "[PAD3]": 3, "c": 4}, 3)
    assert not _differing_tokens(ours, {"a": 0, "b": 1}, 3)
    assert _differing_tokens(ours, {"a": 0, "b": 1, "c": 2}, 3) == ["c"]
    assert _differing_tokens(ours, {"a": 1, "b": 0}, 3) == ["a", "b"]

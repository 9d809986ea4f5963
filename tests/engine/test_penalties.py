"""Penalties and biases follow every node's own path.

Decoding with them has the law of plain decoding with them.
"""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from monge.api import make_components
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits
from monge.networks.base import NodeBlock
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.requests.banned_tokens import BadWords, token_masks
from monge.requests.penalties import text_processors
from monge.requests.processors import Stateless
from tests.engine.laws import loop_law, plain_law

VOCAB, PROMPT = 3, (1, 2)
CASES = [
    *((name, "chain(2)", 2) for name in ("bias", "repetition", "presence", "frequency", "fewest")),
    ("all", "chain(2)", 3),
    ("all", "fixed_width((2,), 'without_replacement')", 2),
    ("allowed", "chain(2)", 2),
    ("bad words", "chain(2)", 3),
    ("bad words", "fixed_width((2, 1), 'without_replacement')", 3),
]
RULES = SamplingRules(temperature=0.9)
SETTINGS = {
    "bias": {"logit_bias": {0: 1.5, 2: -100}},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.9},
    "fewest": {"min_tokens": 1, "end_ids": frozenset({1})},
    "all": {"min_tokens": 1, "end_ids": frozenset({0}), "logit_bias": {1: 0.4}}
    | {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.6},
}
WORDS = ((2, 0), (0, 2, 1), (1, 1))
MASKS = {"allowed": {"allowed_ids": (2, 0, 2)}, "bad words": {"bad_words": WORDS}}


def processors_of(name):
    if name in MASKS:
        return token_masks(len(PROMPT), VOCAB, **MASKS[name])
    return text_processors(len(PROMPT), VOCAB, **SETTINGS[name])


def law_of_plain_decoding(processors, length=2):
    """Token by token, each from a fresh reading of the whole text."""

    def law_after(text):
        model = TabularModel(RandomTable(VOCAB, 11), VOCAB)
        model.open({0: (PROMPT + text)[:-1]})
        scores = model.extend({0: NodeBlock.chain((PROMPT + text)[-1:])})[0].float()
        for processor in processors:
            scores = processor(torch.tensor([PROMPT + text]), scores)
        return law_from_logits(scores[0], RULES)

    return plain_law(law_after, length)


def law_of_speculation(processors, tree, length):
    models = [TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (11, 23)]
    options = {"max_new_tokens": length, "rules": RULES, "make_processors": lambda: processors}
    return loop_law(lambda: make_components(*models, tree=tree), length, PROMPT, **options)


@pytest.mark.parametrize(("name", "tree", "length"), CASES)
def test_speculation_keeps_the_law(name, tree, length):
    processors = processors_of(name)
    written = law_of_speculation(processors, tree, length)
    assert law_error(written, law_of_plain_decoding(processors, length)) < 1e-12


@pytest.mark.parametrize("name", [*SETTINGS, *MASKS])
def test_every_setting_changes_the_law(name):
    processors = processors_of(name)
    assert law_error(law_of_plain_decoding(processors), law_of_plain_decoding(())) > 1e-2


def test_a_mask_that_sees_the_first_token_of_a_path_alone_is_noticed():
    """A control: what a processor of one row a round would do."""
    (mask,) = processors_of("bad words")
    short = Stateless(lambda ids, scores: mask(ids[:, : len(PROMPT) + 1], scores))
    written = law_of_speculation((short,), "chain(2)", 3)
    assert law_error(written, law_of_plain_decoding((mask,), 3)) > 1e-2


def test_bad_words_end_with_the_completion():
    mask = BadWords(((3,), (1, 2), (5, 1, 2)), num_prompt_tokens=2)
    texts = {(0, 1): {3}, (0, 1, 1): {2, 3}, (0, 5, 1): {2, 3}, (0, 5, 1, 0): {3}}
    for text, expected in texts.items():
        scores = mask(torch.tensor([text]), torch.zeros(1, 6))
        assert set(torch.isinf(scores[0]).nonzero()[:, 0].tolist()) == expected


def penalised(token_ids, scores, num_prompt_tokens=1, **settings):
    (processor,) = text_processors(num_prompt_tokens, scores.shape[1], **settings)
    return processor(token_ids, scores)


def test_penalties_and_biases_follow_their_formulas():
    texts, scores = torch.tensor([[0, 1, 2, 2]]), torch.tensor([[2.0, -2.0, 1.0, 4.0]])
    for settings, expected in (
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 0.5, 4.0]),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, [2.0, -2.75, 0.0, 4.0]),
        ({"logit_bias": {3: -1, 0: 2.5}}, [4.5, -2.0, 1.0, 3.0]),
    ):
        assert penalised(texts, scores, **settings).tolist() == [expected]
    assert scores.tolist() == [[2.0, -2.0, 1.0, 4.0]], "the input was changed"


def test_repetition_is_that_of_transformers():
    token_ids, scores = torch.tensor([[0, 4, 4, 2]]), torch.linspace(-2, 3, 6)[None]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(token_ids, scores.clone())
    ours = penalised(token_ids, scores, repetition_penalty=1.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_bad_penalties_and_masks_are_refused():
    with pytest.raises(OptionError, match=r"logit_bias: token ids must lie in 0..2; got 3"):
        text_processors(1, VOCAB, logit_bias={3: 1.0})
    with pytest.raises(OptionError, match="repetition_penalty must be positive"):
        text_processors(1, VOCAB, repetition_penalty=0.0)
    for options in (
        {"allowed_ids": ()},
        {"allowed_ids": (1, 2), "bad_words": ((0, 1),), "late_ids": frozenset({2})},
        {"bad_words": ((0,), (1,), (2,))},
    ):
        with pytest.raises(OptionError, match="leave none of these tokens"):
            token_masks(1, VOCAB, **options)

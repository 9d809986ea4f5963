"""Processors of the caller that keep state, or that hold something for every row, through `generate`."""

import threading

import pytest
import torch
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig

import monge
from monge.core.errors import OptionError
from tests.engine.tiny import VOCAB, network, padded, perturbed, prompts

ROWS = prompts((6, 4), seed=8)
GREEDY = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None}


def both(rows=ROWS, fresh=dict, tree="fixed_width((2, 2, 1))", **settings):
    """Texts of plain generate and of ours; `fresh` makes what a call uses up."""
    target = network("llama")
    given = GREEDY | padded(rows) | settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = target.generate(**given, **fresh())
        ours = monge.generate(target, **given, **fresh(), draft=perturbed(target), tree=tree)
    return plain.tolist(), ours.tolist()


class Pattern(LogitsProcessor):
    """Two low tokens, a high one, and so on: moved on by the newest token, as a grammar is."""

    low, high = list(range(3, 40)), list(range(60, 90))

    def __init__(self):
        self.state, self.started = 0, False

    @property
    def allowed(self):
        return self.low if self.state < 2 else self.high

    def __call__(self, input_ids, scores):
        if self.started:
            assert int(input_ids[0, -1]) in self.allowed, "no token of the pattern"
            self.state = (self.state + 1) % 3
        self.started = True
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed] = scores[:, self.allowed]
        return masked


class BatchPattern(LogitsProcessor):
    """As the processors of grammar libraries: one state for every row of the batch that comes first."""

    def __init__(self):
        self.rows = None

    def __call__(self, input_ids, scores):
        if self.rows is None:
            self.rows = [Pattern() for _ in scores]
        assert len(self.rows) == len(scores), "another batch"
        texts = zip(self.rows, input_ids.split(1), scores.split(1), strict=True)
        return torch.cat([one(text, row) for one, text, row in texts])


class RowBias(LogitsProcessor):
    """One bias for every row, which is added to the whole batch."""

    def __init__(self):
        self.bias = torch.zeros(2, VOCAB)
        self.bias[0, 30:40] = self.bias[1, 50:60] = 20

    def __call__(self, input_ids, scores):
        return scores + self.bias


class LateRowBias(RowBias):
    """Row by row, and nothing until a text is longer: no first call shows what it does."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 10:
            for row in range(len(scores)):
                scores[row] += self.bias[row]
        return scores


class RowGrammars(LogitsProcessor):
    """A grammar for every row, each of which refuses the texts of the others."""

    def __call__(self, input_ids, scores):
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if input_ids.shape[1] > 6:
                assert token % 2 == row, "no token of this row's grammar"
            scores[row, 1 - row :: 2] = -torch.inf
        return scores


class Locked(Pattern):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "num_rows"),
    [(Pattern, 1), (BatchPattern, 1), (BatchPattern, 2), (RowBias, 2), (LateRowBias, 2)],
)
def test_rows_are_those_of_plain_decoding(make, num_rows):
    plain, ours = both(ROWS[:num_rows], lambda: {"logits_processor": [make()]})
    assert ours == plain


@pytest.mark.parametrize("tree", ["chain(4)", "fixed_width((2, 2, 1))", "best_first(6, 3, 3)"])
def test_sampled_texts_keep_to_the_pattern(tree):
    target = network("llama")
    given = {**padded(ROWS[:1]), "max_new_tokens": 12, "eos_token_id": None, "do_sample": True}
    given |= {"draft": perturbed(target), "tree": tree, "num_return_sequences": 5}
    for seed in range(2):
        output = monge.generate(target, **given, seed=seed, logits_processor=[BatchPattern()])
        for row in output[:, len(ROWS[0]) :].tolist():
            for place, token in enumerate(row):
                assert token in (Pattern.high if place % 3 == 2 else Pattern.low)


def test_the_callers_processor_stays_as_it_was():
    processor = Pattern()
    target = network("llama")
    given = GREEDY | padded(ROWS[:1]) | {"logits_processor": [processor]}
    texts = [monge.generate(target, **given, draft=perturbed(target)).tolist() for _ in range(2)]
    assert texts[0] == texts[1]
    assert not processor.started


def test_grammars_of_rows_are_an_error_that_names_the_processor():
    reason = r"(?s)RowGrammars failed \(AssertionError.*one row at a time"
    with pytest.raises(OptionError, match=reason):
        both(fresh=lambda: {"logits_processor": [RowGrammars()]})


def test_a_processor_that_cannot_be_copied_serves_one_row():
    with pytest.warns(UserWarning, match="the processor Locked cannot be copied"):
        plain, ours = both(ROWS[:1], lambda: {"logits_processor": [Locked()]})
    assert ours == plain
    with pytest.raises(OptionError, match="processor Locked: several texts need a copy each"):
        both(fresh=lambda: {"logits_processor": [Locked()]})


def test_scores_of_another_shape_name_the_processor():
    class Flat(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores[0]

    target = network("llama")
    for rows in (ROWS[:1], ROWS):
        with pytest.raises(OptionError, match=r"processor Flat: expected scores of shape \[\d, 97"):
            monge.generate(target, **padded(rows), **GREEDY, logits_processor=[Flat()])


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
def test_a_watermark_with_state(rows):
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    plain, ours = both(rows, watermarking_config=config)
    assert ours == plain
    assert ours != both(rows)[1]


@pytest.mark.usefixtures("unchecked_types")
def test_the_prefix_constraint_gets_the_number_that_the_host_passes():
    def allowed(number, token_ids):
        return [[10], [20], [30], [40]][number]

    settings = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4}
    plain, ours = both(prefix_allowed_tokens_fn=allowed, **settings)
    assert ours == plain

"""`generate(custom_generate=monge.speculate)` writes what `generate` writes."""

import gc

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

import monge
from monge.core.errors import OptionError
from monge.networks.hf_tree import HfTreeModel
from tests.engine.tiny import PAD, VOCAB, network, padded, perturbed, prompts

ROWS = prompts((9, 4, 7, 11), seed=7)
NUM_TOKENS = 24


def both(rows=ROWS, *, fresh=dict, speculative=None, **settings):
    """Greedy output of plain and of speculative decoding.

    `fresh` makes what must not be shared by the two calls.
    """
    target = network("llama")
    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, **padded(rows), **settings}
    plain = target.generate(**settings, **fresh())
    ours = target.generate(
        **settings,
        **fresh(),
        custom_generate=monge.speculate,
        **({"draft_model": perturbed(target)} | (speculative or {})),
    )
    return plain, ours


def token_after(row, index):
    """A token that the plain greedy continuation of a row has at this place."""
    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    return int(network("llama").generate(**padded(ROWS), **settings)[row, 11 + index])


@pytest.mark.parametrize(
    "speculative",
    [
        *({"tree": tree} for tree in ("chain(4)", "fixed_width((3, 2))", "best_first", None)),
        {
            "drafter": "model(top_k=5)",
            "tree": "fixed_width((2, 2))",
            "verifier": "sample_and_match",
        },
        {"controller": "goodput"},
        {"draft_model": None, "drafter": "ngram(num_draft_tokens=4)"},
        {"draft_model": None, "drafter": "none"},
        {"draft_model": None},
    ],
    ids=str,
)
def test_every_drafter_tree_and_verifier_writes_the_greedy_text(speculative):
    plain, ours = both(repetition_penalty=1.2, speculative=speculative)
    assert torch.equal(ours, plain)


@pytest.mark.usefixtures("unchecked_types")
def test_prefix_constraint_gets_its_own_row_and_text():
    # Every row has its own set of words, and a function that would raise for another row's text or
    # for a rejected path.
    allowed = [set(range(3 + 20 * row, 23 + 20 * row)) for row in range(4)]

    def function(row, token_ids):
        assert token_ids[11:].tolist() == [] or set(token_ids[11:].tolist()) <= allowed[row]
        return sorted(allowed[row])

    plain, ours = both(eos_token_id=None, prefix_allowed_tokens_fn=function)
    assert torch.equal(ours, plain)
    assert all(set(ours[row, 11:].tolist()) <= allowed[row] for row in range(4))


class InPlace(LogitsProcessor):
    """A user's processor that writes into its argument and depends on the text."""

    def __call__(self, input_ids, scores):
        scores[torch.arange(len(scores)), input_ids[:, -1]] -= 3.0
        return scores


def test_processors_may_write_in_place():
    plain, ours = both(logits_processor=LogitsProcessorList([InPlace()]))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize("index", [0, 1, 2, 3, 6])
def test_end_of_text_inside_a_block(rows, index):
    ends = [token_after(row, index + row) for row in range(4)]
    plain, ours = both(rows, eos_token_id=ends, pad_token_id=PAD)
    assert torch.equal(ours, plain)
    assert plain.shape[1] < max(map(len, rows)) + NUM_TOKENS or len(rows) > 1


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        *(({"max_new_tokens": count}, 11 + count) for count in (1, 2, 3, 5)),
        ({"max_new_tokens": None, "max_length": 19}, 19),  # counts the padded prompt
        ({"max_time": 1e-9}, 12),  # the first look at the clock stops all rows
    ],
    ids=str,
)
def test_maximal_length_and_time(settings, length):
    plain, ours = both(**settings)
    assert torch.equal(ours, plain)
    assert ours.shape[1] <= length


def test_return_dict_holds_the_sequences_of_plain_decoding():
    plain, ours = both(return_dict_in_generate=True)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours.sequences, plain.sequences)


def test_several_return_sequences_arrive_expanded():
    target = network("llama")
    inputs = {**padded(ROWS[:2]), "max_new_tokens": 8, "do_sample": True}
    inputs |= {"num_return_sequences": 3, "repetition_penalty": 1.2, "seed": 1}
    ours = target.generate(**inputs, custom_generate=monge.speculate, draft_model=perturbed(target))
    assert ours.shape[0] == 6
    assert torch.equal(ours[:3, :9], inputs["input_ids"][:1].expand(3, -1))
    assert len({tuple(row) for row in ours[:3].tolist()}) == 3, "rows draw for themselves"


class Recorder(StoppingCriteria, BaseStreamer):
    """Writes down what it is shown; stops a row, or the whole batch, at given tokens."""

    def __init__(self, tokens=(), *, whole_batch=False):
        self.seen, self.tokens, self.whole_batch = [], torch.tensor(tokens), whole_batch

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        self.seen.append(input_ids.tolist())
        stopped = torch.isin(input_ids[:, -1], self.tokens)
        return bool(stopped.any()) if self.whole_batch else stopped

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize("eos", [None, 1, 40], ids=["unpadded", "padded", "eos"])
@pytest.mark.parametrize("whole_batch", [False, True], ids=["rows", "batch"])
def test_criteria_see_what_plain_decoding_shows_them(rows, eos, whole_batch):
    recorders = []
    places = [(0, 15)] if whole_batch else [(row, 3 + 4 * row) for row in range(4)]
    tokens = [token_after(*place) for place in places]

    def fresh():
        recorders.append(Recorder(tokens, whole_batch=whole_batch))
        return {"stopping_criteria": StoppingCriteriaList([recorders[-1]])}

    plain, ours = both(rows, fresh=fresh, eos_token_id=eos, pad_token_id=PAD)
    assert torch.equal(ours, plain)
    assert recorders[1].seen == recorders[0].seen
    assert len(recorders[0].seen) < NUM_TOKENS, "the criterion was to stop something"


def test_stop_strings_end_the_text_of_speculate():
    tokenizer = letter_tokenizer()
    words = [letters((token_after(row, 4), token_after(row, 5))) for row in range(4)]

    def fresh():
        return {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, words)])}

    plain, ours = both(fresh=fresh)
    assert torch.equal(ours, plain)
    assert plain.shape[1] <= 11 + 6, "every row was to stop at its sixth token at the latest"


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
def test_streamer_gets_prompt_columns_and_end(rows):
    target, plain, ours = network("llama"), Recorder(), Recorder()
    inputs = {**padded(rows), "do_sample": False, "max_new_tokens": NUM_TOKENS}
    inputs["eos_token_id"] = token_after(0, 6)
    target.generate(**inputs, streamer=plain)
    inputs |= {"custom_generate": monge.speculate, "draft_model": perturbed(target)}
    target.generate(**inputs, token_streamer=ours)
    assert ours.seen == plain.seen


def test_models_are_released():
    gc.collect()
    gc.disable()
    try:
        before = count_models()
        both()
        assert count_models() == before
    finally:
        gc.enable()


def count_models():
    # By type, not isinstance, which would ask lazy modules for attributes.
    return sum(type(thing) is HfTreeModel for thing in gc.get_objects())


def letters(token_ids):
    return "".join(chr(30 + token) for token in token_ids)


def letter_tokenizer():
    """One printable character per token."""
    vocabulary = {letter: token for token, letter in enumerate(letters(range(VOCAB)))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_an_unknown_controller_is_refused():
    with pytest.raises(OptionError, match="did you mean 'goodput'"):
        both(speculative={"controller": "goodputt"})

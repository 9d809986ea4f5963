"""Log-probabilities of drawn tokens, against a plain forward of the whole text and the host's own processors."""

import copy
from itertools import product

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import monge
from monge.core.errors import OptionError
from tests.engine.tiny import EOS, network, padded, perturbed, prompts

ROWS = padded(prompts((6, 4, 2), seed=8))
SHORT = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logprobs": True}
LAWS = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "temperature": 0.6, "top_k": 0},
    "top-k": {"do_sample": True, "top_k": 5},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.8, "temperature": 1.3},
    "all": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    | {"min_p": 0.05, "repetition_penalty": 1.3},
    "typical": {"do_sample": True, "top_k": 0, "typical_p": 0.7},
}
DRAFTERS = {
    "none": {"drafter": "none"},
    "model": {},
    "tree": {"tree": "fixed_width((3, 2))"},
    "history": {"drafter": "suffix(max_history=400)", "controller": "fixed"},
}


class Shifted(LogitsProcessor):
    """A processor of the caller: one with state, since it counts its calls."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + torch.arange(scores.shape[1]) / 50


def model_with(name):
    target = copy.deepcopy(network("llama"))
    draft = perturbed(target) if name in {"model", "tree"} else None
    return monge.accelerate(target, draft, **DRAFTERS[name])


def expected(model, sequences, processors):
    """What plain forwards say of every new token: both log-probabilities, and the mass kept."""
    length = ROWS["input_ids"].shape[1]
    starts = length - ROWS["attention_mask"].sum(dim=1)
    texts = zip(sequences, starts, strict=True)
    with torch.no_grad():
        rows = [model(text[None, start:]).logits[0] for text, start in texts]
    num_new = sequences.shape[1] - length
    logits = torch.stack([row[-num_new - 1 : -1] for row in rows])
    columns = []
    for place in range(num_new):
        scores, before = logits[:, place].clone(), None
        for processor in processors:
            if before is None and type(processor).__name__ in TRUNCATING:
                before = scores.clone()
            scores = processor(sequences[:, : length + place], scores)
        before = (scores if before is None else before).double().softmax(-1)
        token = sequences[:, length + place, None]
        drawn = [
            numbers.double().log_softmax(-1).gather(1, token)[:, 0]
            for numbers in (scores, logits[:, place])
        ]
        columns.append((*drawn, before.masked_fill(scores == -torch.inf, 0).sum(-1)))
    return [torch.stack(column, dim=1) for column in zip(*columns, strict=True)]


TRUNCATING = {f"{name}LogitsWarper" for name in ("TopK", "TopP", "MinP", "Typical")}


def host_processors(model, settings, extra=()):
    """The processors that the host makes of these settings, seen by a callable that takes its place."""
    seen = []

    def look(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
        seen.extend(logits_processor)
        return input_ids

    given = {name: settings[name] for name in settings.keys() - {"output_logprobs", "seed"}}
    given |= {"custom_generate": look, "logits_processor": LogitsProcessorList(list(extra))}
    monge.restore(copy.deepcopy(model)).generate(**ROWS, **given)
    return seen


@pytest.mark.parametrize(
    ("name", "law"), [*product(["model", "history"], LAWS), ("tree", "all"), ("none", "all")]
)
def test_drawn_logprobs_are_those_of_a_plain_forward(name, law):
    model = model_with(name)
    settings = SHORT | LAWS[law] | {"eos_token_id": None, "seed": 5}
    if name == "history":
        model.generate(**ROWS, **settings)
    output = model.generate(**ROWS, **settings)
    processors = host_processors(model, settings)
    processed, raw, kept = expected(model, output.sequences, processors)
    if law == "greedy":
        processed, kept = torch.zeros_like(processed), torch.ones_like(kept)
    near = {"atol": 2e-4, "rtol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(output.raw_logprobs, raw, **near)
    torch.testing.assert_close(output.processed_logprobs, processed, **near)
    torch.testing.assert_close(output.kept_mass, kept, **near)
    if law in {"top-k", "top-p", "typical"}:
        assert output.kept_mass.min() < 0.98
    if law == "top-k":  # no temperature: truncation is all that separates the two
        whole = output.processed_logprobs + output.kept_mass.log()
        torch.testing.assert_close(whole, output.raw_logprobs)


def test_a_processor_of_the_caller_comes_before_truncation():
    model = model_with("model")
    settings = SHORT | LAWS["all"] | {"eos_token_id": None, "seed": 5}
    output = model.generate(**ROWS, **settings, logits_processor=LogitsProcessorList([Shifted()]))
    processors = host_processors(model, settings, [Shifted()])
    processed, _, kept = expected(model, output.sequences, processors)
    near = {"atol": 2e-4, "rtol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(output.processed_logprobs, processed, **near)
    torch.testing.assert_close(output.kept_mass, kept, **near)


def test_rows_that_have_ended_add_nothing_and_scores_can_be_had_beside():
    model = model_with("model")
    settings = SHORT | LAWS["all"] | {"max_new_tokens": 40, "seed": 1}
    stop = int(model.generate(**ROWS, **settings, eos_token_id=None).sequences[0, 10])
    ends = {"eos_token_id": stop, "pad_token_id": EOS}
    output = model.generate(**ROWS, **settings, **ends, output_scores=True)
    new = output.sequences[:, ROWS["input_ids"].shape[1] :]
    has_ended = (new == stop).long().cumsum(1) - (new == stop).long() > 0
    assert has_ended.any()
    assert output.kept_mass.shape == new.shape == output.raw_logprobs.shape
    assert (output.processed_logprobs[has_ended] == 0).all()
    assert (output.raw_logprobs[has_ended] == 0).all()
    assert (output.kept_mass[has_ended] == 1).all()
    assert (output.raw_logprobs[~has_ended] < 0).all()
    for place, scores in enumerate(output.scores):
        runs = ~has_ended[:, place]
        own = scores[runs].double().log_softmax(-1).gather(1, new[runs, place, None])[:, 0]
        told = output.processed_logprobs[runs, place].double()
        torch.testing.assert_close(told, own, atol=1e-5, rtol=0)


def test_texts_are_the_same_without_them_and_nothing_is_kept_then(monkeypatch):
    model = model_with("model")
    settings = SHORT | LAWS["all"] | {"seed": 5}
    output = model.generate(**ROWS, **settings)
    monkeypatch.setattr("monge.requests.logprobs.along", None)  # which nobody may need
    monkeypatch.setattr("monge.engine.session.along", None)
    monkeypatch.setattr("monge.requests.sampling.NodeLaws.kept_mass", None)
    plain = model.generate(**ROWS, **settings | {"output_logprobs": False})
    assert torch.equal(output.sequences, plain.sequences)
    assert not hasattr(plain, "raw_logprobs")


def test_drawn_logprobs_need_a_dictionary_output():
    model = model_with("none")
    with pytest.raises(OptionError, match="output_logprobs needs return_dict_in_generate=True"):
        model.generate(**ROWS, max_new_tokens=2, output_logprobs=True)
    monge.accelerate(monge.restore(model), drafter="none", output_logprobs=True)
    with pytest.raises(OptionError, match="output_logprobs needs"):
        model.generate(**ROWS, max_new_tokens=2)
    output = model.generate(**ROWS, max_new_tokens=2, return_dict_in_generate=True)
    assert output.raw_logprobs.shape == (3, 2)

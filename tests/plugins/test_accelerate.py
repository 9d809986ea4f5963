"""`accelerate(model)` and `monge.generate(model, ...)`: every argument of `generate` is honoured or raises."""

import copy

import pytest
import torch
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    T5Config,
    T5ForConditionalGeneration,
    TopKLogitsWarper,
    TopPLogitsWarper,
    pipeline,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

import monge
from monge import Chain, Model, Ngram, Pool
from monge.api import built_in
from monge.core.errors import OptionError, UnsupportedModelError
from monge.networks.hf_tree import HfTreeModel
from monge.plugins import transformers_generate
from monge.plugins.transformers_compiled import GenerateCall
from tests.engine.tiny import PAD, network, padded, perturbed, prompts

ROWS = prompts((9, 4, 7, 11), seed=7)
GREEDY = {"do_sample": False, "max_new_tokens": 16}
ENDS = [1, 17, 33, 71]
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture
def target():
    return copy.deepcopy(network("llama"))


def accelerated(target, **options):
    return monge.accelerate(copy.deepcopy(target), perturbed(target), **options)


def calls_of(model):
    """A list that grows at every forward of a model."""
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    return calls


class Recorder(BaseStreamer):
    """Notes what a streamer is given."""

    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


class TestOutputs:
    @pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
    @pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.4}], ids=str)
    def test_scores_and_logits_of_every_token(self, target, rows, processors):
        settings = {**padded(rows), **GREEDY, **processors, **OUTPUTS}
        settings |= {"eos_token_id": ENDS, "pad_token_id": PAD}
        plain, ours = target.generate(**settings), accelerated(target).generate(**settings)
        assert torch.equal(ours.sequences, plain.sequences)
        assert len(ours.scores) == len(ours.logits) == len(plain.scores)
        length = padded(rows)["input_ids"].shape[1]
        for row in range(len(rows)):
            written = plain.sequences[row, length:].tolist()
            ends = [place for place, token in enumerate(written) if token in ENDS]
            count = ends[0] + 1 if ends else len(written)
            for name in ("scores", "logits"):
                found, expected = (
                    torch.stack(getattr(output, name))[:, row] for output in (ours, plain)
                )
                torch.testing.assert_close(found[:count], expected[:count], atol=2e-4, rtol=1e-4)
                assert not found[count:].any()

    @pytest.mark.parametrize("tree", ["chain(3)", "fixed_width((2, 2))"])
    @pytest.mark.parametrize("settings", [{"top_k": 7, "temperature": 0.8}, {"top_k": 0}], ids=str)
    def test_scores_of_sampled_tokens_are_those_of_a_plain_forward(self, target, tree, settings):
        model = accelerated(target, tree=tree, seed=3)
        sampled = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
        output = model.generate(**padded(ROWS[:2]), **sampled, **OUTPUTS, **settings)
        given = padded(ROWS[:2])["attention_mask"]
        mask = torch.cat([given, torch.ones(2, 12, dtype=torch.long)], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        inputs = {"input_ids": output.sequences, "attention_mask": mask, "position_ids": positions}
        with torch.no_grad():
            logits = target(**inputs).logits[:, -13:-1]
        torch.testing.assert_close(torch.stack(output.logits, 1), logits, atol=2e-4, rtol=1e-4)
        scores = torch.stack(output.scores, 1)
        chosen = scores.gather(2, output.sequences[:, -12:, None])
        assert chosen.isfinite().all(), "a token was drawn that the warpers had excluded"
        if settings["top_k"]:
            assert (scores.isfinite().sum(2) == settings["top_k"]).all()

    def test_only_what_is_asked_for(self, target):
        model = accelerated(target)
        settings = {**padded(ROWS), **GREEDY, "output_scores": True}
        output = model.generate(**settings, return_dict_in_generate=True)
        assert output.logits is None
        assert len(output.scores) == output.sequences.shape[1] - padded(ROWS)["input_ids"].shape[1]
        assert isinstance(model.generate(**settings), torch.Tensor)


class TestArguments:
    def test_an_assistant_of_a_call_drafts(self, target):
        assistant = perturbed(target)
        calls = calls_of(assistant)
        settings = {**padded(ROWS), **GREEDY, "num_assistant_tokens": 2}
        model = monge.accelerate(copy.deepcopy(target))
        ours = model.generate(**settings, assistant_model=assistant)
        assert torch.equal(ours, target.generate(**padded(ROWS), **GREEDY))
        assert calls

    def test_positions(self, target):
        given = padded(ROWS[:1])["input_ids"], (config := GenerationConfig(**GREEDY))
        assert torch.equal(accelerated(target).generate(*given), target.generate(*given))
        with pytest.raises(TypeError, match="multiple values for argument 'generation_config'"):
            accelerated(target).generate(*given, generation_config=config)
        with pytest.raises(TypeError, match="too many positional arguments"):
            accelerated(target).generate(*[None] * 12)

    def test_a_streamer_gets_the_prompt_once_and_every_column(self, target):
        plain, ours = Recorder(), Recorder()
        target.generate(**padded(ROWS[:1]), **GREEDY, streamer=plain)
        accelerated(target).generate(**padded(ROWS[:1]), **GREEDY, streamer=ours)
        assert ours.seen == plain.seen

    def test_one_call(self, target):
        calls = calls_of(draft := perturbed(target))
        ours = monge.generate(target, **padded(ROWS), **GREEDY, draft=draft, tree="chain(2)")
        assert torch.equal(ours, target.generate(**padded(ROWS), **GREEDY))
        assert calls

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"prompt_lookup_num_tokens": 3}, "give drafter='ngram"),
            ({"custom_generate": "x"}, r"undo with `monge\.restore\(model\)`"),
            ({"assistant_tokenizer": object()}, "must have the target's tokenizer"),
            ({"synced_gpus": True}, "synced_gpus"),
            ({"stop_strings": ["a"]}, "give tokenizer= as well"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_what_cannot_be_honoured_raises(self, target, settings, message):
        with pytest.raises(OptionError, match=message):
            accelerated(target).generate(**padded(ROWS), **GREEDY, **settings)

    def test_unknown_options(self, target):
        refusal = r"unknown options trees.*expected some of controller"
        with pytest.raises(OptionError, match=refusal):
            monge.accelerate(target, trees="chain(3)")
        with pytest.raises(OptionError, match=r"got int.*pipe\.model"):
            monge.accelerate(3)


class TestHostModes:
    """What the host decodes in other ways is left to it."""

    @pytest.mark.parametrize("place", ["call", "config", "model"])
    @pytest.mark.parametrize("more", [{}, {"do_sample": True}], ids=["beam search", "beam sample"])
    def test_beams(self, target, place, more):
        settings = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": None, **more}
        settings |= {"return_dict_in_generate": True, "output_scores": True}
        model = accelerated(target, seed=5)
        if place == "model":
            for one in (model, target):
                one.generation_config = GenerationConfig(num_beams=settings["num_beams"])
            del settings["num_beams"]
        given = settings
        if place == "config":
            given = {"generation_config": GenerationConfig(**settings)}
        set_seed(1)
        expected = target.generate(**padded(ROWS), **given)
        set_seed(1)
        with pytest.warns(UserWarning, match="left to transformers.*without drafts") as told:
            found = model.generate(**padded(ROWS), **given, drafter="ngram")
        assert len(told) == 1
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.sequences_scores, expected.sequences_scores)


class TestModel:
    @pytest.mark.parametrize("function", [monge.accelerate, monge.generate])
    def test_an_encoder_decoder_is_refused_at_once(self, function):
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1}
        model = T5ForConditionalGeneration(T5Config(**sizes, num_heads=2, decoder_start_token_id=0))
        calls = calls_of(model)
        with pytest.raises(UnsupportedModelError, match="T5For.*is an encoder-decoder"):
            function(model)
        assert not calls
        assert "generate" not in vars(model)

    def test_is_undone_once_or_twice(self, target):
        model = accelerated(target)
        calls = calls_of(model.generate.draft)
        assert monge.is_accelerated(model)
        assert monge.restore(monge.restore(model)) is model
        assert not monge.is_accelerated(model)
        model.generate(**padded(ROWS), **GREEDY)
        assert not calls

    def test_is_undone_inside_of_a_wrapper(self, target):
        model = accelerated(target)
        wrapper = torch.nn.Sequential(model)
        assert monge.is_accelerated(wrapper)
        monge.restore(wrapper)
        assert not monge.is_accelerated(model)

    @pytest.mark.parametrize("function", [monge.restore, monge.is_accelerated])
    def test_what_is_no_model_is_refused(self, function):
        with pytest.raises(OptionError, match=r"got str; expected .*pipe\.model"):
            function("a pipeline")

    def test_again_replaces(self, target):
        first, second = perturbed(target), copy.deepcopy(perturbed(target))
        calls, others = calls_of(first), calls_of(second)
        monge.accelerate(monge.accelerate(target, first), second)
        target.generate(**padded(ROWS), **GREEDY)
        assert others
        assert not calls

    def test_copies_decode_with_their_own_weights(self, target):
        model = accelerated(target)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.zero_()
        expected = target.generate(**padded(ROWS), **GREEDY)
        assert torch.equal(copied.generate(**padded(ROWS), **GREEDY), expected)


@pytest.mark.parametrize("tree", ["chain(4)", "fixed_width((2, 2))"])
@pytest.mark.parametrize(
    "rules", [{"top_p": 0.3, "top_k": 0}, {"top_k": 3}, {"min_p": 0.9}], ids=str
)
def test_tokens_of_equal_scores_are_kept_as_the_host_keeps_them(target, tree, rules):
    """Its order of them is that of an unstable sort, so no rule of this library could repeat it."""
    with torch.no_grad():
        weight = target.get_output_embeddings().weight
        weight.copy_(weight[:1] * (torch.arange(len(weight)) % 3 == 0)[:, None])
    settings = {"do_sample": True, "max_new_tokens": 40, "eos_token_id": None, **rules, **OUTPUTS}
    outputs = accelerated(target, tree=tree).generate(**padded(ROWS), **settings)
    processors = [
        TopKLogitsWarper(rules.get("top_k", 50) or len(weight)),
        TopPLogitsWarper(rules.get("top_p", 1.0)),
        MinPLogitsWarper(rules.get("min_p", 0.0)),
    ]
    for step, logits in enumerate(outputs.logits):
        scores = logits
        for processor in processors:
            scores = processor(None, scores)
        drawn = outputs.sequences[:, outputs.sequences.shape[1] - len(outputs.logits) + step]
        assert scores.gather(1, drawn[:, None]).isfinite().all()
        assert torch.equal(scores.isfinite(), outputs.scores[step].isfinite())


def test_a_pipeline_of_an_accelerated_model_writes_the_same_text(built_in_pair):
    target, tokenizer = built_in_pair
    pipe = pipeline("text-generation", model=copy.deepcopy(target), tokenizer=tokenizer)
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = pipe("The history of", **settings)
    monge.accelerate(pipe.model, built_in("draft"))
    calls = calls_of(pipe.model.generate.draft)
    assert pipe("The history of", **settings) == expected
    assert calls


@pytest.mark.parametrize("place", ["call", "config"])
def test_stop_strings_end_the_text_of_generate(built_in_pair, place):
    target, tokenizer = built_in_pair
    inputs = tokenizer("The history of", return_tensors="pt", return_token_type_ids=False)
    given = {"stop_strings": [" Countries"], "do_sample": False, "max_new_tokens": 20}
    if place == "config":
        given = {"generation_config": GenerationConfig(**given)}
    plain = target.generate(**inputs, **given, tokenizer=tokenizer)
    ours = monge.generate(target, **inputs, **given, tokenizer=tokenizer, draft=built_in("draft"))
    assert torch.equal(ours, plain)
    assert plain.shape[1] < inputs["input_ids"].shape[1] + 20


def test_a_head_is_read_once(built_in_pair):
    target, tokenizer = built_in_pair
    inputs = tokenizer("The history of", return_tensors="pt", return_token_type_ids=False)
    model = monge.accelerate(copy.deepcopy(target), built_in("shape"))
    assert not isinstance(model.generate.draft, str)
    expected = target.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


PAIR, SHORT = padded(prompts((9, 4), seed=3)), {"max_new_tokens": 8, "eos_token_id": None}


@pytest.fixture
def decoded(monkeypatch):
    """Components and requests of the calls, as they are decoded."""
    seen, decode = [], transformers_generate.decode

    def noting(sessions, components, **options):
        seen.append((components, [session.request for session in sessions]))
        return decode(sessions, components, **options)

    monkeypatch.setattr(transformers_generate, "decode", noting)
    return seen


@pytest.mark.parametrize("has_draft", [True, False])
def test_the_default_controller_is_that_of_load(decoded, has_draft):
    target = network("llama")
    draft = perturbed(target) if has_draft else None
    ours = {"custom_generate": monge.speculate, "draft_model": draft}
    target.generate(**PAIR, **SHORT, **ours, do_sample=False)
    ((found, requests),) = decoded
    expected = monge.load(target, draft).components
    assert found.controllers == expected.controllers
    assert (found.controller, found.seeded) == (expected.controller, expected.seeded)
    assert found.shared.members == expected.shared.members
    assert type(found.rule) is type(expected.rule)
    assert [request.controller for request in requests] == [None, None]


@pytest.mark.parametrize("way", ["seed", "deterministic algorithms"])
def test_sampled_calls_that_are_to_repeat_keep_a_plan(decoded, way):
    target = network("llama")
    texts, draft = [], perturbed(target)
    ours = {"custom_generate": monge.speculate, "draft_model": draft}
    if way == "seed":
        ours["seed"] = 5
    torch.use_deterministic_algorithms(way != "seed")
    try:
        for _ in range(2):
            set_seed(5)
            texts.append(target.generate(**PAIR, **SHORT, **ours, do_sample=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*texts)
    assert {request.controller for _, requests in decoded for request in requests} == {"fixed"}


def test_other_sampled_calls_have_the_controller_that_stops_drafting(decoded):
    target = network("llama")
    ours = {"custom_generate": monge.speculate, "draft_model": perturbed(target)}
    target.generate(**PAIR, **SHORT, **ours, do_sample=True)
    assert [request.controller for _, requests in decoded for request in requests] == [None, None]


def test_what_is_learned_of_a_model_is_kept_for_its_next_calls(decoded):
    made = monge.accelerate(copy.deepcopy(network("llama")), perturbed(network("llama")))
    for options in ({}, {}, {"tree": "chain(2)"}):
        made.generate(**PAIR, **SHORT, do_sample=False, **options)
    shared = [components.shared for components, _ in decoded]
    assert shared[0] is shared[1]
    assert shared[2] is not shared[0], "another tree has other times"


def test_calls_with_other_networks_in_a_drafter_object_learn_apart():
    """The text of a drafter does not name its networks."""
    target, *drafts = (network("llama") for _ in range(3))

    models = [HfTreeModel(draft) for draft in drafts]
    drafters = [Pool(Ngram(), Model(model=model, tree=Chain(2))) for model in (*models, models[0])]
    shared = {"model": target, "draft": None, "draft_rules": None}
    keys = [GenerateCall(options={"drafter": drafter}, **shared).key for drafter in drafters]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]

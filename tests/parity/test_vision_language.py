"""Vision-language models decode texts as plain `generate` does; images are refused in words."""

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import monge
from monge.api import built_in
from monge.core.errors import OptionError, UnsupportedModelError
from monge.networks.hf_tree import HfTreeModel
from tests.engine.tiny import VOCAB, padded, perturbed, prompts
from tests.engine.vision_language import CHAINS, IMAGE_TOKEN, TREES, made
from tests.parity.comparing import RandomGrowth, assert_same_tokens, plain_greedy

NUM_TOKENS = 12
ROWS = prompts((9, 5), seed=5, vocab=IMAGE_TOKEN)
TREE = "best_first(num_nodes=8)"
INPUTS = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
LARGEST_DIFFERENCE = 5e-5
"""Of logits of two float32 forwards in another order of summation."""


def draft_of(target):
    return perturbed(target, noise=0.05)


def check(target, texts):
    for row, text in zip(ROWS, texts, strict=True):
        assert_same_tokens(target, row, text, plain_greedy(target, row, NUM_TOKENS))


def dropped_in(target, **options):
    """The texts of a padded batch."""
    ours = {"custom_generate": monge.speculate, "draft_model": draft_of(target), **options}
    output = target.generate(**padded(ROWS), **INPUTS, **ours)
    return output[:, max(map(len, ROWS)) :].tolist()


def loaded(target, draft=None, **options):
    """The texts by `monge.load`, and how many tokens a round gives."""
    decoder = monge.load(target, draft, controller="fixed", **options)
    results = decoder.generate(ROWS, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert [result.error for result in results] == [None] * len(ROWS)
    efficiency = max(result.stats.block_efficiency for result in results)
    return [result.token_ids for result in results], efficiency


@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    target = made(name)
    check(target, dropped_in(target, tree=TREE))


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
@pytest.mark.parametrize("name", TREES | CHAINS)
def test_chains(name):
    target = made(name, attention="sdpa")
    texts, block_efficiency = loaded(target, draft_of(target), tree="chain(3)")
    check(target, texts)
    assert 1 < block_efficiency < 4, "tokens were to be accepted and rejected"


@pytest.mark.parametrize("name", TREES)
def test_every_node_has_the_logits_of_its_own_text(name):
    target = made(name)
    growth = RandomGrowth(target, prompts((9, 4, 6), seed=1, vocab=IMAGE_TOKEN), seed=2)
    assert max(growth.round(compare=True) for _ in range(2)) < LARGEST_DIFFERENCE
    assert growth.non_prefix_commits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHAINS)
def test_recurrent_state_takes_no_trees(name):
    target = made(name)
    with pytest.raises(UnsupportedModelError, match="trees are not possible.*use tree='chain'"):
        dropped_in(target, tree=TREE)


def test_the_other_ways_in():
    target = made("qwen2_5_vl")
    inputs = padded(ROWS) | INPUTS
    expected = target.generate(**inputs)
    assert torch.equal(monge.generate(target, **inputs, draft=draft_of(target)), expected)
    monge.accelerate(target)
    assert torch.equal(target.generate(**inputs), expected)


# With a class for text and images alone; with one for text as well.
@pytest.mark.parametrize("name", ["llava", "mllama"])
def test_folders(name, tmp_path):
    target = made(name)
    target.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(built_in("target")).save_pretrained(tmp_path)
    check(target, loaded(tmp_path, drafter="ngram")[0])


def test_places_of_an_earlier_image_do_not_move_a_text():
    target = made("qwen2_vl")
    target.model.rope_deltas = torch.tensor([[5]])
    texts, _ = loaded(target, draft_of(target))
    check(target, texts)


@pytest.mark.parametrize(
    ("name", "marks"), [("qwen2_vl", "mm_token_type_ids"), ("gemma3", "token_type_ids")]
)
def test_marks_of_the_processor(name, marks):
    target, text = made(name), torch.zeros(len(ROWS), 9, dtype=torch.int64)
    check(target, dropped_in(target, **{marks: text}))
    image = text.clone()
    image[0, 7] = 1
    with pytest.raises(OptionError, match=f"beside the text: {marks}; .* only text is read"):
        dropped_in(target, **{marks: image})


def test_places_of_an_image_are_refused():
    target = made("qwen2_vl")
    places = torch.arange(9).repeat(4, 1, 1)
    inputs = {"input_ids": torch.tensor([ROWS[0]]), **INPUTS}
    expected = target.generate(**inputs)
    assert torch.equal(monge.generate(target, **inputs, position_ids=places), expected)
    places[2, 0, 5:] += 1
    with pytest.raises(OptionError, match="position_ids other than 0, 1, 2"):
        monge.generate(target, **inputs, position_ids=places)


def by_callable(target, **inputs):
    return target.generate(**inputs, custom_generate=monge.speculate)


WAYS = {
    "generate": monge.generate,
    "accelerate": lambda target, **inputs: monge.accelerate(target).generate(**inputs),
    "custom_generate": by_callable,
}


@pytest.mark.parametrize("decode", WAYS.values(), ids=WAYS)
def test_images_are_refused(decode):
    target = made("llava")
    inputs = {"input_ids": torch.tensor([[5, *[IMAGE_TOKEN] * 4, 7]]), "max_new_tokens": 2}
    inputs["pixel_values"] = torch.zeros(1, 3, 28, 28)
    # Newer hosts encode an image before they call anybody.
    given = r"(pixel_values|mm_encoder_outputs \(image\))"
    with pytest.raises(OptionError, match=f"beside the text: {given}; leave.*to plain `generate`"):
        decode(target, **inputs)


def test_prompts_that_look_both_ways_are_refused():
    target = made("paligemma")
    for use in (dropped_in, loaded):
        with pytest.raises(UnsupportedModelError, match="see those behind.*use it without monge"):
            use(target)


def test_a_network_that_needs_an_image_is_refused():
    target = made("idefics")
    with pytest.raises(UnsupportedModelError, match="cannot read text.*pixel_values.*use the net"):
        loaded(target, drafter="none")


def test_heads_need_the_states_of_every_layer():
    model = HfTreeModel(made("mllama"))
    model.watch((0, 3))
    with pytest.raises(UnsupportedModelError, match="3 hidden states for 3 layers.*another draft"):
        model.open({0: ROWS[0]})


T5 = T5Config(
    vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
    decoder_start_token_id=0,
)  # fmt: skip
BART = BartConfig(
    vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # no settings of their own for the length
@pytest.mark.parametrize(
    ("kind", "config"), [(T5ForConditionalGeneration, T5), (BartForConditionalGeneration, BART)]
)
def test_encoder_decoders_are_refused(kind, config, tmp_path):
    network = kind(config).eval()
    network.save_pretrained(tmp_path)
    message = "encoder-decoder.*; a decoder-only model is needed"
    for target in (network, tmp_path):
        with pytest.raises(UnsupportedModelError, match=message):
            monge.load(target)
    with pytest.raises(UnsupportedModelError, match=message):
        monge.load(made("llava"), network)
    with pytest.raises(UnsupportedModelError, match=message):
        monge.generate(network, torch.tensor([[3, 4]]), max_new_tokens=2)

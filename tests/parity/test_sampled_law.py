"""Sampled output of every family follows the law of plain forwards.

Every draw of the real loop enumerated, no samples.

Top-2 sampling leaves two tokens a node, so the loop over a real network has few enough branches.
Prompts are longer than the sliding windows, and the trees reach beyond the horizon.
"""

import pytest
import torch

from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits
from monge.loading.networks import as_sequence_model
from monge.oracle.exact_law import law_error
from tests.engine import laws
from tests.engine.tiny import CHAIN_FAMILIES, TREE_FAMILIES, network, perturbed, prompts

ROUNDING = 2e-5
"""Between laws of two float32 forwards in another order of summation, over two factors.

A wrong rule errs by 1e-2 and more.
"""
RULES = SamplingRules(top_k=2, temperature=1.5)
HORIZON = 2
(PROMPT,) = prompts((14,), seed=3)


def plain_law(model):
    def law_after(text):
        with torch.inference_mode():
            return law_from_logits(model(torch.tensor([PROMPT + text])).logits[0, -1], RULES)

    return laws.plain_law(law_after, HORIZON)


def output_law(model, **options):
    target, draft = as_sequence_model(model), as_sequence_model(perturbed(model))
    parts = make_components(target, draft, **options)

    return laws.loop_law(lambda: parts, HORIZON, PROMPT, rules=RULES, seed=0)


OFTEN = {"llama", "mistral_window", "gemma3", "gpt2", "phi3", "opt"}
"""Families that differ in what a tree is read by; `test_greedy` reads trees of all of them."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in TREE_FAMILIES],
)
def test_trees(name):
    model = network(name)
    output = output_law(
        model, tree="fixed_width((2, 1))", verifier="recursive_rejection_without_replacement"
    )
    assert law_error(output, plain_law(model)) < ROUNDING


@pytest.mark.parametrize("name", ["llama", *CHAIN_FAMILIES])
def test_chains(name):
    model = network(name)
    output = output_law(model, tree="chain(2)", verifier="speculative_sampling")
    assert law_error(output, plain_law(model)) < ROUNDING


def test_another_law_is_seen():
    """The comparison can fail: the same family at another temperature is far away."""
    model = network("llama")
    squares = {text: weight**2 for text, weight in plain_law(model).items()}
    cold = {text: weight / sum(squares.values()) for text, weight in squares.items()}
    assert law_error(cold, plain_law(model)) > 100 * ROUNDING

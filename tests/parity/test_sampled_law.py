"""Sampled output of every family follows the law of plain forwards.

Every draw of the real loop enumerated, no samples.

Top-2 sampling leaves two tokens a node, so the loop over a real network has few enough branches.
Prompts are longer than the sliding windows, and the trees reach beyond the horizon.
"""

import pytest
import torch

from monge.api import make_components
from monge.core.draws import Draws
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.engine.batch import decode
from monge.engine.session import Request, Session
from monge.loading.networks import as_sequence_model
from monge.testing.oracle import exact_law, law_error
from tests.engine.tiny import CHAIN_FAMILIES, TREE_FAMILIES, network, perturbed, prompts

ROUNDING = 2e-5
"""Between laws of two float32 forwards in another order of summation, over two factors.

A wrong rule errs by 1e-2 and more.
"""
RULES = SamplingRules(top_k=2, temperature=1.5)
HORIZON = 2
(PROMPT,) = prompts((14,), seed=3)


def plain_law(model):
    law = {(): 1.0}
    for _ in range(HORIZON):
        longer = {}
        for text, weight in law.items():
            with torch.inference_mode():
                logits = model(torch.tensor([PROMPT + text])).logits[0, -1]
            masses = law_from_logits(logits, RULES).sparse()
            for token, prob in zip(masses.token_ids.tolist(), masses.probs.tolist(), strict=True):
                longer[(*text, token)] = weight * prob
        law = longer
    return law


def output_law(model, **options):
    target, draft = as_sequence_model(model), as_sequence_model(perturbed(model))
    parts = make_components(target, draft, **options)

    def program(draws: Draws) -> tuple[int, ...]:
        request = Request(
            prompt_ids=PROMPT, max_new_tokens=HORIZON + 1, rules=RULES, seed=0, draws=draws
        )
        session = Session(request, 0)
        for _ in decode([session], parts, max_batch_size=1):
            if session.num_generated >= HORIZON:
                break
        return session.completion_ids[:HORIZON]

    return exact_law(program)


OFTEN = {"llama", "mistral_window", "gemma3", "gpt2", "phi3", "opt"}
"""Families that differ in what a tree is read by; `test_greedy` reads trees of all of them."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in TREE_FAMILIES],
)
def test_trees(name):
    model = network(name)
    output = output_law(model, tree="fixed_width((2, 1))", verifier="rrs_without_replacement")
    assert law_error(output, plain_law(model)) < ROUNDING


@pytest.mark.parametrize("name", ["llama", *CHAIN_FAMILIES])
def test_chains(name):
    model = network(name)
    assert (
        law_error(output_law(model, tree="chain(2)", verifier="single_draft"), plain_law(model))
        < ROUNDING
    )


def test_another_law_is_seen():
    """The comparison can fail: the same family at another temperature is far away."""
    model = network("llama")
    cold = {text: weight**2 for text, weight in plain_law(model).items()}
    total = sum(cold.values())
    assert (
        law_error({text: weight / total for text, weight in cold.items()}, plain_law(model))
        > 100 * ROUNDING
    )

"""Sampling through `speculate` follows the law of plain decoding, with processors and without.

The truth is enumerated with plain forwards on a network with six tokens: marginals and joint law of
the first three tokens. Exactly, over every draw of the real loop, for two tokens; and by samples of
the call that users make, for three.
"""

import math
from functools import partial

import pytest
import torch
from scipy import stats

import monge
from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits
from monge.loading.networks import as_sequence_model
from monge.oracle.exact_law import law_error
from monge.plugins.transformers_processors import draft_rules, row_processors
from tests.engine.laws import loop_law, plain_law
from tests.engine.tiny import network, perturbed

VOCAB = 6
PROMPT = (3, 5, 4)
PAD_LEFT = (2, 2)
HORIZON = 3
BATCH = 200
ALPHA = 1e-4
"""Level of every chi-square test; the seeds are fixed, so a passing test stays passing."""
ROUNDING = 1e-5
"""Between laws of two float32 forwards in another order of summation, over up to three factors."""

CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2, "temperature": 1.5},
    "typical": {"typical_p": 0.8},
    "penalty": {"repetition_penalty": 1.7},
    "all": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "temperature": 0.8}
    | {"top_k": 4, "top_p": 0.95, "min_p": 0.02},
}


def target():
    return network("llama", vocab_size=VOCAB)


def inputs():
    ids = torch.tensor([PAD_LEFT + PROMPT])
    mask = torch.tensor([[0] * len(PAD_LEFT) + [1] * len(PROMPT)])
    settings = {"do_sample": True, "max_new_tokens": HORIZON, "eos_token_id": None}
    return {"input_ids": ids, "attention_mask": mask, **settings}


def processors_of(settings):
    """The list that `generate` makes of these settings."""
    made = []

    def capture(model, input_ids, logits_processor, **_):
        made.append(logits_processor)
        return input_ids

    target().generate(**inputs(), **{"top_k": 0, **settings}, custom_generate=capture)
    return made[0]


def law_of_plain_forwards(settings, horizon):
    """Law of the next tokens by plain forwards, the padding seen by the processors as in `generate`."""
    processors = processors_of(settings)

    def law_after(text):
        with torch.inference_mode():
            logits = target()(torch.tensor([PROMPT + text])).logits[:, -1]
        scores = processors(torch.tensor([PAD_LEFT + PROMPT + text]), logits)
        return law_from_logits(scores[0], SamplingRules())

    return plain_law(law_after, horizon)


def marginal(law, place):
    found = {}
    for text, prob in law.items():
        found[text[place]] = found.get(text[place], 0.0) + prob
    return found


@pytest.mark.parametrize(
    ("case", "tree"),
    [
        *(("all", tree) for tree in ("chain(1)", "fixed_width((2,))", "best_first(3, 2, 2)")),
        ("plain", "fixed_width((2,), children='iid')"),
    ],
)
def test_exact_law_of_two_tokens(case, tree):
    settings = CASES[case]
    processors = processors_of(settings)
    model, draft = as_sequence_model(target()), as_sequence_model(perturbed(target(), noise=0.4))
    # The default of i.i.d. trees draws positions, which have no branches.
    verifier = "recursive_rejection" if "iid" in tree else None
    parts = make_components(model, draft, tree=tree, verifier=verifier)

    make = partial(row_processors, processors, 0, 1, torch.tensor([PAD_LEFT]))
    found = loop_law(lambda: parts, 2, PROMPT, max_new_tokens=2, make_processors=make)
    assert law_error(found, law_of_plain_forwards(settings, 2)) < ROUNDING


def samples(settings, num_samples, seed, **options):
    texts = []
    for start in range(0, num_samples, BATCH):
        output = target().generate(
            **inputs(),
            **{"top_k": 0, **settings},
            num_return_sequences=min(BATCH, num_samples - start),
            custom_generate=monge.speculate,
            draft_model=perturbed(target(), noise=0.4),
            seed=None if seed is None else seed + start,
            **options,
        )
        texts += [tuple(row) for row in output[:, len(PAD_LEFT + PROMPT) :].tolist()]
    return texts


def p_value(found, law):
    """Chi-square goodness of fit; outcomes expected less than five times are one class, impossible ones are refused."""
    assert set(found) <= set(law), "an outcome of probability zero was written"
    classes = pooled(law, len(found))
    count = [sum(text in members for text in found) for members in classes]
    expected = [len(found) * math.fsum(law[text] for text in members) for members in classes]
    return 1.0 if len(classes) == 1 else float(stats.chisquare(count, expected).pvalue)


def pooled(law, num_samples):
    rare = frozenset(text for text, prob in law.items() if num_samples * prob < 5)
    return [frozenset({text}) for text in law if text not in rare] + ([rare] if rare else [])


def check(case, num_samples, **options):
    law = law_of_plain_forwards(CASES[case], HORIZON)
    found = samples(CASES[case], num_samples, seed=21, **options)
    values = [p_value(found, law)]
    for place in range(HORIZON):
        values.append(p_value([text[place] for text in found], marginal(law, place)))
    assert min(values) > ALPHA, values


def test_law_of_three_tokens():
    check("all", 400)


@pytest.mark.statistical
@pytest.mark.parametrize("tree", ["chain(3)", "fixed_width((2, 2))", "best_first(5, 2, 2)"])
@pytest.mark.parametrize("case", CASES)
def test_law_of_three_tokens_with_many_samples(case, tree):
    check(case, 5000, tree=tree)


def test_draft_law_takes_the_warpers_that_both_libraries_have():
    rules = draft_rules(processors_of(CASES["all"]))
    assert rules == SamplingRules(temperature=0.8, top_k=4, top_p=0.95, min_p=0.02)
    assert draft_rules(processors_of(CASES["typical"])) == SamplingRules()


def test_a_seed_of_speculate_repeats_its_texts():
    first, again, other = (samples({}, 20, seed) for seed in (5, 5, 6))
    assert first == again != other
    assert len(set(first)) > 5, "rows have draws of their own"


def test_the_hosts_generator_seeds_a_call():
    """Of a controller that follows no clock, as the default does unless torch is deterministic."""
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outputs.append([samples({}, 10, None, controller="fixed") for _ in range(2)])
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0][0] != outputs[0][1], "two calls after one seeding differ"


def test_greedy_leaves_the_hosts_generator_alone():
    state = torch.random.get_rng_state()
    ours = {"custom_generate": monge.speculate, "draft_model": perturbed(target())}
    target().generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=4, **ours)
    assert torch.equal(torch.random.get_rng_state(), state)

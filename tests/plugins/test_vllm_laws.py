"""The verifier in a real vLLM: the law of texts, beside that of unmodified vLLM, which must fail.

Run by `make test-vllm`; `-s` prints p-values and total variations. Of ten thousand exact p-values,
one is below `LEVEL`.
"""

import importlib.util
import sys

import numpy as np
import pytest

from monge.api import built_in

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM; make test-vllm makes its environment", allow_module_level=True)

from tests.plugins.vllm_engine import GREEDY, TEXTS, ask, run
from tests.plugins.vllm_models import PROMPT, Fit, joint_law, write_models

NUM_SAMPLES = 4000
LEVEL = 1e-4
VLLM, BLOCK, SINGLE = {}, {"verifier": "block"}, {"verifier": "speculative_sampling"}
BY_TEMPERATURE = {"verifier": "block", "draft_law": "temperature"}
WARM, CUT = {"temperature": 0.8}, {"temperature": 1.2, "top_k": 6, "top_p": 0.9}


def report(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sampled(settings, rules, count=NUM_SAMPLES, **more):
    """Ask for samples of one prompt."""
    rules = {"max_tokens": 4, **rules}
    return {"prompts": [PROMPT] * count, "rules": [rules] * count, "settings": settings, **more}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


@pytest.fixture(scope="module")
def network(models):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(models / "target").double().eval()


@pytest.fixture(scope="module")
def drafts(models):
    def speculative(method, name, **more):
        given = {"method": method, "num_speculative_tokens": 3, **more}
        return given if name is None else {**given, "model": str(models / name)}

    drawn = {"draft_sample_method": "probabilistic"}
    return {
        "draft_model": speculative("draft_model", "draft", max_model_len=256, **drawn),
        "greedy drafts": speculative("draft_model", "draft", max_model_len=256),
        **{name: speculative(name, name, **drawn) for name in ("eagle", "eagle3")},
        "ngram": speculative("ngram", None, prompt_lookup_max=2, prompt_lookup_min=1),
    }


def fits(name, answer, law, lines=slice(None)):
    """Fits of tokens 1 to 3, and of tokens 2 to 4, of which all are drafted in one round."""
    # Unmodified vLLM ends texts that break their grammar.
    token_ids = np.array([[*text, 0, 0, 0, 0][:4] for text in answer["token_ids"]])[lines]
    pair = [Fit(token_ids, law.sum(3)), Fit(token_ids[:, 1:], law.sum(0))]
    counts = answer["counters"]
    rate = counts["num_accepted_tokens"] / max(counts["num_drafts"], 1)
    report(f"{name}: tokens 1-3 {pair[0]}; 2-4 {pair[1]}; {rate:.4f} accepted a round")
    return pair


USUAL = [(VLLM, WARM), (BLOCK, WARM)]
CASES = dict.fromkeys(("eagle", "eagle3", "ngram", "greedy drafts"), USUAL)
CASES["draft_model"] = [*USUAL, (SINGLE, WARM), (BLOCK, CUT), (BY_TEMPERATURE, CUT)]


@pytest.mark.parametrize("method", CASES)
def test_texts_have_the_targets_law(method, models, network, drafts, tmp_path):
    jobs = [sampled(settings, rules) for settings, rules in CASES[method]]
    speculative = drafts[method]
    answers = ask(tmp_path, jobs, model=str(models / "target"), speculative_config=speculative)
    for (settings, rules), answer in zip(CASES[method], answers, strict=True):
        law = joint_law(network, 4, **rules)
        pair = fits(f"{method} {settings or 'vLLM'} {rules}", answer, law)
        if settings == VLLM:
            assert min(fit.p_value for fit in pair) < 1e-12, "the test has no power"
        else:
            assert min(fit.p_value for fit in pair) > LEVEL


@pytest.mark.parametrize(
    ("all_settings", "is_async"),
    [([VLLM, "mend", BLOCK, SINGLE], False), ([BLOCK], True)],
    ids=["", "asynchronous"],
)
def test_a_grammar_does_not_bias(all_settings, is_async, models, network, drafts, tmp_path):
    """vLLM drops drafts that the grammar forbids; its rule with right temperatures is biased too."""
    rules = {"temperature": 1.0, "max_tokens": 5, "regex": "([a-h][e-o]){10}"}
    engine = {"model": str(models / "target"), "speculative_config": drafts["draft_model"]}
    jobs = [sampled(settings, rules) for settings in all_settings]
    answers = ask(tmp_path, jobs, **engine, is_async=is_async)
    law = joint_law(network, 4, allowed=lambda place: range(4, 15) if place % 2 else range(8))
    for settings, answer in zip(all_settings, answers, strict=True):
        name = f"grammar {settings or 'vLLM'}{' asynchronous' * is_async}"
        pair = fits(name, answer, law)
        worst = min(fit.p_value for fit in pair)
        is_ours = settings in (BLOCK, SINGLE)
        assert worst > LEVEL if is_ours else worst < 1e-12


def test_requests_of_all_kinds_share_a_batch(models, network, drafts, tmp_path):
    kinds = [{"temperature": 0.0}, {"temperature": 0.6}]
    kinds += [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.3, "top_p": 0.8}]
    seeded = [{"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "seed": 2, "top_p": 0.9}]
    long = {"max_tokens": 30}
    alone = [rules | long for rules in seeded]
    beside = [rules | long for rules in kinds * 10] + alone
    mixed = [rules | {"max_tokens": 4} for rules in kinds * NUM_SAMPLES]
    greedy_and_warm = [{"temperature": heat, "max_tokens": 5} for heat in (0.0, 1.0)] * 100
    scored = [{"temperature": 1.0, "logprobs": 3, "max_tokens": 5}] * 20
    asked = [(rules, BLOCK) for rules in (mixed, alone, beside, greedy_and_warm, scored)]
    jobs = [
        {"prompts": [PROMPT] * len(rules), "rules": rules, "settings": settings}
        for rules, settings in [*asked, (greedy_and_warm, VLLM)]
    ]
    engine = {"model": str(models / "target"), "speculative_config": drafts["draft_model"]}
    answers = ask(tmp_path, jobs, **engine)
    for place, rules in enumerate(kinds[1:], 1):
        law = joint_law(network, 4, **rules)
        pair = fits(f"mixed {rules}", answers[0], law, slice(place, None, len(kinds)))
        assert min(fit.p_value for fit in pair) > LEVEL
    assert answers[1]["token_ids"] == answers[2]["token_ids"][-2:], "seeds repeat beside others"
    greedy = greedy_text(network, 5)
    assert all(text == greedy for text in answers[3]["token_ids"][::2])
    wrong = sum(text != greedy for text in answers[5]["token_ids"][::2])
    report(f"mixed, vLLM: {wrong} of 100 greedy texts are wrong")
    assert wrong > 50, "the test has no power"
    check_logprobs(network, answers[4])


def greedy_text(network, length):
    import torch

    text = torch.tensor([PROMPT])
    for _ in range(length):
        text = torch.cat([text, network(text).logits[:, -1:].argmax(-1)], 1)
    return text[0, len(PROMPT) :].tolist()


def check_logprobs(network, answer):
    import torch

    for token_ids, places in zip(answer["token_ids"], answer["logprobs"], strict=True):
        scores = network(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 :]
        exact = scores.log_softmax(-1)
        for place, (token, values) in enumerate(zip(token_ids, places, strict=True)):
            assert str(token) in values
            for name, value in values.items():
                assert abs(exact[place, int(name)].item() - value) < 1e-4


@pytest.fixture(scope="module")
def pair():
    return {"model": str(built_in("target")), "max_num_seqs": 16}


def speculative(**more):
    given = {"method": "draft_model", "model": str(built_in("draft")), "max_model_len": 256}
    return {**given, "num_speculative_tokens": 4, **more}


def test_greedy_texts_are_those_of_plain_vllm(pair, drafts, tmp_path):
    (plain,) = ask(tmp_path, [GREEDY], **pair)
    engine = {"multiprocessing": True, "additional_config": {"monge": BLOCK}, **pair}
    for spec in (speculative(draft_sample_method="probabilistic"), drafts["ngram"]):
        (answer,) = ask(tmp_path, [GREEDY], speculative_config=spec, **engine)
        assert answer["token_ids"] == plain["token_ids"], spec["method"]
        assert answer["counters"]["num_accepted_tokens"] > 0


def test_more_drafts_are_accepted(pair, tmp_path):
    """Accepted tokens a round of the built-in pair: vLLM's rule, `block`, and the request's draft law."""
    plain, cut = {"temperature": 1.0}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    cases = [(plain, "mend"), (plain, BLOCK), (cut, "mend"), (cut, BY_TEMPERATURE), (cut, BLOCK)]
    asked = {"prompts": (prompts := TEXTS * 48)}
    jobs = [
        asked | {"rules": [rules | {"max_tokens": 48}] * len(prompts), "settings": settings}
        for rules, settings in cases
    ]
    spec, rates = speculative(draft_sample_method="probabilistic"), []
    answers = ask(tmp_path, jobs, speculative_config=spec, **pair)
    for (rules, settings), answer in zip(cases, answers, strict=True):
        counts = answer["counters"]
        rates.append(counts["num_accepted_tokens"] / counts["num_drafts"])
        report(f"built-in pair, {rules}, {settings}: {rates[-1]:.3f} accepted a round")
    assert rates[1] > 0.95 * rates[0]
    assert rates[4] > 1.3 * max(rates[2:4])


def test_an_engine_that_cannot_be_ends_with_one_error(models, drafts, tmp_path):
    engine = {"model": str(models / "target"), "speculative_config": drafts["draft_model"]}
    done, _ = run(tmp_path, [], **engine, additional_config={"monge": {"verifer": "block"}})
    assert done.returncode
    assert "did you mean 'verifier'" in done.stderr.strip().splitlines()[-1]

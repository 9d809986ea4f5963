"""How tokens were drawn, by enumeration: along every branch, what is told gives the branch's own probability."""

import math

import pytest
import torch

from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.oracle.decoding import Case, target_law
from monge.oracle.exact_law import exact_law
from monge.oracle.tabular import RandomTable, TabularModel
from monge.requests.logprobs import LogprobOptions
from tests.engine.laws import session

VOCAB, HORIZON = 4, 2
PROMPT = (0, 1, 0)
RULES = {
    "greedy": SamplingRules(temperature=0),
    "plain": SamplingRules(),
    "temperature": SamplingRules(temperature=0.6),
    "top-k": SamplingRules(top_k=2),
    "top-p": SamplingRules(temperature=1.4, top_p=0.7),
    "min-p": SamplingRules(temperature=0.8, min_p=0.4, top_k=3),
}
PARTS = {
    "none": {"drafter": "none"},
    "chain": {"tree": "chain(2)"},
    "tree": {"tree": "fixed_width((2, 1), 'without_replacement')"},
    "history": {"drafter": "suffix(num_nodes=3, depth=2, max_history=99)"},
}


def tables():
    target, draft = RandomTable(VOCAB, 11, "positive"), RandomTable(VOCAB, 23, "positive")
    return TabularModel(target, VOCAB), TabularModel(draft, VOCAB)


def told(parts, rules, draws):
    """A text and how each of its tokens was drawn, with a neighbour in the batch."""
    target, draft = tables()
    has_model = "tree" in parts
    components = make_components(target, draft if has_model else None, **parts)
    wanted = LogprobOptions(num_top=0, drawn=True)
    own = session(0, PROMPT, rules=rules, draws=draws, logprobs=wanted, max_new_tokens=HORIZON)
    other = session(1, PROMPT, max_new_tokens=HORIZON)
    entries = []
    for served in decode([other, own], components, max_batch_size=2):
        if served is own:
            entries += own.logprobs
    assert [entry.token_id for entry in entries] == list(own.completion_ids)
    return own.completion_ids, [entry.drawn for entry in entries]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_what_is_told_is_the_law_of_the_text(name, parts):
    rules, target, texts = RULES[name], tables()[0], {}

    def run(draws):
        text, drawn = told(parts, rules, draws)
        assert texts.setdefault(text, drawn) == drawn, "it depends on the text, not on the drafts"
        return text

    exact_law(run)
    case = Case(prompt=PROMPT, horizon=HORIZON, max_new_tokens=HORIZON, rules=rules)
    law = {text: mass for text, mass in target_law(target, case).items() if mass}
    assert set(texts) == set(law)
    for text, drawn in texts.items():
        assert math.exp(sum(one.processed for one in drawn)) == pytest.approx(law[text], abs=1e-12)
        for place, (token, one) in enumerate(zip(text, drawn, strict=True)):
            probs = torch.tensor(target.table(PROMPT + text[:place]), dtype=torch.float64)
            assert one.raw == pytest.approx(math.log(probs[token]), abs=1e-12)
            if rules.temperature == 0:
                assert (one.processed, one.kept_mass) == (0.0, 1.0)
                continue
            before = torch.softmax(probs.log() / rules.temperature, 0)
            followed = Case(prompt=PROMPT + text[:place], horizon=1, max_new_tokens=1, rules=rules)
            after = target_law(target, followed)
            kept = [following for (following,), mass in after.items() if mass]
            assert one.kept_mass == pytest.approx(float(before[kept].sum()), abs=1e-12)
            whole = one.processed + math.log(one.kept_mass)
            assert whole == pytest.approx(math.log(before[token]), abs=1e-12)
            assert (one.kept_mass < 1) == rules.truncates


def test_results_tell_it_behind_penalties_and_processors():
    """These change the law itself; only top-k and the like are truncation."""
    decoder = Decoder(make_components(*tables(), tree="chain(2)"), max_batch_size=2)

    def shifts(token_ids, scores):
        return scores + 0.3 * torch.arange(VOCAB)

    rules = {"temperature": 0.7, "top_k": 2, "repetition_penalty": 1.5, "seed": 1, "n": 2}
    rules |= {"logits_processors": [shifts], "logprobs": 2}
    results = decoder.generate([PROMPT, (2,)], max_new_tokens=9, **rules)
    assert len(results) == 4
    for result in results:
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids)
        for entry in result.logprobs:
            assert entry.drawn is not None
            assert entry.drawn.processed == entry.logprob
            assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1)
            assert 0 < entry.drawn.kept_mass < 1
    plain = decoder.generate([PROMPT], max_new_tokens=2)
    assert plain[0].logprobs is None

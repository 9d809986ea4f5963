"""Grammars at every node of a tree: the text has the masked and renormalised law, to the last digits."""

import re
from itertools import product
from os.path import commonprefix

import pytest
import torch

from monge.api import make_components
from monge.core.context import Context
from monge.core.errors import GrammarError, NonFiniteLogitsError
from monge.core.grammar import Grammar
from monge.core.sampling_rules import SamplingRules
from monge.engine import drafting
from monge.laws.from_logits import law_from_logits, probs_from_logits, rule_rows
from monge.laws.tree import fixed_chain
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.requests.grammar import FORCED, GrammarCompiler, GrammarState
from monge.requests.grammar_masks import TreeMask
from monge.requests.sampling import NodeLaws
from tests.draft.test_cross_tokenizer import byte_level
from tests.engine.laws import loop_law

PIECES = ("a", "b", "ab", "<end>")
END, SIZE, HORIZON = 3, 4, 2
PROMPT = (0, 1)
REGEXES = {"open": "(ab|b)*a?", "forced": "ab(a|ba)b?", "one": "b"}
PARTS = {
    "block": {"tree": "chain(2)", "verifier": "block"},
    "speculative_sampling": {"tree": "chain(2)", "verifier": "speculative_sampling"},
    "recursive_rejection": {"tree": "fixed_width((2,), 'iid')", "verifier": "recursive_rejection"},
    "traversal": {"tree": "fixed_width((2,), 'without_replacement')", "verifier": "traversal"},
    "multipath_block": {"tree": "paths(2, 1)", "verifier": "multipath_block"},
    "k_seq": {"tree": "fixed_width((2,), 'iid')", "verifier": "k_seq"},
    "top": {"tree": "fixed_width((2, 2), 'top')", "verifier": "sample_and_match"},
    "lookups": {
        "drafter": "ngram(num_draft_tokens=2, max_ngram=2)",
        "verifier": "sample_and_match",
    },
}
LONG = {"multipath_block", "k_seq"}
"""Their enumeration takes seconds."""
RULES = {
    "sampled": SamplingRules(),
    "truncated": SamplingRules(temperature=0.7, top_k=2),
    "greedy": SamplingRules(temperature=0),
}


@pytest.fixture(scope="module")
def compiler():
    made = byte_level(list(PIECES), [("a", "b")])
    made.add_special_tokens({"eos_token": "<end>"})
    return GrammarCompiler(made, SIZE, frozenset({END}))


def allowed(regex, written):
    """Tokens after a text, found by trying its continuations; without the library."""
    text = "".join(PIECES[token] for token in written)
    tried = ["".join(one) for size in range(7) for one in product("ab", repeat=size)]
    endings = [ending for ending in tried if re.fullmatch(regex, text + ending)]
    # Text that must follow comes in the tokenizer's tokens; an "a" may still become an "ab".
    forced = commonprefix(endings)
    forced = forced.removesuffix("a") if len(set(endings)) > 1 else forced
    if forced:
        return {2 if forced.startswith("ab") else PIECES.index(forced[0])}
    starts = [
        token for token in range(END) if any(one.startswith(PIECES[token]) for one in endings)
    ]
    return {*starts, *([END] if "" in endings else [])}


def true_law(regex, rules, seed=11):
    table, laws = RandomTable(SIZE, seed), {(): 1.0}
    for _ in range(HORIZON):
        longer = {}
        for text, weight in laws.items():
            if text[-1:] == (END,):
                longer[text] = weight
                continue
            banned = list(set(range(SIZE)) - allowed(regex, text))
            logits = torch.tensor(table(PROMPT + text), dtype=torch.float64).log()
            logits[banned] = -torch.inf
            law = law_from_logits(logits, rules).sparse()
            for token, prob in zip(law.token_ids.tolist(), law.probs.tolist(), strict=True):
                longer[(*text, token)] = weight * prob
        laws = longer
    return laws


def written_law(compiler, regex, rules=SamplingRules(), **parts):  # noqa: B008 (frozen)
    def make():
        is_lookup = "drafter" in parts
        draft = None if is_lookup else TabularModel(RandomTable(SIZE, 23), SIZE)
        return make_components(TabularModel(RandomTable(SIZE, 11), SIZE), draft, **parts)

    options = {"rules": rules, "eos_ids": frozenset({END}), "seed": 0}
    state = compiler.compile(Grammar.regex(regex))
    return loop_law(make, HORIZON, PROMPT, grammar=state, **options)


@pytest.mark.parametrize("regex", REGEXES.values(), ids=REGEXES)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(parts, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for name, parts in PARTS.items()
    ],
)
def test_the_text_has_the_masked_law(compiler, regex, rules, parts):
    assert law_error(written_law(compiler, regex, rules, **parts), true_law(regex, rules)) < 1e-12


def root_mask(self, scores, node):
    return APPLY(self, scores, 0)


def moved_mass(self, scores, node):
    """Banned tokens become the first allowed one, instead of renormalising."""
    first, *_ = APPLY(self, scores, node).isfinite().nonzero().flatten().tolist()
    probs, banned = scores.softmax(-1), APPLY(self, scores, node).isinf()
    probs[first] += probs[banned].sum()
    return probs.masked_fill(banned, 0.0).log()


APPLY = TreeMask.apply


@pytest.mark.parametrize("wrong", [root_mask, moved_mass])
def test_wrong_masks_are_seen(compiler, monkeypatch, wrong):
    monkeypatch.setattr(TreeMask, "apply", wrong)
    # The mask of the root lets the text leave the grammar, which the state would refuse.
    monkeypatch.setattr(GrammarState, "after_all", lambda self, _: self)
    law = written_law(compiler, REGEXES["open"], **PARTS["block"])
    assert law_error(law, true_law(REGEXES["open"], SamplingRules())) > 1e-3


def test_a_text_outside_the_grammar_is_an_error(compiler):
    with pytest.raises(GrammarError, match="cannot go on with token 0"):
        compiler.compile(Grammar.regex("b")).after_all((1, 0))


@pytest.mark.parametrize(
    ("regex", "text", "forced"),
    [
        ("ab(a|ba)b?", (), (2,)),  # the tokenizer's form of the only text
        ("b", (), (1, END)),
        ("b", (1,), (END,)),
        ("bbabb", (1,), (1, 2, 1, END)),
        ("(ab|b)*a?", (2,), ()),
        ("a?", (), ()),
        ("b", (1, END), ()),
    ],
)
def test_forced_tokens(compiler, regex, text, forced):
    state = compiler.compile(Grammar.regex(regex)).after_all(text)
    assert state.forced(9) == forced
    assert state.forced(1) == forced[:1]


def test_forced_tokens_are_offered_in_the_enumerated_rounds(compiler, monkeypatch):
    seen = set()
    make = drafting._forced

    def noted(*arguments):
        draft = make(*arguments)
        seen.add(draft and draft.drafter)
        return draft

    monkeypatch.setattr(drafting, "_forced", noted)
    written_law(compiler, REGEXES["forced"], **PARTS["block"])
    assert FORCED in seen


def test_a_node_where_the_grammar_ends_in_nothing_fails_where_it_is_asked_alone(compiler):
    """After "b" no token of the vocabulary can follow, which plain decoding may never meet."""
    state = compiler.compile(Grammar.regex("a|bz"))
    rules = SamplingRules(temperature=0.5)
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=rules)
    laws = NodeLaws(torch.zeros(2, SIZE), fixed_chain(0, (1,)), context, (), state)
    assert (laws[0].prob(0), laws[0].prob(1), laws[0].prob(2)) == (0.5, 0.5, 0)
    rows = rule_rows([laws.rules], laws.scores)
    assert probs_from_logits(laws.scores[None], rows)[0, 1].isnan().all()
    with pytest.raises(GrammarError, match="no token can come next"):
        laws[1]
    # A device reads the laws of all nodes at once, and sees that one of them is not finite.
    cause = laws.explain(NonFiniteLogitsError("not finite"))
    assert isinstance(cause, GrammarError)
    assert "no token can come next" in str(cause)


def test_laws_are_the_same_one_by_one_and_together(compiler):
    state = compiler.compile(Grammar.regex(REGEXES["open"]))
    tree = fixed_chain(0, (2, 1, 0))
    logits = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(3))
    for rules in (SamplingRules(temperature=0.8), SamplingRules(temperature=0)):
        context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=rules)
        laws = NodeLaws(logits, tree, context, (), state)
        for node, text in enumerate([(), (2,), (2, 1), (2, 1, 0)]):
            law = laws[node]
            assert {t for t in range(SIZE) if law.prob(t) > 0} <= allowed(REGEXES["open"], text)
            if rules.temperature:
                rows = rule_rows([rules], laws.scores)
                together = probs_from_logits(laws.scores[None], rows)[0, node].tolist()
                assert together == pytest.approx([law.prob(t) for t in range(SIZE)], abs=1e-14)


def test_what_truncation_keeps_is_counted_in_the_law_of_the_grammar(compiler):
    """A grammar changes the law, as a penalty does; it is no truncation."""
    state = compiler.compile(Grammar.regex(REGEXES["open"]))
    tree = fixed_chain(0, (2,))
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(3))
    for top_k in (None, 1, 2):
        rules = SamplingRules(temperature=0.8, top_k=top_k)
        context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=rules)
        laws = NodeLaws(logits, tree, context, (), state, num_truncating=0)
        for node, text in enumerate([(), (2,)]):
            masses = (logits[node].double() / 0.8).exp()[sorted(allowed(REGEXES["open"], text))]
            best = masses.sort(descending=True).values[:top_k].sum() / masses.sum()
            assert laws.kept_mass(node) == pytest.approx(float(best), abs=1e-12)

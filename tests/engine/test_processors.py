"""Processors with state: a copy for every text, one along every path, each asked once a token, in order."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from monge.api import make_components
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import Batch, decode
from monge.engine.decoder import Decoder
from monge.laws.from_logits import law_from_logits
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable
from monge.requests.processors import fork
from tests.engine.laws import loop_law, plain_law, session
from tests.exact.test_loop import ENUMERABLE, legal
from tests.kit.tables import table

VOCAB, PROMPT, HORIZON = 3, (2, 1), 2
TREES = (
    "fixed_width((2, 1), 'without_replacement')",
    "fixed_width((2,), 'iid')",
    "fixed_width((2,), 'greedy_plus_one')",
    "best_first(3, 2, 2, 2)",
    "chain(2)",
    "paths(2, 1)",
)
# Every rule on the first tree that it reads, and every tree with a rule that looks off the path.
LOOPS = {
    *((next(tree for tree in TREES if legal(tree, rule)), rule) for rule in ENUMERABLE),
    *((tree, rule) for tree in TREES for rule in ("traversal", "k_seq") if legal(tree, rule)),
}


class Grammar:
    """Forbids one token, which goes round with the text.

    As the grammar processors of libraries do, it moves on by the newest token at every call, and
    knows no other way.
    """

    def __init__(self):
        self.state, self.seen = 0, None

    def __call__(self, token_ids, scores):
        text = token_ids[0].tolist()
        if self.seen is not None:
            assert text[:-1] == self.seen, "asked out of order, or about another path"
            self.state = (self.state + 1 + text[-1]) % VOCAB
        self.seen = text
        scores[:, self.state] = -torch.inf
        return scores


class Counter:
    """As `Grammar`, and it does not notice what it is asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self, token_ids, scores):
        self.calls += 1
        scores[:, self.calls % VOCAB] = -torch.inf
        return scores


class Shared(Counter):
    """One state for all paths, as before there were copies."""

    def __deepcopy__(self, memo):
        return self


class Locked(Grammar):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def closure():
    calls = 0

    def processor(token_ids, scores):
        nonlocal calls
        calls += 1
        return scores.index_fill(1, torch.tensor([calls % VOCAB]), -torch.inf)

    return processor


class Part:
    """A method is given, and it has the state of its object."""

    def __init__(self):
        self.grammar = Grammar()

    def apply(self, token_ids, scores):
        return self.grammar(token_ids, scores)


def models():
    return table(11, VOCAB), table(23, VOCAB)


def law_of_plain_decoding(make):
    """As plain decoding asks: a new processor for every text, once a token."""
    table = RandomTable(VOCAB, 11)

    def law_after(text):
        processor, scores = make(), torch.empty(0)
        for length in range(len(text) + 1):
            whole = PROMPT + text[:length]
            scores = torch.tensor([table(whole)], dtype=torch.float64).log().float()
            scores = processor(torch.tensor([whole]), scores)
        return law_from_logits(scores[0], SamplingRules())

    return plain_law(law_after, HORIZON)


def output_law(make, tree, rule):
    def parts():
        return make_components(*models(), tree=tree, verifier=rule)

    return loop_law(parts, HORIZON, PROMPT, make_processors=lambda: (make(),))


@pytest.mark.parametrize(("tree", "rule"), sorted(LOOPS))
def test_a_processor_with_state_keeps_the_law_under_every_rule(tree, rule):
    make = Counter if rule == "multipath_block" else Grammar
    assert law_error(output_law(make, tree, rule), law_of_plain_decoding(make)) < 1e-12


@pytest.mark.parametrize(
    "make",
    [Counter, closure, lambda: Part().apply, lambda: partial(Grammar.__call__, Grammar())],
    ids=["object", "closure", "method", "partial"],
)
def test_exact_law_of_other_kinds(make):
    written = output_law(make, "chain(2)", "speculative_sampling")
    assert law_error(written, law_of_plain_decoding(make)) < 1e-12


def test_a_state_that_all_paths_share_is_seen():
    written = output_law(Shared, TREES[0], "traversal")
    assert law_error(written, law_of_plain_decoding(Counter)) > 1e-2


class Faulty:
    """A neighbour whose fault makes the whole stage run again, request by request."""

    def __call__(self, token_ids, scores):
        if token_ids.shape[1] > len(PROMPT) + 1:
            raise KeyError("a fault of its own")
        return scores


@pytest.mark.parametrize("make", [Grammar, Locked])
@pytest.mark.filterwarnings("ignore:request 0. the processor Locked")
def test_a_stage_that_runs_again_asks_no_token_twice(make):
    def run(draws):
        components = make_components(*models(), tree="chain(2)")
        batch = Batch(components, isolated=True)
        watched = session(0, PROMPT, draws=draws, processors=(make(),), max_new_tokens=3)
        faulty = session(1, PROMPT, processors=(Faulty(),), seed=3, max_new_tokens=3)
        batch.join([watched, faulty])
        while watched.finish_reason is None:
            batch.step()
        assert isinstance(faulty.error, KeyError)
        assert watched.error is None, watched.error
        batch.close()
        return watched.completion_ids[:HORIZON]

    assert law_error(exact_law(run), law_of_plain_decoding(Grammar)) < 1e-12


def test_sampled_texts_keep_to_a_grammar():
    decoder = Decoder(make_components(*models(), tree="fixed_width((2, 2), 'without_replacement')"))
    results = decoder.generate(
        [PROMPT], n=300, max_new_tokens=5, seed=5, logits_processors=[Grammar()]
    )
    assert sum(step.num_accepted for result in results for step in result.records) > 300
    for result in results:
        grammar = Grammar()
        for length, token in enumerate(result.token_ids):
            text = torch.tensor([PROMPT + result.token_ids[:length]])
            assert grammar(text, torch.zeros(1, VOCAB))[0, token] == 0


class TestWhatCannotBeCopied:
    def test_is_decoded_plainly_and_says_so(self):
        def run(draws):
            one = session(7, PROMPT, draws=draws, processors=(Locked(),), max_new_tokens=3)
            for _ in decode([one], make_components(*models()), max_batch_size=1):
                assert one.records[-1].num_nodes == 0
            return one.completion_ids[:HORIZON]

        with pytest.warns(UserWarning, match="request 7: the processor Locked cannot be copied"):
            assert law_error(exact_law(run), law_of_plain_decoding(Grammar)) < 1e-12

    def test_is_refused_for_several_texts(self):
        decoder = Decoder(make_components(*models()))
        with pytest.raises(OptionError, match="processor Locked: several texts need a copy each"):
            decoder.generate([PROMPT, PROMPT], max_new_tokens=2, logits_processors=[Locked()])


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.zeros(2, VOCAB), r"\[2, 3\]"),
        (torch.zeros(VOCAB), r"\[3\]"),
        (None, "NoneType"),
        ([[0.0] * VOCAB], "list"),
    ],
)
def test_scores_of_another_shape_are_refused_by_name(answer, got):
    def biased(token_ids, scores):
        return answer

    decoder = Decoder(make_components(*models()))
    with pytest.raises(OptionError, match=rf"processor .*biased.* shape \[1, 3\].* got {got}"):
        decoder.generate([PROMPT], max_new_tokens=2, logits_processors=[biased])


class TestFork:
    def test_functions_go_on_sharing_a_variable_with_each_other_only(self):
        count = [0]

        def add():
            count[0] += 1

        def read():
            return count[0]

        first, second = fork((add, read))
        first()
        assert (second(), read()) == (1, 0)

    def test_what_refers_to_itself(self):
        grammar = Grammar()
        grammar.me, grammar.bound = [grammar], grammar.__call__
        made = fork(grammar)
        assert made.me[0] is made is made.bound.__self__ is not grammar

    def test_a_part_that_copies_itself(self):
        class Matcher:
            def __init__(self):
                self.handle, self.state = threading.Lock(), 0

            def fork(self):
                made = Matcher()
                made.state = self.state
                return made

        part = Part()
        part.matchers = [Matcher()]
        part.matchers[0].state = 4
        made = fork(part)
        assert made.matchers[0] is not part.matchers[0]
        assert made.matchers[0].state == 4

    def test_tensors_are_copied_and_tokenizers_are_not(self):
        from tests.engine.test_speculate import letter_tokenizer

        part = Part()
        part.mask, part.tokenizer, part.torch = torch.zeros(2), letter_tokenizer(), torch
        made = fork(part)
        made.mask += 1
        assert part.mask.tolist() == [0, 0]
        assert made.tokenizer is part.tokenizer

    @pytest.mark.parametrize(
        "part", [nn.Linear(2, 2), threading.Lock(), (token for token in range(3))], ids=type
    )
    def test_what_cannot_be_copied_raises(self, part):
        with pytest.raises(TypeError):
            fork({"state": [part]})

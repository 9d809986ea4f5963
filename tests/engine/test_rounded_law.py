"""The law of sampled text of a target with rounded weights, by enumeration through its compiled program.

A compiled program has no table of logits, and the last bits of its logits depend on what else is
read. So the target under test keeps the logits that the program gave first after every text: given
those, the law of the text has no rounding at all. The kept logits are compared with the eager
rounded network's.
"""

import math

import pytest
import torch

from monge.api import make_components
from monge.backends.cpu.rounded_weights import round_weights
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits
from monge.loading.networks import as_sequence_model
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.compiling import require, shared_programs
from tests.engine.laws import loop_law, plain_law
from tests.engine.tiny import network
from tests.kit.known_bad import TargetAfterRejection

VOCAB, PROMPT, HORIZON = 4, (1, 3, 2, 0), 2
RULES = SamplingRules(temperature=1.5)
EXACT = 1e-12
BEYOND_ROUNDING = 1e-3
"""What a wrong rule errs by at least."""
KINDS = ("int4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "bfloat16")))
CHAIN, TREE = "chain(2)", "fixed_width((2, 1), 'iid')"


class FirstLogits:
    """A target whose logits after a text are those that it gave first.

    Args:
        model: The target.

    Attributes:
        given: The kept logits, `[vocab]`, by text.
        gap: Largest difference of later logits to the kept ones.
    """

    why_no_tree = why_no_draft = None
    forward_s = 0.0

    def __init__(self, model):
        self.model, self.vocab_size, self.max_length = model, model.vocab_size, model.max_length
        self.given, self.gap = {}, 0.0
        self._texts, self._nodes = {}, {}

    def open(self, prefixes):
        self.model.open(prefixes)
        for sequence, tokens in prefixes.items():
            self._texts[sequence], self._nodes[sequence] = tuple(tokens), []

    def append(self, pieces):
        self.model.append(pieces)
        for sequence, tokens in pieces.items():
            self._texts[sequence] += tuple(tokens)

    def extend(self, blocks):
        read = self.model.extend(blocks)
        return {
            sequence: self._kept(sequence, blocks[sequence], read[sequence]) for sequence in blocks
        }

    def _kept(self, sequence, block, logits):
        kept, nodes = [], self._nodes[sequence]
        for token, parent, row in zip(block.token_ids, block.parents, logits, strict=True):
            above = self._texts[sequence] if parent < 0 else nodes[parent]
            nodes.append((*above, token))
            kept.append(self.given.setdefault(nodes[-1], row.clone()))
            self.gap = max(self.gap, float((row - kept[-1]).abs().max()))
        return torch.stack(kept)

    def commit(self, paths):
        self.model.commit(paths)
        for sequence, path in paths.items():
            if path:
                self._texts[sequence] = self._nodes[sequence][path[-1]]
            self._nodes[sequence] = []

    def length(self, sequence):
        return self.model.length(sequence)

    def close(self, sequence):
        self.model.close(sequence)
        del self._texts[sequence], self._nodes[sequence]


class TwoTokens:
    """Draft laws of two tokens each, so that few trees are drawn."""

    def __init__(self):
        self._table = RandomTable(VOCAB, seed=5)

    def __call__(self, token_ids):
        masses = self._table(token_ids)
        kept = sorted(range(VOCAB), key=lambda token: -masses[token])[1:3]
        total = sum(masses[token] for token in kept)
        return [masses[token] / total if token in kept else 0.0 for token in range(VOCAB)]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Compiled targets by kind of weights, compiled once."""
    require("compiled")
    made = {}

    def make(kind):
        if kind not in made:
            given = network("llama", "sdpa", vocab_size=VOCAB, num_hidden_layers=1)
            model = as_sequence_model(given, backend=f"compiled(weights={kind!r})")
            assert model.forward.name == "compiled"
            made[kind] = model, round_weights(given, kind)
        return made[kind]

    with shared_programs(tmp_path_factory):
        yield make


def output_law(target, tree, verifier):
    draft = TabularModel(TwoTokens(), VOCAB)
    parts = make_components(target, draft, tree=tree, verifier=verifier, controller="fixed")
    return loop_law(lambda: parts, HORIZON, PROMPT, rules=RULES)


def law_of_logits(logits_after):
    """The law of plain decoding from the logits after every text."""
    return plain_law(lambda text: law_from_logits(logits_after(PROMPT + text), RULES), HORIZON)


def logits_of(network):
    def logits_after(text):
        with torch.inference_mode():
            return network(torch.tensor([text])).logits[0, -1]

    return logits_after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        (CHAIN, "block"),
        *(
            pytest.param(CHAIN, rule, marks=pytest.mark.slow)
            for rule in ("recursive_rejection", "layer", "optimal_given_candidates")
        ),
        (TREE, "recursive_rejection"),
        *(
            pytest.param(TREE, rule, marks=pytest.mark.slow)
            for rule in ("layer('recursive_rejection')", "optimal_given_candidates")
        ),
    ],
)
def test_the_law_is_that_of_the_rounded_network(targets, kind, tree, verifier):
    model, rounded = targets(kind)
    target = FirstLogits(model)
    output = output_law(target, tree, verifier)
    assert len(output) == VOCAB**HORIZON
    assert law_error(output, law_of_logits(target.given.__getitem__)) < EXACT

    eager = logits_of(rounded)
    gap = max(float((kept - eager(text)).abs().max()) for text, kept in target.given.items())
    assert max(gap, target.gap) < BEYOND_ROUNDING
    # A logit that moves by d moves a probability by a factor of at most exp(2 d / temperature).
    largest = math.expm1(2 * HORIZON * gap / RULES.temperature)
    assert law_error(output, law_of_logits(eager)) <= largest + EXACT


def test_a_wrong_rule_is_seen(targets):
    target = FirstLogits(targets("int4")[0])
    output = output_law(target, CHAIN, TargetAfterRejection())
    assert law_error(output, law_of_logits(target.given.__getitem__)) > BEYOND_ROUNDING


def test_the_law_of_exact_weights_is_another(targets):
    target = FirstLogits(targets("int4")[0])
    output = output_law(target, CHAIN, "block")
    exact = network("llama", "sdpa", vocab_size=VOCAB, num_hidden_layers=1)
    assert law_error(output, law_of_logits(logits_of(exact))) > 1e-5

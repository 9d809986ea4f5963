"""Log-probabilities are those of the law that was asked about."""

import math

import pytest
import torch

from monge.core.law import SparseLaw
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.engine.logprobs import of_law, of_logits

LOGITS = torch.tensor(
    [[0.5, 2.0, -1.0, 2.0, -math.inf], [1.0, 0.0, 3.0, 0.0, 0.0]], dtype=torch.float64
)


def test_a_law_gives_its_logarithms_and_the_best_tokens():
    law = SparseLaw(torch.tensor([1, 4, 6]), torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64))
    entry = of_law(law, 6, 2)
    assert entry.logprob == pytest.approx(math.log(0.25))
    assert entry.rank == 2
    assert [token for token, _ in entry.top] == [4, 1]
    assert [value for _, value in entry.top] == pytest.approx([math.log(0.5), math.log(0.25)])
    outside = of_law(law, 2, 9)
    assert outside.logprob == -math.inf
    assert [token for token, _ in outside.top] == [4, 1, 6]


@pytest.mark.parametrize("token", range(5))
def test_logits_and_the_law_made_of_them_agree(token):
    law = law_from_logits(LOGITS[0], SamplingRules())
    (entry,), expected = of_logits(LOGITS[:1], [token], 5), of_law(law, token, 5)
    assert entry.logprob == pytest.approx(expected.logprob)
    assert entry.rank == expected.rank
    assert [pair[0] for pair in entry.top] == [pair[0] for pair in expected.top]
    assert [pair[1] for pair in entry.top] == pytest.approx([pair[1] for pair in expected.top])


def test_every_token_is_read_under_its_own_row():
    first, second = of_logits(LOGITS, [1, 2], 0)
    assert (first.token_id, first.rank, first.top) == (1, 1, ())
    assert second.logprob == pytest.approx(float(torch.log_softmax(LOGITS[1], -1)[2]))

"""Replay says what the real loop would have done.

The joint law of a text and its rounds is the same, to the last digit.
"""

import pytest

from monge.testing.oracle import law_error
from tests.replay.toys import real_stories, replayed_stories

WIDE = {
    "single draft": {"tree": "chain(2)", "verifier": "single_draft"},
    "target walk, drawn": {"tree": "fixed_width((2,), 'iid')", "verifier": "target_walk"},
    "target walk, without replacement": {"tree": "fixed_width((2,))", "verifier": "target_walk"},
    "rrs": {"tree": "fixed_width((2,), 'iid')", "verifier": "rrs"},
    "rrs, mixed": {"tree": "fixed_width((3,), 'mixed(1)')", "verifier": "rrs"},
    "without replacement": {"tree": "fixed_width((2,))", "verifier": "rrs_without_replacement"},
    "without replacement, i.i.d. draws": {
        "tree": "fixed_width((3,), 'iid')",
        "verifier": "rrs_without_replacement",
    },
    "naive tree": {"tree": "fixed_width((3,), 'iid')", "verifier": "naive_tree"},
    "k-seq": {"tree": "fixed_width((2,), 'iid')", "verifier": "k_seq"},
    "greedy": {"tree": "fixed_width((2,), 'greedy_plus_one')", "verifier": "greedy"},
    "greedy, two draws": {"tree": "fixed_width((3,), 'mixed(1)')", "verifier": "greedy"},
}
DEEP = {
    "single draft, top token": {"tree": "chain(2, 'top')", "verifier": "single_draft"},
    "best first": {"tree": "best_first(num_nodes=3, depth=2, width=2)"},
    "rrs": {"tree": "fixed_width((2, 1), 'iid')", "verifier": "rrs"},
    "without replacement": {"tree": "fixed_width((2, 1))", "verifier": "rrs_without_replacement"},
    "block": {"tree": "chain(3)", "verifier": "block"},
    "traversal of a chain": {"tree": "chain(2)", "verifier": "traversal"},
    "block, top token": {"tree": "chain(2, 'top')", "verifier": "block"},
    "paths": {"tree": "paths(2, 2)", "verifier": "rrs"},
    "ngram": {"drafter": "ngram(num_draft_tokens=2)"},
    "none": {"drafter": "none"},
}


@pytest.mark.parametrize("style", ["positive", "sparse"])
@pytest.mark.parametrize("options", WIDE.values(), ids=WIDE)
def test_candidates_of_a_node(options, style):
    real = real_stories(3, 2, style, **options)
    assert law_error(real, replayed_stories(3, 2, style, **options)) < 1e-12


@pytest.mark.parametrize("options", DEEP.values(), ids=DEEP)
def test_rounds_of_a_text(options):
    real = real_stories(2, 3, **options)
    assert law_error(real, replayed_stories(2, 3, **options)) < 1e-12

"""The proposer in a real vLLM: greedy texts are those of vLLM without speculation.

Run by `make test-vllm`.
"""

import importlib.util

import pytest

from monge.api import built_in

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM; make test-vllm makes its environment", allow_module_level=True)

from tests.plugins.vllm_engine import GREEDY, ask, run

PROPOSER = {
    "method": "custom_class",
    "model": "monge.plugins.vllm.Proposer",
    "num_speculative_tokens": 5,
}
ENGINE = {"model": str(built_in("target")), "max_num_seqs": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return ask(tmp_path_factory.mktemp("plain"), [GREEDY], **ENGINE)[0]["token_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"drafter": "ngram", "controller": "fixed"},
        {"drafter": "pool('ngram', 'suffix(width=1)')"},
        {"verifier": "block"},
    ],
    ids=["default", "ngram", "pool", "verified here"],
)
def test_greedy_texts_are_those_of_plain_decoding(plain, settings, tmp_path):
    additional = {"monge": settings}
    (answer,) = ask(
        tmp_path, [GREEDY], speculative_config=PROPOSER, additional_config=additional, **ENGINE
    )
    assert answer["token_ids"] == plain
    counters = answer["counters"]
    drafted, accepted = (counters[f"num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert 0 < accepted <= drafted, counters
    assert drafted < 5 * counters["num_drafts"], (
        "every draft has the full length: windows do not adapt"
    )


def test_a_setting_that_cannot_be_ends_the_start(tmp_path):
    additional = {"monge": {"drafter": "suffix"}}
    done, _ = run(tmp_path, [], speculative_config=PROPOSER, additional_config=additional, **ENGINE)
    assert done.returncode != 0
    assert "vLLM verifies single chains" in done.stdout + done.stderr

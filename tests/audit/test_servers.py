"""Toy servers with known faults are rejected, exact ones are accepted."""

import asyncio
import math
import sys
from typing import Any

import numpy as np
import pytest

from monge.audit.references import LocalReference
from monge.audit.token_law import END as END_NAME
from monge.audit.token_law import SMALLEST_REST
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.oracle.tabular import TabularModel
from tests.audit.toy import KNOWN_BAD, LOOP_ENGINES, judge, local_reference
from tests.kit.wrong_engines import (
    DRAFT,
    END,
    EXACT_ENGINES,
    TARGET,
    VOCAB,
    WRONG_ENGINES,
    Engine,
    StructuredTable,
    UnigramTable,
)
from tests.kit.wrong_servers import LETTERS, Letters, ToyServer

EXACT: dict[str, Engine] = {**EXACT_ENGINES, **LOOP_ENGINES}
WRONG: dict[str, Engine] = {**WRONG_ENGINES, **KNOWN_BAD}
BUDGET = 20_000
QUICKLY_FOUND = [
    "draft law declared before sampling rules",
    "ratio to the largest mass instead of p / q",
    "most probable draft declared as a draw",
    "sampled requests decoded greedily",
    "wrong text only with several requests at once",
    "target law after a rejection",
    "every draft accepted",
    "top-k ignored",
    "one seed for all requests",
]
ACCEPTED_QUICKLY = ["plain", "single draft", "recursive rejection"]
ACCEPTED_QUICKLY += ["logits rounded as in bfloat16"]


def some(names, quick):
    """All names; those that are not quick to judge are slow tests."""
    slow = (pytest.mark.slow, pytest.mark.timeout(600))
    return [pytest.param(name, marks=() if name in quick else slow) for name in names]


@pytest.mark.parametrize("name", some(WRONG, QUICKLY_FOUND))
def test_wrong_servers_are_rejected(name):
    report = judge(ToyServer(WRONG[name], seed=1), budget=BUDGET)
    assert report.verdict == "not lossless", report.reason
    assert name not in QUICKLY_FOUND or report.num_tokens <= 3000


@pytest.mark.parametrize("name", some(EXACT, ACCEPTED_QUICKLY))
def test_exact_servers_are_accepted(name):
    budget = 2500 if name in ACCEPTED_QUICKLY else BUDGET
    report = judge(ToyServer(EXACT[name], seed=2, chunks=3), budget=budget)
    assert report.verdict == "lossless", report.reason
    assert report.num_tokens > 1500


@pytest.mark.parametrize("by_id", [False, True], ids=["names", "ids"])
def test_a_twin_serves_as_reference(by_id):
    right = judge(ToyServer(EXACT["plain"], seed=2, by_id=by_id), budget=1500, is_local=False)
    assert right.verdict == "lossless", right.reason
    server = ToyServer(WRONG_ENGINES["typical acceptance"], seed=2, by_id=by_id)
    wrong = judge(server, budget=4000, is_local=False)
    assert wrong.verdict == "not lossless", wrong.reason


MIXED = {"greedy beside sampled": ("temperature",), "top-k beside top-p": ("top_k", "top_p")}


@pytest.mark.parametrize("name", MIXED)
def test_rules_taken_from_another_request_are_found_in_a_mixed_batch_only(name):
    def wrong() -> ToyServer:
        return ToyServer(EXACT_ENGINES["single draft"], seed=1, leaks=MIXED[name])

    report = judge(wrong(), only=(name,), budget=1000)
    assert report.verdict == "not lossless", report.reason
    alike = judge(wrong(), only=("16 at once", "top-p 0.8"), budget=400)
    assert alike.verdict == "lossless", alike.reason
    exact = judge(ToyServer(EXACT_ENGINES["single draft"], seed=1), only=(name,), budget=500)
    assert exact.verdict == "lossless", exact.reason


def dropping(seed: int) -> ToyServer:
    return ToyServer(WRONG_ENGINES["forbidden drafts dropped"], seed=seed)


@pytest.mark.parametrize("draft", [None, UnigramTable(1)], ids=["alone", "with the draft model"])
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.slow
def test_dropped_drafts_are_found_in_half_of_a_usual_audit(seed, draft):
    report = judge(dropping(seed), budget=BUDGET, draft=draft)
    sys.stdout.write(f"found after {report.num_tokens} of {BUDGET} tokens\n")
    assert report.verdict == "not lossless", report.reason
    assert "(in situation 'structured')" in report.reason
    assert report.num_tokens <= BUDGET // 2


def test_dropped_drafts_are_found_in_structured_requests_only():
    report = judge(dropping(2), only=("structured",), budget=4000, draft=UnigramTable(1))
    assert report.verdict == "not lossless"
    assert report.reason.startswith("too few tokens that the draft model underrates")
    free = judge(dropping(2), only=("16 at once",), budget=400, draft=UnigramTable(1))
    assert free.verdict == "lossless", free.reason


@pytest.mark.parametrize("draft", [DRAFT, UnigramTable(1)], ids=["its own", "another"])
def test_exact_servers_are_accepted_beside_any_draft_model(draft):
    report = judge(ToyServer(EXACT["single draft"], seed=3), budget=2000, draft=draft)
    assert report.verdict == "lossless", report.reason


def test_a_draft_law_counts_all_ends_and_unnamed_tokens():
    laws = asyncio.run(local_reference(draft=DRAFT).laws("abc", ["a", "e"], SamplingRules()))
    for place, law in enumerate(laws):
        assert law is not None
        assert law.draft is not None
        expected = np.array(DRAFT((1, 2, 3, 1)[: 3 + place]))
        shown = [law.draft[law.place(END_NAME if i == END else LETTERS[i])] for i in range(VOCAB)]
        np.testing.assert_allclose(shown, expected, atol=1e-12)
        assert law.draft.sum() == pytest.approx(1.0)


def test_a_draft_model_of_another_vocabulary_is_refused():
    target, draft = TabularModel(TARGET, VOCAB), TabularModel(DRAFT, 12)
    with pytest.raises(OptionError, match="the draft model has 12 tokens and the target 13"):
        LocalReference(target, Letters(), frozenset({END}), draft=draft)


@pytest.mark.parametrize("field", ["structured_outputs", "guided_regex", "regex", "grammar"])
def test_structured_requests_of_exact_servers_are_accepted(field):
    server = ToyServer(EXACT_ENGINES["single draft"], seed=2, grammar_field=field)
    report = judge(server, only=("structured",), budget=600)
    assert report.verdict == "lossless", report.reason
    assert report.num_tokens >= 600
    assert report.notes == ()


def test_a_text_outside_the_grammar_is_impossible():
    class Careless(ToyServer):
        """Follows the grammar in its first texts only."""

        def _engine_of(self, fields: dict[str, Any], num_prompt_tokens: int) -> Engine:
            kept = {} if self.num_requests > 40 else fields
            return super()._engine_of(kept, num_prompt_tokens)

    report = judge(Careless(EXACT_ENGINES["plain"], seed=1), only=("structured",))
    assert report.verdict == "not lossless"
    assert "outside of the support" in report.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [({"is_local": False}, "--target"), ({}, "with none of the known fields")],
    ids=["server as reference", "field ignored"],
)
def test_structured_requests_that_cannot_be_judged_are_left_out(options, said):
    server = ToyServer(EXACT_ENGINES["plain"], seed=1, grammar_field="")
    report = judge(server, only=("alone", "structured"), budget=400, **options)
    assert [result.name for result in report.situations] == ["alone"]
    assert said in "; ".join(report.notes)


def test_the_law_of_a_structured_text_is_that_of_the_admitted_tokens():
    text = ["a", "e", "l", "i", END_NAME]  # `i` may not come at an odd place, nor may the text end
    laws = asyncio.run(local_reference().laws("abc", text, SamplingRules(), is_structured=True))
    ids = (*Letters()("abc")["input_ids"], *Letters()("aeli")["input_ids"])
    for place, (law, name) in enumerate(zip(laws, text, strict=True)):
        masses = np.array(StructuredTable(TARGET, 3)(ids[: 3 + place]))
        expected = masses / masses.sum()
        assert law is not None
        for token, mass in enumerate(expected):
            letter = END_NAME if token == END else LETTERS[token]
            assert law.masses[law.place(letter)] == pytest.approx(mass, abs=2 * SMALLEST_REST)
        is_admitted = expected[END if name == END_NAME else LETTERS.index(name)] > 0
        assert (law.masses[law.place(name)] == 0.0) == (not is_admitted)


def test_parts_of_characters_are_unnamed_and_end_the_reading():
    class Bytes(Letters):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text.replace("l", "\N{REPLACEMENT CHARACTER}")

    reference = LocalReference(TabularModel(TARGET, VOCAB), Bytes(), frozenset({END}), by_id=True)
    text = [f"token_id:{token}" for token in (1, 12, 3, 4)]
    first, second = asyncio.run(reference.laws("abc", text, SamplingRules()))
    assert first is not None
    assert second is not None
    assert text[1] not in second.places
    assert second.rest == pytest.approx(TARGET((1, 2, 3, 1))[12], abs=2 * SMALLEST_REST)


def test_the_fault_is_named():
    report = judge(ToyServer(WRONG_ENGINES["top-k ignored"], seed=1))
    assert "outside of the support" in report.reason
    assert report.log_e == math.inf
    assert report.as_json()["log_e"] == 1000.0

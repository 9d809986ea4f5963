"""Records of texts that somebody chose: none is called exact, and the verdict says what was not checked."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from monge.api import make_components
from monge.audit.certificate import Certificate, tree_of
from monge.audit.certify_report import CertifyReport, MismatchError
from monge.audit.recorder import RunRecorder
from monge.audit.redraft import DraftFindings, Redrafter
from monge.control.fixed import Fixed
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.proposal import Arbitrary, Iid
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.model import ModelDrafter
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from tests.audit.certified import (
    Make,
    certified,
    combined,
    edited,
    forged,
    recorded,
    reread,
    shortened,
    table,
    written,
)
from tests.serve.toy import Letters

pytestmark = pytest.mark.usefixtures("unchecked_types")
CHAIN = combined("chain(3)", "block")
PLAIN = combined("chain(3)", "block", controller="fixed(max_depth=0)")
STEADY = ("fixed", "fixed(max_depth=1)", "fsm", "cached_fsm")  # fmt: skip
POOL = {"drafter": "pool('ngram(2)', 'model')", "tree": "chain(2)"}
READERS = 1
"""The seed of the reader, which nobody else chooses."""
TIMED: dict[str, dict[str, Any]] = {
    "goodput": {},
    "on_the_fly(probe_prob=0.5)": {},
    "q_learning": {},
    "hedge": POOL,
    "linear_selection": POOL,
}


def timed(controller: str, **parts: Any) -> Make:
    """A pair whose controller reads these times; some of them draw."""
    times = Latency(plain_s=1.0, node_share=0.025, draft_share=0.04)
    settings: dict[str, Any] = {"drafter": "model", "tree": "chain(3)", "verifier": "block"} | parts
    return lambda: make_components(
        table(1), table(2), controller=controller, latency=times, **settings
    )


def told(report: CertifyReport, *parts: str) -> None:
    """The run is exact, and its one line says so much."""
    assert report.answer == "exact", report.findings
    for part in parts:
        assert part in report.summary()


@pytest.mark.parametrize("controller", ["fixed", "on_the_fly", "OnTheFly()", "<Mine>", ""])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_no_controller_hides_uniforms_that_are_left_out(controller: str, is_drafted: bool) -> None:
    """Neither controllers nor children that were not offered account for them."""
    report = certified(forged(PLAIN, controller, is_drafted=is_drafted), PLAIN)
    assert report.answer == "not exact"
    assert report.findings[0].round == 1
    without = certified(forged(PLAIN, controller, is_drafted=is_drafted), PLAIN, redrafter=None)
    assert without.answer != "exact"


@pytest.mark.parametrize("controller", STEADY)
def test_plans_are_those_of_the_stated_controller(controller: str) -> None:
    make = combined("chain(3)", "block", controller=controller)
    certificate = recorded(make, max_new_tokens=16)
    told(
        certified(certificate, make),
        f"(seed 1, row 0; temperature 1.0; at most 16 tokens; verified by block; planned by {controller}; ",
    )
    other = combined("chain(3)", "block", controller="fixed(max_depth=2, max_nodes=2)")
    claimed = edited(recorded(other, max_new_tokens=16), controller=controller)
    report = certified(claimed, other)
    assert (report.answer, report.findings[0].field) != ("exact", "plan")
    assert report.findings[0].field == "plan"
    assert "max_nodes" in report.findings[0].reason


@pytest.mark.parametrize("controller", TIMED)
def test_plans_that_cannot_be_made_again_are_told(controller: str) -> None:
    """They can be chosen, so the verdict says how freely; what controllers draw uses up nothing."""
    make = timed(controller, **TIMED[controller])
    certificate = recorded(make, max_new_tokens=24, seed=3)
    report = certified(certificate, make)
    told(report, f"plans of {controller} as recorded, since it reads", "bits of choice in plans")
    assert 0 < report.drafts.choice_bits < 100


def test_plans_within_limits_of_the_request() -> None:
    """Limits, fixed plans and plain decoding that a request asks for are in its record."""
    recorder = RunRecorder(Decoder(CHAIN()))
    (usual,) = recorder.decoder.requests([[0, 1]], max_new_tokens=12, temperature=1.0, seed=2)
    for changes, planned in (
        ({"limits": DraftPlan(max_depth=1)}, "fixed"),
        ({"limits": DraftPlan(max_depth=2), "adaptive": False}, "fixed"),
        ({"speculative": False}, "fixed(max_depth=0)"),
    ):
        session = recorder.decoder.session(recorder.recorded(replace(usual, **changes)))
        certificate = run_of(recorder, session)
        told(certified(certificate, CHAIN), f"planned by {planned};")
        report = certified(
            edited(certificate, limits=asdict(DraftPlan()), controller="fixed"), CHAIN
        )
        assert report.findings[0].field == "plan"


def test_an_unknown_controller_is_told() -> None:
    class Mine(Fixed):
        """A controller without a name."""

    make = combined("chain(3)", "block", controller=Mine(max_depth=2))
    told(certified(recorded(make), make), "plans of <Mine> as recorded, since it is not known here")


def test_draws_of_children_that_were_dropped_are_made_again() -> None:
    make = lambda: make_components(  # noqa: E731
        table(1), drafter=ModelDrafter(model=table(2), tree=FirstOfTwo()), verifier="target_walk"
    )
    certificate = recorded(make)
    told(certified(certificate, make))
    one = certificate.requests[0]["rounds"][0]
    assert one["draws"][0]["stop"] == 2
    for changes in ({"tokens": [4, 4]}, {"stop": 1}):
        rounds = copy.deepcopy(certificate.requests[0]["rounds"])
        rounds[0]["draws"][0] |= changes
        assert certified(edited(certificate, rounds=rounds), make).answer != "exact"


def test_drawn_children_keep_their_order() -> None:
    """Uniforms that change places between two nodes would give a second text to choose."""
    make = combined("fixed_width((2, 1), 'iid')", "target_walk")
    certificate = recorded(make)
    (request,) = copy.deepcopy(certificate.requests)
    trees = [tree_of(one["tree"], certificate.arrays) for one in request["rounds"]]
    Redrafter(make(), 1e-9).redraft(request, trees, DraftFindings())
    place = next(place for place, one in enumerate(request["rounds"]) if len(one["draws"]) > 2)
    request["rounds"][place]["draws"].reverse()
    with pytest.raises(MismatchError, match="the drafter draws children after") as found:
        Redrafter(make(), 1e-9).redraft(request, trees, DraftFindings())
    assert (found.value.finding.round, found.value.finding.is_wrong) == (place + 1, True)


class TestEnds:
    """A text ends where its own fields say, and nowhere else."""

    def test_a_text_that_is_cut_anywhere(self) -> None:
        certificate = recorded(CHAIN, max_new_tokens=12)
        for reason in ("stop", "eos", "length"):
            report = certified(shortened(certificate, 2, finish_reason=reason), CHAIN)
            assert report.findings[0].field == "finish_reason", reason
        for reason, cause in ((None, "interrupted"), ("error", "an error")):
            report = certified(shortened(certificate, 2, finish_reason=reason), CHAIN)
            told(report, f"end of the text not checked ({cause})")

    def test_a_text_that_code_of_the_user_ends(self) -> None:
        certificate = recorded(CHAIN, max_new_tokens=12, stop_check=lambda ids: len(ids) > 6)
        assert certificate.requests[0]["finish_reason"] == "stop"
        told(certified(certificate, CHAIN), "end of the text not checked (code of the user)")
        assert certified(edited(certificate, stop_check=False), CHAIN).answer == "not exact"

    def test_end_tokens(self) -> None:
        certificate = recorded(
            CHAIN, prompts=[(0, 1)], eos_ids=frozenset({2}), max_new_tokens=40, seed=3
        )
        text = certificate.requests[0]["token_ids"]
        assert text[-1] == 2
        report = certified(certificate, CHAIN, eos_ids=frozenset({2}))
        told(report)
        assert "eos_ids" not in report.summary()
        told(certified(certificate, CHAIN), "eos_ids [2] of the request")
        for changed in ([], [3], [2, text[0]]):
            assert certified(edited(certificate, eos_ids=changed), CHAIN).answer == "not exact"
        for reason in ("stop", "length", None, "error"):
            report = certified(edited(certificate, finish_reason=reason), CHAIN)
            assert report.answer == "not exact"

    def test_stop_strings(self) -> None:
        letters = Letters()
        certificate = recorded(
            CHAIN, prompts=[(0, 1)], tokenizer=letters, max_new_tokens=40, seed=3, stop="ca"
        )
        text = letters.decode(certificate.requests[0]["token_ids"], skip_special_tokens=True)
        assert text.endswith("ca")
        told(certified(certificate, CHAIN, tokenizer=letters), "stop ['ca'] of the request")
        assert certified(certificate, CHAIN).answer == "could not tell"
        for changed in ([], ["cb"], ["ca", text[:2]], [""], "ca"):
            report = certified(edited(certificate, stop=changed), CHAIN, tokenizer=letters)
            assert report.answer == "not exact", changed


@pytest.mark.parametrize("num_requests", [0, 1])
def test_there_is_something_to_certify(num_requests: int) -> None:
    whole = shortened(recorded(CHAIN), 0, finish_reason=None)
    empty = Certificate(
        header=whole.header, requests=whole.requests[:num_requests], arrays=whole.arrays
    )
    report = certified(empty.sealed(), CHAIN)
    assert report.answer == "could not tell"
    assert "nothing to certify" in report.findings[0].reason


def test_a_coarser_type_in_the_header_buys_no_tolerance() -> None:
    for dtype in ("bfloat16", "float16"):
        report = certified(typed(recorded(CHAIN), dtype), CHAIN)
        assert report.answer == "could not tell"
        assert f"no numbers of {dtype}" in report.findings[0].reason
    report = certified(typed(recorded(CHAIN), "bfloat16"), CHAIN, dtype="float64")
    assert (report.answer, report.findings[0].field) == ("not exact", "header.target.dtype")


def test_the_tolerance_is_told() -> None:
    told(certified(recorded(CHAIN), CHAIN, dtype="float64"), "float64 logits within 1e-09)")
    told(certified(recorded(CHAIN), CHAIN, tolerance=0.5), "float64 logits within 0.5)")


def test_malformed_rounds_are_told() -> None:
    for name in ("verdict", "tree", "draws"):
        rounds = copy.deepcopy(recorded(CHAIN).requests[0]["rounds"])
        del rounds[1][name]
        report = certified(edited(recorded(CHAIN), rounds=rounds), CHAIN)
        assert "malformed" in report.findings[0].reason


def test_many_seeds_are_counted() -> None:
    recorder = RunRecorder(Decoder(CHAIN()))
    for seed in range(5):
        written(recorder, [[0, 1]], max_new_tokens=2, seed=seed)
    told(
        certified(reread(recorder.certificate()), CHAIN),
        "(seed 5 of the record, rows 5 of the record; ",
    )


class FirstOfTwo(TreeBuilder):
    """Draws two children of the root and offers the first one."""

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(proposes=frozenset({Arbitrary}), max_width=1, max_depth=1, max_nodes=1)

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        tree.grow(0, Iid(laws[0], 2), draws)
        return ()

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        finished = tree.finish()
        return finished.prune(finished.candidates[0][:1])


def run_of(recorder: RunRecorder, session: Any) -> Certificate:
    """The certificate of one session, decoded."""
    for _ in decode([session], recorder.decoder.components, max_batch_size=1):
        pass
    return reread(recorder.certificate([session]))


def typed(certificate: Certificate, dtype: str) -> Certificate:
    """The certificate with another type in its header."""
    header = {**certificate.header, "target": {**certificate.header["target"], "dtype": dtype}}
    return Certificate(
        header=header, requests=certificate.requests, arrays=certificate.arrays
    ).sealed()


def chosen(make: Make = CHAIN, limits: DraftPlan | None = None, **options: Any) -> Certificate:
    """The record of what somebody makes under the reader's seed."""
    recorder = RunRecorder(Decoder(make(), eos_ids=frozenset(options.pop("eos_ids", ()))))
    settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": READERS} | options
    (request,) = recorder.decoder.requests([[0, 1]], **settings)
    if limits is not None:
        request = replace(request, limits=limits)
    return run_of(recorder, recorder.decoder.session(recorder.recorded(request)))


CHOICES: dict[str, list[dict[str, Any]]] = {
    "row": [{"row": row} for row in (0, 1, 2, 1 << 63)],
    "limits": [
        {"limits": DraftPlan(max_depth=depth, max_nodes=nodes)}
        for depth in (1, 2, None)
        for nodes in (1, 2, None)
    ],
    # Both end before, after plans that are cut otherwise.
    "max_new_tokens": [{"max_new_tokens": most, "eos_ids": [2]} for most in (11, 12)],
    "temperature": [{"temperature": 1.0 + step / 10} for step in range(4)],
    "top_p": [{"top_p": 0.7}, {"top_p": 0.8}, {}],
    "verifier": [
        {"make": combined("chain(3)", rule)} for rule in ("block", "single_draft", "target_walk")
    ],
    "controller": [
        {"make": combined("chain(3)", "block", controller=f"fixed(max_depth={depth})")}
        for depth in (1, 2, 3)
    ],
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_the_maker_of_a_record_chooses_is_in_the_verdict(name: str) -> None:
    """Two records of one verdict have one text, so nobody can try settings until a text suits them."""
    texts = dict[str, set[tuple[int, ...]]]()
    for choice in CHOICES[name]:
        options = dict(choice)
        make = options.get("make", CHAIN)
        certificate = chosen(**options)
        ends = frozenset(options.get("eos_ids", ()))
        report = certified(certificate, make, eos_ids=ends, num_nodes=1)
        told(report)
        (request,) = certificate.requests
        texts.setdefault(report.basis, set()).add(tuple(request["token_ids"]))
    assert len(set().union(*texts.values())) > 1, "the choice was to matter"
    assert all(len(own) == 1 for own in texts.values()), texts


def test_settings_of_models_are_in_the_verdict() -> None:
    make = combined("chain(3)", "block", draft_temperature=0.7)
    loading = {"tree": "chain(3)", "draft_temperature": 0.7, "max_batch_size": 8, "draft": ["mine"]}
    certificate = recorded(make, loading=loading)
    told(certified(certificate, make), "; loaded with tree 'chain(3)', draft_temperature 0.7; ")
    target = {**certificate.header["target"], "weights": "int8"}
    rounded = replace(certificate, header={**certificate.header, "target": target}).sealed()
    told(certified(rounded, make), "; loaded with weights 'int8', tree 'chain(3)'")
    odd = replace(certificate, header={**certificate.header, "loading": "chain(3)"}).sealed()
    assert certified(odd, make).findings[0].field == "header.loading"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([0, 1, 2], "(seed 1, rows 0 to 2; "),
        ([2, 0, 1], "(seed 1, rows 2, 0, 1; "),
        ([5], "(seed 1, row 5; "),
    ],
)
def test_rows_of_requests_are_told_in_their_order(rows: list[int], text: str) -> None:
    recorder = RunRecorder(Decoder(CHAIN()))
    sessions = written(recorder, [[0, 1]] * 6, max_new_tokens=3)
    told(certified(reread(recorder.certificate([sessions[row] for row in rows])), CHAIN), text)

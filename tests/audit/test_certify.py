"""Certificates of toy runs: exact runs pass, changed records and wrong rules do not."""

import subprocess
import sys
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from monge.api import make_components
from monge.audit.certificate import CertificateError, held, read_certificate
from monge.audit.certify_report import CertifyReport
from monge.audit.checks.coupling import CouplingCheck, VisitedNode
from monge.audit.recorder import RunRecorder
from monge.core.errors import OptionError
from monge.core.proposal import Deterministic, Iid, WithoutReplacement
from monge.draft.model import ModelDrafter
from monge.engine.decoder import Decoder
from monge.verify.base import as_verifier
from monge.verify.registry import VERIFIERS
from monge.verify.rrs import Rrs
from tests.audit.certified import (
    all_runs,
    certified,
    combined,
    leaves,
    recorded,
    table,
    tampered,
)
from tests.kit.banks import bank, law_of
from tests.kit.known_bad import KNOWN_BAD_RULES, KNOWN_BAD_TREES, TokenLevelResidual
from tests.kit.known_bad_nodes import KNOWN_BAD_NODES

pytestmark = pytest.mark.usefixtures("unchecked_types")
RUNS = all_runs()
SOME = {(name, 1.0) for name in sorted(RUNS)[::12]}
CHAIN = combined("chain(3)", "block")
TAMPERED = {
    "block": CHAIN,
    "rrs": combined("fixed_width((2, 2), 'iid')", "rrs"),
    "traversal": combined("fixed_width((2, 1), 'without_replacement')", "traversal"),
    "target walk": combined("best_first(4, 2, 2)", "target_walk"),
    "sparse laws": combined("fixed_width((2, 1), 'mixed')", "optimal_given_candidates", "sparse"),
}


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, heat, marks=() if (name, heat) in SOME else pytest.mark.slow)
        for name in RUNS
        for heat in (0.0, 0.7, 1.0)
    ],
)
def test_exact_runs_pass(name: str, temperature: float) -> None:
    report = certified(recorded(RUNS[name], temperature=temperature), RUNS[name])
    assert report.answer == "exact", report.findings
    assert report.law_error < 1e-12
    assert report.num_tokens == 8
    assert report.drafts.num_rounds == report.num_rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_of_a_batch_pass(temperature: float) -> None:
    """Batched rules give the verdicts of their plain twins."""
    make = combined("fixed_width((2, 2), 'iid')", "rrs")
    certificate = recorded(make, prompts=[(0, 1), (2, 3, 1), (4,)], temperature=temperature)
    report = certified(certificate, make)
    assert (report.answer, report.num_requests, report.num_tokens) == ("exact", 3, 24)


@pytest.mark.parametrize(
    "rules", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.4}, {"temperature": 0.6, "top_k": 3}]
)
def test_truncated_laws_pass(rules: dict[str, Any]) -> None:
    report = certified(recorded(CHAIN, **rules), CHAIN)
    assert report.answer == "exact", report.findings


def test_a_text_that_ends_early_passes() -> None:
    certificate = recorded(CHAIN, eos_ids=frozenset({0, 1, 2}), max_new_tokens=20, seed=3)
    assert len(certificate.requests[0]["token_ids"]) < 20
    assert certified(certificate, CHAIN).answer == "exact"


def test_without_the_drafter_a_run_that_drafted_cannot_be_judged() -> None:
    """Whoever chooses a draft law after the uniforms chooses the text."""
    report = certified(recorded(CHAIN), CHAIN, redrafter=None, undrafted="it is secret")
    assert report.answer == "could not tell"
    assert "taken as declared, since it is secret" in report.findings[0].reason
    plain = combined("chain(3)", "block", controller="fixed(max_depth=0)")
    report = certified(recorded(plain), plain, redrafter=None)
    assert report.answer == "exact"
    assert "nothing drafted" in report.summary()


@pytest.mark.parametrize(("target", "draft", "field"), [(1, 3, "tree"), (9, 2, "laws of node 0")])
def test_another_model_is_told(target: int, draft: int, field: str) -> None:
    parts = {"drafter": "model", "tree": "chain(3)"}
    other = lambda: make_components(table(target), table(draft), **parts)  # noqa: E731
    report = certified(recorded(other), CHAIN)
    assert report.answer == "not exact"
    assert (report.findings[0].round, report.findings[0].field) == (1, field)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 21))]
)
def test_changed_records_are_rejected(seed: int) -> None:
    """One value is changed and the seals are made to fit, so that only the replay can tell."""
    pick = Random(seed)
    for make in TAMPERED.values():
        certificate = recorded(make)
        places = leaves(list(certificate.requests))
        for place in pick.sample(places, min(12, len(places))):
            report = certified(tampered(certificate, place, pick), make, num_nodes=1)
            assert report.answer != "exact", place
            assert report.findings[0].reason


def test_damage_is_found_by_the_seals() -> None:
    certificate = recorded(CHAIN)
    certificate.requests[0]["rounds"][2]["token_ids"][0] += 1
    (finding,) = certified(certificate, CHAIN).findings
    assert finding.field == "request 1, round 3"
    assert "seal" in finding.reason


def test_a_left_out_round_is_told() -> None:
    certificate = recorded(CHAIN)
    del certificate.requests[0]["rounds"][1]
    assert certified(certificate.sealed(), CHAIN).answer == "not exact"


BAD_TREES = {Iid: "fixed_width((2, 1), 'iid')", WithoutReplacement: "fixed_width((2, 1), 'without_replacement')"}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN_BAD_RULES)
def test_known_bad_rules_are_rejected(name: str) -> None:
    rule = KNOWN_BAD_RULES[name]
    (kind,) = rule.accepts
    make = combined(BAD_TREES[kind], rule)  # pyright: ignore[reportArgumentType]
    report = certified(recorded(make, max_new_tokens=16), make, rule=rule)
    assert report.answer == "not exact"
    assert "law error" in report.findings[0].reason


def test_a_known_bad_block_rule_is_rejected_and_has_no_name() -> None:
    make = combined("chain(3)", TokenLevelResidual())
    certificate = recorded(make, max_new_tokens=16)
    report = certified(certificate, make, rule=TokenLevelResidual())
    assert "law error" in report.findings[0].reason
    assert certified(certificate, make).answer == "could not tell"


@pytest.mark.parametrize("name", KNOWN_BAD_TREES)
def test_known_bad_drafters_are_rejected(name: str) -> None:
    tree = KNOWN_BAD_TREES[name]
    rule = "rrs" if tree.kind is Iid else "rrs_without_replacement"
    make = lambda: make_components(  # noqa: E731
        table(1), drafter=ModelDrafter(model=table(2), tree=tree), verifier=rule
    )
    report = certified(recorded(make, max_new_tokens=16), make, redrafter=None)
    assert report.answer == "not exact"
    assert "draws" in report.findings[0].field or "candidates" in report.findings[0].field


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_BAD_NODES)
def test_known_bad_decisions_are_seen_at_a_node(name: str) -> None:
    mutant = KNOWN_BAD_NODES[name]
    if mutant.declared is not None:
        pytest.skip("drawn otherwise than declared, which the check of draws finds")
    coupling = CouplingCheck(as_verifier(mutant.rule), 1, CertifyReport())
    assert any(
        (coupling.error_at([VisitedNode(target_law=p, proposal=mutant.drawn(q))]) or (0.0,))[0]
        > 1e-12
        for p, q in bank()
    )


@pytest.mark.parametrize("rule", ["rrs", "k_seq", "block", "traversal", "optimal_given_candidates"])
def test_couplings_of_many_tokens_are_exact(rule: str) -> None:
    p, q, other = (
        law_of(np.arange(1, 61)[np.argsort(np.sin(step * np.arange(60)))] ** 1.5)
        for step in (1.0, 2.0, 3.0)
    )
    width = 1 if rule == "block" else 2
    levels = [
        VisitedNode(target_law=p, proposal=Iid(q, width)),
        VisitedNode(target_law=other, proposal=Deterministic()),
    ]
    found = CouplingCheck(as_verifier(VERIFIERS.parse(rule)), 1, CertifyReport()).error_at(levels)
    assert found is not None
    assert found[0] < 1e-12


def test_what_cannot_be_recorded_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Lossy(Rrs):
        is_lossless = False

    decoder = Decoder(combined("chain(3)", "rrs")())
    with pytest.raises(OptionError, match="lossy"):
        RunRecorder(Decoder(combined("chain(3)", Lossy())()))
    with pytest.raises(OptionError, match="processors"):
        RunRecorder(decoder).sessions([[0]], processors=[lambda ids, scores: scores])


def test_a_held_array_does_not_keep_the_rest_of_its_batch() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    kept = held(rows[1])
    rows.zero_()
    assert kept.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert kept.untyped_storage().nbytes() == 16


@pytest.mark.slow
def test_certificates_need_no_package_of_the_audit() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None; import monge.audit.recorder, monge.audit.certify"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_files_get_clear_errors(tmp_path: Any) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(CertificateError, match="no such file"):
        read_certificate(path)
    whole = recorded(CHAIN).write(path).read_text()
    assert read_certificate(path).requests
    odd = whole.replace('"requests": [', '"requests": [7, ', 1)
    newer = whole.replace('"version": 1', '"version": 7', 1)
    for text, message in (
        (whole[: len(whole) // 2], "cut off"),
        ("[]", "not a certificate"),
        (odd, "'requests' or 'arrays' is missing"),
        (newer, "got 7, this release reads 1"),
    ):
        path.write_text(text)
        with pytest.raises(CertificateError, match=message):
            read_certificate(path)

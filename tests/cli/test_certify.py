"""`monge generate --certificate` and `monge certify`, on the tiny pair."""

import json

import pytest

from monge.backends.cpu import compiled
from monge.backends.cpu.program_cache import FOLDER_VARIABLE
from monge.loading.networks import load_network
from tests.engine.compiling import require
from tests.heads.readers.published import KINDS

pytestmark = pytest.mark.usefixtures("unchecked_types")


@pytest.fixture(scope="module")
def record(tiny_paths, tmp_path_factory):
    """A record of a sampled run."""
    from typer.testing import CliRunner

    from monge.cli.app import app

    target, draft = tiny_paths
    path = tmp_path_factory.mktemp("records") / "run.json"
    command = f"generate Once --target {target} --draft {draft} --tree chain(2) --verifier block"
    settings = f"--temperature 0.7 --top-k 6 --seed 1 --max-new-tokens 5 --certificate {path}"
    result = CliRunner().invoke(app, f"{command} {settings}".split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"monge certify {path}" in result.stderr
    return path


@pytest.fixture
def certify(run, tiny_paths):
    target, draft = tiny_paths
    return lambda *arguments: run("certify", *arguments, "--target", target, "--draft", draft)


def test_an_exact_run(record, certify):
    result = certify(record, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["verdict"]) == (0, "exact"), report
    assert report["num_tokens"] == 5
    assert report["law_error"] < 1e-12
    assert report["drafts"]["laws"] > 0
    settings = "seed 1, row 0; temperature 0.7; top_k 6; at most 5 tokens; verified by block"
    assert f"exact ({settings}; loaded with tree 'chain(2)'; planned by" in report["summary"]
    assert report["summary"].endswith("float32 logits within 0.001)")


def test_a_record_that_claims_a_coarser_type(record, certify, tiny_paths, tmp_path):
    """The target is loaded in that type, so the digest of its weights has to fit, and the logits have to be such numbers."""
    from monge.audit.certificate import Certificate, read_certificate
    from monge.audit.recorder import target_fields
    from monge.loading.networks import as_sequence_model, load_network

    coarse = as_sequence_model(load_network(tiny_paths[0], dtype="bfloat16"))
    own = read_certificate(record)
    claims = (
        {**own.header["target"], "dtype": "bfloat16"},
        target_fields(coarse, str(tiny_paths[0])),
    )
    for claim, message in zip(claims, ("another target", "no numbers of bfloat16"), strict=True):
        changed = Certificate(
            header={**own.header, "target": claim}, requests=own.requests, arrays=own.arrays
        )
        result = certify(changed.sealed().write(tmp_path / "changed.json"))
        assert result.exit_code == 2
        assert message in result.output


def test_a_text_with_stop_strings(run, certify, tiny_paths, tmp_path):
    """The tokenizer of the target finds them, and a cut anywhere else is seen."""
    from monge.audit.certificate import read_certificate

    path, (target, draft) = tmp_path / "run.json", tiny_paths
    command = f"generate Once --target {target} --draft {draft} --max-new-tokens 30 --seed 1"
    text = json.loads(run(*f"{command} --json".split()).stdout)["text"]
    stop = text[6:8]
    made = run(*command.split(), "--stop", stop, "--certificate", path)
    assert made.exit_code == 0, made.output
    (request,) = read_certificate(path).requests
    assert request["finish_reason"] == "stop"
    result = certify(path)
    assert result.exit_code == 0, result.output
    assert "of the request" in result.stdout
    changed = json.loads(path.read_text())
    changed["requests"][0]["stop"] = ["never"]
    again = read_certificate(path)
    again = type(again)(header=again.header, requests=changed["requests"], arrays=again.arrays)
    again.sealed().write(path)
    assert certify(path).exit_code == 1


def test_without_the_draft_model(record, run, tiny_paths):
    """Then nobody knows whether the draft laws were chosen after the random numbers."""
    result = run("certify", record, "--target", tiny_paths[0], "--nodes", 1)
    assert result.exit_code == 2
    assert "taken as declared, since the record names the draft model" in result.stdout


@pytest.mark.slow
def test_a_run_with_a_head_is_judged_by_one_program(run, tiny_paths, tmp_path, monkeypatch):
    """The program that gives hidden states to the head gives logits to the checks."""
    require("compiled")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    made, make = [], compiled.load_or_make
    monkeypatch.setattr(
        compiled, "load_or_make", lambda place, *rest: made.append(place) or make(place, *rest)
    )
    target, path = load_network(tiny_paths[0]), tmp_path / "run.json"
    head = KINDS["eagle3"](target.config.hidden_size, target.config.vocab_size).write(
        tmp_path / "head"
    )
    networks = f"--target {tiny_paths[0]} --draft {head}"
    command = f"generate Once {networks} --backend compiled(weights='int8') --seed 1"
    result = run(*f"{command} --temperature 0.7 --max-new-tokens 5 --certificate {path}".split())
    assert result.exit_code == 0, result.output
    result = run("certify", path, *networks.split(), "--json")
    report = json.loads(result.stdout)
    assert report["verdict"] == "exact", report
    assert len(made) == 2, "one of the run, one of its check"


def test_bad_input(record, certify, run, tiny_paths, tmp_path):
    changed, cut, text = tmp_path / "changed.json", tmp_path / "cut.json", record.read_text()
    changed.write_text(text.replace('"next_kind": "', '"next_kind": "x', 1))
    result = certify(changed)
    assert result.exit_code == 1
    assert "request 1, round 1: the seal does not fit" in result.stdout
    assert "not exact" in result.stdout
    cut.write_text(text[:1000])
    for result, message in (
        (certify(tmp_path / "none.json"), "no such file"),
        (certify(cut), "cut off"),
        (run("certify", record), "give --target"),
        (run("certify", record, "--target", tiny_paths[1]), "another target"),
    ):
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())

import json
from itertools import product

import pytest

from monge.cli.listing import PROPOSALS, ROOMS, legality
from monge.core.proposal import Arbitrary
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS
from monge.verify.single_draft import SingleDraft


@pytest.mark.parametrize("columns", [80, 200])
def test_every_part_is_shown_with_its_settings(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("list")
    assert result.exit_code == 0
    for room, registry in ROOMS.items():
        names = [room, *registry, *(key for name in registry for key in registry.settings(name))]
        assert [name for name in names if name not in result.stdout] == []
    assert "WithoutReplacement" in result.stdout
    (line,) = (
        one for one in result.stdout.splitlines() if one.startswith("tree fixed_width draws")
    )
    assert line.endswith(": target_walk, rrs_without_replacement, gumbel, traversal, layer")
    shown = run("list", "--markdown").stdout
    assert "| name | what it does | settings and defaults |\n|---|---|---|\n" in shown
    assert "━" not in shown


def test_models_say_what_rounding_changes(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("list", "--models").stdout
    assert "smollm2-head" in shown
    assert "93.4 % equal argmax" in " ".join(shown.split())
    models = json.loads(run("list", "--models", "--json").stdout)
    assert models["smollm2"]["rounded"].keys() == {"bfloat16", "int8", "int4"}


def test_json(run):
    parts = json.loads(run("list", "--json").stdout)
    for room, registry in ROOMS.items():
        assert [part["name"] for part in parts[room]] == list(registry)
        assert all(part["summary"].endswith(".") for part in parts[room])
    ngram = next(part for part in parts["drafters"] if part["name"] == "ngram")
    assert ngram["settings"]["max_ngram"] == 16
    model = next(part for part in parts["drafters"] if part["name"] == "model")
    assert (model["required"], model["settings"]) == ([], {"top_k": None})
    assert parts["legal"] == legality()


def test_legality_is_what_the_engine_decides():
    legal = legality()
    for name, kind in product(VERIFIERS, PROPOSALS):
        if kind is not Arbitrary:
            rule, shown = VERIFIERS.make(name), legal[name][kind.__name__]
            assert (shown == "yes") == (unsupported_reason(rule, (kind,), 2) is None)
            assert (shown == "no") == (unsupported_reason(rule, (kind,), 1) is not None)


def test_rules_of_others_are_claims(run, monkeypatch):
    """The tests of this library say nothing about the rules of other packages."""

    class Mine(SingleDraft):
        """A rule of another package."""

    class Lossy(SingleDraft):
        """A rule that says what it is."""

        is_lossless = False

    monkeypatch.setitem(VERIFIERS._all, "mine", Mine)
    monkeypatch.setitem(VERIFIERS._all, "lossy", Lossy)
    known = json.loads(run("list", "--json").stdout)["exactness"]
    assert known.pop("mine") == "claimed: monge acceptance mine"
    assert known.pop("lossy") == "lossy"
    assert {name for name, word in known.items() if word == "tested: integration"} == {
        name for name in known if not VERIFIERS.make(name).is_enumerable
    }
    assert set(known.values()) == {"tested: enumeration", "tested: integration"}
    monkeypatch.setenv("COLUMNS", "250")
    assert "monge acceptance mine" in run("list").stdout

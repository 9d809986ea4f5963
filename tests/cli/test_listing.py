import json
import re
from itertools import product

import pytest

from monge.cli.listing import PROPOSALS, ROOMS, legality
from monge.laws.proposal import Arbitrary
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS
from monge.verify.speculative_sampling import SpeculativeSampling


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
    assert line.endswith(
        ": sample_and_match, recursive_rejection_without_replacement, gumbel, traversal, layer"
    )
    shown = run("list", "--markdown").stdout
    assert "| name | what it does | settings and defaults |\n|---|---|---|\n" in shown
    assert "━" not in shown


def test_models_say_what_rounding_changes(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("list", "--models").stdout
    assert "smollm2-head" in shown
    assert "93.4 % equal argmax" in " ".join(shown.split())
    models = json.loads(run("list", "--models", "--json").stdout)
    assert models["smollm2"]["rounded"].keys() == {"file", "bfloat16", "int8", "int4"}


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
            assert (shown == "yes") == (why_no_exactness(rule, (kind,), 2) is None)
            assert (shown == "no") == (why_no_exactness(rule, (kind,), 1) is not None)


def test_rules_of_others_are_claims(run, installed, monkeypatch):
    """The tests of this library say nothing about the rules of other packages."""

    class Mine(SpeculativeSampling):
        """A rule of another package."""

    class Lossy(SpeculativeSampling):
        """A rule that says what it is."""

        is_lossless = False

    installed(mine=Mine, lossy=Lossy)
    known = json.loads(run("list", "--json").stdout)["exactness"]
    assert known.pop("mine") == "claimed: monge acceptance mine"
    assert known.pop("lossy") == "lossy"
    assert {name for name, word in known.items() if word == "tested: integration"} == {
        name for name in known if not VERIFIERS.make(name).is_enumerable
    }
    assert set(known.values()) == {"tested: enumeration", "tested: integration"}
    monkeypatch.setenv("COLUMNS", "250")
    assert "monge acceptance mine" in run("list").stdout


@pytest.mark.parametrize("room", ROOMS)
def test_a_section(run, room):
    shown = run("list", room).stdout
    assert all(re.search(rf"^{name}\b", shown, re.MULTILINE) for name in ROOMS[room])
    listed = json.loads(run("list", room, "--json").stdout)
    assert listed.keys() & ROOMS.keys() == {room}
    assert ("legal" in listed) == (room == "verifiers")
    assert ("which verifier is exact" in shown) == (room == "verifiers")
    assert ("is verified by" in shown) == (room == "trees")


def test_an_unknown_section(run):
    result = run("list", "verifier")
    assert result.exit_code == 2
    assert "unknown section 'verifier'; did you mean 'verifiers'?" in result.stderr


class TestCache:
    @pytest.mark.parametrize("option", ["--cache", "--clear-cache"])
    def test_a_folder_that_cannot_be_read(self, run, monkeypatch, option):
        def refuses():
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("monge.cli.listing.kept", refuses)
        result = run("list", option)
        assert result.exit_code == 2
        assert "Permission denied" in result.stderr

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        folder = tmp_path / "kept"
        sizes = {
            "gguf/town.Q4_K-0123456789abcdef/model.safetensors": 3000,
            "gguf/town.Q4_K-file1-0123456789abcdef/panels.bin": 2000,
            "gguf/.writing-x/model.safetensors": 10,
            "programs/a.pt2": 400,
            "programs/a.constants": 100,
            "mine.txt": 7,
        }
        for name, size in sizes.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x" * size)
        monkeypatch.setenv("MONGE_CACHE", str(folder))
        return folder

    def test_is_listed_with_sizes(self, run, folder):
        found = json.loads(run("list", "--cache", "--json").stdout)
        assert (found["folder"], found["bytes"], found["cleared"]) == (str(folder), 5510, False)
        assert [(one["what"], one["num_bytes"]) for one in found["kept"]] == [
            ("town.Q4_K.gguf, dequantised", 3000),
            ("town.Q4_K.gguf in its own types", 2000),
            ("1 compiled program", 500),
            ("a GGUF file, unfinished", 10),
        ]
        assert all(0 <= one["days"] < 1 for one in found["kept"])
        shown = run("list", "--cache").stdout
        assert "town.Q4_K.gguf, dequantised" in shown
        assert "0.0 MB in " in shown
        assert (folder / "programs").exists()

    def test_is_cleared_and_nothing_else_is(self, run, folder):
        assert "freed from" in run("list", "--clear-cache").stdout
        assert [path.name for path in folder.rglob("*") if path.is_file()] == ["mine.txt"]
        assert json.loads(run("list", "--cache", "--json").stdout)["kept"] == []

    def test_that_is_not_there_is_empty(self, run, tmp_path, monkeypatch):
        monkeypatch.setenv("MONGE_CACHE", str(tmp_path / "nothing"))
        for flag in ("--cache", "--clear-cache"):
            assert "0.0 MB" in run("list", flag).stdout

    def test_that_cannot_be_deleted_is_an_error(self, run, folder, monkeypatch):
        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("monge.cli.listing.shutil.rmtree", refuse)
        result = run("list", "--clear-cache")
        assert result.exit_code == 2
        assert "Permission denied" in result.output

    def test_one_thing_is_shown_at_a_time(self, run):
        result = run("list", "--cache", "--models")
        assert result.exit_code == 2
        assert "exclude each other" in result.output

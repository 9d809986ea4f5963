"""Commands of all pages and of the workflow that audits: each can be parsed, so its options exist."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from monge.audit.bets import smallest_deviation
from monge.audit.engines import HOW_TO_START
from monge.cli.app import app
from monge.control.registry import CONTROLLERS
from monge.draft.registry import DRAFTERS
from monge.draft.tree.registry import TREES
from monge.verify.registry import VERIFIERS

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "audit_in_ci.yml"
DOCS = ROOT / "docs"
PARTS = {
    "--verifier": VERIFIERS,
    "--drafter": DRAFTERS,
    "--tree": TREES,
    "--controller": CONTROLLERS,
}


@pytest.fixture(autouse=True)
def examples_may_be_missing(monkeypatch):
    """Models and files of the pages are examples, so nothing looks for them."""
    monkeypatch.setattr("monge.cli.lazy.check_early", lambda *_: None)


def commands(script: str) -> Iterator[list[str]]:
    """Words of every `monge` command of a shell script."""
    for line in script.replace("\\\n", " ").splitlines():
        if not line.lstrip().startswith("monge "):
            continue  # another program's line may be a part of a longer quotation
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
        lexer.whitespace_split = True
        words = list(lexer)
        if words[:1] == ["monge"]:
            end = next((at for at, word in enumerate(words) if word[0] in ";|&<>"), len(words))
            yield words[1:end]


def parse(words: list[str]) -> None:
    """Parse a command line, and the parts that it names, without running it."""
    for flag, value in pairwise(words):
        if flag in PARTS and words[0] != "acceptance":  # whose verifier may be in a file
            PARTS[flag].parse(value)
    command: Any = typer.main.get_command(app)
    arguments = words
    while hasattr(command, "resolve_command"):  # a group
        _, command, arguments = command.resolve_command(command.context_class(command), arguments)
    command.make_context(command.name, list(arguments))


def commands_of(page: Path) -> list[list[str]]:
    """Commands of the blocks of a page, and of the rows of its parts."""
    text = page.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    rows = re.findall(r"^\| `\w+` \| .+ \| `(monge .+)` \| .+ \|$", text, re.M)
    return list(commands("\n".join((*blocks, *rows))))


PAGES = {
    str(page.relative_to(ROOT)): found
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if (found := commands_of(page))
}


def test_the_workflow_audits():
    text = WORKFLOW.read_text()
    workflow = yaml.safe_load(text)
    assert {"pull_request", "schedule"} == set(workflow[True])  # YAML reads `on` as true
    (job,) = workflow["jobs"].values()
    steps = job["steps"]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    found = [words for step in steps for words in commands(step.get("run", ""))]
    assert [words[0] for words in found] == ["serve", "serve", "audit"]
    for words in found:
        parse(words)
    kept = next(step for step in steps if "upload-artifact" in step.get("uses", ""))
    assert kept["if"] == "always()"
    assert "steps.audit.outputs.status" in steps[-1]["run"]
    for tokens, shown in ((2_000, "0.07"), (20_000, "0.02")):
        assert f"{tokens:,}" in text
        assert f"{smallest_deviation(tokens, alpha=0.001):.2f}" == shown


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page):
    for words in PAGES[page]:
        parse(words)


@pytest.mark.parametrize("name", HOW_TO_START)
def test_the_commands_that_audit_other_engines_exist(name):
    (words,) = commands(HOW_TO_START[name][1])
    parse(words)


def test_unknown_commands_and_options_in_the_docs_are_found():
    with pytest.raises(Exception, match=r"No such option: --urls"):
        parse(["audit", "--urls", "http://a"])
    with pytest.raises(Exception, match="No such command 'audits'"):
        parse(["audits"])
    assert list(commands("x || monge audit\nmonge serve --port 1 > log &")) == [
        ["serve", "--port", "1"]
    ]

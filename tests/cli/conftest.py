from functools import partial
from types import SimpleNamespace

import pytest

from monge.verify.registry import VERIFIERS
from tests.bench.conftest import tiny_paths

__all__ = ["tiny_paths"]


@pytest.fixture(autouse=True)
def usual_width(monkeypatch):
    """Tables have the width that they have in a pipe, whatever a library has set."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def generate(run, tiny_paths):
    """`monge generate` on the tiny pair."""
    target, draft = tiny_paths
    return lambda *arguments, **options: run(
        "generate", *arguments, "--target", target, "--draft", draft, **options
    )


@pytest.fixture
def installed(monkeypatch):
    """Verifiers of another package, under their names."""

    def install(**rules):
        entries = {
            name: SimpleNamespace(value=name, load=partial(lambda rule: rule, rule))
            for name, rule in rules.items()
        }
        monkeypatch.setitem(vars(VERIFIERS), "_all", {**dict(VERIFIERS), **rules})
        monkeypatch.setitem(vars(VERIFIERS), "_entries", entries)

    return install

"""Settings that every test shares: no network, one thread per process, reproducible examples."""

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
# A pool of threads and forked workers do not go together.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import jaxtyping
import pytest
import torch

from tests import type_checks
from tests.kit import given_candidates

torch.set_num_threads(1)  # xdist runs one process per core
given_candidates.name_it()

hypothesis.settings.register_profile(
    "ci", derandomize=True, max_examples=20, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _logs_as_before():
    """A command that runs in this process configures the logs, which other tests read."""
    loggers = [logging.getLogger(name) for name in ("", "monge", "monge.serve.requests")]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(autouse=True)
def _checked_types():
    type_checks.start()


@pytest.fixture
def unchecked_types():
    """No type checks: the checker reads an item of every sequence, and the laws of a tree are computed when they are read."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def without(monkeypatch):
    """Hide packages from the check of extras."""
    from importlib.metadata import PackageNotFoundError, version

    def hide(*packages):
        def found(name):
            if name in packages:
                raise PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr("monge.core.extras.version", found)

    return hide


@pytest.fixture
def run():
    """Run a command of `monge` as a user would; standard output and standard error apart."""
    from typer.testing import CliRunner

    from monge.cli.app import app

    runner = CliRunner()

    def invoke(*arguments, stdin=None):
        return runner.invoke(
            app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False
        )

    return invoke

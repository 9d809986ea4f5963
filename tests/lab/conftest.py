import importlib

import pytest
from typer.testing import CliRunner

from lab.command import app_of
from tests.bench.conftest import tiny_pair, tiny_paths

__all__ = ["tiny_pair", "tiny_paths"]


@pytest.fixture
def lab():
    """Run `python -m lab.NAME` as a user would; arguments are words, or texts of several words."""

    def invoke(name, *arguments):
        is_file = name in ("against", "matrix")
        module = importlib.import_module(f"lab.{name}" if is_file else f"lab.{name}.__main__")
        words = [word for argument in arguments for word in str(argument).split()]
        return CliRunner().invoke(app_of(module.main), words, catch_exceptions=False)

    return invoke

"""The front door is small, complete, and used from outside only."""

import ast
import types

import pytest

import monge
from tests.architecture.house import PACKAGE, modules, name_of

MAX_NAMES = 35


def front_door_imports(source: str) -> list[str]:
    """Imports of `monge` itself, instead of a module in it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}" for alias in node.names if alias.name == "monge"]
        elif isinstance(node, ast.ImportFrom) and node.module == "monge" and node.level == 0:
            found.append(f"line {node.lineno}")
    return found


def test_surface_is_small():
    assert 0 < len(monge.__all__) <= MAX_NAMES
    assert len(set(monge.__all__)) == len(monge.__all__), "a name is listed twice"


def test_names_exist():
    missing = [name for name in monge.__all__ if not hasattr(monge, name)]
    assert missing == []


def test_promised_names():
    assert {"load", "Decoder", "speculate"} <= set(monge.__all__)


def test_nothing_leaks():
    names = {
        name
        for name, value in vars(monge).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert names <= set(monge.__all__)


def test_public_names_are_documented():
    parts = [getattr(monge, name) for name in monge.__all__]
    silent = [
        part.__qualname__
        for part in parts
        if isinstance(part, type | types.FunctionType) and not part.__doc__
    ]
    assert silent == []


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_nobody_inside_uses_the_front_door(module):
    assert front_door_imports(module.read_text()) == []


def test_front_door_imports_are_found():
    assert front_door_imports("import monge\nfrom monge import load\nimport monge.core.law\n") == [
        "line 1",
        "line 2",
    ]


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()

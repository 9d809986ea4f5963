"""What the architecture tests read: the sources of the package, as text and as syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "monge"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    """Every module of the package, in a stable order."""
    found = sorted(PACKAGE.rglob("*.py"))
    assert found, f"no modules below {PACKAGE}"
    return found


def name_of(module: Path) -> str:
    """Path below the package, for messages: `core/law.py`."""
    return module.relative_to(PACKAGE).as_posix()


def functions(tree: ast.Module) -> Iterator[tuple[Function, bool]]:
    """Every function of a module, nested ones too, and whether it is a method."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield child, isinstance(node, ast.ClassDef)

"""House rules that no linter knows: no bare epsilons in proofs, no orphaned TODO, no stray print."""

import ast
import re

import pytest

from tests.architecture.sources import modules, name_of

EXACT_ROOMS = ("core/", "laws/", "verify/", "transport/")
TALKING_ROOMS = ("cli/", "bench/", "cli.py", "__main__.py")
EPSILON = 1e-3  # a positive float literal below this is a tolerance, and a tolerance has a name
TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


def bare_epsilons(name, tree):
    """Return tiny float literals that are not the value of a named module constant."""
    if not name.startswith(EXACT_ROOMS):
        return []
    named = {id(part) for one in tree.body if is_constant(one) for part in ast.walk(one)}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and 0 < node.value < EPSILON
        and id(node) not in named
    ]


def is_constant(statement):
    """Return whether a statement of a module gives a value to an UPPER_CASE name."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return isinstance(statement, ast.Assign | ast.AnnAssign) and all(
        isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) for target in targets
    )


def prints(name, tree):
    """Return calls of print in rooms that return values instead of talking."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = [one for one in calls if isinstance(one.func, ast.Name) and one.func.id == "print"]
    return [] if name.startswith(TALKING_ROOMS) else found


def offences(name, source):
    tree = ast.parse(source)
    lines = [node.lineno for node in (*bare_epsilons(name, tree), *prints(name, tree))]
    lines += [number for number, line in enumerate(source.splitlines(), 1) if TODO.search(line)]
    return [f"{name}:{line}" for line in lines]


def test_style():
    assert [one for path in modules() for one in offences(name_of(path), path.read_text())] == []


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("verify/rule.py", "ratio = p / (q + 1e-9)\n", 1),
        ("transport/bounds.py", "class C:\n    EPS = 1e-12\n", 1),
        ("laws/law.py", "x = 1  # TODO: later\n", 1),
        ("engine/loop.py", "def f():\n    print('round')\n", 1),
        ("laws/law.py", "MASS_TOLERANCE: Final = 1e-9\n", 0),
        ("bench/run.py", "x = 1e-9\n", 0),
        ("laws/law.py", "x = 1  # TODO(#12): when torch has it\n", 0),
        ("cli/main.py", "print(1)\n", 0),
    ],
)
def test_rules_bite(name, source, count):
    assert len(offences(name, source)) == count

"""House rules that no linter knows.

No bare epsilons, no orphaned TODO, no print outside the rooms that talk.
"""

import ast
import re

import pytest

from tests.architecture.house import modules, name_of

EXACT_ROOMS = ("core/", "verify/", "transport/")
TALKING_ROOMS = ("cli/", "bench/", "cli.py", "__main__.py")
EPSILON = 1e-3  # a positive float literal below this is a tolerance, and a tolerance has a name
TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


def bare_epsilons(name: str, source: str) -> list[str]:
    """Tiny float literals that are not the value of a named module constant."""
    if not name.startswith(EXACT_ROOMS):
        return []
    tree = ast.parse(source)
    named = {
        id(part)
        for statement in tree.body
        if is_constant(statement)
        for part in ast.walk(statement)
    }
    return [
        f"{name}:{node.lineno}: {node.value!r} needs a name and a bound on what it costs"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and 0 < node.value < EPSILON
        and id(node) not in named
    ]


def is_constant(statement: ast.stmt) -> bool:
    """Whether a statement of a module gives a value to an UPPER_CASE name."""
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Assign):
        targets = statement.targets
    else:
        return False
    return all(isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) for target in targets)


def orphaned_todos(name: str, source: str) -> list[str]:
    """Notes to oneself that name no issue."""
    lines = enumerate(source.splitlines(), start=1)
    return [
        f"{name}:{number}: write TODO(#issue), or do it"
        for number, line in lines
        if TODO.search(line)
    ]


def prints(name: str, source: str) -> list[str]:
    """Calls of print in rooms that return values instead of talking."""
    if name.startswith(TALKING_ROOMS):
        return []
    return [
        f"{name}:{node.lineno}: print"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


RULES = [bare_epsilons, orphaned_todos, prints]


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_style(module):
    name, source = name_of(module), module.read_text()
    assert [offence for rule in RULES for offence in rule(name, source)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (bare_epsilons, "verify/rule.py", "ratio = p / (q + 1e-9)\n"),
        (bare_epsilons, "core/law.py", "def f(tolerance=1e-6): ...\n"),
        (bare_epsilons, "transport/bounds.py", "class C:\n    EPS = 1e-12\n"),
        (orphaned_todos, "core/law.py", "x = 1  # TODO: later\n"),
        (orphaned_todos, "core/law.py", "x = 1  # FIXME\n"),
        (prints, "core/law.py", "print(1)\n"),
        (prints, "engine/loop.py", "def f():\n    print('round')\n"),
    ],
)
def test_rules_bite(rule, name, source):
    assert len(rule(name, source)) == 1


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (bare_epsilons, "core/law.py", "MASS_TOLERANCE: Final = 1e-9\n"),
        (bare_epsilons, "core/law.py", "x = 0.0 + 0.5\n"),
        (bare_epsilons, "bench/run.py", "x = 1e-9\n"),
        (orphaned_todos, "core/law.py", "x = 1  # TODO(#12): when torch has it\n"),
        (prints, "cli/main.py", "print(1)\n"),
        (prints, "core/law.py", '"""print(1)"""\n'),
    ],
)
def test_rules_let_pass(rule, name, source):
    assert rule(name, source) == []

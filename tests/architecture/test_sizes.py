"""Size gates: what does not fit on a screen is not read beside a paper."""

import ast

import pytest

from tests.architecture.house import Function, functions, modules, name_of

MAX_FUNCTION_LINES = 50
MAX_MODULE_LINES = 300
MAX_RULE_LINES = 150
MAX_POSITIONAL = 5


def num_lines(function: Function) -> int:
    """Lines from `def` to the end; decorators and the docstring do not count, so that nobody saves on explaining options."""
    length = last_line(function) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return length
    docstring = function.body[0]
    return length - (last_line(docstring) - docstring.lineno + 1)


def last_line(node: ast.stmt) -> int:
    """The line on which a statement ends."""
    assert node.end_lineno is not None
    return node.end_lineno


def num_positional(function: Function, is_method: bool) -> int:
    """Parameters that can be passed by position, the receiver not counted; none of a kernel, whose language has no others."""
    if any(isinstance(mark, ast.Attribute) and mark.attr == "jit" for mark in function.decorator_list):
        return 0
    count = len(function.args.posonlyargs) + len(function.args.args)
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)
    return count - (is_method and not static)


def offences(name: str, source: str) -> list[str]:
    """What is too large in one module."""
    found = []
    limit = MAX_RULE_LINES if is_rule(name) else MAX_MODULE_LINES
    if (length := len(source.splitlines())) > limit:
        found.append(f"{name}: {length} lines, at most {limit}")
    for function, is_method in functions(ast.parse(source)):
        where = f"{name}:{function.lineno} {function.name}"
        if (length := num_lines(function)) > MAX_FUNCTION_LINES:
            found.append(f"{where}: {length} lines, at most {MAX_FUNCTION_LINES}")
        if (count := num_positional(function, is_method)) > MAX_POSITIONAL:
            found.append(f"{where}: {count} positional parameters, at most {MAX_POSITIONAL}")
    return found


def is_rule(name: str) -> bool:
    """Whether a module holds an acceptance rule."""
    return name.startswith("verify/") and name.rpartition("/")[2] not in {"__init__.py", "base.py", "registry.py"}


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_sizes(module):
    assert offences(name_of(module), module.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "culprit"),
    [
        ("core/long.py", "x = 1\n" * 301, "core/long.py: 301 lines, at most 300"),
        ("verify/long.py", "x = 1\n" * 151, "verify/long.py: 151 lines, at most 150"),
        ("core/f.py", "def f():\n" + "    x = 1\n" * 50, "core/f.py:1 f: 51 lines, at most 50"),
        (
            "core/f.py",
            'def f():\n    """Two\n    lines."""\n' + "    x = 1\n" * 50,
            "core/f.py:1 f: 51 lines, at most 50",
        ),
        ("core/f.py", "def f(a, b, c, d, e, f): ...\n", "core/f.py:1 f: 6 positional parameters, at most 5"),
        (
            "core/f.py",
            "class C:\n    def f(self, a, b, c, d, e, f): ...\n",
            "core/f.py:2 f: 6 positional parameters, at most 5",
        ),
    ],
)
def test_gates_close(name, source, culprit):
    assert offences(name, source) == [culprit]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core/long.py", "x = 1\n" * 300),
        ("verify/base.py", "x = 1\n" * 151),
        ("core/f.py", "def f():\n" + "    x = 1\n" * 49),
        ("core/f.py", 'def f():\n    """Two\n    lines."""\n' + "    x = 1\n" * 49),
        ("core/f.py", "def f(a, b, c, d, e, *, f, g): ...\n"),
        ("core/f.py", "class C:\n    def f(self, a, b, c, d, e): ...\n"),
    ],
)
def test_gates_open(name, source):
    assert offences(name, source) == []

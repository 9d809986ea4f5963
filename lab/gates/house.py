"""`python -m lab.gates.house`: count what `ceilings.json` bounds, and fail where a count is above its ceiling."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from rich.table import Table

import monge
from monge.cli.app import COMMANDS
from monge.cli.console import output
from monge.control.latency import Latency
from monge.core.parts import PARTS
from monge.engine.batch import decode
from monge.options import LoadOptions, SamplingOptions, ServeOptions

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "monge"
CEILINGS: Final = Path(__file__).with_name("ceilings.json")
LOAD_OPTIONS: Final = frozenset(
    [
        "draft",
        "drafter",
        "tree",
        "verifier",
        "controller",
        "backend",
        "draft_backend",
        "dtype",
        "device",
        "attention",
        "max_batch_size",
        "cross_tokenizer",
    ]
)
SAMPLING_OPTIONS: Final = frozenset(
    [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop",
        "seed",
        "logprobs",
        "max_new_tokens",
        "ignore_eos",
    ]
)
_A_LIST: Final = 4  # so many of the names in one signature or class are a list of options
_A_SAMPLING_LIST: Final = 5  # the four settings of a law belong together in its arithmetic
_A_SOURCE: Final = 5  # lines of a method that only hands on to the source of its rule
_VAGUE: Final = frozenset(["one", "own", "found", "told", "made", "asked"])
_CONTROL_FILES: Final = ("control/goodput.py", "control/latency.py", "control/acceptance.py")
_WARM_ROUNDS, _ROUNDS = 12, 40
_WAYS_OF_DRAWING: Final = frozenset(["Mixed", "Iid"])
_NO_CODE: Final = frozenset(
    [
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    ]
)
_OF_DEVELOPERS: Final = frozenset(["test", "docs", "dev"])
_ONE: Final = re.compile(r"\bone\b")


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by path below the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def lines_of_code(source: str) -> int:
    """Return the lines of a module that are no docstring, comment, blank line or import."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    tree = ast.parse(source)
    nodes = ast.walk(tree)
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in [*imports, *_docstrings(tree)]:
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts that are statements: docstrings of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def lines_below(folder: Path) -> int:
    """Return the lines of code of all modules below a folder."""
    return sum(lines_of_code(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def lists_of(options: frozenset[str], least: int) -> Iterator[str]:
    """Yield the functions and classes that write out at least so many of these options."""
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
                names = {field.target.id for field in fields if isinstance(field.target, ast.Name)}
            else:
                continue
            if len(names & options) >= least:
                yield f"{name}:{node.lineno} {node.name}"


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class with its place."""
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                yield f"{name}:{node.lineno} {node.name}", node


def classes_with_getattr() -> Iterator[str]:
    """Yield the classes that define `__getattr__`."""
    for place, node in classes():
        names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        if "__getattr__" in names:
            yield place


def repeated_classes() -> Iterator[str]:
    """Yield the class names that occur more than once."""
    counts = Counter(node.name for _, node in classes())
    yield from (name for name, count in counts.items() if count > 1)


def rules_with_two_sources() -> Iterator[str]:
    """Yield the rules with a tensor program whose objects decide by code of their own as well."""
    for place, node in classes():
        if not place.startswith("verify/"):
            continue
        fields = {target.id for part in node.body for target in _targets(part)}
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        for method in methods if "programs" in fields else ():
            last = method.body[-1].end_lineno or 0
            if method.name in {"emit", "verify"} and last - method.body[0].lineno >= _A_SOURCE:
                yield f"{place}.{method.name}"


def _targets(statement: ast.stmt) -> list[ast.Name]:
    """Return the names to which a statement gives a value."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target for target in targets if isinstance(target, ast.Name)]


def vague_names() -> Iterator[str]:
    """Yield the variables that are named for having been found, or for nothing."""
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _VAGUE:
                yield f"{name}:{node.lineno} {node.id}"


def circles() -> Iterator[str]:
    """Yield the groups of modules that import each other, wherever in a file the imports stand."""
    arrows = {name: set(_imported(module)) & modules().keys() for name, module in modules().items()}
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in arrows
        if name in reached[name]
    }
    yield from (" <-> ".join(group) for group in sorted(groups) if len(group) > 1)


def _imported(module: ast.Module) -> Iterator[str]:
    """Yield the files of the package that a module may import."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "monge":
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            path = "/".join(name.split(".")[1:])
            # A package's own file is listed only if something is taken from it.
            yield from (f"{path}.py", f"{path}/__init__.py")


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return the modules to which a path of at least one arrow leads."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = arrows[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def constants_of_the_controller() -> Iterator[str]:
    """Yield the named numbers of the default controller and its latency."""
    for name in _CONTROL_FILES:
        for node in modules()[name].body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield f"{name}:{node.lineno}"


def files_of_a_round() -> Iterator[str]:
    """Yield the files that the usual round of the built-in pair enters."""
    decoder = monge.load()
    # So that no clock decides.
    times = Latency.linear(plain=0.005, node=0.0002, draft=0.001)
    decoder.components.shared.latency = times
    length = 8 * (_WARM_ROUNDS + _ROUNDS)
    prompts = ["The history of the town"]
    (session,) = decoder.sessions(prompts, max_new_tokens=length, ignore_eos=True)
    rounds = decode([session], decoder.components, max_batch_size=1)
    for _ in range(_WARM_ROUNDS):
        next(rounds)
    entered = sorted((_entered(lambda: next(rounds)) for _ in range(_ROUNDS)), key=len)
    yield from entered[_ROUNDS // 2]


def _entered(work: Callable[[], object]) -> list[str]:
    """Return the files of the package in which a function is called, in the order of their first call."""
    files: dict[str, None] = {}

    def note(frame: Any, event: str, _argument: object) -> None:  # noqa: ANN401
        if event == "call":
            files.setdefault(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    root = f"{Path(monge.__file__).parent}/"
    return [file.removeprefix(root) for file in files if file.startswith(root)]


def imports_torch() -> bool:
    """Return whether `import monge` imports torch."""
    code = "import sys, monge; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip() == "True"


def python_in_strings() -> Iterator[str]:
    """Yield the constants of several lines that are Python source."""
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, ast.Constant
            ):
                text = node.value.value
                if isinstance(text, str) and re.search(
                    r"^\s*(import|from) \w+", text, re.MULTILINE
                ):
                    yield f"{name}:{node.lineno}"


def dropped_uniforms() -> Iterator[str]:
    """Yield the statements that draw a uniform and drop it."""
    for name, module in modules().items():
        for node in ast.walk(module):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
                continue
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr == "uniform":
                yield f"{name}:{node.lineno}"


def files_with_a_way_of_drawing() -> Iterator[str]:
    """Yield the modules that name one way in which candidates are drawn."""
    for name, module in modules().items():
        names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
        if names & _WAYS_OF_DRAWING:
            yield name


def ones_in_docstrings() -> Iterator[str]:
    """Yield the docstrings that say "one", as often as they do."""
    for name, module in modules().items():
        for node in _docstrings(module):
            yield from (f"{name}:{node.lineno}" for _ in _ONE.findall(str(node.value)))


def distributions() -> Iterator[str]:
    """Yield the classes that are a distribution: with `prob`, their own or inherited, and what one has above another."""
    names: set[str] = set()
    listed: dict[str, None] = {}
    for _ in range(3):  # as deep as classes inherit
        for place, node in classes():
            has_prob = any(isinstance(m, ast.FunctionDef) and m.name == "prob" for m in node.body)
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if has_prob or bases & names or node.name.endswith("Excess"):
                names.add(node.name)
                listed[place] = None
    yield from listed


def laws_of_logits() -> Iterator[str]:
    """Yield the public functions from logits to a distribution."""
    for name, module in modules().items():
        for node in module.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            takes = {argument.arg for argument in node.args.args} & {"logits", "scores"}
            returned = ast.unparse(node.returns) if node.returns else ""
            if takes and ("Law" in returned or node.name.startswith("probs_")):
                yield f"{name}:{node.lineno} {node.name}"


def parts() -> Iterator[str]:
    """Yield the named parts; a depth controller is a controller."""
    for kind, names in PARTS.items():
        if kind != "depth controller":
            yield from (f"{kind} {name}" for name in names)


def load_and_request_options() -> Iterator[str]:
    """Yield the options of loading, of requests and of the server."""
    for group in (LoadOptions, SamplingOptions, ServeOptions):
        yield from (f"{group.__name__}.{field.name}" for field in fields(group))


def extras() -> Iterator[str]:
    """Yield the extras that users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from (name for name in project["optional-dependencies"] if name not in _OF_DEVELOPERS)


LISTS: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "named parts": parts,
    "options": load_and_request_options,
    "commands": lambda: iter(COMMANDS),
    "extras for users": extras,
    "constants that are Python source": python_in_strings,
    "dropped uniforms": dropped_uniforms,
    "classes that are a distribution": distributions,
    "functions from logits to a distribution": laws_of_logits,
    "files that name one way of drawing": files_with_a_way_of_drawing,
    '"one" in docstrings': ones_in_docstrings,
    "lists of load options": lambda: lists_of(LOAD_OPTIONS, _A_LIST),
    "lists of sampling options": lambda: lists_of(SAMPLING_OPTIONS, _A_SAMPLING_LIST),
    "classes with __getattr__": classes_with_getattr,
    "class names that occur twice": repeated_classes,
    "circles of imports": circles,
    "rules with two sources": rules_with_two_sources,
    "vague variables": vague_names,
    "constants of the default controller": constants_of_the_controller,
    "files of a usual round": files_of_a_round,
}
"""What is counted by listing it; `python -m lab.gates.house NAME` prints the list."""


def counts() -> dict[str, int]:
    """Return all counts by name."""
    return {
        "lines of code of src": lines_below(PACKAGE),
        "lines of code of tests": lines_below(ROOT / "tests"),
        "lines of code of lab": lines_below(ROOT / "lab"),
        "lines of loop.py": len((PACKAGE / "engine" / "loop.py").read_text().splitlines()),
        "import monge imports torch": int(imports_torch()),
        **{name: len(list(places())) for name, places in LISTS.items()},
    }


def main() -> None:
    """Print every count beside its ceiling, or the list behind one of them.

    Exit status 1 if a count is above its ceiling, or if the counts and ceilings differ in name.
    """
    if names := sys.argv[1:]:
        for name in names:
            print(*LISTS[name](), sep="\n")
        return
    ceilings: dict[str, dict[str, int]] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    now = counts()
    table = Table("count", "now", "ceiling", "plan", "")
    is_held = now.keys() == ceilings.keys()
    for name in sorted(now.keys() ^ ceilings.keys()):
        table.add_row(name, "", "", "", "[red]has no count or no ceiling[/]")
    for name, bounds in ceilings.items():
        value = now.get(name, 0)
        is_held &= value <= bounds["ceiling"]
        verdict = "holds" if value <= bounds["ceiling"] else "[red]above its ceiling[/]"
        table.add_row(name, str(value), str(bounds["ceiling"]), str(bounds["plan"]), verdict)
    output(120).print(table)
    if not is_held:
        sys.exit(1)


if __name__ == "__main__":
    main()

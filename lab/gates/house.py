"""`python -m lab.gates.house`: count what the plan of the house bounds, and print it as JSON."""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import monge
from monge.control.latency import Latency
from monge.engine.batch import decode

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "monge"
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
        "draft_temperature",
        "draft_top_k",
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


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by path below the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def num_lines(folder: Path, *suffixes: str) -> int:
    """Return the lines of all files below a folder with these suffixes."""
    files = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


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


LISTS: Final[dict[str, Callable[[], Iterator[str]]]] = {
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
    loop = PACKAGE / "engine" / "loop.py"
    return {
        "lines of src/monge": num_lines(PACKAGE, ".py", ".cpp"),
        "lines of loop.py": len(loop.read_text(encoding="utf-8").splitlines()),
        "lines of tests": num_lines(ROOT / "tests", ".py"),
        "import monge imports torch": int(imports_torch()),
        **{name: len(list(places())) for name, places in LISTS.items()},
    }


def main() -> None:
    """Print the counts as the arms of one JSON document, or the list behind one of them."""
    if names := sys.argv[1:]:
        for name in names:
            print(*LISTS[name](), sep="\n")
        return
    arms = [{"figure": name, "value": float(value)} for name, value in counts().items()]
    print(json.dumps({"arms": arms}))


if __name__ == "__main__":
    main()

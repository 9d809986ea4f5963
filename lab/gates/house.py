"""`python -m lab.gates.house`: count what the plan of the house bounds, and print it as JSON."""

import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "monge"
LOAD_OPTIONS: Final = frozenset(
    {
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
    }
)
_A_LIST: Final = 4  # so many of these names in one signature or class are a list of load options
CONTROL_FILES: Final = ("control/goodput.py", "control/latency.py", "control/acceptance.py")


def num_lines(folder: Path, *suffixes: str) -> int:
    """Return the lines of all files below a folder with these suffixes."""
    files = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def lists_of_load_options() -> Iterator[str]:
    """Yield the functions and classes that write out options of `monge.load`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
                names = {one.target.id for one in fields if isinstance(one.target, ast.Name)}
            else:
                continue
            if len(names & LOAD_OPTIONS) >= _A_LIST:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"


def num_constants(*names: str) -> int:
    """Return the number of named numbers at the top of some files of the package."""
    count = 0
    for name in names:
        path = PACKAGE / name
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ()
        for node in body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            count += isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    return count


def seconds_of(*arguments: str) -> float:
    """Return the shortest of three runs of a Python process."""
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return min(times)


def imports_torch() -> bool:
    """Return whether `import monge` imports torch."""
    code = "import sys, monge; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip() == "True"


def figures() -> dict[str, float]:
    """Return all figures by name."""
    loop = PACKAGE / "engine" / "loop.py"
    return {
        "lines of src/monge": num_lines(PACKAGE, ".py", ".cpp"),
        "lines of loop.py": len(loop.read_text(encoding="utf-8").splitlines()),
        "lines of tests": num_lines(ROOT / "tests", ".py"),
        "places that list load options": len(list(lists_of_load_options())),
        "named constants of the default controller and its latency": num_constants(*CONTROL_FILES),
        "import monge imports torch": imports_torch(),
        "seconds of monge --version": seconds_of("-m", "monge", "--version"),
    }


def main() -> None:
    """Print the figures as the arms of one JSON document."""
    arms: list[dict[str, Any]] = [
        {"figure": name, "value": float(value)} for name, value in figures().items()
    ]
    print(json.dumps({"arms": arms}))


if __name__ == "__main__":
    main()

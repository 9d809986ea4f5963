"""The import contracts hold, and an import that looks up is found."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT


def lint_imports(root: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package that lies in `root`, whatever is installed."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    options = [word for contract in contracts for word in ("--contract", contract)]
    command = [sys.executable, "-c", program, "--no-cache", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that may be spoilt."""
    root = tmp_path_factory.mktemp("house")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "tokenizer.json")
    shutil.copytree(ROOT / "src" / "monge", root / "monge", ignore=ignore)
    shutil.copy(ROOT / ".importlinter", root)
    return root


def test_contracts_hold(house: Path):
    result = lint_imports(house)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("contract", "room", "offence", "report"),
    [
        ("rooms", "core", "import monge.engine", "monge.core is not allowed to import"),
        ("engine", "engine", "import monge.draft.model", "planted -> monge.draft.model"),
        ("pure", "control", "from time import perf_counter", "monge.control.planted -> time"),
    ],
)
def test_planted_import_is_found(house: Path, contract: str, room: str, offence: str, report: str):
    planted = house / "monge" / room / "planted.py"
    planted.write_text(offence + "\n")
    try:
        result = lint_imports(house, contract)
    finally:
        planted.unlink()
    assert result.returncode == 1, result.stdout + result.stderr
    assert report in " ".join(result.stdout.split())

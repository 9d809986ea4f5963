"""The import contracts hold, and each of them fails when an offending import is planted."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

# Contract, module that offends, its import, what the report must name.
OFFENCES = [
    ("rooms", "core", "import monge.engine", "monge.core is not allowed to import monge.engine"),
    ("rooms", "attic", "", "monge.attic"),
    ("engine", "engine", "import monge.draft.model", "monge.engine.planted -> monge.draft.model"),
    ("testing", "plugins", "import monge.testing", "monge.plugins.planted -> monge.testing"),
    ("heads", "verify", "import monge.heads", "monge.verify.planted -> monge.heads"),
    ("pure", "control", "from time import perf_counter", "monge.control.planted -> time"),
    ("lab", "bench", "import lab.acceptance", "monge.bench.planted -> lab"),
    ("front_door", "core", "from monge import load", "monge.core.planted -> monge"),
]


def lint_imports(root: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package that lies in `root`, whatever is installed."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    options = [word for contract in contracts for word in ("--contract", contract)]
    command = [sys.executable, "-c", program, "--no-cache", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that may be spoilt; each test takes away what it planted."""
    root = tmp_path_factory.mktemp("house")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "tokenizer.json")
    shutil.copytree(ROOT / "src" / "monge", root / "monge", ignore=ignore)
    shutil.copy(ROOT / ".importlinter", root)
    return root


def test_contracts_hold(house: Path):
    result = lint_imports(house)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("contract", "room", "offence", "report"), OFFENCES, ids=str)
def test_planted_import_is_found(house: Path, contract: str, room: str, offence: str, report: str):
    is_room = (house / "monge" / room).is_dir()
    planted = house / "monge" / (f"{room}/planted.py" if is_room else f"{room}.py")
    planted.write_text(offence + "\n")
    try:
        result = lint_imports(house, contract)
    finally:
        planted.unlink()
    assert result.returncode == 1, result.stdout + result.stderr
    assert report in " ".join(result.stdout.split())


def test_every_contract_is_seen_to_fail():
    text = (ROOT / ".importlinter").read_text()
    declared = set(re.findall(r"^\[importlinter:contract:(\w+)\]$", text, re.MULTILINE))
    assert declared == {contract for contract, *_ in OFFENCES}

"""The import contracts hold, and each of them fails when an offending import is planted."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One offence per sentence of the contracts: contract id, module that offends, its import, what the
# report must name.
OFFENCES = [
    (
        "rooms",
        "core",
        "import monge.verify.base",
        "monge.core is not allowed to import monge.verify",
    ),
    ("rooms", "core", "import monge.engine", "monge.core is not allowed to import monge.engine"),
    (
        "rooms",
        "transport",
        "import monge.verify.base",
        "monge.transport is not allowed to import monge.verify",
    ),
    (
        "rooms",
        "verify",
        "import monge.draft.base",
        "monge.verify is not allowed to import monge.draft",
    ),
    (
        "rooms",
        "draft",
        "import monge.control.base",
        "monge.draft is not allowed to import monge.control",
    ),
    (
        "rooms",
        "control",
        "import monge.verify.base",
        "monge.control is not allowed to import monge.verify",
    ),
    (
        "rooms",
        "engine",
        "import monge.testing",
        "monge.engine is not allowed to import monge.testing",
    ),
    (
        "rooms",
        "testing",
        "import monge.bench",
        "monge.testing is not allowed to import monge.bench",
    ),
    ("rooms", "plugins", "import monge.cli", "monge.plugins is not allowed to import monge.cli"),
    ("rooms", "bench", "import monge.cli", "monge.bench is not allowed to import monge.cli"),
    (
        "engine",
        "engine",
        "import monge.verify.registry",
        "monge.engine.planted -> monge.verify.registry",
    ),
    ("engine", "engine", "import monge.draft.model", "monge.engine.planted -> monge.draft.model"),
    (
        "engine",
        "engine",
        "import monge.control.registry",
        "monge.engine.planted -> monge.control.registry",
    ),
    ("engine", "engine", "import monge.transport", "monge.engine.planted -> monge.transport"),
    ("testing", "plugins", "import monge.testing", "monge.plugins.planted -> monge.testing"),
    ("testing", "replay", "import monge.testing", "monge.replay.planted -> monge.testing"),
    ("rooms", "replay", "import monge.bench", "monge.replay is not allowed to import monge.bench"),
    (
        "rooms",
        "heads",
        "import monge.draft.base",
        "monge.heads is not allowed to import monge.draft",
    ),
    ("heads", "engine", "import monge.heads", "monge.engine.planted -> monge.heads"),
    ("heads", "verify", "import monge.heads", "monge.verify.planted -> monge.heads"),
    ("pure", "heads/shape", "import transformers", "monge.heads.shape.planted -> transformers"),
    ("pure", "core", "import time", "monge.core.planted -> time"),
    ("pure", "verify", "import random", "monge.verify.planted -> random"),
    ("pure", "draft", "import transformers", "monge.draft.planted -> transformers"),
    ("pure", "control", "from time import perf_counter", "monge.control.planted -> time"),
    ("lab", "bench", "import lab.acceptance", "monge.bench.planted -> lab"),
    (
        "rooms",
        "acceptance",
        "import monge.bench",
        "monge.acceptance is not allowed to import monge.bench",
    ),
    (
        "rooms",
        "prompts",
        "import monge.bench",
        "monge.prompts is not allowed to import monge.bench",
    ),
    ("pure", "heads/shape", "import time", "monge.heads.shape.planted -> time"),
    (
        "rooms",
        "heads/readers",
        "import monge.loading.networks",
        "monge.heads is not allowed to import monge.loading",
    ),
    ("front_door", "core", "from monge import load", "monge.core.planted -> monge"),
    ("front_door", "bench", "import monge", "monge.bench.planted -> monge"),
]


def lint_imports(root: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package that lies in `root`, whatever is installed."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    for contract in contracts:
        command += ["--contract", contract]
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
    planted = house / "monge" / room / "planted.py"
    planted.write_text(offence + "\n")
    try:
        result = lint_imports(house, contract)
    finally:
        planted.unlink()
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 broken" in result.stdout
    assert report in " ".join(result.stdout.split())


def test_unlisted_room_is_found(house: Path):
    planted = house / "monge" / "attic.py"
    planted.write_text("")
    try:
        result = lint_imports(house, "rooms")
    finally:
        planted.unlink()
    assert result.returncode == 1, result.stdout + result.stderr
    assert "monge.attic" in result.stdout


def test_every_contract_is_seen_to_fail():
    declared = set(
        re.findall(
            r"^\[importlinter:contract:(\w+)\]$", (ROOT / ".importlinter").read_text(), re.MULTILINE
        )
    )
    assert declared == {contract for contract, *_ in OFFENCES}

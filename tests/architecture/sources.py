"""What the architecture tests read: the sources of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "monge"


def modules() -> list[Path]:
    """Every module of the package, in a stable order."""
    found = sorted(PACKAGE.rglob("*.py"))
    assert found, f"no modules below {PACKAGE}"
    return found


def name_of(module: Path) -> str:
    """Path below the package, for messages: `laws/law.py`."""
    return module.relative_to(PACKAGE).as_posix()

"""`python -m lab` lists the commands."""

from pathlib import Path

for line in (Path(__file__).with_name("README.md")).read_text(encoding="utf-8").splitlines():
    if line.startswith("| `"):
        print("   ".join(cell.strip(" `") for cell in line.strip("|").split("|")))

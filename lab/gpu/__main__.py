"""`python -m lab.gpu`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from lab.command import run
from lab.gpu.decoding import default, lookups, over_host, with_head
from lab.gpu.forwards import forwards
from lab.gpu.gpu_tests import failed_tests
from lab.gpu.machine import machine_of
from lab.gpu.report import circumstances, markdown, tables
from lab.gpu.rounds import round_time, waits
from lab.gpu.rows import Row, run_rows
from lab.gpu.verification import verification
from monge.cli import options
from monge.cli.console import notes, print_tables, quiet_host, reported, show, write_document
from monge.core.errors import OptionError, unknown_name

OUT: Final = Path("out/gpu")
ROWS: Final = (
    Row(name="tests", measure=failed_tests, seconds=20),
    Row(name="forward", measure=forwards, seconds=25),
    Row(name="round", measure=round_time, seconds=15),
    Row(name="waits", measure=waits, seconds=10),
    Row(name="default-1", measure=default(1), seconds=20),
    Row(name="default-16", measure=default(16), seconds=30),
    Row(name="head", measure=with_head, seconds=25),
    Row(name="lookups", measure=lookups, seconds=10),
    Row(name="verify", measure=verification, seconds=60),
    Row(name="host", measure=over_host, seconds=45),
    Row(name="default-64", measure=default(64), seconds=40),
    Row(name="default-8", measure=default(8), seconds=25),
)
"""In order of importance."""
_NAMES: Final = ", ".join(row.name for row in ROWS)


@reported
def main(
    *,
    device: str = options.option("cuda", options.RUNNING, "cuda, cuda:1, cpu, ..."),
    size: str = options.option("8b", options.MODELS, "The grown target: 8b, small (1B) or tiny."),
    minutes: float = options.measuring(5.0, "Rows for which no time is left are listed."),
    rows: list[str] | None = options.measuring(None, f"{_NAMES}; may be repeated.", "all of them"),
    out: Path = options.option(OUT, options.OUTPUT, "Folder of report.md and report.json."),
    as_json: options.Json = False,
) -> None:
    """Check a machine with a GPU in five minutes: tests, and speeds beside their goals.

    Needs a checkout with its tests, and about 40 GB of memory on the card, or 16 GB with `--size small`.
    What is compared is measured in turns. A row that fails is listed with its error, and the others
    go on. With `--json` the last line of standard output is one JSON object.

    **Examples**

        python -m lab.gpu
        python -m lab.gpu --size small --rows round --rows waits
        python -m lab.gpu --device cpu --size tiny --minutes 1
    """
    quiet_host()
    known = {row.name: row for row in ROWS}
    for name in rows or ():
        if name not in known:
            raise unknown_name("row", name, known)
    if not minutes >= 0:
        raise OptionError(f"--minutes must not be negative; got {minutes:g}")
    options.check_out_folder(out)
    machine = machine_of(device, size)
    words = [f"--{name} {one}" for name, one in (("device", device), ("size", size))]
    words += [f"--minutes {minutes:g}", *(f"--rows {name}" for name in rows or ())]
    about = {
        "provenance": machine.described(),
        "size": size,
        "command": f"python -m lab.gpu {' '.join(words)}",
    }
    show(f"{about['provenance']['device']}: {circumstances(about)}")
    chosen = [known[name] for name in dict.fromkeys(rows or known)]
    outcomes = run_rows(chosen, machine, 60 * minutes, notes().print)
    document = about | {"rows": [asdict(one) for one in outcomes]}
    file = write_document(document, out, "report.json")
    page = file.with_suffix(".md")
    page.write_text(markdown(about, outcomes), encoding="utf-8")
    print_tables(tables(outcomes))
    show(f"written: {page}, {file}")
    if as_json:
        print(json.dumps(document))


if __name__ == "__main__":
    run(main)

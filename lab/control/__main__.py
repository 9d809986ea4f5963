"""`python -m lab.control`."""

import json
import time
from typing import Final

from rich.table import Table

from lab.command import run
from lab.control.selection import WORLD as SELECTION
from lab.control.selection import compare_selections
from lab.control.simulation import WORLDS, compare_controllers
from monge.cli import options
from monge.cli.console import output, reported
from monge.core.errors import OptionError
from monge.laws.draws import SeededDraws

ROUNDS: Final = 20_000
SIMULATION: Final = "Simulation"


@reported
def main(
    *,
    rounds: int | None = options.option(None, SIMULATION, "Rounds of every controller.", ROUNDS),
    seed: int | None = options.option(None, SIMULATION, "Seed of every controller's rounds.", 0),
    as_json: options.Json = False,
) -> None:
    """Compare controllers on simulated streams, without networks: tokens per plain forward's time.

    Acceptance stays in one of four regimes for ten rounds on average. The best fixed window is
    found by trying all of them. In a fourth world, requests of three kinds meet a drafter with a network and a lookup, and
    controllers choose between them. Minutes at the default length; the controllers are those that
    decode, and the processor time that they take themselves is told.

    **Example**

        python -m lab.control --rounds 4000
    """
    count = ROUNDS if rounds is None else rounds
    if count < 1:
        raise OptionError(f"rounds must be at least 1; got {count}")

    def make_draws(number: int) -> SeededDraws:
        return SeededDraws(seed or 0, number)

    rows = compare_controllers(count, make_draws, clock=time.process_time)
    rows += compare_selections(count, make_draws, clock=time.process_time)
    console = output(110)
    for world in (*WORLDS, SELECTION):
        table = Table(
            "controller",
            "tokens per forward's time",
            "against the best fixed",
            "own µs a round",
            title=world,
        )
        for row in rows:
            if row["world"] == world:
                own = f"{1e6 * row['own_s_per_round']:.0f}" if "own_s_per_round" in row else ""
                table.add_row(
                    str(row["controller"]), f"{row['speed']:.2f}", f"{row['ratio']:.2f}", own
                )
        console.print(table)
    if as_json:
        print(json.dumps({"rounds": count, "seed": seed or 0, "arms": rows}))


if __name__ == "__main__":
    run(main)

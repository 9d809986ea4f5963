"""`monge bench control`."""

import json
import sys
import time
from typing import Annotated, Final

from rich.console import Console
from rich.table import Table

from monge.bench.control_simulation import ABLATIONS, ARMS, WORLDS, compare_controllers
from monge.bench.selection_simulation import WORLD as SELECTION
from monge.bench.selection_simulation import compare_selections
from monge.cli import options
from monge.cli.console import reported
from monge.core.draws import SeededDraws
from monge.core.errors import OptionError

ROUNDS: Final = 20_000
SIMULATION: Final = "Simulation"


@reported
def bench_control(
    *,
    rounds: Annotated[
        int | None, options.option("--rounds", help="Rounds of every controller.", panel=SIMULATION, default=ROUNDS)
    ] = None,
    seed: Annotated[
        int | None, options.option("--seed", help="Seed of every controller's rounds.", panel=SIMULATION, default=0)
    ] = None,
    ablations: Annotated[
        bool, options.option("--ablations", help="One setting at a time instead of all controllers.", panel=SIMULATION)
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare controllers on simulated streams, without networks: tokens per plain forward's time.

    Acceptance stays in one of four regimes for ten rounds on average; a drafter of perfectly calibrated confidence proposes
    chains. The best fixed window is found by trying all of them. In a fourth world, requests of three kinds meet a drafter with
    a network and a lookup, and controllers choose between them. Minutes at the default length; the controllers are those that
    decode, and the processor time that they take themselves is told.

    **Example**

        monge bench control --rounds 4000
        monge bench control --rounds 4000 --ablations
    """
    count = ROUNDS if rounds is None else rounds
    if count < 1:
        raise OptionError(f"rounds must be at least 1; got {count}")
    arms = ABLATIONS if ablations else ARMS

    def make_draws(number: int) -> SeededDraws:
        return SeededDraws(seed or 0, number)

    rows = compare_controllers(count, make_draws, arms, clock=time.process_time)
    if not ablations:
        rows += compare_selections(count, make_draws, clock=time.process_time)
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    for world in (*WORLDS, SELECTION) if not ablations else WORLDS:
        table = Table("controller", "tokens per forward's time", "against the best fixed", "own µs a round", title=world)
        for row in rows:
            if row["world"] == world:
                own = f"{1e6 * row['own_s_per_round']:.0f}" if "own_s_per_round" in row else ""
                table.add_row(str(row["controller"]), f"{row['speed']:.2f}", f"{row['ratio']:.2f}", own)
        console.print(table)
    if as_json:
        print(json.dumps({"rounds": count, "seed": seed or 0, "arms": rows}))

"""`python -m lab.capacity`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.table import Table

from lab.capacity.costs import BUDGET_S, as_dict, levelled, measured_machine, read_machines
from lab.capacity.plan import Effort, Goal, plan, works
from lab.capacity.simulation import Machine
from lab.command import run
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import provenance
from monge.cli import options
from monge.cli.console import notes, output, plain_table, quiet_host, reported, write_document
from monge.cli.options import check_out_folder
from monge.cli.replay import identity, load_draft
from monge.core.errors import OptionError
from monge.options import SPECULATION
from monge.replay.configuration import Configuration, grid
from monge.replay.file import read_log
from monge.replay.log import LawLog

OUT: Final = Path("capacity")
WANTED: Final = "What is wanted"
SIMULATION: Final = "Simulation"
REPEATS: Final = 4
_GOAL: Final = Goal()
_EFFORT: Final = Effort()
_PLAIN: Final = Configuration(drafter="none")
_MS: Final = 1000.0
MAX_BATCH_SIZE: Final = 8


def _wanted(name: str, help: str, default: object) -> Any:  # noqa: ANN401 (typer's own type is private)
    return options.option(name, WANTED, help, default)


def _simulated(name: str, help: str, default: object) -> Any:  # noqa: ANN401
    return options.option(name, SIMULATION, help, default)


def _many(name: str, help: str, default: str) -> Any:  # noqa: ANN401
    return options.option(name, SPECULATION, f"{help}; may be repeated.", default)


Log = Annotated[
    Path,
    typer.Argument(
        help="A log made by `monge replay record`, of requests like those that will come."
    ),
]
Rate = Annotated[
    float | None, _wanted("--rate", "Requests a second, of the whole service.", _GOAL.rate_per_s)
]
FirstToken = Annotated[
    float | None,
    _wanted("--first-token", "Largest p95 of the first token, in seconds.", _GOAL.first_token_s),
]
Token = Annotated[
    float | None,
    _wanted("--token", "Largest p95 of a request's seconds per further token.", _GOAL.token_s),
]
Spare = Annotated[
    float | None, _wanted("--spare", "Share of replicas that may be down.", _GOAL.spare)
]
MaxBatchSize = Annotated[
    int, _simulated("--max-batch-size", "Rows of a replica's round.", MAX_BATCH_SIZE)
]
Requests = Annotated[
    int | None, _simulated("--requests", "Requests of every replica.", _EFFORT.num_requests)
]
Replicas = Annotated[
    int | None, _simulated("--replicas", "Replicas simulated together.", _EFFORT.num_replicas)
]
Seed = Annotated[int, _simulated("--seed", "Of replay and simulation.", 0)]
Costs = Annotated[
    Path | None, _simulated("--costs", "A capacity.json of another machine.", "measured here")
]
Seconds = Annotated[
    float, _simulated("--seconds", "Time for measuring the rounds of every arm.", BUDGET_S)
]
Out = Annotated[Path, options.option("--out", options.OUTPUT, "Folder for JSON.", OUT)]


@reported
def main(
    log: Log,
    *,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    drafter: Annotated[
        list[str] | None, _many("--drafter", "What proposes tokens", "the library's")
    ] = None,
    tree: Annotated[
        list[str] | None, _many("--tree", "Shape of the proposals", "the library's")
    ] = None,
    verifier: Annotated[
        list[str] | None, _many("--verifier", "Acceptance rule", "the library's")
    ] = None,
    controller: Annotated[
        list[str] | None, _many("--controller", "How much to draft", "fixed")
    ] = None,
    rate: Rate = None,
    first_token: FirstToken = None,
    token: Token = None,
    spare: Spare = None,
    max_batch_size: MaxBatchSize = MAX_BATCH_SIZE,
    requests: Requests = None,
    replicas: Replicas = None,
    seed: Seed = 0,
    costs: Costs = None,
    seconds: Seconds = BUDGET_S,
    out: Out = OUT,
    as_json: options.Json = False,
) -> None:
    """Say how many replicas a load needs, by simulation.

    Replayed requests on the measured times of this machine.

    Every combination of the parts that are named is an arm, beside plain decoding. For each it is
    said what a saturated replica serves, the largest load under which the latencies that are asked
    for hold, and the number of replicas for the whole rate.

    **Examples**

        monge replay record --out run.mlog
        python -m lab.capacity run.mlog --tree "chain(2)" --tree "chain(4)" --rate 50 --first-token 2
        python -m lab.capacity run.mlog --tree "chain(2)" --costs capacity/capacity.json --rate 5000
    """
    quiet_host()
    check_out_folder(out)
    goal = Goal(
        **options.given(rate_per_s=rate, first_token_s=first_token, token_s=token, spare=spare)
    )
    effort = Effort(**options.given(num_requests=requests, num_replicas=replicas), seed=seed)
    if max_batch_size < 1 or not seconds > 0.0:
        raise OptionError(
            "--max-batch-size must be at least 1 and --seconds positive; got "
            f"{max_batch_size} and {seconds}"
        )
    arms = {
        one.label: one
        for one in (
            _PLAIN,
            *grid(drafter=drafter, tree=tree, verifier=verifier, controller=controller),
        )
    }
    loading = options.given(dtype=dtype, device=device)
    networks = _networks(costs, backend, target, draft, **loading)
    found, known = read_log(log), None if costs is None else read_machines(costs, list(arms))
    drafting = load_draft(found, draft, **loading) if networks is None else networks.draft_model
    if networks is not None:
        found.check_model(identity(networks), "the target")
    asked = {
        label: works(one, found, drafting, repeats=REPEATS, seed=seed)
        for label, one in arms.items()
    }
    machines = known or _timed(arms, networks, max_batch_size, seconds)
    machines = {
        label: replace(one, max_batch_size=max_batch_size) for label, one in machines.items()
    }
    document = {
        "goal": {name: getattr(goal, name) for name in goal.__slots__},
        "effort": {name: getattr(effort, name) for name in effort.__slots__},
        "log": {"file": str(log), **_described(found)},
        "arms": {label: plan(asked[label], machines[label], goal, effort) for label in arms},
        "machines": as_dict(machines),
        "provenance": provenance(
            torch.device("cpu") if networks is None else networks.target.device
        ),
    }
    write_and_show(document, out, as_json=as_json)


def _networks(
    costs: Path | None, backend: str | None, target: str | None, draft: str | None, **loading: Any
) -> Pair | None:
    """Return the networks on which rounds are timed; `None` with measured costs."""
    if costs is None:
        return load_pair(target, draft, **loading, **options.given(backend=backend))
    if backend is not None:
        raise OptionError(
            "--backend says how rounds are timed, and --costs that they were; leave one out"
        )
    return None


def write_and_show(document: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """The tables, the file, and where it is."""
    show(document)
    output().print(f"written: {write_document(document, out, 'capacity.json')}", soft_wrap=True)
    if as_json:
        print(json.dumps(document))


def show(document: Mapping[str, Any]) -> None:
    """Show the load that each arm sustains, and its latencies by load."""
    console = output(120)
    goal = document["goal"]
    title = (
        f"{goal['rate_per_s']:g} requests/s; p95 of the first token <= {goal['first_token_s']:g} "
        "s, "
        f"per further token <= {goal['token_s']:g} s; {goal['spare']:.0%} of the replicas spare"
    )
    console.print(_summary(document["arms"], title, document["effort"]["num_replicas"]))
    for label, arm in document["arms"].items():
        console.print(_points(arm["points"], f"{label}: one replica under load"))


def _summary(arms: Mapping[str, Any], title: str, num_replicas: int) -> Table:
    names = (
        "saturated: tokens/s",
        "sustained: tokens/s",
        "requests/s",
        "busy",
        "batch",
        "replicas needed",
    )
    table = plain_table(title, "one replica", names)
    for label, arm in arms.items():
        full, best = arm["saturation"], arm["sustained"]
        cells = ["-", "-", "-", "-", "goal not met"]
        if best is not None:
            speed = f"{best['tokens_per_s'] / num_replicas:.1f}"
            cells = [
                speed,
                f"{best['rate_per_replica']:.3g}",
                f"{best['busy']:.0%}",
                f"{best['batch_size']:.1f}",
            ]
            cells.append(str(arm["replicas"]))
        table.add_row(label, f"{full['tokens_per_s'] / num_replicas:.1f}", *cells)
    return table


def _points(points: Sequence[Mapping[str, Any]], title: str) -> Table:
    names = (
        "requests/s",
        "busy",
        "batch",
        "first token ms p50",
        "p95",
        "p99",
        "per token ms p50",
        "p95",
        "p99",
    )
    table = plain_table(title, "share of saturation", names)
    for point in points:
        latencies = [
            point[name][f"p{share}"]
            for name in ("first_token_s", "token_s")
            for share in (50, 95, 99)
        ]
        row = [
            f"{point['rate_per_replica']:.3g}",
            f"{point['busy']:.0%}",
            f"{point['batch_size']:.1f}",
        ]
        table.add_row(f"{point['share']:.0%}", *row, *(f"{_MS * one:.0f}" for one in latencies))
    return table


def _timed(
    arms: Mapping[str, Configuration],
    networks: Any,  # noqa: ANN401
    size: int,
    seconds: float,
) -> dict[str, Machine]:
    machines = dict[str, Machine]()
    for label, one in arms.items():
        with notes().status(f"timing rounds of {label}"):
            machines[label] = measured_machine(
                one.components(networks.target_model, networks.draft_model), size, budget_s=seconds
            )
    return levelled(machines)


def _described(log: LawLog) -> dict[str, Any]:
    return {
        "texts": len(log.texts),
        "tokens": log.num_tokens,
        "target": log.model.name,
        "temperature": log.rules.temperature,
    }


if __name__ == "__main__":
    run(main)

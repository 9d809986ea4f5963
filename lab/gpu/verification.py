"""Verdicts of whole rounds, by `lab.verify`."""

from typing import Final

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine
from lab.verify.measure import VerifySettings, measure
from monge.core.errors import MongeError

_GOALS: Final = {
    ("chain(4)", "block"): {1: 0.3, 64: 4.0},
    ("fixed_width((4, 1, 1, 1))", "traversal"): {1: 0.6, 64: 4.0},
}
"""Milliseconds by tree, its default rule, and number of requests."""


def verification(machine: Machine, until: float) -> list[Figure]:
    """Return the milliseconds of verdicts, laws included."""
    figures = list[Figure]()
    for (tree, rule), goals in _GOALS.items():
        settings = VerifySettings(
            rules=(rule,),
            vocab_sizes=(machine.size.vocab,),
            supports=(0,),
            trees=(tree,),
            batch_sizes=tuple(goals),
            repeats=machine.size.repeats,
            limit_s=10.0,
        )
        for cell in measure(settings, machine.device)["cells"]:
            if "tree_s" not in cell:
                raise MongeError(f"{rule} on {tree}: {cell['skipped']}")
            values, size = cell["tree_s"]["values"], cell["batch"]
            figures.append(
                Figure(
                    name=f"`{rule}` of `{tree}`, {size} request{'s'[: size - 1]}",
                    values=tuple(1e3 * size * one for one in values),
                    unit="ms",
                    goal=goals[size],
                    detail=f"{cell['nodes']} nodes, {machine.size.vocab} tokens",
                )
            )
    return figures

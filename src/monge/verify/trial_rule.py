"""Rules that try candidates one after another: one node with plain laws, many nodes with their batched twin."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from monge.core.draws import can_peek
from monge.core.proposal import Deterministic, Iid
from monge.verify.base import NodeProblem
from monge.verify.fast.trials import Method, emitted
from monge.verify.flow import FlowRule


class TrialRule(FlowRule):
    """A rule whose tests have a batched twin, `monge.verify.fast.trials`.

    The twin makes all tests of all nodes, but few calls. On a GPU, where every look-up of the plain
    rule waits for the device, it decides whenever there is more than one node. On a CPU most plain
    rules stop at their first test and are the faster ones.

    Attributes:
        method: The twin's tests.
        tries_first: True if the first draw is the only candidate that is tried.
        min_cpu_batch: Nodes from which the twin is the faster one on a CPU, `None` where it never
            is; measured by `python -m lab.verify --batch 2 --batch 4 --batch 8 --batch 32`.
    """

    method: ClassVar[Method]
    tries_first: ClassVar[bool] = False
    min_cpu_batch: ClassVar[int | None] = None

    def trial(self, problem: NodeProblem) -> NodeProblem | None:
        """Return a node with the candidates that are tried, or `None` if nothing was drawn, so that the rule draws from p."""
        if isinstance(problem.proposal, Deterministic):
            return None
        if self.tries_first:
            proposal = Iid(problem.draft_law)
            return replace(problem, proposal=proposal, candidates=problem.drawn[:1])
        return replace(problem, candidates=problem.fixed + self.tried(problem.drawn))

    def tried(self, drawn: tuple[int, ...]) -> tuple[int, ...]:
        """Return the draws that are tried."""
        return drawn

    def emit_many(self, problems: Sequence[NodeProblem]) -> list[int]:
        trials = {
            row: trial
            for row, problem in enumerate(problems)
            if (trial := self.trial(problem)) is not None
        }
        if not self._pays(list(trials.values())):
            return super().emit_many(problems)
        found = dict(zip(trials, emitted(list(trials.values()), type(self).method), strict=True))
        return [
            found[row] if row in found else self.emit_one(problem)
            for row, problem in enumerate(problems)
        ]

    def _pays(self, trials: Sequence[NodeProblem]) -> bool:
        if len(trials) < 2 or not all(can_peek(trial.draws) for trial in trials):
            return False
        is_on_cpu = trials[0].draft_law.device.type == "cpu"
        return not is_on_cpu or (
            self.min_cpu_batch is not None and len(trials) >= self.min_cpu_batch
        )

"""Rules that try candidates one after another: one node with plain laws, many nodes with their batched twin."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from monge.verify.fast.trials import Method, Trial, can_batch, emitted
from monge.verify.flow import FlowRule
from monge.verify.problem import NodeProblem

MIN_BATCH: Final = 4
"""Nodes from which the twin is the faster one: `monge bench verify --batch 2 --batch 4 --batch 8`."""


class TrialRule(FlowRule):
    """A rule whose tests have a batched twin, `monge.verify.fast.trials`.

    Attributes:
        method: The twin's tests.
    """

    method: ClassVar[Method]

    @abstractmethod
    def trial(self, problem: NodeProblem) -> Trial | None:
        """What is tried at a node, or `None` where the candidates are deterministic and the rule draws from p."""

    def emit_many(self, problems: Sequence[NodeProblem]) -> list[int]:
        trials = {row: trial for row, problem in enumerate(problems) if (trial := self.trial(problem)) is not None}
        if len(trials) < MIN_BATCH or not can_batch([trial.draws for trial in trials.values()]):
            return super().emit_many(problems)
        found = dict(zip(trials, emitted(list(trials.values()), type(self).method), strict=True))
        return [found[row] if row in found else self.emit_one(problem) for row, problem in enumerate(problems)]

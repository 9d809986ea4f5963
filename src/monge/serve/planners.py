"""Which controller plans for a job, by name."""

from typing import Final

from monge.engine.parts import Parts
from monge.serve.jobs import Job

NOBODY: Final = "none"
"""Where nothing is drafted, or every round has the largest tree."""


class Planners:
    """Names of the controllers of a decoder.

    Args:
        parts: The decoder's.
    """

    def __init__(self, parts: Parts) -> None:
        self.default = parts.controller_name
        self.offered = tuple(parts.controllers)
        self.names = tuple(dict.fromkeys((self.default, *self.offered, NOBODY)))

    def of(self, job: Job) -> str:
        """The controller that plans for a job, or `none`."""
        if not (job.speculative and job.adaptive):
            return NOBODY
        return self.default if job.controller is None else job.controller

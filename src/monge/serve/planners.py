"""Which controller plans for a job, by name."""

from typing import Final

from monge.engine.components import Components
from monge.serve.jobs import Job

NOBODY: Final = "none"
"""Where nothing is drafted, or every round has the largest tree."""


class Planners:
    """Names of the controllers of a decoder.

    Args:
        components: The decoder's.
    """

    def __init__(self, components: Components) -> None:
        self.default = components.controller_name
        self.offered = tuple(components.controllers)
        self.names = tuple(dict.fromkeys((self.default, *self.offered, NOBODY)))

    def of(self, job: Job) -> str:
        """The controller that plans for a job, or `none`."""
        if not (job.speculative and job.adaptive):
            return NOBODY
        return self.default if job.controller is None else job.controller

"""The name of the controller that plans for a generation."""

from typing import Final

from monge.engine.components import Components
from monge.serve.generation import GenerationRequest

NO_CONTROLLER: Final = "none"
"""The name used if no controller plans: nothing is drafted, or every round has the largest tree."""


class ControllerNames:
    """Names of the controllers of a decoder.

    Args:
        components: The components of the decoder.
    """

    def __init__(self, components: Components) -> None:
        self.default = components.controller_name
        self.names = tuple(dict.fromkeys((self.default, *components.controllers, NO_CONTROLLER)))

    def of(self, generation: GenerationRequest) -> str:
        """Return the name of the controller that plans for a generation, or `none`."""
        if not (generation.speculative and generation.adaptive):
            return NO_CONTROLLER
        return self.default if generation.controller is None else generation.controller

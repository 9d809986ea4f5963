"""Settings of the plugin, inside vLLM's `additional_config`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from monge.core.errors import OptionError, unknown_name
from monge.core.parts import present_name

SECTION: Final = "monge"
"""Our part of `additional_config`."""
CHOICES: Final[Mapping[str, Collection[str]]] = {
    "verifier": ("vllm", "block", "speculative_sampling"),
    "draft_law": ("request", "temperature"),
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings in `additional_config["monge"]`.

    Args:
        verifier: Rule that verifies drafts: vLLM's, or a rule of this library.
        draft_law: Law from which a draft model draws: `request` applies the request's temperature,
            top-k, top-p and seed; `temperature` leaves it to vLLM, which applies the temperature.

    Raises:
        OptionError: If a value is none of its choices.
    """

    verifier: str = "vllm"
    draft_law: str = "temperature"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise unknown_name(f"{name} of additional_config[{SECTION!r}]", value, choices)

    @property
    def verifies(self) -> bool:
        """True if this library decides which drafts are accepted."""
        return self.verifier != "vllm"

    @property
    def draws(self) -> bool:
        """True if this library draws from the distributions of a draft model."""
        return self.draft_law == "request"

    @property
    def changes_vllm(self) -> bool:
        """True if any function of vLLM is replaced."""
        return self.verifies or self.draws


def settings_of(vllm_config: Any) -> EngineSettings:
    """Return the settings of an engine; where this library verifies, it also draws, unless told not to.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        OptionError: If a setting is unknown, or a value is no text or none of its choices.
    """
    additional = vllm_config.additional_config
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    known = [field.name for field in fields(EngineSettings)]
    if not isinstance(section, Mapping) or not all(
        isinstance(value, str) for value in section.values()
    ):
        raise OptionError(
            f"vllm: additional_config[{SECTION!r}] must hold texts, as in "
            f"{{'verifier': 'block'}}; got {section!r}"
        )
    for name in section:
        if name not in known:
            raise unknown_name(f"setting of additional_config[{SECTION!r}]", name, known)
    section = {name: present_name(value) for name, value in section.items()}
    settings = EngineSettings(**section)
    is_told = "draft_law" in section or not settings.verifies
    return settings if is_told else replace(settings, draft_law="request")

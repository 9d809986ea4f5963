"""How a server behaves towards its clients."""

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from monge.core.errors import OptionError
from monge.engine.logprobs import LogprobSource

BUILT_IN: Final = "built-in"
"""Name of the built-in target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What an operator decides.

    Args:
        model_name: Name under which the target is served; it is a label of metrics too.
        api_keys: Keys of which a request must bring one, except to `/health`, `/version` and `/metrics`; none for no keys.
        allowed_hosts: Names and addresses, without ports, of which the `Host` header of a request must have one; none for any.
        max_request_bytes: Largest body.
        max_choices: Most completions of one request: prompts times `n`.
        body_timeout_s: Seconds in which a body must have arrived.
        request_timeout_s: Seconds after which a request is ended; `None` for no limit.
        logprobs_of: What `logprobs` reports: `raw`, the target's own law at temperature 1, or `processed`, the law that tokens
            are drawn from. Those of a prompt are always raw.

    Raises:
        OptionError: If a value cannot be.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_request_bytes: int = 4 * 1024 * 1024
    max_choices: int = 32
    body_timeout_s: float | int = 30
    request_timeout_s: float | int | None = 600
    logprobs_of: LogprobSource = "raw"

    def __post_init__(self) -> None:
        if not self.model_name or any(character.isspace() or not character.isprintable() for character in self.model_name):
            raise OptionError(
                f"the served model's name must be one word, since clients split metrics at blanks; got {self.model_name!r}"
            )
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise OptionError("an API key must be printable ASCII, without blanks at its ends, and not empty")
        for host in self.allowed_hosts:
            if not host.isascii() or not host.strip("[]") or set(host) & set("/@ ") or (":" in host and host[0] != "["):
                raise OptionError(f"an allowed host is a name or an address without a port, as in my.machine; got {host!r}")
        if self.logprobs_of not in get_args(LogprobSource):
            raise OptionError(f"logprobs_of must be one of {', '.join(get_args(LogprobSource))}; got {self.logprobs_of!r}")
        numbers = {
            name: getattr(self, name) for name in ("max_request_bytes", "max_choices", "body_timeout_s", "request_timeout_s")
        }
        for name, value in numbers.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise OptionError(f"{name} must be positive; got {value}")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_to_accept(host: str, api_keys: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Names under which a server may be asked; none for any.

    A server on loopback that asks for no key is open to every page in a browser of its machine, unless it checks names. Where
    there is a key, pages do not know it; and on other addresses a server has names that it cannot know.

    Args:
        host: Where it listens.
        api_keys: Keys that it asks for.
        allowed: Further names that the operator allows; with any, names are always checked.
    """
    if not allowed and (api_keys or not is_loopback(host)):
        return ()
    bound = f"[{host}]" if ":" in host else host
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", bound, *allowed)))


def served_name(target: str | None) -> str:
    """A target's name for clients: of a folder only its last part, since where it lies is nobody's business."""
    if target is None:
        return BUILT_IN
    return Path(target).resolve().name if Path(target).exists() else target

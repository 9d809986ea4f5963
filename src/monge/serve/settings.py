"""Settings of a server."""

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from monge.core.errors import OptionError
from monge.engine.logprobs import LogprobSource
from monge.options import ServeOptions

BUILT_IN: Final = "built-in"
"""Name of the built-in target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that the operator chooses.

    Args:
        model_name: Name of the served target; it is also a label of the metrics.
        api_keys: A request needs one of these keys, except for `/health`, `/version` and
            `/metrics`. If empty, no key is needed.
        allowed_hosts: Names and addresses, without ports, that the `Host` header may have. If
            empty, any is allowed.
        max_request_bytes: Largest body.
        max_held_bytes: Most bytes of large bodies that wait to be parsed, of all requests together.
        max_choices: Most completions of one request: prompts times `n`.
        max_logprobs: Most log-probabilities in one answer: choices x tokens x (1 + top ones).
        max_certificate_bytes: Most memory for the record of one request, where requests are
            recorded.
        body_timeout_s: Seconds until a body must be complete.
        request_timeout_s: Seconds after which a request is ended; `None` for no limit.
        logprobs_of: `raw` reports the target at temperature 1; `processed` reports the law that
            tokens are drawn from. A prompt always has raw log-probabilities.

    Raises:
        OptionError: If a value is invalid.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_request_bytes: int = 4 * 1024 * 1024
    max_held_bytes: int = 64 * 1024 * 1024
    max_choices: int = 32
    max_logprobs: int = 1 << 19
    max_certificate_bytes: int = 256 * 1024 * 1024
    body_timeout_s: float | int = 30
    request_timeout_s: float | int | None = 600
    logprobs_of: LogprobSource = "raw"

    def __post_init__(self) -> None:
        if not self.model_name or any(
            character.isspace() or not character.isprintable() for character in self.model_name
        ):
            raise OptionError(
                "the served model's name must be one word, since clients split metrics at "
                f"blanks; got {self.model_name!r}"
            )
        if not all(
            key.isascii() and key.isprintable() and key.strip() == key != ""
            for key in self.api_keys
        ):
            raise OptionError(
                "an API key must be printable ASCII, without blanks at its ends, and not empty"
            )
        for host in self.allowed_hosts:
            if (
                not host.isascii()
                or not host.strip("[]")
                or set(host) & set("/@ ")
                or (":" in host and host[0] != "[")
            ):
                raise OptionError(
                    "an allowed host is a name or an address without a port, as in "
                    f"my.machine; got {host!r}"
                )
        if self.logprobs_of not in get_args(LogprobSource):
            raise OptionError(
                f"logprobs_of must be one of {', '.join(get_args(LogprobSource))}; "
                f"got {self.logprobs_of!r}"
            )
        numbers = {
            name: getattr(self, name)
            for name in (
                *("max_request_bytes", "max_held_bytes", "max_certificate_bytes"),
                *("max_choices", "max_logprobs"),
                *("body_timeout_s", "request_timeout_s"),
            )
        }
        for name, value in numbers.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise OptionError(f"{name} must be positive; got {value}")


def settings_of(options: ServeOptions, target: str | None) -> ServerSettings:
    """Return the settings of a server from its options; zero seconds are no limit.

    Args:
        options: What the operator gave.
        target: Folder or name of the target, whose name clients see if no other is given.
    """
    name = options.served_model_name
    return ServerSettings(
        model_name=served_name(target) if name is None else name,
        api_keys=tuple(options.api_keys),
        allowed_hosts=tuple(options.allowed_hosts),
        max_request_bytes=options.max_request_bytes,
        max_choices=options.max_choices,
        max_logprobs=options.max_logprobs,
        max_certificate_bytes=options.max_certificate_bytes,
        request_timeout_s=options.request_timeout_s or None,
        logprobs_of=options.logprobs_of,
    )


def scheduling_of(options: ServeOptions) -> dict[str, Any]:
    """Return the options of `Scheduler` among those of a server."""
    return {
        "max_waiting": options.max_waiting,
        "kv_budget_tokens": options.kv_budget_tokens,
        "prefill_chunk": options.prefill_chunk,
        "round_timeout_s": options.round_timeout_s or None,
    }


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_to_accept(host: str, api_keys: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the names that the `Host` header may have; empty for any.

    Without a key, a server on loopback is open to every page in a browser on its machine, unless it
    checks names. With a key it is not, and on other addresses a server does not know all its names.

    Args:
        host: Address that it listens on.
        api_keys: Its keys.
        allowed: Further names that the operator allows. If there are any, names are always checked.
    """
    if not allowed and (api_keys or not is_loopback(host)):
        return ()
    bound = f"[{host}]" if ":" in host else host
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", bound, *allowed)))


def served_name(target: str | None) -> str:
    """Return the name of a target for clients: the last part of its path."""
    if target is None:
        return BUILT_IN
    return Path(target).resolve().name if Path(target).exists() else target

"""Options of a server: their checks, and the names of its target and its hosts."""

import ipaddress
import json
import logging
import math
import re
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from monge.core.errors import OptionError
from monge.loading.sampling_defaults import checked_defaults, sampling_defaults
from monge.loading.sources import BUILT_IN
from monge.options import ServeOptions
from monge.requests.logprobs import LogprobSource

_LOG: Final = logging.getLogger(__name__)


def checked_options(options: ServeOptions, target: str | None = None) -> ServeOptions:
    """Return options that a server can honour, with the name that clients see.

    Args:
        options: The options of the operator.
        target: Folder or name of the target, which names it if `served_model_name` does not.

    Raises:
        OptionError: If a value is invalid.
    """
    name = served_name(target) if options.served_model_name is None else options.served_model_name
    if not name or any(letter.isspace() or not letter.isprintable() for letter in name):
        raise OptionError(
            "the served model's name must be one word, since clients split metrics at "
            f"blanks; got {name!r}"
        )
    keys_of(options)
    for host in options.allowed_hosts:
        has_port = ":" in host and host[0] != "["
        if not host.isascii() or not host.strip("[]") or set(host) & set("/@ ") or has_port:
            raise OptionError(
                f"an allowed host is a name or an address without a port, as in my.machine; got {host!r}"
            )
    for origin in options.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/@]+", origin, re.ASCII):
            raise OptionError(
                f"an allowed origin is a scheme and a host, as in https://my.site, or *; got {origin!r}"
            )
    if options.logprobs_of not in get_args(LogprobSource):
        known = ", ".join(get_args(LogprobSource))
        raise OptionError(f"logprobs_of must be one of {known}; got {options.logprobs_of!r}")
    seconds = options.request_timeout_s
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise OptionError(f"request_timeout_s must be positive, or 0 for never; got {seconds}")
    if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
        raise OptionError("TLS needs both: give ssl_keyfile and ssl_certfile, or neither")
    if options.ssl_certfile is not None:
        try:
            chain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            chain.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:  # those of ssl, too
            files = f"ssl_certfile {options.ssl_certfile!r}, ssl_keyfile {options.ssl_keyfile!r}"
            raise OptionError(f"{files}: no certificate with its key: {error}") from error
    if options.root_path and not re.fullmatch(r"(/[\w.~-]+)+", options.root_path, re.ASCII):
        raise OptionError(f"root_path must be a path such as /models; got {options.root_path!r}")
    # What was found with the target takes the place of what the operator has stated.
    sampling = json.dumps(default_sampling(options, target))
    return replace(options, served_model_name=name, override_generation_config=sampling)


def default_sampling(options: ServeOptions, target: str | None = None) -> dict[str, Any]:
    """Return the sampling settings of requests that state none: the operator's over the checkpoint's.

    Args:
        options: The server's; checked options have those of the checkpoint too.
        target: As for `checked_options`.

    Raises:
        OptionError: If a setting is unknown, or lies outside its bounds.
    """
    found = {} if options.generation_config == "none" else sampling_defaults(target)
    if (text := options.override_generation_config) is None:
        return found
    try:
        stated = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--override-generation-config: no JSON: {error}") from error
    if not isinstance(stated, dict):
        raise OptionError(f"--override-generation-config must be a JSON object; got {text!r}")
    neutral = {name for name, value in stated.items() if name == "top_k" and value in {0, -1}}
    kept = {name: value for name, value in found.items() if name not in neutral}
    return kept | checked_defaults(stated, "--override-generation-config")


def keys_of(options: ServeOptions) -> tuple[tuple[str, str], ...]:
    """Return pairs of a name and a key; those of `api_keys` are called by their numbers.

    Raises:
        OptionError: If the file cannot be read, or a key or a name is invalid.
    """
    pairs = [("api_keys", str(at), key) for at, key in enumerate(options.api_keys, start=1)]
    if (file := options.api_key_file) is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"api_key_file: cannot read {file!r}: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.startswith("#"):
                name, _, key = line.partition(":")
                pairs.append((f"api_key_file {file!r}, line {number}", name.strip(), key.strip()))
        if not pairs:
            raise OptionError(f"api_key_file: {file!r} has no key; write one `name:key` a line")
    names = dict[str, str]()
    for where, name, key in pairs:
        if not (key.isascii() and key.isprintable() and key.strip() == key != ""):
            text = "an API key must be printable ASCII, without blanks at its ends, and not empty"
            raise OptionError(f"{where}: {text}")
        if not re.fullmatch(r"[\w.@-]+", name):
            raise OptionError(f"{where}: expected `name:key`, the name in letters, digits and .@_-")
        if names.setdefault(key, name) != name:
            raise OptionError(f"{where}: this key has the name {names[key]!r} already")
    return tuple((name, key) for key, name in names.items())


class KeyRing:
    """The keys of a server, by `keys_of`; a file that has changed is read again.

    A file that is gone or wrong changes nothing, and the log says so once.

    Args:
        options: The server's.

    Raises:
        OptionError: As `keys_of`.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._keys = options, keys_of(options)
        self._stamp = self._found()

    def __call__(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of a name and a key; without any, none is needed."""
        if (stamp := self._found()) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = keys_of(self._options)
                _LOG.warning("read again: %d keys", len(self._keys))
            except OptionError as error:
                _LOG.error("keys stay as they are: %s", error)
        return self._keys

    def _found(self) -> tuple[int, ...]:
        if self._options.api_key_file is None:
            return ()
        try:
            status = Path(self._options.api_key_file).stat()
        except OSError:
            return (-1,)
        return status.st_mtime_ns, status.st_size, status.st_ino


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_to_accept(options: ServeOptions) -> tuple[str, ...]:
    """Return the names that the `Host` header may have; empty for any.

    Without a key, a server on loopback is open to every page in a browser on its machine, unless it
    checks names. With a key it is not, and on other addresses a server does not know all its names.
    If the operator allows further names, names are always checked.
    """
    host, allowed = options.host, options.allowed_hosts
    if not allowed and (options.has_keys or not is_loopback(host)):
        return ()
    bound = f"[{host}]" if ":" in host else host
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", bound, *allowed)))


def served_name(target: str | None) -> str:
    """Return the name of a target for clients: the last part of its path."""
    if target is None:
        return BUILT_IN
    return Path(target).resolve().name if Path(target).exists() else target

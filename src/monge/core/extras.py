"""Optional packages: an extra is checked before the work that needs it begins."""

from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

from packaging.requirements import Requirement

from monge.core.errors import OptionError

INSTALL: Final = 'pip install ".[{extra}]" in a checkout of monge'
"""How an extra is installed. No package index has this library; a package of the same name may be another library."""


def require(extra: str, feature: str, *packages: str, otherwise: str = "") -> None:
    """Check that the packages of an extra are installed, as the metadata of `monge` lists them.

    Args:
        extra: Name of the extra, for `INSTALL`.
        feature: Subject of the error: "a GGUF file".
        *packages: Those of the extra that the feature needs; all of them by default.
        otherwise: Another way out, for the end of the error.

    Raises:
        OptionError: If a package is missing or too old.
    """
    needed = [
        requirement
        for requirement in _of_extra("monge", extra)
        if not packages or requirement.name in packages
    ]
    if missing := [text for requirement in needed for text in _missing(requirement)]:
        way_out = f", or {otherwise}" if otherwise else ""
        raise OptionError(
            f"{feature} needs {', '.join(dict.fromkeys(missing))}, which cannot be found: "
            f"{INSTALL.format(extra=extra)}{way_out}"
        )


def installed_version(package: str) -> str | None:
    """Return the version of a package, or `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_extra(package: str, extra: str) -> list[Requirement]:
    every = map(Requirement, requires(package) or ())
    return [
        requirement
        for requirement in every
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    ]


def _missing(requirement: Requirement) -> list[str]:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return [requirement.name]
    if not requirement.specifier.contains(installed, prereleases=True):
        return [f"{requirement.name}{requirement.specifier} (here is {installed})"]
    return [
        text
        for extra in sorted(requirement.extras)
        for needed in _of_extra(requirement.name, extra)
        for text in _missing(needed)
    ]

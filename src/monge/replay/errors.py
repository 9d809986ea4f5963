"""Errors of logs."""

from monge.core.errors import MongeError


class LogFileError(MongeError, ValueError):
    """A file that is not a log, or is truncated, corrupted or of another version."""


class ForeignLogError(MongeError, ValueError):
    """A log that was made with another model, tokenizer or vocabulary."""


class UnavailableError(MongeError, ValueError):
    """A question that a log cannot answer exactly."""

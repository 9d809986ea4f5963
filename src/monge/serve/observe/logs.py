"""The log of a server: lines of text or of JSON, which may have fields beside their message."""

import json
import logging
import time
from typing import Any, Final

REQUESTS: Final = "monge.serve.requests"
"""Logger of requests."""
_QUIET_S: Final = 60.0


def log_config_of(form: str, *, logs_requests: bool) -> dict[str, Any]:
    """Return the configuration of the log, for `logging.config.dictConfig`.

    Args:
        form: `text` or `json`.
        logs_requests: Whether every request has a line.
    """
    plain = {"handlers": ["stderr"], "propagate": False}
    limited = {"filters": ["rate"]}  # warnings that clients can cause
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"()": TextFormatter, "fmt": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
            "json": {"()": JsonFormatter},
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": form}},
        "filters": {"rate": {"()": RateLimited}},
        "loggers": {
            "uvicorn": plain,
            "monge": plain,
            REQUESTS: {"level": "INFO" if logs_requests else "WARNING"},
            "uvicorn.error": limited,
            "monge.serve.http.connections": limited,
        },
    }


class TextFormatter(logging.Formatter):
    """Writes the fields of a record after its message, as `name=value`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = (f"{name}={value}" for name, value in vars(record).get("fields", {}).items())
        return " ".join((super().formatMessage(record), *fields))


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object; fields of the record stand beside the usual fields."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **vars(record).get("fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class RateLimited(logging.Filter):
    """Passes each warning once a minute, since clients can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._told = dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record."""
        now, text = time.monotonic(), str(record.msg)
        if record.levelno == logging.WARNING and now - self._told.get(text, -_QUIET_S) < _QUIET_S:
            return False
        self._told[text] = now
        return True

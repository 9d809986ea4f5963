"""The names that the commands import to start a server, in one module that they import late."""

from monge.engine.chat_format import chat_format
from monge.serve.app import create_app
from monge.serve.metrics import ServerMetrics
from monge.serve.run import listen, serve_until_signal, url_of
from monge.serve.settings import (
    ServerSettings,
    hosts_to_accept,
    is_loopback,
    scheduling_of,
    served_name,
    settings_of,
)

__all__ = [
    "ServerMetrics",
    "ServerSettings",
    "chat_format",
    "create_app",
    "hosts_to_accept",
    "is_loopback",
    "listen",
    "scheduling_of",
    "serve_until_signal",
    "served_name",
    "settings_of",
    "url_of",
]

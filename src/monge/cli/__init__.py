"""The `monge` command; modules of its commands are imported when they run."""

from monge.cli.app import app
from monge.engine.process import bound_spinning

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    bound_spinning()
    app()

"""The `monge` command; modules of its commands are imported when they run."""

from monge.cli.app import app as main

__all__ = ["main"]

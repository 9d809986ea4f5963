"""The `monge` command: one subcommand a file."""

from monge.cli.app import main as main

"""Loading for commands: in this process, or in all processes of a torchrun."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from monge.api import load
from monge.cli.progress import working
from monge.engine.decoder import Decoder


@contextmanager
def loaded(
    target: str | None, draft: Sequence[str] | None, *, tensor_parallel: bool, **options: Any
) -> Iterator[Decoder]:
    """A decoder for a command.

    Under tensor parallelism rank 0 alone goes on; the others end when it is done.

    Args:
        target: As for `monge.load`.
        draft: As for `monge.load`.
        tensor_parallel: Whether the target lies in all processes of this torchrun.
        **options: As for `monge.load`.
    """
    if not tensor_parallel:
        with working("loading the models"):
            decoder = load(target, draft, **options)
        yield decoder
        return
    from monge.distributed.tensor_parallel import tensor_parallel as together

    with together(target, draft, **options) as decoder:
        if decoder is None:
            raise typer.Exit
        yield decoder


def is_led() -> bool:
    """Whether another process of this torchrun leads."""
    return os.environ.get("RANK", "0") != "0"


def follow(target: str | None, draft: Sequence[str] | None, **options: Any) -> None:
    """Take part in what rank 0 serves.

    Who follows goes when rank 0 lets it: a signal to all comes before the last answers.

    Args:
        target: As for `loaded`.
        draft: As for `loaded`.
        **options: As for `loaded`.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with loaded(target, draft, **options):
        pass

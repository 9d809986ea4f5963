"""Loading for commands: in this process, or in all processes of a torchrun."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from monge.api import load as monge_load
from monge.cli.progress import working
from monge.engine.decoder import Decoder
from monge.options import LoadOptions, changed


@contextmanager
def loaded(load: LoadOptions, *, tensor_parallel: bool = False) -> Iterator[Decoder]:
    """Yield a decoder for a command.

    Under tensor parallelism the target lies in all processes of this torchrun. Rank 0 alone goes
    on, and the others end when it is done.
    """
    if not tensor_parallel:
        with working("loading the models"):
            decoder = monge_load(**changed(load))
        yield decoder
        return
    from monge.distributed.tensor_parallel import tensor_parallel as together

    with together(**changed(load)) as decoder:
        if decoder is None:
            raise typer.Exit
        yield decoder


def is_led() -> bool:
    """Return whether another process of this torchrun leads."""
    return os.environ.get("RANK", "0") != "0"


def follow(load: LoadOptions) -> None:
    """Take part in what rank 0 serves.

    Who follows goes when rank 0 lets it: a signal to all comes before the last answers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with loaded(load, tensor_parallel=True):
        pass

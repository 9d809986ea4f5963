"""Loading for commands: in this process, or in all processes of a torchrun."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from monge.api import load
from monge.engine.decoder import Decoder


@contextmanager
def loaded(target: str | None, draft: str | None, *, tensor_parallel: bool, **options: Any) -> Iterator[Decoder]:
    """A decoder for a command. Under tensor parallelism rank 0 alone goes on; the others end when it is done.

    Args:
        target: As for `monge.load`.
        draft: As for `monge.load`.
        tensor_parallel: Whether the target lies in all processes of this torchrun.
        **options: As for `monge.load`.
    """
    if not tensor_parallel:
        yield load(target, draft, **options)
        return
    from monge.scale.tensor_parallel import tensor_parallel as together

    with together(target, draft, **options) as decoder:
        if decoder is None:
            raise typer.Exit
        yield decoder

"""Networks that another process compiles while this process decodes eagerly.

That process is `python -m monge.networks.background_compiler`, which reads a function and its
arguments from its standard input.
"""

import io
import pickle
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.runtime.notices import notify

_FEW: Final = 4096
"""Numbers of a tensor that is passed on as it is."""
_REPLACED: Final = ("forward", "_original_forward", "_output_capturing_hooks_installed")
"""What trainers put into a model, and transformers' note that hooks for hidden states are there."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class BackgroundCompiler:
    """Compiles the networks of a decoder in another process, once it is started.

    Args:
        work: What the process does; a function of a module.
        arguments: Its arguments. Of loaded models the structure is passed on, with zeros in the place
            of their weights: compiled code depends on no numbers.

    Attributes:
        has_failed: Whether nothing will be compiled.
    """

    def __init__(self, work: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        self._work, self._arguments = work, arguments
        self._process: subprocess.Popen[str] | None = None
        self.has_failed = False

    def is_busy(self, seconds: Sequence[int]) -> bool:
        """Return whether modules that take so long each are still being compiled; start that if they are not."""
        if self._process is None and any(seconds) and not self.has_failed:
            self._start(2 * sum(seconds))
        if self._process is None or self._process.poll() is None:
            return self._process is not None
        if (pipe := self._process.stdout) and not pipe.closed:
            with pipe:
                reason = pipe.read().strip() or "it ended"
            if self._process.returncode:
                self.has_failed = True
                notify(f"compiling beside the answers failed: {reason}")
        return False

    def _start(self, expected_s: int) -> None:
        given = io.BytesIO()
        try:
            _StructurePickler(given).dump((self._work, dict(self._arguments)))
        except Exception as error:  # noqa: BLE001 (classes and settings of the user's own need not fit into a file)
            self.has_failed = True
            notify(f"cannot be compiled beside the answers: {type(error).__name__}: {error}")
            return
        notify(
            f"compiling for this machine beside the first answers, about {expected_s} s "
            "in all; they come more slowly meanwhile"
        )
        with tempfile.TemporaryFile() as file:
            file.write(given.getbuffer())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C ends an answer, and is not meant for it
            )


class _StructurePickler(pickle.Pickler):
    """Writes large tensors by their shapes, and modules without what others put into them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.numel() > _FEW:
            return _zeros, (tuple(obj.shape), obj.dtype, isinstance(obj, torch.nn.Parameter))
        if isinstance(obj, torch.nn.Module):
            reduced: Any = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            make, arguments, state, *rest = reduced
            kept = {name: value for name, value in state.items() if name not in _REPLACED}
            if isinstance(obj, PreTrainedModel):
                make, arguments = _unfilled, (type(obj), obj.config)
            return make, arguments, kept | {name: OrderedDict() for name in _HOOKS}, *rest
        return NotImplemented


def _unfilled(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return a network without layers, of a class whose hidden states transformers can return.

    The host learns that when a network of the class is first made in a process.
    """
    with torch.device("meta"):
        kind(config)
    return kind.__new__(kind)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool) -> Tensor:
    zeros = torch.zeros(shape, dtype=dtype)
    return torch.nn.Parameter(zeros, requires_grad=False) if is_parameter else zeros


_compiler: Final = ContextVar[BackgroundCompiler | None]("compiler", default=None)


@contextmanager
def compiled_by(compiler: BackgroundCompiler) -> Iterator[None]:
    """Leave the modules that this block needs to a compiler; they run eagerly until it ends.

    Their weights are the same. Calls of this library wait only while the compiled code is checked.
    The compiling process outlives this process, so the next start loads the code from the cache.
    """
    token = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(token)


def is_compiled_elsewhere(seconds: Sequence[int]) -> bool:
    """Return whether another process compiles modules that take so long each."""
    compiler = _compiler.get()
    return compiler is not None and compiler.is_busy(seconds)


def main() -> None:
    """Do the work, or write why that failed to the standard output."""
    try:
        work, arguments = pickle.load(sys.stdin.buffer)
        work(**arguments)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is said)
        sys.stdout.write(f"{type(error).__name__} {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Programs that another process compiles while this one decodes without them."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from monge.engine.notices import notify

# With a text, as some modules of heads are compiled when they first run.
_CODE: Final = """
import json, sys, monge
try:
    decoder = monge.load(**json.loads(sys.argv[1]))
    decoder.generate([[0, 1]], max_new_tokens=4, ignore_eos=True)
except BaseException as error:
    sys.exit(print(type(error).__name__, error) or 1)
"""
_compilers: Final = list["_BackgroundCompiler"]()


class _BackgroundCompiler:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._command = [sys.executable, "-c", _CODE, json.dumps(arguments, default=str)]
        self._process: subprocess.Popen[str] | None = None

    def is_busy(self, seconds: Sequence[int]) -> bool:
        if self._process is None and any(seconds):
            notify(
                f"compiling for this machine beside the first answers, about {2 * sum(seconds)} s "
                "in all; they come more slowly meanwhile"
            )
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C ends an answer, and is not meant for it
            )
        if self._process is None or self._process.poll() is None:
            return self._process is not None
        if self._process.returncode and (pipe := self._process.stdout) and not pipe.closed:
            with pipe:
                notify(f"compiling beside the answers failed: {pipe.read().strip() or 'it ended'}")
        return False


@contextmanager
def compiled_meanwhile(**arguments: Any) -> Iterator[None]:
    """Compile the programs that this block needs in another process; networks run without them until it ends.

    Their weights are the same. Calls of this library wait only while the finished programs are checked.
    The process outlives this one, so that the next start finds them.

    Args:
        **arguments: Those of `monge.load` that make the decoder, as JSON can hold them.
    """
    _compilers.append(_BackgroundCompiler(arguments))
    try:
        yield
    finally:
        _compilers.pop()


def is_compiled_elsewhere(seconds: Sequence[int]) -> bool:
    """Return whether programs that take so long each will come from another process."""
    return bool(_compilers) and _compilers[-1].is_busy(seconds)

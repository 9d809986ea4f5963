"""A process that tries grammars, each in a child with limits: `python -m monge.requests.grammar_trial SOCKET`.

It reads a vocabulary as JSON from its standard input. Every message on the socket brings the socket of a client, who
reads the number of the child, writes a grammar, and reads the answer.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from monge.core.errors import OptionError
from monge.core.grammar import Grammar
from monge.requests.grammar import GrammarCompiler

TRIAL_S: Final = 2
"""Seconds of processor time in which a grammar must compile."""
TRIAL_BYTES: Final = 96 << 20
"""Memory in which it must compile, where the system limits that of a process. A choice among 60,000
texts takes 58 MiB. What takes more also takes long at every token, while other texts wait."""
_STACK_BYTES: Final = 1 << 20
"""Less than threads have, so that what compiles here overflows no stack there."""
_NICENESS: Final = 5
_BYTES_PER_UNIT: Final = 1 if sys.platform == "darwin" else 1024
"""Unit of `ru_maxrss`."""


def main() -> None:
    """Try grammars until the other end of the socket closes."""
    text, vocab_size, end_ids = json.load(sys.stdin)
    compiler = GrammarCompiler(text, vocab_size, frozenset(end_ids))
    _ = compiler.vocabulary  # before it forks, so that a child begins at once
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while (received := socket.recv_fds(control, 1, 1))[0]:
            client = socket.socket(fileno=received[1][0])
            if (number := os.fork()) == 0:
                try:
                    _answer(client, compiler)
                finally:
                    os._exit(0)
            with client, suppress(BrokenPipeError):
                client.sendall(f"{number}\n".encode())


def _answer(client: socket.socket, compiler: GrammarCompiler) -> None:
    """Read a grammar, and write the reason against it or the memory that it takes."""
    with client, client.makefile("rw") as file:
        grammar, before = Grammar(*json.loads(file.readline())), _peak_bytes()
        _limit()
        try:
            compiler.compile(grammar)
            answer = None, _peak_bytes() - before
        except OptionError as error:
            answer = str(error), 0
        json.dump(answer, file)


def _limit() -> None:
    os.nice(_NICENESS)  # decoding goes first
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_S, TRIAL_S))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    pages = Path("/proc/self/statm")
    if pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_UNIT


if __name__ == "__main__":
    main()

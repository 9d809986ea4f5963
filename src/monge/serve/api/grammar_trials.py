"""Compile grammars of clients in another process first, so that each harms only its client."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import IO, Final, cast
from weakref import WeakValueDictionary

from monge.core.errors import BackendError, OptionError
from monge.core.grammar import Grammar
from monge.requests import grammar_trial
from monge.requests.grammar import GrammarCompiler
from monge.serve.api.request_worker import run_in_daemon

_TOO_MUCH: Final = (
    f"grammar: compiling it takes more than {grammar_trial.TRIAL_S} s of processor time or "
    f"{grammar_trial.TRIAL_BYTES >> 20} MiB of memory, or nests too deeply, for this server; make "
    "it smaller"
)


class GrammarTrials:
    """Compiles grammars in another process, and those that passed there in this process.

    Compiled grammars cannot be passed between processes. A grammar that passed within the limits
    takes as much here, in a thread that does not hold the interpreter lock.

    Args:
        compiler: Compiles and keeps them.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._process: subprocess.Popen[str] | None = None
        self._control = socket.socket()
        self._place = asyncio.Lock()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def compile(self, grammar: Grammar, client: str) -> None:
        """Compile a grammar, which the compiler then keeps.

        Only one grammar is compiled at a time, which bounds the memory. Grammars of a client wait
        for each other first, so a client gets at most every second turn.

        Raises:
            OptionError: If the grammar cannot be compiled within the limits.
            BackendError: If the process ends.
        """
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn, self._place:
            if grammar not in self._compiler:
                num_bytes = await self._try(grammar)
                work = partial(self._compiler.compile, grammar, num_bytes)
                await asyncio.wrap_future(run_in_daemon(work, "monge-grammar"))

    def close(self) -> None:
        """End the process and what it compiles."""
        self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    async def _try(self, grammar: Grammar) -> int:
        """Return the memory that a grammar takes; a caller that is cancelled ends its compilation."""
        if self._process is None or self._process.poll() is not None:
            await asyncio.to_thread(self._start)
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError):  # its end is then read below
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        number = b""
        try:
            number = await reader.readline()
            fields = grammar.kind, grammar.text, grammar.any_whitespace
            writer.write(json.dumps(fields).encode() + b"\n")
            answer = await reader.read()
        finally:
            number = number or await reader.readline()
            writer.close()
            if number and not reader.at_eof():
                os.kill(int(number), signal.SIGKILL)
        if not number:
            raise BackendError("the process that tries grammars has ended; send the request again")
        reason, num_bytes = json.loads(answer) if answer else (_TOO_MUCH, 0)
        if reason is not None:
            raise OptionError(reason)
        return num_bytes

    def _start(self) -> None:
        compiler = self._compiler
        vocabulary = compiler.tokenizer_text, compiler.vocab_size, sorted(compiler.end_ids)
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", grammar_trial.__name__, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},  # threads are not forked
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group, which `close` ends
                text=True,
            )
        with suppress(BrokenPipeError), cast(IO[str], self._process.stdin) as pipe:
            json.dump(vocabulary, pipe)

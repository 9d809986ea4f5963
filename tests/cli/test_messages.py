"""Messages of a conversation, from a pipe and from a terminal."""

import io
import json
import os
import pty
import readline
import subprocess
import sys

import pytest

from monge.cli.messages import messages

GNU = "libedit" not in (readline.__doc__ or "")
SCRIPT = "import json; from monge.cli.messages import messages; print(json.dumps(list(messages())))"


@pytest.mark.parametrize(
    ("entered", "understood"),
    [
        ("a\n\n  b  \n", ["a", "b"]),
        ('"""first\n\n  second\n"""\nnext\n', ["first\n\n  second", "next"]),
        ('"""\ndef f():\n    return 1\n"""', ["def f():\n    return 1"]),
        ('"""one line"""\nnext', ["one line", "next"]),
        ('"""never\nclosed', ["never\nclosed"]),
        ('say """this"""\n', ['say """this"""']),
        ('""""""\nnext\n', ["next"]),
        ("", []),
    ],
)
def test_messages_of_a_pipe(monkeypatch, entered, understood):
    monkeypatch.setattr(sys, "stdin", io.StringIO(entered))
    assert list(messages()) == understood


def test_triple_quotes_and_ctrl_c_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    entered = iter(
        ['"""one', 'two"""', '"""dropped', KeyboardInterrupt(), "pasted\nlines", EOFError()]
    )

    def typed(prompt):
        shown.append(prompt)
        if isinstance(one := next(entered), BaseException):
            raise one
        return one

    shown = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert list(messages()) == ["one\ntwo", "pasted\nlines"]
    assert shown == ["\n> ", "... ", "\n> ", "... ", "\n> ", "\n> "]


@pytest.mark.skipif(not GNU, reason="libedit knows no bracketed paste")
def test_a_pasted_text_is_one_message():
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=child,
        stdout=child,
        stderr=child,
        env=os.environ | {"TERM": "xterm", "INPUTRC": os.devnull},
    ):
        os.close(child)
        typed = [b"\x1b[200~def f():\n    return 1\n\nf()\x1b[201~\r", b"and a line\r", b"\x04"]
        shown = b""
        while True:
            try:
                piece = os.read(parent, 4096)
            except OSError:  # the other end is closed
                break
            shown += piece
            if typed and shown.endswith(b"\n> "):
                os.write(parent, typed.pop(0))
        os.close(parent)
    understood = json.loads(shown.decode().splitlines()[-1])
    assert understood == ["def f():\n    return 1\n\nf()", "and a line"]

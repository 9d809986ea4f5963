"""A server whose target hangs in its first forward; `python -m tests.serve.hung` writes its address to stderr."""

import sys
import threading

from monge.options import ServeOptions
from monge.serve.run import listen, serve_until_signal, url_of
from monge.testing.tabular import RandomTable, TabularModel
from tests.serve.served import ALPHABET, toy_app, toy_decoder


class HangingTable(RandomTable):
    """Answers nothing before it is opened."""

    def __init__(self, *given):
        super().__init__(*given)
        self.opened = threading.Event()

    def __call__(self, token_ids):
        assert self.opened.wait(600), "nobody opened it"
        return super().__call__(token_ids)


def hanging():
    """A table, and a decoder that waits for it."""
    table = HangingTable(len(ALPHABET), 11)
    return table, toy_decoder(TabularModel(table, len(ALPHABET), max_length=400))


if __name__ == "__main__":
    _, decoder = hanging()
    app = toy_app(decoder, request_timeout_s=1, round_timeout_s=1)
    with listen("127.0.0.1", 0) as listener:
        sys.stderr.write(f"serving built-in at {url_of(listener)}/v1\n")
        serve_until_signal(app, listener, ServeOptions(drain_s=0, lame_duck_s=0))

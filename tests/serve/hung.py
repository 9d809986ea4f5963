"""A target that hangs in its first forward."""

import threading

from monge.oracle.tabular import RandomTable, TabularModel
from tests.serve.served import ALPHABET, toy_decoder


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

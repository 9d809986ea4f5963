"""A server over a pair of tables: every request takes milliseconds."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.options import ServeOptions
from monge.oracle.tabular import RandomTable, TabularModel
from monge.requests.chat_format import InstructionFormat
from monge.serve.http.app import create_app
from monge.serve.http.connections import ConnectionLimits
from monge.serve.run import GracefulServer, listen, url_of

ALPHABET = "\0abcdefghijklmnopqrstuvwxyz .:"
CONTEXT = 400
LONG = {"prompt": "a", "max_tokens": 9000, "ignore_eos": True}
"""A request that does not end by itself before somebody loses patience."""


class Letters:
    """A tokenizer whose tokens are letters; other characters are dots."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        places = [max(ALPHABET.find(letter), 0) for letter in text.lower()]
        return {"input_ids": [place or ALPHABET.index(".") for place in places]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = "".join(ALPHABET[int(token)] for token in token_ids)
        return text.replace("\0", "" if skip_special_tokens else "<end>")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return ALPHABET[token_id]


def toy_decoder(target: TabularModel | None = None, *, max_batch_size: int = 8, **parts) -> Decoder:
    size = len(ALPHABET)
    target = target or TabularModel(RandomTable(size, 11), size, max_length=CONTEXT)
    draft = TabularModel(RandomTable(size, 11, "ties"), size)
    made = make_components(target, draft, **({"tree": "chain(3)"} | parts))
    options = {"eos_ids": frozenset({0}), "max_batch_size": max_batch_size}
    return Decoder(made, tokenizer=Letters(), chat=InstructionFormat(Letters()), **options)


class SlowTable(RandomTable):
    """Takes its time, so that a request is still running when something happens to it."""

    def __call__(self, token_ids: tuple[int, ...]) -> Sequence[float]:
        time.sleep(0.005)
        return super().__call__(token_ids)


def slow_decoder(max_batch_size: int = 8) -> Decoder:
    size = len(ALPHABET)
    slow = TabularModel(SlowTable(size, 11), size, max_length=10_000)
    return toy_decoder(slow, max_batch_size=max_batch_size)


def toy_app(decoder: Decoder | None = None, **options) -> FastAPI:
    decoder = decoder or toy_decoder()
    given = ServeOptions(**({"served_model_name": "toy"} | options))
    decoder.chat_format = InstructionFormat(decoder.tokenizer)
    return create_app(decoder, given)


@contextmanager
def live(app: FastAPI, limits: ConnectionLimits | None = None) -> Iterator[str]:
    """The application behind a real socket; gives its address."""
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    server = GracefulServer(
        app,
        ServeOptions(graceful_timeout_s=0),
        limits=limits,
        log_level="critical",
        timeout_graceful_shutdown=5,
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield url
    finally:
        server.should_exit = True
        thread.join()


def wait_for(what: Callable[[], object]) -> None:
    """Look again and again."""
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_refused(url: str) -> bool:
    """Whether nobody listens any more."""
    try:
        httpx.get(f"{url}/health", timeout=600)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it came just before
        pass
    return False


def samples(text: str) -> list[Sample]:
    """All samples of an exposition."""
    return [one for family in text_string_to_metric_families(text) for one in family.samples]


ASCII = ["\0", *map(chr, range(10, 127))]


class Ascii:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text, **_):
        return {"input_ids": [ASCII.index(letter) for letter in text]}

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(ASCII[int(token)] for token in token_ids).replace("\0", "")

    def convert_ids_to_tokens(self, token_id):
        return ASCII[token_id]


def writing_app(text: str) -> FastAPI:
    """The application over a model that answers every conversation with a text."""

    def law(token_ids: tuple[int, ...]) -> Sequence[float]:
        written = Ascii().decode(token_ids, skip_special_tokens=False).rpartition("Response:")[2]
        goes_on = len(written) < len(text) and text.startswith(written)
        return [float(letter == (text[len(written)] if goes_on else "\0")) for letter in ASCII]

    size, tokenizer = len(ASCII), Ascii()
    target, draft = TabularModel(law, size, max_length=4000), TabularModel(law, size)
    chat = InstructionFormat(tokenizer)
    parts = make_components(target, draft, tree="chain(5)")
    decoder = Decoder(parts, tokenizer=tokenizer, eos_ids=frozenset({0}), chat=chat)
    return create_app(decoder, ServeOptions(served_model_name="toy"))

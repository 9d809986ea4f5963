"""A default round enters few files: a reader can follow it."""

import sys
from collections.abc import Callable

import monge
from monge.core.errors import unknown_name
from monge.engine.batch import decode
from tests.architecture.house import PACKAGE

MAX_FILES = 30
WARM_ROUNDS = 12


def files_entered(work: Callable[[], object]) -> list[str]:
    """Files of the package in which a function is called while some work is done, in the order of their first call."""
    seen: dict[str, None] = {}

    def note(frame, event, _argument):
        if event == "call":
            seen.setdefault(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    root = f"{PACKAGE}/"
    return [file.removeprefix(root) for file in seen if file.startswith(root)]


def test_a_default_round_is_readable():
    decoder = monge.load()
    (session,) = decoder.sessions(["The history of the town"], max_new_tokens=200)
    rounds = decode([session], decoder.components, max_batch_size=1)
    for _ in range(WARM_ROUNDS):
        next(rounds)
    files = files_entered(lambda: next(rounds))
    assert len(files) <= MAX_FILES, "\n".join([f"{len(files)} files:", *sorted(files)])


def test_files_are_counted():
    assert files_entered(lambda: unknown_name("verifier", "a", ["b"])) == ["core/errors.py"]

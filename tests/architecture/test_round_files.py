"""A default round enters few files: a reader can follow it."""

import sys
from collections.abc import Callable

import monge
from monge.control.latency import Latency
from monge.engine.batch import decode
from tests.architecture.sources import PACKAGE

USUAL_FILES, MAX_FILES = 33, 38
WARM_ROUNDS, ROUNDS = 12, 40


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
    """A round without drafts enters about 28 files, with a lookup 32, with the draft model 37."""
    decoder = monge.load()
    # So that no clock decides.
    times = Latency.linear(plain=0.005, node=0.0002, draft=0.001)
    decoder.components.shared.latency = times
    prompts, length = ["The history of the town"], 8 * (WARM_ROUNDS + ROUNDS)
    (session,) = decoder.sessions(prompts, max_new_tokens=length, ignore_eos=True)
    rounds = decode([session], decoder.components, max_batch_size=1)
    for _ in range(WARM_ROUNDS):
        next(rounds)
    entered = sorted((files_entered(lambda: next(rounds)) for _ in range(ROUNDS)), key=len)
    assert len(entered[-1]) <= MAX_FILES, "\n".join([f"{len(entered[-1])} files:", *entered[-1]])
    usual = entered[ROUNDS // 2]
    assert len(usual) <= USUAL_FILES, "\n".join([f"{len(usual)} files:", *usual])

"""Find the fastest parts for given prompts by successive halving: after every round the faster half stays."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final

from monge.bench.arms import Arm
from monge.bench.pair import Pair
from monge.bench.runner import Measurement, OnCall, Runner, Workload
from monge.core.errors import OptionError
from monge.defaults import ADAPTIVE
from monge.draft.by_name import settings_of
from monge.runtime.process import settle_objects

FIRST: Final = 2
"""Texts of every arm in the first round. Each later round has twice as many, up to all prompts."""
FINALISTS: Final = 3
"""Arms of the last round, beside plain decoding."""
FREE: Final = ("ngram", "suffix")
"""Drafters that need no model and no head."""
_TREES: Final = (
    "tree=chain(8, 'top')",
    "tree=best_first(num_nodes=16, depth=6)",
    "tree=best_first(num_nodes=32, depth=8)",
)
_DRAWN: Final = (
    "tree=chain(8), verifier=block",
    "tree=fixed_width((3, 2, 1, 1)), verifier=traversal",
    "tree=fixed_width((3, 2, 1, 1)), verifier=recursive_rejection_without_replacement",
)
_CONTROLLERS: Final = (ADAPTIVE, *(f"fixed(max_depth={depth})" for depth in (1, 2, 3, 5)))


def grid(*, drafter: str | None, is_greedy: bool, further: Sequence[str] = ()) -> list[str]:
    """Return the arms that are tried beside plain decoding, as `named_arm` takes them.

    Args:
        drafter: The drafter of the draft model or of the head, if any.
        is_greedy: Whether texts are greedy.
        further: Drafters of the user.

    Raises:
        OptionError: If a drafter is unknown, or cannot be read.
    """
    arms = [] if drafter is None else [""]  # the defaults
    names = [*FREE, *([] if drafter is None else [drafter]), *further]
    for name in dict.fromkeys(names):
        if name == "none":
            continue  # plain decoding runs in every round
        has_tree = "tree" in settings_of(name)
        # A greedy target accepts the token that it ranks first: drawing candidates only misses it.
        shapes = (*_TREES, *(() if is_greedy else _DRAWN)) if has_tree else ()
        for shape, controller in product(shapes or ("",), _CONTROLLERS):
            parts = (f"drafter={name}", shape, f"controller={controller}")
            arms.append(", ".join(filter(None, parts)))
    return arms


def rounds_for(num_arms: int, num_prompts: int, repeats: int) -> Iterator[tuple[int, int]]:
    """Yield arms beside plain decoding, and texts of each, of every round."""
    num_texts = FIRST
    while num_arms > FINALISTS:
        yield num_arms, min(num_texts, num_prompts)
        num_arms, num_texts = max(FINALISTS, -(-num_arms // 2)), 2 * num_texts
    yield num_arms, repeats * num_prompts


def lengths(
    pair: Pair, plain: Arm, work: Workload, *, on_text: Callable[[], None] = lambda: None
) -> list[int]:
    """Return the tokens that plain decoding writes for every prompt; `on_text` is called after each."""
    counts: list[int] = []
    for text in range(len(work.prompts)):
        (token_ids,) = plain.decode(pair, work.call(text)).token_ids
        counts.append(len(token_ids))
        on_text()
    return counts


def search(
    pair: Pair,
    plain: Arm,
    arms: Sequence[Arm],
    work: Workload,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_call: OnCall = lambda *_: None,
) -> list[Measurement]:
    """Return all measurements, plain decoding among them: those of the most texts first, and of these the fastest.

    Every arm prepares itself and decodes a short text, uncounted. In every round all arms that are
    left decode the same texts, text by text and in rotating order. The faster half by all texts so
    far stays. Plain decoding runs in every round.

    Args:
        pair: The networks.
        plain: Plain decoding.
        arms: What is compared with it.
        work: What they decode; its repeats are passes over the prompts in the last round.
        clock: Seconds.
        on_call: As for `monge.bench.runner.measure`.

    Raises:
        OptionError: If plain decoding fails.
    """
    base, *others = (Measurement(arm=arm, work=work) for arm in (plain, *arms))
    planned = rounds_for(len(arms), len(work.prompts), work.repeats)
    on_call("starting", 1 + len(arms) + sum((size + 1) * count for size, count in planned))
    runner = Runner(pair=pair, clock=clock, on_call=on_call)
    with runner.running([[base, *others]]):
        running, done = _left(base, others), 0
        rounds = list(rounds_for(len(running), len(work.prompts), work.repeats))
        for number, (size, count) in enumerate(rounds, start=1):
            running = sorted(running, key=lambda arm: -arm.speed)[:size]
            name = f"round {number} of {len(rounds)}, {len(running)} settings"
            # A full collection would take longer than a text, in whichever arm it falls.
            settle_objects()
            for text in range(done, done + count):
                runner.take_turns([base, *running], text, name)
                running = _left(base, running)
            done += count
    return sorted((base, *others), key=lambda arm: (-len(arm.seconds), -arm.speed))


def _left(plain: Measurement, arms: Sequence[Measurement]) -> list[Measurement]:
    """Return the arms that have not failed.

    Raises:
        OptionError: If plain decoding has.
    """
    if plain.failure is not None:
        raise OptionError(f"plain decoding failed, so nothing can be compared: {plain.failure}")
    return [arm for arm in arms if arm.failure is None]

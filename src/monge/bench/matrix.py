"""Which arms are compared, and the search for the host's best settings."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from monge.bench.arms import Arm, Call, HostArm, MongeArm, TokenIds, synchronize
from monge.bench.pair import Pair
from monge.bench.statistics import Summary
from monge.control.windows import WINDOWS as WINDOW_CONTROLLERS
from monge.core.proposal import Deterministic
from monge.defaults import ADAPTIVE, STEADY
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.registry import TREES
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS

PLAIN: Final = "transformers"
DEFAULT: Final = "monge"
NONE: Final = "monge none"
TREES_COMPARED: Final = ("chain", "fixed_width", 'fixed_width(children="iid")', "best_first")
WINDOWS: Final = (1, 2, 3, 5, 8)
LOOKUP_TOKENS: Final = 8
ASSISTANT_TOKENS: Final = (2, 3, 5, 8)
QUICK_ASSISTANT_TOKENS: Final = (2, 5)
TUNING_REPEATS: Final = 2


def host_arms(pair: Pair, tuned: dict[float, dict[str, Any]]) -> list[Arm]:
    """`transformers` plain, assisted (default and tuned) and prompt lookup."""
    arms: list[Arm] = [HostArm(name=PLAIN, family="plain")]
    if pair.draft is not None:
        arms.append(HostArm(name="transformers assisted", family="assisted", assistant={}, max_batch_size=1))
    if tuned:
        arms.append(HostArm(name="transformers assisted tuned", family="assisted", assistant=tuned, max_batch_size=1))
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    name = "transformers prompt lookup"
    return [*arms, HostArm(name=name, family="prompt_lookup", settings=lookup, max_batch_size=1)]


def plain_arm() -> Arm:
    """This library without speculation."""
    return MongeArm(name=NONE, settings={"drafter": "none"})


def quick_arms() -> list[Arm]:
    """This library with its defaults, with prompt lookup, and without speculation."""
    return [MongeArm(name=DEFAULT), MongeArm(name="monge ngram", settings={"drafter": "ngram"}), plain_arm()]


def all_arms(pair: Pair) -> list[Arm]:
    """The quick arms, and every drafter and tree with every verifier that is exact for it."""
    first, _, plain = quick_arms()
    arms = [first, plain]
    for verifier in VERIFIERS:
        if unsupported_reason(VERIFIERS.make(verifier), {Deterministic}, 1) is None:
            settings = {"drafter": "ngram", "verifier": verifier, "controller": STEADY}
            arms.append(MongeArm(name=f"monge ngram {verifier}", settings=settings))
    if pair.draft is not None or pair.head is not None:
        for tree, verifier in legal_pairs(TREES_COMPARED):
            settings = {"drafter": pair.drafter(), "tree": tree, "verifier": verifier, "controller": STEADY}
            arms.append(MongeArm(name=f"monge {short_name(TREES.parse(tree))} {verifier}", settings=settings))
    return arms


def controller_arms(pair: Pair) -> list[Arm]:
    """The library as it comes, without speculation, with fixed windows and with the other controllers."""
    first, _, plain = quick_arms()
    arms: list[Arm] = [first, plain]
    if pair.draft is not None or pair.head is not None:
        arms += [_with(f"window {depth}", STEADY, tree=f"chain({depth})") for depth in WINDOWS]
    # The first arm is that of the default controller already.
    return arms + [_with(name, name) for name in WINDOW_CONTROLLERS if name not in (STEADY, ADAPTIVE)]


def _with(name: str, controller: str, **settings: str) -> Arm:
    return MongeArm(name=f"monge {name}", settings={**settings, "controller": controller})


def legal_pairs(trees: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Trees with the verifiers that are exact for what they propose."""
    for tree in trees:
        limits = TREES.parse(tree).limits
        for verifier in VERIFIERS:
            if unsupported_reason(VERIFIERS.make(verifier), limits.proposes, limits.max_width) is None:
                yield tree, verifier


def short_name(tree: TreeBuilder) -> str:
    """Name of a tree, and how its children are drawn where that is not the default."""
    name = TREES.name_of(tree)
    children = TREES.options(name).get("children")
    ours = getattr(tree, "children", children)
    return name if ours == children else f"{name}/{ours}"


def tune_assistant(
    pair: Pair, prompts: TokenIds, *, counts: Sequence[int], temperatures: Sequence[float], max_new_tokens: int, seed: int
) -> tuple[dict[float, dict[str, Any]], list[dict[str, Any]]]:
    """Search the host's assisted generation, for every temperature, over a constant number of drafted tokens.

    The confidence threshold, which ends a draft early, is off. The search sees prompts that are measured afterwards, which
    favours the tuned arm.

    Returns:
        The best options by temperature, and what every candidate reached.
    """
    best: dict[float, dict[str, Any]] = {}
    tried: list[dict[str, Any]] = []
    for temperature in temperatures:
        speeds: dict[int, list[float]] = {count: [] for count in counts}
        for repeat in range(TUNING_REPEATS):
            for count in counts:
                arm = HostArm(name="tuning", family="assisted", assistant={temperature: assistant_options(count)})
                start, num_tokens = time.perf_counter(), 0
                for row in prompts:
                    call = Call(prompt_ids=(row,), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + repeat)
                    num_tokens += len(arm.decode(pair, call).token_ids[0])
                synchronize(pair)
                speeds[count].append(num_tokens / (time.perf_counter() - start))
        medians = {count: Summary.of(values).median for count, values in speeds.items()}
        best[temperature] = assistant_options(max(medians, key=lambda count: medians[count]))
        tried += [
            {"temperature": temperature, **assistant_options(count), "tokens_per_s": speed} for count, speed in medians.items()
        ]
    return best, tried


def assistant_options(num_tokens: int) -> dict[str, Any]:
    """A constant number of drafted tokens, whatever the draft model's confidence."""
    return {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }

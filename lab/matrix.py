"""`python -m lab.matrix`: every tree with every verifier that is exact for it, or every controller, by the clock."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from lab.command import run
from monge.bench.arms import ASSISTANT_TOKENS, Arm, MongeArm, usual_arms
from monge.bench.decode import PROMPTS_PER_TASK
from monge.bench.pair import Pair, load_pair
from monge.bench.runner import Settings
from monge.cli import bench_decode as asked
from monge.cli import options
from monge.cli.console import quiet_host, reported
from monge.cli.options import check_out_folder
from monge.control.registry import DEPTH_CONTROLLERS as CONTROLLERS
from monge.core.proposal import Deterministic
from monge.defaults import ADAPTIVE, STEADY
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.registry import TREES
from monge.prompts import asked_prompts, interleaved
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS

TREES_COMPARED: Final = ("chain", "fixed_width", 'fixed_width(children="iid")', "best_first")
WINDOWS: Final = (1, 2, 3, 5, 8)
OUT: Final = Path("matrix")
Controllers = Annotated[
    bool, options.measuring("--controllers", "Fixed windows and all controllers instead.")
]


@reported
def main(
    *,
    controllers: Controllers = False,
    target: options.Target = None,
    draft: options.Drafts = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    prompts: Path | None = options.measuring(
        None,
        "Text lines, or *.jsonl with `prompt`, `question`, `turns` or `messages`.",
        "the shipped prompts",
    ),
    mixed: bool = options.switch(
        "--mixed", options.MEASURING, "Take prompts of all tasks in turns."
    ),
    max_new_tokens: int | None = options.measuring(
        None, "Length of every completion.", Settings().max_new_tokens
    ),
    repeats: int | None = options.measuring(
        None, "Measured passes over the prompts.", Settings().repeats
    ),
    batch: list[int] | None = options.measuring(
        None, "Batch size; may be repeated.", Settings().batch_sizes
    ),
    temperature: list[float] | None = options.measuring(
        None, "0 is greedy; may be repeated.", Settings().temperatures
    ),
    per_task: int | None = options.measuring(
        None, "Prompts of each task; of a file all.", None, "--prompts-per-task"
    ),
    seed: int | None = options.measuring(None, "Seed of the sampled arms."),
    clock: str | None = options.measuring(
        None, "`wall`, or `cpu`: processor time of this process, for a busy machine."
    ),
    threads: options.Threads = None,
    out: Path = options.option(OUT, options.OUTPUT, "Folder for JSON."),
    as_json: options.Json = False,
) -> None:
    """Compare every tree with every verifier, or every controller, as `monge bench decode` does.

    A quarter of an hour on two cores. With `--json` the last line of standard output is one JSON
    object.

    **Examples**

        python -m lab.matrix
        python -m lab.matrix --controllers --mixed --batch 1 --batch 16
    """
    quiet_host()
    options.set_threads(threads)
    check_out_folder(out)
    shown = asked_prompts(prompts, per_task=per_task, default=PROMPTS_PER_TASK)
    given = options.given(max_new_tokens=max_new_tokens, repeats=repeats, seed=seed, clock=clock)
    lists = {"batch_sizes": tuple(batch or ()), "temperatures": tuple(temperature or ())}
    settings = replace(Settings(), **given, **{name: some for name, some in lists.items() if some})
    pair = load_pair(target, draft, **options.given(dtype=dtype, device=device, backend=backend))
    ours = controller_arms(pair) if controllers else all_arms(pair)
    texts = interleaved(shown) if mixed else shown
    asked.measured(
        pair,
        texts,
        settings,
        ours=ours,
        assistant_tokens=ASSISTANT_TOKENS,
        out=out,
        as_json=as_json,
    )


def all_arms(pair: Pair) -> list[Arm]:
    """The usual arms, and every drafter and tree with every verifier that is exact for it."""
    first, _, plain = usual_arms()
    arms = [first, plain]
    for verifier in VERIFIERS:
        if unsupported_reason(VERIFIERS.make(verifier), {Deterministic}, 1) is None:
            settings = {"drafter": "ngram", "verifier": verifier, "controller": STEADY}
            arms.append(MongeArm(name=f"monge ngram {verifier}", settings=settings))
    if pair.draft is not None or pair.head is not None:
        for tree, verifier in legal_pairs(TREES_COMPARED):
            settings = {
                "drafter": pair.drafter(),
                "tree": tree,
                "verifier": verifier,
                "controller": STEADY,
            }
            arms.append(
                MongeArm(
                    name=f"monge {short_name(TREES.parse(tree))} {verifier}", settings=settings
                )
            )
    return arms


def controller_arms(pair: Pair) -> list[Arm]:
    """The library as it comes, without speculation, with fixed windows and with the other controllers."""
    first, _, plain = usual_arms()
    arms: list[Arm] = [first, plain]
    if pair.draft is not None or pair.head is not None:
        arms += [_with(f"window {depth}", STEADY, tree=f"chain({depth})") for depth in WINDOWS]
    # The first arm is that of the default controller already.
    return arms + [_with(name, name) for name in CONTROLLERS if name not in (STEADY, ADAPTIVE)]


def _with(name: str, controller: str, **settings: str) -> Arm:
    return MongeArm(name=f"monge {name}", settings={**settings, "controller": controller})


def legal_pairs(trees: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Trees with the verifiers that are exact for what they propose."""
    for tree in trees:
        limits = TREES.parse(tree).limits
        for verifier in VERIFIERS:
            if (
                unsupported_reason(VERIFIERS.make(verifier), limits.proposes, limits.max_width)
                is None
            ):
                yield tree, verifier


def short_name(tree: TreeBuilder) -> str:
    """Name of a tree, and how its children are drawn where that is not the default."""
    name = TREES.name_of(tree)
    children = TREES.options(name).get("children")
    ours = getattr(tree, "children", children)
    return name if ours == children else f"{name}/{ours}"


if __name__ == "__main__":
    run(main)

"""`python -m lab.drafters`: every drafter with one target, the same prompts and as many drafted nodes a round.

Drafters with laws of their own build the same tree and are verified by the same rule; the others
propose what they have, cut to the same number of nodes, and sample and match verifies, which is
optimal for candidates that are not drawn.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from lab.shape.diagonal import fit, head_with
from monge.api import drafts_of
from monge.bench.arms import TokenIds, named_arm
from monge.bench.pair import Pair
from monge.bench.runner import Measurement, Settings, measure
from monge.bench.statistics import RepeatSummary, paired_ratios
from monge.core.errors import MongeError
from monge.core.metrics import block_efficiency
from monge.draft.by_name import settings_of
from monge.heads.readers.files import CONFIG, read_json
from monge.heads.shape.checkpoint import is_shape, load_head, save_head
from monge.heads.shape.head import TargetSizes, make_predictor
from monge.loading.sources import ModelSource
from monge.training.texts import Text, Texts, feature_model, gradient_ends, read_texts, thirds

NODES: Final = 16
"""Most drafted nodes of a round."""
TREES: Final = {
    0.0: f"tree=best_first({NODES}, 3, 4), verifier=sample_and_match",
    1.0: "tree=fixed_width((3, 2, 1), children='iid'), verifier=recursive_rejection",
}
"""Tree and rule of drafters with laws, by temperature."""
VARIANTS: Final = ("none", "temperature", "gaussian")
"""Alignments of a SHAPE head that the loop runs.

Nothing, one temperature for each step, transport between Gaussians.
"""
REPEATS: Final = 3
PLAIN: Final = "none"
OTHERS: Final = (PLAIN, "ngram", f"suffix(num_nodes={NODES})")
"""Drafters that nobody trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A drafter of the table.

    Args:
        name: In the table.
        drafter: As a user writes it.
        training_s: Seconds that making its head took, the target's own text not counted; `None`
            where nobody says.
        training_tokens: Tokens that it was fitted to.
    """

    name: str
    drafter: str
    training_s: float | None = None
    training_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A measured drafter at one temperature.

    `over_plain` compares repeats with the plain decoding of the same repeat.
    """

    name: str
    temperature: float
    block_efficiency: float
    nodes_per_round: float
    tokens_per_s: float
    over_plain: RepeatSummary
    training_s: float | None
    training_tokens: int | None


def entries(
    pair: Pair,
    folders: Sequence[Path],
    rows: Sequence[Text],
    out: Path,
    say: Callable[[str], None],
) -> list[Entry]:
    """Drafters to compare; heads that are fitted here are kept in `out`.

    Args:
        pair: Target and draft model.
        folders: Trained heads of any format.
        rows: Text of the target, for what is fitted in closed form.
        out: Where those go.
        say: Told what is done.
    """
    found = [Entry(name=text.partition("(")[0], drafter=text) for text in OTHERS]
    if pair.draft is not None:
        found.append(Entry(name="draft model", drafter="model"))
    texts = thirds(read_texts(feature_model(pair.target), rows))
    for variant in VARIANTS:
        say(f"shape without training, alignment {variant}")
        found.append(_fitted(pair, None, variant, texts, out / f"ridge-{variant}"))
    for folder in folders:
        config = read_json(folder / CONFIG)
        if is_shape(config):
            for variant in VARIANTS:
                say(f"{folder.name}, alignment {variant}")
                found.append(
                    _fitted(pair, folder, variant, texts, out / f"{folder.name}-{variant}")
                )
            continue
        target = ModelSource.of(pair.names["target"])
        drafter, about = drafts_of(folder, target).head_text, config.get("about", {})
        if drafter is None:
            raise MongeError(f"lab.drafters: {str(folder)!r} holds no head for this target")
        times = {"training_s": about.get("training_s"), "training_tokens": about.get("tokens")}
        found.append(Entry(name=folder.name, drafter=drafter, **times))
    return found


@torch.no_grad()
def _fitted(
    pair: Pair, trained: Path | None, variant: str, texts: tuple[Texts, Texts, Texts], out: Path
) -> Entry:
    """A SHAPE head with an alignment: the trained predictor, or one of ridge regression."""
    target, ends, (fitted, chosen, _) = (
        feature_model(pair.target),
        gradient_ends(pair.target),
        texts,
    )
    sizes, about, start = TargetSizes.of(target), dict[str, Any](), perf_counter()
    if trained is None:
        predictor = make_predictor("ridge", sizes, num_steps=3, is_branched=True)
    else:
        predictor = load_head(trained).predictor
        about = json.loads((trained / CONFIG).read_text(encoding="utf-8")).get("about", {})
    head = head_with(variant, predictor, sizes).to(pair.target.device)
    head.remember(target)
    fit(head, variant, fitted, chosen, ends)
    save_head(head, out)
    fitting, before = perf_counter() - start, about.get("training_s")
    tokens = fitted.token_ids.numel() if trained is None else about.get("tokens")
    seconds = fitting if trained is None else None if before is None else before + fitting
    name = "shape, training-free" if trained is None else f"shape, {trained.name}"
    return Entry(
        name=f"{name}, {variant}",
        drafter=f"shape(head={str(out)!r})",
        training_s=seconds,
        training_tokens=tokens,
    )


def table(
    pair: Pair,
    drafters: Sequence[Entry],
    prompts: TokenIds,
    settings: Settings,
    say: Callable[[str], None],
) -> list[Line]:
    """Decode all prompts with every drafter, in turns, at both temperatures.

    Raises:
        MongeError: If a drafter fails: it has no numbers, and the table would not compare what it
            says.
    """
    return [
        line
        for temperature in TREES
        for line in _lines(pair, drafters, prompts, settings, temperature=temperature, say=say)
    ]


def _lines(
    pair: Pair,
    drafters: Sequence[Entry],
    prompts: TokenIds,
    settings: Settings,
    *,
    temperature: float,
    say: Callable[[str], None],
) -> Iterator[Line]:
    arms = [named_arm(_parts(entry.drafter, temperature)) for entry in drafters]
    at = Settings(**{**asdict(settings), "temperatures": (temperature,), "batch_sizes": (1,)})
    measured = measure(
        pair,
        arms,
        prompts,
        at,
        on_call=lambda name, *_: say(f"{name}, temperature {temperature:g}"),
    )
    plain = measured[[entry.name for entry in drafters].index(PLAIN)]
    for entry, one in zip(drafters, measured, strict=True):
        if one.failure is not None:
            raise MongeError(
                f"lab.drafters: {entry.name} at temperature {temperature:g}: {one.failure}"
            )
        yield _line(entry, one, plain)


def _parts(drafter: str, temperature: float) -> str:
    shape = f", {TREES[temperature]}" if "tree" in settings_of(drafter) else ""
    return f"drafter={drafter}, controller=fixed(max_nodes={NODES}){shape}"


def _line(entry: Entry, one: Measurement, plain: Measurement) -> Line:
    return Line(
        name=entry.name,
        temperature=one.work.temperature,
        block_efficiency=block_efficiency(one.records),
        nodes_per_round=sum(record.num_nodes for record in one.records) / len(one.records),
        tokens_per_s=RepeatSummary.of(one.tokens_per_s).median,
        over_plain=RepeatSummary.of(paired_ratios(one.tokens_per_s, plain.tokens_per_s)),
        training_s=entry.training_s,
        training_tokens=entry.training_tokens,
    )

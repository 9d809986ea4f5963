"""What the code decides about a tiny random network of every family: the table of `docs/compatibility.md`.

`python -m tests.docs.compatibility` writes the table. It compiles networks, which takes minutes.
"""

import re
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel

from monge.backends.cpu.compiled import pending_forward, why_no_compiled_forward
from monge.backends.registry import Eager
from monge.core.errors import BackendError, UnsupportedModelError
from monge.networks.base import FeatureModel, SequenceModel
from monge.networks.forward import NetworkForward
from monge.networks.hf_tree import HfTreeModel
from tests.engine import vision_language
from tests.engine.tiny import CHAIN_FAMILIES, FAMILIES, STATEFUL, TREE_FAMILIES
from tests.parity.test_other_families import CHAINS, PLAIN, REFUSED, STATES, TREES, made

Cells = tuple[str, str, str, str]

PAGE: Final = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD: Final = ("drafts", "batch in one forward", "heads", "`compiled`", "families")
REFUSED_CELLS: Final[Cells] = ("refused", "", "", "")
DRAFTS: Final = ("trees, chains", "chains", "none", "refused")
"""What a round may verify, in the order of the table."""
VARIANTS: Final = {
    "falcon": "falcon (rotary positions)",
    "falcon_alibi": "falcon (ALiBi)",
    "mistral": "mistral (full attention)",
    "mistral_window": "mistral (sliding window)",
}
"""Families that stand twice in the tests, with other settings."""

IMAGES: Final = vision_language.TREES | vision_language.CHAINS | vision_language.REFUSED
"""Vision-language models."""

_MARKS: Final = re.compile(r"(?<=<!-- families -->\n).*?(?=\n<!-- /families -->)", re.DOTALL)


def families() -> dict[str, tuple[str, dict[str, Any]]]:
    """The model type and the settings of a tiny network, by the name that the table gives it."""
    tiny = {name: FAMILIES[name] for name in (*TREE_FAMILIES, *CHAIN_FAMILIES)}
    others = STATEFUL | TREES | CHAINS | STATES
    others |= {name: settings for name, (settings, _) in (PLAIN | REFUSED).items()} | IMAGES
    return {
        **{
            VARIANTS.get(key, one.model_type): (one.model_type, one.settings)
            for key, one in tiny.items()
        },
        **{name: (name, settings) for name, settings in others.items()},
        "bert with `is_decoder`": ("bert", TREES["bert"]),
    }


def cells(name: str, compiles: bool | None = None) -> Cells:
    """What the table says about a family.

    Args:
        name: A key of `families`.
        compiles: Whether a network that may be compiled can be; `None` tries it.
    """
    network = vision_language.made(name) if name in IMAGES else made(*families()[name])
    try:
        model = Eager().sequence_model(network)
    except UnsupportedModelError:
        return REFUSED_CELLS
    tried = why_no_compiled_forward(network) is None
    flags = (
        isinstance(model, HfTreeModel),
        isinstance(model, FeatureModel),
        tried and (can_compile(network) if compiles is None else compiles),
    )
    batch, heads, compiled = ("yes" if flag else "no" for flag in flags)
    return (_drafts(model), batch, heads, compiled)


def can_compile(network: PreTrainedModel) -> bool:
    """Whether the compiled step of a network passes its check."""
    try:
        pending_forward(NetworkForward(network)).make()
    except BackendError:
        return False
    return True


def table(decided: dict[str, Cells]) -> str:
    """The whole table: one row for families about which the code decides the same."""

    def place(name: str) -> tuple[int, bool, Cells]:
        row = decided[name]
        return DRAFTS.index(row[0]), row[-1] != "yes", row

    groups = groupby(sorted(sorted(decided), key=place), key=decided.__getitem__)
    rows = [(*row, ", ".join(names)) for row, names in groups]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, ("---",) * len(HEAD), *rows))


def committed() -> dict[str, Cells]:
    """What the page says, by family."""
    (block,) = _MARKS.findall(PAGE.read_text())
    found: dict[str, Cells] = {}
    for line in block.splitlines()[2:]:
        *row, names = (cell.strip() for cell in line.strip("|").split("|"))
        drafts, batch, heads, compiled = row
        found |= dict.fromkeys(names.split(", "), (drafts, batch, heads, compiled))
    return found


def _drafts(model: SequenceModel) -> str:
    if model.why_no_draft is not None:
        return "none"
    return "trees, chains" if model.why_no_tree is None else "chains"


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # hints to install faster kernels
    text = table({name: cells(name) for name in families()})
    PAGE.write_text(_MARKS.sub(lambda _: text, PAGE.read_text()))

"""A small tree of tabular laws, as a JSON file gives it.

The keys are `vocabulary` (names of the tokens, or their number), `depth`, `candidates` (of a node by
level, or one number), `drafting` (a sampling scheme of children, or `paths`), `target` and `draft`
(laws by prefix: names with blanks between them, `""` for the root, `"*"` for every prefix that is
not listed).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64

from monge.acceptance.inputs import check_candidates, law_of, read_document
from monge.core.errors import LawError, OptionError, unknown_name
from monge.core.law import DenseLaw
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.children import CHILDREN, way_of_drawing
from monge.draft.tree.fixed_width import FixedWidth
from monge.draft.tree.paths import Paths
from monge.transport.random_tree import Path

Vector = Float64[np.ndarray, " vocab"]

PATHS: Final = "paths"
"""The drafting of SpecTr.

K independent paths from the root, so a node has as many draws as paths go through it.
"""

KEYS: Final = ("vocabulary", "depth", "candidates", "drafting", "target", "draft")
ANY_PREFIX: Final = "*"
MAX_DEPTH: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTable:
    """Laws by prefix, and the shape of the tree.

    Args:
        tokens: Names of the tokens.
        widths: Candidates of a node, by depth; of `paths` the first is their number.
        drafting: A way of drawing children, or `paths`.
        target: Target laws by prefix; `*` for those not listed.
        draft: Draft laws likewise.
    """

    tokens: tuple[str, ...]
    widths: tuple[int, ...]
    drafting: str
    target: Mapping[str, Vector]
    draft: Mapping[str, Vector]
    _laws: dict[tuple[str, Path], DenseLaw] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Levels of candidates."""
        return len(self.widths)

    @property
    def builder(self) -> TreeBuilder:
        """Tree builder, as in decoding."""
        if self.drafting == PATHS:
            return Paths(num_paths=self.widths[0], depth=self.depth)
        return FixedWidth(widths=self.widths, children=self.drafting)

    def paths(self) -> Iterator[Path]:
        """Every prefix after which candidates may be drawn."""
        level: list[Path] = [()]
        for _ in range(self.depth):
            yield from level
            level = [(*path, token) for path in level for token in range(len(self.tokens))]

    def target_probs(self, path: Path) -> Vector:
        """P after a prefix."""
        return self._probs("target", path)

    def draft_probs(self, path: Path) -> Vector:
        """Q after a prefix."""
        return self._probs("draft", path)

    def target_law(self, path: Path) -> DenseLaw:
        """P after a prefix, as rules take it."""
        return self._law("target", path)

    def draft_law(self, path: Path) -> DenseLaw:
        """Q after a prefix, as proposals take it."""
        return self._law("draft", path)

    def _law(self, which: str, path: Path) -> DenseLaw:
        if (which, path) not in self._laws:
            self._laws[which, path] = DenseLaw(torch.from_numpy(self._probs(which, path).copy()))
        return self._laws[which, path]

    def _probs(self, which: str, path: Path) -> Vector:
        laws = self.target if which == "target" else self.draft
        prefix = " ".join(self.tokens[token] for token in path)
        law = laws.get(prefix, laws.get(ANY_PREFIX))
        if law is None:
            raise LawError(
                f"{which}: no law after {prefix!r}; list it, or give one under '*' for "
                "all that are not listed"
            )
        return law


def read_table(path: FilePath) -> TreeTable:
    """Return the table in a JSON file.

    Raises:
        OptionError: If the file cannot be read, or a key is missing, unknown or of the wrong kind.
        LawError: If a law is none, or a prefix has none.
    """
    return table_of(read_document(path))


def table_of(document: Any) -> TreeTable:  # noqa: ANN401 (whatever a file holds)
    """The table in a document; see the module's text for its keys."""
    if not isinstance(document, dict):
        raise OptionError(
            f"tree: expected an object with the keys {', '.join(KEYS)}; got "
            f"{type(document).__name__}"
        )
    for key in document.keys() - KEYS:
        raise unknown_name("key of a tree file:", key, KEYS)
    if missing := [key for key in KEYS if key not in document]:
        raise OptionError(
            f"tree: {', '.join(missing)} missing; a tree file has the keys {', '.join(KEYS)}"
        )
    tokens = _tokens(document["vocabulary"])
    drafting = _drafting(document["drafting"])
    widths = _widths(
        document["candidates"], _whole("depth", document["depth"], MAX_DEPTH), drafting
    )
    table = TreeTable(
        tokens=tokens,
        widths=widths,
        drafting=drafting,
        target=_laws("target", document["target"], tokens),
        draft=_laws("draft", document["draft"], tokens),
    )
    _ = table.builder  # refuses widths that the way of drawing cannot have
    for path in table.paths():
        table.target_probs(path)
        table.draft_probs(path)
    return table


def _tokens(vocabulary: object) -> tuple[str, ...]:
    if isinstance(vocabulary, int) and not isinstance(vocabulary, bool):
        return tuple(str(token) for token in range(_whole("vocabulary", vocabulary, 1000)))
    if not isinstance(vocabulary, list) or not vocabulary:
        raise OptionError(
            f"tree: vocabulary must be a list of token names or their number; got {vocabulary!r}"
        )
    names = tuple(str(name) for name in vocabulary)
    if len(set(names)) != len(names):
        raise OptionError(f"tree: vocabulary names a token twice: {list(names)}")
    wrong = [name for name in names if not name or " " in name or name == ANY_PREFIX]
    if wrong:
        raise OptionError(
            f"tree: token name {wrong[0]!r} is empty, has blanks or is '*', and "
            "could not be part of a prefix"
        )
    return names


def _drafting(drafting: object) -> str:
    if drafting == PATHS:
        return PATHS
    if not isinstance(drafting, str):
        raise OptionError(f"tree: drafting must be a name; known: {', '.join([*CHILDREN, PATHS])}")
    try:
        way_of_drawing(drafting)
    except OptionError as error:
        raise OptionError(f"tree: drafting: {error}; or 'paths'") from error
    return drafting


def _widths(candidates: object, depth: int, drafting: str) -> tuple[int, ...]:
    listed = candidates if isinstance(candidates, list) else [candidates] * depth
    if len(listed) != depth:
        raise OptionError(
            f"tree: candidates has {len(listed)} entries for a depth of {depth}; "
            "give one a level, or one number"
        )
    widths = tuple(_whole("candidates", width, None) for width in listed)
    for width in widths:
        check_candidates("tree: candidates", width)
    if drafting == PATHS and len(set(widths)) > 1:
        raise OptionError(
            f"tree: with drafting 'paths' candidates is one number, the paths; got {list(widths)}"
        )
    return widths


def _whole(key: str, value: object, largest: int | None) -> int:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < 1
        or (largest is not None and value > largest)
    ):
        limits = "at least 1" if largest is None else f"in 1..{largest}"
        raise OptionError(f"tree: {key} must be a whole number {limits}; got {value!r}")
    return value


def _laws(which: str, entries: object, tokens: tuple[str, ...]) -> dict[str, Vector]:
    if not isinstance(entries, dict) or not entries:
        raise OptionError(
            f"tree: {which} must map prefixes to laws, for example {{'': [...], "
            f"'*': [...]}}; got {entries!r}"
        )
    laws: dict[str, Vector] = {}
    for key, values in entries.items():
        prefix = " ".join(str(key).split())
        strange = [name for name in prefix.split() if name not in tokens and prefix != ANY_PREFIX]
        if strange:
            raise OptionError(
                f"tree: {which} has the prefix {key!r}, but {strange[0]!r} is no "
                "token of the vocabulary"
            )
        law = law_of(f"tree: {which} after {prefix!r}", values)
        if law.size != len(tokens):
            raise LawError(
                f"tree: {which} after {prefix!r} has {law.size} entries for "
                f"{len(tokens)} tokens; list every token"
            )
        laws[prefix] = law
    return laws

"""Laws and trees of tabular laws that users give: read, and refused with a reason if they are wrong.

A tree is a JSON object with the keys `vocabulary` (names of the tokens, or their number), `depth`,
`candidates` (of a node by level, or one number), `drafting` (a sampling scheme of children, or
`paths`), `target` and `draft` (laws by prefix: names with blanks between them, `""` for the root,
`"*"` for every prefix that is not listed).
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from monge.core.errors import LawError, OptionError, unknown_name
from monge.core.law import DenseLaw
from monge.core.setting_types import is_of
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.children import CHILDREN, way_of_drawing
from monge.draft.tree.fixed_width import FixedWidth
from monge.draft.tree.paths import Paths
from monge.transport.laws import Vector, check_law

MAX_CANDIDATES: Final = 32
"""Most candidates of one node: the race of draws without replacement is exact up to here."""

Prefix = tuple[int, ...]

PATHS: Final = "paths"
"""The drafting of SpecTr: K independent paths from the root, so a node has as many draws as paths go through it."""

KEYS: Final = ("vocabulary", "depth", "candidates", "drafting", "target", "draft")
ANY_PREFIX: Final = "*"
MAX_DEPTH: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTable:
    """Laws by prefix, and the shape of the tree.

    Args:
        tokens: Names of the tokens.
        widths: Candidates of a node, by depth; of `paths` the first is their number.
        drafting: A sampling scheme of children, or `paths`.
        target: Target law after every prefix that is shorter than the depth.
        draft: Draft laws likewise.
    """

    tokens: tuple[str, ...]
    widths: tuple[int, ...]
    drafting: str
    target: Mapping[Prefix, DenseLaw]
    draft: Mapping[Prefix, DenseLaw]

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

    def target_probs(self, path: Prefix) -> Vector:
        """Return p after a prefix."""
        return self.target[path].probs.numpy()

    def draft_probs(self, path: Prefix) -> Vector:
        """Return q after a prefix."""
        return self.draft[path].probs.numpy()


def read_law(field: str, text: str) -> Vector:
    """Read a law from the command line: numbers with commas, or `@file` (`.npy`, `.json`, or lines of text).

    Args:
        field: Name of the option, for messages.
        text: The user's text.

    Raises:
        OptionError: If the numbers cannot be read.
        LawError: If they are no law.
    """
    path = Path(text[1:])
    if not text.startswith("@"):
        values: Any = _numbers(field, text.split(","))
    elif path.suffix == ".json":
        values = read_document(path)
    elif path.suffix == ".npy":
        try:
            values = np.load(path, allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise OptionError(
                f"{field}: cannot read {str(path)!r} as a .npy array: {error}"
            ) from error
    else:
        values = _numbers(field, _read_text(path).replace(",", " ").split())
    return law_of(field, values)


def law_of(field: str, values: Any) -> Vector:  # noqa: ANN401 (whatever a file holds)
    """Return a checked law from plain numbers.

    Raises:
        LawError: If it is not one non-empty list of finite, non-negative numbers that sum to one.
    """
    try:
        masses = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise LawError(f"{field}: expected a list of probabilities; got {values!r:.60}") from error
    if masses.ndim != 1:
        raise LawError(f"{field}: expected one list of probabilities; got shape {masses.shape}")
    return check_law(field, masses)


def check_lengths(num_target: int, num_draft: int) -> None:
    """Refuse laws over different vocabularies."""
    if num_target != num_draft:
        raise LawError(
            f"--target-probs has {num_target} entries, --draft-probs {num_draft}; both list the "
            "same tokens in the same order"
        )


def check_candidates(field: str, count: int) -> None:
    """Refuse a number of candidates out of range."""
    if not 1 <= count <= MAX_CANDIDATES:
        raise OptionError(f"{field} must lie in 1..{MAX_CANDIDATES}; got {count}")


def read_document(path: Path) -> Any:  # noqa: ANN401 (whatever a file holds)
    """Return the contents of a JSON file.

    Raises:
        OptionError: If it cannot be read.
    """
    text = _read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{path}: not JSON: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {str(path)!r}: {error}") from error


def _numbers(field: str, words: Sequence[str]) -> list[float]:
    numbers: list[float] = []
    for index, word in enumerate(words):
        try:
            numbers.append(float(word))
        except ValueError as error:
            raise OptionError(
                f"{field}: entry {index} is {word.strip()!r}, which is no number; write e.g. "
                "0.5,0.3,0.2, or @file"
            ) from error
    return numbers


def read_table(path: Path) -> TreeTable:
    """Return the table in a JSON file.

    Raises:
        OptionError: If the file cannot be read, or a key is missing, unknown or of the wrong kind.
        LawError: If a law is none, or a prefix has none.
    """
    return table_of(read_document(path))


def table_of(document: Any) -> TreeTable:  # noqa: ANN401 (whatever a file holds)
    """Return the table in a document; see the head of this module for its keys."""
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
    tokens, drafting = _tokens(document["vocabulary"]), _drafting(document["drafting"])
    depth = _whole("depth", document["depth"], MAX_DEPTH)
    widths = _widths(document["candidates"], depth, drafting)
    paths = [
        path
        for length in range(depth)
        for path in itertools.product(range(len(tokens)), repeat=length)
    ]
    table = TreeTable(
        tokens=tokens,
        widths=widths,
        drafting=drafting,
        target=_laws("target", document["target"], tokens, paths),
        draft=_laws("draft", document["draft"], tokens, paths),
    )
    _ = table.builder  # refuses widths that the sampling scheme cannot have
    return table


def _tokens(vocabulary: object) -> tuple[str, ...]:
    if is_of(vocabulary, int):
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
    if not isinstance(drafting, str):
        raise OptionError(f"tree: drafting must be a name; known: {', '.join([*CHILDREN, PATHS])}")
    if drafting != PATHS:
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


def _whole(key: str, value: Any, largest: int | None) -> int:  # noqa: ANN401 (of a file)
    if not is_of(value, int) or value < 1 or (largest is not None and value > largest):
        limits = "at least 1" if largest is None else f"in 1..{largest}"
        raise OptionError(f"tree: {key} must be a whole number {limits}; got {value!r}")
    return value


def _laws(
    which: str, entries: object, tokens: tuple[str, ...], paths: Sequence[Prefix]
) -> dict[Prefix, DenseLaw]:
    """The law of every path."""
    if not isinstance(entries, dict) or not entries:
        raise OptionError(
            f"tree: {which} must map prefixes to laws, for example {{'': [...], "
            f"'*': [...]}}; got {entries!r}"
        )
    listed: dict[str, DenseLaw] = {}
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
        listed[prefix] = DenseLaw(torch.from_numpy(law.copy()))
    laws: dict[Prefix, DenseLaw] = {}
    for path in paths:
        prefix = " ".join(tokens[token] for token in path)
        law = listed.get(prefix, listed.get(ANY_PREFIX))
        if law is None:
            raise LawError(
                f"{which}: no law after {prefix!r}; list it, or give one under '*' for "
                "all that are not listed"
            )
        laws[path] = law
    return laws

"""Trees of tabular laws in files: read, and refused with a reason if they are wrong.

A file holds a JSON object:

    {
      "vocabulary": ["a", "b", "c"],
      "depth": 2,
      "candidates": [2, 2],
      "drafting": "iid",
      "target": {"": [0.5, 0.3, 0.2], "a": [0.6, 0.2, 0.2], "*": [0.4, 0.3, 0.3]},
      "draft": {"*": [0.2, 0.3, 0.5]}
    }

`vocabulary` has the names of the tokens, or their number; `candidates` those of a node by level, or
one number; `drafting` is a way of drawing children, or `paths` for independent paths from the root.
`target` and `draft` have laws by prefix: names with blanks between them, `""` for the root, `"*"`
for every prefix that is not listed.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from monge.core.errors import LawError, OptionError, unknown_name
from monge.core.setting_types import is_of
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.children import way_of_drawing
from monge.draft.tree.fixed_width import FixedWidth
from monge.draft.tree.paths import Paths
from monge.laws.law import DenseLaw
from monge.transport.inputs import check_candidates, law_of
from monge.transport.laws import Vector

Prefix = tuple[int, ...]

PATHS: Final = "paths"
"""The drafting of SpecTr: K independent paths from the root, so a node has as many draws as paths go through it."""

KEYS: Final = ("vocabulary", "depth", "candidates", "drafting", "target", "draft")
ANY_PREFIX: Final = "*"
MAX_DEPTH: Final = 6
MAX_TOKENS: Final = 1000


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


def table_of(document: Any) -> TreeTable:  # noqa: ANN401 (whatever a file holds)
    """Return the table in a document; see the head of this module for its keys.

    Raises:
        OptionError: If a key is missing, unknown or of the wrong kind.
        LawError: If a law is none, or a prefix has none.
    """
    if not isinstance(document, dict) or not document.keys() >= {*KEYS}:
        raise OptionError(f"tree: expected an object with the keys {', '.join(KEYS)}")
    for key in document.keys() - KEYS:
        raise unknown_name("key of a tree file:", key, KEYS)
    tokens = _tokens(document["vocabulary"])
    depth, drafting = document["depth"], document["drafting"]
    if not is_of(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise OptionError(f"tree: depth must lie in 1..{MAX_DEPTH}; got {depth!r}")
    given = document["candidates"]
    widths = tuple(given) if isinstance(given, list) else (given,) * depth
    if len(widths) != depth or (drafting == PATHS and len(set(widths)) > 1):
        raise OptionError(
            f"tree: candidates must be one number, or without {PATHS!r} one for each of {depth} "
            f"levels; got {given!r}"
        )
    for width in widths:
        check_candidates("tree: candidates", width)
    if drafting != PATHS:
        way_of_drawing(str(drafting))
    table = TreeTable(
        tokens=tokens,
        widths=widths,
        drafting=drafting,
        target=dict(_laws("target", document["target"], tokens, depth)),
        draft=dict(_laws("draft", document["draft"], tokens, depth)),
    )
    _ = table.builder  # refuses widths that the sampling scheme cannot have
    return table


def _tokens(vocabulary: Any) -> tuple[str, ...]:  # noqa: ANN401 (of a file)
    if is_of(vocabulary, int) and 1 <= vocabulary <= MAX_TOKENS:
        return tuple(map(str, range(vocabulary)))
    names = tuple(map(str, vocabulary)) if isinstance(vocabulary, list) else ()
    is_clear = all(name.split() == [name] and name != ANY_PREFIX for name in names)
    if not names or len(set(names)) < len(names) or not is_clear:
        raise OptionError(
            f"tree: vocabulary must be a number of tokens, at most {MAX_TOKENS}, or a list of "
            f"different names, without blanks and not {ANY_PREFIX!r}; got {vocabulary!r}"
        )
    return names


def _laws(
    which: str, entries: object, tokens: tuple[str, ...], depth: int
) -> Iterator[tuple[Prefix, DenseLaw]]:
    """Yield every prefix that is shorter than the depth, with its law."""
    if not isinstance(entries, dict):
        raise OptionError(
            f"tree: {which} must map prefixes to laws, for example {{'': [...], '*': [...]}}; got "
            f"{entries!r}"
        )
    listed: dict[str, DenseLaw] = {}
    for key, values in entries.items():
        prefix = " ".join(key.split())
        for name in prefix.split():
            if name not in tokens and prefix != ANY_PREFIX:
                raise OptionError(
                    f"tree: {which} has the prefix {key!r}, but {name!r} is no token of the "
                    "vocabulary"
                )
        law = law_of(f"tree: {which} after {prefix!r}", values)
        if law.size != len(tokens):
            raise LawError(
                f"tree: {which} after {prefix!r} has {law.size} entries for {len(tokens)} tokens; "
                "list every token"
            )
        listed[prefix] = DenseLaw(torch.from_numpy(law.copy()))
    for length in range(depth):
        for path in itertools.product(range(len(tokens)), repeat=length):
            prefix = " ".join(tokens[token] for token in path)
            law = listed.get(prefix, listed.get(ANY_PREFIX))
            if law is None:
                raise LawError(
                    f"{which}: no law after {prefix!r}; list it, or give one under '*' for all "
                    "that are not listed"
                )
            yield path, law

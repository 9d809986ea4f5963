"""Lookahead decoding: n-grams collected from the target's own guesses ahead, proposed where their first token comes up."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.setting_types import check_bounds
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free
from monge.draft.tree_of_paths import node_at, tree_of_paths

Column = tuple[int, ...]


@dataclass(slots=True)
class NgramPool:
    """For every token the n-grams that start with it, latest first, the oldest forgotten.

    Args:
        size: Most n-grams of one first token.
    """

    size: int
    _after: dict[int, dict[Column, None]] = field(default_factory=dict)

    def add(self, ngram: Sequence[int]) -> None:
        """Remember an n-gram."""
        known = self._after.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.size:
            del known[next(iter(known))]

    def after(self, token: int, count: int) -> list[Column]:
        """Return at most `count` continuations of a token, the latest first."""
        return list(islice(reversed(self._after.get(token, {})), count))


@dataclass(frozen=True, slots=True)
class Window:
    """State of one request.

    Args:
        columns: For every position behind the text, guesses from that position on.
        pool: Collected n-grams.
    """

    columns: tuple[Column, ...]
    pool: NgramPool

    def paths(self) -> list[Column]:
        """Return the columns as paths from the root, behind the first guesses of earlier columns."""
        heads = tuple(column[0] for column in self.columns)
        return [(*heads[:place], *column) for place, column in enumerate(self.columns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadDrafter(ModelFreeDrafter[Window]):
    """Jacobi iteration over a window of positions, whose trajectories fill a pool of n-grams that are then proposed.

    The tree of a round has two kinds of paths. *Candidates* are the pool's n-grams that start with
    the last token. The *window* holds, for each of the next positions i, a column of `ngram - 1`
    guesses: the first guesses of columns 1 .. i lie on one chain, and column i goes on behind its
    i-th token, which is the mask of lookahead decoding as a tree. The target's most probable token
    at the end of a column makes an n-gram for the pool and moves the column on by one position. The
    window's nodes are offered as candidates too. All of them are a function of finished rounds
    (`Deterministic`).

    Args:
        window: Positions ahead, W.
        ngram: Tokens of an n-gram, N.
        num_candidates: Most n-grams of the pool that are proposed in a round, G.
        pool_size: N-grams that are remembered for one first token.
        from_text: Whether n-grams of the prompt and of the text go into the pool too.

    Raises:
        OptionError: If a size is too small.

    Reference:
        Lookahead decoding (Fu et al., arXiv 2402.02057), algorithm 3; columns start from the text's
        last tokens instead of random ones, and move on by as many positions as the text does.
    """

    window: int = 5
    ngram: int = 4
    num_candidates: int = 5
    pool_size: int = 16
    from_text: bool = True

    def __post_init__(self) -> None:
        check_bounds(
            "lookahead",
            window=self.window,
            num_candidates=self.num_candidates,
            pool_size=self.pool_size,
        )
        check_bounds("lookahead", 2, ngram=self.ngram)

    @property
    def capabilities(self) -> Capabilities:
        return model_free(
            max_depth=self.window + self.ngram - 2,
            max_width=self.num_candidates + self.window,
            num_successors=1,
        )

    def start(self, context: Context) -> Window:
        text, length = context.token_ids, self.window + self.ngram - 2
        tail = (text * -(-length // len(text)))[-length:]
        columns = tuple(tail[place : place + self.ngram - 1] for place in range(self.window))
        state = Window(columns, NgramPool(self.pool_size))
        self._read(context, state.pool, first=0)
        return state

    def tree(self, context: Context, state: Window, plan: DraftPlan, draws: Draws) -> TokenTree:
        root = context.token_ids[-1]
        return tree_of_paths(
            root,
            state.pool.after(root, self.num_candidates) + state.paths(),
            num_nodes=plan.nodes((self.num_candidates + self.window) * (self.ngram - 1)),
            depth=plan.depth(self.window + self.ngram - 2),
            draws=draws,
        )

    def follow(self, context: Context, draft: Draft[Window], verdict: Verdict) -> Window:
        moved = _moved_on(draft.state, draft.tree, verdict)
        ahead = moved[verdict.num_accepted :] or moved[-1:]
        first = len(context.token_ids) - verdict.num_accepted - self.ngram
        self._read(context, draft.state.pool, first=first)
        return Window(ahead + ahead[-1:] * (self.window - len(ahead)), draft.state.pool)

    def _read(self, context: Context, pool: NgramPool, *, first: int) -> None:
        """Put the text's n-grams into the pool, from the one at position `first` on."""
        if self.from_text:
            for start in range(max(0, first), len(context.token_ids) - self.ngram + 1):
                pool.add(context.token_ids[start : start + self.ngram])


def _moved_on(state: Window, tree: TokenTree, verdict: Verdict) -> tuple[Column, ...]:
    """Return the columns one position further; the target's tokens at their ends go into the pool."""
    moved: list[Column] = []
    for column, path in zip(state.columns, state.paths(), strict=True):
        node = node_at(tree, path)
        if node is None:  # the plan left it out: the column repeats its last guess
            moved.append((*column[1:], column[-1]))
        else:
            moved.append((*column[1:], verdict.successors[node][0]))
            state.pool.add((*column, verdict.successors[node][0]))
    return tuple(moved)

"""Lookahead decoding: n-grams collected from the target's own guesses ahead, proposed where their first token comes up."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.proposal import Deterministic
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, Drafter
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
        """What followed a token: at most `count` continuations, the latest first."""
        return list(islice(reversed(self._after.get(token, {})), count))


@dataclass(frozen=True, slots=True)
class Window:
    """State of one request.

    Args:
        columns: For every position behind the text the guesses of that position and of those after
            it.
        pool: Collected n-grams.
    """

    columns: tuple[Column, ...]
    pool: NgramPool

    def paths(self) -> list[Column]:
        """The columns as paths from the root.

        Each behind the first guesses of the columns before it.
        """
        heads = tuple(column[0] for column in self.columns)
        return [(*heads[:place], *column) for place, column in enumerate(self.columns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadDrafter(Drafter[Window]):
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
        for name, least in (("window", 1), ("ngram", 2), ("num_candidates", 1), ("pool_size", 1)):
            if getattr(self, name) < least:
                raise OptionError(
                    f"lookahead: {name} must be at least {least}; got {getattr(self, name)}"
                )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=self.num_candidates + self.window,
            max_depth=self.window + self.ngram - 2,
            needs_trees=True,
            num_successors=1,
            runs_network=False,
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[Window]:
        states: list[Window] = []
        for context in contexts:
            text, length = context.token_ids, self.window + self.ngram - 2
            tail = (text * -(-length // len(text)))[-length:]
            columns = tuple(tail[place : place + self.ngram - 1] for place in range(self.window))
            states.append(Window(columns, NgramPool(self.pool_size)))
            self._read(context, states[-1].pool, first=0)
        return states

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[Window],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[Window]]:
        most, deepest = (
            (self.num_candidates + self.window) * (self.ngram - 1),
            self.capabilities.max_depth,
        )
        return [
            Draft(
                tree_of_paths(
                    context.token_ids[-1],
                    state.pool.after(context.token_ids[-1], self.num_candidates) + state.paths(),
                    num_nodes=plan.nodes(most),
                    depth=plan.depth(deepest),
                    draws=row_draws,
                ),
                state,
            )
            for context, state, plan, row_draws in zip(contexts, states, plans, draws, strict=True)
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[Window]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[Window]:
        states: list[Window] = []
        for context, draft, verdict in zip(contexts, drafts, verdicts, strict=True):
            moved = _moved_on(draft.state, draft.tree, verdict)
            ahead = moved[verdict.num_accepted :] or moved[-1:]
            columns = ahead + ahead[-1:] * (self.window - len(ahead))
            states.append(Window(columns, draft.state.pool))
            self._read(
                context,
                draft.state.pool,
                first=len(context.token_ids) - verdict.num_accepted - self.ngram,
            )
        return states

    def close(self, context: Context) -> None:
        return None

    def _read(self, context: Context, pool: NgramPool, *, first: int) -> None:
        """Put the text's n-grams into the pool, from the one at position `first` on."""
        if self.from_text:
            for start in range(max(0, first), len(context.token_ids) - self.ngram + 1):
                pool.add(context.token_ids[start : start + self.ngram])


def _moved_on(state: Window, tree: TokenTree, verdict: Verdict) -> tuple[Column, ...]:
    """The columns one position further; what the target said at their ends goes into the pool."""
    moved: list[Column] = []
    for column, path in zip(state.columns, state.paths(), strict=True):
        node = node_at(tree, path)
        if node is None:  # the plan left it out: the column repeats its last guess
            moved.append((*column[1:], column[-1]))
        else:
            moved.append((*column[1:], verdict.successors[node][0]))
            state.pool.add((*column, verdict.successors[node][0]))
    return tuple(moved)

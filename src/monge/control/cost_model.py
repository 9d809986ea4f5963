"""What rounds cost: seconds by nodes, batch and context, in a table that is corrected while decoding. No clock in here."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, ClassVar, Final

from monge.control import cost_table
from monge.control.cost_fit import fitted
from monge.control.cost_nodes import Nodes
from monge.control.cost_pace import Pace
from monge.control.cost_table import Table
from monge.control.cost_watch import WARM, RoundWatch
from monge.control.cost_whole import WholeCost
from monge.core.errors import OptionError
from monge.core.verdict import RoundKind, RoundTiming

_CATCH_UP_RATE: Final = 0.3
"""Share of a difference that the running time of catching up takes over, and that of reading prompts."""
_TAIL_RATE: Final = 0.1
"""The same of what follows a round."""


class CostModel:
    """Seconds of a round: `draft_s(depth, batch) + verify_s(nodes, batch, context)`, the fixed overhead in the latter.

    `verify_s` is a table over batch sizes and numbers of nodes, linear between its entries; more nodes never cost less. Where
    the target runs in compiled graphs of fixed sizes it is a step function of them. Each entry follows the measured rounds:
    it takes over part of the logarithm of measured / predicted, and the whole table a small part of it. What texts of some
    length cost beyond that is learnt apart, for plain rounds and for those that verify a draft.

    Args:
        verify_s: Seconds by batch size and drafted nodes (0: plain decoding), context `base_context`.
        draft_s: Seconds of drafting by batch size and depth.
        context_s: Seconds per further token of context and per request, in rounds that verify a draft.
        plain_context_s: The same in plain rounds, whose attention may run otherwise; `None` for no difference.
        base_context: Context length at which the table holds.
        graph_sizes: Numbers of tokens (the root counted) that compiled graphs are padded to; empty where there are none.
        nodes: Drafted nodes by depth of the plan, from depth 0 on; where it ends, a chain goes on.
        learns: Whether measured rounds correct the table; without, everything stays a function of the given numbers.
        drafters: Of a pool with several networks: `draft_s` and `nodes` of each, by name; those above stand for any other.
        deepest: Levels of the deepest draft that there is; `None` where none is known to be.

    Raises:
        OptionError: If a table is empty, or a time is zero, negative or not finite (drafting may cost nothing).
    """

    plain_run: ClassVar[int] = WARM + 1
    """Plain rounds in a row of which the last shows what plain decoding costs, whatever was drafted before them."""

    def __init__(
        self,
        *,
        verify_s: Table,
        draft_s: Table,
        context_s: float | int = 0.0,
        plain_context_s: float | int | None = None,
        base_context: int = 0,
        graph_sizes: Sequence[int] = (),
        nodes: Sequence[int] = (),
        learns: bool = True,
        drafters: Mapping[str, tuple[Table, Sequence[int]]] = MappingProxyType({}),
        deepest: int | None = None,
    ) -> None:
        self._verify = cost_table.checked("verify_s", verify_s, may_be_zero=False)
        self._draft = cost_table.checked("draft_s", draft_s, may_be_zero=True)
        plain_context_s = context_s if plain_context_s is None else plain_context_s
        for name, seconds in (("context_s", context_s), ("plain_context_s", plain_context_s)):
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise OptionError(f"costs: {name} must be a number >= 0; got {seconds}")
        self.context_s, self.plain_context_s, self.base_context = float(context_s), float(plain_context_s), base_context
        self._pace, self._sizes_at = Pace(), list[int]()
        self.graph_sizes, self._nodes, self.learns = tuple(sorted(graph_sizes)), Nodes(nodes), learns
        self.batch_size, self.deepest = 1, deepest
        self.context_length = base_context
        """Tokens of the text of the last round, or of the request that is about to begin."""
        self._drafters = dict[str, tuple[dict[int, dict[int, float]], tuple[int, ...]]]()
        for name, (own, its_nodes) in drafters.items():
            # Where it is the same table, what corrects one corrects the other.
            table = self._draft if own == draft_s else cost_table.checked(f"draft_s of {name}", own, may_be_zero=True)
            self._drafters[name] = table, tuple(its_nodes)
        self.whole: WholeCost | None = None
        """What rounds of one request cost that run as one, where any do."""
        self.num_waiting = 0
        """Requests that wait for the place of one that ends."""
        self.catch_up_s = 0.0
        """Seconds of late that a first draft after a rest took beyond the usual, above all to read the text that was missed."""
        self.read_s = 0.0
        """Seconds of late in which the drafter read a token of a prompt; 0 until it was measured."""
        self._watch = RoundWatch()
        self._tail_s = {False: 0.0, True: 0.0}  # what follows rounds without and with a draft
        # A size that was measured is that of the graph it was padded to.
        self._verify = {one: {self._padded(count): s for count, s in row.items()} for one, row in self._verify.items()}
        for row in self._verify.values():
            cost_table.make_isotonic(row)

    @classmethod
    def linear(cls, *, plain: float, node: float, draft: float, learns: bool = False) -> "CostModel":
        """A table for one request: `plain` for a plain round, `node` more per drafted node, `draft` per drafted level."""
        return cls(
            verify_s={1: {0: plain, 64: plain + 64 * node}},
            draft_s={1: {0: 0.0, 64: 64 * draft}},
            base_context=0,
            learns=learns,
        )

    @staticmethod
    def fitted(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
        """Entries of a table by size from rounds that took turns; see `monge.control.cost_fit`."""
        return fitted(samples)

    def within(self, window: int) -> int:
        """The window, or the depth of the deepest draft, beyond which none costs or brings more."""
        return window if self.deepest is None else min(window, max(1, self.deepest))

    @property
    def nodes(self) -> tuple[int, ...]:
        """Drafted nodes by depth of the plan, as far as they are known."""
        return self._nodes.counts

    @property
    def num_rounds(self) -> int:
        """Finished rounds that it was told of."""
        return self._watch.num_rounds

    @property
    def wants_plain(self) -> bool:
        """Whether it is time for some plain rounds in a row, as nobody knows what they cost by now."""
        return self.learns and self._watch.wants_plain

    def verify_s(self, num_nodes: int, batch_size: int = 1, context_length: int | None = None) -> float:
        """Seconds of a round without its drafting."""
        base = cost_table.interpolated(self._verify, batch_size, self._padded(num_nodes))
        return self._in_context([base], num_nodes > 0, batch_size, context_length)[0]

    def draft_s(self, depth: int, batch_size: int = 1) -> float:
        """Seconds of drafting."""
        return cost_table.interpolated(self._draft, batch_size, depth)

    def round_s(self, depth: int, batch_size: int = 1, context_length: int | None = None) -> float:
        """Seconds of a round whose plan has some depth; 0 is plain decoding."""
        if self.whole and batch_size == 1 and depth == self.whole.depth:
            return self.whole.plain_rounds * self.verify_s(0, 1, context_length)
        verify = self.verify_s(self._nodes.at(depth), batch_size, context_length)
        return verify + (self.draft_s(depth, batch_size) if depth else 0.0)

    def windows_s(self, deepest: int, batch_size: int = 1, context_length: int | None = None) -> list[float]:
        """`round_s` of the depths 0 to `deepest`: one look at the table."""
        seconds = [sum(both) for both in zip(*self.levels_s(deepest, batch_size, context_length), strict=True)]
        if self.whole and batch_size == 1 and self.whole.depth <= deepest:
            seconds[self.whole.depth] = self.whole.plain_rounds * seconds[0]
        return seconds

    def levels_s(self, deepest: int, batch_size: int = 1, context_length: int | None = None) -> tuple[list[float], list[float]]:
        """Seconds of drafting, and of all else, in rounds whose plans have the depths 0 to `deepest`: one look at the table."""
        plain, *others = cost_table.row_of(self._verify, batch_size, self._sizes(deepest))
        (plain,) = self._in_context([plain], False, batch_size, context_length)
        others = self._in_context(others, True, batch_size, context_length)
        drafting = [0.0, *cost_table.row_of(self._draft, batch_size, range(1, deepest + 1))]
        return drafting, [plain, *[one if one > plain else plain for one in others]]

    def without_drafting(self) -> "CostModel":
        """The same table, later corrections included, for chains whose drafting costs nothing."""
        free = copy(self)
        free._draft, free._nodes, free._sizes_at, free.read_s, free.whole = {1: {0: 0.0}}, Nodes(()), [], 0.0, None
        return free

    def of(self, drafter: str) -> "CostModel":
        """The same table, later corrections included, with the drafting of one drafter of a pool."""
        own = copy(self)
        own._draft, nodes = self._drafters.get(drafter, (self._draft, self.nodes))
        own._nodes, own._sizes_at, own.whole = Nodes(nodes), [], None
        return own

    def note_whole(self, depth: int, plain_rounds: float, longest_text: int = 2) -> None:
        """Rounds of one request run as one at this depth; for the arguments see `WholeCost`."""
        self.whole = WholeCost(depth, plain_rounds, longest_text)

    def note_reading(self, num_tokens: int, seconds: float) -> None:
        """The drafter has read so many tokens of prompts; a time that is no positive number is ignored."""
        if self.learns and num_tokens > 0 and 0.0 < seconds < math.inf:
            self.read_s += (_CATCH_UP_RATE if self.read_s else 1.0) * (seconds / num_tokens - self.read_s)

    def note_tail(self, drafts: bool, seconds: float) -> None:
        """What was done after a round was timed, above all by controllers that learnt from it: the next of its kind pays."""
        if 0.0 < seconds < math.inf:
            before = self._tail_s[drafts]
            self._tail_s[drafts] = before + (_TAIL_RATE if before else 1.0) * (seconds - before)

    def is_due(self, kind: RoundKind, seconds: float) -> bool:
        """Note a finished round; whether it is to be observed, since it shows what going on costs and is none of too many."""
        return self._watch.is_due(kind, seconds)

    def pass_over(self, num_rounds: int, seconds: float) -> bool:
        """Note plain rounds in the middle of a rest without observing them, if that loses nothing; see `RoundWatch`."""
        return self._watch.pass_over(num_rounds, seconds)

    def observe(self, timing: RoundTiming) -> None:
        """Correct the table by one measured round; times that are no positive numbers are ignored."""
        self.batch_size, self.context_length = timing.batch_size, timing.context_length
        if not self.learns:
            return
        rest_s = timing.rest_s + self._tail_s[timing.num_nodes > 0]
        at = timing.batch_size, timing.context_length
        predicted, plain_s = self.verify_s(timing.num_nodes, *at), self.verify_s(0, *at)
        is_cold = timing.depth > 0 and (self._watch.has_rested or self._watch.has_switched)
        if not is_cold or rest_s < predicted:
            cost_table.correct(self._verify, timing.batch_size, self._padded(timing.num_nodes), rest_s, predicted)
            dearer = self._pace.learn(timing.num_nodes > 0, *at, rest_s, predicted)
            if dearer != 1.0:
                for own in {id(one): one for one, _ in ((self._draft, ()), *self._drafters.values())}.values():
                    cost_table.scale(own, dearer)
            cost_table.make_isotonic(self._verify[timing.batch_size])  # the others went up or down as a whole
        moved = cost_table.log_ratio(self.verify_s(0, *at), plain_s, math.inf)
        self._watch.learnt(moved, is_plain=not timing.num_nodes)
        if timing.depth > 0:
            table, _ = self._drafters.get(timing.drafter or "", (self._draft, self.nodes))
            if table is self._draft and self._nodes.note(timing.depth, timing.num_nodes):
                self._sizes_at = []
            expected = cost_table.interpolated(table, timing.batch_size, timing.depth)
            if self._watch.went_on(timing.drafter):
                cost_table.correct(table, timing.batch_size, timing.depth, timing.draft_s, expected)
            elif math.isfinite(timing.draft_s):
                # After a rest a drafter first reads the text that it has missed, which is no cost of the draft.
                beyond = max(0.0, timing.draft_s - expected) + (max(0.0, rest_s - predicted) if is_cold else 0.0)
                self.catch_up_s += (_CATCH_UP_RATE if self.catch_up_s else 1.0) * (beyond - self.catch_up_s)

    def observe_whole(self, timing: RoundTiming) -> None:
        """As `observe`, of a round that ran as one: the table is one of stages."""
        self.batch_size, self.context_length = timing.batch_size, timing.context_length
        if self.learns and self.whole:
            seconds, plain_s = timing.draft_s + timing.rest_s + self._tail_s[True], self.verify_s(0, 1, timing.context_length)
            self.whole.learn(seconds, plain_s, is_cold=self._watch.has_switched, is_back=self._watch.is_back)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "verify_s": cost_table.written(self._verify),
            "draft_s": cost_table.written(self._draft),
            "context_s": self.context_s,
            "plain_context_s": self.plain_context_s,
            "base_context": self.base_context,
            "graph_sizes": list(self.graph_sizes),
            "nodes": list(self.nodes),
            "deepest": self.deepest,
            "whole": None if self.whole is None else asdict(self.whole),
            "drafters": {
                name: {"draft_s": cost_table.written(table), "nodes": list(nodes)}
                for name, (table, nodes) in self._drafters.items()
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostModel":
        """The inverse of `as_dict`."""
        drafters = {
            name: (cost_table.read(own["draft_s"]), tuple(own["nodes"])) for name, own in values.get("drafters", {}).items()
        }
        rest = {name: values[name] for name in ("context_s", "base_context", "graph_sizes", "nodes")}
        rest |= {name: values.get(name) for name in ("plain_context_s", "deepest")}
        made = cls(
            verify_s=cost_table.read(values["verify_s"]), draft_s=cost_table.read(values["draft_s"]), drafters=drafters, **rest
        )
        made.whole = WholeCost(**whole) if (whole := values.get("whole")) else None
        return made

    def _in_context(self, bases: Sequence[float], drafts: bool, batch_size: int, context_length: int | None) -> list[float]:
        """Seconds at some length of the text, of entries of the table."""
        if context_length is None:
            return list(bases)
        slope = self.context_s if drafts else self.plain_context_s
        longer = slope * batch_size * (context_length - self.base_context)
        factor = self._pace.factor(drafts, batch_size, context_length)
        return [max(base + longer, 0.1 * base) * factor for base in bases]

    def _sizes(self, deepest: int) -> list[int]:
        """Nodes that are paid for at the depths 0 to `deepest`; looked up every round, and the same every time."""
        if len(self._sizes_at) <= deepest:
            self._sizes_at = [self._padded(self._nodes.at(depth)) for depth in range(deepest + 1)]
        return self._sizes_at[: deepest + 1]

    def _padded(self, num_nodes: int) -> int:
        """Nodes that are paid for: those of the graph that the tree and its root fit in."""
        place = bisect_left(self.graph_sizes, num_nodes + 1)
        return self.graph_sizes[place] - 1 if place < len(self.graph_sizes) else num_nodes

"""Rules over single characters, in the notation of Lark, with the terminals that leave texts as they are.

A lexer takes the longest terminal and never goes back. Characters are safe terminals, because no
character begins another. Masks are cheaper where a run of a class, such as the letters of a string,
is a single terminal. A run is safe where no text that may follow a shorter run can also be a part
of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

LAST_CHARACTER: Final = 0x10FFFF
HALVES: Final = range(0xD800, 0xE000)
"""Halves of pairs of UTF-16, which are no characters."""
_MOST_NODES: Final = 2_000
_MOST_STEPS: Final = 200_000
"""Of the search for safe runs, which takes 0.1 s then; a grammar that needs more has none."""
_MOST_COUNTED: Final = 16
"""Most repetitions that are written out: the next class then comes only after all of them."""
_OTHERS: Final = " others"  # no name of a rule has a blank

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Characters:
    """A character of a class, which sorted ranges define."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A text of another rule."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Concatenation:
    """The texts of some items in order."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The text of any of the items."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """The texts of an item, at least `least` and at most `most` times; `None` for no bound."""

    item: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A repeated class that may become a terminal, perhaps after a character of a narrower class.

    A run in a loop is an alternative of a repetition without a bound: two such runs are a longer
    run.
    """

    item: Characters
    least: int
    most: int | None
    head: Characters | None = None
    is_in_loop: bool = False


Node = Characters | Rule | Concatenation | Choice | Repeat | _Run


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters outside of some ranges, as sorted ranges; halves of pairs are none."""
    gaps, begin = list[tuple[int, int]](), 0
    ends = (HALVES[0], HALVES[-1]), (LAST_CHARACTER + 1, LAST_CHARACTER + 1)
    for low, high in sorted([*ranges, *ends]):
        if begin < low:
            gaps.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(gaps)


def lark_of(bodies: Mapping[str, Node], first: str) -> str:
    """Return rules in the notation of Lark; the rule `first` is called `start`."""
    runs = _Runs(bodies)
    return _written(runs.bodies, first, _safe(runs.bodies, first))


class _Runs:
    """Finds the runs of rules, which `bodies` then has."""

    def __init__(self, bodies: Mapping[str, Node]) -> None:
        self._given, self._classes = bodies, dict[str, Characters | None]()
        self.bodies = dict[str, Node]()
        for name, body in bodies.items():
            self.bodies[name] = self._with_runs(body)

    def _with_runs(self, node: Node) -> Node:
        if (single := self._class(node)) is not None:
            return Characters(single.ranges)  # a place of its own
        if isinstance(node, Concatenation):
            items = list[Node]()
            for item in map(self._with_runs, node.items):
                before = items[-1] if items else None
                if (
                    isinstance(item, _Run)
                    and isinstance(before, Characters)
                    and not _overlap(before.ranges, others(item.item.ranges))
                ):
                    items[-1] = _Run(item.item, item.least, item.most, before)
                else:
                    items.append(item)
            return Concatenation(tuple(items))
        if isinstance(node, Choice):
            single, rest = self._divided(node)
            return Choice((*([single] if single else []), *map(self._with_runs, rest)))
        if isinstance(node, Repeat):
            return self._repeated(node)
        return node

    def _repeated(self, node: Repeat) -> Node:
        least, most = node.least, node.most
        if (single := self._class(node.item)) is not None:
            if most is None or most > max(least, 1):
                return _Run(single, least, most)
            if least == most <= _MOST_COUNTED:
                return Concatenation(tuple(Characters(single.ranges) for _ in range(least)))
            return Repeat(Characters(single.ranges), least, most)
        choice = node.item
        if isinstance(choice, Rule):
            choice = self._given[choice.name]
        if most is not None or least > 1 or not isinstance(choice, Choice):
            return Repeat(self._with_runs(node.item), least, most)
        single, rest = self._divided(choice)
        if single is None:
            return Repeat(self._with_runs(node.item), least, most)
        if isinstance(node.item, Rule):  # written once for all places
            name = node.item.name + _OTHERS
            if name not in self.bodies:
                self.bodies[name] = Concatenation(())  # a rule may hold itself
                self.bodies[name] = Choice(tuple(map(self._with_runs, rest)))
            rest = [Rule(name)]
        run = _Run(single, 1, None, is_in_loop=True)
        return Repeat(Choice((run, *map(self._with_runs, rest))), least, most)

    def _divided(self, choice: Choice) -> tuple[Characters | None, list[Node]]:
        """Return the class of the single-character alternatives, and the other alternatives."""
        classes = [(item, self._class(item)) for item in choice.items]
        ranges = [pair for _, single in classes if single is not None for pair in single.ranges]
        rest = [item for item, single in classes if single is None]
        return (Characters(others(others(ranges))) if ranges else None), rest

    def _class(self, node: Node) -> Characters | None:
        """Return the class of a node whose texts are single characters."""
        if isinstance(node, Characters):
            return node
        if isinstance(node, Rule) and node.name in self._given:
            if node.name not in self._classes:
                self._classes[node.name] = None  # a rule may hold itself
                self._classes[node.name] = self._class(self._given[node.name])
            return self._classes[node.name]
        if isinstance(node, Concatenation) and len(node.items) == 1:
            return self._class(node.items[0])
        if isinstance(node, Choice):
            single, rest = self._divided(node)
            return None if rest else single
        return None


def _safe(bodies: Mapping[str, Node], first: str) -> frozenset[_Run]:
    """Return the runs that are terminals.

    The places of all characters are the states of an automaton. It does not store which rule it
    came from, so it accepts more texts. A pair of states that a text can reach is a pair of ways to
    read that text. A run is safe if no way to read its next character begins another terminal.
    """
    places = _Places(bodies)
    if not places.runs or (pairs := places.pairs(first)) is None:
        return frozenset()
    safe, is_done = dict(places.runs), False
    while not is_done:
        starts = (1 << len(places.ranges)) - 1
        for inner in safe.values():
            starts &= ~(1 << inner)
        bad = [
            run
            for run, inner in safe.items()
            if any(places.meet(inner, start) for start in _bits(pairs[inner] & starts))
        ]
        for run in bad:
            del safe[run]
        is_done = not bad
    return frozenset(safe)


class _Places:
    """The places of characters in rules, and which may follow which, as sets of bits."""

    def __init__(self, bodies: Mapping[str, Node]) -> None:
        self.ranges, self._after = list[Ranges](), list[int]()
        self.runs, self._places = dict[_Run, int](), dict[Node, int]()
        self._bodies, self._rules = bodies, defaultdict[str, tuple[bool, int, int]](_nothing)
        self._is_linking = False
        for body in bodies.values():
            self._place(body)

    def pairs(self, first: str) -> list[int] | None:
        """Return for each place where its text may also be; `None` if the search takes too long."""
        if len(self.ranges) + len(self._bodies) > _MOST_NODES:
            return None
        is_done = False
        while not is_done:
            before = dict(self._rules)
            for name in reversed(tuple(self._bodies)):
                self._rules[name] = self._ends(self._bodies[name])
            is_done = before == self._rules
        self._is_linking = True
        for body in self._bodies.values():
            self._ends(body)
        pairs, num_steps = [0] * len(self.ranges), 0
        begin = self._rules[first][1]
        todo = [(place, begin) for place in _bits(begin)]
        for place, new in todo:
            pairs[place] = new
        while todo:
            place, new = todo.pop()
            for other in _bits(new):
                if not self.meet(place, other):
                    continue
                for following in _bits(self._after[place]):
                    num_steps += 1
                    more = self._after[other] & ~pairs[following]
                    if more:
                        pairs[following] |= more
                        todo.append((following, more))
                if num_steps > _MOST_STEPS:
                    return None
        return pairs

    def meet(self, one: int, other: int) -> bool:
        """Return whether a character fits at both places."""
        return one == other or _overlap(self.ranges[one], self.ranges[other])

    def _place(self, node: Node) -> None:
        if isinstance(node, (Characters, _Run)):
            self._places[node] = len(self.ranges)
            if isinstance(node, _Run):
                self.ranges += [(node.head or node.item).ranges, node.item.ranges]
                self.runs[node] = len(self.ranges) - 1
                inner = 1 << self.runs[node]
                self._after += [inner, inner]
            else:
                self.ranges.append(node.ranges)
                self._after.append(0)
        elif isinstance(node, (Concatenation, Choice)):
            for item in node.items:
                self._place(item)
        elif isinstance(node, Repeat):
            self._place(node.item)

    def _ends(self, node: Node) -> tuple[bool, int, int]:
        """Return whether a text may be empty, and the places of its first and of its last character."""
        if isinstance(node, Characters):
            place = 1 << self._places[node]
            return False, place, place
        if isinstance(node, _Run):
            place = 1 << self._places[node]
            return node.least == 0 and node.head is None, place, place | place << 1
        if isinstance(node, Rule):
            return self._rules[node.name]
        if isinstance(node, Repeat):
            is_empty, begin, end = self._ends(node.item)
            if node.most is None or node.most > 1:
                self._link(end, begin, self._loops(node))
            return is_empty or node.least == 0, begin, end
        is_empty, begin, end = isinstance(node, Concatenation), 0, 0
        for item in node.items:
            is_skipped, first, last = self._ends(item)
            if isinstance(node, Choice):
                is_empty, begin, end = is_empty or is_skipped, begin | first, end | last
                continue
            self._link(end, first)
            begin |= first if is_empty else 0
            end = last | (end if is_skipped else 0)
            is_empty = is_empty and is_skipped
        return is_empty, begin, end

    def _loops(self, node: Repeat) -> int:
        """Return the places of a run that is an alternative of the repetition, or of none."""
        item = node.item
        if isinstance(item, Choice) and isinstance(run := item.items[0], _Run) and run.is_in_loop:
            return 1 << self._places[run]
        return 0

    def _link(self, end: int, begin: int, loop: int = 0) -> None:
        if not self._is_linking:
            return
        for place in _bits(end):
            # Two runs of a loop are a longer one, which it reads at its inner place.
            is_in_loop = loop and (1 << place) & (loop | loop << 1)
            self._after[place] |= begin & ~loop if is_in_loop else begin


def _written(bodies: Mapping[str, Node], first: str, safe: frozenset[_Run]) -> str:
    names = {name: f"r{number}" for number, name in enumerate(bodies)}
    terminals = dict[str, str]()

    def terminal(pattern: str) -> str:
        return terminals.setdefault(pattern, f"C{len(terminals)}")

    def write(node: Node) -> str:
        if isinstance(node, Characters):
            return terminal(_pattern(node))
        if isinstance(node, Rule):
            return names[node.name]
        if isinstance(node, _Run):
            return write_run(node)
        if isinstance(node, Repeat):
            return f"({write(node.item)}){_braces(node.least, node.most)}"
        sign = " " if isinstance(node, Concatenation) else " | "
        return f"({sign.join(map(write, node.items))})" if node.items else '""'

    def write_run(run: _Run) -> str:
        head = _pattern(run.head) if run.head else ""
        if run not in safe:
            count = "" if run.is_in_loop else _braces(run.least, run.most)
            return f"{terminal(head) if head else ''} ({write(run.item)}){count}"
        is_skipped = run.least == 0 and not head
        count = _braces(1 if is_skipped else run.least, run.most)
        return terminal(head + _pattern(run.item) + count) + ("?" if is_skipped else "")

    lines = [f"start: {names[first]}"]
    lines += [f"{names[name]}: {write(body)}" for name, body in bodies.items()]
    return "\n".join([*lines, *(f"{name}: /{pattern}/" for pattern, name in terminals.items())])


def _pattern(one: Characters) -> str:
    ranges = (rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in one.ranges)
    return f"[{''.join(ranges)}]"


def _braces(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


def _nothing() -> tuple[bool, int, int]:
    return False, 0, 0

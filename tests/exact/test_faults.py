"""Faults at every call of a part, enumerated.

The written text keeps the target's law, or the request ends in an error. An error of the drafter
before the first draw of a round costs no request its text.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from monge.api import make_components
from monge.control.fixed import Fixed
from monge.core.errors import DrafterError
from monge.draft.model import Model
from monge.draft.shape import Shape
from monge.draft.tree.registry import TREES
from monge.engine.batch import Batch
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.session import Request, Session
from monge.laws.draws import Draws, num_drawn
from monge.networks.base import NodeBlock
from monge.oracle.decoding import Case, target_law
from monge.oracle.exact_law import exact_law
from monge.oracle.tabular import RandomTable, TabularModel
from monge.verify.base import as_verifier
from monge.verify.registry import VERIFIERS
from tests.heads.toy import random_head

pytestmark = [
    pytest.mark.usefixtures("unchecked_types"),
    pytest.mark.filterwarnings("ignore:requests? .*the drafter failed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*logits are not finite:UserWarning"),
]

Text = tuple[int, ...]
EXACT = 1e-12
END = -1
"""Stands behind what a request had written when it ended in an error."""


class Fault(Exception):
    """An error that no library knows."""


@dataclass(slots=True)
class Faults:
    """Counts the calls of one kind and raises in one of them.

    Args:
        key: Part, method, and `before` or `after` its work.
        number: The call that raises, from 0.
        goes_on: Whether all later calls raise too.

    Attributes:
        is_late: Whether it raised in a call of the drafter that had drawn for a request.
    """

    key: tuple[str, str, str]
    number: int
    goes_on: bool = False
    count: int = 0
    is_late: bool = False
    _drafting: tuple[Sequence[Draws], list[int | None]] = ((), [])

    def around(self, part: str, method: str, work: Callable[..., Any], *args: Any) -> Any:
        if is_draft := (part, method) == ("drafter", "draft"):
            self._drafting = args[-1], [*map(num_drawn, args[-1])]
        self._meet(part, method, "before")
        done = work(*args)
        self._meet(part, method, "after")
        self._drafting = ((), []) if is_draft else self._drafting
        return done

    def _meet(self, *key: str) -> None:
        self.count += key == self.key
        is_due = self.count > self.number if self.goes_on else self.count == self.number + 1
        if key == self.key and is_due:
            (draws, before), self._drafting = self._drafting, ((), [])
            self.is_late |= [*map(num_drawn, draws)] != before
            raise Fault(f"call {self.count - 1} of {key}")


CALLS = {
    "target": ("open", "append", "extend", "commit", "close"),
    "draft": ("open", "append", "extend", "commit", "close"),
    "drafter": ("open", "draft", "observe", "close"),
    "builder": ("expand", "finish"),
    "verifier": ("verify_many",),
}


def faulty(name: str, part: Any, faults: Faults) -> Any:
    """The same part, whose calls may raise."""
    kind, copied = type(part), copy.copy(part)

    def guarded(method: str) -> Callable[..., Any]:
        inner = getattr(kind, method)
        return lambda self, *args: faults.around(name, method, inner.__get__(self), *args)

    methods = {"__slots__": ()} | {method: guarded(method) for method in CALLS[name]}
    object.__setattr__(copied, "__class__", type(kind.__name__, (kind,), methods))
    return copied


def faulty_components(faults: Faults, tree: str, verifier: str) -> Components:
    draft = faulty("draft", TabularModel(RandomTable(2, 23), 2), faults)
    builder = faulty("builder", TREES.parse(tree), faults)
    return Components(
        target=faulty("target", TabularModel(RandomTable(2, 11), 2), faults),
        drafter=faulty("drafter", Model(model=draft, tree=builder), faults),
        rule=faulty("verifier", as_verifier(VERIFIERS.parse(verifier)), faults),
        controller=Fixed(),
    )


def run(
    components: Components, case: Case, draws: Draws, *, isolated: bool = True
) -> tuple[Text, Session]:
    """What the loop writes up to the horizon, with `END` if it ends in an error before."""
    prompts = [*case.neighbours[: case.slot], case.prompt, *case.neighbours[case.slot :]]
    limits = {"max_new_tokens": case.max_new_tokens, "rules": case.rules}
    sessions = [
        Session(Request(prompt_ids=prompt, seed=0, **limits), row)
        for row, prompt in enumerate(prompts)
    ]
    sessions[case.slot].draws = draws
    watched, batch = sessions[case.slot], Batch(components, isolated=isolated)
    try:
        batch.join(sessions)
        while watched.finish_reason is None and watched.num_generated < case.horizon:
            batch.step()
    except Fault as fault:
        watched.fail(fault)
    text = watched.completion_ids[: case.horizon]
    has_failed = len(text) < case.horizon and watched.error is not None
    return (*text, END) if has_failed else text, watched


def excess(law: Mapping[Text, float], truth: Mapping[Text, float]) -> float:
    """By how much a beginning is written more often than under the target's law.

    Where nothing ends in an error, both laws sum to one, so that is their largest difference. Errors
    cut texts off: no beginning is written more often than under the target's law.
    """
    beginnings = {text[:size] for text in (*truth, *law) for size in range(len(text) + 1)}

    def mass(of: Mapping[Text, float], beginning: Text) -> float:
        return sum(weight for text, weight in of.items() if text[: len(beginning)] == beginning)

    return max(mass(law, text) - mass(truth, text) for text in beginnings if END not in text)


PAIRS = [
    ("chain(2)", "speculative_sampling"),
    ("chain(2)", "block"),
    ("chain(2)", "layer"),
    ("fixed_width((2, 1), 'iid')", "recursive_rejection"),
    ("fixed_width((2, 1), 'iid')", "layer('recursive_rejection')"),
    ("paths(2, 2)", "multipath_block"),
]
MORE_PAIRS = [
    ("chain(3)", "block"),
    ("fixed_width((2, 1), 'iid')", "layer('k_seq')"),
    ("fixed_width((2, 1), 'iid')", "multipath_block"),
    ("fixed_width((2, 1), 'without_replacement')", "recursive_rejection_without_replacement"),
    ("fixed_width((2, 1), 'without_replacement')", "traversal"),
]
SELECTED = ("best_first(4, 3, 2, 2)", "sample_and_match")
WHERE_IT_DRAWS = {("draft", "extend"), ("drafter", "draft"), ("builder", "expand")}
PLACES = [
    pytest.param(*pair, part, method, neighbours, marks=[pytest.mark.slow] * is_slow)
    for pair in PAIRS
    for part, methods in CALLS.items()
    for method in methods
    for neighbours in ((), ((1, 1),))
    if pair == ("chain(2)", "block") or (part, method) in WHERE_IT_DRAWS
    for is_slow in [pair[1] != "block" and bool(neighbours)]
]


def case_of(tree: str, **options: Any) -> Case:
    """Two tokens where a round has few branches, one where it has many.

    What is thrown away shows in the first.
    """
    return Case(horizon=2 if tree.startswith("chain") else 1, max_new_tokens=3, **options)


@pytest.mark.parametrize(("tree", "verifier", "part", "method", "neighbours"), PLACES)
def test_a_fault_at_any_call_keeps_the_law_or_ends_the_request(
    tree: str, verifier: str, part: str, method: str, neighbours: tuple[Text, ...]
) -> None:
    case, num_faults = case_of(tree, neighbours=neighbours), 0
    truth = target_law(TabularModel(RandomTable(2, 11), 2), case)
    for when, goes_on in (("before", False), ("before", True), ("after", False)):
        for number in count():
            fault = Faults((part, method, when), number, goes_on)
            law, num_calls = law_with(fault, case, tree, verifier)
            if num_calls <= number:
                break
            num_faults += 1
            assert excess(law, truth) < EXACT, fault
            if part in {"target", "verifier"}:
                law, _ = law_with(fault, case, tree, verifier, isolated=False)
                assert excess(law, truth) < EXACT, fault
    assert num_faults >= 3


def law_with(
    fault: Faults, case: Case, tree: str, verifier: str, *, isolated: bool = True
) -> tuple[dict[Text, float], int]:
    """What is written with a fault, and the most calls of its kind in a branch."""
    counts = [0]

    def text(draws: Draws) -> Text:
        faults = replace(fault)
        parts = faulty_components(faults, tree, verifier)
        text, session = run(parts, case, draws, isolated=isolated)
        counts.append(faults.count)
        if fault.key[0] not in {"target", "verifier"}:  # only what has drawn ends a request
            assert isinstance(session.error, DrafterError) == faults.is_late, faults
            assert (session.error is not None) == faults.is_late, faults
        return text

    return exact_law(text), max(counts)


class Broken(TabularModel):
    """A network that cannot `read` or `embed` token 1, gives no `finite` law after it, or reads no `two` nodes at once."""

    def __init__(self, seed: int, fault: str = "") -> None:
        super().__init__(RandomTable(3, seed), 3)
        self.fault = fault

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Any:
        logits = super().extend(blocks)
        for sequence, block in blocks.items():
            is_one = [token == 1 for token in block.token_ids]
            if (self.fault == "read" and any(is_one)) or (self.fault == "two" and is_one[1:]):
                raise Fault(self.fault)
            if self.fault == "finite":
                logits[sequence][is_one] = float("nan")
        return logits

    def embed(self, token_ids: Sequence[int]) -> Any:
        if self.fault == "embed" and 1 in token_ids:
            raise Fault(self.fault)
        return super().embed(token_ids)


@dataclass(frozen=True, slots=True)
class DislikesDraws(Model):
    """A drafter that raises for what it has drawn for request 0."""

    def draft(self, contexts: Any, states: Any, plans: Any, draws: Any) -> Any:
        drafts = Model.draft(self, contexts, states, plans, draws)
        for context, draft in zip(contexts, drafts, strict=True):
            if context.request_id == 0 and 1 in draft.tree.token_ids[1:]:
                raise Fault("token 1")
        return drafts


def draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong drafter: it draws once more where it dislikes what it has drawn."""
    draft = DislikesDraws.draft

    def again(self: DislikesDraws, contexts: Any, states: Any, *rest: Any) -> Any:
        try:
            return draft(self, contexts, states, *rest)
        except Fault:
            for context in contexts:
                self.close(context)
            return Model.draft(self, contexts, self.open(contexts), *rest)

    monkeypatch.setattr(DislikesDraws, "draft", again)


def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong engine: it takes an error after a draw for one before."""
    monkeypatch.setattr("monge.engine.drafting.num_drawn", lambda _: 0)


def make_parts(kind: str, tree: str, verifier: str | None = None) -> Components:
    target, draft, options = Broken(11), Broken(23, kind), {"tree": tree, "verifier": verifier}
    if kind == "ensemble":
        return make_components(target, [draft, Broken(5, "read")], drafter=tree)
    if kind == "pool":
        draft, options["drafter"] = Broken(23, "read"), "pool('ngram(2)', 'model')"
    if kind not in {"dislikes", "shape"}:
        return make_components(target, draft, **options)
    drafter = DislikesDraws(model=draft, tree=TREES.parse(tree))
    if kind == "shape":
        drafter = Shape(target=target, head=random_head(target), tree=TREES.parse(tree))
        target.fault = "embed"
    return make_components(target, drafter=drafter, verifier=verifier)


WIDE = [pair for pair in PAIRS + MORE_PAIRS if not pair[0].startswith("chain")]
TABLE = {
    "ends": [
        *(("read", *pair, None) for pair in PAIRS + MORE_PAIRS),
        *(("two", *pair, None) for pair in WIDE),
        *(("dislikes", *pair, None) for pair in PAIRS),
        *((kind, "chain(2)", None, None) for kind in ("pool", "shape")),
        ("ensemble", "ensemble(depth=2)", None, None),
    ],
    "is exact": [
        *(("finite", *pair, None) for pair in [*PAIRS, *MORE_PAIRS, SELECTED]),
        *((kind, *SELECTED, None) for kind in ("read", "two", "dislikes")),
    ],
    "is biased": [
        *((kind, *pair, "goes_on") for kind in ("read", "dislikes") for pair in PAIRS),
        ("dislikes", "chain(2)", "block", "draws_again"),
    ],
}


@pytest.mark.parametrize(
    ("outcome", "row"), [(outcome, row) for outcome, rows in TABLE.items() for row in rows], ids=str
)
def test_faults_that_depend_on_what_was_drawn(
    outcome: str, row: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends, unless nothing is random in what was drawn; other policies are seen."""
    *parts, policy = row
    if policy is not None:
        {"goes_on": goes_on, "draws_again": draws_again}[policy](monkeypatch)
    case = case_of(parts[1], prompt=(0, 2))
    law = exact_law(lambda draws: run(make_parts(*parts), case, draws)[0])
    assert any(END in text for text in law) == (outcome == "ends")
    difference = excess(law, target_law(Broken(11), case))
    assert difference > 1e-3 if outcome == "is biased" else difference < EXACT


def test_a_batch_whose_drafter_drew_in_vain_ends_and_says_why() -> None:
    case, parts = case_of("chain(2)", neighbours=((0,),), slot=1), ("dislikes", "chain(2)", "block")
    law = exact_law(lambda draws: run(make_parts(*parts), case, draws)[0])
    assert excess(law, target_law(Broken(11), case)) < EXACT
    reason = r"requests 0, 1: the drafter failed \(Fault: token 1\) after it had drawn tokens; "
    decoder = Decoder(make_parts(*parts), max_batch_size=2)
    with pytest.raises(DrafterError, match=reason):
        decoder.generate([(0,), (0,)], max_new_tokens=40, temperature=1.0, seed=0)


@pytest.mark.parametrize(("method", "number"), [("open", 0), ("draft", 2), ("observe", 1)])
def test_an_error_before_a_draw_turns_the_drafter_off_for_the_requests_of_its_call(
    method: str, number: int
) -> None:
    fault = Faults(("drafter", method, "before"), number)
    decoder = Decoder(faulty_components(fault, "chain(2)", "block"), max_batch_size=2)
    with pytest.warns(UserWarning, match="drafter failed") as caught:
        results = decoder.generate([(0,), (1,), (1, 0)], max_new_tokens=20, temperature=1.0, seed=0)
    assert [str(warning.message) for warning in caught] == [
        f"requests 0, 1: the drafter failed (Fault: call {number} of {fault.key}); "
        "decoding goes on without it"
    ]
    has_drafts = [[record.depth > 0 for record in result.records] for result in results]
    num_drafts = 0 if method == "open" else 2
    for rounds in has_drafts[:2]:
        assert rounds == [True] * num_drafts + [False] * (len(rounds) - num_drafts)
    assert sum(has_drafts[2]) > 3, "a new request drafts again"

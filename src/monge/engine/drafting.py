"""Ask the drafter, go on without it where it fails, and say what a round made of its tree.

A drafter that raises before anything is drawn is turned off for the requests of that call: from
then on they are decoded without speculation, and a warning says so. If it raises after a draw, the
round fails: to decode on as if nothing had been drawn would bias the text.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from monge.core.context import DraftPlan
from monge.core.errors import DrafterError, MongeError
from monge.core.verdict import Verdict, VerifiedTree
from monge.draft.base import AnyDraft, Draft
from monge.engine.components import Components
from monge.engine.session import Session, catch
from monge.laws.draws import num_drawn
from monge.laws.tree import TokenTree, fixed_chain, root_only
from monge.networks.base import draft_length
from monge.requests.grammar import FORCED
from monge.requests.sampling import NodeLaws

_FORCED_PLAN: Final = DraftPlan(max_depth=16, max_nodes=16)
"""Most forced tokens of a round."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a round, once its tree is verified."""

    session: Session
    plan: DraftPlan
    draft: Draft[Any]
    laws: NodeLaws
    verdict: Verdict
    tree: VerifiedTree | None = None


def row_of(
    session: Session, plan: DraftPlan, draft: Draft[Any], laws: NodeLaws, verdict: Verdict
) -> Row:
    """Return the row of a verified tree, with what a request that keeps trees wants of it."""
    # Now, since a backend may write the next logits to the same place.
    keeps = session.request.return_trees
    tree = _verified_tree(draft.tree, laws, verdict) if keeps else None
    return Row(session, plan, draft, laws, verdict, tree)


def draft_trees(
    sessions: Sequence[Session], plans: Sequence[DraftPlan], components: Components
) -> list[AnyDraft[Any]]:
    """Return a draft for each session; one call of the drafter draws all of them.

    A session gets an empty draft if its plan is to decode without speculation. If its grammar
    forces tokens, its draft is these tokens, and the drafter is not called.

    Raises:
        DrafterError: If the drafter raises after it has drawn.
    """
    fallbacks = [_forced(session, components) or nothing(session) for session in sessions]
    plan_of = {
        session: plan
        for session, plan, draft in zip(sessions, plans, fallbacks, strict=True)
        if session.drafts and draft.drafter != FORCED and _is_asked(plan)
    }
    members = [*plan_of]
    before = [num_drawn(session.draws) for session in members]
    drafts: dict[int, AnyDraft[Any]] = {}

    def work() -> None:
        drawn = components.drafter.draft(
            [session.context for session in members],
            [session.drafter_state for session in members],
            [*plan_of.values()],
            [session.draws for session in members],
        )
        drafts.update(zip((session.request_id for session in members), drawn, strict=True))

    if members and (error := catch(work)) is not None:
        if None in before or before != [num_drawn(session.draws) for session in members]:
            raise _drawn_in_vain(members, error) from error
        drafts.clear()
        _go_on_without(members, components, error)
    pairs = zip(sessions, fallbacks, strict=True)
    return [drafts.get(session.request_id) or draft for session, draft in pairs]


def observe(rows: Sequence[Row], components: Components) -> None:
    """Let the drafter observe the verdicts of the requests that draft, which are committed already."""
    rows = [row for row in rows if row.session.drafts]
    if not rows:
        return
    contexts = [row.session.context for row in rows]
    drafts, verdicts = [row.draft for row in rows], [row.verdict for row in rows]
    ask_drafter(
        [row.session for row in rows],
        components,
        lambda: components.drafter.observe(contexts, drafts, verdicts),
    )


def ask_drafter(
    sessions: Sequence[Session],
    components: Components,
    work: Callable[[], Sequence[Any] | None],
) -> None:
    """Let the drafter work for requests, and note the states that it returns, if any."""

    def noted() -> None:
        if (states := work()) is not None:
            for session, state in zip(sessions, states, strict=True):
                session.drafter_state = state

    if (error := catch(noted)) is not None:
        _go_on_without(sessions, components, error)


def _go_on_without(sessions: Sequence[Session], components: Components, error: Exception) -> None:
    """Decode requests without the drafter from here on, and warn once."""
    for session in sessions:
        session.drafts, session.drafter_state = False, None
        catch(partial(components.drafter.close, session.context))
    warnings.warn(f"{_failure(sessions, error)}; decoding goes on without it", stacklevel=2)


def close_drafter(session: Session, components: Components) -> None:
    """Tell the drafter that a request has ended.

    Its text is written, so what the drafter raises is a warning.
    """
    error = catch(lambda: components.drafter.close(session.context))
    if error is not None and session.error is None:
        warnings.warn(
            f"request {session.request_id}: the drafter failed to forget it "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )


def nothing(session: Session) -> Draft[Any]:
    """Return a draft without candidates, which leaves the drafter's state as it is."""
    return Draft(root_only(session.context.token_ids[-1]), session.drafter_state)


def _forced(session: Session, components: Components) -> Draft[Any] | None:
    """Return a draft of the tokens that the grammar forces next, if any: a function of the text alone."""
    if session.grammar is None or not (session.drafts and components.takes_forced):
        return None
    plan = session.limit(_FORCED_PLAN, draft_length(components.target))
    tokens = session.grammar.forced(min(plan.depth(16), plan.nodes(16)))
    tree = fixed_chain(session.context.token_ids[-1], tokens)
    return Draft(tree, session.drafter_state, drafter=FORCED) if tokens else None


def _verified_tree(tree: TokenTree, laws: NodeLaws, verdict: Verdict) -> VerifiedTree:
    """Return a verified tree with the probabilities of its tokens; nothing is drawn for that."""
    nodes = range(1, tree.num_nodes)
    target = [_target_prob(laws, tree.parents[node], tree.token_ids[node]) for node in nodes]
    draft = [_draft_prob(tree, node) for node in nodes]
    last = verdict.path[-1] if verdict.path else 0
    return VerifiedTree(
        token_ids=tree.token_ids,
        parents=tree.parents,
        target_probs=(None, *target),
        draft_probs=(None, *draft),
        path=verdict.path,
        next_prob=_target_prob(laws, last, verdict.next_token),
    )


def _target_prob(laws: NodeLaws, node: int, token: int) -> float | None:
    try:
        return laws[node].prob(token)
    except MongeError:  # a processor, or logits, at a node that the verifier did not look at
        return None


def _draft_prob(tree: TokenTree, node: int) -> float | None:
    parent = tree.parents[node]
    proposal = tree.proposals[parent]
    place = tree.candidates[parent].index(node) - len(proposal.fixed_ids)
    laws = proposal.draft_laws
    return laws[place].prob(tree.token_ids[node]) if 0 <= place < len(laws) else None


def _drawn_in_vain(sessions: Sequence[Session], error: Exception) -> DrafterError:
    return DrafterError(
        f"{_failure(sessions, error)} after it had drawn tokens; continuing without them would bias "
        "the text, so the requests of this round end here. A drafter may raise before its first draw"
    )


def _failure(sessions: Sequence[Session], error: Exception) -> str:
    names = ", ".join(str(session.request_id) for session in sessions)
    whose = "request" if len(sessions) == 1 else "requests"
    return f"{whose} {names}: the drafter failed ({type(error).__name__}: {error})"


def _is_asked(plan: DraftPlan) -> bool:
    """Return whether a plan needs the drafter; a plan of a pool may need only lookups."""
    return plan.max_depth != 0 or bool(plan.model_free_depth) or plan.drafter is not None

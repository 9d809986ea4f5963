"""Requests of `price` whose drafters are a lookup and a draft model, round by round."""

from monge.control.price import Price
from monge.control.price_request import Request
from monge.core.context import DraftPlan
from monge.core.selection import Hindsight, Member
from tests.control.scripts import chain_round, draws

MEMBERS = (
    Member(name="ngram", max_depth=8, runs_network=False),
    Member(name="model", max_depth=8, runs_network=True),
)


def follow(
    controller: Price, state: Request, rounds: int, *, found: bool, looked: int, modelled: int, context: int = 40
) -> tuple[list[DraftPlan], Request]:
    """Plans and state after rounds in which a lookup finds something or not, and so many tokens of either are accepted.

    What a lookup is kept from is followed: it would have had as many accepted.
    """
    plans: list[DraftPlan] = []
    for _ in range(rounds):
        plan = controller.plan(state, draws())
        plans.append(plan)
        hindsight: tuple[Hindsight, ...] = ()
        if found and plan.for_lookups.depth(8) > 0:
            depth, name, accepted = plan.for_lookups.depth(8), "ngram", looked
        else:
            depth, name, accepted = plan.depth(3), "model" if plan.depth(3) else None, modelled
            if found and plan.follows:
                factors = (1.0,) * min(looked, 8) + (() if looked >= 8 else (0.0,))
                hindsight = (Hindsight(drafter="ngram", position=context, num_nodes=8, factors=factors),)
        record = chain_round(depth, min(accepted, depth), plan=plan, drafter=name, context_length=context, hindsight=hindsight)
        context += len(record.token_ids)
        state = controller.update(state, record)
    return plans, state

"""Requests of a host that passes texts without ids; a request is recognised by its text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from monge.core.context import Context, DraftPlan
from monge.core.draws import RequestDraws
from monge.core.verdict import StepRecord, Verdict
from monge.draft.base import Draft

PATIENCE: Final = 16
"""Steps for which a request that is not scheduled is remembered.

A few are preempted or wait, the others have ended.
"""
_TAIL: Final = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step for a row's draft."""

    draft: Draft[Any]
    verdict: Verdict
    record: StepRecord


@dataclass(slots=True, eq=False)
class HostRow:
    """One request.

    Args:
        context: Context for drafters.
        draws: Randomness of the request.
        text: Text by which it is recognised.
        drafter_state: State of the drafter.
        controller_state: State of the controller.
        plan: Plan of the last step.
        draft: Proposal of the last step.
        last_step: Last step with this request.
    """

    context: Context
    draws: RequestDraws
    text: np.ndarray
    drafter_state: Any
    controller_state: Any
    plan: DraftPlan = DraftPlan(max_depth=0)
    draft: Draft[Any] | None = None
    last_step: int = 0

    @property
    def draft_tokens(self) -> list[int]:
        """The proposed chain."""
        return [] if self.draft is None else list(self.draft.tree.token_ids[1:])

    def commit(self, token_ids: tuple[int, ...], *, batch_size: int) -> Outcome:
        """Record the tokens that the host committed: accepted tokens, then its own token."""
        assert self.draft is not None
        drafted, room = self.draft_tokens, len(token_ids) - 1
        accepted = 0  # the host may have cut the draft, so its length says nothing
        while accepted < min(room, len(drafted)) and drafted[accepted] == token_ids[accepted]:
            accepted += 1
        kind = "bonus" if accepted == len(drafted) else "correction"
        examined = (1,) * min(accepted + 1, len(drafted))
        path = tuple(range(1, accepted + 1))
        verdict = Verdict(path=path, next_token=token_ids[-1], next_kind=kind, examined=examined)
        record = StepRecord(
            plan=self.plan,
            num_nodes=len(drafted),
            depth=len(drafted),
            num_accepted=accepted,
            examined=examined,
            next_kind=kind,
            token_ids=token_ids,
            batch_size=batch_size,
            context_length=len(self.context.token_ids),
            drafter=self.draft.drafter,
        )
        outcome = Outcome(self.draft, verdict, record)
        self.context, self.draft = self.context.append(token_ids), None
        return outcome


class Rows:
    """Recent requests by text.

    The host reorders rows between steps and passes only texts.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bytes], list[HostRow]] = {}
        self._step = 0
        self._count = 0

    def new_number(self) -> int:
        """A new request id."""
        self._count += 1
        return self._count

    def put(self, row: HostRow) -> None:
        """Store a row until its text has grown."""
        row.last_step = self._step
        self._waiting.setdefault(_key(row.text), []).append(row)

    def take(self, text: np.ndarray) -> HostRow | None:
        """Remove and return a row with this text, or `None`. Rows with equal texts are interchangeable."""
        found = self._waiting.get(_key(text), [])
        for place, row in enumerate(found):
            if np.array_equal(row.text, text):
                return found.pop(place)
        return None

    def forgotten(self) -> Iterator[HostRow]:
        """End the step; drop and return rows that have not been seen recently."""
        self._step += 1
        for key, rows in list(self._waiting.items()):
            old = [row for row in rows if self._step - row.last_step > PATIENCE]
            kept = [row for row in rows if self._step - row.last_step <= PATIENCE]
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]
            yield from old

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))


def _key(text: np.ndarray) -> tuple[int, bytes]:
    return len(text), text[-_TAIL:].tobytes()

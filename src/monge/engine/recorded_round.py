"""Whole rounds on a GPU: recorded once, repeated as one, and the host waits once for what came of each."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from monge.core.devices import sent
from monge.engine.cache import TreeCache
from monge.engine.hf import HfTreeModel
from monge.engine.recorded import RecordedStep, Recorder, Recording
from monge.engine.round_module import Round
from monge.engine.whole_round import RoundInputs
from monge.verify.base import ChainDecision

_LONGEST_TEXT: Final = 2  # every length is a recording of its own, and these two are usual
_MOST: Final = 32  # recordings that are kept: a few for every pair of rows in use


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the two caches lie: what is recorded for one place does not serve another."""

    draft: object
    target: object

    @classmethod
    def of(cls, inputs: RoundInputs) -> "_Place":
        return cls(inputs.draft.layout, inputs.target.layout)


class RecordedRound:
    """Rounds that are recorded for every number of unread tokens and pair of rows when they first come; a `RoundProgram`.

    As with recorded steps, all columns are attended to behind a mask, and when a cache moves, rounds are recorded anew.

    Args:
        module: The round.
        recorder: Records it.
        device: Where both networks lie.
    """

    longest_text = _LONGEST_TEXT

    def __init__(self, module: Round, recorder: Recorder, device: torch.device) -> None:
        self._module, self._recorder, self._device = module, recorder, device
        self._place: _Place | None = None
        self._recordings: OrderedDict[tuple[int, int, int], Recording] = OrderedDict()

    def __call__(self, inputs: RoundInputs) -> tuple[list[int], Tensor]:
        if (place := _Place.of(inputs)) != self._place:
            self._recordings.clear()
            self._place = place
        given = (
            torch.tensor([inputs.text]),
            torch.tensor([inputs.end]),
            torch.tensor(inputs.uniforms, dtype=torch.float64),
            torch.tensor([inputs.temperature], dtype=torch.float64),
        )
        key = inputs.draft.rows.start, inputs.target.rows.start, len(inputs.text)
        with torch.inference_mode():
            if key not in self._recordings:
                self._recordings[key] = self._recorded(given, inputs.draft, inputs.target)
                if len(self._recordings) > _MOST:
                    self._recordings.popitem(last=False)
            self._recordings.move_to_end(key)
            numbers, laws, _ = self._recordings[key].run(given)
            return numbers.tolist(), laws

    def _recorded(self, given: tuple[Tensor, ...], draft: TreeCache, target: TreeCache) -> Recording:
        text, end, uniforms, temperature = (sent(tensor, self._device) for tensor in given)
        columns = [torch.arange(cache.capacity, device=self._device) for cache in (draft, target)]
        kept = draft.kept(), target.kept()
        work = lambda: self._module(text, (end, *columns), (uniforms, temperature), *kept)  # noqa: E731
        repeat, outputs = self._recorder.record(work)
        return Recording((text, end, uniforms, temperature), (), repeat, outputs)


def record_rounds(
    target: HfTreeModel, draft: HfTreeModel, depth: int, decision: ChainDecision, recorder: Recorder
) -> dict[bool, RecordedRound] | None:
    """Greedy rounds (`True`) and sampled ones, to be recorded; `None` where the networks' steps are not.

    Args:
        target: The target.
        draft: The draft model.
        depth: Tokens of the chain.
        decision: The verifier's.
        recorder: Records on the device where both lie.
    """
    drafts, scores = draft.step, target.step
    if (
        not isinstance(drafts, RecordedStep)
        or not isinstance(scores, RecordedStep)
        or draft.network.device != target.network.device
    ):
        return None
    specs = drafts.spec, scores.spec
    return {
        is_greedy: RecordedRound(
            Round(drafts.module, scores.module, specs, depth, decision, is_greedy=is_greedy), recorder, target.network.device
        )
        for is_greedy in (True, False)
    }

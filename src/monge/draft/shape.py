"""A SHAPE head as a drafter: no draft model, only the target's own hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.parts import built_in
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import DelegatingDrafter
from monge.draft.growth import check_top_k, tree_capabilities
from monge.draft.head_run import (
    HeadRun,
    Pairs,
    RunDrafter,
    TargetEnds,
    check_shows_states,
    known,
    rows_of,
)
from monge.draft.tree.base import ByRequest, TreeBuilder
from monge.draft.tree.best_first import BestFirst
from monge.draft.tree.fixed_width import Chain
from monge.heads.shape.checkpoint import load_head
from monge.heads.shape.head import FirstStep, LaterStep, ShapeHead
from monge.laws.levels import DrawnTrees, RootDraws, draw_levels
from monge.networks.base import FeatureModel, ModuleForward, NodeBlock, SequenceModel

_DEFAULT_TREE: Final = ByRequest(BestFirst(num_nodes=3, depth=1, width=3, beam=1), Chain(depth=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(DelegatingDrafter[None]):
    """Predict the target's next hidden states and read them with its own output layer.

    The target's pass over a round's tree leaves the hidden state of the last accepted token behind.
    From it and the token after it, the head predicts the states of the coming steps; their laws
    fill the tree, level by level. No second network reads the text. A request without a hidden
    state (a prompt of a single token) drafts nothing in its first round.

    Args:
        target: The target, which must show its hidden states and keeps the last states; `None` for
            that of `monge.load`.
        head: The head, or its folder; `None` takes the head that ships for the built-in target.
        tree: Shape of the tree and how children are drawn; no deeper than the head's steps. By
            default the three most probable tokens for greedy requests and a chain of two for
            sampled requests. Every further level costs as much as the first, and is reached less
            often.
        rules: See `Model`.
        top_k: See `Model`.

    Raises:
        OptionError: If the target shows no hidden states, or the head is for another target.
        ModelLoadError: If the head cannot be read.

    Reference:
        SHAPE, OpenReview FEttCBv3Ny; see `monge.heads.shape`. The branch is that of Hydra, arXiv
        2402.05109.
    """

    target: SequenceModel | None = field(default=None, repr=False)
    tree: TreeBuilder = _DEFAULT_TREE
    head: ShapeHead | str | Path | None = None
    rules: SamplingRules | None = None
    top_k: int | None = None
    _drafter: RunDrafter | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.target is None:
            return
        target = check_shows_states("shape", self.target)
        check_top_k(self.top_k)
        head = self.head
        if not isinstance(head, ShapeHead):
            head = load_head(head or built_in("shape"))
        head.check(target)
        ends = TargetEnds(target)
        # Predictions of a float16 or bfloat16 target are made in float32 and read in the target's
        # own type.
        dtype = torch.float64 if ends.dtype == torch.float64 else torch.float32
        head = head.to(device=ends.device, dtype=dtype).eval()
        drafter = RunDrafter(
            run=ShapeRun(head, target, ends),
            states=target.watch((target.num_layers,), only_last=True),
            declared=tree_capabilities(
                self.tree.limits,
                max_depth=head.predictor.num_steps,
                num_parameters=head.num_parameters,
                num_bytes=head.num_bytes,
                reads_states=True,
            ),
            tree=self.tree,
            rules=self.rules,
            top_k=self.top_k,
            network="shape head",
        )
        object.__setattr__(self, "_drafter", drafter)


@dataclass(slots=True)
class _ShapeText:
    """The state of a text.

    Args:
        last: The target's hidden state at the second to last token.
        start: The predictor's computation on that state and the root, shared by all steps.
        root: The state predicted at the root.
        states: The states predicted at the nodes read so far.
        depths: Depths of these nodes.
    """

    last: Tensor | None = None
    start: Tensor | None = None
    root: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class ShapeRun(HeadRun[_ShapeText]):
    """Runs a `ShapeHead`: a predicted state and a token give the next state.

    Args:
        target: The target, whose backend runs the steps if it runs modules.
    """

    def __init__(self, head: ShapeHead, target: FeatureModel, ends: TargetEnds) -> None:
        super().__init__()
        self._head, self._ends, self._dtype = head, ends, head.probe.dtype
        self._steps = _forwards(head, target)
        self._temperatures = tuple(head.temperatures.tolist())
        with torch.inference_mode():
            # What takes long the first time is done before anybody waits.
            ends.unembed(head.probe[:1])

    def open(self, request: int) -> None:
        self._texts[request] = _ShapeText()

    def knows(self, request: int) -> bool:
        return self._texts[request].last is not None

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        for request, row_pairs in pairs.items():
            self._texts[request].last = row_pairs.features[-1:].to(self._dtype)

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one vocab"]]:
        last = rows_of([known(self._texts[request].last) for request in roots])
        start, predicted = self._steps[0](last, self._embedded(list(roots.values())))
        for request, start_state, state in zip(
            roots, start.split(1), predicted.split(1), strict=True
        ):
            self._texts[request].start, self._texts[request].root = start_state, state
        return dict(zip(roots, self._logits(1, predicted).split(1), strict=True))

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        # Nodes of one depth share one prediction unless the head looks at branches.
        branched = self._head.predictor.is_branched
        start, previous, tokens, counts, number = [], [], [], [], 0
        for request, block in blocks.items():
            text, count = self._texts[request], len(block.token_ids) if branched else 1
            for parent in block.parents:
                text.depths.append(1 if parent < 0 else text.depths[parent] + 1)
            number = text.depths[-1] + 1
            start += [known(text.start)] * count
            previous += [
                known(text.root) if parent < 0 else text.states[parent]
                for parent in block.parents[:count]
            ]
            tokens += block.token_ids[:count]
            counts.append(count)
        (predicted,) = self._steps[number - 1](
            rows_of(start), rows_of(previous), self._embedded(tokens)
        )
        for (request, block), states in zip(blocks.items(), predicted.split(counts), strict=True):
            node_states = states.split(1)
            self._texts[request].states += (
                node_states if branched else node_states * len(block.token_ids)
            )
        logits = self._logits(number, predicted).split(counts)
        return {
            request: node_logits if branched else node_logits.expand(len(block.token_ids), -1)
            for (request, block), node_logits in zip(blocks.items(), logits, strict=True)
        }

    def draw_trees(self, draws: RootDraws) -> DrawnTrees:
        """See `LevelForward.draw`."""
        requests = list(draws.logits)
        texts = [self._texts[request] for request in requests]
        start = torch.cat([known(text.start) for text in texts])
        above = torch.stack([known(text.root) for text in texts])
        branched = self._head.predictor.is_branched

        def read(token_ids: Tensor, level: int) -> Tensor:
            nonlocal above
            if branched:
                above = above.repeat_interleave(draws.shape.widths[level], 1)
            batch, count = above.shape[:2]
            (predicted,) = self._steps[level + 1](
                start.repeat_interleave(count, 0),
                above.flatten(0, 1),
                self._embedded(token_ids[:, :count].flatten()),
            )
            above = predicted.unflatten(0, (batch, count))
            scores = self._logits(level + 2, predicted).unflatten(0, (batch, count))
            return scores if branched else scores.expand(-1, token_ids.shape[1], -1)

        drawn = draw_levels(draws.rows(requests), read)
        return DrawnTrees(requests, drawn, draws.draft_ids)

    def end(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._texts[request].states.clear()
            self._texts[request].depths.clear()

    def _logits(
        self, number: int, predicted: Float[Tensor, "nodes hidden"]
    ) -> Float[Tensor, "nodes vocab"]:
        logits, temperature = self._ends.unembed(predicted), self._temperatures[number - 1]
        return logits if temperature == 1.0 else logits / temperature

    def _embedded(self, token_ids: Sequence[int] | Int64[Tensor, " nodes"]) -> Tensor:
        return self._ends.embed(token_ids).to(self._dtype)


def _forwards(head: ShapeHead, target: FeatureModel) -> tuple[ModuleForward, ...]:
    """Return the head's steps, run by the target's backend."""
    state, first = head.probe[:1], FirstStep(head).eval()
    later = [LaterStep(head, number).eval() for number in range(2, head.predictor.num_steps + 1)]
    with torch.inference_mode():
        start, _ = first(state, state)
    return (
        target.module_forward(first, [state, state]),
        *(target.module_forward(step, [start, state, state]) for step in later),
    )

"""A SHAPE head as a drafter: no draft model, only the target's own hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.model import FeatureModel, Forward, ModuleHost, SequenceModel, WatchedStates
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import Capabilities, Draft, StatelessDrafter
from monge.draft.growth import Growth, LevelReader, check_top_k, draft_rules, grow_together
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.best_first import BestFirst
from monge.draft.tree.by_request import ByRequest
from monge.draft.tree.chain import Chain
from monge.heads.shape.checkpoint import built_in_head, load_head
from monge.heads.shape.head import ShapeHead
from monge.heads.shape.steps import FirstStep, LaterStep

_DEFAULT_TREE: Final = ByRequest(BestFirst(num_nodes=3, depth=1, width=3, beam=1), Chain(depth=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDrafter(StatelessDrafter):
    """Predict the target's next hidden states and read them with its own output layer.

    The target's pass over a round's tree leaves the hidden state of the last accepted token behind.
    From it and the token after it, the head predicts the states of the coming steps; their laws
    fill the tree, level by level. Nothing is read by a second network, and nothing is kept between
    rounds but one vector, by the target. A request whose last state is not known yet (a prompt of
    one token) drafts nothing in its first round.

    Args:
        target: The target, which must show its hidden states; it is asked to keep the last ones
            from now on.
        head: The head, or its folder; `None` takes the one that ships for the built-in target.
        tree: Shape of the tree and how children are drawn; no deeper than the head's steps. By
            default the three most probable tokens for greedy requests and a chain of two for
            sampled ones, since every further level costs what the first one does and is reached
            less often.
        rules: Sampling rules of the draft law; `None` drafts under the request's own. Trees of the
            most probable tokens draw nothing and only rank, so they are built from the law at
            temperature 1.
        top_k: Draft from this number of the head's most probable tokens, renormalised; the declared
            law is the truncated one.

    Raises:
        OptionError: If the target shows no hidden states, or the head is for another one.
        ModelLoadError: If the head cannot be read.

    Reference:
        SHAPE, OpenReview FEttCBv3Ny; see `monge.heads.shape`.
    """

    target: SequenceModel
    tree: TreeBuilder = _DEFAULT_TREE
    head: ShapeHead | str | Path | None = None
    rules: SamplingRules | None = None
    top_k: int | None = None
    _model: FeatureModel = field(init=False, repr=False, compare=False)
    _states: WatchedStates = field(init=False, repr=False, compare=False)
    _head: ShapeHead = field(init=False, repr=False, compare=False)
    _kind: Tensor = field(init=False, repr=False, compare=False)
    _steps: tuple[Forward, ...] = field(init=False, repr=False, compare=False)
    _temperatures: tuple[float, ...] = field(init=False, repr=False, compare=False)
    # Numbers and bytes, counted once.
    _size: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.target, FeatureModel):
            raise OptionError(
                "drafter 'shape' needs a target that shows its hidden states; "
                f"{type(self.target).__name__} does not; use "
                "drafter='model' or 'ngram'"
            )
        check_top_k(self.top_k)
        head = (
            self.head
            if isinstance(self.head, ShapeHead)
            else load_head(self.head or built_in_head())
        )
        head.check(self.target)
        kind = self.target.embed((0,))
        # Predictions of a float16 or bfloat16 target are made in float32 and read in the target's
        # own type.
        head = head.to(
            device=kind.device,
            dtype=torch.float64 if kind.dtype == torch.float64 else torch.float32,
        ).eval()
        states = self.target.watch((self.target.num_layers,), only_last=True)
        made = {
            "_model": self.target,
            "_states": states,
            "_head": head,
            "_kind": kind,
            "_steps": _steps_beside(self.target, head),
        }
        made |= {
            "_temperatures": tuple(head.temperatures.tolist()),
            "_size": (head.num_parameters, head.num_bytes),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def capabilities(self) -> Capabilities:
        limits = self.tree.limits
        return Capabilities(
            proposes=limits.proposes,
            max_width=limits.max_width,
            max_depth=min(limits.max_depth, self._head.predictor.num_steps),
            needs_trees=limits.max_width > 1,
            num_parameters=self._size[0],
            num_bytes=self._size[1],
            reads_states=True,
        )

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[None],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[None]]:
        rows = [
            Growth(
                context=context,
                plan=plan,
                draws=row_draws,
                builder=(builder := self.tree.under(context.rules)),
                rules=draft_rules(builder, context.rules, self.rules, self.top_k),
                network="shape head",
            )
            for context, plan, row_draws in zip(contexts, plans, draws, strict=True)
        ]
        drafting = [row for row in rows if row.may_draft]
        known = [
            (row, state) for row in drafting if (state := self._last_state(row.context)) is not None
        ]
        with torch.inference_mode():
            self._grow([row for row, _ in known], [state for _, state in known])
        return [Draft(row.finish(), None, row.token_probs, error=row.error) for row in rows]

    def close(self, context: Context) -> None:
        del context  # the hidden states are the target's, which forgets them with its sequence

    def _last_state(self, context: Context) -> Tensor | None:
        """The target's hidden state after the last token but one; `None` until it has been seen."""
        features: Tensor | None = self._states.take(context.request_id)
        return None if features is None else features.to(self._head.probe.dtype)

    def _grow(self, growths: Sequence[Growth], states: Sequence[Tensor]) -> None:
        if not growths:
            return
        known = self._embedded([growth.context.token_ids[-1] for growth in growths])
        start, predicted = self._steps[0](_rows_of(states), known)
        logits = self._logits(1, predicted).split(1)
        parts = zip(growths, start.split(1), predicted.split(1), strict=True)
        rows = {growth.request_id: _Row(growth, one, {0: state}) for growth, one, state in parts}
        reader = LevelReader(
            read=lambda level: self._level([rows[growth.request_id] for growth in level]),
            # A prediction is a function of those above it, which are kept by node.
            restore=lambda _: None,
            max_depth=self._head.predictor.num_steps,
        )
        grow_together(growths, dict(zip(rows, logits, strict=True)), reader)

    def _level(self, rows: Sequence["_Row"]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        """Logits at every row's frontier.

        Nodes of one depth share one prediction unless the head looks at branches.
        """
        branched, first = self._head.predictor.is_branched, rows[0].growth
        number = first.tree.depths[first.frontier[0]] + 1
        nodes = [row.growth.frontier if branched else row.growth.frontier[:1] for row in rows]
        counts = [len(own) for own in nodes]
        places = [(row, node) for row, own in zip(rows, nodes, strict=True) for node in own]
        start = _rows_of([row.start for row, _ in places])
        previous = _rows_of([row.states[row.growth.tree.parents[node]] for row, node in places])
        last = self._embedded([row.growth.tree.token_ids[node] for row, node in places])
        (predicted,) = self._steps[number - 1](start, previous, last)
        for row, own, states in zip(rows, nodes, predicted.split(counts), strict=True):
            shared = own if branched else row.growth.frontier
            row.states |= {
                node: states[index : index + 1] if branched else states
                for index, node in enumerate(shared)
            }
        logits = self._logits(number, predicted).split(counts)
        return {
            row.growth.request_id: one if branched else one.expand(len(row.growth.frontier), -1)
            for row, one in zip(rows, logits, strict=True)
        }

    def _logits(
        self, number: int, predicted: Float[Tensor, "nodes hidden"]
    ) -> Float[Tensor, "nodes vocab"]:
        logits, temperature = (
            self._model.unembed(predicted.to(self._kind.dtype)),
            self._temperatures[number - 1],
        )
        return logits if temperature == 1.0 else logits / temperature

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        return self._model.embed(token_ids).to(self._head.probe.dtype)


@dataclass(slots=True)
class _Row:
    """One request while its tree grows.

    Args:
        growth: The tree.
        start: What the predictor makes of the last true state and the root.
        states: Predicted state at every node whose children were looked at; -1 has the last true
            one.
    """

    growth: Growth
    start: Tensor
    states: dict[int, Tensor]


def _steps_beside(target: FeatureModel, head: ShapeHead) -> tuple[Forward, ...]:
    """The head's steps, run by the target's backend where it runs more than the target."""
    state, first = head.probe[:1], FirstStep(head).eval()
    with torch.inference_mode():
        start, _ = first(state, state)
    steps: list[tuple[nn.Module, list[Tensor]]] = [(first, [state, state])]
    steps += [
        (LaterStep(head, number).eval(), [start, state, state])
        for number in range(2, head.predictor.num_steps + 1)
    ]
    run = target.module_program if isinstance(target, ModuleHost) else _as_it_is
    programs = tuple(run(step, like) for step, like in steps)
    with torch.inference_mode():
        # What takes long the first time is done before anybody waits, all of it together.
        target.unembed(state.to(target.embed((0,)).dtype))
    return programs


def _as_it_is(module: nn.Module, _like: Sequence[Tensor]) -> Forward:
    return module


def _rows_of(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

"""From a node's logits to its distribution: processors that read the text get the node's path."""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context
from monge.core.errors import ProcessorError
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits, laws_from_logits
from monge.laws.law import Law
from monge.laws.lazy_laws import can_score
from monge.laws.tree import TokenTree
from monge.networks.base import Recorder
from monge.requests.grammar import GrammarState
from monge.requests.grammar_masks import TreeMask
from monge.requests.processors import Processor, check_scores, fork, has_state, name_of

_FEW: Final = 1 << 17
"""Number of logits in which the largest are found in the time of a few calls."""
_FEW_NODES: Final = 5
"""Size of a tree of which a verifier reads most nodes."""


class NodeLaws:
    """The target's distribution after every node of a tree, computed when it is read.

    A verifier visits few nodes of many.

    A GPU computes all of them at once, since each read would be a wait. The CPU does so for greedy
    decoding and for trees of a few nodes, where one call is faster than a call for each node.

    Args:
        logits: Target logits of the nodes.
        tree: The tree.
        context: The committed text; its last token is the tree's root.
        processors: Applied in order to the node's logits, each with the committed text and the
            node's own path. Processors with state have been called for the text without its last
            token; every node calls copies of its parent's.
        grammar: Restricts the distribution of every node, after the processors; its state after the
            committed text.
        record: See `StackedLaws.record`.
        num_truncating: Number of the last processors that only take tokens out; for `kept_mass`,
            `None` if that is not requested.
    """

    def __init__(
        self,
        logits: Float[Tensor, "nodes vocab"],
        tree: TokenTree,
        context: Context,
        processors: Sequence[Processor],
        grammar: GrammarState | None = None,
        *,
        record: Recorder | None = None,
        num_truncating: int | None = None,
    ) -> None:
        # Of nodes below a law that was not finite, a device reads more than there are.
        self._logits, self._tree, self._context = logits[: tree.num_nodes], tree, context
        self._processors, self._grammar, self._record = processors, grammar, record
        self._made: dict[int, Law] = {}
        self._asked: dict[int, tuple[Processor, ...]] = {}
        self._num_truncating = num_truncating
        self._whole: dict[int, Float[Tensor, " vocab"]] = {}  # scores before truncation

    @property
    def logits(self) -> Float[Tensor, "nodes vocab"]:
        """Target logits of the nodes, before any processor and grammar."""
        return self._logits

    @cached_property
    def _mask(self) -> TreeMask | None:
        return None if self._grammar is None else TreeMask(self._grammar, self._tree)

    def __len__(self) -> int:
        return self._logits.shape[0]

    def __getitem__(self, node: int) -> Law:
        if node not in self._made:
            if not self._made and self._makes_all:
                laws = laws_from_logits(self.scores, self._context.rules)
                self._made |= {at: law for at, law in enumerate(laws) if law is not None}
            if node not in self._made:
                self._made[node] = self._make(node)
        return self._made[node]

    @property
    def is_stacked(self) -> bool:
        """True for a sampled request on a GPU: the CPU need not wait for the distributions."""
        is_sampled = self._context.rules.temperature > 0
        return is_sampled and not self._processors and not self._logits.is_cpu

    @property
    def scores(self) -> Float[Tensor, "nodes vocab"]:
        """Logits of the distributions, if there are no processors."""
        return self._logits if self._mask is None else self._mask.apply_all(self._logits)

    @property
    def rules(self) -> SamplingRules:
        """The request's rules."""
        return self._context.rules

    @property
    def record(self) -> Recorder | None:
        """See `StackedLaws`."""
        return self._record

    @property
    def _makes_all(self) -> bool:
        if self._processors:
            return False
        heat = self._context.rules.temperature
        return (
            not self._logits.is_cpu
            or (heat == 0 and self._logits.numel() <= _FEW)
            or (len(self) <= _FEW_NODES and can_score(self._logits, heat))
        )

    def explain(self, error: Exception) -> Exception:
        """Return the cause of a verifier's error: the grammar, if it allows no token at a node."""
        return error if self._mask is None else self._mask.explain(error)

    def processors_after(self, node: int) -> tuple[Processor, ...]:
        """Return the processors after their call for a node, for the text that continues there."""
        if not (self._processors and has_state(self._processors)):
            return tuple(self._processors)
        if node not in self._asked:
            self[node]
        return self._asked[node]

    def kept_mass(self, node: int) -> float:
        """Return the mass that a node's kept tokens have in its distribution before truncation."""
        rules, law = self._context.rules, self[node]
        if rules.temperature == 0 or not (rules.truncates or self._num_truncating):
            return 1.0
        scores = self._whole[node] if self._processors else self._logits[node]
        if self._mask is not None:
            scores = self._mask.apply(scores, node)
        whole = law_from_logits(scores, SamplingRules(temperature=rules.temperature))
        return min(1.0, float(whole.at(law.sparse().token_ids).sum()))

    def _make(self, node: int) -> Law:
        scores = self._scores(node) if self._processors else self._logits[node]
        if self._mask is not None:
            scores = self._mask.apply(scores, node)
        return law_from_logits(scores, self._context.rules)

    def _scores(self, node: int) -> Float[Tensor, " vocab"]:
        processors = self._processors
        if has_state(processors):
            above = processors if node == 0 else self.processors_after(self._tree.parents[node])
            self._asked[node] = processors = fork(tuple(above))
        logits = self._logits[node]
        text = self._context.token_ids + self._tree.path_tokens(node)
        token_ids = torch.tensor([text]).to(logits.device, non_blocking=True)
        # A copy, in the type in which `transformers` applies processors: some of them write into
        # what they are given.
        scores = logits[None].to(torch.float32, copy=True)
        num_whole = len(processors) - (self._num_truncating or 0)
        for number, processor in enumerate(processors):
            if number == num_whole:
                self._whole[node] = scores[0].clone()
            try:
                changed = processor(token_ids, scores)
                check_scores(processor, changed, scores)
            except Exception as error:
                name = name_of(processor)
                raise ProcessorError(f"the logits processor {name} raised {error!r}") from error
            scores = changed
        if self._num_truncating is not None:
            self._whole.setdefault(node, scores[0])
        return scores[0]

"""Check that the stated laws are the target's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from monge.audit.certificate import Arrays, law_of
from monge.audit.certify_report import CertifyReport, MismatchError
from monge.audit.plain_forward import Forward
from monge.core.errors import MongeError
from monge.core.law import Law, total_variation
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.core.tree import TokenTree

TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.25, "bfloat16": 1.0}
"""Largest difference of a logit to the float64 forward that counts as rounding, by type."""
_MASS_ROUNDING: Final = 1e-9
"""Rounding of a mass that is made again from its logits; float64 sums over a vocabulary stay below 1e-12."""


class LawCheck:
    """The laws of one request, compared with the target's. The whole text is read once.

    Recorded logits must be numbers of type `dtype`; `None` allows any.
    """

    def __init__(
        self,
        forward: Forward,
        dtype: torch.dtype | None,
        request: Mapping[str, Any],
        arrays: Arrays,
        report: CertifyReport,
    ) -> None:
        self._forward, self._dtype, self._report, self.arrays = forward, dtype, report, arrays
        self._rules = SamplingRules(**request["rules"])
        prompt, self._token_ids = tuple(request["prompt_ids"]), tuple(request["token_ids"])
        self._num_prompt, self._committed = len(prompt), Tensor()
        if self._token_ids:
            self._committed = forward((*prompt, *self._token_ids[:-1]), len(prompt) - 1)

    def check(
        self, stated: Sequence[Any], tree: TokenTree, text: tuple[int, ...]
    ) -> dict[int, Law]:
        """Check that the laws stated of nodes are the target's, up to rounding of its logits, and return them."""
        nodes = [node for node, _ in stated]
        if sorted(set(nodes)) != nodes or any(not 0 <= node < tree.num_nodes for node in nodes):
            raise MismatchError("laws", f"nodes {nodes} are not nodes of the tree, in order")
        exact = self._exact_logits(tree, nodes, text)
        laws: dict[int, Law] = {}
        for node, stored in stated:
            name = f"laws of node {node}"
            try:
                laws[node], ids, logits = self._stated(stored)
            except (MongeError, KeyError, TypeError) as error:
                raise MismatchError(name, str(error)) from error
            self._check_logits(name, ids, logits, exact[node])
            self._check_rules(name, laws[node], ids, logits, exact[node])
        return laws

    def _stated(self, stored: Mapping[str, Any]) -> tuple[Law, Tensor, Tensor]:
        """Return a stated law, its tokens and their logits."""
        logits = self.arrays.get(stored["logits"])
        if "masses" not in stored and "token" not in stored:
            return law_from_logits(logits, self._rules), torch.arange(logits.numel()), logits
        law = law_of(stored, self.arrays)
        return law, law.sparse().token_ids, logits

    def _check_logits(self, name: str, ids: Tensor, logits: Tensor, exact: Tensor) -> None:
        """Check that the logits are numbers of the target's type, near the float64 ones."""
        report = self._report
        if self._dtype is not None and not torch.equal(
            logits.to(self._dtype).to(logits.dtype), logits
        ):
            raise MismatchError(
                name,
                f"its logits are no numbers of {report.dtype}, in which the target is said "
                f"to compute, so that a tolerance of {report.tolerance:g} does not fit them",
                is_wrong=False,
            )
        if int(ids.max()) >= exact.numel() or logits.numel() != ids.numel():
            raise MismatchError(name, "its tokens are not those of the target")
        difference = _largest_difference(logits, exact[ids])
        report.logit_difference = max(report.logit_difference, difference)
        if difference > report.tolerance:
            raise MismatchError(
                name,
                f"a logit differs by {difference:.2g} from the float64 forward, which is more "
                f"than the tolerance of {report.tolerance:g}",
            )

    def _check_rules(self, name: str, law: Law, ids: Tensor, logits: Tensor, exact: Tensor) -> None:
        """Check that the law is what the sampling rules make of logits within the tolerance."""
        self._report.law_distance = max(
            self._report.law_distance, _distance(law, law_from_logits(exact, self._rules))
        )
        part = law.sparse()
        # What is cut takes its mass along, so that masses are a function of the kept logits.
        scores = logits.double() - logits.double().max()
        masses = (
            torch.softmax(scores / self._rules.temperature, 0) if part.probs.numel() > 1 else 1.0
        )
        if float((law.at(ids) - masses).abs().max()) > _MASS_ROUNDING:
            raise MismatchError(name, "its masses are not those of its logits")
        # The float64 logits, with the stated ones where they are stated.
        mixed = exact.clone()
        mixed[ids] = logits.double()
        near = law_from_logits(mixed, self._rules).sparse()
        differing = set(part.token_ids.tolist()) ^ set(near.token_ids.tolist())
        low, moved = float(mixed[part.token_ids].min()), mixed[sorted(differing)].tolist()
        slack = 2 * self._report.tolerance
        if all(abs(value - low) <= slack for value in moved) or _distance(law, near) <= slack:
            return
        raise MismatchError(name, "it keeps other tokens than the sampling rules do")

    def _exact_logits(
        self, tree: TokenTree, nodes: Sequence[int], text: tuple[int, ...]
    ) -> dict[int, Tensor]:
        """Return float64 logits at nodes of the tree, from the committed text where they lie on it."""
        start = len(text) - self._num_prompt
        ahead = self._token_ids[start:]
        logits: dict[int, Tensor] = {}
        # Deepest first: one forward serves all nodes of its path.
        for node in sorted(nodes, key=lambda node: -len(tree.path(node))):
            path = tree.path_tokens(node)
            if node in logits:
                continue
            if path == ahead[: len(path)] and start + len(path) < self._committed.shape[0]:
                logits[node] = self._committed[start + len(path)]
                continue
            rows = self._forward((*text, *path), len(text) - 1)
            on_path = zip((0, *tree.path(node)), rows, strict=True)
            logits |= {
                above: row for above, row in on_path if above in nodes and above not in logits
            }
        return logits


def _largest_difference(left: Tensor, right: Tensor) -> float:
    left, right = left.double(), right.double()
    same = left == right  # minus infinity too
    return float((left - right).abs().masked_fill(same, 0.0).nan_to_num(math.inf).max())


def _distance(left: Law, right: Law) -> float:
    return total_variation(left.sparse(), right.sparse())

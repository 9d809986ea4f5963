"""Check that the verifier keeps the target's law."""

from collections.abc import Mapping
from typing import Final

from monge.audit.certify_report import CertifyReport
from monge.audit.coupling import Coupling, Level
from monge.audit.mismatch import MismatchError
from monge.core.law import Law
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict

LAW_BOUND: Final = 1e-12
"""Largest law error that counts as rounding."""


def check_coupling(
    coupling: Coupling,
    tree: TokenTree,
    laws: Mapping[int, Law],
    verdict: Verdict,
    report: CertifyReport,
    *,
    every: int,
) -> None:
    """Check that the verifier keeps the target's law at the nodes that it visited.

    Args:
        coupling: The verifier's.
        tree: The tree of the round.
        laws: The target's laws.
        verdict: The verdict.
        report: Receives figures.
        every: One of so many nodes is enumerated.

    Raises:
        MismatchError: Naming the node.
    """
    visited = (0, *verdict.path)
    for place, node in enumerate(visited):
        if not tree.candidates[node]:
            continue
        report.num_nodes += 1
        if (report.num_nodes - 1) % every:
            continue
        levels = [
            Level(target_law=laws[at], proposal=tree.proposals[at])
            for at in visited[place : place + 3]
            if at in laws
        ]
        if not levels:
            continue
        found = coupling.error_at(levels)
        if found.error is None:
            continue
        report.num_enumerated += 1
        report.num_whole += found.is_whole
        report.law_error = max(report.law_error, found.error)
        if not found.error < LAW_BOUND:
            raise MismatchError(
                f"coupling of node {node}",
                f"the verifier {coupling.verifier.title} gives the next token another law than the "
                f"target's: law error {found.error:.2g}",
            )

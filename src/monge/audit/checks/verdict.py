"""Check that the verifier decides as recorded, and that its tokens were committed."""

from collections.abc import Mapping
from typing import Any

from monge.audit.certify_report import MismatchError, check_equal
from monge.audit.tape import Tape
from monge.core.errors import MongeError
from monge.core.law import Law
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import Verifier


def check_verdict(
    one: Mapping[str, Any],
    tree: TokenTree,
    laws: Mapping[int, Law],
    verifier: Verifier,
    tape: Tape,
) -> Verdict:
    """Check that the verifier, run again on the same tree, laws and uniforms, decides so."""
    start, stop = one["verify"]
    tape.seek(start)
    try:
        right = verifier.verify(tree, _StatedLaws(laws, tree.num_nodes), tape)
    except (MongeError, KeyError) as error:
        raise MismatchError("verdict", f"the verifier refuses the tree: {error}") from error
    stated = one["verdict"]
    for name, whose in (
        ("path", "the verifier accepts"),
        ("next_token", "the verifier draws"),
        ("next_kind", "the verifier says"),
        ("examined", "the verifier says"),
    ):
        own = tuple(stated[name]) if isinstance(stated[name], list) else stated[name]
        check_equal(f"verdict.{name}", own, getattr(right, name), whose)
    check_equal("verify", stop, tape.place, "the verifier's last uniform is")
    return right


def check_commit(
    tokens: tuple[int, ...], tree: TokenTree, verdict: Verdict, *, can_be_cut: bool
) -> None:
    """Check that the verdict's tokens were committed; the last round of a text may cut them."""
    whole = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
    check_equal("token_ids", tokens, whole[: len(tokens)], "the verdict says")
    if not tokens or (len(tokens) < len(whole) and not can_be_cut):
        raise MismatchError("token_ids", f"{len(tokens)} of the {len(whole)} tokens of the verdict")


class _StatedLaws:
    """Stated laws by node; looking at another one shows that another verifier decided."""

    def __init__(self, laws: Mapping[int, Law], num_nodes: int) -> None:
        self._laws, self._num_nodes = laws, num_nodes

    def __len__(self) -> int:
        return self._num_nodes

    def __getitem__(self, node: int) -> Law:
        if node not in self._laws:
            raise MismatchError("laws", f"the verifier looks at node {node}, whose law is missing")
        return self._laws[node]

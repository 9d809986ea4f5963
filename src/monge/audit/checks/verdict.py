"""Check that the verifier decides as recorded."""

from collections.abc import Mapping
from typing import Any

from monge.audit.mismatch import MismatchError, check_equal
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
    """Check that the verifier, run again on the same tree, laws and uniforms, decides so.

    Raises:
        MismatchError: Naming the field.
    """
    start, stop = one["verify"]
    tape.seek(start)
    try:
        right = verifier.verify(tree, StatedLaws(laws, tree.num_nodes), tape)
    except (MongeError, KeyError) as error:
        raise MismatchError("verdict", f"the verifier refuses the tree: {error}") from error
    stated = one["verdict"]
    check_equal("verdict.path", tuple(stated["path"]), right.path, "the verifier accepts")
    check_equal("verdict.next_token", stated["next_token"], right.next_token, "the verifier draws")
    check_equal("verdict.next_kind", stated["next_kind"], right.next_kind, "the verifier says")
    check_equal("verdict.examined", tuple(stated["examined"]), right.examined, "the verifier says")
    check_equal("verify", stop, tape.place, "the verifier's last uniform is")
    return right


class StatedLaws:
    """Stated laws by node; looking at another one shows that another verifier decided."""

    def __init__(self, laws: Mapping[int, Law], num_nodes: int) -> None:
        self._laws, self._num_nodes = laws, num_nodes

    def __len__(self) -> int:
        return self._num_nodes

    def __getitem__(self, node: int) -> Law:
        if node not in self._laws:
            raise MismatchError("laws", f"the verifier looks at node {node}, whose law is missing")
        return self._laws[node]

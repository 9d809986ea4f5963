"""Check that a round drew its children as declared, decided as recorded, and committed that."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from monge.audit.certificate import Arrays, tree_of, verdict_of
from monge.audit.certify_report import MismatchError, check_equal
from monge.audit.tape import Tape
from monge.core.errors import MongeError
from monge.core.law import Law
from monge.core.proposal import Arbitrary, Deterministic
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import Verifier


def check_tree(stored: Mapping[str, Any], arrays: Arrays, root: int) -> TokenTree:
    """Return the tree of a round, whose root is the last token of the text."""
    try:
        tree = tree_of(stored, arrays)
    except (MongeError, KeyError, TypeError) as error:
        raise MismatchError("tree", str(error)) from error
    check_equal("tree.tokens", tree.token_ids[0], root, "the text ends with")
    return tree


def check_draws(stored: Mapping[str, Any], tree: TokenTree, tape: Tape, length: int) -> None:
    """Check that every child of a round is what its declared proposal gives for its uniforms.

    `tape` is at the place where the round before it ended, after `length` tokens.
    """
    drawn = {tuple(entry["path"]): entry for entry in stored["draws"]}
    check_equal("start", stored["start"], tape.num_drawn, "the round before it ended at uniform")
    if len(drawn) != len(stored["draws"]):
        raise MismatchError("draws", "a node drew its children twice")
    place = tape.num_drawn
    spans = [(entry["start"], entry["stop"]) for entry in stored["draws"]]
    for start, stop in (*spans, stored["verify"]):
        if start > place:
            raise MismatchError("draws", f"uniforms {place} to {start} were left out")
        if not place <= start <= stop:
            raise MismatchError("draws", f"uniform {min(start, stop)} was used before")
        place = stop
    tape.move_to(length)
    for node, proposal in enumerate(tree.proposals):
        offered = tuple(tree.token_ids[child] for child in tree.candidates[node])
        path = tree.path_tokens(node)
        if isinstance(proposal, Deterministic | Arbitrary):
            check_equal(f"tree.candidates[{node}]", offered, proposal.token_ids, "declared are")
            continue
        if path not in drawn:
            raise MismatchError("draws", f"node {node} is declared as drawn and has no draw")
        entry = drawn.pop(path)
        tape.seek(entry["start"])
        try:
            right = proposal.draw(tape)
        except MongeError as error:
            raise MismatchError("draws", str(error)) from error
        check_equal(f"tree.candidates[{node}]", offered, right, "its uniforms give")
        check_equal("draws.tokens", tuple(entry["tokens"]), right, "the uniforms give")
        check_equal("draws.stop", entry["stop"], tape.num_drawn, "the last uniform is")
    paths = {tree.path_tokens(node) for node in range(tree.num_nodes)}
    is_pruned = any(isinstance(kind, Arbitrary) for kind in tree.proposals)
    for path in drawn:
        if path in paths and not is_pruned:
            raise MismatchError("draws", f"children after {list(path)} are not in the tree")


def check_verdict(
    stored: Mapping[str, Any],
    tree: TokenTree,
    laws: Mapping[int, Law],
    verifier: Verifier,
    tape: Tape,
) -> Verdict:
    """Check that the verifier, run again on the same tree, laws and uniforms, decides so."""
    start, stop = stored["verify"]
    tape.seek(start)
    try:
        right = verifier.verify(tree, _StatedLaws(laws, tree.num_nodes), tape)
    except (MongeError, KeyError) as error:
        raise MismatchError("verdict", f"the verifier refuses the tree: {error}") from error
    stated = verdict_of(stored["verdict"])
    for name, value in asdict(stated).items():
        check_equal(f"verdict.{name}", value, getattr(right, name), "the verifier says")
    check_equal("verify", stop, tape.num_drawn, "the verifier's last uniform is")
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

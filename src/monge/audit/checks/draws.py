"""Check that the children of a tree were drawn as declared."""

from collections.abc import Mapping
from typing import Any

from monge.audit.certificate import Arrays, tree_of
from monge.audit.certify_report import MismatchError, check_equal
from monge.audit.tape import Tape
from monge.core.errors import MongeError
from monge.core.proposal import Arbitrary, Deterministic
from monge.core.tree import TokenTree


def check_tree(stored: Mapping[str, Any], arrays: Arrays, root: int) -> TokenTree:
    """Return the tree of a round, whose root is the last token of the text."""
    try:
        tree = tree_of(stored, arrays)
    except (MongeError, KeyError, TypeError) as error:
        raise MismatchError("tree", str(error)) from error
    check_equal("tree.tokens", tree.token_ids[0], root, "the text ends with")
    return tree


def check_draws(one: Mapping[str, Any], tree: TokenTree, tape: Tape, length: int) -> None:
    """Check that every drawn child is what its declared proposal gives for its uniforms.

    Args:
        one: The round.
        tree: Its tree.
        tape: The draws, at the place where the round before it ended.
        length: Tokens before the round.
    """
    drawn = {tuple(own["path"]): own for own in one["draws"]}
    check_equal("start", one["start"], tape.place, "the round before it ended at uniform")
    if len(drawn) != len(one["draws"]):
        raise MismatchError("draws", "a node drew its children twice")
    place = tape.place
    for start, stop in [*((own["start"], own["stop"]) for own in one["draws"]), one["verify"]]:
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
        own = drawn.pop(path)
        tape.seek(own["start"])
        try:
            right = proposal.draw(tape)
        except MongeError as error:
            raise MismatchError("draws", str(error)) from error
        check_equal(f"tree.candidates[{node}]", offered, right, "its uniforms give")
        check_equal("draws.tokens", tuple(own["tokens"]), right, "the uniforms give")
        check_equal("draws.stop", own["stop"], tape.place, "the last uniform is")
    paths = {tree.path_tokens(node) for node in range(tree.num_nodes)}
    is_pruned = any(isinstance(kind, Arbitrary) for kind in tree.proposals)
    for path in drawn:
        if path in paths and not is_pruned:
            raise MismatchError("draws", f"children after {list(path)} are not in the tree")

"""Check that the tokens of the verdict were committed."""

from monge.audit.mismatch import MismatchError, check_equal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict


def check_commit(
    tokens: tuple[int, ...], tree: TokenTree, verdict: Verdict, *, can_be_cut: bool
) -> None:
    """Check that the verdict's tokens were committed; the last round of a text may cut them.

    Raises:
        MismatchError: Naming the field.
    """
    whole = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
    check_equal("token_ids", tokens, whole[: len(tokens)], "the verdict says")
    if not tokens or (len(tokens) < len(whole) and not can_be_cut):
        raise MismatchError("token_ids", f"{len(tokens)} of the {len(whole)} tokens of the verdict")

"""The draft model's cache holds the committed text, whatever the shape of the tree that was cut back to the accepted path."""

import pytest

from monge.api import make_components
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from tests.kit.tables import table

TREES = ["chain(3)", "fixed_width((3, 2), 'iid')", "fixed_width((3, 2, 1))"]
TREES += ["best_first(4, 3, 3, 3)", "best_first(6, 4, 4, 2)"]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_model_has_read_the_committed_text(tree, temperature):
    draft = table()  # the target's own laws, so that deep paths are accepted
    decoder = Decoder(make_components(table(), draft, tree=tree))
    sessions = decoder.sessions(
        [[0, 1], [2]], max_new_tokens=40, temperature=temperature, seed=3, ignore_eos=True
    )
    deepest = 0
    for session in decode(sessions, decoder.components, max_batch_size=2):
        deepest = max(deepest, session.records[-1].num_accepted)
        if session.finish_reason is None:
            read = draft.text(session.context.request_id)
            assert read == session.context.token_ids[: len(read)]
            # The new root, and a leaf that was not read.
            assert len(session.context.token_ids) - len(read) <= 2
    assert deepest >= 2

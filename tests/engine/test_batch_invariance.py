"""`batch_invariant`: a target is taken if no logit depends on what else a forward reads, and refused by name otherwise."""

import pytest
import torch

import monge
from monge.core.errors import UnsupportedModelError
from monge.engine.batch_invariance import check_batch_invariance
from monge.networks.hf_tree import HfTreeModel
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.tiny import network


def test_a_table_is_exact():
    check_batch_invariance(TabularModel(RandomTable(7, 0), 7))


class Nudged(HfTreeModel):
    """Logits of blocks of several tokens are off by one bit."""

    def extend(self, blocks):
        found = super().extend(blocks)
        several = {row: logits for row, logits in found.items() if len(logits) > 1}
        return found | {row: torch.nextafter(own, own + 1) for row, own in several.items()}


def test_logits_that_differ_by_one_bit_are_refused():
    with pytest.raises(UnsupportedModelError, match="on how many tokens.*backend='compiled'"):
        check_batch_invariance(Nudged(network("llama")))


def test_a_decoder_is_refused():
    with pytest.raises(UnsupportedModelError, match="batch_invariant"):
        monge.load(network("llama"), drafter="none", batch_invariant=True)

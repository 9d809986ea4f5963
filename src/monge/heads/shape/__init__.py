"""SHAPE: predict the hidden states of coming steps, align their law by optimal transport, read them with the target's head."""

"""Laws, proposals, trees, draws, records: the vocabulary that every other room speaks (torch only, no I/O)."""

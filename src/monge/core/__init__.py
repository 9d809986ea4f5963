"""Laws, proposals, trees, draws and records: the types that all rooms share."""

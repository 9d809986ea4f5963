"""Maps from the law of predicted states to the law of true states, one per file."""

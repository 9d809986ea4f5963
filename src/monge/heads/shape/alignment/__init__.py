"""Maps that carry the law of predicted states onto the law of true ones, one a file."""

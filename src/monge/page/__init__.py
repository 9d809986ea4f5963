"""The page on which one sees a run: its tokens, and the trees of its rounds as they were verified."""

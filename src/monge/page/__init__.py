"""The page that shows a run: its tokens, and the trees of its rounds as they were verified."""

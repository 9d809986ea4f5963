"""Replay: decode a logged text again with other parts, without the target.

Lossless speculation does not change the law of the text. A logged text with the target's laws
therefore determines what any drafter, tree, verifier and controller would have done on it.
"""

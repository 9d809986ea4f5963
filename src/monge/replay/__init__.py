"""The time machine: decode a logged text again with other parts, without the target.

Lossless speculation leaves the law of the text as it is, whatever drafts and verifies. So a text and the target's laws along
it, logged once, say what any drafter, tree, verifier and controller would have done on the way to that very text.
"""

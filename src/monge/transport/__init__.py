"""The theory in float64, slow and exact.

Problems, couplings, optima and the constructions that attain them.

Nothing here draws, times or prints. p = target law, q = draft law, K = number of candidates
(`width`).
"""

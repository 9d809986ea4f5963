"""Published rules as exact conditional laws, tuple of candidates -> law of the emitted token.

Written down from the papers, and sharing nothing with the closed forms that they check.
"""

import numpy as np

from monge.transport.closed_forms import k_seq_constants


def positive(masses):
    return np.maximum(masses, 0.0)


def emit(p, candidate_ids, steps):
    """Run `steps(candidate number, P) -> (acceptance, next P)`.

    Whatever is left emits from the last P.
    """
    law, reached = np.zeros_like(p), 1.0
    left = p
    for number, token in enumerate(candidate_ids):
        accept, left_next = steps(number, token, left)
        law[token] += reached * accept
        reached *= 1.0 - accept
        if reached == 0.0:
            return law
        left = left_next
    return law + reached * left


def norm(masses):
    return masses / masses.sum() if masses.sum() > 0.0 else masses


def recursive_rejection(p, draft_laws):
    def steps(number, token, left):
        q = draft_laws[number]
        return min(1.0, left[token] / q[token]), norm(positive(left - q))

    return lambda candidate_ids: emit(p, candidate_ids, steps)


def recursive_rejection_without_replacement(p, q):
    def law(candidate_ids):
        def steps(number, token, left):
            rest = q.copy()
            rest[list(candidate_ids[:number])] = 0.0
            rest = norm(rest)
            return min(1.0, left[token] / rest[token]), norm(positive(left - rest))

        return emit(p, candidate_ids, steps)

    return law


def k_seq(p, q, width, rho=None):
    c = k_seq_constants(p, q, width, rho)
    residual = norm(p - c.gamma * np.minimum(p / c.rho, q))

    def steps(number, token, left):
        return min(1.0, p[token] / (c.rho * q[token])), left

    return lambda candidate_ids: emit(residual, candidate_ids, steps)


def naive_tree(p, q):
    def steps(number, token, left):
        return min(1.0, p[token] / q[token]), norm(positive(p - q))

    return lambda candidate_ids: emit(p, candidate_ids[:1], steps)


def acceptance_and_error(problem, rule):
    """P(Y in t) and the largest error of the output law, by enumeration of the tuples."""
    output, accepted = np.zeros_like(problem.target), 0.0
    for candidate_ids, prob in problem.candidates:
        law = rule(candidate_ids)
        output += prob * law
        accepted += prob * law[list(set(candidate_ids))].sum()
    return accepted, np.abs(output - problem.target).max()

"""The optimal rule for top tokens and a draw beside them."""

from dataclasses import dataclass

from monge.laws.proposal import Deterministic, Mixed, Proposal
from monge.verify.speculative_sampling import SpeculativeSampling


@dataclass(frozen=True, slots=True)
class Greedy(SpeculativeSampling):
    """Single-draft step with the sampled candidate.

    The residual delivers the deterministic candidates.

    Law:
        The emitted token follows p for deterministic candidates T and draws from a law q' that
        gives T no mass (`Mixed`), and for deterministic candidates alone. With several draws the
        rule reads the first of them only: still exact, no longer optimal.

    Rule:
        With x the first draw, accept x with probability `min(1, p_x / q'_x)`; otherwise emit `y ~
        (p - q')_+ / |(p - q')_+|`. q' is zero on T, so the residual keeps all of p(T): a y in T is
        an accepted candidate. Acceptance with one draw is `p(T) + sum over i outside T of min(p_i,
        q'_i)`, the optimum for these candidates.

    Cost:
        Two look-ups; O(vocab) after the draw's rejection. Nothing is computed for the deterministic
        candidates.

    Reference:
        Greedy drafting of Hu et al., arXiv 2502.18779 (T the K - 1 most probable tokens of q, q'
        the rest of q, as the children kind `greedy_plus_one` draws them). It equals SpecHub (Sun et
        al., arXiv 2411.05289) at K = 2.
    """

    counts_hits = True
    accepts = frozenset[type[Proposal]]({Mixed, Deterministic})
    max_width = None

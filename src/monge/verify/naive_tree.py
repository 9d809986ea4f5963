"""One maximal-coupling step with the first candidate; the correction may hit another candidate."""

from dataclasses import dataclass

from monge.verify.speculative_sampling import SpeculativeSampling


@dataclass(frozen=True, slots=True)
class NaiveTree(SpeculativeSampling):
    """Single-draft step with the first candidate.

    A residual token that is another candidate is kept too.

    Law:
        The emitted token follows p for independent draws from q (`Iid`) and for deterministic
        candidates. The rule reads the first candidate only, which was drawn from q whatever the
        other candidates are.

    Rule:
        Accept X_1 with probability `min(1, p_X1 / q_X1)`; otherwise emit `y ~ res = (p - q)_+ / |(p
        - q)_+|`, which is an accepted token where it is one of the other K - 1 candidates.
        Acceptance is `beta + (1 - beta) sum_t res_t (1 - (1 - q_t)^(K - 1))`, `beta = sum_i
        min(p_i, q_i)`.

    Cost:
        Two look-ups; O(vocab) after the first candidate's rejection, whatever K is.

    Reference:
        A baseline of the delayed tree expansion paper, arXiv 2602.16994, under this name; the step
        is Algorithm 1 of Leviathan et al., arXiv 2211.17192.
    """

    counts_hits = True
    max_width = None

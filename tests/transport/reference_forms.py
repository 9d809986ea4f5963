"""References that the tests compare with: searches of subsets, closed forms and couplings that no code of the package needs."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from lab.acceptance.rearrangement import Rearrangement
from lab.acceptance.score_table import ScoreTable
from monge.core.errors import LawError, OptionError
from monge.transport.bounds import Cut, greedy_proposal
from monge.transport.candidates import CandidateLaw, TokenTuple, TransportProblem
from monge.transport.coupling import FLOW_TOLERANCE, Coupling
from monge.transport.laws import Tabular, check_fixed, check_law, check_pair
from monge.transport.random_tree import string_laws

Vector = Float64[np.ndarray, " vocab"]

MAX_SUBSET_TOKENS: Final = 20
"""Most tokens whose subsets are searched: a million of them."""


def subset_optimum(problem: TransportProblem) -> Cut:
    """Any joint law, by searching all subsets of the drafted tokens.

    Raises:
        OptionError: If more than `MAX_SUBSET_TOKENS` tokens can be drafted.
    """
    tokens = np.flatnonzero(problem.candidates.membership.any(axis=0))
    _check_searchable(tokens.size)
    bit = {token: 1 << position for position, token in enumerate(tokens.tolist())}
    contained = np.zeros(1 << tokens.size)
    for candidate_ids, prob in problem.candidates:
        contained[sum(bit[token] for token in set(candidate_ids))] += prob
    # From "exactly this set of tokens" to "a subset of this set".
    for position in range(tokens.size):
        view = contained.reshape(-1, 2, 1 << position)
        view[:, 1] += view[:, 0]
    return _smallest(problem.target, tokens, contained)


def different_drafts_optimum(
    p: Float64[np.ndarray, " vocab"], draft_laws: Sequence[Float64[np.ndarray, " vocab"]]
) -> Cut:
    """Independent candidates from different draft laws.

    Q(H) is the product of q_k(H), and no sorted prefix need be minimal.

    Raises:
        OptionError: If more than `MAX_SUBSET_TOKENS` tokens can be drafted.
    """
    p = check_law("target", p)
    laws = [check_law(f"draft law {index}", law) for index, law in enumerate(draft_laws)]
    for law in laws:
        check_pair(p, law)
    tokens = np.flatnonzero(np.any(laws, axis=0))
    _check_searchable(tokens.size)
    contained = np.prod([_subset_sums(law[tokens]) for law in laws], axis=0)
    return _smallest(p, tokens, contained)


def _smallest(
    p: Float64[np.ndarray, " vocab"], tokens: Int64[np.ndarray, " n"], contained: np.ndarray
) -> Cut:
    values = 1.0 + (_subset_sums(p[tokens]) - contained)
    subset = int(values.argmin())
    members = [token for position, token in enumerate(tokens.tolist()) if subset >> position & 1]
    return Cut(acceptance=float(values[subset]), tokens=tuple(members))


def _subset_sums(masses: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " subsets"]:
    sums = np.zeros(1)
    for mass in masses.tolist():
        sums = np.concatenate([sums, sums + mass])
    return sums


def _check_searchable(num_tokens: int) -> None:
    if num_tokens > MAX_SUBSET_TOKENS:
        raise OptionError(
            f"{num_tokens} draftable tokens, at most {MAX_SUBSET_TOKENS} are searched"
        )


def speculative_sampling_acceptance(p: Vector, q: Vector) -> float:
    """sum(min(p, q)) = 1 - TV(p, q), the optimum of one candidate (Leviathan et al., arXiv 2211.17192)."""
    p, q = _checked(p, q)
    return float(np.minimum(p, q).sum())


def sample_and_match_acceptance(problem: TransportProblem) -> float:
    """sum_i p_i P(i is a candidate): the token is drawn from p without a look at the candidates."""
    return float(problem.target @ problem.candidates.inclusion)


def greedy_acceptance(p: Vector, q: Vector, width: int) -> float:
    """Top K - 1 tokens T of q and one draw x ~ q' outside: p(T) + sum outside T of min(p, q').

    Single-draft step with proposal q'; residual tokens in T count as accepted. Reference: Hu et
    al., arXiv 2502.18779.
    """
    p, q = _checked(p, q)
    fixed, rest = greedy_proposal(q, width)
    top = float(p[list(fixed)].sum())
    return top if rest is None else top + float(np.minimum(p, rest).sum())


def block_acceptance(target: Tabular, draft: Tabular, *, depth: int) -> float:
    """E[tau] of Block Verification, the multi-step optimum of one path (Sun et al., arXiv 2403.10444).

    Sum over strings of min over k of q(first k tokens) p(the others | them), for every length up to
    `depth`.
    """
    targets, drafts = string_laws(target, depth), string_laws(draft, depth)
    total = 0.0
    for length in range(1, depth + 1):
        for string, p_string in targets[length].items():
            # p_string is positive, so every prefix has target mass
            total += min(
                drafts[cut].get(string[:cut], 0.0) * p_string / targets[cut][string[:cut]]
                for cut in range(length + 1)
            )
    return total


def canonical_coupling(
    problem: TransportProblem, selection: Float64[np.ndarray, "tuples vocab"]
) -> Coupling:
    """The coupling of a selection kernel, with x computed from that kernel.

    Raises:
        LawError: If a row of the kernel is not a law.
    """
    if not (np.abs(selection.sum(axis=1) - 1.0) <= FLOW_TOLERANCE).all():
        raise LawError("selection: every row must sum to one")
    x = selection_law(problem, selection)
    return Coupling.from_kernel(problem, selection * _accept(problem.target, x))


def selection_of(coupling: Coupling) -> Float64[np.ndarray, "tuples vocab"]:
    """A selection kernel at least as good as a coupling.

    What the flow leaves undecided selects the first candidate.

    Then x >= y, so sum(min(p, x)) >= sum(y): the relaxed and the canonical optimum are one number.
    """
    selection = coupling.kernel.copy()
    for row, candidate_ids in enumerate(coupling.problem.candidates.tuples):
        if not candidate_ids:
            raise LawError("selection: a tuple without candidates has none to select")
        selection[row, candidate_ids[0]] += max(0.0, 1.0 - float(selection[row].sum()))
    return selection


def rearrangement_coupling(
    p: Float64[np.ndarray, " vocab"],
    q: Float64[np.ndarray, " vocab"],
    width: int,
    fixed: TokenTuple = (),
) -> Coupling:
    """The rearrangement coupling of deterministic candidates `fixed` and `width` independent draws from q, enumerated.

    Deterministic candidates are accepted when the residual, over the whole vocabulary, emits them.
    """
    p = check_law("target", p)
    check_fixed(fixed, q)
    outside = p.copy()
    outside[list(fixed)] = 0.0
    table = ScoreTable.build(Rearrangement.build(outside, q, width))
    candidates = CandidateLaw.mixed(fixed, q, width) if fixed else CandidateLaw.iid(q, width)
    kernel = np.zeros((len(candidates.tuples), p.size))
    known: dict[TokenTuple, dict[int, float]] = {}
    for row, candidate_ids in enumerate(candidates.tuples):
        # Independent draws: their order does not matter.
        drawn = tuple(sorted(candidate_ids[len(fixed) :]))
        if drawn not in known:
            known[drawn] = table.accept_probs(drawn)
        kernel[row, list(known[drawn])] = list(known[drawn].values())
    return Coupling.from_kernel(TransportProblem(target=p, candidates=candidates), kernel)


def selection_law(
    problem: TransportProblem, selection: Float64[np.ndarray, "tuples vocab"]
) -> Float64[np.ndarray, " vocab"]:
    """Law x of the selected candidate."""
    return problem.candidates.probs @ selection


def _accept(
    p: Float64[np.ndarray, " vocab"], x: Float64[np.ndarray, " vocab"]
) -> Float64[np.ndarray, " vocab"]:
    # A token that is never selected is never accepted either; its entry is not used.
    return np.divide(np.minimum(p, x), x, out=np.zeros_like(x), where=x > 0.0)


def _checked(p: Vector, q: Vector) -> tuple[Vector, Vector]:
    p, q = check_law("target", p), check_law("draft law", q)
    check_pair(p, q)
    return p, q

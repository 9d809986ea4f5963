"""The lines of the optimal rule: of many nodes, and of one on the host.

Same noise, same verdict as the plain search, and the masses of the theory.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.acceptance.rearrangement import Rearrangement
from monge.laws.draws import TapeDraws
from monge.laws.law import SparseLaw
from monge.laws.proposal import Iid, Mixed
from monge.verify import optimal
from monge.verify.functional.lines import SMALLEST_MASS, Lines, Scores
from monge.verify.node_line import NodeLine, chances, decide
from monge.verify.optimal import Optimal
from monge.verify.problem import NodeProblem
from tests.kit.strategies import dense_law, weight_pairs
from tests.verify.acceptance import EXACT, masses
from tests.verify.plain_search import DraftLine, place, score, winning_chances

REGIMES = (
    "rough",
    "ties",
    "nearly equal",
    "equal",
    "peaked",
    "sub-target",
    "tiny masses",
    "disjoint",
    "single token",
)
WIDTHS = (1, 2, 3, 4, 8, 16)


def laws(regime: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A target (or sub-target) and a draft law."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 40))
    p, q = rng.dirichlet(np.ones(size), 2)
    if regime == "ties":
        p, q = (
            weights / weights.sum() for weights in rng.integers(0, 5, (2, size)) + np.eye(2, size)
        )
    elif regime == "nearly equal":
        q = p * np.exp(1e-6 * rng.normal(size=size))
    elif regime == "equal":
        q = p.copy()
    elif regime == "peaked":
        logits = 5.0 * rng.normal(size=size)
        p, q = np.exp(logits), np.exp(logits + 3.0 * rng.normal(size=size))
    elif regime == "sub-target":
        p, q = p * rng.random(), rng.dirichlet(np.full(size, 0.5))
    elif regime == "tiny masses":
        q[0] = SMALLEST_MASS / 10.0
    elif regime == "disjoint":
        p[: size // 2], q[size // 2 :] = 0.0, 0.0
    elif regime == "single token":
        q = np.eye(size)[0]
    return p if regime == "sub-target" else p / p.sum(), q / q.sum()


def plain(
    p: np.ndarray, q: np.ndarray, candidates: np.ndarray, noise: np.ndarray
) -> tuple[Rearrangement, int]:
    """The verdict of the plain search: index of the accepted draw, -1 where none is."""
    line = Rearrangement.build(p, np.where(q > SMALLEST_MASS, q, 0.0), len(candidates))
    scores = [
        score(line, np.flatnonzero(line.owners == y), *pair)
        for y, pair in zip(candidates, noise.tolist(), strict=True)
    ]
    best = int(np.argmin(scores))
    return line, best if scores[best] < line.threshold else -1


def rows(values: list[np.ndarray], fill: float = 0.0) -> torch.Tensor:
    tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in values]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)


@pytest.mark.parametrize("regime", REGIMES)
def test_same_noise_same_verdict(regime: str) -> None:
    """One batch of nodes of all widths and sizes, each against the plain search and the twin for one node."""
    pairs = [laws(regime, seed) for seed in range(30)]
    widths = [WIDTHS[seed % len(WIDTHS)] for seed in range(30)]
    rng = np.random.default_rng(7)
    candidates = [
        rng.choice(q.size, size=width, p=q) for (_, q), width in zip(pairs, widths, strict=True)
    ]
    noise = [rng.random((width, 2)) for width in widths]
    lines = Lines.build(
        rows([p for p, _ in pairs]), rows([q for _, q in pairs]), torch.tensor(widths), 16
    )
    scores = Scores.of(lines, rows(candidates, -1), rows([pair[:, 0] for pair in noise]))
    winners = scores.winners(rows([pair[:, 1] for pair in noise])).tolist()
    probs = scores.win_probs()
    assert len(set(winners)) > 1 or regime in {"disjoint", "single token"}
    for node, (p, q) in enumerate(pairs):
        line, expected = plain(p, q, candidates[node], noise[node])
        single = NodeLine.build(p, q, widths[node])
        found = single.winner(candidates[node].tolist(), TapeDraws(noise[node].ravel().tolist()))
        assert (winners[node], -1 if found is None else found) == (expected, expected)
        np.testing.assert_allclose(
            lines.masses[node, : p.size].numpy(), line.accepted_masses, rtol=0, atol=EXACT
        )
        np.testing.assert_allclose(single.masses, line.accepted_masses, rtol=0, atol=EXACT)
        assert float(lines.floors[node]) == pytest.approx(single.floor, abs=EXACT)
        windows = [np.flatnonzero(line.owners == y) for y in candidates[node]]
        places = [
            place(line, own, pair[0])
            for own, pair in zip(windows, noise[node].tolist(), strict=True)
        ]
        expected_probs = winning_chances(line, np.array(places))
        np.testing.assert_allclose(
            probs[node, : widths[node]].numpy(), expected_probs, rtol=0, atol=1e-7
        )
        assert not probs[node, widths[node] :].any()


@settings(max_examples=15)
@given(pair=weight_pairs(max_vocab=6), width=st.integers(1, 6), seed=st.integers(0, 2**20))
def test_verdicts_of_small_laws(pair: tuple[list[int], list[int]], width: int, seed: int) -> None:
    p, q = map(masses, pair)
    rng = np.random.default_rng(seed)
    candidates, noise = rng.choice(q.size, size=(8, width), p=q), rng.random((8, width, 2))
    line = Lines.build(
        *(torch.from_numpy(law).expand(8, -1) for law in (p, q)), torch.full((8,), width), width
    )
    scores = Scores.of(line, torch.from_numpy(candidates), torch.from_numpy(noise[..., 0].copy()))
    winners = scores.winners(torch.from_numpy(noise[..., 1].copy())).tolist()
    assert winners == [plain(p, q, *one)[1] for one in zip(candidates, noise, strict=True)]


@pytest.mark.parametrize("regime", ["rough", "nearly equal", "peaked", "sub-target"])
@pytest.mark.parametrize("width", [2, 3, 16])
def test_partners_bring_what_positions_lack(regime: str, width: int) -> None:
    """The identity behind the law, on the twin alone.

    E[xt(score) | position] = g, and |dE| is equal at both ends.
    """
    p, q = laws(regime, width)
    line = Lines.build(rows([p]), rows([q]), torch.tensor([width]), width)
    support = np.flatnonzero(q)
    candidates = torch.from_numpy(np.repeat(support, 8))[None]
    positions = torch.rand(
        candidates.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(width)
    )
    scores = Scores.of(line, candidates, positions)

    def offered(w: torch.Tensor) -> torch.Tensor:
        return torch.where(w > line.floors, width * w ** (width - 1), 0.0)

    received = (1.0 - scores.swap_probs) * offered(scores.own) + scores.swap_probs * offered(
        scores.swapped
    )
    gains = line.masses.gather(1, candidates) / torch.from_numpy(q)[candidates]
    torch.testing.assert_close(received, gains, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fixed", [(), (0, 3)])
def test_flows_of_many_nodes(fixed: tuple[int, ...]) -> None:
    """Different widths, scales and supports in one call.

    Against the plain line of each node, on one tape.
    """
    q = dense_law([0, 3, 5, 0, 2])
    nodes = [
        (dense_law([5, 3, 2, 4, 1]), 1.0, (1,)),
        (dense_law([1, 1, 4, 0, 4]), 0.4, (2, 2, 4)),
        (q, 0.75, (4, 1)),
    ]
    tape = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tolist()

    def problems() -> list[NodeProblem]:
        draws = TapeDraws(tape)
        return [
            NodeProblem(
                target_law=p,
                scale=scale,
                proposal=Mixed(fixed, q, len(drawn)) if fixed else Iid(q, len(drawn)),
                candidates=fixed + drawn,
                draws=draws,
            )
            for p, scale, drawn in nodes
        ]

    draws = TapeDraws(tape)
    for (p, scale, drawn), flow, twin in zip(
        nodes, map(Optimal().flow, problems()), map(chances, problems()), strict=True
    ):
        line = DraftLine.of_node(p, scale, q, len(drawn))
        expected = line.chances(drawn, draws)
        assert {token: flow.accept_probs[token] for token in expected} == pytest.approx(
            expected, abs=EXACT
        )
        torch.testing.assert_close(twin.masses, line.accepted, rtol=0, atol=EXACT)
        assert set(flow.accept_probs) == {*fixed, *drawn}
        assert sum(flow.accept_probs.values()) <= 1.0 + EXACT


def test_a_draw_outside_the_draft_law_is_refused() -> None:
    q = SparseLaw(torch.tensor([1, 3]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert decide(dense_law([1, 1, 1, 1]), q, (2,), TapeDraws([0.5, 0.5, 0.25])) == 0


def test_the_rule_runs_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name, twin in (("decide", decide), ("chances", chances)):
        monkeypatch.setattr(
            optimal, name, lambda *given, name=name, twin=twin: (ran.append(name), twin(*given))[1]
        )
    p, q = dense_law([5, 3, 2]), dense_law([2, 3, 5])
    Optimal().emit(p, Iid(q, 2), (0, 1), TapeDraws([0.5] * 5))
    Optimal().flow(
        NodeProblem(
            target_law=p,
            scale=0.5,
            proposal=Iid(q, 2),
            candidates=(0, 1),
            draws=TapeDraws([0.5] * 2),
        )
    )
    assert ran == ["decide", "chances"]

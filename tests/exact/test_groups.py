"""The completions of one prompt are independent draws, whichever drafts from whichever: their joint law."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from monge.api import make_components
from monge.engine.batch import Batch
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.session import Session
from monge.laws.draws import Draws
from monge.oracle.decoding import Case, Text, target_law
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.kit.known_bad import NotedDraws, SameUniforms, TrustsDrafts

VOCAB = 3
CASE = Case(prompt=(0, 1), horizon=2, max_new_tokens=2)
DRAFTER = "suffix(num_nodes=3, depth=2, max_history=100)"
BACK = "pool('suffix(num_nodes=2, depth=2, width=1, max_history=100)', 'ngram')"
ORDERS = {"one after the other": 9, "the second a round later": 1, "side by side": 0}
"""Rounds of the first completion after which the second one joins."""

Pair = tuple[Text, Text]
DrawsOf = Callable[[Draws], tuple[Draws, Draws]]


def target(vocab: int = VOCAB) -> TabularModel:
    return TabularModel(RandomTable(vocab, 11, "positive"), vocab)


def parts(
    verifier: object = "sample_and_match", drafter: str = DRAFTER, vocab: int = VOCAB
) -> Components:
    return make_components(target(vocab), drafter=drafter, verifier=verifier)


def group(
    components: Components, draws: tuple[Draws, Draws], rounds: int, case: Case = CASE
) -> tuple[Session, Session]:
    """Two completions of a prompt, as a request with `n=2` makes them, but for their draws."""
    decoder = Decoder(components)
    options = {"max_new_tokens": case.max_new_tokens, "temperature": 1.0}
    requests = decoder.requests(case.prompt, n=2, **options)
    assert [request.row for request in requests] == [0, 1]
    first, second = (
        decoder.session(replace(request, draws=own))
        for request, own in zip(requests, draws, strict=True)
    )
    batch = Batch(components)
    batch.join([first])
    for _ in range(rounds):
        if first.finish_reason is None:
            batch.step()
    batch.join([second])
    while len(batch):
        batch.step()
    return first, second


def joint_law(
    make: Callable[[], Components], rounds: int, draws_of: DrawsOf, case: Case = CASE
) -> dict[Pair, float]:
    def run(draws: Draws) -> Pair:
        first, second = group(make(), draws_of(draws), rounds, case)
        return first.completion_ids, second.completion_ids

    return exact_law(run)


def product_law(case: Case = CASE, vocab: int = VOCAB) -> dict[Pair, float]:
    law = target_law(target(vocab), case)
    return {(one, other): law[one] * law[other] for one, other in product(law, law)}


def independent(draws: Draws) -> tuple[Draws, Draws]:
    return draws, draws


def shared(draws: Draws) -> tuple[Draws, Draws]:
    first = NotedDraws(draws)
    return first, SameUniforms(draws, first)


@pytest.mark.parametrize("rounds", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("verifier", ["sample_and_match", "traversal"])
def test_the_joint_law_of_a_group_is_the_product(verifier: str, rounds: int) -> None:
    law = joint_law(lambda: parts(verifier), rounds, independent)
    assert len(law) == VOCAB**4
    assert law_error(law, product_law()) < 1e-12


@pytest.mark.parametrize("rounds", ORDERS.values(), ids=ORDERS)
def test_a_pool_and_a_third_token(rounds: int) -> None:
    case = replace(CASE, horizon=3, max_new_tokens=3)
    law = joint_law(lambda: parts(drafter=BACK, vocab=2), rounds, independent, case)
    assert law_error(law, product_law(case, 2)) < 1e-12


@pytest.mark.parametrize("rounds", [9, 1])
def test_the_second_really_drafts_from_the_first(rounds: int) -> None:
    """Or the tests above would show nothing: without a history there is nothing to copy."""

    def drafted(drafter: str) -> float:
        def run(draws: Draws) -> int:
            _, second = group(parts(drafter=drafter), (draws, draws), rounds)
            return sum(record.num_nodes for record in second.records)

        return sum(mass for nodes, mass in exact_law(run).items() if nodes)

    assert drafted(DRAFTER) == pytest.approx(1.0)
    assert drafted("suffix(num_nodes=3, depth=2)") < 1.0


@pytest.mark.parametrize("rounds", [9, 0])
def test_a_uniform_that_two_completions_share_is_seen(rounds: int) -> None:
    law = joint_law(parts, rounds, shared)
    assert law_error(law, product_law()) > 0.01
    # Each alone has the right law, so that only the joint one shows it.
    for place in (0, 1):
        alone: dict[Text, float] = {}
        for pair, mass in law.items():
            alone[pair[place]] = alone.get(pair[place], 0.0) + mass
        assert law_error(alone, target_law(target(), CASE)) < 1e-12


def test_a_draft_that_is_not_verified_is_seen() -> None:
    law = joint_law(lambda: parts(TrustsDrafts()), 9, independent)
    assert law_error(law, product_law()) > 0.01


def test_a_seed_gives_its_text_whatever_was_written_before() -> None:
    """With the default verifier of copied text; others use up random numbers for drafts, and say so."""
    options = {"max_new_tokens": 12, "temperature": 1.0, "n": 3}
    for seed in range(2):
        fresh = Decoder(parts()).generate(CASE.prompt, seed=seed, **options)
        alone = Decoder(parts(drafter="none")).generate(CASE.prompt, seed=seed, **options)
        used = Decoder(parts())
        for other in range(10, 12):
            used.generate([CASE.prompt, (1, 2)], seed=other, **options)
        again = used.generate(CASE.prompt, seed=seed, **options)
        texts = [[result.token_ids for result in results] for results in (fresh, alone, again)]
        assert texts[0] == texts[1] == texts[2]
        assert len(set(texts[0])) == 3
        assert {result.seed for result in again} == {seed}


@pytest.mark.parametrize(
    ("drafter", "verifier", "is_told"),
    [
        (DRAFTER, "sample_and_match", True),
        (DRAFTER, "traversal", False),
        ("suffix(num_nodes=3, depth=2)", "traversal", True),
        (BACK, "sample_and_match", True),
    ],
)
def test_a_seed_is_told_only_where_it_gives_the_text_again(
    drafter: str, verifier: str, is_told: bool
) -> None:
    decoder = Decoder(parts(verifier, drafter))
    (sampled,) = decoder.generate(CASE.prompt, seed=5, temperature=1.0, max_new_tokens=2)
    (greedy,) = decoder.generate(CASE.prompt, seed=5, max_new_tokens=2)
    assert (sampled.seed == 5) == is_told
    assert greedy.seed == 5

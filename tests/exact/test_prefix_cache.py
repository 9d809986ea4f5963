"""The law of a text whose beginning was not read again, by every drafter; and that of a cache that is wrong."""

import pytest

from monge.api import make_components
from monge.engine.batch import Batch, decode
from monge.networks import prefix_cache
from monge.networks.cross_tokenizer import ResizedVocabulary
from monge.networks.prefix_cache import PrefixCache
from monge.oracle.decoding import Case, target_law
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.laws import session
from tests.exact.test_every_drafter import MADE, VOCAB, target

CASE = Case(prompt=(0, 2, 0, 1, 0), horizon=2, max_new_tokens=2)
EARLIER = ((0, 2, 0, 1, 0, 2), (0, 2, 1), (0, 2, 0, 1))


def written(made, *, keeps=True, **options):
    """A completion after other requests, one of which still runs; and how much of its prompt was kept."""
    parts = made()
    prefixes = PrefixCache(min_tokens=1) if keeps else None
    for number, prompt in enumerate(EARLIER, start=1):
        earlier = session(number, prompt, max_new_tokens=3)
        list(decode([earlier], parts, max_batch_size=1, prefixes=prefixes))
    batch, neighbour = Batch(parts, prefill_chunk=2, prefixes=prefixes), session(9, (0, 2))
    batch.join([neighbour])
    batch.step()
    one = session(0, CASE.prompt, **{"max_new_tokens": CASE.max_new_tokens, **options})
    batch.join([one])
    while one.finish_reason is None:
        batch.step()
    batch.close()
    return one.completion_ids, one.num_cached


@pytest.mark.parametrize("drafter", MADE)
def test_the_law_stays_the_target_s(drafter):
    law = exact_law(lambda draws: written(MADE[drafter], draws=draws))
    assert {cached for _, cached in law} == {len(CASE.prompt) - 1}
    texts = {text: mass for (text, _), mass in law.items()}
    assert law_error(texts, target_law(target(), CASE)) < 1e-12


@pytest.mark.parametrize("drafter", MADE)
def test_a_seed_gives_the_same_text(drafter):
    for seed in range(6):
        options = {"seed": seed, "max_new_tokens": 6}
        kept, num_cached = written(MADE[drafter], **options)
        assert (kept, 0) == written(MADE[drafter], **options, keeps=False)
        assert num_cached > 0


class Counting(TabularModel):
    """A table that counts the tokens that it reads."""

    num_read = 0

    def _read(self, sequence, block):
        self.num_read += len(block.token_ids)
        return super()._read(sequence, block)


def draft_table(size=VOCAB):
    return Counting(RandomTable(size, 23), size)


def resized():
    draft = ResizedVocabulary(draft_table(VOCAB + 2), VOCAB)
    return make_components(target(), draft, tree="chain(2)"), draft.resized


def model():
    parts = make_components(target(), draft_table(), tree="chain(2)")
    return parts, parts.draft_models[0]


@pytest.mark.parametrize("make", [model, resized])
def test_draft_models_do_not_read_it_again_either(make):
    prompt, counts = (0, 1, 2) * 9, []
    parts, draft = make()
    prefixes = PrefixCache(min_tokens=1)
    for number in range(3):
        draft.num_read, one = 0, session(number, prompt, max_new_tokens=3)
        list(decode([one], parts, max_batch_size=1, prefixes=prefixes))
        counts.append(draft.num_read)
    assert counts[0] > len(prompt)
    assert max(counts[1:]) < 12


def one_too_many(one, other):
    return min(len(one), len(other), 1 + honest(one, other))


honest = prefix_cache._num_equal


def test_a_cache_that_takes_a_wrong_text_is_seen(monkeypatch):
    monkeypatch.setattr(prefix_cache, "_num_equal", one_too_many)
    monkeypatch.setattr("tests.exact.test_prefix_cache.EARLIER", ((0, 2, 0, 2, 1, 1),))
    law = exact_law(lambda draws: written(MADE["none"], draws=draws)[0])
    assert law_error(law, target_law(target(), CASE)) > 1e-2

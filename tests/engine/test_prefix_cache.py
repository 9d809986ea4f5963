"""Texts that are kept: which, how many, and that networks go on from them as from their own reading."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import monge
from monge.engine import loop
from monge.engine.batch import Batch, decode
from monge.networks.base import NodeBlock
from monge.networks.hf_tree import HfTreeModel
from monge.networks.prefix_cache import PrefixCache
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.tiny import TREE_FAMILIES, VOCAB, network, perturbed

TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=8).map(tuple), max_size=20)


def common(one, other):
    """Tokens of the longest common beginning."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return [*equal, False].index(False)


@given(texts=TEXTS, asked=TEXTS, least=st.integers(1, 3))
def test_the_longest_beginning_is_found(texts, asked, least):
    model, cache = TabularModel(RandomTable(2, 1), 2), PrefixCache(min_tokens=least)
    for number, text in enumerate(texts):
        model.open({number: text})
        cache.keep(model, number, text)
        model.close(number)
    distinct = {text[: size + 1] for text in texts for size in range(len(text))}
    assert cache.num_tokens == len(distinct), "what texts share is kept once"
    assert cache.num_bytes == 8 * len(distinct)
    for text in asked:
        length = max((common(text, one) for one in texts), default=0)
        model.open({-1: ()})
        rest = cache.unread(model, -1, text)
        assert text[: len(text) - len(rest)] == model.text(-1)
        assert len(model.text(-1)) == (length if length >= least else 0)
        model.close(-1)


@given(
    texts=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=8))),
    most=st.integers(0, 12),
    room=st.lists(st.integers(0, 12), min_size=1),
)
def test_limits_hold_and_the_last_text_stays(texts, most, room):
    models, limit = [TabularModel(RandomTable(2, seed), 2) for seed in (1, 2)], 0
    cache = PrefixCache(max_bytes=8 * most, max_tokens=lambda: limit, min_tokens=1)
    for number, (which, text) in enumerate(texts):
        limit, model = room[number % len(room)], models[which]
        model.open({0: text})
        cache.trim()
        cache.keep(model, 0, text)
        model.close(0)
        assert cache.num_tokens <= limit
        assert cache.num_bytes <= 8 * most
        assert cache.length(model, text) == min(len(text), limit, most)


def test_a_sequence_that_is_not_open_or_began_before_its_states_were_kept_is_left_alone():
    model, cache = TabularModel(RandomTable(2, 1), 2), PrefixCache(min_tokens=1)
    log = model.watch((1,))
    model.open({0: (0, 1)})
    model.prefixes = cache
    model.open({1: (1, 1)})
    for number, text in enumerate([(0, 1), (1, 1), (0, 0)]):
        cache.keep(model, number, text)
    assert [cache.length(model, text) for text in [(0, 1), (1, 1), (0, 0)]] == [0, 2, 0]
    model.prefixes = None
    assert len(log.take(1)) == 2, "the head's own are not taken away"


@given(text=st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple), held=st.integers(0, 8))
def test_a_text_is_kept_as_far_as_its_sequence_holds_it(text, held):
    """The last token of a text that ends is committed, and was never read."""
    model, cache = TabularModel(RandomTable(2, 1), 2), PrefixCache(min_tokens=1)
    model.open({0: text[:held]})
    cache.keep(model, 0, text)
    assert cache.num_tokens == cache.length(model, text) == min(held, len(text))
    model.open({1: ()})
    assert cache.unread(model, 1, text) == text[held:]
    assert model.text(1) == text[:held]


def test_a_network_reads_the_tokens_that_a_kept_text_never_held():
    model, cache = HfTreeModel(network("llama")), PrefixCache(min_tokens=1)
    text, tree = tuple(range(3, 23)), NodeBlock((5, 6), (-1, 0))
    model.open({0: text})
    expected = model.extend({0: tree})[0]
    model.open({1: text[:12]})
    cache.keep(model, 1, text)
    model.prefixes = cache
    model.open({2: text})
    torch.testing.assert_close(model.extend({2: tree})[2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("watched", [(), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_a_network_goes_on_as_from_its_own_reading(family, watched):
    model, cache = HfTreeModel(network(family)), PrefixCache(min_tokens=1)
    logs = [model.watch(watched), model.watch(watched, only_last=True)] if watched else []
    generator = torch.Generator().manual_seed(0)
    text = tuple(torch.randint(3, VOCAB, (40,), generator=generator).tolist())
    fork = (*text[:25], *text[:5])
    tree = NodeBlock((5, 6, 7), (-1, 0, 0))

    def read(number, prompt, prefixes):
        model.prefixes = prefixes
        model.open({number: prompt[:30], 9: prompt[:7]})
        model.append({number: prompt[30:]})
        found = [model.extend({number: tree})[number], *(log.take(number) for log in logs)]
        model.close(9)
        return found

    expected = {}
    for prompt in (text, fork):
        expected[prompt] = read(0, prompt, None)
        model.close(0)
    for number, prompt in enumerate((text, fork, text, fork), start=1):
        found = read(number, prompt, cache)
        for own, other in zip(found, expected[prompt], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
        model.commit({number: ()})
        cache.keep(model, number, prompt)
        model.close(number)
    assert cache.num_tokens == len(text) + len(fork) - 25
    assert cache.num_bytes == cache.num_tokens * model.bytes_per_token
    model.check_integrity()


@pytest.mark.parametrize("drafter", ["model", "shape", "pool('ngram', 'shape')"])
def test_texts_and_drafts_are_those_of_whole_prompts(drafter):
    """A, B, A and a longer A: drafts are the same, since drafters know what they would know."""
    decoder = monge.load(drafter=drafter, controller="fixed")
    first, second = (decoder.encode(f"{word} the sky is blue and the sea is " * 2) for word in "ab")
    longer = (*first, *second[:8])
    told, options = [], {"max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    for prefixes in (None, PrefixCache()):
        made = decoder.sessions([first, second, first, longer], **options)
        for one in made:
            list(decode([one], decoder.components, max_batch_size=1, prefixes=prefixes))
        accepted = [[own.num_accepted for own in one.records] for one in made]
        told.append(([one.completion_ids for one in made], accepted))
    assert told[0] == told[1]
    cached = [one.num_cached for one in made]
    assert cached == [0, 0, len(first) - 1, len(first)]


def test_laws_that_a_controller_wants_are_read_again(monkeypatch):
    controller = "linear_selection(('length', 'surprisal'))"
    decoder = monge.load(drafter="pool('ngram', 'model')", controller=controller)
    seen, kind = [], type(decoder.components.controller)
    honest = kind.read

    def read(controller, state, prompt):
        seen.append(prompt.surprisal)
        return honest(controller, state, prompt)

    monkeypatch.setattr(kind, "read", read)
    prompt = decoder.encode("The sky is blue, and the sea is as blue as it. " * 4)
    made, prefixes = decoder.sessions([prompt, prompt], max_new_tokens=2), PrefixCache()
    for one in made:
        list(decode([one], decoder.components, max_batch_size=1, prefixes=prefixes))
    assert [one.num_cached for one in made] == [0, len(prompt) - 1 - 32]
    assert seen[0] == pytest.approx(seen[1])


class TestBatches:
    """Which texts a batch keeps, and when."""

    PROMPT = tuple(range(3, 33))

    @pytest.fixture
    def decoder(self):
        target = network("llama")
        return monge.load(target, perturbed(target), controller="fixed")

    def joined(self, decoder, prefixes, **options):
        """A batch with one request, and its session."""
        batch = Batch(decoder.components, prefixes=prefixes, isolated=True)
        settings = {"max_new_tokens": 40, "temperature": 1.0, "seed": 1, "ignore_eos": True}
        (session,) = decoder.sessions([self.PROMPT], **settings | options)
        batch.join([session])
        return batch, session

    def kept(self, decoder, prefixes, session):
        text = session.context.token_ids
        return prefixes.length(decoder.components.target, text), len(text)

    def test_a_prompt_is_kept_while_its_text_goes_on(self, decoder):
        prefixes = PrefixCache()
        batch, first = self.joined(decoder, prefixes)
        batch.step()
        (second,) = decoder.sessions([self.PROMPT], max_new_tokens=2)
        batch.join([second])
        batch.step()
        assert first.finish_reason is None
        assert second.num_cached == len(self.PROMPT) - 1
        batch.close()

    def test_a_text_that_is_left_is_kept_to_its_end(self, decoder):
        prefixes = PrefixCache()
        batch, session = self.joined(decoder, prefixes)
        batch.step()
        batch.step()
        batch.close()
        length, whole = self.kept(decoder, prefixes, session)
        assert length == whole - 1 > len(self.PROMPT)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_a_text_whose_round_failed_is_not_kept(self, decoder, monkeypatch, error):
        """Nobody knows what the networks hold then."""
        prefixes = PrefixCache()
        batch, session = self.joined(decoder, prefixes)
        batch.step()
        batch.step()
        before = prefixes.num_tokens

        def fail(*_):
            raise error("in the middle")

        monkeypatch.setattr(loop, "_verify", fail)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                batch.step()
        else:
            assert batch.step() == [session]
        batch.close()
        assert prefixes.num_tokens == before

    def test_batches_that_take_turns_have_their_own(self, decoder):
        prefixes = PrefixCache()
        batch, _ = self.joined(decoder, prefixes)
        batch.step()
        others = PrefixCache()
        for own, cached in ((None, 0), (others, 0), (prefixes, len(self.PROMPT) - 1)):
            other, session = self.joined(decoder, own, max_new_tokens=4)
            other.step()
            assert session.num_cached == cached
            assert decoder.components.target.prefixes is own, "what `open` looks up"
            other.close()
        batch.close()
        assert others.num_tokens > 0

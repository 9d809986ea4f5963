"""A conversation answers as the same messages do at once, and reads every token once."""

import pytest

import monge
from monge.core.errors import ContextLengthError, OptionError
from monge.engine.conversation import Conversation

QUESTIONS = ("Name a colour.", "Why is the sky blue?", "What is 7 times 8?")


@pytest.fixture(scope="module", params=[{}, {"tree": "fixed_width((2, 2))"}], ids=str)
def decoder(request):
    return monge.load(controller="fixed", **request.param)


def text_of(conversation, question):
    return "".join(piece.text for piece in conversation.reply(question))


def test_answers_are_those_of_the_whole_conversation(decoder):
    conversation = Conversation(decoder, system="Be brief.", max_new_tokens=20)
    for question in QUESTIONS:
        asked = [*conversation.messages, {"role": "user", "content": question}]
        before = [{"role": "system", "content": "Be brief."}, *asked]
        answer = text_of(conversation, question)
        assert answer == decoder.chat(before, max_new_tokens=20).text
        assert conversation.messages[-1] == {"role": "assistant", "content": answer}
    conversation.close()
    assert decoder.components.target._cache.num_open == 0


def test_earlier_turns_are_not_read_again(decoder):
    conversation = Conversation(decoder, max_new_tokens=20)
    for question in QUESTIONS:
        text_of(conversation, question)
    first, *later = conversation.sessions
    assert first.num_cached == 0
    for before, session in zip(conversation.sessions, later, strict=False):
        # The last token of an answer is not read in its round, the last of a prompt in the next one.
        texts = zip(before.context.token_ids[:-1], session.request.prompt_ids[:-1], strict=False)
        equal = [one == other for one, other in texts]
        assert session.num_cached == [*equal, False].index(False) > 0
    conversation.close()


def test_an_answer_that_is_cut_off_stays(decoder):
    conversation = Conversation(decoder, max_new_tokens=40)
    pieces = conversation.reply(QUESTIONS[0])
    first = next(pieces).text
    pieces.close()
    assert conversation.messages[-1]["content"].startswith(first)
    assert decoder.components.target._cache.num_open == 0
    assert text_of(conversation, QUESTIONS[1])
    conversation.reset()
    assert conversation.messages == []
    assert decoder.components.target._cache.num_open == 0


def test_a_full_context_drops_the_oldest_turns(decoder):
    limit = decoder.max_length
    conversation = Conversation(decoder, max_new_tokens=limit // 2)
    for _ in range(3):
        pieces = conversation.reply(" ".join(QUESTIONS * (limit // 50)))
        next(pieces)
        pieces.close()
    assert conversation.num_dropped > 0
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        text_of(conversation, "word " * limit)
    assert text_of(conversation, QUESTIONS[0]), "the conversation goes on"
    conversation.close()


def test_sampled_answers_of_a_seed_come_again(decoder):
    texts = []
    for _ in range(2):
        conversation = Conversation(decoder, max_new_tokens=20, temperature=1.0, seed=3)
        texts.append([text_of(conversation, question) for question in QUESTIONS])
        conversation.close()
    assert texts[0] == texts[1]


def test_a_wrong_option_is_refused_and_nothing_is_lost(decoder):
    conversation = Conversation(decoder, max_new_tokens=20)
    text_of(conversation, QUESTIONS[0])
    wrong = Conversation(decoder, max_new_tokens=20, controller="none such")
    with pytest.raises(OptionError, match="none such"):
        text_of(wrong, QUESTIONS[0])
    assert text_of(conversation, QUESTIONS[1])
    conversation.close()

"""Prompt lookup as its docstring says it, token by token."""

from monge.draft.ngram import Ngram


def looked_up(ngram: Ngram, text: tuple[int, ...]) -> tuple[int, ...]:
    """What follows the latest earlier occurrence of the longest ending that has one."""
    for size in range(min(ngram.max_ngram, len(text) - 1), ngram.min_ngram - 1, -1):
        ending = text[len(text) - size :]
        for place in range(len(text) - size - 1, -1, -1):
            if text[place : place + size] == ending:
                return _copied(text, place + size, ngram.num_draft_tokens)
    return ()


def _copied(text: tuple[int, ...], start: int, count: int) -> tuple[int, ...]:
    cycle = text[start:]
    if text[max(0, start - len(cycle)) : start] != cycle:
        return cycle[:count]
    drafted = list[int]()
    while len(drafted) < count:
        drafted.append((text + tuple(drafted))[start + len(drafted)])
    return tuple(drafted)

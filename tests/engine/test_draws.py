"""Draws that come again are the same draws, and what follows is what would have followed."""

from hypothesis import given
from hypothesis import strategies as st

from monge.core.clocks import RequestDraws
from monge.core.draws import RewindableDraws, TapeDraws


@given(st.lists(st.sampled_from(["draw", "mark", "rewind"]), max_size=40), st.integers(0, 3))
def test_a_rewound_stream_repeats_itself_from_the_mark(steps, seed):
    draws, plain = RequestDraws(seed), RequestDraws(seed)
    expected = [plain.uniform() for _ in range(len(steps) + 1)]
    place = marked = 0
    has_mark = False
    for step in steps:
        if step == "mark":
            draws.mark()
            marked, has_mark = place, True
        elif step == "rewind":
            draws.rewind()
            place = marked if has_mark else place
        else:
            assert draws.peek(2)[0] == draws.uniform() == expected[place]
            place += 1
        assert draws.has_drawn == (has_mark and place > marked)


def test_what_can_come_again_says_so():
    assert isinstance(RequestDraws(0), RewindableDraws)
    assert not isinstance(TapeDraws(()), RewindableDraws)

"""When a draft ends: a level alone, or several that share a price."""

from hypothesis import given
from hypothesis import strategies as st

from monge.core.stopping import StopRule

PROBS = st.floats(0.0, 1.0)
RISING = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(
    lambda prices: tuple(sorted(prices))
)


@given(
    prices=RISING,
    expected=st.lists(PROBS, max_size=8).map(tuple),
    depth=st.integers(1, 8),
    gain=PROBS,
)
def test_where_prices_rise_a_level_stands_alone(prices, expected, depth, gain):
    rule = StopRule(draw_prices=prices, read_prices=prices, expected=expected)
    price = prices[min(depth, len(prices)) - 1]
    assert rule.draws(depth, gain) == rule.reads(depth, gain) == (gain >= price)


def test_a_dear_first_node_is_paid_by_those_below_it():
    """A forward over two tokens costs nearly two plain ones on many CPUs, and one over eight hardly more."""
    rule = StopRule(draw_prices=(0.9, 0.0), read_prices=(0.9, 0.05), expected=(0.7,) * 4)
    assert rule.draws(1, 0.5)  # 0.5 + 0.35 + 0.245 - 0.9 - 0.05 - 0.05 > 0
    assert not rule.draws(1, 0.3)
    assert not StopRule(draw_prices=(0.9, 0.0)).draws(1, 0.5)  # nothing is known of later levels


def test_no_level_below_the_last_one_pays():
    rule = StopRule(draw_prices=(0.5,), read_prices=(0.0,), expected=(0.9, 0.9))
    assert rule.draws(1, 0.3)
    assert not rule.draws(2, 0.3)

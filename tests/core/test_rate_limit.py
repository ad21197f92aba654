"""A peer's calls are bounded, another peer's are its own."""

from flexmarl.core.rate_limit import RateLimit


def test_a_burst_then_the_rate():
    limit = RateLimit(10.0)
    assert [limit.admits("a", now=5.0) for _ in range(21)] == [True] * 20 + [False]
    assert not limit.admits("a", now=5.05)
    assert limit.admits("a", now=5.15)
    assert not limit.admits("a", now=5.15)
    assert limit.admits("b", now=5.15)


def test_silence_fills_the_bucket_no_further_than_its_burst():
    limit = RateLimit(1.0)
    assert [limit.admits("a", now=0.0) for _ in range(3)] == [True, True, False]
    assert [limit.admits("a", now=1e6) for _ in range(3)] == [True, True, False]


def test_less_than_one_a_second_still_lets_one_pass():
    limit = RateLimit(0.1)
    assert limit.admits("a", now=0.0)
    assert not limit.admits("a", now=9.0)
    assert limit.admits("a", now=20.0)


def test_zero_bounds_nothing():
    limit = RateLimit(0.0)
    assert all(limit.admits("a", now=0.0) for _ in range(1000))


def test_the_longest_silent_peer_is_forgotten():
    limit = RateLimit(1.0, max_peers=2)
    for peer in ("a", "a", "b", "c"):
        assert limit.admits(peer, now=0.0)
    assert limit.admits("a", now=0.0)  # a new bucket: it was the oldest of three

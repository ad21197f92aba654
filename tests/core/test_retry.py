"""Bounds of repetition."""

from random import Random

from flexmarl.core.retry import NO_RETRY, RetryPolicy, next_delay_s, patient

POLICY = RetryPolicy(max_attempts=5, initial_s=0.1, max_s=0.3, multiplier=2.0)


def test_delays_grow_to_their_cap_and_end_with_the_attempts():
    caps = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.3}
    for failed, cap_s in caps.items():
        delays = [
            next_delay_s(POLICY, failed_attempts=failed, left_s=None, rng=Random(seed))
            for seed in range(300)
        ]
        assert all(delay is not None and 0.0 <= delay <= cap_s for delay in delays)
        assert max(d for d in delays if d is not None) > 0.9 * cap_s
    assert next_delay_s(POLICY, failed_attempts=5, left_s=None, rng=Random(0)) is None


def test_no_delay_beyond_the_deadline():
    delay_s = next_delay_s(POLICY, failed_attempts=1, left_s=None, rng=Random(1))
    assert delay_s is not None
    assert next_delay_s(POLICY, failed_attempts=1, left_s=delay_s, rng=Random(1)) is None
    longer = next_delay_s(POLICY, failed_attempts=1, left_s=delay_s + 1e-9, rng=Random(1))
    assert longer == delay_s


def test_no_retry_means_once():
    assert next_delay_s(NO_RETRY, failed_attempts=1, left_s=None, rng=Random(0)) is None


def test_patience_is_bounded_by_time_not_by_attempts():
    policy = patient(60.0)
    assert policy.patience_s == 60.0
    for left_s, goes_on in ((30.0, True), (0.0, False)):
        delay_s = next_delay_s(policy, failed_attempts=500, left_s=left_s, rng=Random(2))
        assert (delay_s is not None) is goes_on

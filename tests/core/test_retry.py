"""Delays between tries."""

from random import Random

from flexmarl.core.retry import Backoff

BACKOFF = Backoff(initial_s=0.1, max_s=0.3)


def test_delays_grow_to_their_cap_and_stay_there():
    caps = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.3, 10**6: 0.3}
    for failed, cap_s in caps.items():
        delays = [BACKOFF.delay_s(failed, rng=Random(seed)) for seed in range(300)]
        assert all(0.0 <= delay <= cap_s for delay in delays)
        assert max(delays) > 0.9 * cap_s

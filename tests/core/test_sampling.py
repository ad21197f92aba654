import statistics

from flexmarl.core.sampling import uniform


def test_a_draw_depends_on_seed_and_counter_alone() -> None:
    forward = [uniform(7, t) for t in range(50)]
    backward = [uniform(7, t) for t in reversed(range(50))]
    assert forward == backward[::-1]
    assert len({uniform(seed, t) for seed in range(20) for t in range(50)}) == 1000


def test_known_numbers_never_change() -> None:
    # Stored rows are drawn again after a crash: another generator would draw other tokens.
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == [
        0.0564663990004608,
        0.6487508310490744,
        0.44008326622012284,
    ]


def test_uniform_on_the_half_open_interval() -> None:
    draws = [uniform(3, t) for t in range(20_000)]
    assert 0.0 <= min(draws) < 0.001
    assert 0.999 < max(draws) < 1.0
    assert abs(statistics.fmean(draws) - 0.5) < 0.01
    buckets = [sum(int(d * 10) == k for d in draws) for k in range(10)]
    assert all(abs(count - 2000) < 200 for count in buckets)


def test_seeds_wrap_at_64_bits() -> None:
    assert uniform(1 << 64, 5) == uniform(0, 5)
    assert uniform(-1, 5) == uniform((1 << 64) - 1, 5)

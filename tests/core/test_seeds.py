from flexmarl.core.seeds import (
    VertexSeeds,
    continued_seed,
    derive,
    evaluation_seed,
    sample_seed,
)


def test_seeds_depend_on_every_part_and_on_its_boundaries():
    assert derive(1, "ab", "c") != derive(1, "a", "bc")
    assert derive(1, "a") != derive(2, "a")
    assert 0 <= derive(1, "a") < 2**63


def test_seeds_are_stable_over_releases():
    # A changed value would break the replay of stored runs.
    assert derive(7, "sample", 1, 2, 3) == sample_seed(7, batch=1, group=2, sample=3)
    assert evaluation_seed(7, query=2, sample=3) == derive(7, "evaluation", 2, 3)
    seeds = VertexSeeds(5)
    for path in ("0:0", "0:1", "0.1:key"):
        assert seeds.of(path) == derive(5, "vertex", path)


def test_a_continued_seed_differs_with_what_was_kept_and_is_the_vertex_seed_without():
    assert continued_seed(5, num_kept=0) == 5
    assert len({continued_seed(5, num_kept=kept) for kept in range(50)}) == 50

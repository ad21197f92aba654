"""The two proofs: overlap changes nothing, and no death changes anything (I4 to I7, I9, I12)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from proof.chaos import TOLERANCE, Chaos
from proof.facts import Facts, differences
from proof.proof_cluster import ProofCluster

Note = Callable[[str], None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = ProofCluster(tmp_path_factory.mktemp("cluster") / "cluster")
    cluster.up()
    yield cluster
    cluster.down()
    assert cluster.outlived() == []


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_asynchronous_training_is_synchronous_training(
    cluster: ProofCluster, proves: Note
) -> None:
    await equal(cluster, proves, versions=2)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_asynchronous_training_is_synchronous_training_over_five_versions(
    cluster: ProofCluster, proves: Note
) -> None:
    await equal(cluster, proves, versions=5)


@pytest.mark.real
@pytest.mark.timeout(600)
async def test_deaths_change_nothing(cluster: ProofCluster, proves: Note) -> None:
    await whole(cluster, proves, num_runs=5)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_a_hundred_deaths_change_nothing(cluster: ProofCluster, proves: Note) -> None:
    await whole(cluster, proves, num_runs=100)


async def equal(cluster: ProofCluster, proves: Note, *, versions: int) -> None:
    """Overlap, swaps, early updates and refills against training when the whole batch is there."""
    size = f"versions={versions}"
    overlapping, _ = await cluster.run(f"asynchronous-{versions}", size)
    waiting, _ = await cluster.run(f"synchronous-{versions}", size, "pipeline.overlap=false")
    assert_refilled(overlapping)
    tokens, weights = differences(overlapping, waiting)
    assert tokens == 0
    assert weights <= TOLERANCE
    for facts in (overlapping, waiting):
        assert (facts.lost, facts.doubled) == (0, 0)
        assert facts.finished == facts.consumed + facts.void
    proves(f"{versions} versions, {len(waiting.tokens)} calls: weights equal to {weights:.1e}")


def assert_refilled(facts: Facts) -> None:
    """The failing samples have failed, or refills are not in the proof."""
    assert facts.void > 0
    assert max(ordinal for _, ordinal, _ in facts.tokens) >= 4


async def whole(cluster: ProofCluster, proves: Note, *, num_runs: int) -> None:
    """Killed processes leave the counts of a quiet run."""
    counts = await Chaos(cluster, seed=num_runs).go(num_runs)
    assert counts.good, counts.line()
    proves(counts.line())

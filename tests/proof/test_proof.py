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


REFILLS: tuple[str, ...] = ()
EARLY = (
    "workflow.entry=team:apart",
    "batch.on_sample_failure=drop_sample",  # who may be refilled, or replaced, may call anybody
    "batch.replace_max=0",
)
POLICIES = ("planner", "solver", "judge")
FLOAT32_TOLERANCE = 1e-3
"""Of a weight after one update; the optimizer's first step makes a rate of any gradient's sign."""

MODES = {"refills": REFILLS, "early-updates": EARLY}


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
async def test_asynchronous_training_is_synchronous_training(
    cluster: ProofCluster, proves: Note, mode: str
) -> None:
    await equal(cluster, proves, mode, versions=2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
async def test_asynchronous_training_is_synchronous_training_over_five_versions(
    cluster: ProofCluster, proves: Note, mode: str
) -> None:
    await equal(cluster, proves, mode, versions=5)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("versions", [1, 5])
async def test_in_float32_the_difference_is_that_of_rounding(
    cluster: ProofCluster, proves: Note, versions: int
) -> None:
    """Sums of another order; from the second version on a draw may fall otherwise."""
    size = (
        f"versions={versions}",
        *(f"policies.{name}.rollout.dtype=float32" for name in POLICIES),
        *(f"policies.{name}.trainer.compute_dtype=float32" for name in POLICIES),
    )
    overlapping, _ = await cluster.run(f"asynchronous-float32-{versions}", *size)
    waiting, _ = await cluster.run(
        f"synchronous-float32-{versions}", *size, "pipeline.overlap=false"
    )
    tokens, weights = differences(overlapping, waiting)
    for facts in (overlapping, waiting):
        assert (facts.lost, facts.doubled) == (0, 0)
        assert facts.finished == facts.consumed + facts.void
    if versions == 1:
        assert tokens == 0
        assert weights <= FLOAT32_TOLERANCE
    proves(
        f"float32: {versions} versions, {len(waiting.tokens)} calls, {tokens} with other tokens: "
        f"weights differ by {weights:.1e}"
    )


@pytest.mark.real
@pytest.mark.timeout(600)
async def test_deaths_change_nothing(cluster: ProofCluster, proves: Note) -> None:
    await whole(cluster, proves, num_runs=5)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_a_hundred_deaths_change_nothing(cluster: ProofCluster, proves: Note) -> None:
    await whole(cluster, proves, num_runs=100)


async def equal(cluster: ProofCluster, proves: Note, mode: str, *, versions: int) -> None:
    """Overlap and swaps, refills or early updates, against waiting for the whole batch."""
    size = (f"versions={versions}", *MODES[mode])
    name = f"{mode}-{versions}"
    overlapping, _ = await cluster.run(f"asynchronous-{name}", *size)
    waiting, _ = await cluster.run(f"synchronous-{name}", *size, "pipeline.overlap=false")
    if mode == "refills":
        assert_refilled(overlapping)
    else:
        assert overlapping.early_closures > 0, "the judge was to be updated before the batch ends"
    tokens, weights = differences(overlapping, waiting)
    assert tokens == 0
    assert weights <= TOLERANCE
    assert (waiting.early_closures, waiting.early_updates) == (0, 0)
    for facts in (overlapping, waiting):
        assert (facts.lost, facts.doubled) == (0, 0)
        assert facts.finished == facts.consumed + facts.void
    proves(
        f"{mode}: {versions} versions, {len(waiting.tokens)} calls, {overlapping.early_updates} "
        f"early updates: weights equal to {weights:.1e}"
    )


def assert_refilled(facts: Facts) -> None:
    """The failing samples have failed, or refills are not in the proof."""
    assert facts.void > 0
    assert max(ordinal for _, ordinal, _ in facts.tokens) >= 4


async def whole(cluster: ProofCluster, proves: Note, *, num_runs: int) -> None:
    """Killed processes leave the counts of a quiet run."""
    counts = await Chaos(cluster, seed=num_runs).go(num_runs)
    assert counts.good, counts.line()
    proves(counts.line())

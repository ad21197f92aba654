"""The trainer as a service, over gRPC, with a real store: bind, compute, save, apply, suspend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import ErrorReason
from flexmarl.core.ids import BatchId, micro_batch_id

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(loop_scope="session")
async def run(cluster: Cluster, tiny_model: Path) -> Run:
    run = await cluster.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
    await run.first_commit("p")
    return run


MICRO_BATCH_METRICS = {
    "loss", "loss_policy", "entropy", "clip_fraction", "ratio", "ratio_max", "kl_behaviour",
    "logprob_gap", "logprob_gap_max", "logprob_outside", "attention_padding", "tokens_per_s",
}  # fmt: skip
UPDATE_METRICS = {"grad_norm", "clip_factor", "lr", "weights_unchanged"}


async def test_two_versions_of_a_policy(cluster: Cluster, run: Run) -> None:
    for batch in range(2):
        first = await run.micro_batch("p", make_rows(6, seed=batch), batch=batch)
        second = await run.micro_batch("p", make_rows(5, seed=10 + batch), batch=batch)
        await run.bind("p", ["slot1"])
        for record in (first, second):
            result = await run.compute(record)
            assert result.added
            assert not result.non_finite
            assert result.metrics["ratio"] == pytest.approx(1.0)
            assert result.metrics.keys() == MICRO_BATCH_METRICS
            assert all(result.seconds[part] > 0 for part in ("fetch", "forward", "backward", "add"))
        ids = [first.micro_batch_id, second.micro_batch_id]
        applied = await run.apply("p", batch, ids)
        assert applied.metrics.keys() == UPDATE_METRICS
        assert applied.metrics["weights_unchanged"] == 0.0
        assert all(applied.seconds[part] > 0 for part in ("step", "write", "hash", "save"))
        state = applied.state
        assert (state.version, state.num_updates, state.applied) == (batch + 1, batch + 1, True)
        assert list(state.ledger) == ids
        assert state.counts.num_rows == 11
        assert state.weights_hash != run.weights_hash("p")
        assert state.weights.checksum == state.weights_hash
        await run.commit(state)
        suspended = await run.suspend("p")
        assert suspended.state.weights_hash == state.weights_hash
    status = await cluster.trainer.get_status()
    assert all(slot.policy == "" for slot in status.slots)
    assert status.ready


async def test_an_update_that_moves_no_weight_says_so(cluster: Cluster, tiny_model: Path) -> None:
    """Case F2: a step was made, and what is published is what was."""
    run = await cluster.make_run({"p": {"optimizer": {"lr": 1e-300}}}, {"p": tiny_model})
    await run.first_commit("p")
    record = await run.micro_batch("p", make_rows(4), batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(record)
    applied = await run.apply("p", 0, [record.micro_batch_id])
    assert applied.metrics["weights_unchanged"] == 1.0
    assert applied.metrics["grad_norm"] > 0
    assert (applied.state.num_updates, applied.state.weights_hash) == (1, run.weights_hash("p"))
    await run.suspend("p")


async def test_two_ranks_make_the_update_of_one(cluster: Cluster, tiny_model: Path) -> None:
    masters = []
    for slots in (["slot0"], ["slot1", "slot0"]):
        sections = {"trainer": {"compute_dtype": "float64", "world_size": len(slots)}}
        run = await cluster.make_run({"p": sections}, {"p": tiny_model})
        await run.first_commit("p")
        record = await run.micro_batch("p", make_rows(9), batch=0)
        await run.bind("p", slots)
        await run.compute(record)
        await run.suspend("p")
        await run.bind("p", slots)
        state = (await run.apply("p", 0, [record.micro_batch_id])).state
        masters.append(await run.numbers(state.master))
        await run.suspend("p")
    assert masters[0] == pytest.approx(masters[1], rel=1e-9, abs=1e-12)


async def test_a_micro_batch_counts_once_however_often_it_is_handed(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(4), batch=0)
    await run.bind("p", ["slot0"])
    first, again = await asyncio.gather(run.compute(record), run.compute(record))
    assert first.added
    assert again.added
    assert {first.counts.num_rows, again.counts.num_rows} == {4, 0}
    state = (await run.suspend("p")).state
    assert list(state.ledger) == [record.micro_batch_id]
    assert state.counts.num_rows == 4
    await run.bind("p", ["slot1"])
    assert (await run.compute(record)).added
    assert (await run.apply("p", 0, [record.micro_batch_id])).state.counts.num_rows == 4
    assert (await run.compute(record)).added
    await run.suspend("p")


async def test_an_apply_is_answered_from_its_set_also_by_a_later_binding(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(4), batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(record)
    first = (await run.apply("p", 0, [record.micro_batch_id])).state
    assert (await run.apply("p", 0, [record.micro_batch_id])).state == first
    await run.suspend("p")
    await run.bind("p", ["slot1"])
    again = (await run.apply("p", 0, [record.micro_batch_id])).state
    assert again.weights == first.weights
    assert again.num_updates == 1
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="lacks never"):
        await run.apply("p", 0, [record.micro_batch_id, "never"])
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match=record.micro_batch_id):
        await run.apply("p", 0, [])
    assert (await run.suspend("p")).state == again


async def test_an_apply_of_anything_else_than_the_sum_is_refused_by_name(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(4), batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(record)
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="lacks never"):
        await run.apply("p", 0, [record.micro_batch_id, "never"])
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match=record.micro_batch_id):
        await run.apply("p", 0, [])
    with fails(ErrorReason.VERSION_MISMATCH):
        await run.apply("p", 1, [record.micro_batch_id])
    assert (await run.apply("p", 0, [record.micro_batch_id])).state.version == 1
    await run.suspend("p")


async def test_a_micro_batch_that_is_not_finite_is_dropped_and_the_rest_applies(run: Run) -> None:
    good = await run.micro_batch("p", make_rows(4), batch=0)
    rows = make_rows(4, seed=9)
    rows[2].advantage = 1e300  # infinite in float32
    bad = await run.micro_batch("p", rows, batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(good)
    result = await run.compute(bad)
    assert (result.added, result.non_finite) == (False, True)
    assert (await run.compute(bad)).non_finite
    state = (await run.apply("p", 0, [good.micro_batch_id, bad.micro_batch_id])).state
    assert list(state.ledger) == [good.micro_batch_id]
    assert list(state.dropped) == [bad.micro_batch_id]
    assert state.counts.num_rows == 4
    await run.suspend("p")


async def test_a_batch_of_dropped_rows_only_does_not_step(run: Run) -> None:
    rows = make_rows(2)
    rows[0].advantage = -1e300
    bad = await run.micro_batch("p", rows, batch=0)
    await run.bind("p", ["slot0"])
    assert (await run.compute(bad)).non_finite
    state = (await run.suspend("p")).state
    assert (list(state.dropped), list(state.ledger)) == ([bad.micro_batch_id], [])
    await run.bind("p", ["slot0"])
    state = (await run.apply("p", 0, [bad.micro_batch_id])).state
    assert state.num_updates == 0
    assert state.weights_hash == run.weights_hash("p")
    await run.suspend("p")


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("weights_hash", ErrorReason.WEIGHTS_MISMATCH),
        ("policy_version", ErrorReason.WEIGHTS_MISMATCH),
        ("version_runs", ErrorReason.WEIGHTS_MISMATCH),
        ("temperature", ErrorReason.INVALID_ARGUMENT),
        ("vocabulary", ErrorReason.INVALID_ARGUMENT),
    ],
)
async def test_rows_that_may_not_be_trained_on_are_refused_by_name(
    run: Run, field: str, reason: ErrorReason
) -> None:
    def edit(vertices) -> None:
        meta, payload = vertices[1].meta, vertices[1].payload
        match field:
            case "weights_hash":
                meta.weights_hash = "sha256:other"
            case "policy_version":
                meta.policy_version = 1
            case "version_runs":
                count = meta.version_runs[0].num_tokens
                del meta.version_runs[:]
                runs = [(0, count - 1), (1, 1)]
                meta.version_runs.extend(
                    common_pb2.VersionRun(version=version, num_tokens=n) for version, n in runs
                )
            case "temperature":
                payload.temperature = 0.0
            case "vocabulary":
                payload.response_tokens[0] = 99

    good = await run.micro_batch("p", make_rows(3), batch=0)
    rows = make_rows(3, seed=4)
    bad = await run.micro_batch("p", rows, batch=0, edit=edit)
    await run.bind("p", ["slot0"])
    await run.compute(good)
    named = bad.micro_batch_id if field == "vocabulary" else bad.rows[1].vertex_id
    with fails(reason, match=named):
        await run.compute(bad)
    # Nothing was added and the binding is as good as before.
    state = (await run.suspend("p")).state
    assert list(state.ledger) == [good.micro_batch_id]


async def test_rows_that_are_nowhere_are_refused_by_name(run: Run) -> None:
    good = await run.micro_batch("p", make_rows(3), batch=0)
    lost = graph_pb2.MicroBatch()
    lost.CopyFrom(good)
    lost.micro_batch_id = micro_batch_id(BatchId(0), ordinal=99, policy="p")
    unknown = lost.rows[1].vertex_id.replace("/0:0", "/0:7")
    lost.rows[1].vertex_id = unknown
    await run.bind("p", ["slot0"])
    with fails(ErrorReason.VERTEX_NOT_FOUND, match=unknown):
        await run.compute(lost)
    assert (await run.compute(good)).counts.num_rows == 3
    assert list((await run.suspend("p")).state.ledger) == [good.micro_batch_id]


async def test_weights_other_than_the_bound_ones_are_refused(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(3), batch=0)
    await run.bind("p", ["slot0"])
    with fails(ErrorReason.WEIGHTS_MISMATCH):
        await run.compute(record, weights_hash="sha256:other")
    await run.suspend("p")


async def test_an_older_term_is_refused_and_a_newer_binding_starts_from_what_was_saved(
    run: Run,
) -> None:
    saved = await run.micro_batch("p", make_rows(3), batch=0)
    unsaved = await run.micro_batch("p", make_rows(3, seed=2), batch=0)
    await run.bind("p", ["slot0"])
    old_term = run.terms["p"]
    await run.compute(saved)
    await run.save("p")
    await run.compute(unsaved)
    state = (await run.bind("p", ["slot1"])).state
    assert list(state.ledger) == [saved.micro_batch_id]
    with fails(ErrorReason.TERM_STALE):
        await run.compute(unsaved, term=old_term)
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="lacks"):
        await run.apply("p", 0, [saved.micro_batch_id, unsaved.micro_batch_id])
    assert (await run.compute(unsaved)).counts.num_rows == 3
    await run.apply("p", 0, [saved.micro_batch_id, unsaved.micro_batch_id])
    slots = {slot.slot: slot.policy for slot in (await run.cluster.trainer.get_status()).slots}
    assert slots == {"slot0": "", "slot1": "p"}
    await run.suspend("p")


async def test_three_policies_swap_on_two_slots_and_end_as_they_would_alone(
    cluster: Cluster, tiny_model: Path
) -> None:
    names = ("a", "b", "c")
    ends: list[dict[str, str]] = []
    for swapping in (False, True):
        run = await cluster.make_run(
            {name: {"optimizer": {"lr": 0.01}} for name in names},
            dict.fromkeys(names, tiny_model),
        )
        await run.first_commit(*names)
        records = {
            name: [
                await run.micro_batch(name, make_rows(4, seed=seed), batch=0)
                for seed in (number, number + 10)
            ]
            for number, name in enumerate(names)
        }
        states = {}
        if swapping:
            await run.bind("a", ["slot0"])
            await run.bind("b", ["slot1"])
            with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="held by"):
                await run.bind("c", ["slot0"])
            await asyncio.gather(run.compute(records["a"][0]), run.compute(records["b"][0]))
            await run.suspend("a")
            await run.bind("c", ["slot0"])
            await asyncio.gather(run.compute(records["c"][0]), run.compute(records["b"][1]))
            await asyncio.gather(run.suspend("c"), run.suspend("b"))
        for number, name in enumerate(names):
            await run.bind(name, [f"slot{number % 2}"])
            for record in records[name]:
                await run.compute(record)
            ids = [record.micro_batch_id for record in records[name]]
            states[name] = (await run.apply(name, 0, ids)).state
            await run.suspend(name)
        ends.append({name: state.weights_hash for name, state in states.items()})
    assert ends[0] == ends[1]
    assert len(set(ends[0].values())) == 3


async def test_a_frozen_policy_publishes_its_weights_and_takes_no_gradients(
    cluster: Cluster, tiny_model: Path
) -> None:
    run = await cluster.make_run({"f": {"kind": "frozen"}}, {"f": tiny_model})
    state = (await run.bind("f", ["slot0"])).state
    assert state.weights.key
    assert not state.master.key
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="frozen"):
        await run.apply("f", 0, [])
    await run.suspend("f")
    again = (await run.bind("f", ["slot1"])).state
    assert again.weights_hash == state.weights_hash
    await run.suspend("f")


async def test_a_run_under_the_id_of_a_deleted_one_never_gets_its_state(
    cluster: Cluster, tiny_model: Path
) -> None:
    async def first_update(run_id: str, *, seed: int) -> str:
        """Set 0 is made on one slot; where it is bound next, a run before left its own."""
        run = await cluster.make_run({"p": {}}, {"p": tiny_model}, run_id=run_id, seed=seed)
        state = (await run.bind("p", ["slot1"])).state
        await run.suspend("p")
        await run.commit(state)
        await run.bind("p", ["slot0"])
        record = await run.micro_batch("p", make_rows(4), batch=0)
        await run.compute(record)
        await run.suspend("p")
        await run.bind("p", ["slot0"])
        applied = (await run.apply("p", 0, [record.micro_batch_id])).state
        await cluster.trainer.close_run(run.run_id, term=run.term)
        await cluster.store.delete_run(run.run_id)
        return applied.weights_hash

    other = await first_update("again", seed=1)
    again = await first_update("again", seed=2)
    assert again != other
    assert again == await first_update("elsewhere", seed=2)


async def test_a_closed_run_gives_its_slots_back(cluster: Cluster, run: Run) -> None:
    await run.bind("p", ["slot0"])
    term = await cluster.store.acquire_term(run.run_id, "orchestrator", holder="newer")
    await cluster.trainer.open_run(run.run_id, term=term, shards=run.shards)
    with fails(ErrorReason.TERM_STALE):
        await cluster.trainer.close_run(run.run_id, term=run.term)
    await cluster.trainer.close_run(run.run_id, term=term)
    await cluster.trainer.close_run(run.run_id, term=term)
    async for status in cluster.trainer.watch_status(interval_s=0.05):
        assert all(slot.policy == "" for slot in status.slots)
        break
    with fails(ErrorReason.RUN_NOT_FOUND):
        await run.bind("p", ["slot0"])


async def test_an_unknown_policy_slot_or_operation_is_named(run: Run) -> None:
    with fails(ErrorReason.INVALID_ARGUMENT, match="nobody"):
        await run.bind("nobody", ["slot0"])
    with fails(ErrorReason.INVALID_ARGUMENT, match="slot9"):
        await run.bind("p", ["slot9"])
    record = await run.micro_batch("p", make_rows(2), batch=0)
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="not bound"):
        await run.compute(record, term=run.terms["p"])

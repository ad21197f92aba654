"""Whether a run over the stand-ins lost nothing and counted nothing twice."""

from __future__ import annotations

from orchestrator.cluster import AGENTS, Cluster
from orchestrator.standin_trainer import weights_of

CALLS_PER_SAMPLE = {"splitter": 1, "sorter": 2, "merger": 1}


async def check_books(run: Cluster, *, versions: int = 3, samples: int = 12) -> None:
    """Every row of every batch is consumed or void, each batch has all its samples, once."""
    manifests = await run.manifests()
    assert [m.version for m in manifests] == list(range(versions + 1))
    for manifest in manifests[1:]:
        for agent in AGENTS:
            counts = manifest.batch.policies[agent]
            assert counts.finished == counts.consumed + sum(counts.voided.values())
            assert counts.consumed == samples * CALLS_PER_SAMPLE[agent]
    records = [
        record
        for batch in range(versions)
        for record in await run.store.list_micro_batches(run.run_id, batch=batch)
    ]
    weights = await weights_of(run.store, run.run_id, manifests[-1])
    for agent in AGENTS:
        # The weights count what was applied to them: each record once, over all losses.
        assert weights[agent] == sum(record.policy == agent for record in records)
        assert manifests[-1].policies[agent].num_updates == versions
    assert (manifests[-1].cursor.epoch, manifests[-1].cursor.position) == divmod(4 * versions, 13)

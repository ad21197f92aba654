"""Messages and rows of a small run, as the services send them."""

from __future__ import annotations

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.api.rollout.v1 import engine_pb2, rollout_pb2
from flexmarl.api.trainer.v1 import trainer_pb2

SAMPLE_ID = "b000000a0-g0000-s000a0"


def batch_record(version: int, reward: float) -> graph_pb2.BatchRecord:
    return graph_pb2.BatchRecord(
        batch=version,
        num_groups_closed=3,
        num_groups_dropped=1,
        policies={
            "sorter": graph_pb2.PolicyCounts(finished=10, consumed=8, voided={"zero_variance": 2}),
            "": graph_pb2.PolicyCounts(finished=4),
        },
        metrics={
            "team_reward": reward,
            "reward/sorter": reward / 2,
            "num_samples": 32.0,
            "step_s": 1.25,
            "step/rollout_s": 0.75,
            "step/training_tail_s": 0.5,
            "tokens_per_s/sampled": 3000.0,
            "tokens_per_s/trained": 7000.0,
            "utilisation/rollout": 0.5,
            "loss/sorter": float("nan"),
        },
    )


def report(version: int, reward: float) -> orchestrator_pb2.VersionReport:
    return orchestrator_pb2.VersionReport(
        version=version, batch=batch_record(version, reward), committed_unix_ns=5
    )


def message(
    *reports: orchestrator_pb2.VersionReport, stage: str = "rollout", waits: tuple[str, ...] = ()
) -> orchestrator_pb2.WatchProgressResponse:
    return orchestrator_pb2.WatchProgressResponse(
        reports=reports,
        progress=orchestrator_pb2.RunProgress(
            run_id="quickstart-1",
            status=common_pb2.RUN_STATUS_RUNNING,
            version=2,
            num_versions=60,
            stage=stage,
            num_groups_closed=1,
            num_groups=4,
            num_samples_ended=5,
            num_samples=32,
            rows_waiting={"sorter": 12},
            queues={"sorter": rollout_pb2.QueueStatus(num_waiting=7, num_running=9)},
            instances=[
                engine_pb2.InstanceStatus(
                    instance_id="sorter-0",
                    policies=["sorter"],
                    state=engine_pb2.INSTANCE_STATE_SERVING,
                    version=2,
                    busy_fraction=0.8,
                )
            ],
            slots=[
                trainer_pb2.SlotStatus(slot="slot0", policy="sorter", activity="gradients"),
                trainer_pb2.SlotStatus(slot="slot1"),
            ],
            waits=waits,
        ),
    )


def vertex(
    path: str, agent: str, upstream: tuple[str, ...] = (), **meta: object
) -> graph_pb2.Vertex:
    return graph_pb2.Vertex(
        meta=graph_pb2.VertexMeta(
            vertex_id=f"{SAMPLE_ID}/{path}",
            sample_id=SAMPLE_ID,
            group_id="b000000a0-g0000",
            path=path,
            agent=agent,
            policy=agent,
            kind=common_pb2.VERTEX_KIND_AGENT,
            status=common_pb2.VERTEX_STATUS_DONE,
            attempt=1,
            input_hash=path.encode(),
            upstream_vertex_ids=[f"{SAMPLE_ID}/{item}" for item in upstream],
            policy_version=0,
            weights_hash="sha256:w",
            version_runs=[common_pb2.VersionRun(version=0, num_tokens=2)],
            num_prompt_tokens=2,
            num_response_tokens=2,
            finish_reason="length",
            instance_id=f"{agent}-0",
            ready_unix_ns=1_000,
            dispatched_unix_ns=2_000,
            finished_unix_ns=3_000,
            trainable=True,
            **meta,
        ),
        payload=graph_pb2.VertexPayload(
            prompt_tokens=[0, 1], response_tokens=[1, 2], logprobs=[-0.5, -0.25], temperature=1.0
        ),
    )


def sample() -> graph_pb2.Sample:
    return graph_pb2.Sample(
        sample_id=SAMPLE_ID,
        group_id="b000000a0-g0000",
        status=common_pb2.SAMPLE_STATUS_DONE,
        rewards=graph_pb2.RewardSet(team=0.75),
        output_json=b'"0123"',
        num_vertices=4,
        started_unix_ns=500,
        finished_unix_ns=4_000,
    )


def vertices() -> list[graph_pb2.Vertex]:
    return [
        vertex("0:0", "splitter", reward=0.5, advantage=0.125, micro_batch_id="m0"),
        vertex("0.0:0", "sorter", ("0:0",)),
        vertex("0.1:0", "sorter", ("0:0",), void_reason=common_pb2.VOID_REASON_ZERO_VARIANCE),
        vertex("0:1", "merger", ("0.0:0", "0.1:0")),
    ]

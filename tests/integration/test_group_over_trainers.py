"""A whole run over two trainers of one slot each, whose policies need two: a rank dies in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.cluster_harness import Cluster, Size, eventually, kill
from integration.test_kills import survive
from ports import own_port
from trainer.service_harness import Service

from flexmarl.client.trainer import TrainerClient

SIZE = Size(versions=6, groups=4)
WIDE = ("splitter", "merger")


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_a_run_whose_policies_lie_on_two_trainers_survives_the_death_of_a_rank(
    tmp_path: Path,
) -> None:
    second = Service(
        "flexmarl.trainer",
        tmp_path / "trainer2",
        data_dir=tmp_path / "trainer2",
        slots='["slot0"]',
    )
    await second.start()
    port = own_port()
    cluster = Cluster(tmp_path / "cluster")
    cluster.up(
        trainer__slots='["slot0"]',
        trainer__server__port=port,
        orchestrator__trainers=f'["127.0.0.1:{port}","{second.address}"]',
    )
    try:
        async with TrainerClient.connect(second.address) as trainer:

            async def at_work() -> int:
                """The rank of a policy that has one on the second trainer, too."""
                (slot,) = (await trainer.get_status()).slots
                return slot.pid if slot.policy in WIDE else 0

            async def misfortune() -> None:
                kill(await eventually(at_work, what="a rank on lent slots", every_s=0.01))

            sets = [
                part
                for policy in WIDE
                for part in ("--set", f"policies.{policy}.trainer.world_size=2")
            ]
            await survive("over-two", misfortune, cluster, tmp_path, size=SIZE, sets=sets)
    finally:
        cluster.down()
        await second.stop()

"""Whole runs over two trainers of one slot each, whose policies need two: one of them dies in it.

Either trainer may lead; which one does, the order of their addresses says, and it goes on to.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from integration.cluster_harness import Cluster, Size, eventually, kill
from integration.test_kills import survive
from ports import own_port
from trainer.service_harness import Service

from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.client.trainer import TrainerClient

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SIZE = Size(versions=10, groups=4)
WIDE = ("splitter", "merger")


@dataclass
class Two:
    """A cluster, and a trainer beside it; `first` is the address of the cluster's own."""

    cluster: Cluster
    first: str
    second: Service

    @property
    def leading(self) -> str:
        """Address of the trainer that leads."""
        return min(self.first, self.second.address)

    @property
    def lending(self) -> str:
        """Address of the other one."""
        return max(self.first, self.second.address)

    async def at_work(self, address: str) -> trainer_pb2.SlotStatus:
        """Waits until a policy with ranks on both trainers works on this one's slot."""

        async def find(trainer: TrainerClient) -> trainer_pb2.SlotStatus | None:
            (slot,) = (await trainer.get_status()).slots
            return slot if slot.policy in WIDE and slot.activity else None

        async with TrainerClient.connect(address) as trainer:
            found = await eventually(lambda: find(trainer), what="work on both", every_s=0.01)
        assert isinstance(found, trainer_pb2.SlotStatus)
        return found

    async def kill_trainer(self, address: str) -> None:
        """kill -9; it is started again, the cluster's own one by its supervisor."""
        if address == self.first:
            kill(self.cluster.pid("trainer"))
        else:
            await self.second.stop(signal.SIGKILL)
            await self.second.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    second = Service(
        "flexmarl.trainer",
        folder / "trainer2",
        data_dir=folder / "trainer2",
        slots='["slot0"]',
    )
    await second.start()
    first = f"127.0.0.1:{own_port()}"
    cluster = Cluster(folder / "cluster")
    try:
        cluster.up(
            trainer__slots='["slot0"]',
            trainer__server__port=first.rpartition(":")[2],
            orchestrator__trainers=f'["{first}","{second.address}"]',
        )
        yield Two(cluster, first, second)
    finally:
        cluster.down()
        await second.stop()


async def survives(name: str, two: Two, tmp_path: Path, victim: str) -> None:
    """A run of policies with a rank on each trainer, in which the named one dies."""

    async def misfortune(go_on: Callable[[], None]) -> None:
        go_on()  # who stands still gives nobody work
        match victim:
            case "lent rank":
                kill((await two.at_work(two.lending)).pid)
            case "leading rank":
                kill((await two.at_work(two.leading)).pid)
            case "leading trainer":
                await two.at_work(two.leading)
                await two.kill_trainer(two.leading)
            case "lending trainer":
                await two.at_work(two.lending)
                await two.kill_trainer(two.lending)

    sets = [part for p in WIDE for part in ("--set", f"policies.{p}.trainer.world_size=2")]
    await survive(name, misfortune, two.cluster, tmp_path, size=SIZE, sets=sets)
    for address in (two.first, two.second.address):
        async with TrainerClient.connect(address) as trainer:

            async def has_its_slot(trainer: TrainerClient = trainer) -> bool:
                (slot,) = (await trainer.get_status()).slots
                return not slot.policy

            await eventually(has_its_slot, what=f"the slot of {address} to be free")


@pytest.mark.real
@pytest.mark.parametrize("victim", ["lent rank", "leading rank"])
async def test_a_run_survives_the_death_of_a(victim: str, two: Two, tmp_path: Path) -> None:
    await survives(victim.replace(" ", "-"), two, tmp_path, victim)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["leading trainer", "lending trainer"])
async def test_a_run_survives_the_death_of_the(victim: str, two: Two, tmp_path: Path) -> None:
    await survives(victim.replace(" ", "-"), two, tmp_path, victim)

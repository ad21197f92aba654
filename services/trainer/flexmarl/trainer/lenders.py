"""The other trainers, as far as they lend slots to groups that this one leads."""

from __future__ import annotations

from collections.abc import Sequence

from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.process_groups import check_meeting_place, check_part
from flexmarl.core.trainer_slots import PolicyKey
from flexmarl.runtime.aio import Background
from flexmarl.trainer.borrowing import Borrowed
from flexmarl.trainer.config import TrainerConfig
from flexmarl.trainer.talk import FRAME_FORMAT


class Lenders:
    """Connections to them, and what is borrowed of them.

    Args:
        config: Of this trainer.
        background: Owns what listens to them.
    """

    def __init__(self, config: TrainerConfig, background: Background) -> None:
        self._config = config
        self._background = background
        self._clients: dict[str, TrainerClient] = {}

    def borrow(
        self,
        key: PolicyKey,
        beyond: Sequence[trainer_pb2.TrainerSlots],
        *,
        term: int,
        num_near: int,
    ) -> list[Borrowed]:
        """Returns what a binding is to have of other trainers; nothing is asked for yet.

        Args:
            key: The policy.
            beyond: Which slots.
            term: Term of the binding.
            num_near: Ranks on this trainer, the first ones.

        Raises:
            DomainError: INVALID_ARGUMENT when ranks there could not make a group with those here.
        """
        first_rank = num_near
        world_size = num_near + sum(len(others.slots) for others in beyond)
        check_part(first_rank=0, num_slots=num_near, world_size=world_size)
        host = self._config.rendezvous_host
        check_meeting_place(host, peers=[others.address for others in beyond])
        borrowed: list[Borrowed] = []
        for others in beyond:
            borrow = trainer_pb2.Borrow(
                run_id=key.run_id,
                policy=key.policy,
                term=term,
                slots=others.slots,
                first_rank=first_rank,
                world_size=world_size,
                frame_format=FRAME_FORMAT,
                rendezvous_host=host,
            )
            first_rank += len(others.slots)
            made = Borrowed(
                self._client(others.address),
                borrow,
                ready_s=self._config.warm_timeout_s,
                silence_s=self._config.peer_silence_s,
                background=self._background,
            )
            borrowed.append(made)
        return borrowed

    async def close(self) -> None:
        """Closes the connections."""
        for client in self._clients.values():
            await client.close()

    def _client(self, address: str) -> TrainerClient:
        if address not in self._clients:
            self._clients[address] = TrainerClient.connect(address)
        return self._clients[address]

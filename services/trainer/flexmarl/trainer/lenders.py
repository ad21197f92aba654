"""The other trainers, as far as they lend slots to groups that this one leads."""

from __future__ import annotations

from collections.abc import Sequence

from flexmarl.api.trainer.v1alpha1 import trainer_pb2
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.process_groups import check_meeting_place, check_part
from flexmarl.core.trainer_slots import Claim
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

    def check(self, beyond: Sequence[trainer_pb2.TrainerSlots], *, world_size: int) -> None:
        """Checks that ranks of these trainers could make a group with this one's.

        Raises:
            DomainError: INVALID_ARGUMENT.
        """
        check_part(first_rank=0, num_slots=1, world_size=world_size)
        peers = [others.address for others in beyond]
        check_meeting_place(self._config.rendezvous_host, peers=peers)

    def borrow(self, claim: Claim, beyond: Sequence[trainer_pb2.TrainerSlots]) -> list[Borrowed]:
        """Returns what a binding is to have of other trainers; nothing is asked for yet."""
        borrowed: list[Borrowed] = []
        first_rank = len(claim.slots)
        world_size = first_rank + sum(len(others.slots) for others in beyond)
        for others in beyond:
            borrow = trainer_pb2.Borrow(
                run_id=claim.key.run_id,
                policy=claim.key.policy,
                term=claim.term,
                slots=others.slots,
                first_rank=first_rank,
                world_size=world_size,
                frame_format=FRAME_FORMAT,
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

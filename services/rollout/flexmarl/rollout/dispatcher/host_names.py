"""Which process a host's name belongs to: of two that share it, the one that took it last."""

from __future__ import annotations

from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import HostHello
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.logging import get_logger

MAX_REPLACED: Final = 256
"""Most processes that are remembered as replaced, of one name. Those that still run dial again and
again, and each dial makes them the newest: the ones forgotten are gone."""

_log = get_logger(__name__)


class HostNames:
    """Processes whose name another one has taken.

    A host that is started again has its old name and is a new process; the old one is gone. If it
    is not, two share the name, and each would take the other's requests with every dial. So the one
    that was replaced is refused, until the name is free: only names of hosts that are here, or that
    may come back, are kept.
    """

    def __init__(self) -> None:
        # Of each name the replaced processes, longest unheard first, and whether that was told.
        self._replaced: dict[str, dict[str, bool]] = {}

    def __len__(self) -> int:
        """Processes that are remembered."""
        return sum(map(len, self._replaced.values()))

    def replaced(self, host_id: str, incarnation: str) -> None:
        """Another process has taken the name of this one."""
        replaced = self._replaced.setdefault(host_id, {})
        replaced[incarnation] = False
        if len(replaced) > MAX_REPLACED:
            del replaced[next(iter(replaced))]

    def freed(self, host_id: str) -> None:
        """Nobody has the name any more: whoever dials next may take it."""
        self._replaced.pop(host_id, None)

    def check(self, hello: HostHello) -> None:
        """Refuses a process whose name another one has taken; logs it the first time.

        Raises:
            DomainError: ALREADY_EXISTS.
        """
        host_id, incarnation = hello.host_id, hello.incarnation
        replaced = self._replaced.get(host_id, {})
        told = replaced.pop(incarnation, None)
        if told is None:
            return
        replaced[incarnation] = True
        message = (
            f"host_id {host_id!r} was taken by another engine host, started later: give each its "
            "own host_id, or stop one of the two; this one keeps trying, and has the name again "
            "when the other one is gone"
        )
        if not told:
            _log.error("host_name_twice", host=host_id, incarnation=incarnation, error=message)
        raise DomainError(ErrorReason.ALREADY_EXISTS, message, {"host_id": host_id})

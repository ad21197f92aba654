"""Ports of a local cluster: free ones, outside of the range that outgoing connections use.

A service that was killed comes back on its port. If that port lay in the kernel's ephemeral range,
a client that tries to reconnect in between could be given it as its own source port, connect to
itself, and keep the service out.

A port is free until its service listens, seconds after it was picked: what was picked is claimed,
so that two clusters that start at the same time, in two shells or two tests, never pick the same.
"""

from __future__ import annotations

import socket
import sys
from itertools import chain
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Final, Self

from flexmarl.cli.errors import CliError

_LOWEST: Final = 20_000
_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_port(key: str, host: str, port: int) -> None:
    """Refuses a configured port that somebody holds.

    Raises:
        CliError: Naming the key.
    """
    if port and not is_free(host, port):
        raise CliError(
            f"{key}: port {port} of {host} is in use; choose another port, or 0 for a free one"
        )


class PortClaims:
    """Ports that this process has picked, and nobody else picks until they are given back.

    A claim is an abstract Unix socket of the port's name: the kernel gives it to one process, knows
    it in the network namespace that the port lies in, and takes it back when the process dies. It
    binds those who claim; a program that knows nothing of claims may take the port all the same.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def pick(self, host: str) -> int:
        """A free port, claimed.

        Raises:
            CliError: There is none.
        """
        highest = max(_ephemeral_start(), _LOWEST + 1000)
        ports = range(_LOWEST, highest)
        first = SystemRandom().randrange(len(ports))
        for port in chain(ports[first:], ports[:first]):
            if self.take(host, port):
                return port
        raise CliError(f"no free port between {_LOWEST} and {highest} on {host}")

    def take(self, host: str, port: int) -> bool:
        """Claims one port; False when somebody holds it or has claimed it."""
        claim = _claim(port)
        if claim is None:
            return False
        if not is_free(host, port):
            claim.close()
            return False
        self._held[port] = claim
        return True

    def close(self) -> None:
        """Give them all back."""
        for claim in self._held.values():
            claim.close()
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _claim(port: int) -> socket.socket | None:
    if sys.platform != "linux":
        return socket.socket()  # there are no such names: nothing is kept from others
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0flexmarl/port/{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _ephemeral_start() -> int:
    try:
        return int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768

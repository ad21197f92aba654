"""Ports of a local cluster: free ones, outside of the range that outgoing connections use.

A service that was killed comes back on its port. If that port lay in the kernel's ephemeral range,
a client that tries to reconnect in between could be given it as its own source port, connect to
itself, and keep the service out.
"""

from __future__ import annotations

import socket
from pathlib import Path
from random import SystemRandom
from typing import Final

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


def pick_ports(count: int, *, host: str) -> list[int]:
    """Free ports, all different.

    Raises:
        CliError: When there are not enough.
    """
    highest = max(_ephemeral_start(), _LOWEST + 1000)
    picked: list[int] = []
    for port in SystemRandom().sample(range(_LOWEST, highest), k=highest - _LOWEST):
        if len(picked) == count:
            break
        if is_free(host, port):
            picked.append(port)
    if len(picked) < count:
        raise CliError(f"no {count} free ports between {_LOWEST} and {highest} on {host}")
    return picked


def _ephemeral_start() -> int:
    try:
        return int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768

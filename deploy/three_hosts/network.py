"""Hosts on one machine: network namespaces on a bridge, each with one address."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

NETWORK = "10.213.78"
"""Its hosts are .1, .2, ...; this machine itself is .254."""

_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace.

    Attributes:
        name: As a person calls it.
        namespace: Its network namespace.
        device: Its end of the cable.
        address: Its address.
    """

    name: str
    namespace: str
    device: str
    address: str

    def plug(self, *, in_: bool) -> None:
        """Put its cable in, or pull it out."""
        _ip("-n", self.namespace, "link", "set", self.device, "up" if in_ else "down")

    def enter(self, command: list[str]) -> list[str]:
        """The command that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def kill_all(self) -> None:
        """`kill -9` of every process on this host, until none is left.

        Raises:
            TimeoutError: One does not die.
        """
        end = time.monotonic() + _END_S
        while pids := self._pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise TimeoutError(f"host {self.name}: processes {pids} do not die")
            time.sleep(0.02)

    def _pids(self) -> list[int]:
        return [int(line) for line in _ip("netns", "pids", self.namespace).split()]


class Network:
    """A bridge in a namespace of its own, hosts on it, and this machine. Needs root.

    Args:
        names: Of the hosts.

    Raises:
        OSError: No namespace can be made here.
    """

    def __init__(self, *names: str) -> None:
        mark = f"fm{uuid.uuid4().hex[:5]}"
        self._switch = f"{mark}-sw"
        self._made: list[str] = []
        self.hosts = {
            name: Host(name, f"{mark}-{name}", f"{mark}{name}"[:14], f"{NETWORK}.{number}")
            for number, name in enumerate(names, 1)
        }
        try:
            self._make(f"{mark}r")
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Take it away; devices, and their other ends, go with their namespaces."""
        while self._made:
            _ip("netns", "del", self._made.pop())

    def _make(self, own_device: str) -> None:
        for namespace in (self._switch, *(host.namespace for host in self.hosts.values())):
            _ip("netns", "add", namespace)
            self._made.append(namespace)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host in self.hosts.values():
            self._cable(host.device, host.address, ["-n", host.namespace])
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        self._cable(own_device, f"{NETWORK}.254", [])

    def _cable(self, device: str, address: str, inside: list[str]) -> None:
        peer = f"{device}p"
        _ip(*inside, "link", "add", device, "type", "veth", "peer", peer, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", peer, "master", "br0", "up")
        _ip(*inside, "addr", "add", f"{address}/24", "dev", device)
        _ip(*inside, "link", "set", device, "up")


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise OSError("no command `ip`: install iproute2") from None
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout

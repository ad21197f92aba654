"""Ports of services that tests start, kill and start again.

They lie outside of the range that outgoing connections use, and are claimed for the life of the
test's process: what runs beside it never comes to one in the moment in which nobody listens there.
"""

from __future__ import annotations

from flexmarl.cli.preflight.ports import PortClaims

_CLAIMS = PortClaims()


def own_port() -> int:
    """A port of 127.0.0.1 that is this process's until it ends."""
    return _CLAIMS.pick("127.0.0.1")

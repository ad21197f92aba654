"""Binding the port of a server: it is bound, or one line says why not."""

from __future__ import annotations

import socket

import grpc

from flexmarl.core.errors import DomainError, ErrorReason


def bind(
    server: grpc.aio.Server, *, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """Have a server listen; returns the port, which is another one if 0 is asked for.

    Raises:
        DomainError: PORT_IN_USE, with what the system says.
    """
    address = f"{host}:{port}"
    refused = _why_not(host, port)
    if not refused:
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError:
            refused = "another process was faster"
    raise DomainError(
        ErrorReason.PORT_IN_USE, f"cannot listen on {address}: {refused}", {"address": address}
    )


def _why_not(host: str, port: int) -> str:
    """What the system has against it: gRPC keeps the cause to itself, and prints its own line."""
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: connections of a process that was here before hold nobody up.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""

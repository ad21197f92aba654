"""JSON over HTTP to one server, by URL or by Unix socket; the standard library and nothing else.

A call opens a connection of its own: it costs microseconds beside a generation, and closing it is
how a caller gives up. Callers are threads.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

JsonObject = dict[str, Any]


class HttpStatusError(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status code.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpServer:
    """Where a server is.

    Attributes:
        base: "http://host:port/path", "https://...", or "unix:/path/of/socket".
        headers: Sent with every call.
    """

    base: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def connect(self, *, timeout_s: float) -> http.client.HTTPConnection:
        """A connection, opened by its first request.

        Raises:
            ValueError: `base` is none of the three forms.
        """
        if self.base.startswith("unix:"):
            return _UnixConnection(self.base.removeprefix("unix:"), timeout_s=timeout_s)
        parts = urlsplit(self.base)
        if not parts.hostname or parts.scheme not in ("http", "https"):
            raise ValueError(f"{self.base!r} is neither an http(s) URL nor unix:/path")
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def call(
        self, method: str, path: str, body: JsonObject | None = None, *, timeout_s: float
    ) -> JsonObject:
        """Make one call.

        Args:
            method: "GET" or "POST".
            path: Below `base`.
            body: Sent as JSON.
            timeout_s: Longest silence of the server.

        Returns:
            The answer's JSON object; empty when it has none.

        Raises:
            HttpStatusError: The server refused.
            OSError: It was not reached, or went silent.
        """
        connection = self.connect(timeout_s=timeout_s)
        try:
            return self.call_on(connection, method, path, body)
        finally:
            connection.close()

    def call_on(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: JsonObject | None = None,
    ) -> JsonObject:
        """`call` on a connection that the caller closes."""
        headers = {"Content-Type": "application/json", **self.headers}
        prefix = "" if self.base.startswith("unix:") else urlsplit(self.base).path.rstrip("/")
        try:
            connection.request(
                method, prefix + path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            raw = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.base}: {type(error).__name__}") from error
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise HttpStatusError(response.status, raw.decode(errors="replace"))
        return _object(raw)


def _object(raw: bytes) -> JsonObject:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)

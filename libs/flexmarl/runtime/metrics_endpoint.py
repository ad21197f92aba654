"""The HTTP endpoint of Prometheus, with the service's own certificates and tokens.

Each connection has a thread, two bounds on its time and a place among few: a client that sends
nothing holds its place for seconds, one that sends slowly not much longer, and neither holds
anybody else's. The handshake is made in that thread.
"""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socket import AF_INET6, SHUT_RDWR, socket
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.logging import get_logger

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_TIMEOUT_S: Final = 10.0
"""A connection that sends or takes nothing for this long is closed."""

CONNECTION_S: Final = 30.0
"""A connection is closed after this time, whatever it sends: a byte now and then is no silence."""

MAX_CONNECTIONS: Final = 16
"""Connections at once; further ones are closed."""

_log = get_logger(__name__)


class MetricsEndpoint:
    """HTTP endpoint `/metrics`, served by daemon threads of its own.

    Args:
        registry: What is told.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        tls: Certificates; None: plain HTTP.
        admits: Whether an `Authorization` header lets in; None: everybody may read.
        timeout_s: Longest silence of a connection.
        connection_s: Longest time of a connection.

    Raises:
        DomainError: PORT_IN_USE.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        admits: Callable[[str], bool] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        connection_s: float = CONNECTION_S,
    ) -> None:
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), _Handler)
        except OSError as error:
            raise DomainError(
                ErrorReason.PORT_IN_USE,
                f"metrics port {host}:{port} cannot be bound: {error.strerror}",
                {"address": f"{host}:{port}"},
            ) from None
        self._server.tls = tls
        self._server.timeout_s = timeout_s
        self._server.connection_s = connection_s
        self._server.set_app(_guarded(make_wsgi_app(registry), admits))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Take these certificates for the connections to come."""
        self._server.tls = context

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingMixIn, WSGIServer):
    """One thread a connection, at most `MAX_CONNECTIONS`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * MAX_CONNECTIONS
    tls: ssl.SSLContext | None = None
    timeout_s = REQUEST_TIMEOUT_S
    connection_s = CONNECTION_S

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - those of the base class
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args)

    def server_bind(self) -> None:
        """Bind without asking the resolver for the host's name, as the nearer base would."""
        TCPServer.server_bind(self)
        host, port, *_ = self.server_address
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Start the connection's thread, if there is a place."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Serve one connection and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Shake hands, then answer."""
        assert isinstance(request, socket)
        request.settimeout(self.timeout_s)
        with _hung_up_after(self.connection_s, request):
            if self.tls is None:
                super().finish_request(request, client_address)
                return
            with self.tls.wrap_socket(request, server_side=True) as encrypted:
                super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """A broken connection or handshake is the client's business."""
        _log.debug(
            "metrics_connection_failed", peer=str(client_address), error=str(sys.exception())
        )


@contextmanager
def _hung_up_after(seconds: float, connection: socket) -> Iterator[None]:
    """Ends the connection if the block takes longer, which then fails at its next read or write."""
    # A handle of its own: encryption takes the connection's away.
    with connection.dup() as held:
        timer = threading.Timer(seconds, _hang_up, (held,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _hang_up(connection: socket) -> None:
    with suppress(OSError):  # it ended by itself meanwhile
        connection.shutdown(SHUT_RDWR)


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(WSGIRequestHandler):
    """Says nothing of each request: a scrape every few seconds is no news."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _guarded(app: WSGIApplication, admits: Callable[[str], bool] | None) -> WSGIApplication:
    if admits is None:
        return app

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if admits(environ.get("HTTP_AUTHORIZATION", "")):
            return app(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
        return [b""]

    return guarded

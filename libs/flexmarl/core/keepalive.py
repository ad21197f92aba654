"""Transport numbers that both ends of a connection must agree on.

A server closes connections whose client pings more often than the server's minimum, so the two
intervals live side by side and a test keeps `CLIENT_PING_INTERVAL_MS` the larger.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Largest message either end accepts or sends; more goes in chunks."""

CLIENT_PING_INTERVAL_MS: Final = 20_000
"""A client pings this often, also without calls, to find dead peers behind silent networks."""

CLIENT_PING_TIMEOUT_MS: Final = 10_000
"""A ping without answer for this long closes the connection."""

SERVER_MIN_PING_INTERVAL_MS: Final = 10_000
"""Pings more frequent than this are a protocol violation to the server."""

SERVER_PING_INTERVAL_MS: Final = 20_000
"""A server pings this often: a client whose machine lost its power, or that is stopped, sends
nothing any more, and its stream would stand as long as nothing is sent."""

SERVER_PING_TIMEOUT_MS: Final = 15_000
"""A client that has not answered a ping by then is gone: what it had in hand goes elsewhere."""

RECONNECT_INITIAL_BACKOFF_MS: Final = 100
RECONNECT_MAX_BACKOFF_MS: Final = 1_000
"""A restarted service is found again within this time and a fifth of it, which gRPC may add; its
own default is two minutes. A dispatcher that was started anew waits longer than that for the engine
hosts of the one before it."""

CONNECT_TIMEOUT_MS: Final = 5_000
"""A connection has to stand, with its handshakes, within this time. gRPC calls it the least time
between two attempts, but one that fails sooner is repeated after the back-off; a short time refuses
whoever reaches a busy host."""

NAME_LOOKUP_INTERVAL_MS: Final = 1_000
"""A name is looked up again this soon: a restarted container may have another address. gRPC's own
default of 30 s would use up half of a client's patience."""

DEFAULT_DEADLINE_S: Final = 10.0
"""Deadline of a unary call that has none of its own."""

DEADLINE_MARGIN_S: Final = 0.05
"""Kept back at each hop, so that the inner call fails before the outer one and can be told."""

Options = tuple[tuple[str, int], ...]


HANDSHAKE_TIMEOUT_S: Final = 10.0
"""A server closes connections that are not set up within this time; gRPC's default is 120 s."""


def server_options(*, handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Options:
    """Channel arguments of every server."""
    return (
        ("grpc.server_handshake_timeout_ms", round(handshake_timeout_s * 1000)),
        ("grpc.so_reuseport", 0),  # two servers would share a port silently
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", SERVER_PING_INTERVAL_MS),
        # This one bounds all pings; of the one for keepalives alone gRPC 1.85 takes no notice.
        ("grpc.http2.ping_timeout_ms", SERVER_PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", SERVER_MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", SERVER_MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
    )


def client_options() -> Options:
    """Channel arguments of every client."""
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", CLIENT_PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", CLIENT_PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_INITIAL_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_BACKOFF_MS),
        ("grpc.dns_min_time_between_resolutions_ms", NAME_LOOKUP_INTERVAL_MS),
        # A host's proxy for the web knows no way into the cluster's network, nor to loopback.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # the client retries by itself, with the same request id
    )

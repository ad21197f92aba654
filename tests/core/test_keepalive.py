"""Both ends of a connection agree."""

from flexmarl.core import keepalive
from flexmarl.core.keepalive import client_options, server_options


def test_a_client_pings_less_often_than_a_server_tolerates():
    assert keepalive.CLIENT_PING_INTERVAL_MS > keepalive.SERVER_MIN_PING_INTERVAL_MS


def test_both_ends_have_the_same_message_limit():
    limits = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    client, server = dict(client_options()), dict(server_options())
    for limit in limits:
        assert client[limit] == server[limit] == keepalive.MAX_MESSAGE_BYTES


def test_a_port_is_never_shared():
    assert dict(server_options())["grpc.so_reuseport"] == 0

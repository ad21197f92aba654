"""The metrics endpoint has the locks of its service."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
import urllib.error
import urllib.request

import pytest
from locks import TOKENS

from flexmarl.runtime.metrics import new_registry
from flexmarl.runtime.metrics_endpoint import MAX_CONNECTIONS, MetricsEndpoint
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.tls import server_context


def scrape(port, locks, *, token="", with_certificate=True):
    context = ssl.create_default_context(cafile=locks.authority.cert)
    if with_certificate:
        context.load_cert_chain(locks.client.cert, locks.client.key)
    request = urllib.request.Request(f"https://127.0.0.1:{port}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return answer.read()


async def test_a_scrape_takes_a_certificate_and_a_token(locks):
    server = GrpcServer(
        locks.server_config(metrics_port=0), name="locked", add_to_server=[], services=[]
    )
    await server.start()
    try:
        text = await asyncio.to_thread(scrape, server.metrics_port, locks, token=TOKENS["read"])
        assert b"process_cpu_seconds_total" in text
        for token in ("", "guess", locks.key_of("run-1")):
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(scrape, server.metrics_port, locks, token=token)
            assert caught.value.code == 401
        with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
            await asyncio.to_thread(
                scrape,
                server.metrics_port,
                locks,
                token=TOKENS["read"],
                with_certificate=False,
            )
    finally:
        await server.stop()


def test_silent_clients_are_few_and_are_hung_up_on():
    endpoint = MetricsEndpoint(registry=new_registry(), host="127.0.0.1", port=0, timeout_s=0.3)
    address = ("127.0.0.1", endpoint.port)
    silent = [socket.create_connection(address, timeout=20) for _ in range(MAX_CONNECTIONS + 4)]
    try:
        for connection in silent:
            assert connection.recv(1) == b""
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        end = time.monotonic() + 50
        while (status := answer(url)) is None:
            assert time.monotonic() < end, "silent clients have kept their places"
        assert status == 200
    finally:
        for connection in silent:
            connection.close()
        endpoint.close()


def answer(url):
    """Status of an answer; None from whom hangs up: no place is free yet, or we were too slow."""
    try:
        with urllib.request.urlopen(url, timeout=20) as got:
            return got.status
    except (ConnectionError, urllib.error.URLError):
        return None


def test_a_client_that_sends_a_byte_now_and_then_is_hung_up_on():
    endpoint = MetricsEndpoint(
        registry=new_registry(), host="127.0.0.1", port=0, timeout_s=20, connection_s=0.1
    )
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=0.05) as dripping:
        try:
            with pytest.raises(ConnectionError):
                for _ in range(400):
                    dripping.send(b"G")
                    drip(dripping)
        finally:
            endpoint.close()


def drip(connection):
    """Waits a little for an answer, of which there is none; or says that it is over."""
    try:
        if connection.recv(1) == b"":
            raise ConnectionResetError
    except TimeoutError:
        pass


def test_a_slow_handshake_is_hung_up_on(locks):
    context = server_context(locks.server_config().tls)
    endpoint = MetricsEndpoint(
        registry=new_registry(), host="127.0.0.1", port=0, tls=context, connection_s=0.1
    )
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as slow:
            slow.send(b"\x16\x03\x01")  # a handshake begins like this
            assert slow.recv(1) == b""
    finally:
        endpoint.close()

"""Tokens are given out and taken back while a service runs; a broken file locks nobody out."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from integration.cluster_harness import eventually
from locks import Locks

from flexmarl.runtime.secret_files import write_secret
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.tokens import hash_token


def name_tokens(file: Path, **tokens: str) -> None:
    parts = [
        f'[tokens.{name}]\nrole = "read"\nsha256 = "{hash_token(token)}"\n'
        for name, token in tokens.items()
    ]
    write_secret(file, "".join(parts).encode())


def is_let_in(port: int, locks: Locks, token: str) -> bool:
    context = ssl.create_default_context(cafile=locks.authority.cert)
    context.load_cert_chain(locks.client.cert, locks.client.key)
    request = urllib.request.Request(f"https://127.0.0.1:{port}/metrics")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20, context=context):
            return True
    except urllib.error.HTTPError as error:
        assert error.code == 401
        return False


async def test_a_signal_has_the_file_read_again(locks: Locks, tmp_path: Path) -> None:
    file, announced = tmp_path / "tokens.toml", tmp_path / "address.json"
    name_tokens(file, alice="of-alice")
    config = locks.server_config(metrics_port=0, address_file=announced).model_copy(
        update={"tokens": file}
    )
    server = GrpcServer(config, name="locked", add_to_server=[], services=[])
    await server.start()
    port = server.metrics_port
    assert port is not None

    async def passes(name: str) -> bool:
        return await asyncio.to_thread(is_let_in, port, locks, f"of-{name}")

    server.set_ready(True)
    serving = asyncio.create_task(server.serve_until_signal())
    try:
        await eventually(announced.exists, what="signals to be handled")
        assert await passes("alice")
        assert not await passes("bob")
        name_tokens(file, bob="of-bob")
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            while await passes("alice"):
                pass
        assert await passes("bob")
        # What cannot be read changes nothing: nobody is locked out, and nobody let in.
        for broken in (b"[tokens", b"", b"[tokens.eve]\nrole = 'root'\n"):
            write_secret(file, broken)
            server.read_tokens_again()
        file.unlink()
        server.read_tokens_again()
        assert await passes("bob")
        assert not await passes("alice")
    finally:
        server.request_stop("the test is over")
        await serving

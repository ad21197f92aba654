"""Tokens and certificates are changed while a service runs; a broken file locks nobody out."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.cluster_harness import eventually
from locks import TOKENS, Locks
from runtime.echo_service import Echo, path, serving

from flexmarl.client.channel import Channel, StreamCall, connect
from flexmarl.client.errors import UnauthenticatedError, UnavailableError
from flexmarl.core.peer_credentials import PeerCredentials, current_credentials
from flexmarl.runtime import own_credentials
from flexmarl.runtime.config import ClientConfig, ServerConfig
from flexmarl.runtime.secret_files import write_secret
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.tokens import hash_token


def name_tokens(file: Path, *, role: str = "read", **tokens: str) -> None:
    parts = [
        f'[tokens.{name}]\nrole = "{role}"\nsha256 = "{hash_token(token)}"\n'
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
            server.read_locks_again()
        file.unlink()
        server.read_locks_again()
        assert await passes("bob")
        assert not await passes("alice")
    finally:
        server.request_stop("the test is over")
        await serving


async def test_a_stream_ends_with_the_token_that_it_was_opened_with(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    name_tokens(file, role="admin", alice="of-alice", bob="of-bob")
    config = ServerConfig(tokens=file, grace_s=0.1)
    async with (
        serving(Echo(), config=config) as server,
        connect(server.address, credentials=PeerCredentials(token="of-alice")) as alice,
        connect(server.address, credentials=PeerCredentials(token="of-bob")) as bob,
    ):
        heard = {channel: channel.unary_stream(path("Forever"))(b"") for channel in (alice, bob)}
        talks = {channel: channel.stream_stream(path("Chat"))() for channel in (alice, bob)}
        for channel in (alice, bob):
            assert await heard[channel].read() == b"tick"
            assert await answer_to(talks[channel], b"hello") == b"hello"
        name_tokens(file, role="admin", bob="of-bob", carol="of-carol")
        server.read_locks_again()
        with pytest.raises(UnauthenticatedError):
            while await heard[alice].read() == b"tick":
                pass  # what was on its way
        with pytest.raises(UnauthenticatedError):
            await answer_to(talks[alice], b"still here?")
        assert await heard[bob].read() == b"tick"
        assert await answer_to(talks[bob], b"still here?") == b"still here?"


async def test_certificates_are_read_again_for_connections_to_come(
    locks: Locks, strangers: Locks, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("cert", "key", "client_ca")}
    take_over(files, locks)
    config = ServerConfig(tls=files, tokens=locks.tokens, grace_s=0.1, metrics_port=0)
    admin = TOKENS["admin"]
    async with (
        serving(Echo(), config=config) as server,
        connect(server.address, credentials=locks.shown(admin)) as standing,
    ):

        async def connects(those: Locks) -> bool:
            async with connect(server.address, credentials=those.shown(admin)) as channel:
                return await answers(channel)

        assert server.metrics_port is not None
        assert await answers(standing)
        assert not await connects(strangers)
        shutil.copy(strangers.server.key, files["key"])
        server.read_locks_again()  # of another certificate: it stays as it was
        assert await connects(locks)
        take_over(files, strangers)
        server.read_locks_again()
        assert await connects(strangers)
        assert not await connects(locks)
        assert await answers(standing), "a connection keeps what it was made with"
        assert await asyncio.to_thread(is_let_in, server.metrics_port, strangers, admin)
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(is_let_in, server.metrics_port, locks, admin)


@pytest.fixture
def shows() -> Iterator[Callable[[ClientConfig], None]]:
    """Has this process show what some files hold; it shows nothing afterwards."""
    yield own_credentials.show
    own_credentials.show(ClientConfig())


async def test_what_a_process_shows_is_read_again_for_connections_to_come(
    locks: Locks, strangers: Locks, tmp_path: Path, shows: Callable[[ClientConfig], None]
) -> None:
    admin = TOKENS["admin"]
    theirs = {name: tmp_path / f"server-{name}" for name in ("cert", "key", "client_ca")}
    take_over(theirs, locks)
    config = ServerConfig(tls=theirs, tokens=locks.tokens, grace_s=0.1)
    own = {name: tmp_path / name for name in ("ca", "cert", "key", "token_file")}
    take_over_own(own, locks)
    shows(ClientConfig(**own))
    async with serving(Echo(), config=config) as server, connect(server.address) as channel:
        talk = channel.stream_stream(path("Chat"))()
        assert await answer_to(talk, b"hello") == b"hello"
        assert await answers(channel)
        own["cert"].write_text("half of a cert")
        own_credentials.read_again()  # it is being written: what was read stays
        assert await answers(channel)
        take_over_own(own, strangers)
        own_credentials.read_again()
        assert not await answers(channel), "a stranger's certificate passed"
        take_over(theirs, strangers)
        server.read_locks_again()
        async with asyncio.timeout(30):
            while not await answers(channel):
                pass  # gRPC waits a little before it tries again
        assert await answer_to(talk, b"still here?") == b"still here?"
        # The token goes with each call: over the same connection.
        before = channel.bare()
        for token, passes in (("of nobody", False), (admin, True)):
            write_secret(own["token_file"], token.replace(" ", "-").encode())
            own_credentials.read_again()
            assert await passes_with_its_token(channel) == passes
        assert channel.bare() is before


async def test_a_signal_has_a_service_without_locks_read_what_it_shows(
    tmp_path: Path, shows: Callable[[ClientConfig], None]
) -> None:
    file, announced = tmp_path / "token", tmp_path / "address.json"
    write_secret(file, b"first")
    shows(ClientConfig(token_file=file))
    config = ServerConfig(address_file=announced, grace_s=0.1)
    server = GrpcServer(config, name="open", add_to_server=[], services=[])
    await server.start()
    server.set_ready(True)
    running = asyncio.create_task(server.serve_until_signal())
    try:
        await eventually(announced.exists, what="signals to be handled")
        assert current_credentials().token == "first"
        write_secret(file, b"second")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: current_credentials().token == "second", what="the new token")
    finally:
        server.request_stop("the test is over")
        await running


def take_over_own(files: dict[str, Path], locks: Locks) -> None:
    """Put someone's certificates where a process has those that it shows."""
    of = {"ca": locks.authority.cert, "cert": locks.client.cert, "key": locks.client.key}
    for name, file in of.items():
        shutil.copy(file, files[name])
    shutil.copy(locks.folder / "admin.token", files["token_file"])


async def passes_with_its_token(channel: Channel) -> bool:
    try:
        return await answers(channel)
    except UnauthenticatedError:
        return False


def take_over(files: dict[str, Path], locks: Locks) -> None:
    """Put someone's certificates where a service reads its own."""
    of = {"cert": locks.server.cert, "key": locks.server.key, "client_ca": locks.authority.cert}
    for name, file in files.items():
        shutil.copy(of[name], file)


async def answers(channel: Channel) -> bool:
    try:
        return await channel.unary_unary(path("Unary"))(b"x", timeout=20.0) == b"x"
    except UnavailableError:
        return False


async def answer_to(talk: StreamCall, said: bytes) -> bytes:
    await talk.write(said)
    answer: bytes = await talk.read()
    return answer

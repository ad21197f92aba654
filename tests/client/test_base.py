"""Clients repeat what was not answered, as it was, as long as their patience lasts."""

import asyncio
import time

import pytest
from ports import own_port
from runtime.echo_service import Echo, path, serving

from flexmarl.client import base, errors
from flexmarl.client.base import ServiceClient
from flexmarl.client.request import new_request_id
from flexmarl.core.call_context import set_deadline
from flexmarl.core.errors import ErrorReason
from flexmarl.core.peer_credentials import PeerCredentials, use_credentials
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.secret_files import write_secret
from flexmarl.runtime.tokens import hash_token


class EchoStub:
    """As a generated stub, for bytes."""

    def __init__(self, channel):
        self.Unary = channel.unary_unary(path("Unary"))
        self.Fail = channel.unary_unary(path("Fail"))
        self.Sleep = channel.unary_unary(path("Sleep"))
        self.Forever = channel.unary_stream(path("Forever"))
        self.Count = channel.unary_stream(path("Count"))


class EchoClient(ServiceClient):
    STUB = EchoStub

    async def unary(self, request, **how):
        return await self._call("Unary", request, **how)

    async def fail(self, reason):
        return await self._call("Fail", reason.value.encode())

    async def sleep(self, **how):
        return await self._call("Sleep", b"", **how)

    def forever(self):
        return self._follow(lambda: self._stub.Forever(b"", timeout=30))

    def count(self, number):
        return self._follow(lambda: self._stub.Count(str(number).encode(), timeout=30))


@pytest.fixture(autouse=True)
def _own_deadline():
    set_deadline(None)
    yield
    set_deadline(None)


async def test_a_stream_whose_token_is_taken_back_is_opened_again_with_the_token_of_now(tmp_path):
    file = tmp_path / "tokens.toml"

    def known(**tokens):
        of = {name: hash_token(token) for name, token in tokens.items()}
        text = [f'[tokens.{n}]\nrole = "admin"\nsha256 = "{h}"\n' for n, h in of.items()]
        write_secret(file, "".join(text).encode())

    known(old="old", new="new")
    config = ServerConfig(tokens=file, grace_s=0.1)
    try:
        use_credentials(PeerCredentials(token="old"))
        async with (
            serving(Echo(), config=config) as server,
            EchoClient.connect(server.address) as client,
        ):
            ticks = client.forever()
            assert await anext(ticks) == b"tick"
            use_credentials(PeerCredentials(token="new"))
            known(new="new")
            server.read_locks_again()
            for _ in range(500):  # more than was on its way
                assert await anext(ticks) == b"tick"
            known(other="other")
            server.read_locks_again()
            with pytest.raises(errors.UnauthenticatedError):
                async for _ in ticks:
                    pass
    finally:
        use_credentials(PeerCredentials())


async def test_no_answer_is_repeated_with_the_same_message():
    echo = Echo()
    echo.unavailable = 3
    async with serving(echo) as server, EchoClient.connect(server.address) as client:
        request = new_request_id().encode()
        assert await client.unary(request) == request
        assert echo.seen == [request] * 4


async def test_only_no_answer_is_repeated():
    echo = Echo()
    async with serving(echo) as server, EchoClient.connect(server.address) as client:
        for reason in ErrorReason:
            if reason.status in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}:
                continue
            echo.seen.clear()
            with pytest.raises(errors.FlexMarlError) as caught:
                await client.fail(reason)
            assert caught.value.reason is reason
            assert len(echo.seen) == 1


async def test_patience_outlasts_one_try_but_not_the_callers_time():
    echo = Echo()
    async with serving(echo) as server:
        async with EchoClient.connect(server.address, patience_s=0.1) as client:
            with pytest.raises(errors.UnavailableError, match=r"no answer for .*Sleep"):
                await client.sleep(timeout_s=0.05)
            echo.unavailable = 10**9
            with pytest.raises(errors.UnavailableError, match=r"no answer for .*warming up"):
                await client.unary(b"x", timeout_s=20)  # each try is answered
        async with EchoClient.connect(server.address, patience_s=3600) as client:
            call = asyncio.create_task(client.unary(b"x", timeout_s=0.1))
            await asyncio.sleep(0.3)
            assert not call.done()
            echo.unavailable = 0
            assert await call == b"x"
            echo.unavailable = 10**9
            set_deadline(time.monotonic() + 0.3)
            with pytest.raises((errors.UnavailableError, errors.DeadlineError)):
                await client.unary(b"x")


async def test_a_service_that_comes_up_meanwhile_is_found():
    port = own_port()
    async with EchoClient.connect(f"127.0.0.1:{port}") as client:
        call = asyncio.create_task(client.unary(b"x"))
        await asyncio.sleep(0.2)
        assert not call.done()
        async with serving(Echo(), config=ServerConfig(port=port, grace_s=0.1)):
            assert await call == b"x"


async def test_a_stream_goes_on_after_a_restart_and_ends_with_patience():
    config = ServerConfig(port=own_port(), grace_s=0.0)
    async with EchoClient.connect(f"127.0.0.1:{config.port}", patience_s=40.0) as client:
        ticks = client.forever()
        for _ in range(2):
            async with serving(Echo(), config=config):
                assert await anext(ticks) == b"tick"
        client._patience_s = 0.5
        with pytest.raises(errors.UnavailableError, match="no answer for"):
            while True:
                await anext(ticks)


async def test_a_refused_stream_raises_and_a_silent_one_is_opened_again(monkeypatch):
    async with serving(Echo()) as server:
        async with EchoClient.connect(server.address) as client:
            counted = []
            with pytest.raises(errors.OutOfRangeError):
                async for number in client.count(3):
                    counted.append(number)
            assert counted == [b"0", b"1", b"2"]
        monkeypatch.setattr(base, "SILENCE_S", 0.0)
        async with EchoClient.connect(server.address, patience_s=0.1) as client:
            with pytest.raises(errors.UnavailableError, match="the stream is silent"):
                await anext(client.forever())

"""People who should stay outside try to get into a locked store: real server, real certificates."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from locks import TOKENS, Locks
from meg_store.store_harness import serving

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.channel import connect
from flexmarl.client.errors import (
    FlexMarlError,
    InvalidError,
    UnauthenticatedError,
)
from flexmarl.client.store import StoreClient
from flexmarl.core.access import Role
from flexmarl.core.errors import ErrorReason
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES
from flexmarl.core.peer_credentials import PeerCredentials
from scripts.make_certificates import make_pair

OWN, OTHER = "run-own", "run-other"
LIST_RUNS = "/flexmarl.api.meg_store.v1.MegStoreService/ListRuns"


@pytest.fixture
async def store(folder, locks):
    """A locked store with two runs, and an administrator's client of it."""
    admin = locks.shown(TOKENS["admin"])
    async with serving(
        folder, backend="memory", server_config=locks.server_config(), credentials=admin
    ) as (client, _):
        for run_id in (OWN, OTHER):
            await client.create_run(graph.Run(run_id=run_id))
        yield client


@asynccontextmanager
async def calling(address, credentials):
    async with (
        connect(address, credentials=credentials) as channel,
        StoreClient(channel, patience_s=0.0) as client,
    ):
        yield client


async def outcome(address, credentials, call) -> str:
    """ "" where the call passes, else the reason of its refusal."""
    async with calling(address, credentials) as client:
        try:
            await call(client)
        except FlexMarlError as error:
            return error.reason.value
    return ""


def list_runs(client):
    return client.list_runs()


@pytest.mark.parametrize("token", ["", "token-of-nobody", "token-of-admi", "x" * 600])
async def test_without_a_known_token_nobody_gets_in(store, locks, token, capfd):
    with pytest.raises(UnauthenticatedError) as caught:
        async with calling(store.address, locks.shown("")) as client:
            await client._stub.ListRuns(
                pb.ListRunsRequest(),
                metadata=(("authorization", f"Bearer {token}"),),
            )
    assert caught.value.reason is ErrorReason.UNAUTHENTICATED
    assert (await store.list_runs())[0].run_id in (OWN, OTHER)
    said = capfd.readouterr()
    assert not token or token not in said.out + said.err + caught.value.message


@pytest.mark.parametrize(
    ("role", "reads", "submits", "deletes"),
    [
        ("read", "", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ("submit", "", "", "PERMISSION_DENIED"),
        ("admin", "", "", ""),
    ],
)
async def test_a_role_gets_no_further_than_its_own(store, locks, role, reads, submits, deletes):
    shown = locks.shown(TOKENS[role])
    run = graph.Run(run_id="run-new")
    assert await outcome(store.address, shown, list_runs) == reads
    assert await outcome(store.address, shown, lambda client: client.create_run(run)) == submits
    assert await outcome(store.address, shown, lambda client: client.delete_run(OTHER)) == deletes


async def test_a_runs_key_opens_no_other_run(store, locks):
    shown = locks.shown(locks.key_of(OWN))
    assert await outcome(store.address, shown, lambda client: client.get_run(OWN)) == ""
    for call in (
        lambda client: client.get_run(OTHER),
        list_runs,
        lambda client: client.create_run(graph.Run(run_id="run-new")),
        lambda client: client.put_object(b"mine"),
    ):
        assert await outcome(store.address, shown, call) == "PERMISSION_DENIED"


async def test_a_forged_key_of_a_run_is_no_key(store, locks):
    key = locks.key_of(OWN)
    admin = locks.key_of(OWN, Role.SUBMIT).replace(".submit.", ".admin.")
    for forged in (
        key.replace(OWN, OTHER),
        key.replace(".read.", ".submit."),
        admin,
        key[:-1],
        key.rpartition(".")[0],
        "flexmarl-run.read..",
    ):
        shown = locks.shown(forged)
        assert await outcome(store.address, shown, list_runs) == "UNAUTHENTICATED", forged


async def test_a_certificate_of_nobody_ends_at_the_door(store, locks, strangers, tmp_path):
    token = TOKENS["admin"]
    expired = make_pair(tmp_path, locks.authority, name="expired", days=-1)
    without = PeerCredentials(ca=locks.authority.cert.read_bytes(), token=token)
    for shown in (
        locks.shown(token, pair=expired),
        locks.shown(token, pair=strangers.client),
        without,
        PeerCredentials(token=token),  # no TLS at all
    ):
        assert await outcome(store.address, shown, list_runs) == "UNAVAILABLE"
    assert await outcome(store.address, locks.shown(token), list_runs) == ""


async def test_a_client_tells_its_token_to_no_false_server(folder, locks, strangers):
    shown = locks.shown(TOKENS["admin"])
    async with serving(
        folder,
        backend="memory",
        server_config=strangers.server_config(),
        credentials=strangers.shown(TOKENS["admin"]),
    ) as (client, _):
        assert await outcome(client.address, shown, list_runs) == "UNAVAILABLE"


def test_a_token_crosses_no_network_in_clear():
    with pytest.raises(InvalidError, match="in clear"):
        connect("10.0.0.1:7001", credentials=PeerCredentials(token="secret"))


async def test_an_expired_server_is_not_believed(folder, locks, tmp_path):
    expired = make_pair(
        tmp_path, locks.authority, name="old", hosts=("localhost", "127.0.0.1"), days=-1
    )
    old = Locks(locks.folder, locks.authority, expired, locks.client)
    shown = locks.shown(TOKENS["admin"])
    async with serving(
        folder, backend="memory", server_config=old.server_config(), credentials=shown
    ) as (client, _):
        assert await outcome(client.address, shown, list_runs) == "UNAVAILABLE"


async def test_a_stranger_who_asks_often_is_asked_to_wait(folder, locks):
    config = locks.server_config(max_requests_per_s=0.5)  # less than any machine makes
    admin = locks.shown(TOKENS["admin"])
    async with serving(folder, backend="memory", server_config=config, credentials=admin) as (
        client,
        _,
    ):
        async with calling(client.address, locks.shown("guess")) as guesser:
            seen = []
            for _ in range(4):
                with pytest.raises(FlexMarlError) as caught:
                    await guesser.list_runs()
                seen.append(caught.value.reason)
        assert seen[0] is ErrorReason.UNAUTHENTICATED
        assert ErrorReason.RATE_LIMITED in seen
        await client.list_runs()  # from the same host, but known


async def test_a_client_that_says_nothing_holds_no_place(folder, locks):
    config = locks.server_config(handshake_timeout_s=0.3)
    admin = locks.shown(TOKENS["admin"])
    async with serving(folder, backend="memory", server_config=config, credentials=admin) as (
        client,
        _,
    ):
        host, _, port = client.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        try:
            await client.list_runs()
            async with asyncio.timeout(20):
                for reader, _ in silent:
                    assert await reader.read() == b""  # the server hung up
        finally:
            for _, writer in silent:
                writer.close()


def raw_channel(address, shown, **options):
    credentials = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)
    return grpc.aio.secure_channel(address, credentials, options=tuple(options.items()))


async def test_what_is_no_message_says_nothing_of_the_inside(store, locks):
    shown = locks.shown(TOKENS["admin"])
    metadata = (("authorization", f"Bearer {shown.token}"),)
    async with raw_channel(store.address, shown) as channel:
        for junk in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(LIST_RUNS)(junk, timeout=10, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            told = f"{caught.value.details()}{caught.value.trailing_metadata()}"
            assert ".py" not in told
            assert "Traceback" not in told
    assert len(await store.list_runs()) == 2


async def test_a_message_beyond_the_limit_is_refused(store, locks):
    shown = locks.shown(TOKENS["admin"])
    unlimited = {"grpc.max_send_message_length": -1}
    async with raw_channel(store.address, shown, **unlimited) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(LIST_RUNS)(bytes(MAX_MESSAGE_BYTES + 1), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(await store.list_runs()) == 2


async def test_calls_that_never_send_their_message_hold_nobody_up(store, locks):
    shown = locks.shown(TOKENS["admin"])
    metadata = (("authorization", f"Bearer {shown.token}"),)
    async with raw_channel(store.address, shown) as channel:
        begun = [channel.stream_unary(LIST_RUNS)(metadata=metadata) for _ in range(50)]
        for call in begun:
            await call.wait_for_connection()
        assert len(await store.list_runs()) == 2
        for call in begun:
            assert not call.done()
            call.cancel()


@pytest.mark.parametrize("path", ["../../evil", "/etc/evil", "a/../../evil", "evil\0"])
async def test_no_name_leads_out_of_the_stores_folder(store, locks, folder, path):
    for call in (
        lambda client: client.create_run(graph.Run(run_id=path)),
        lambda client: client.create_snapshot(path),
        lambda client: client._call(
            "AllocateSegment",
            pb.AllocateSegmentRequest(request_id="r", run_id=OWN, key=path, size_bytes=1),
        ),
    ):
        shown = locks.shown(TOKENS["admin"])
        assert await outcome(store.address, shown, call) == "INVALID_ARGUMENT"
    assert not list(folder.parent.rglob("*evil*"))

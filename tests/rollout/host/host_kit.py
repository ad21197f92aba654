"""A real gRPC dispatcher that does what a test says, a store that is a folder, a host to run."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from ports import own_port

from flexmarl.api.common.v1.common_pb2 import ObjectRef, ShardAddress
from flexmarl.api.meg_store.v1.meg_store_pb2 import NamedBuffer, OpenSegmentResponse
from flexmarl.api.rollout.v1 import engine_pb2 as pb
from flexmarl.api.rollout.v1.rollout_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from flexmarl.client.bundle import folder_hash
from flexmarl.client.mappings import KeptMappings
from flexmarl.client.segments import SegmentReader
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.keepalive import server_options
from flexmarl.rollout.config import RolloutConfig
from flexmarl.rollout.host.app import Host
from flexmarl.rollout.host.launcher import Launcher
from flexmarl.rollout.host.store_access import StoreAccess
from flexmarl.runtime.aio import Background


class FolderStore:
    """Segments are files of a folder; its path is the address."""

    def __init__(self, address: str) -> None:
        self.folder = Path(address)
        self._mappings = KeptMappings(writable=False)

    async def open_segment(self, run_id: str, key: str, *, holder: str) -> SegmentReader:
        view = self.folder / f"{key}.view"
        if not view.exists():
            raise DomainError(ErrorReason.SEGMENT_NOT_FOUND, f"no segment {key}")
        response = OpenSegmentResponse.FromString(view.read_bytes())
        lease = self.folder / f"{key}.lease.{uuid.uuid4().hex}"
        lease.touch()

        async def give_back(_: str) -> None:
            lease.unlink()

        return SegmentReader(response, give_back, self._mappings)

    async def get_run(self, run_id: str):
        raise DomainError(ErrorReason.RUN_NOT_FOUND, f"no run {run_id}")

    async def download_object(self, key: str, path: Path) -> ObjectRef:
        raise DomainError(ErrorReason.OBJECT_NOT_FOUND, f"no object {key}")

    async def close(self) -> None:
        self._mappings.close()


def publish(folder: Path, key: str, load: pb.EngineLoad) -> ObjectRef:
    """Offer a segment file under a key."""
    response = OpenSegmentResponse(path=load.path, lease_id=key, object=ObjectRef(key=key))
    for buffer in load.buffers:
        response.buffers.append(
            NamedBuffer(
                name=buffer.name,
                dtype=buffer.dtype,
                shape=buffer.shape,
                offset=buffer.offset,
                size_bytes=buffer.size_bytes,
            )
        )
    (folder / f"{key}.view").write_bytes(response.SerializeToString())
    return ObjectRef(shard="s0", key=key)


def publish_nothing(folder: Path, key: str) -> ObjectRef:
    """Offer a segment without content, for engines that look at none."""
    file = folder / key
    file.write_bytes(bytes(64))
    return publish(folder, key, pb.EngineLoad(path=str(file)))


def folder_store(shards: Sequence[ShardAddress]) -> FolderStore:
    """The store of a plan: a folder stands in its home shard's address."""
    return FolderStore(shards[0].address)


class FakeDispatcher(RolloutServiceServicer):
    """Keeps what hosts say; says what the test says. Acknowledges results unless told not to."""

    def __init__(self) -> None:
        self.hellos: list[pb.HostHello] = []
        self.statuses: dict[str, pb.InstanceStatus] = {}
        self.results: dict[str, pb.GenerateResult] = {}
        self.num_results = 0
        self.acknowledge = True
        self._outgoing: asyncio.Queue[pb.ConnectEngineHostResponse] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self.port = own_port()

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        add_RolloutServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        self._outgoing = asyncio.Queue()

    def send(self, **parts) -> None:
        self._outgoing.put_nowait(pb.ConnectEngineHostResponse(**parts))

    async def ConnectEngineHost(self, request_iterator, context):
        async def read() -> None:
            async for message in request_iterator:
                await self._take(message)

        reader = asyncio.create_task(read())
        try:
            while True:
                yield await self._outgoing.get()
        finally:
            reader.cancel()

    async def _take(self, message: pb.ConnectEngineHostRequest) -> None:
        async with self._changed:
            if message.HasField("hello"):
                self.hellos.append(message.hello)
            for status in (*message.hello.instances, *message.instances):
                self.statuses[status.instance_id] = status
            for result in message.results:
                self.num_results += 1
                self.results[result.attempt_id] = result
            self._changed.notify_all()
        if message.results and self.acknowledge:
            self.send(stored=[result.attempt_id for result in message.results])

    async def until(self, predicate: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(predicate)

    async def until_state(
        self, instance_id: str, state: int, *, version: int | None = None, timeout_s: float = 90.0
    ):
        def reached() -> bool:
            status = self.statuses.get(instance_id)
            return (
                status is not None
                and status.state == state
                and (version is None or status.version == version)
            )

        await self.until(reached, timeout_s=timeout_s)
        return self.statuses[instance_id]


def make_plan(
    store: Path, model: Path, *names: str, engine: str = "instant", **spec
) -> pb.InstancePlan:
    return pb.InstancePlan(
        run_id="r",
        term=1,
        shards=[ShardAddress(name="s0", address=str(store))],
        instances=[
            pb.InstanceSpec(
                instance_id=name,
                policies=["p"],
                engine=engine,
                model_path=str(model),
                model_hash=folder_hash(model),
                max_concurrency=16,
                dtype="float32",
                **spec,
            )
            for name in names
        ],
    )


def make_load(ref: ObjectRef, *names: str, version: int, weights_hash: str) -> pb.LoadWeights:
    return pb.LoadWeights(
        run_id="r",
        instance_ids=names,
        policy="p",
        version=version,
        weights=ref,
        weights_hash=weights_hash,
    )


@asynccontextmanager
async def running_host(dispatcher: FakeDispatcher, data_dir: Path, *, preload=(), **config):
    """A host in this process, with real engine processes."""
    settings = RolloutConfig(
        role="engine-host",
        data_dir=data_dir,
        dispatcher=f"127.0.0.1:{dispatcher.port}",
        host_id="h0",
        **config,
    )
    failures: list[BaseException] = []
    ready: list[bool] = []
    background = Background(lambda _, error: failures.append(error))
    launcher = Launcher(
        record=data_dir / "children.json",
        threads=1,
        preload=preload,
        vllm_python=settings.vllm_python,
    )
    store = StoreAccess(folder_store, cache_dir=data_dir / "models", holder="h0")
    host = Host(
        settings, launcher=launcher, background=background, store=store, set_ready=ready.append
    )
    host.ready_history = ready  # type: ignore[attr-defined]
    await launcher.prepare()
    host.start()
    try:
        yield host
    finally:
        host.close()
        await background.close()
        await launcher.close()
        await store.close()
    assert not failures, failures

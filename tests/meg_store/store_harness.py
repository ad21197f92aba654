"""A store in this process, over either backend, and rows to write into it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from ports import own_port

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.channel import connect
from flexmarl.client.run_store import RunStore
from flexmarl.client.store import StoreClient
from flexmarl.core.peer_credentials import PeerCredentials
from flexmarl.meg_store.backend import Backend
from flexmarl.meg_store.config import StoreConfig
from flexmarl.meg_store.memory_backend import MemoryBackend
from flexmarl.meg_store.rocks_backend import RocksBackend
from flexmarl.meg_store.servicer import SERVICE, Servicer, add_to_server
from flexmarl.meg_store.shard import Shard
from flexmarl.runtime.aio import Background
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.server import GrpcServer

RUN = "run-1"
GROUP = "b000000a0-g0000"
SAMPLE = f"{GROUP}-s000a0"


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    backend: str = "rocks",
    server_config: ServerConfig | None = None,
    credentials: PeerCredentials | None = None,
    **settings: object,
) -> AsyncIterator[tuple[StoreClient, Shard]]:
    """A served shard in this process and a client of it, with these credentials."""
    memory_dir = Path(tempfile.mkdtemp(prefix="flexmarl-test-", dir="/dev/shm"))
    config = StoreConfig(
        data_dir=folder,
        shm_dir=settings.pop("shm_dir", memory_dir),
        sign_of_life_s=settings.pop("sign_of_life_s", 0.2),
        state_to_disk_every=settings.pop("state_to_disk_every", 0),
        **settings,
    )
    opened: Backend = MemoryBackend() if backend == "memory" else RocksBackend(folder / "db")
    failures: list[BaseException] = []
    servicer = Servicer()
    server = GrpcServer(
        server_config or ServerConfig(reflection=False, grace_s=0.1),
        name="meg_store",
        add_to_server=[partial(add_to_server, servicer)],
        services=[SERVICE],
    )
    background = Background(lambda _, error: failures.append(error))
    shard = Shard(opened, config, on_fatal=failures.append, start=background.start)
    try:
        await server.start()
        await shard.recover()
        servicer.open(shard)
        server.set_ready(True)
        async with (
            connect(server.address, credentials=credentials) as channel,
            StoreClient(channel, patience_s=2.0) as client,
        ):
            yield client, shard
    finally:
        shard.database.events.close()
        await server.stop()
        await background.close()
        await shard.close()
        shutil.rmtree(memory_dir, ignore_errors=True)
    assert not failures


@asynccontextmanager
async def three_shards(
    folder: Path, **settings: object
) -> AsyncIterator[tuple[RunStore, list[Shard]]]:
    """A run on three stores in this process, their data in `s0`, `s1`, `s2`."""
    async with AsyncExitStack() as stack:
        pairs = []
        for name in ("s0", "s1", "s2"):
            (folder / name).mkdir(exist_ok=True)
            served = serving(folder / name, shard=name, **settings)
            pairs.append(await stack.enter_async_context(served))
        shards = [
            common.ShardAddress(name=shard.config.shard, address=client.address)
            for client, shard in pairs
        ]
        store = await stack.enter_async_context(RunStore.over(shards, patience_s=2.0))
        await store.create_run(a_run(shards=shards))
        yield store, [shard for _, shard in pairs]


def ref_on(store: RunStore, vertex: graph.Vertex) -> common.VertexRef:
    """Reference to a vertex, on the shard where its group lies."""
    found = ref(vertex)
    found.shard = store.shard_of(vertex.meta.group_id)
    return found


class StoreProcess:
    """A store in a process of its own, to be killed and started again."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.address_file = folder / "address.json"
        self.memory_dir = Path(tempfile.mkdtemp(prefix="flexmarl-test-", dir="/dev/shm"))
        self._settings = (
            f"store.data_dir={folder / 'data'}",
            f"store.shm_dir={self.memory_dir}",
            "store.sign_of_life_s=0.2",
            f"server.address_file={self.address_file}",
            "server.reflection=false",
            *settings,
        )
        self._port = own_port()
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *settings: str) -> list[str]:
        """Command line of the store."""
        pairs = [item for value in (*self._settings, *settings) for item in ("--set", value)]
        return [sys.executable, "-m", "flexmarl.meg_store", *pairs]

    async def run_refused(self, *settings: str) -> subprocess.CompletedProcess[bytes]:
        """Run a second store that is expected to refuse, and end, by itself."""
        command = self.command("server.port=0", "log.level=error", *settings)
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, timeout=30, check=False
        )

    async def start(self, *, wrapper: Sequence[str] = ()) -> str:
        """Start, on the same port as before, and wait until it serves."""
        self.address_file.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                [*wrapper, *self.command(f"server.port={self._port}")],
                stderr=log,
                start_new_session=True,
            )
        while not self.address_file.exists():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            await asyncio.sleep(0.02)
        self.address = str(json.loads(self.address_file.read_text())["address"])
        return self.address

    async def move(self) -> str:
        """Start on another port."""
        self._port = own_port()
        return await self.start()

    def kill(self) -> None:
        """`kill -9`."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def lose_memory(self, also_on_disk: Iterable[str] = ()) -> None:
        """Become a host that was started anew, before these segments came to its disk."""
        files = list(self.memory_dir.glob("*.seg"))
        for key in also_on_disk:
            digest = hashlib.sha256(key.encode()).hexdigest()[:24]
            files += (self.folder / "data" / "segments").glob(f"{digest}-*.seg")
        for file in files:
            file.unlink()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=20)

    def clean(self) -> None:
        """End it in any case and remove its memory tier."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.memory_dir, ignore_errors=True)


def a_run(**changes: object) -> graph.Run:
    """A run."""
    return graph.Run(**{"run_id": RUN, "config_json": b"{}", **changes})


def a_group(ordinal: int = 0, **changes: object) -> graph.Group:
    """An open group of batch 0."""
    values = {
        "group_id": f"b000000a0-g{ordinal:04d}",
        "ordinal": ordinal,
        "num_samples": 2,
        "query_json": b'{"q": 1}',
        "status": common.GROUP_STATUS_OPEN,
    }
    return graph.Group(**{**values, **changes})


def a_sample(
    status: common.SampleStatus.ValueType = common.SAMPLE_STATUS_DONE,
    *,
    group: int = 0,
    **changes: object,
) -> graph.Sample:
    """The first sample of a group."""
    group_id = f"b000000a0-g{group:04d}"
    values = {"sample_id": f"{group_id}-s000a0", "group_id": group_id, "status": status}
    return graph.Sample(**{**values, **changes})


def a_vertex(
    call: int = 0, *, group: int = 0, agent: str = "solver", tokens: int = 2, **meta: object
) -> graph.Vertex:
    """A finished call of an agent in the first sample of a group."""
    group_id = f"b000000a0-g{group:04d}"
    sample_id = f"{group_id}-s000a0"
    values = {
        "vertex_id": f"{sample_id}/0:{call}",
        "sample_id": sample_id,
        "group_id": group_id,
        "path": f"0:{call}",
        "agent": agent,
        "policy": "p",
        "kind": common.VERTEX_KIND_AGENT,
        "status": common.VERTEX_STATUS_DONE,
        "attempt": 1,
        "num_response_tokens": tokens,
        "version_runs": [common.VersionRun(version=0, num_tokens=tokens)],
        "trainable": True,
    }
    payload = graph.VertexPayload(
        prompt_tokens=[7, 8],
        response_tokens=range(tokens),
        logprobs=[-0.5] * tokens,
        temperature=1.0,
    )
    return graph.Vertex(meta=graph.VertexMeta(**{**values, **meta}), payload=payload)


def ref(vertex: graph.Vertex) -> common.VertexRef:
    """Reference to a vertex."""
    return common.VertexRef(shard="s0", vertex_id=vertex.meta.vertex_id, agent=vertex.meta.agent)


def closure(
    *released: graph.Vertex, group: int = 0, voided: tuple[graph.Vertex, ...] = ()
) -> pb.GroupClosure:
    """The end of a group with these rows released and void."""
    return pb.GroupClosure(
        group_id=f"b000000a0-g{group:04d}",
        status=common.GROUP_STATUS_CLOSED,
        released=[pb.ReleasedRow(row=ref(v), reward=1.0, advantage=0.5) for v in released],
        voided=[pb.VoidedRow(row=ref(v), reason=common.VOID_REASON_NO_REWARD) for v in voided],
    )


def a_record(*vertices: graph.Vertex, ordinal: int = 0, term: int = 0) -> graph.MicroBatch:
    """A micro-batch record over these rows."""
    return graph.MicroBatch(
        micro_batch_id=f"b000000a0-m{ordinal:04d}-p",
        policy="p",
        rows=[ref(v) for v in vertices],
        term=term,
    )

"""Stores on nodes of their own: network namespaces on a bridge, each with a store."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from meg_store.store_harness import RUN, StoreProcess, a_group, a_run, a_vertex, closure, ref_on

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import UnavailableError
from flexmarl.client.run_store import RunStore

NETWORK = "10.213.77"
NUM_GROUPS = 12
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass
class Node:
    """A namespace with one address on the bridge."""

    namespace: str
    device: str
    host: str

    def cut(self) -> None:
        """Take it off the network."""
        ip("-n", self.namespace, "link", "set", self.device, "down")

    def join(self) -> None:
        """Bring it back."""
        ip("-n", self.namespace, "link", "set", self.device, "up")


@contextmanager
def network(num_nodes: int) -> Iterator[list[Node]]:
    """Nodes that reach each other and this process; skipped where none may be made."""
    mark = f"fm{uuid.uuid4().hex[:5]}"
    switch = f"{mark}-sw"
    nodes = [Node(f"{mark}-n{n}", f"{mark}n{n}", f"{NETWORK}.{n + 1}") for n in range(num_nodes)]
    made: list[str] = []
    try:
        try:
            for name in (switch, *(node.namespace for node in nodes)):
                ip("netns", "add", name)
                made.append(name)
        except OSError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for node in nodes:
            _plug(node.device, switch, node.host, namespace=node.namespace)
            ip("-n", node.namespace, "link", "set", "lo", "up")
        _plug(f"{mark}r", switch, f"{NETWORK}.254", namespace=None)
        yield nodes
    finally:
        for name in made:
            ip("netns", "del", name)  # its devices, and their other ends, go with it


def _plug(device: str, switch: str, host: str, *, namespace: str | None) -> None:
    inside = [] if namespace is None else ["-n", namespace]
    ip(*inside, "link", "add", device, "type", "veth", "peer", f"{device}p", "netns", switch)
    ip("-n", switch, "link", "set", f"{device}p", "master", "br0", "up")
    ip(*inside, "addr", "add", f"{host}/24", "dev", device)
    ip(*inside, "link", "set", device, "up")


@dataclass
class NodeStore:
    """The store of a node."""

    node: Node
    process: StoreProcess

    async def start(self) -> str:
        """Start it, or start it again at the same address."""
        return await self.process.start(wrapper=["ip", "netns", "exec", self.node.namespace])


@asynccontextmanager
async def stores_on(nodes: list[Node], folder: Path) -> AsyncIterator[tuple[RunStore, NodeStore]]:
    """A run over one store per node, and the store of the last node."""
    async with AsyncExitStack() as stack:
        shards = []
        for number, node in enumerate(nodes):
            own = folder / node.namespace
            own.mkdir()
            process = StoreProcess(
                own, f"server.host={node.host}", f"store.shard=s{number}", "server.insecure=true"
            )
            stack.callback(process.clean)
            last = NodeStore(node, process)
            shards.append(common.ShardAddress(name=f"s{number}", address=await last.start()))
        run_store = await stack.enter_async_context(RunStore.over(shards, patience_s=3.0))
        await run_store.create_run(a_run(shards=shards))
        yield run_store, last


async def assert_named(store: RunStore, shard: str) -> None:
    """What would have to know of a shard that is away says so, instead of leaving its rows out."""
    for call in (store.list_claimable(RUN, "p"), store.list_groups(RUN)):
        with pytest.raises(UnavailableError) as caught:
            await call
        assert caught.value.metadata["shard"] == shard


@pytest.mark.parametrize("num_nodes", [2, 3])
async def test_a_node_that_is_cut_off_or_killed_is_named_and_nothing_is_lost(
    tmp_path, num_nodes, proves
):
    with network(num_nodes) as nodes:
        async with stores_on(nodes, tmp_path) as (store, last_store):
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            rows = [a_vertex(group=group) for group in range(NUM_GROUPS)]
            groups = [a_group(group) for group in range(NUM_GROUPS)]
            await store.write_graph(RUN, term=term, groups=groups, vertices=rows)
            ends = [closure(row, group=number) for number, row in enumerate(rows)]
            for end, row in zip(ends, rows, strict=True):
                end.released[0].row.CopyFrom(ref_on(store, row))
            await store.close_groups(RUN, ends, term=term)
            held = {name: len(await c.list_groups(RUN)) for name, c in store.shards.items()}
            assert all(held.values())
            assert sum(held.values()) == NUM_GROUPS
            assert len((await store.list_claimable(RUN, "p")).rows) == NUM_GROUPS

            content = bytes(range(256)) * 4096
            spec = BufferSpec("w", "U8", (len(content),))
            await store.shards["s0"].set(RUN, "weights", [Buffer(spec, memoryview(content))])
            away = store.shards["s1"]
            await away.fetch_segment(RUN, "weights", source=store.addresses[0])
            async with away.get(RUN, "weights") as reader:
                assert bytes(reader.buffers["w"].data) == content

            last = f"s{num_nodes - 1}"
            there = [row for row in rows if store.shard_of(row.meta.group_id) == last]
            here = [row for row in rows if store.shard_of(row.meta.group_id) != last]
            nodes[-1].cut()
            await assert_named(store, last)
            # Rows of the other nodes are read and written meanwhile.
            assert list(await store.get_vertices(RUN, [ref_on(store, row) for row in here]))
            nodes[-1].join()
            await store.wait_ready()
            last_store.process.kill()
            await assert_named(store, last)
            assert list(await store.get_vertices(RUN, [ref_on(store, row) for row in here]))
            await last_store.start()
            await store.wait_ready()
            found = await store.get_vertices(RUN, [ref_on(store, row) for row in there])
            assert [v.meta.vertex_id for v in found] == [row.meta.vertex_id for row in there]
            assert len((await store.list_claimable(RUN, "p")).rows) == NUM_GROUPS
            proves(
                f"{num_nodes} nodes, one cut off and killed: {NUM_GROUPS} groups acknowledged, "
                f"{len(there)} of them on that node, all found"
            )

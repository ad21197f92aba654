"""A full disk and a full tmpfs, for real: file systems of a few MiB, mounted for the test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from meg_store.store_harness import RUN, StoreProcess, a_group, a_run, a_vertex, serving

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.store import StoreClient

MIB = 1 << 20
pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of its own; the test is skipped where none may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def vertices(group: int) -> list[graph.Vertex]:
    return [a_vertex(call, group=group, tokens=20_000) for call in range(8)]


async def test_full_disk_refuses_writes_loses_nothing_and_goes_on_with_space(tmp_path):
    with small_disk(tmp_path / "disk", 256 * MIB) as folder:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(96 * MIB))
        store = StoreProcess(folder, f"store.min_free_bytes={16 * MIB}")
        try:
            async with StoreClient.connect(await store.start(), patience_s=30) as client:
                await client.create_run(a_run())
                written = []

                async def write(group: int) -> None:
                    await client.write_graph(
                        RUN, term=0, groups=[a_group(group)], vertices=vertices(group)
                    )
                    written.append(group)

                with pytest.raises(FlexMarlError, match=r"DISK_FULL.*min_free_bytes"):
                    for group in range(1000):
                        await write(group)
                assert written
                with pytest.raises(FlexMarlError, match="DISK_FULL"):
                    await client.put_object(b"x" * MIB)
                await assert_found(client, written)
                assert store.process.poll() is None
                # Nor does a restart need more than what is kept free.
                store.kill()
                await store.start()
                await assert_found(client, written)
                ballast.unlink()
                await write(written[-1] + 1)
                await assert_found(client, written)
        finally:
            store.clean()


async def assert_found(client: StoreClient, groups: list[int]) -> None:
    for group in groups:
        ids = [vertex.meta.vertex_id for vertex in vertices(group)]
        refs = [common.VertexRef(vertex_id=name, agent="solver") for name in ids]
        found = await client.get_vertices(RUN, refs)
        assert [vertex.meta.vertex_id for vertex in found] == ids


async def test_full_tmpfs_sends_segments_to_disk(tmp_path):
    size = 16 * MIB
    with small_disk(tmp_path / "shm", 3 * size) as shm:
        data = tmp_path / "data"
        data.mkdir()
        async with serving(data, shm_dir=shm / "tier", memory_tier_bytes=1 << 40) as (store, _):
            await store.create_run(a_run())
            for number in range(5):
                content = memoryview(bytes([number]) * size)
                await store.set(
                    RUN, f"s{number}", [Buffer(BufferSpec("b", "U8", (size,)), content)]
                )
            tiers = set()
            for number in range(5):
                async with store.get(RUN, f"s{number}") as reader:
                    assert set(reader.buffers["b"].data[:: size // 8]) == {number}
                    tiers.add(reader.view.tier)
            assert tiers == {pb.SEGMENT_TIER_DISK, pb.SEGMENT_TIER_MEMORY}

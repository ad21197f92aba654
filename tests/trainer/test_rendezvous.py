"""The store that workers meet in keeps what is in use, and nothing of meetings that have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.children import Children
from flexmarl.trainer.rank.main import delete_ended
from flexmarl.trainer.rendezvous import Rendezvous


class Served:
    """A process that serves the store, and says what it was told to delete."""

    def __init__(self, port: int) -> None:
        self.port, self.link = port, self
        self.exit_code: int | None = None
        self.ended: list[list[str]] = []
        self.frames = [rank_pb2.RankReply(ready=rank_pb2.RankReady()).SerializeToString()]

    async def send(self, frame: bytes) -> None:
        serve = rank_pb2.RankCommand.FromString(frame).serve_store
        self.ended.append(list(serve.ended))
        served = rank_pb2.RankStoreServed(port=self.port)
        self.frames.append(rank_pb2.RankReply(store_served=served).SerializeToString())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.frames:
            yield self.frames.pop(0)

    def kill(self) -> None:
        self.exit_code = -9


class Starts:
    """Starts these, one after the other."""

    def __init__(self, *processes: Served) -> None:
        self.left = list(processes)

    async def spawn_preloaded(self, *_: Any, **__: Any) -> Served:
        return self.left.pop(0)


def rendezvous(*processes: Served) -> Rendezvous:
    children = cast("Children", cast("Any", Starts(*processes)))
    return Rendezvous(children, host="127.0.0.1", timeout_s=1.0)


async def test_it_is_asked_to_delete_what_has_ended_when_the_next_ones_meet() -> None:
    first, second = Served(5001), Served(5002)
    meeting = rendezvous(first, second)
    assert await meeting.port(["a"]) == 5001
    assert await meeting.port(["a", "b"]) == 5001
    assert first.ended == [[]], "nothing has ended: it is not asked"
    assert await meeting.port(["b", "c"]) == 5001
    assert await meeting.port([]) == 5001
    assert first.ended == [[], ["a"], ["b", "c"]]
    first.kill()
    assert await meeting.port(["d"]) == 5002
    assert second.ended == [[]]


async def test_one_that_ends_without_a_word_is_started_anew_by_the_next() -> None:
    silent, second = Served(5001), Served(5002)
    meeting = rendezvous(silent, second)
    silent.frames.clear()
    with pytest.raises(DomainError, match="does not answer") as caught:
        await meeting.port(["a"])
    assert caught.value.reason is ErrorReason.CHILD_DIED
    assert await meeting.port(["a"]) == 5002


def test_what_is_left_under_a_prefix_goes_and_under_no_other() -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    for prefix in ("run/p/3", "run/p/31", "0g1-1g1n1"):
        PrefixStore(f"{prefix}/rank0", store).set("x", "1")
        PrefixStore(prefix, store).set("x", "1")
    before = store.num_keys()
    delete_ended(store, [])
    assert store.num_keys() == before
    delete_ended(store, ["run/p/3", "0g1-1g1n1"])
    assert store.num_keys() == before - 4
    assert PrefixStore("run/p/31", store).get("x") == b"1"
    assert PrefixStore("run/p/31/rank0", store).get("x") == b"1"

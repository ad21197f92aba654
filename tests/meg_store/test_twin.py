"""Random calls on both stores: RocksDB and its twin in memory answer alike, restarts included."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from meg_store.store_harness import (
    RUN,
    a_group,
    a_record,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref,
    serving,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.store import StoreClient
from flexmarl.meg_store.check.store import check_stores

GROUPS = st.integers(0, 3)
CALLS = st.integers(0, 4)
AGENTS = ("solver", "judge")
COLUMN = graph.Column(name="score", type=graph.COLUMN_TYPE_INT, required=True)

Call = Callable[[StoreClient], Awaitable[Any]]


def vertex(group: int, call: int, **changes: object) -> graph.Vertex:
    made = a_vertex(
        call, group=group, agent=AGENTS[call % 2], finished_unix_ns=1 + call * 7 % 5, **changes
    )
    made.payload.columns["score"].int_value = call
    return made


class Stores(RuleBasedStateMachine):
    """Every rule runs one call on both; the answers, refusals included, must be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="flexmarl-test-"))
        self.stacks: dict[str, AsyncExitStack] = {}
        self.stores: dict[str, StoreClient] = {}
        self.term = 0
        self.bound = 0
        self.ordinal = 0
        self.owners: dict[str, str] = {}

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, timeout=30))

    def open(self, name: str) -> None:
        self.stacks[name] = AsyncExitStack()
        own = self.folder / name  # the disk tier, too, is a store's own
        own.mkdir(exist_ok=True)
        served = serving(
            own,
            backend=name,
            sign_of_life_s=0.02,
            # Kept over restarts: only the host's end takes the memory tier away.
            shm_dir=own / "memory",
        )
        entered = self.stacks[name].enter_async_context(served)
        self.stores[name] = self.wait(entered)[0]

    def both(self, call: Call) -> Any:
        answers = [self.wait(_answer(call, self.stores[name])) for name in ("rocks", "memory")]
        assert answers[0] == answers[1]
        return answers[0]

    @initialize()
    def start(self) -> None:
        for name in ("rocks", "memory"):
            self.open(name)
        self.both(lambda store: _nothing(store.create_run(a_run(columns=[COLUMN]))))

    def teardown(self) -> None:
        if self.stores:
            self.both(_events)
        for stack in self.stacks.values():
            self.wait(stack.aclose())
        self.loop.close()
        try:
            if self.stacks:
                assert check_stores([self.folder / "rocks"]).findings == []
        finally:
            shutil.rmtree(self.folder)

    @rule()
    def restart(self) -> None:
        self.wait(self.stacks["rocks"].aclose())
        self.open("rocks")

    @rule(group=GROUPS, samples=st.integers(1, 2))
    def admit(self, group: int, samples: int) -> None:
        admitted = a_group(group, num_samples=samples)
        self.both(lambda s: s.write_graph(RUN, term=self.term, groups=[admitted]))

    @rule(group=GROUPS, calls=st.lists(CALLS, max_size=4), attempt=st.integers(1, 2))
    def write(self, group: int, calls: list[int], attempt: int) -> None:
        rows = [vertex(group, call, attempt=attempt) for call in calls]
        self.both(lambda s: s.write_graph(RUN, term=self.term, vertices=rows))

    @rule(group=GROUPS, call=CALLS, upstream=CALLS)
    def write_edge(self, group: int, call: int, upstream: int) -> None:
        row = vertex(group, call)
        row.meta.upstream_vertex_ids.append(vertex(group, upstream).meta.vertex_id)
        self.both(lambda s: s.write_graph(RUN, term=self.term, vertices=[row]))

    @rule(group=GROUPS, status=st.sampled_from(["OPEN", "DONE", "FAILED", "SUPERSEDED"]))
    def write_sample(self, group: int, status: str) -> None:
        sample = a_sample(common.SampleStatus.Value(f"SAMPLE_STATUS_{status}"), group=group)
        self.both(lambda s: s.write_graph(RUN, term=self.term, samples=[sample]))

    @rule(group=GROUPS, released=st.sets(CALLS, max_size=4), voided=st.sets(CALLS, max_size=2))
    def close(self, group: int, released: set[int], voided: set[int]) -> None:
        closed = closure(
            *(vertex(group, call) for call in sorted(released)),
            group=group,
            voided=tuple(vertex(group, call) for call in sorted(voided)),
        )
        self.both(lambda s: s.close_groups(RUN, [closed], term=self.term))

    @rule(group=GROUPS, call=CALLS)
    def void(self, group: int, call: int) -> None:
        row = pb.VoidedRow(row=ref(vertex(group, call)), reason=common.VOID_REASON_OVERLONG)
        self.both(lambda s: s.void_rows(RUN, [row], term=self.term))

    @rule(group=GROUPS, call=CALLS, value=st.integers(0, 4))
    def write_column(self, group: int, call: int, value: int) -> None:
        write = pb.ColumnWrite(
            row=ref(vertex(group, call)), values={"score": graph.ColumnValue(int_value=value)}
        )
        self.both(lambda s: s.write_columns(RUN, [write], term=self.term))

    @rule(max_rows=st.integers(1, 4), max_tokens=st.integers(0, 6))
    def claim(self, max_rows: int, max_tokens: int) -> None:
        kind, listed = self.both(
            lambda s: s.list_claimable(RUN, "p", max_rows=max_rows, max_tokens=max_tokens)
        )
        assert kind == "answer"
        if not listed.rows:
            return
        record = a_record(ordinal=self.ordinal, term=self.term)
        record.rows.extend(row.row for row in listed.rows)
        self.ordinal += 1
        assert self.both(lambda s: s.create_micro_batch(RUN, record))[0] == "answer"
        for row in record.rows:
            assert row.vertex_id not in self.owners
            self.owners[row.vertex_id] = record.micro_batch_id
        marked = self.both(
            lambda s: s.mark_rows(RUN, record.micro_batch_id, record.rows, term=self.term)
        )
        assert marked[0] == "answer"

    @rule(group=GROUPS, call=CALLS)
    def claim_anyhow(self, group: int, call: int) -> None:
        record = a_record(vertex(group, call), ordinal=self.ordinal, term=self.term)
        self.ordinal += 1
        kind, _ = self.both(lambda s: s.create_micro_batch(RUN, record))
        name = record.rows[0].vertex_id
        if kind == "answer":
            assert name not in self.owners
            self.owners[name] = record.micro_batch_id

    @rule()
    def next_term(self) -> None:
        _, self.term = self.both(lambda s: s.acquire_term(RUN, "orchestrator", holder="twin"))

    @rule(stale=st.integers(0, 2))
    def write_under_another_term(self, stale: int) -> None:
        self.both(
            lambda s: s.write_graph(
                RUN, term=max(0, self.term + 1 - stale), vertices=[vertex(0, 0)]
            )
        )

    @rule(expected=st.integers(-1, 3))
    def commit(self, expected: int) -> None:
        manifest = graph.Manifest(version=expected + 1, term=self.term)
        version = None if expected < 0 else expected
        self.both(lambda s: s.commit(RUN, manifest, expected_version=version))

    @rule(content=st.sampled_from([b"a", b"b" * 3000]), key=st.sampled_from(["", "k"]))
    def put_object(self, content: bytes, key: str) -> None:
        self.both(lambda s: s.put_object(content, key=key))

    @rule(
        order=st.sampled_from(pb.VertexOrder.values()),
        descending=st.booleans(),
        page_size=st.integers(1, 5),
        agent=st.sampled_from(["", *AGENTS, "nobody"]),
        claimable=st.booleans(),
    )
    def list_rows(
        self, order: int, descending: bool, page_size: int, agent: str, claimable: bool
    ) -> None:
        chosen = pb.VertexFilter(agent=agent, claimable=claimable)
        self.both(
            lambda s: _collected(
                s.list_vertices(
                    RUN,
                    chosen,
                    view=pb.VERTEX_VIEW_FULL,
                    order=order,
                    descending=descending,
                    page_size=page_size,
                )
            )
        )

    @rule(group=GROUPS, call=CALLS, batch=st.sampled_from([None, 0, 1]))
    def look_around(self, group: int, call: int, batch: int | None) -> None:
        name = a_sample(group=group).sample_id
        row = vertex(group, call)
        self.both(lambda s: s.get_sample_graph(RUN, name, critical_path=True))
        self.both(lambda s: s.get_neighbourhood(RUN, row.meta.vertex_id, hops=2))
        self.both(lambda s: s.get_vertices(RUN, [ref(row)]))
        self.both(lambda s: s.describe_agents(RUN, batch=batch))
        self.both(lambda s: s.list_samples(RUN, batch=batch))
        self.both(lambda s: _stripped(s.list_groups(RUN, batch=batch), "closed_unix_ns"))
        self.both(lambda s: s.list_micro_batches(RUN, batch=0))

    @rule()
    def close_subgraph(self) -> None:
        self.both(lambda s: s.close_subgraph(RUN, [pb.ClosedSubgraph(policy="p")], term=self.term))

    @rule(key=st.sampled_from(["x", "y"]), fill=st.integers(0, 255), disk=st.booleans())
    def publish(self, key: str, fill: int, disk: bool) -> None:
        buffer = Buffer(BufferSpec("w", "U8", (64,)), memoryview(bytes([fill]) * 64))
        tier = pb.SEGMENT_TIER_DISK if disk else pb.SEGMENT_TIER_MEMORY
        self.both(lambda s: s.set(RUN, key, [buffer], tier=tier))

    @rule(key=st.sampled_from(["x", "y", "nothing"]))
    def map_state(self, key: str) -> None:
        self.both(lambda s: _bytes_of(s, key))

    @rule(version=st.integers(0, 3), key=st.sampled_from(["x", "y"]), stale=st.booleans())
    def save_state(self, version: int, key: str, stale: bool) -> None:
        weights = common.ObjectRef(key=key)
        term = self.bound - stale if self.bound else 0
        state = graph.StateRecord(policy="p", version=version, term=term, weights=weights)
        self.both(lambda s: s.save_state(RUN, state))
        self.both(lambda s: _stripped_one(s.get_state(RUN, "p"), "saved_unix_ns"))

    @rule()
    def bind(self) -> None:
        _, self.bound = self.both(lambda s: s.acquire_term(RUN, "policy/p", holder="twin"))

    @rule(version=st.integers(0, 3))
    def pin(self, version: int) -> None:
        request = pb.PinVersionRequest(run_id=RUN, version=version, holder="twin", ttl_s=60)
        request.request_id = f"pin-{self.ordinal}-{version}"
        self.both(lambda s: _nothing(s._call("PinVersion", request)))

    @rule(status=st.sampled_from(["RUNNING", "STOPPED", "FINISHED", "FAILED"]))
    def move_run(self, status: str) -> None:
        to = common.RunStatus.Value(f"RUN_STATUS_{status}")
        self.both(lambda s: _nothing(s.update_run_status(RUN, to, term=self.term)))

    @rule(delete=st.booleans())
    def another_run(self, delete: bool) -> None:
        if delete:
            self.both(lambda s: s.delete_run("other"))
        else:
            self.both(lambda s: _nothing(s.create_run(a_run(run_id="other"))))
        self.both(_run_ids)

    @rule(content=st.sampled_from([b"a", b"b" * 3000]), offset=st.integers(0, 2))
    def get_object(self, content: bytes, offset: int) -> None:
        key = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.both(lambda s: s.get_object(key, offset=offset))
        self.both(lambda s: s.stat_object(key))

    @invariant()
    def accounts_agree(self) -> None:
        if not self.stores:
            return
        consumed = sorted(set(self.owners.values()))
        self.both(lambda s: s.count_vertices(RUN, batch=0, batch_attempt=0, consumed=consumed))


async def _answer(call: Call, store: StoreClient) -> tuple[str, Any]:
    try:
        return "answer", await call(store)
    except FlexMarlError as error:
        return "refused", (error.reason, error.message)


async def _stripped(awaitable: Awaitable[Any], clock: str) -> list[Any]:
    """Rows without what the store's own clock said."""
    rows = list(await awaitable)
    for row in rows:
        row.ClearField(clock)
    return rows


async def _stripped_one(awaitable: Awaitable[Any], clock: str) -> Any:
    row = await awaitable
    if row is not None:
        row.ClearField(clock)
    return row


async def _bytes_of(store: StoreClient, key: str) -> bytes:
    async with store.get(RUN, key) as reader:
        return bytes(reader.buffers["w"].data)


async def _run_ids(store: StoreClient) -> list[str]:
    return sorted(run.run_id for run in await store.list_runs())


async def _events(store: StoreClient) -> list[tuple[int, int]]:
    """The whole log; what is in it beside the clock's times is what the other calls answer."""
    seen: list[tuple[int, int]] = []
    async with aclosing(store.watch(RUN)) as watched:
        async for news in watched:
            seen += [(event.cursor, event.kind) for event in news.events]
            if not news.events:
                break
    return seen


async def _nothing(awaitable: Awaitable[Any]) -> None:
    """For answers with the store's own clock in them."""
    await awaitable


async def _collected(rows: Any) -> list[graph.Vertex]:
    return [row async for row in rows]


class _ManyStores(Stores):
    """The same, over far more sequences of calls."""


def _settings(*, max_examples: int, steps: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        # A failing case is small as it is, and each step of shrinking starts two stores.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


TestStores = Stores.TestCase
TestStores.settings = _settings(max_examples=5, steps=25)
TestStores.pytestmark = [pytest.mark.timeout(120)]

TestManyStores = _ManyStores.TestCase
TestManyStores.settings = _settings(max_examples=150, steps=50)
TestManyStores.pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

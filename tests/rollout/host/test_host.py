"""An engine host with real engine processes, a real stream, and an engine that answers at once."""

import asyncio
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
from rollout.engines.engine_kit import request
from rollout.host.host_kit import (
    FakeDispatcher,
    make_load,
    make_plan,
    publish_nothing,
    running_host,
)

from flexmarl.api.rollout.v1 import engine_pb2 as pb
from flexmarl.core.engine_host import EngineHost
from flexmarl.core.engine_host_events import (
    EngineEnded,
    EngineHostConfig,
    EngineReadied,
    LoadEnded,
    LoadOrdered,
    PlanReceived,
)
from flexmarl.core.keepalive import RECONNECT_MAX_BACKOFF_MS
from flexmarl.rollout.dispatcher.hosts import SETTLE_S
from flexmarl.rollout.host import dispatcher_link


def test_a_host_is_back_before_a_new_dispatcher_stops_waiting_for_it():
    reconnect_s = 1.2 * RECONNECT_MAX_BACKOFF_MS / 1000  # a fifth is gRPC's jitter
    assert reconnect_s + dispatcher_link._REDIAL.max_s < SETTLE_S


@pytest.fixture
async def dispatcher():
    dispatcher = FakeDispatcher()
    await dispatcher.start()
    yield dispatcher
    await dispatcher.stop()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def ask(name: str, instance_id: str = "p-0", **changes) -> pb.GenerateRequest:
    asked = request(name, [1, 2], **changes)
    asked.instance_id = instance_id
    asked.input_hash = name.encode()
    return asked


async def serve(dispatcher, store, model, *names: str, version: int = 0) -> None:
    """Plan instances and bring them to serve a version."""
    dispatcher.send(plan=make_plan(store, model, *names))
    for name in names:
        await dispatcher.until_state(name, pb.INSTANCE_STATE_EMPTY)
    ref = publish_nothing(store, f"v{version}")
    dispatcher.send(loads=[make_load(ref, *names, version=version, weights_hash=f"h{version}")])
    for name in names:
        await dispatcher.until_state(name, pb.INSTANCE_STATE_SERVING, version=version)


async def test_instances_start_load_serve_and_stop(dispatcher, store, model, tmp_path):
    async with running_host(dispatcher, tmp_path, max_engines=3) as host:
        await dispatcher.until(lambda: bool(dispatcher.hellos))
        hello = dispatcher.hellos[0]
        assert (hello.host_id, hello.max_instances, len(hello.instances)) == ("h0", 3, 0)
        assert hello.incarnation
        await serve(dispatcher, store, model, "p-0", "p-1")
        assert host.ready_history == [True]
        assert not list(store.glob("*.lease.*"))
        pids = {name: dispatcher.statuses[name].pid for name in ("p-0", "p-1")}
        assert all(psutil.pid_exists(pid) for pid in pids.values())
        requests = [ask(f"a{i}", f"p-{i % 2}", seed=i) for i in range(500)]
        dispatcher.send(requests=requests)
        await dispatcher.until(lambda: len(dispatcher.results) == 500)
        result = dispatcher.results["a7"]
        assert list(result.tokens) == [7, 8, 9, 10, 11, 12]
        assert (result.version, result.weights_hash, result.instance_id) == (0, "h0", "p-1")
        dispatcher.send(plan=make_plan(store, model, "p-1"))
        await asyncio.to_thread(psutil.Process(pids["p-0"]).wait, 30)
        dispatcher.send(requests=[ask("late"), ask("fine", "p-1")])
        await dispatcher.until(lambda: {"late", "fine"} <= dispatcher.results.keys())
        assert dispatcher.results["late"].failure.reason == "NOT_READY"
        assert dispatcher.results["late"].infrastructure
        assert not dispatcher.results["fine"].HasField("failure")
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


async def test_wrong_requests_are_refused_by_name(dispatcher, store, model, tmp_path):
    async with running_host(dispatcher, tmp_path):
        await serve(dispatcher, store, model, "p-0", version=4)
        foreign = ask("foreign", version=4)
        foreign.policy = "other"
        dispatcher.send(requests=[ask("old", version=3), foreign, ask("none", "p-9")])
        await dispatcher.until(lambda: len(dispatcher.results) == 3)
        reasons = {name: r.failure.reason for name, r in dispatcher.results.items()}
        assert reasons == {
            "old": "WEIGHTS_MISMATCH",
            "foreign": "WEIGHTS_MISMATCH",
            "none": "NOT_READY",
        }
        assert all(result.infrastructure for result in dispatcher.results.values())


async def test_a_killed_engine_fails_its_attempts_and_comes_back_with_its_weights(
    dispatcher, store, model, tmp_path
):
    async with running_host(dispatcher, tmp_path):
        await serve(dispatcher, store, model, "p-0", "p-1", version=2)
        pid = dispatcher.statuses["p-0"].pid
        os.kill(pid, signal.SIGSTOP)  # so that the attempts are surely in progress
        dispatcher.send(requests=[ask(f"a{i}", f"p-{i % 2}", version=2) for i in range(10)])
        await dispatcher.until(lambda: len(dispatcher.results) == 5)
        os.kill(pid, signal.SIGKILL)
        await dispatcher.until(lambda: len(dispatcher.results) == 10)
        for i in range(10):
            result = dispatcher.results[f"a{i}"]
            assert result.failure.reason == ("CHILD_DIED" if i % 2 == 0 else "")
            assert result.infrastructure == (i % 2 == 0)
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].num_restarts == 1)
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=2)
        assert status.pid not in (0, pid) and status.num_restarts == 1
        assert status.weights_hash == "h2"
        assert (dispatcher.statuses["p-1"].num_restarts, len(dispatcher.hellos)) == (0, 1)
        dispatcher.send(requests=[ask("again", version=2)])
        await dispatcher.until(lambda: "again" in dispatcher.results)
        assert len(dispatcher.results["again"].tokens) == 6


async def test_results_go_out_again_until_they_are_stored(dispatcher, store, model, tmp_path):
    async with running_host(dispatcher, tmp_path):
        await serve(dispatcher, store, model, "p-0")
        dispatcher.acknowledge = False
        dispatcher.send(requests=[ask(f"a{i}") for i in range(5)])
        await dispatcher.until(lambda: len(dispatcher.results) == 5)
        await dispatcher.stop()
        dispatcher.results.clear()
        await dispatcher.start()
        await dispatcher.until(lambda: len(dispatcher.results) == 5)
        hello = dispatcher.hellos[-1]
        assert sorted(hello.attempt_ids) == [f"a{i}" for i in range(5)]
        assert hello.incarnation == dispatcher.hellos[0].incarnation
        assert [(h.instance_id, h.version) for h in hello.held] == [("p-0", 0)] * 5
        assert [h.input_hash for h in hello.held] == [name.encode() for name in hello.attempt_ids]
        assert hello.instances[0].state == pb.INSTANCE_STATE_SERVING
        # A repeated request is not run a second time, and what is stored is forgotten.
        count = dispatcher.num_results
        dispatcher.send(requests=[ask("a0")], stored=["a1", "unknown"])
        dispatcher.send(requests=[ask("b")])
        await dispatcher.until(lambda: "b" in dispatcher.results)
        assert dispatcher.num_results == count + 1
        await dispatcher.stop()
        await dispatcher.start()
        await dispatcher.until(lambda: len(dispatcher.hellos) == 3)
        assert sorted(dispatcher.hellos[-1].attempt_ids) == ["a0", "a2", "a3", "a4", "b"]


async def test_attempts_end_at_their_deadline_and_late_answers_are_dropped(
    dispatcher, store, model, tmp_path
):
    async with running_host(dispatcher, tmp_path):
        await serve(dispatcher, store, model, "p-0")
        pid = dispatcher.statuses["p-0"].pid
        os.kill(pid, signal.SIGSTOP)
        slow = ask("slow")
        slow.timeout_ms = 50
        dispatcher.send(requests=[slow])
        await dispatcher.until(lambda: "slow" in dispatcher.results)
        result = dispatcher.results["slow"]
        assert result.failure.reason == "DEADLINE_EXCEEDED" and not result.infrastructure
        os.kill(pid, signal.SIGCONT)
        dispatcher.send(requests=[ask("next")])
        await dispatcher.until(lambda: "next" in dispatcher.results)
        assert dispatcher.num_results == 2


async def test_a_model_that_is_not_there_is_named(dispatcher, store, model, tmp_path):
    plan = make_plan(store, model, "p-0")
    plan.instances[0].model_hash = "sha256:other"
    async with running_host(dispatcher, tmp_path):
        dispatcher.send(plan=plan)
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_DEAD)
        assert status.failure.reason == "RUN_NOT_FOUND"  # the store was asked for its archive
        plan.instances[0].model_hash = make_plan(store, model, "x").instances[0].model_hash
        plan.instances[0].engine = "unheard-of"
        dispatcher.send(plan=plan)
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].failure.reason == "NOT_BUILT")


async def test_weights_that_are_not_there_are_named_and_asked_for_again(
    dispatcher, store, model, tmp_path
):
    async with running_host(dispatcher, tmp_path):
        await serve(dispatcher, store, model, "p-0")
        ref = publish_nothing(store, "v1")
        (store / "v1.view").rename(store / "hidden")
        load = make_load(ref, "p-0", version=1, weights_hash="h1")
        dispatcher.send(loads=[load])
        await dispatcher.until(
            lambda: dispatcher.statuses["p-0"].failure.reason == "SEGMENT_NOT_FOUND"
        )
        assert dispatcher.statuses["p-0"].version == 0
        assert dispatcher.statuses["p-0"].state == pb.INSTANCE_STATE_SERVING
        (store / "hidden").rename(store / "v1.view")
        dispatcher.send(loads=[load])
        await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=1)


async def test_a_full_book_refuses_and_keeps_no_refusals(
    dispatcher, store, model, tmp_path, monkeypatch
):
    monkeypatch.setattr("flexmarl.rollout.host.app.MAX_ATTEMPTS", 10)
    async with running_host(dispatcher, tmp_path):
        await serve(dispatcher, store, model, "p-0")
        dispatcher.acknowledge = False
        dispatcher.send(requests=[ask(f"a{i:02}") for i in range(15)])
        await dispatcher.until(lambda: len(dispatcher.results) == 15)
        refused = [n for n, r in dispatcher.results.items() if r.failure.reason == "QUEUE_FULL"]
        assert sorted(refused) == [f"a{i}" for i in range(10, 15)]
        await dispatcher.stop()
        await dispatcher.start()
        await dispatcher.until(lambda: len(dispatcher.hellos) == 2)
        assert len(dispatcher.hellos[-1].attempt_ids) == 10


async def test_an_engine_that_hangs_is_found_by_its_silence_and_replaced(
    dispatcher, store, model, tmp_path
):
    async with running_host(dispatcher, tmp_path / "host", engine_silence_s=4.0):
        await serve(dispatcher, store, model, "p-0", "p-1")
        pid = dispatcher.statuses["p-0"].pid
        os.kill(pid, signal.SIGSTOP)
        # Its own deadline is far away, and the other engine is none the worse.
        dispatcher.send(requests=[ask("a"), ask("b", "p-1")])
        await dispatcher.until(lambda: {"a", "b"} <= dispatcher.results.keys())
        assert dispatcher.results["a"].failure.reason == "CHILD_DIED"
        assert dispatcher.results["a"].infrastructure
        assert not dispatcher.results["b"].HasField("failure")
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].num_restarts == 1)
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING)
        assert status.pid != pid
        dispatcher.send(requests=[ask("c")])
        await dispatcher.until(lambda: "c" in dispatcher.results)
        assert not dispatcher.results["c"].HasField("failure")
        assert dispatcher.statuses["p-1"].num_restarts == 0


async def test_a_live_trace_replays_identically_through_a_fresh_core(
    dispatcher, store, model, tmp_path
):
    trace = []
    async with running_host(dispatcher, tmp_path) as host:
        handle = host._driver._core.handle

        def recorded(event, now):
            effects = handle(event, now)
            trace.append((event, now, effects))
            return effects

        host._driver._core = SimpleNamespace(
            handle=recorded, view=handle.__self__.view, run_id="r",
            instance_ids=handle.__self__.instance_ids,
        )  # fmt: skip
        await serve(dispatcher, store, model, "p-0", "p-1")
        os.kill(dispatcher.statuses["p-1"].pid, signal.SIGKILL)
        await dispatcher.until(lambda: dispatcher.statuses["p-1"].num_restarts == 1)
        await dispatcher.until_state("p-1", pb.INSTANCE_STATE_SERVING, version=0)
        dispatcher.send(plan=make_plan(store, model, "p-0"))
        await dispatcher.until(lambda: len(trace) >= 10)
    fresh = EngineHost(EngineHostConfig())
    assert [fresh.handle(event, now) for event, now, _ in trace] == [e for _, _, e in trace]
    kinds = {type(event) for event, _, _ in trace}
    assert {PlanReceived, LoadOrdered, EngineReadied, LoadEnded, EngineEnded} <= kinds

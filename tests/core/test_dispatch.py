"""The dispatcher alone: events in, effects out."""

from __future__ import annotations

from random import Random

import pytest
from core.dispatch_box import Box, bad, gone, ok, ready, sent, up

from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    DispatchConfig,
    Duplicate,
    Fail,
    InstanceUse,
    Send,
    SetTimer,
    TimerFired,
    VertexCancelled,
    WeightsKnown,
    split_attempt_id,
)


def test_a_ready_vertex_goes_to_the_only_instance_and_is_accepted_once():
    box = Box(up("i0"))
    assert box(ready("v")) == [Send("v#1", "v", 1, "i0", 0, "least_loaded")]
    assert box.core.is_wanted("v#1")
    assert box(ok("v#1")) == [Accept("v#1", "v", 1)]
    assert box(ok("v#1")) == [Duplicate("v#1")]
    assert not box.core.is_wanted("v#1")


def test_a_vertex_said_twice_is_one_vertex():
    box = Box(up("i0", capacity=4))
    box(ready("v"))
    assert box(ready("v")) == []


def test_capacity_bounds_an_instance_and_the_oldest_group_goes_first():
    box = Box(up("i0"))
    assert sent(box(ready("a", group=7))) == [("a#1", "i0")]
    assert box(ready("b", group=9)) == []
    assert box(ready("c", group=8)) == []
    assert box(ready("d", group=8)) == []
    book = box.core.book("p")
    assert (book.num_waiting, book.num_running, box.core.num_at("i0")) == (3, 1, 1)
    assert box.core.num_at("nobody") == 0
    assert box.core.attempts_at({"i0", "nobody"}) == ["a#1"]
    assert sent(box(ok("a#1"))) == [("c#1", "i0")]
    assert sent(box(ok("c#1"))) == [("d#1", "i0")]
    assert sent(box(ok("d#1"))) == [("b#1", "i0")]


def test_a_vertex_waits_only_for_its_own_policy():
    box = Box(up("i0"), up("j0", policy="q"))
    box(ready("a"))
    assert box(ready("b")) == []
    assert sent(box(ready("c", policy="q"))) == [("c#1", "j0")]


def test_least_outstanding_tokens_wins():
    box = Box(up("i0", capacity=8), up("i1", capacity=8))
    first = sent(box(ready("big", prompt=1000)))[0][1]
    others = [sent(box(ready(f"s{n}", prompt=10)))[0][1] for n in range(5)]
    assert first not in others


def test_expected_response_length_is_learnt_per_agent():
    box = Box(up("i0", capacity=8))
    box(ready("v", max_tokens=1000, agent="talker"))
    box(ok("v#1", tokens=4))
    box(up("i1", capacity=8))
    # Known now to answer in 4 tokens: three of them weigh less than one newcomer's max_tokens.
    busy = sent(box(ready("n", max_tokens=1000, prompt=1, agent="newcomer")))[0][1]
    for n in range(3):
        assert sent(box(ready(f"w{n}", max_tokens=1000, prompt=1, agent="talker")))[0][1] != busy


def test_ties_are_random_and_seeded():
    def choices(seed: int) -> list[str]:
        core = Dispatcher(DispatchConfig(), Random(seed))
        core.handle(WeightsKnown("p", 0, "h0"), 0.0)
        for name in ("i0", "i1", "i2"):
            core.handle(up(name), 0.0)
        picked = []
        for n in range(30):
            (send,) = [e for e in core.handle(ready(f"v{n}"), 0.0) if isinstance(e, Send)]
            picked.append(send.instance_id)
            core.handle(ok(f"v{n}#1"), 0.0)
        return picked

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)
    assert set(choices(1)) == {"i0", "i1", "i2"}


def test_only_an_instance_of_the_version_and_content_serves():
    box = Box(up("i0", version=1, weights_hash="h1"))
    assert box(ready("v", version=0)) == []
    assert box(ready("w", version=1)) == []
    # The content of version 1 becomes known: what holds it may serve.
    assert sent(box(WeightsKnown("p", 1, "h1"))) == [("w#1", "i0")]
    assert box(up("i1", version=0, weights_hash="other")) == []
    assert sent(box(up("i1", version=0))) == [("v#1", "i1")]


def test_a_result_of_another_version_or_content_is_a_failure_of_the_infrastructure():
    for wrong in (ok("v#1", version=1), ok("v#1", weights_hash="h9"), ok("v#1", version=-1)):
        box = Box(up("i0"), up("i1"))
        box(ready("v"))
        assert box(wrong) == []
        (send,) = box.at(0.1)
        assert (send.attempt, send.reason) == (2, "retry_elsewhere")


def test_request_failures_are_tried_elsewhere_at_once_up_to_their_bound():
    box = Box(up("i0"), up("i1"))
    (first,) = box(ready("v"))
    (second,) = box(bad("v#1", infra=False))
    assert second.instance_id != first.instance_id
    assert second.reason == "retry_elsewhere"
    (fail,) = box(bad("v#2", infra=False))
    assert isinstance(fail, Fail)
    assert (fail.vertex_id, fail.attempt, fail.reason) == ("v", 2, "INTERNAL")
    assert "max_attempts = 2" in fail.message


def test_the_same_instance_is_tried_again_when_it_is_the_only_one():
    box = Box(up("i0"))
    box(ready("v"))
    assert box(bad("v#1", infra=False)) == [Send("v#2", "v", 2, "i0", 0, "retry_same")]


def test_infrastructure_failures_pause_and_have_their_own_bound():
    box = Box(up("i0"))
    box(ready("v"))
    assert box(bad("v#1", infra=True)) == []
    assert sent(box.at(0.05)) == [("v#2", "i0")]
    assert sent(box(bad("v#2", infra=False))) == [("v#3", "i0")]
    assert box(bad("v#3", infra=True)) == []
    assert box.timer == pytest.approx(0.15)
    assert sent(box.at(0.16)) == [("v#4", "i0")]
    (fail,) = box(bad("v#4", infra=True))
    assert "infra_attempts = 3" in fail.message
    assert box(bad("v#4", infra=True)) == [Duplicate("v#4")]


def test_stale_failures_change_nothing():
    box = Box(up("i0"))
    box(ready("v"))
    box(bad("v#1", infra=False))
    assert box(bad("v#1", infra=False)) == [Duplicate("v#1")]
    assert box(bad("nobody#1", infra=True)) == [Duplicate("nobody#1")]
    assert box(ok("v#9")) == [Duplicate("v#9")]


def test_a_lost_instance_gives_its_vertices_back_at_once():
    box = Box(up("i0", capacity=2))
    box(ready("v"))
    box(ready("w"))
    assert box(gone("i0")) == []
    assert box.core.book("p").num_waiting == 2
    assert sent(box(up("i1", capacity=2))) == [("v#2", "i1"), ("w#2", "i1")]
    assert box(gone("unheard-of")) == []


def test_losing_instances_for_ever_ends_by_the_bound():
    box = Box()
    box(ready("v", infra_attempts=2))
    box(up("i0"))
    box(gone("i0"))
    box(up("i0"))
    (fail,) = box(gone("i0"))
    assert (fail.vertex_id, fail.reason) == ("v", "CHILD_DIED")


def test_the_first_success_wins_even_of_an_attempt_given_up_for_lost():
    box = Box(up("i0"))
    box(ready("v"))
    box(gone("i0"))
    box(up("i1"))
    assert box(ok("v#1")) == [Abort("v#2", "i1"), Accept("v#1", "v", 1)]
    assert box(ok("v#2")) == [Duplicate("v#2")]
    # The slot of the aborted attempt is free again.
    assert sent(box(ready("w"))) == [("w#1", "i1")]


def test_a_late_success_of_a_waiting_vertex_wins():
    box = Box(up("i0"))
    box(ready("v"))
    box(gone("i0"))
    assert box(ok("v#1")) == [Accept("v#1", "v", 1)]
    assert box.core.book("p").num_waiting == 0


def test_a_paused_instance_takes_nothing_new_and_keeps_what_it_has():
    box = Box(up("i0", capacity=2))
    box(ready("v"))
    assert box(up("i0", capacity=2, use=InstanceUse.PAUSED)) == []
    assert box(ready("w")) == []
    assert box(ok("v#1")) == [Accept("v#1", "v", 1)]
    assert sent(box(up("i0", capacity=2))) == [("w#1", "i0")]


def test_cancelling():
    box = Box(up("i0"))
    box(ready("v"))
    box(ready("w"))
    box(ready("x"))
    assert box(VertexCancelled("w")) == []
    effects = box(VertexCancelled("v"))
    assert effects == [Abort("v#1", "i0"), Send("x#1", "x", 1, "i0", 0, "least_loaded")]
    assert box(VertexCancelled("v")) == []
    assert box(ok("v#1")) == [Duplicate("v#1")]


def test_deadlines_end_vertices_and_say_where_they_were():
    box = Box(up("i0"))
    box(ready("running", timeout_s=5))
    box(ready("waiting", timeout_s=5))
    box(ready("paused", timeout_s=5, policy="q"))
    box(up("j0", policy="q"))
    box(bad("paused#1", infra=True))
    box.now = 4.0
    box(gone("j0", policy="q"))
    box(ready("alive", timeout_s=50))
    effects = box.at(5.0)
    fails = {e.vertex_id: e for e in effects if isinstance(e, Fail)}
    assert set(fails) == {"running", "waiting", "paused"}
    assert {f.reason for f in fails.values()} == {"DEADLINE_EXCEEDED"}
    assert "at instance i0" in fails["running"].message
    assert "waiting for an instance" in fails["waiting"].message
    assert "policy 'q'" in fails["paused"].message
    assert Abort("running#1", "i0") in effects
    assert sent(effects) == [("alive#1", "i0")]


def test_a_deadline_while_pausing_before_the_next_try():
    box = Box(up("i0"))
    box(ready("v", timeout_s=0.04))
    box(bad("v#1", infra=True))
    (fail,) = box.at(0.04)
    assert "waiting to try again" in fail.message
    assert box.timer == pytest.approx(0.05)
    assert box.at(0.06) == []


def test_one_timer_is_set_for_the_earliest_time():
    core = Dispatcher(DispatchConfig(), Random(0))
    assert core.handle(ready("a", timeout_s=10), 0.0) == [SetTimer(10.0)]
    assert core.handle(ready("b", timeout_s=20), 0.0) == []
    assert core.handle(ready("c", timeout_s=5), 0.0) == [SetTimer(5.0)]
    assert core.handle(TimerFired(), 5.0)[1:] == [SetTimer(10.0)]
    core.handle(TimerFired(), 10.0)
    assert not [e for e in core.handle(TimerFired(), 20.0) if isinstance(e, SetTimer)]


def test_forgotten_versions_serve_nothing():
    box = Box(up("i0"))
    box(ready("v"))
    box(WeightsKnown("p", 5, "h5", forget_below=4))
    box(ok("v#1"))
    assert box(ready("w", version=0)) == []
    assert sent(box(up("i0", version=5, weights_hash="h5"))) == []
    assert sent(box(ready("x", version=5))) == [("x#1", "i0")]


def test_a_retry_in_the_meantime_served_elsewhere_is_not_queued_twice():
    box = Box(up("i0"))
    box(ready("v"))
    box(bad("v#1", infra=True))
    box(ok("v#1"))  # it came after all
    assert box.at(0.2) == []


def test_an_avoided_instance_is_put_back_when_another_is_free():
    box = Box(up("i0", capacity=9), up("i1", capacity=9))
    box(ready("heavy", prompt=500))
    heavy_at = next(n for n in ("i0", "i1") if box.core.num_at(n))
    light = "i1" if heavy_at == "i0" else "i0"
    box(ready("v", prompt=1))
    assert box.core.num_at(light) == 1
    (send,) = box(bad("v#1", infra=False))
    assert send.instance_id == heavy_at
    assert sent(box(ready("w", prompt=1)))[0][1] == light


def test_many_cancels_do_not_pile_up():
    box = Box()
    for n in range(1000):
        box(ready(f"v{n}"))
        if n != 500:
            box(VertexCancelled(f"v{n}"))
    core = box.core
    assert len(core._assignment._queues._heaps[("p", 0)]) < 200
    assert len(core._timers) < 200
    box(up("i0"))
    for n in range(1000):
        box(up("i0", capacity=2 + n % 2))
    assert len(core._pool._free[("p", 0)]) < 200


def test_attempt_ids():
    assert split_attempt_id("b0-g0-s0/0.1:0#12") == ("b0-g0-s0/0.1:0", 12)
    for wrong in ("v", "v#", "v#x"):
        with pytest.raises(ValueError, match="attempt"):
            split_attempt_id(wrong)

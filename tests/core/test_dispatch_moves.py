"""Handing requests over, prefix affinity, the order of ready vertices, requests that kill."""

from __future__ import annotations

import pytest
from core.dispatch_box import Box, bad, gone, ok, ready, sent, up

from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    AttemptAborted,
    Duplicate,
    Fail,
    InstanceChanged,
    InstanceUse,
    InstanceVacating,
    Keep,
    SampleEnded,
    Send,
    Vacated,
    VertexCancelled,
)
from flexmarl.core.errors import ErrorReason


def aborted(attempt: str, *, tokens: int = 2, version: int = 0, weights_hash: str = "h0"):
    return AttemptAborted(attempt, version, weights_hash, tokens)


def died(attempt: str):
    return bad(attempt, infra=True, reason=ErrorReason.CHILD_DIED)


# Moves.


def test_a_vacated_instance_hands_its_requests_over_with_their_tokens():
    box = Box(up("i0", capacity=2))
    box(ready("v"))
    box(ready("w"))
    assert box(InstanceVacating("i0")) == [Abort("v#1", "i0"), Abort("w#1", "i0")]
    assert box(ready("x")) == []  # it takes nothing new
    assert box(InstanceVacating("i0")) == []
    assert box(aborted("v#1", tokens=3)) == [Keep("v#1", "v")]
    assert box(ok("w#1")) == [Vacated("i0"), Accept("w#1", "w", 1)]  # it was just ready
    effects = box(up("i1", capacity=9))
    assert [(e.attempt_id, e.num_kept, e.reason) for e in effects] == [
        ("v#2", 3, "least_loaded"), ("x#1", 0, "least_loaded"),
    ]  # fmt: skip
    # It moves on once more, then ends; the first instance serves another policy by now.
    assert sent(box(up("i0", policy="q", weights_hash="h0"))) == []
    box(InstanceVacating("i1"))
    box(aborted("v#2", tokens=1))
    (send,) = [e for e in box(up("i2", capacity=9)) if e.vertex_id == "v"]
    assert (send.attempt, send.num_kept) == (3, 4)
    assert Accept("v#3", "v", 3) in box(ok("v#3"))


def test_an_idle_instance_is_vacated_at_once_and_an_unknown_one_never():
    box = Box(up("i0"))
    assert box(InstanceVacating("i0")) == [Vacated("i0")]
    assert box(InstanceVacating("nobody")) == []
    # Until its policies change, whatever its host says of it.
    box(up("i0"))
    assert box(ready("v", policy="p")) == []
    assert box(ready("w", policy="q")) == []
    assert sent(box(up("i0", policy="q"))) == [("w#1", "i0")]


@pytest.mark.parametrize(
    "given_back",
    [aborted("v#1", tokens=0), aborted("v#1", version=-1), aborted("v#1", weights_hash="h9")],
)
def test_what_the_weights_of_the_version_did_not_draw_is_not_kept(given_back):
    box = Box(up("i0"), up("i1"))
    (first,) = box(ready("v"))
    box(InstanceVacating(first.instance_id))
    (vacated, again) = box(given_back)
    assert vacated == Vacated(first.instance_id)
    assert (again.num_kept, again.attempt) == (0, 2)


def test_a_request_that_depends_on_all_of_its_response_starts_from_nothing():
    box = Box(up("i0"), up("i1"))
    (first,) = box(ready("v", resumable=False))
    box(InstanceVacating(first.instance_id))
    (_, again) = box(aborted("v#1", tokens=3))
    assert (again.attempt, again.num_kept) == (2, 0)
    assert box(ok("v#2"))[0] == Accept("v#2", "v", 2)


def test_moves_count_as_no_failure():
    box = Box(up("i0"), up("i1"))
    (send,) = box(ready("v", max_tokens=9, max_attempts=1, infra_attempts=1))
    for n in range(1, 6):
        box(InstanceVacating(send.instance_id))
        (*_, send) = box(aborted(f"v#{n}", tokens=1))
        assert send.num_kept == n
        other = "i0" if send.instance_id == "i1" else "i1"
        box(up(other, policy="q"))
        box(up(other))
    assert box(ok("v#6"))[0] == Accept("v#6", "v", 6)


def test_after_a_failure_kept_tokens_are_given_up_and_late_ends_are_no_results():
    box = Box(up("i0"), up("i1"))
    (first,) = box(ready("v"))
    box(InstanceVacating(first.instance_id))
    (*_, second) = box(aborted("v#1", tokens=3))
    assert second.num_kept == 3
    box(gone(second.instance_id))
    (third,) = box(up("i2"))
    assert (third.attempt, third.num_kept) == (3, 0)
    # v#2 is only the end of a response whose beginning was given up.
    assert box(ok("v#2")) == [Duplicate("v#2")]
    assert box(ok("v#3"))[0] == Accept("v#3", "v", 3)


def test_an_instance_that_gives_nothing_back_is_not_waited_for():
    box = Box(up("i0"), up("i1"), handover_s=5.0)
    (first,) = box(ready("v"))
    box(InstanceVacating(first.instance_id))
    effects = box.at(5.0)
    assert effects[0] == Vacated(first.instance_id)
    assert (effects[1].attempt, effects[1].num_kept) == (2, 0)
    # What it gives back later is too late; a whole result is not.
    assert box(aborted("v#1", tokens=3)) == [Duplicate("v#1")]
    assert box(ok("v#1"))[-1] == Accept("v#1", "v", 1)


def test_a_handover_that_ended_is_not_timed_out():
    box = Box(up("i0"), up("i1"), handover_s=5.0)
    (first,) = box(ready("v"))
    box(InstanceVacating(first.instance_id))
    box(aborted("v#1"))
    assert box.at(5.0) == []
    assert box(ok("v#2"))[0] == Accept("v#2", "v", 2)


def test_an_instance_that_dies_while_it_is_vacated_is_vacated():
    box = Box(up("i0", capacity=2), up("i1", capacity=2))
    (first,) = box(ready("v"))
    box(InstanceVacating(first.instance_id))
    effects = box(gone(first.instance_id))
    assert effects[0] == Vacated(first.instance_id)
    assert (effects[1].attempt, effects[1].num_kept) == (2, 0)


def test_a_vertex_that_is_cut_while_it_leaves_is_not_aborted_twice():
    box = Box(up("i0"))
    box(ready("v"))
    box(InstanceVacating("i0"))
    assert box(VertexCancelled("v")) == [Vacated("i0")]
    assert box(aborted("v#1")) == [Duplicate("v#1")]


def test_an_abort_that_nobody_asked_for_is_a_failure_of_the_infrastructure():
    box = Box(up("i0"))
    box(ready("v"))
    assert box(aborted("v#1")) == []
    (send,) = box.at(0.05)
    assert (send.attempt, send.num_kept) == (2, 0)
    assert box(aborted("nobody#1")) == [Duplicate("nobody#1")]


# Order.


def test_in_a_group_the_longest_remaining_path_goes_first():
    box = Box(up("i0"))
    for name, agent, upstream in (("p0", "plan", ()), ("w0", "write", ("p0",))):
        box(ready(name, agent=agent, sample="s", upstream=upstream))
        box(ok(f"{name}#1", tokens=100))
    box(SampleEnded("s", whole=True))
    box(ready("busy"))
    box(ready("w1", agent="write"))
    box(ready("p1", agent="plan"))
    box(ready("p2", agent="plan", group=1))
    box(ready("w2", agent="write", group=0))
    order = []
    running = "busy#1"
    while running:
        sends = sent(box(ok(running)))
        running = sends[0][0] if sends else ""
        order.append(running)
    # The plan has the write before it; the older group goes before both.
    assert order[:4] == ["p1#1", "w1#1", "w2#1", "p2#1"]


def test_a_short_path_that_has_waited_goes_before_a_longer_one():
    box = Box(up("i0"), ageing_tokens_per_s=20.0)
    box(ready("busy"))
    box(ready("short", max_tokens=5))
    box.now = 9.0
    box(ready("long", max_tokens=100))  # 95 tokens more, but 180 younger
    assert sent(box(ok("busy#1"))) == [("short#1", "i0")]


# Prefixes.


def test_a_prompt_goes_where_its_prefix_is_within_a_margin_of_load():
    box = Box(up("i0", capacity=8), up("i1", capacity=8), prefix_margin_tokens=250)
    (first,) = box(ready("v", prompt=200, prefix=(1, 2, 3)))
    (second,) = box(ready("w", prompt=200, prefix=(1, 2)))
    assert (second.instance_id, second.reason) == (first.instance_id, "prefix")
    # 128 of its 205 tokens are computed already: that is all that it adds.
    assert box.core.load_at(first.instance_id) == 205 + 205 - 128
    # Now the other is further behind than the margin.
    (third,) = box(ready("x", prompt=200, prefix=(1, 2)))
    assert (third.instance_id != first.instance_id, third.reason) == (True, "least_loaded")
    assert box.core.load_at("nobody") == 0


def test_a_holder_that_is_full_or_least_loaded_or_serves_no_more():
    box = Box(up("i0", capacity=1), up("i1", capacity=9), prefix_margin_tokens=9999)
    sends = [box(ready(f"v{n}", prefix=(n,), prompt=99))[0] for n in range(2)]
    held = {send.instance_id: n for n, send in enumerate(sends)}
    (send,) = box(ready("full", prefix=(held["i0"],)))
    assert (send.instance_id, send.reason) == ("i1", "least_loaded")
    box(ok(f"v{held['i0']}#1"))
    # By now the other one has computed it, too, and later.
    (send,) = box(ready("free", prefix=(held["i0"],)))
    assert (send.instance_id, send.reason) == ("i1", "prefix")
    box(up("i1", capacity=9, version=1, weights_hash="h1"))
    (send,) = box(ready("moved", prefix=(held["i1"],)))
    assert (send.instance_id, send.reason) == ("i0", "least_loaded")


# Requests that kill.


def test_a_request_under_which_instances_keep_dying_gets_one_for_itself():
    box = Box(up("i0", capacity=4), suspect_deaths=2, poison_deaths=2)
    box(ready("bad", infra_attempts=20))
    box(ready("good", infra_attempts=20))
    for n in (1, 2):
        box(died(f"bad#{n}"))
        box(died(f"good#{n}"))
        box.at(box.now + 5.0)
    # Both are suspects now: one after the other, alone.
    assert [box.core.num_at("i0"), box.core.book("p").num_waiting] == [1, 1]
    assert box(ready("other")) == []
    (running,) = box.core.attempts_at({"i0"})
    second = "good" if running.startswith("bad") else "bad"
    # The next suspect lets those go first that have waited, then waits for them.
    assert sent(box(ok(running))) == [("other#1", "i0")]
    assert box(ready("late")) == []
    (_, send) = box(ok("other#1"))
    assert (send.attempt_id, send.reason) == (f"{second}#3", "suspect_alone")
    # It dies: while it pauses, others have their turn.
    assert sent(box(died(f"{second}#3"))) == [("late#1", "i0")]
    assert box.at(box.now + 5.0) == []
    assert sent(box(ok("late#1"))) == [(f"{second}#4", "i0")]


def test_what_ends_instances_that_it_has_for_itself_fails_and_says_so():
    box = Box(up("i0", capacity=4), suspect_deaths=1, poison_deaths=2)
    box(ready("bad", infra_attempts=20))
    box(died("bad#1"))
    for n in (2, 3):
        (send,) = box.at(box.now + 5.0)
        assert send.reason == "suspect_alone"
        effects = box(died(f"bad#{n}"))
    (fail,) = effects
    assert isinstance(fail, Fail)
    assert "3 instances died under this request, 2 of which it had for itself" in fail.message


def test_a_suspect_waits_for_an_instance_to_empty_while_others_go_elsewhere():
    box = Box(up("i0", capacity=2), up("i1", capacity=2), suspect_deaths=1)
    (first,) = box(ready("bad"))
    box(ready("busy0"))
    box(ready("busy1"))
    box(ready("busy2"))
    box(died("bad#1"))
    box(ready("more"))
    # One instance has one request less: that is the one which it waits for.
    before = box.core.book("p").num_waiting
    effects = box.at(0.05)
    assert effects == []
    assert box.core.book("p").num_waiting == before + 1
    assert first.instance_id in ("i0", "i1")
    done = []
    for _ in range(9):
        running = [a for a in box.core.attempts_at({"i0", "i1"}) if not a.startswith("bad")]
        done += [e for e in box(ok(running[0])) if isinstance(e, Send)]
        if any(send.vertex_id == "bad" for send in done):
            break
    (alone,) = [send for send in done if send.vertex_id == "bad"]
    assert alone.reason == "suspect_alone"
    assert box.core.attempts_at({alone.instance_id}) == ["bad#2"]


def test_a_reserved_instance_that_goes_or_changes_is_replaced():
    box = Box(up("i0", capacity=2), suspect_deaths=1)
    box(ready("bad"))
    box(ready("busy"))
    box(died("bad#1"))
    box.at(0.05)  # waits for i0 to empty
    assert box(ready("x")) == []
    assert sent(box(up("i1", capacity=2))) == [("x#1", "i1")]
    # It is i0 that it waits for; when that one pauses, it takes the next.
    box(up("i0", capacity=2, use=InstanceUse.PAUSED))
    assert sent(box(ok("x#1"))) == [("bad#2", "i1")]


def test_a_suspect_that_is_cut_frees_what_it_reserved():
    box = Box(up("i0", capacity=2), suspect_deaths=1)
    box(ready("bad"))
    box(ready("busy"))
    box(died("bad#1"))
    box.at(0.05)
    assert box(ready("x")) == []
    assert sent(box(VertexCancelled("bad"))) == [("x#1", "i0")]
    assert box.core.book("p").num_waiting == 0


def test_a_suspect_without_any_instance_waits():
    box = Box(up("i0"), suspect_deaths=1)
    box(ready("bad"))
    assert box(gone("i0")) == []
    assert sent(box(up("i1"))) == [("bad#2", "i1")]


def test_a_suspect_whose_instance_shall_move_takes_another_one_at_once():
    box = Box(up("i0"), up("i1", capacity=2), suspect_deaths=1)
    box(ready("busy"))
    box(ready("bad"))
    bad_at = next(n for n in ("i0", "i1") if "bad#1" in box.core.attempts_at([n]))
    other = {"i0": "i1", "i1": "i0"}[bad_at]
    box(gone(bad_at))  # bad reserves the other one, and waits for busy to end
    assert sent(box(up("i2"))) == []
    effects = box(InstanceVacating(other))
    assert sent(effects) == [("bad#2", "i2")]


def test_room_that_a_policy_leaves_at_a_shared_instance_goes_to_another_policy():
    # I2: q's vertex waits for capacity alone, whoever had it.
    shared = InstanceChanged(
        instance_id="i0", policies=("p", "q"), use=InstanceUse.SERVING, capacity=1, version=0,
        weights_hash="h0",
    )  # fmt: skip
    box = Box(shared)
    box(ready("a"))
    assert sent(box(ready("b", policy="q"))) == []
    assert sent(box(ok("a#1"))) == [("b#1", "i0")]


def test_tokens_that_leave_nothing_to_draw_are_not_gone_on_from():
    # No engine draws a response of no tokens, and it would be told that the request is at fault.
    box = Box(up("i0"), up("i1", use=InstanceUse.PAUSED), ready("v", max_tokens=4))
    box(InstanceVacating("i0"))
    assert box(aborted("v#1", tokens=4)) == [Vacated("i0")]
    (send,) = box(up("i1"))
    assert (send.attempt_id, send.num_kept) == ("v#2", 0)

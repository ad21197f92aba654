"""A dispatcher after another one: calls are attached to what hosts hold, and not sent again."""

from __future__ import annotations

import pytest
from core.dispatch_box import Box, bad, gone, ok, ready, sent, up

from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    Attach,
    AttemptAborted,
    AttemptsHeld,
    Duplicate,
    Hold,
    InstanceUse,
    InstanceVacating,
    Release,
    SampleEnded,
    Send,
    Vacated,
    VertexDetached,
    WeightsKnown,
)
from flexmarl.core.dispatch_events import HeldAttempt as Held


def held(attempt: str, *, at: str = "i0", version: int = 0, asked: bytes = b"x") -> AttemptsHeld:
    return AttemptsHeld((Held(attempt, at, version, asked),))


def test_a_result_that_waits_is_accepted_when_its_vertex_is_ready():
    box = Box(up("i0"), held("s/v#2"))
    assert box.core.is_wanted("s/v#2")
    assert not box.core.is_wanted("s/v#1")
    assert box(ok("s/v#2")) == [Hold("s/v#2")]
    assert box(ok("s/v#2")) == [Hold("s/v#2")]  # told again after a reconnect
    assert box(ready("s/v", sample="s", input_hash=b"x")) == [
        Attach("s/v#2", "s/v", 2, "i0"), Accept("s/v#2", "s/v", 2),
    ]  # fmt: skip
    assert box(ok("s/v#2")) == [Duplicate("s/v#2")]
    assert box.core.book("p").num_running == 0


def test_an_attempt_in_progress_is_waited_for_and_counts_at_its_instance():
    box = Box(up("i0"), held("s/v#1"))
    assert box(ready("s/v", input_hash=b"x")) == [Attach("s/v#1", "s/v", 1, "i0")]
    assert (box.core.num_at("i0"), box.core.book("p").num_running) == (1, 1)
    assert box(ready("w")) == []  # the instance is full
    effects = box(ok("s/v#1"))
    assert effects[0] == Accept("s/v#1", "s/v", 1)
    assert sent(effects) == [("w#1", "i0")]


def test_an_attached_attempt_that_fails_is_tried_again_under_the_next_number():
    box = Box(up("i0"), held("s/v#4"))
    box(ready("s/v", input_hash=b"x", max_attempts=2))
    assert sent(box(bad("s/v#4", infra=False))) == [("s/v#5", "i0")]


def test_of_several_attempts_what_has_ended_goes_before_the_newest():
    box = Box(up("i0", capacity=3), held("s/v#1"), held("s/v#2"), held("s/v#3"), held("s/w#1"))
    box(ok("s/v#1"))
    assert box(ready("s/v", input_hash=b"x")) == [
        Release("s/v#3", "i0"), Release("s/v#2", "i0"),
        Attach("s/v#1", "s/v", 1, "i0"), Accept("s/v#1", "s/v", 1),
    ]  # fmt: skip
    assert box.core.attempts_at({"i0", "i9"}) == ["s/w#1"]
    box(held("s/w#2"))
    assert box(ready("s/w", input_hash=b"x")) == [
        Release("s/w#1", "i0"), Attach("s/w#2", "s/w", 2, "i0"),
    ]  # fmt: skip
    assert box(ok("s/w#1")) == [Duplicate("s/w#1")]


@pytest.mark.parametrize(
    "other",
    [
        held("s/v#1", asked=b"y"),
        held("s/v#1", version=1),
        held("s/v#1", at="i9"),
        held("s/v#1", at="j0"),
    ],
)
def test_an_attempt_that_was_asked_something_else_or_has_no_instance_is_let_go(other):
    box = Box(up("i0"), up("j0", policy="q"), other)
    (release, send) = box(ready("s/v", input_hash=b"x"))
    assert release == Release("s/v#1", other.attempts[0].instance_id)
    # Its number is not given again: what comes late of it is no result.
    assert (send.attempt_id, send.instance_id) == ("s/v#2", "i0")
    assert box(ok("s/v#1")) == [Duplicate("s/v#1")]
    assert box(ok("s/v#2"))[0] == Accept("s/v#2", "s/v", 2)


def test_a_result_of_other_weights_is_let_go():
    box = Box(up("i0"), held("s/v#1"))
    box(ok("s/v#1", weights_hash="h9"))
    (release, send) = box(ready("s/v", input_hash=b"x"))
    assert (release, type(send)) == (Release("s/v#1", "i0"), Send)


def test_an_instance_that_shall_serve_another_policy_is_not_attached_to():
    box = Box(up("i0"), up("i1"), held("s/v#1"))
    assert box(InstanceVacating("i0")) == [Vacated("i0")]
    (release, send) = box(ready("s/v", input_hash=b"x"))
    assert (release, sent([send])) == (Release("s/v#1", "i0"), [("s/v#2", "i1")])


def test_what_is_lost_or_failed_is_sent_like_any_other():
    box = Box(up("i0"), held("s/v#1"), held("s/w#1"), held("s/x#1"), held("s/y#1", at="i1"))
    assert box(bad("s/v#1", infra=True)) == [Duplicate("s/v#1")]
    box(ok("s/w#1"))
    assert box.core.attempts_at({"i0"}) == ["s/x#1"]
    assert box(gone("i0")) == []  # with what it had not ended; a result in hand stays
    assert box(gone("i1")) == []
    assert [box.core.is_wanted(f"s/{v}#1") for v in "vwxy"] == [False, True, False, False]
    box(up("i2"))
    (_, accept) = box(ready("s/w", input_hash=b"x"))
    assert accept == Accept("s/w#1", "s/w", 1)
    assert sent(box(ready("s/v", input_hash=b"x"))) == [("s/v#1", "i2")]


def test_what_nobody_will_ask_for_is_let_go():
    box = Box(up("i0"), held("s/v#1"), held("s/w#1"), held("t/v#1"), held("u/v#1", version=2))
    box(ok("s/v#1"))
    assert box(SampleEnded("s", whole=True)) == [Release("s/v#1", "i0"), Release("s/w#1", "i0")]
    assert box(WeightsKnown("p", 2, "h2", 1)) == [Release("t/v#1", "i0")]
    assert box.core.is_wanted("u/v#1")


def test_what_is_asked_for_already_or_held_already_is_not_held_anew():
    box = Box(up("i0"), ready("s/v"))
    box(held("s/v#1"))
    assert box(ok("s/v#1"))[0] == Accept("s/v#1", "s/v", 1)
    box(held("s/w#1"))
    box(ok("s/w#1"))
    box(held("s/w#1"))  # its result is not forgotten
    (_, accept) = box(ready("s/w", input_hash=b"x"))
    assert accept == Accept("s/w#1", "s/w", 1)


def test_a_paused_instance_goes_on_with_what_it_had():
    box = Box(up("i0", use=InstanceUse.PAUSED), held("s/v#1"))
    assert box(ready("s/v", input_hash=b"x")) == [Attach("s/v#1", "s/v", 1, "i0")]
    assert box(ok("s/v#1"))[0] == Accept("s/v#1", "s/v", 1)


def test_a_call_whose_worker_died_is_attached_again():
    box = Box(up("i0", capacity=2))
    box(ready("s/v", input_hash=b"x"))
    box(ready("s/w", input_hash=b"x"))
    assert box(VertexDetached("s/v")) == []
    assert box(VertexDetached("s/w")) == []
    assert box(VertexDetached("s/gone")) == []
    assert box.core.book("p").num_running == 0
    assert box(ok("s/v#1")) == [Hold("s/v#1")]
    assert box(ready("s/v", input_hash=b"x"))[-1] == Accept("s/v#1", "s/v", 1)
    assert box(ready("s/w", input_hash=b"x")) == [Attach("s/w#1", "s/w", 1, "i0")]


def test_a_call_that_waits_or_has_half_its_tokens_elsewhere_starts_anew_after_its_worker_died():
    box = Box(up("i0"), up("i1"))
    (first,) = box(ready("s/v"))
    box(InstanceVacating(first.instance_id))
    box(AttemptAborted("s/v#1", 0, "h0", 2))
    assert [type(e) for e in box(VertexDetached("s/v"))] == [Abort]
    assert not box.core.is_wanted("s/v#2")
    (again,) = box(ready("s/v"))
    box(ready("s/w"))
    assert box(VertexDetached("s/w")) == []
    assert not box.core.is_wanted("s/w#1")
    assert again.attempt == 1


def test_a_result_to_what_an_attempt_of_its_name_was_asked_before_is_no_result():
    # A worker died before its call had an attempt that could be held, and asks otherwise now; its
    # host still has an attempt of that name.
    box = Box(up("i0"), ready("s/0:0", input_hash=b"new"))
    old = ok("s/0:0#1")._replace(input_hash=b"old")
    assert sent(box(old)) == []
    assert sent(box.at(1.0)) == [("s/0:0#2", "i0")]
    new = ok("s/0:0#2")._replace(input_hash=b"new")
    assert box(new) == [Accept("s/0:0#2", "s/0:0", 2)]


def test_a_held_attempt_is_answered_only_by_what_it_was_asked():
    box = Box(up("i0"), held("s/0:0#1", asked=b"asked"))
    other = ok("s/0:0#1")._replace(input_hash=b"other")
    assert box(other) == [Duplicate("s/0:0#1")]
    assert box(ok("s/0:0#1")._replace(input_hash=b"asked")) == [Hold("s/0:0#1")]


def test_tokens_for_another_prompt_are_not_gone_on_from():
    box = Box(up("i0"), ready("s/0:0", input_hash=b"new"), InstanceVacating("i0"))
    given = AttemptAborted("s/0:0#1", 0, "h0", 3, b"old")
    assert box(given) == [Vacated("i0")]
    assert box(up("i1"))[0].num_kept == 0


def test_a_held_success_is_kept_when_another_attempt_of_its_name_fails():
    # Two dispatchers before this one died, each of which had sent it to a host of its own.
    box = Box(up("i0"), held("s/v#1"))
    assert box(ok("s/v#1")) == [Hold("s/v#1")]
    assert box(bad("s/v#1", infra=True)) == [Duplicate("s/v#1")]
    effects = box(ready("s/v", input_hash=b"x"))
    assert effects == [Attach("s/v#1", "s/v", 1, "i0"), Accept("s/v#1", "s/v", 1)]

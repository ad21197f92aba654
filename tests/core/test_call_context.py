"""Deadlines and ids that travel with a call."""

from contextvars import copy_context

import pytest

from flexmarl.core.call_context import (
    bind_ids,
    current_deadline,
    current_ids,
    decode_ids,
    detached_context,
    encode_ids,
    onward_timeout_s,
    reset_ids,
    set_deadline,
)


@pytest.fixture(autouse=True)
def _own_context():
    set_deadline(None)
    reset_ids()
    yield
    set_deadline(None)
    reset_ids()


@pytest.mark.parametrize(
    ("deadline", "default_s", "expected_s"),
    [
        (None, 10.0, 10.0),
        (None, None, None),
        (105.0, 10.0, 4.5),
        (105.0, 2.0, 2.0),
        (105.0, None, 4.5),
        (100.2, 10.0, 0.0),  # less is left than the margin
        (90.0, None, 0.0),
    ],
)
def test_onward_timeout_is_the_smaller_of_default_and_what_is_left(deadline, default_s, expected_s):
    set_deadline(deadline)
    assert onward_timeout_s(default_s, now=100.0, margin_s=0.5) == expected_s


def test_detached_work_keeps_the_ids_and_drops_the_deadline():
    set_deadline(1.0)
    bind_ids(run="r1")
    context = detached_context()
    assert context.run(current_deadline) is None
    assert context.run(current_ids) == {"run": "r1"}
    assert current_deadline() == 1.0


def test_ids_add_up_and_stay_in_their_context():
    bind_ids(run="r1")
    inner = copy_context()
    inner.run(bind_ids, batch="3")
    assert inner.run(current_ids) == {"run": "r1", "batch": "3"}
    assert current_ids() == {"run": "r1"}


def test_ids_survive_the_wire():
    ids = {"vertex": "s0/1.2", "run": "r1", "unknown": "stays at home"}
    assert encode_ids(ids) == "run=r1;vertex=s0/1.2"
    assert decode_ids(encode_ids(ids)) == {"run": "r1", "vertex": "s0/1.2"}


@pytest.mark.parametrize("text", ["", "run", "run=", "=x", "evil=1", ";;"])
def test_malformed_ids_are_dropped(text):
    assert decode_ids(text) == {}

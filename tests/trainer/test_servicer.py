"""What a caller that waits is answered, and by when."""

from __future__ import annotations

from typing import Any, cast

import pytest

from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.trainer.operations import Operations
from flexmarl.trainer.servicer import Servicer
from flexmarl.trainer.trainer import Trainer


class Unfinished:
    """An operation that goes on; keeps how long it was waited for."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    async def wait(self, operation_id: str, *, timeout_s: float) -> trainer_pb2.Operation:
        self.waited_s.append(timeout_s)
        return trainer_pb2.Operation(operation_id=operation_id)


class Call:
    def __init__(self, left_s: float | None) -> None:
        self.left_s = left_s

    def time_remaining(self) -> float | None:
        return self.left_s


@pytest.mark.parametrize(("left_s", "longest_s"), [(10.0, 5.0), (0.0, 0.0), (None, 600.0)])
async def test_a_wait_leaves_its_answer_time_to_arrive(
    left_s: float | None, longest_s: float
) -> None:
    """On a crowded machine answers are late, and one after the deadline looks like none."""
    operations = Unfinished()
    servicer = Servicer()
    servicer.open(cast("Trainer", None), cast("Operations", operations))
    request = trainer_pb2.WaitOperationRequest(operation_id="o1")
    answer = await servicer.WaitOperation(request, cast("Any", Call(left_s)))
    assert not answer.operation.done
    assert operations.waited_s == [longest_s]

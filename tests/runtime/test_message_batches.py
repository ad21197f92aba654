"""What is too much for one message goes in several."""

from __future__ import annotations

from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.runtime.message_batches import batches


def test_batches_are_bounded_in_number_and_in_bytes_and_leave_nothing_out():
    sizes = [1, 1, 1, 1, 90, 10, 300, 1, 60, 60]
    specs = [SampleSpec(query_json=b"x" * size) for size in sizes]
    made = list(batches(iter(specs), max_items=3, max_bytes=110))
    assert [[len(spec.query_json) for spec in batch] for batch in made] == [
        [1, 1, 1], [1, 90, 10], [300], [1, 60], [60],
    ]  # fmt: skip
    assert list(batches([], max_items=3, max_bytes=110)) == []

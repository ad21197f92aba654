"""Which vertices are trained as one row."""

from __future__ import annotations

import pytest
from core.test_batch import batch, closure_of, end

from flexmarl.core.chains import chained, folded
from flexmarl.core.states import SampleStatus
from flexmarl.core.training_rows import Row, RowAdvantage

SAMPLE = "b000000a0-g0000-s000a0"


def row(name: str, length: int, extends: str = "", *, sample: str = SAMPLE) -> Row:
    return Row(
        vertex_id=f"{sample}/{name}",
        sample_id=sample,
        agent="talker",
        policy="p",
        path=name,
        num_prompt_tokens=length - 2,
        num_response_tokens=2,
        extends=f"{sample}/{extends}" if extends else "",
    )


def chains_of(*rows: Row) -> dict[str, str]:
    released = chained([RowAdvantage(row, 1.0, 0.5) for row in rows])
    return {
        item.row.path: item.row.merged_into.rpartition("/")[2]
        for item in released
        if item.row.merged_into
    }


THREE = [row("0:0", 4), row("0:1", 8, "0:0"), row("0:2", 12, "0:1")]
CASES = [
    ([row("0:0", 4), row("0:1", 9)], {}),
    (THREE, {"0:0": "0:2", "0:1": "0:2"}),
    # Two go on from the same turn: the longer has it, the other begins anew.
    ([row("0:0", 4), row("0:1", 8, "0:0"), row("0:2", 9, "0:0")], {"0:0": "0:2"}),
    ([*THREE, row("0:3", 11, "0:1")], {"0:0": "0:2", "0:1": "0:2"}),
    # Of equal ones the first.
    ([row("0:0", 4), row("0:2", 8, "0:0"), row("0:1", 8, "0:0")], {"0:0": "0:1"}),
    # What is not released (it has no reward) is in no chain, and breaks one.
    ([row("0:0", 4), row("0:2", 12, "0:1")], {}),
]


@pytest.mark.parametrize(("rows", "chains"), CASES)
def test_chains(rows, chains) -> None:
    assert chains_of(*rows) == chains


def test_the_last_vertex_of_a_chain_stands_for_it() -> None:
    rows = [THREE[1], THREE[0], THREE[2], row("0:3", 5)]
    released = chained([RowAdvantage(item, 1.0, 0.5) for item in rows])
    chain, alone = folded(item.row for item in released)
    assert [vertex.path for vertex in chain.vertices] == ["0:0", "0:1", "0:2"]
    assert chain.num_tokens == 12
    assert alone.vertices == (alone,)
    assert folded([rows[0], rows[3]]) == [rows[0], rows[3]]


def test_a_closed_group_hands_each_chain_on_as_one_row() -> None:
    groups = batch(1, 2)
    ids = [end(groups, ordinal, SampleStatus.DONE) for ordinal in (0, 1)]
    rows = [
        row(name, length, extends, sample=str(sample_id))
        for sample_id in ids
        for name, length, extends in (("0:0", 4, ""), ("0:1", 8, "0:0"))
    ]
    closure = closure_of(groups, *rows)
    merged = {item.row.vertex_id: item.row.merged_into for item in closure.released}
    expected = {f"{i}/0:0": f"{i}/0:1" for i in ids} | {f"{i}/0:1": "" for i in ids}
    assert merged == expected
    assert [len(item.vertices) for item in groups.closed(closure)] == [2, 2]

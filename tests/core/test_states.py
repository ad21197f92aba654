import pytest

from flexmarl.core import states
from flexmarl.core.states import MicroBatchStatus, SegmentStatus, VersionStatus, VertexStatus


@pytest.mark.parametrize("machine", states.MACHINES, ids=lambda machine: machine.name)
def test_tables_are_total_and_every_state_reaches_an_end(machine):
    table, enum = machine.table, type(machine.start)
    assert set(table.moves) == set(enum)
    terminal = {state for state in enum if table.is_terminal(state)}
    assert terminal
    for start in enum:
        assert _reachable(table, start) & terminal
    assert _reachable(table, machine.start) == set(enum)


def _reachable(table, start):
    seen, frontier = {start}, [start]
    while frontier:
        for state in set(table.moves[frontier.pop()]) - seen:
            seen.add(state)
            frontier.append(state)
    return seen


def test_terminal_states_are_final():
    for state in VertexStatus:
        assert not states.VERTEX.allows(VertexStatus.DONE, state)
    assert states.VERTEX.allows(VertexStatus.RUNNING, VertexStatus.READY)


def test_what_is_consumed_is_never_handed_out_again():
    later = _reachable(states.MICRO_BATCH, MicroBatchStatus.CONSUMED)
    assert later == {MicroBatchStatus.CONSUMED, MicroBatchStatus.ROLLED_BACK}


def test_a_sealed_segment_is_never_written_again():
    assert SegmentStatus.WRITING not in _reachable(states.SEGMENT, SegmentStatus.SEALED)


def test_a_version_is_committed_only_after_its_sets_are_saved():
    before = [old for old in VersionStatus if states.VERSION.allows(old, VersionStatus.COMMITTED)]
    assert before == [VersionStatus.SAVED]

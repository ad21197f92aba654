import pytest

from flexmarl.core import states


@pytest.mark.parametrize(
    ("table", "enum"),
    [
        (states.VERTEX, states.VertexStatus),
        (states.SAMPLE, states.SampleStatus),
        (states.GROUP, states.GroupStatus),
        (states.RUN, states.RunStatus),
    ],
)
def test_tables_are_total_and_every_state_reaches_an_end(table, enum):
    assert set(table.moves) == set(enum)
    terminal = {state for state in enum if table.is_terminal(state)}
    assert terminal
    for start in enum:
        seen, frontier = {start}, [start]
        while frontier:
            for state in table.moves[frontier.pop()] - seen:
                seen.add(state)
                frontier.append(state)
        assert seen & terminal


def test_terminal_states_are_final():
    for state in states.VertexStatus:
        assert not states.VERTEX.allows(states.VertexStatus.DONE, state)
    assert states.VERTEX.allows(states.VertexStatus.RUNNING, states.VertexStatus.READY)

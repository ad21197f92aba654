import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.ids import (
    BatchId,
    GroupId,
    SampleId,
    VertexId,
    check_name,
    is_evaluation,
    micro_batch_id,
    parse_batch,
)

numbers = st.integers(min_value=0, max_value=10**7)


@given(numbers, numbers, st.booleans(), numbers, numbers, numbers)
def test_ids_read_back(batch, batch_attempt, evaluation, group, ordinal, attempt):
    batch_id = BatchId(batch, batch_attempt, evaluation)
    sample = SampleId(GroupId(batch_id, group), ordinal, attempt)
    assert is_evaluation(str(sample)) == evaluation
    assert SampleId.parse(str(sample)) == sample
    assert GroupId.parse(str(sample.group)) == sample.group
    vertex = VertexId(sample, "0.1:2")
    assert VertexId.parse(str(vertex)) == vertex
    assert parse_batch(str(vertex)) == sample.group.batch


def test_ids_sort_in_order_of_their_parts():
    ids = [str(GroupId(BatchId(b), g)) for b in range(12) for g in range(12)]
    assert ids == sorted(ids)


def test_micro_batch_id_names_batch_and_policy():
    text = micro_batch_id(BatchId(3, 1), ordinal=4, policy="sorter")
    assert text == "b000003a1-m0004-sorter"
    assert parse_batch(text) == BatchId(3, 1)


@pytest.mark.parametrize(
    "bad", ["", "x", "b1", "b000001a0", "b000001a0-g0001/../x", "b000001a0-g1"]
)
def test_bad_group_ids_are_refused(bad):
    with pytest.raises(ValueError, match="not a group id"):
        GroupId.parse(bad)


@pytest.mark.parametrize("bad", ["", "0", "0:", "0:0/..", "a:0", "0.1:-x", "0:a/b"])
def test_bad_paths_are_refused(bad):
    with pytest.raises(ValueError, match="not a path id"):
        VertexId(SampleId(GroupId(BatchId(0), 0), 0), bad)


def test_batch_of_foreign_text_is_refused():
    with pytest.raises(ValueError, match="not an id"):
        parse_batch("sample 3")


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a b", "x" * 65, "\ud800", "-a"])
def test_bad_names_are_refused(bad):
    with pytest.raises(ValueError, match="agent"):
        check_name(bad, what="agent")
    assert check_name("solver_2", what="agent") == "solver_2"

import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.placement import HostRoom, check_capacity, place


def test_fewer_places_than_policies_are_refused_with_the_arithmetic():
    with pytest.raises(DomainError) as info:
        check_capacity({"a": 1, "b": 2, "c": 1}, [HostRoom("h0", 1), HostRoom("h1", 1)])
    assert info.value.reason is ErrorReason.NOT_ENOUGH_INSTANCES
    assert "3 policies (a, b, c)" in info.value.message
    assert "1 (h0) + 1 (h1) = 2" in info.value.message


@pytest.mark.parametrize("hosts", [[], [HostRoom("h0", 0)], [HostRoom("h0", 2)]])
def test_enough_or_unknown_room_is_accepted(hosts):
    check_capacity({"a": 5, "b": 1}, hosts)


def test_every_policy_gets_its_first_instance_before_any_gets_its_second():
    placed = place({"a": 3, "b": 1}, [HostRoom("h0", 3)], {})
    assert placed == {"a-0": "h0", "b-0": "h0", "a-1": "h0"}


def test_instances_spread_over_hosts_and_stay_where_they_are():
    hosts = [HostRoom("h0", 0), HostRoom("h1", 0)]
    placed = place({"a": 2, "b": 2}, hosts, {})
    assert sorted(placed.values()) == ["h0", "h0", "h1", "h1"]
    assert place({"a": 2, "b": 2}, hosts, placed) == placed
    alone = place({"a": 2, "b": 2}, [HostRoom("h1", 0)], placed)
    assert set(alone.values()) == {"h1"}


def test_without_hosts_or_policies_nothing_is_placed():
    assert place({"a": 1}, [], {}) == {}
    assert place({}, [HostRoom("h0", 1)], {}) == {}

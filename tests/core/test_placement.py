import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.placement import HostRoom, check_capacity, instance_id, place


def test_fewer_places_than_policies_are_refused_with_the_arithmetic():
    with pytest.raises(DomainError) as info:
        check_capacity({"a": 1, "b": 2, "c": 1}, [HostRoom("h0", 1), HostRoom("h1", 1)])
    assert info.value.reason is ErrorReason.NOT_ENOUGH_INSTANCES
    assert "3 policies (a, b, c)" in info.value.message
    assert "1 (h0) + 1 (h1) = 2" in info.value.message


@pytest.mark.parametrize("hosts", [[], [HostRoom("h0", 0)], [HostRoom("h0", 2)]])
def test_enough_or_unknown_room_is_accepted(hosts):
    check_capacity({"a": 5, "b": 1}, hosts)


def instances(**numbers: int) -> dict[str, str]:
    return {
        instance_id(policy, n): policy for policy, number in numbers.items() for n in range(number)
    }


def test_every_policy_gets_its_first_instance_before_any_gets_its_second():
    placed = place(instances(a=3, b=1), [HostRoom("h0", 3)], {})
    assert placed == {"a-0": "h0", "b-0": "h0", "a-1": "h0"}


def test_instances_spread_over_hosts_and_stay_where_they_are():
    hosts = [HostRoom("h0", 0), HostRoom("h1", 0)]
    placed = place(instances(a=2, b=2), hosts, {})
    assert sorted(placed.values()) == ["h0", "h0", "h1", "h1"]
    assert place(instances(a=2, b=2), hosts, placed) == placed
    alone = place(instances(a=2, b=2), [HostRoom("h1", 0)], placed)
    assert set(alone.values()) == {"h1"}


def test_without_hosts_or_policies_nothing_is_placed():
    assert place(instances(a=1), [], {}) == {}
    assert place({}, [HostRoom("h0", 1)], {}) == {}


def test_a_moved_instance_counts_for_the_policy_that_it_serves():
    assigned = {"a-0": "a", "a-1": "b", "b-0": "b"}
    running = {"a-0": "h0", "a-1": "h0", "b-0": "gone"}
    # Room for two: b keeps the instance that runs, not the one that was its first.
    assert place(assigned, [HostRoom("h0", 2)], running) == {"a-0": "h0", "a-1": "h0"}


def test_instances_are_ordered_by_number():
    placed = place(instances(a=11), [HostRoom("h0", 10)], {})
    assert "a-10" not in placed

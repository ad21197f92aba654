from __future__ import annotations

import pytest

from flexmarl.core.errors import DomainError
from flexmarl.core.process_groups import (
    GroupBook,
    check_meeting_place,
    check_part,
    numbers_of_members,
)


def test_a_group_keeps_its_name_while_it_is_kept() -> None:
    book = GroupBook(max_groups=2)
    first = book.meet(["0g1", "1g1"])
    other = book.meet(["1g1", "0g1"])
    assert first != other
    assert book.meet(["0g1", "1g1"]) == first
    assert set(book.kept) == {first, other}


def test_the_group_used_longest_ago_is_given_up_and_made_anew_under_another_name() -> None:
    book = GroupBook(max_groups=2)
    first, second = book.meet(["0", "1"]), book.meet(["0", "2"])
    book.meet(["0", "1"])
    third = book.meet(["1", "2"])
    assert set(book.kept) == {first, third}
    again = book.meet(["0", "2"])
    assert again not in (first, second, third)


def test_groups_of_a_process_that_is_gone_are_forgotten() -> None:
    book = GroupBook(max_groups=4)
    first = book.meet(["0", "1"])
    other = book.meet(["2", "3"])
    book.forget("1")
    assert book.kept == (other,)
    assert book.meet(["0", "1"]) != first


def test_members_of_other_trainers_have_numbers_above_all_positions() -> None:
    assert numbers_of_members([3, 1], first_rank=0, world_size=2) == (3, 1)
    assert numbers_of_members([0], first_rank=0, world_size=3) == (0, 513, 514)
    assert numbers_of_members([0, 1], first_rank=1, world_size=3) == (512, 0, 1)


@pytest.mark.parametrize(
    ("first_rank", "num_slots", "world_size"), [(1, 0, 2), (1, 2, 2), (0, 1, 513)]
)
def test_what_is_no_part_of_a_group_is_refused(
    first_rank: int, num_slots: int, world_size: int
) -> None:
    check_part(first_rank=1, num_slots=1, world_size=2)
    with pytest.raises(DomainError, match="no part of a group"):
        check_part(first_rank=first_rank, num_slots=num_slots, world_size=world_size)


def test_ranks_of_other_hosts_must_be_able_to_reach_the_rendezvous() -> None:
    check_meeting_place("127.0.0.1", peers=[])
    check_meeting_place("127.0.0.1", peers=["127.0.0.1:7004"])
    check_meeting_place("10.0.0.1", peers=["10.0.0.2:7004"])
    with pytest.raises(DomainError, match=r"10\.0\.0\.2:7004 cannot meet at 127\.0\.0\.1"):
        check_meeting_place("127.0.0.1", peers=["127.0.0.1:7004", "10.0.0.2:7004"])

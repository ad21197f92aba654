from __future__ import annotations

from flexmarl.core.process_groups import GroupBook


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

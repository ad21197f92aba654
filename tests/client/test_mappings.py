"""Kept mappings follow the file, not its name, and let removed files go."""

from __future__ import annotations

import os

import pytest

from flexmarl.client.mappings import KeptMappings


@pytest.fixture
def mappings():
    kept = KeptMappings(max_bytes=10_000)
    yield kept
    kept.close()


def make(path, size=4096):
    path.write_bytes(bytes(size))
    return path


def test_renamed_file_has_its_old_mapping(mappings, tmp_path):
    first = mappings.map(make(tmp_path / "a"))
    mappings.keep(first)
    (tmp_path / "a").rename(tmp_path / "b")
    again = mappings.map(tmp_path / "b")
    assert again is first
    again.map[0] = 7
    assert (tmp_path / "b").read_bytes()[0] == 7
    assert mappings.map(tmp_path / "b") is not first  # it is in use


def test_cut_file_is_mapped_anew(mappings, tmp_path):
    first = mappings.map(make(tmp_path / "a"))
    mappings.keep(first)
    os.truncate(tmp_path / "a", 100)
    assert len(mappings.map(tmp_path / "a").map) == 100


def test_removed_files_and_what_is_too_much_are_let_go(mappings, tmp_path):
    removed = mappings.map(make(tmp_path / "a"))
    mappings.keep(removed)
    (tmp_path / "a").unlink()
    others = [mappings.map(make(tmp_path / name)) for name in "bcd"]
    assert removed.map.closed
    for kept in others:
        mappings.keep(kept)
    assert [kept.map.closed for kept in others] == [True, False, False]


@pytest.mark.parametrize("size", [4096, 20_000], ids=["kept", "too-large"])
def test_view_in_use_is_left_alone(mappings, tmp_path, size):
    kept = mappings.map(make(tmp_path / "a", size))
    whole = memoryview(kept.map)
    part = whole[10:20]
    whole.release()
    assert not mappings.keep(kept)
    assert bytes(part) == bytes(10)
    part.release()
    again = mappings.map(tmp_path / "a")
    assert again is not kept
    assert mappings.keep(again)


def test_one_that_only_reads_needs_no_leave_to_write(tmp_path):
    make(tmp_path / "a").chmod(0o400)
    kept = KeptMappings(writable=False)
    mapped = kept.map(tmp_path / "a")
    with pytest.raises(TypeError):
        mapped.map[0] = 7
    kept.keep(mapped)
    assert kept.map(tmp_path / "a") is mapped
    kept.close()


def test_the_number_of_open_files_is_bounded(tmp_path):
    kept = KeptMappings(max_files=2)
    mapped = [kept.map(make(tmp_path / name)) for name in "abc"]
    for one in mapped:
        kept.keep(one)
    assert [one.map.closed for one in mapped] == [True, False, False]
    kept.close()
    assert all(one.map.closed for one in mapped)


def test_two_users_at_once_leave_one_mapping(mappings, tmp_path):
    path = make(tmp_path / "a")
    first, second = mappings.map(path), mappings.map(path)
    assert first is not second
    mappings.keep(first)
    mappings.keep(second)
    assert second.map.closed
    assert mappings.map(path) is first


def test_what_cannot_be_mapped_leaves_no_file_open(mappings, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="empty"):
        mappings.map(tmp_path / "empty")
    assert len(os.listdir("/proc/self/fd")) == before


def test_populated_pages_are_those_of_the_file(mappings, tmp_path):
    path = make(tmp_path / "a", 5 << 20)
    content = os.urandom(3 << 20)
    kept = mappings.map(path)
    kept.populate(4097, len(content))
    kept.map[4097 : 4097 + len(content)] = content
    assert path.read_bytes()[4097 : 4097 + len(content)] == content
    kept.close()

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


def test_view_in_use_is_left_alone(mappings, tmp_path):
    kept = mappings.map(make(tmp_path / "a", 20_000))
    view = memoryview(kept.map)
    mappings.keep(kept)
    assert not kept.map.closed
    view.release()

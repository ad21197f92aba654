from __future__ import annotations

from itertools import pairwise
from random import Random

from flexmarl.core.arena import Arena, Region, aligned


def taken(arena: Arena[str], size: int) -> Region:
    region = arena.take(size)
    assert region is not None
    return region


def test_regions_are_aligned_and_side_by_side() -> None:
    arena: Arena[str] = Arena(size_bytes=256)
    assert [taken(arena, size) for size in (1, 64, 65)] == [
        Region(0, 64),
        Region(64, 64),
        Region(128, 128),
    ]
    assert arena.used_bytes == 256
    assert arena.take(1) is None


def test_what_is_kept_occupies_nothing_and_is_found_until_room_is_needed() -> None:
    arena: Arena[str] = Arena(size_bytes=192)
    for name in ("a", "b", "c"):
        arena.keep(taken(arena, 64), name)
    assert (arena.used_bytes, arena.kept) == (0, ("a", "b", "c"))
    b = arena.find("b")
    assert b == Region(64, 64)
    assert arena.find("b") is None
    assert taken(arena, 64) == Region(0, 64)
    assert arena.kept == ("c",)
    arena.keep(b, "c")
    assert arena.kept == ("c",)
    assert arena.take(192) is None, "the region above is used"
    assert arena.kept == ("c",), "what would not fit displaces nothing"
    assert taken(arena, 128) == Region(64, 128)
    assert arena.kept == ()


def test_a_gap_before_the_first_region_is_used() -> None:
    arena: Arena[str] = Arena(size_bytes=256)
    first, _ = taken(arena, 64), taken(arena, 64)
    arena.free(first)
    assert taken(arena, 128) == Region(128, 128)
    assert taken(arena, 10) == first


def test_regions_never_overlap() -> None:
    rng = Random(4)
    arena: Arena[int] = Arena(size_bytes=4096)
    used: list[Region] = []
    for step in range(2000):
        if used and rng.random() < 0.5:
            region = used.pop(rng.randrange(len(used)))
            if rng.random() < 0.5:
                arena.keep(region, step)
            else:
                arena.free(region)
        else:
            region = arena.find(rng.randrange(step + 1)) or arena.take(rng.randrange(1, 900))
            used += [] if region is None else [region]
        ordered = sorted(used, key=lambda r: r.offset)
        assert all(a.end <= b.offset for a, b in pairwise(ordered))
        assert all(r.end <= arena.size_bytes for r in ordered)
        assert arena.used_bytes == sum(aligned(r.size_bytes) for r in ordered)

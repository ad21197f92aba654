"""Layout and content hash of named buffers, and mapped segment files."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.client.buffers import (
    ALIGNMENT,
    DTYPE_BYTES,
    Buffer,
    BufferSpec,
    check_layout,
    content_hash,
    lay_out,
)
from flexmarl.client.segments import MappedSegment, hash_file

SPECS = st.lists(
    st.builds(
        BufferSpec,
        name=st.text("abc.", min_size=1, max_size=6),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    unique_by=lambda spec: spec.name,
    max_size=6,
)


def filled(spec: BufferSpec, byte: int = 7) -> Buffer:
    return Buffer(spec, memoryview(bytes([byte]) * spec.size_bytes))


@given(SPECS)
def test_layout_is_aligned_and_valid(specs):
    layout = lay_out(specs)
    check_layout(layout.buffers, size_bytes=layout.size_bytes)
    assert [b.name for b in layout.buffers] == [s.name for s in specs]
    assert all(b.offset % ALIGNMENT == 0 for b in layout.buffers)


def test_same_name_twice_and_unknown_type_are_refused():
    with pytest.raises(ValueError, match="same name"):
        lay_out([BufferSpec("a", "U8", (1,)), BufferSpec("a", "F32", (1,))])
    with pytest.raises(ValueError, match="Q9"):
        lay_out([BufferSpec("a", "Q9", (1,))])


def test_hash_is_the_documented_one():
    def prefixed(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    buffers = [filled(BufferSpec("b", "U8", (2,))), filled(BufferSpec("a", "F32", (1, 2)), 1)]
    expected = hashlib.sha256(
        b"".join(map(prefixed, (b"a", b"F32", b"1,2", b"\1" * 8, b"b", b"U8", b"2", b"\7\7")))
    )
    assert content_hash(buffers) == f"sha256:{expected.hexdigest()}"
    assert content_hash(reversed(buffers)) == content_hash(buffers)


@pytest.mark.parametrize(
    "other",
    [
        filled(BufferSpec("b", "U8", (4,))),
        filled(BufferSpec("a", "I8", (4,))),
        filled(BufferSpec("a", "U8", (2, 2))),
        filled(BufferSpec("a", "U8", (4,)), 8),
    ],
    ids=["name", "dtype", "shape", "bytes"],
)
def test_hash_covers_everything(other):
    assert content_hash([other]) != content_hash([filled(BufferSpec("a", "U8", (4,)))])


def test_mapped_file_is_shared_and_closes_only_when_unused(tmp_path):
    layout = lay_out([BufferSpec("a", "U8", (100,)), BufferSpec("b", "F64", ())])
    path = tmp_path / "segment"
    path.write_bytes(bytes(layout.size_bytes))
    writer = MappedSegment(path, layout.buffers, writable=True)
    reader = MappedSegment(path, layout.buffers)
    writer.buffers["a"].data[3] = 9
    assert reader.buffers["a"].data[3] == 9
    assert hash_file(path, layout.buffers) == reader.content_hash() == writer.content_hash()
    view = memoryview(reader.buffers["a"].data)
    assert not reader.close()
    assert view[3] == 9
    assert writer.close()

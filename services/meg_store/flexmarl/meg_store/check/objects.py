"""Objects and segments: content against checksums, references against counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.segments import hash_file
from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.opened import OpenStore
from flexmarl.meg_store.objects import ObjectRecord, piece_key
from flexmarl.meg_store.segment_record import Segment


def check_run_objects(store: OpenStore, run_id: str, object_keys: Iterable[str]) -> None:
    """Check that the objects that a run itself refers to are there."""
    for name in object_keys:
        store.report.expect(
            store.backend.get(Table.META, keys.join("object", name)) is not None,
            "reference",
            run_id,
            f"object {name} is missing",
        )


def check_objects(store: OpenStore, references: Counter[str]) -> None:
    """Check every object.

    Args:
        store: The store.
        references: How many rows and runs refer to each, by key.
    """
    report = store.report
    for key, value in store.scan(Table.META, "object"):
        report.checked["objects"] += 1
        where = f"object {key.decode().partition(chr(0))[2]}"
        record = report.read("object", where, ObjectRecord.decode, value)
        if record is None:
            continue
        expected = references[record.ref.key]
        report.expect(
            record.reference_count == expected,
            "count",
            where,
            f"{record.reference_count} references are counted, {expected} rows and runs refer",
        )
        digest, size_bytes = hashlib.sha256(), 0
        for index in range(record.num_pieces):
            piece = store.backend.get(Table.BLOBS, piece_key(record.upload, index))
            if piece is None:
                report.add("object", where, f"piece {index} of {record.num_pieces} is missing")
                break
            digest.update(piece)
            size_bytes += len(piece)
        else:
            report.expect(
                (size_bytes, f"sha256:{digest.hexdigest()}")
                == (record.ref.size_bytes, record.ref.checksum),
                "object",
                where,
                f"its {size_bytes} bytes are not those that were stored",
            )


def check_segments(store: OpenStore) -> None:
    """Check every sealed segment whose file is there; one of the memory tier may be lost.

    The folder's own `segments` stand for those of the disk tier: a snapshot has copies there.
    """
    report = store.report
    for key, value in store.scan(Table.META, "segment"):
        where = f"segment {key.decode().partition(chr(0))[2]}"
        segment = report.read("segment", where, Segment.decode, value)
        if segment is None or not segment.sealed:
            continue
        copy = store.folder / "segments" / segment.file.path.name
        path = copy if copy.exists() else segment.file.path
        if not path.exists():
            report.checked["segments not here"] += 1
            report.expect(
                segment.view.tier != pb.SEGMENT_TIER_DISK, "segment", where, f"{path} is missing"
            )
            continue
        report.checked["segments"] += 1
        expected = segment.view.object.checksum
        size_bytes = path.stat().st_size
        if size_bytes != segment.view.object.size_bytes:
            report.add("segment", where, f"{path} has {size_bytes} bytes")
        elif expected.startswith("sha256:"):
            report.expect(
                hash_file(path, list(segment.view.buffers)) == expected,
                "segment",
                where,
                f"{path} does not have the checksum {expected}",
            )

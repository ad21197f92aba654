"""WriteGraph as the store reads it: the data columns of vertices stay the bytes that came.

On the wire a message and a string of bytes are the same, so a class that declares `payload` as
bytes reads the contract's requests, and what is only checked and stored is never made again. The
class is built from the contract's own descriptors, so that no field can differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store import vertex_checks as checks
from flexmarl.meg_store.rows import encode_meta

_PACKAGE: Final = "flexmarl.meg_store.written"

_SLICE: Final = 128 << 10
"""What is checked in one go, in bytes: less than a millisecond's work."""

_ROW: Final = 2 << 10
"""What a row costs apart from its bytes, in bytes."""


class WrittenVertex(Protocol):
    """A `Vertex` whose payload was not decoded."""

    @property
    def meta(self) -> graph_pb2.VertexMeta:
        """Meta columns."""
        ...

    @property
    def payload(self) -> bytes:
        """The serialised `VertexPayload`."""
        ...

    def HasField(self, field_name: str) -> bool:  # noqa: N802 - of protobuf
        """Whether a field was sent."""
        ...


class WrittenGraph(Protocol):
    """A `WriteGraphRequest` whose payloads were not decoded."""

    request_id: str
    run_id: str
    term: int
    groups: Sequence[graph_pb2.Group]
    vertices: Sequence[WrittenVertex]
    samples: Sequence[graph_pb2.Sample]


class CheckedVertex(NamedTuple):
    """A vertex that may be written, as far as it says itself.

    Attributes:
        vertex_id: Its id.
        key: Of its row.
        meta: Its meta columns.
        columns: These as they are stored.
        payload: Its data columns as they are stored; None: it came without.
        objects: Keys of the objects that it refers to.
    """

    vertex_id: str
    key: bytes
    meta: graph_pb2.VertexMeta
    columns: bytes
    payload: bytes | None
    objects: Sequence[str]


class CheckedVertices:
    """The vertices of a call, checked before anything is decided over them, some at a time.

    Args:
        run_id: Their run.
        vertices: As they came.
        declared: Types of the run's declared columns.
    """

    def __init__(
        self, run_id: str, vertices: Iterable[WrittenVertex], declared: Mapping[str, int]
    ) -> None:
        self._run_id = run_id
        self._vertices = iter(vertices)
        self._checked: list[CheckedVertex] = []
        self._refused: Exception | None = None
        self.declared = declared

    def in_slices(self) -> Iterator[None]:
        """Check; pauses between any two slices for others to run, and refuses nothing yet."""
        while self._check_some():
            yield

    def all(self) -> list[CheckedVertex]:
        """All of them; those that were not checked yet are.

        Raises:
            DomainError: INVALID_ARGUMENT, MESSAGE_TOO_LARGE.
            ValueError: An id or a value is malformed.
        """
        for _ in self.in_slices():
            pass
        if self._refused is not None:
            raise self._refused
        return self._checked

    def _check_some(self) -> bool:
        """Returns whether more are left."""
        left = _SLICE
        try:
            for vertex in self._vertices:
                checked = _check(self._run_id, vertex, self.declared)
                self._checked.append(checked)
                left -= _ROW + len(checked.payload or b"")
                if left <= 0:
                    return True
        except (DomainError, ValueError) as error:
            self._refused = error
            self._vertices = iter(())
        return False


def _check(run_id: str, vertex: WrittenVertex, declared: Mapping[str, int]) -> CheckedVertex:
    meta = vertex.meta
    checks.check_meta(meta)
    payload = vertex.payload if vertex.HasField("payload") else None
    objects = checks.check_payload(meta, _decoded(payload), declared)
    vertex_id = meta.vertex_id
    columns = encode_meta(meta)
    checks.check_size(vertex_id, len(columns), checks.MAX_META_BYTES)
    checks.check_size(vertex_id, len(payload or b""), checks.MAX_PAYLOAD_BYTES)
    key = keys.row(run_id, meta.agent, vertex_id)
    return CheckedVertex(vertex_id, key, meta, columns, payload, objects)


def _decoded(payload: bytes | None) -> graph_pb2.VertexPayload | None:
    if payload is None:
        return None
    try:
        return graph_pb2.VertexPayload.FromString(payload)
    except DecodeError:
        raise malformed() from None


def malformed() -> DomainError:
    """The refusal of bytes that are not the message that they should be."""
    return DomainError(
        ErrorReason.INVALID_ARGUMENT, "the request is not a valid message: is all text UTF-8?"
    )


def _request_class() -> type[Message]:
    """The class behind `WrittenGraph`."""
    file = descriptor_pb2.FileDescriptorProto(
        name="flexmarl/meg_store/written.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[graph_pb2.DESCRIPTOR.name, pb.DESCRIPTOR.name],
    )
    vertex = _copied(file, graph_pb2.Vertex.DESCRIPTOR)
    payload = next(field for field in vertex.field if field.name == "payload")
    payload.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    payload.ClearField("type_name")
    # A message has presence, bytes have it when they are optional.
    payload.proto3_optional = True
    payload.oneof_index = len(vertex.oneof_decl)
    vertex.oneof_decl.add(name="_payload")
    request = _copied(file, pb.WriteGraphRequest.DESCRIPTOR)
    vertices = next(field for field in request.field if field.name == "vertices")
    vertices.type_name = f".{_PACKAGE}.{vertex.name}"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindMessageTypeByName(f"{_PACKAGE}.{request.name}")
    return message_factory.GetMessageClass(found)


def _copied(
    file: descriptor_pb2.FileDescriptorProto, message: Descriptor
) -> descriptor_pb2.DescriptorProto:
    copy = file.message_type.add()
    message.CopyToProto(copy)
    return copy


WRITTEN_GRAPH: Final = _request_class()
"""Reads requests of WriteGraph as `WrittenGraph`."""
